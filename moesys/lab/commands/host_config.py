"""``--from``: a training as another framework declares it, read as a ``ModelRun``.

It is a command line, or a file with one, such as a shell script: of Megatron-LM (``pretrain_gpt.py --num-layers ...``),
or of torchtitan (``-m torchtitan.train --module ... --config ...``), whose own code then makes the configuration. Or it
is a YAML or JSON file: of Megatron-Bridge, with the names of ``TransformerConfig``, or of a trainer of transformers,
with ``model_name_or_path`` and the names of ``TrainingArguments``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from moesys.config import ModelShape, ModelSpec, presets
from moesys.config.experiment import Experiment
from moesys.config.model import DenseMlp, Gqa, LayerSpec, Mla, MoeMlp
from moesys.config.model_run import ModelRun, Parallelism
from moesys.config.workload import Generated
from moesys.lab.runs.declarations import cluster_of
from moesys.lab.show.sheets import Column, Sheet
from moesys.tuner.space import Space, default_space
from moesys.tuner.tuned_workload import Setting

_TITAN = "torchtitan.train"
_RANKS = ("nproc-per-node", "nnodes")
# Options of torchtitan without which its experts do not run under a strategy.
_TITAN_NEEDS = ("--parallelism.spmd_backend partial_dtensor", "--training.disable_cuda_graphs")


# Options of Megatron-LM by the names that Megatron-Bridge has for them, and whether their meaning is reversed.
_BRIDGE = {
    "num-moe-experts": ("num-experts", False),
    "gated-linear-unit": ("swiglu", False),
    "add-bias-linear": ("disable-bias-linear", True),
    "share-embeddings-and-output-weights": ("untie-embeddings-and-output-weights", True),
    "virtual-pipeline-model-parallel-size": ("num-virtual-stages-per-pipeline-rank", False),
}
# Trainers on top of transformers have these names for the length of a sequence.
_LENGTHS = ("max-length", "max-seq-length", "cutoff-len", "sequence-len", "model-max-length")


@dataclass(frozen=True)
class HostField:
    """A row: a field of a simulated run, and where its value is from."""

    field: Annotated[str, Column("field", align="left", kept=True)]
    value: Annotated[str, Column("value", align="left", kept=True)]
    source: Annotated[str, Column("read from", align="left", wraps=True, kept=True)]


@dataclass
class HostConfig:
    """The options of a command or of a file by name, with their values, and what was read of them.

    command: the words of the command. fields: those of a ``ModelRun``. rows: where they are from. unread: names of
    options that no field is from. shown: names as a file has them. accumulation: micro-batches of each rank, if that is
    what the host declares.
    """

    command: list[str]
    host: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    rows: list[HostField] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    values: dict[str, list[str]] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    accumulation: int | None = None

    def named(self, option: str) -> str:
        return self.shown.get(option, f"--{option}" if self.command else option.replace("-", "_"))

    def word(self, name: str, option: str, default: Any = None) -> str:
        """Returns the value of an option, or the default, which is then shown as assumed. Raises ValueError if there is
        neither.
        """
        self.unread.discard(option)
        given = self.values.get(option)
        if not given and default is None:
            raise ValueError(f"{self.host} is given no value of {self.named(option)}, which says {name}; add it")
        shown = self.named(option)
        word, source = (given[0], shown) if given else (str(default), f"assumed: there is no {shown}")
        self.rows.append(HostField(name, word, source))
        return word

    def number(self, name: str, option: str, default: int | None = None) -> int:
        word = self.word(name, option, default)
        if not word.isdigit():
            raise ValueError(f"{self.named(option)} is {word!r}, and {name} is a whole number; write its digits")
        return int(word)

    def flag(self, name: str, option: str) -> bool:
        self.unread.discard(option)
        given = option in self.values
        source = f"{'' if given else 'there is no '}{self.named(option)}"
        self.rows.append(HostField(name, str(given).lower(), source))
        return given

    def run_on(self, cluster: str | None, **fields: Any) -> ModelRun:
        """Returns the declared run. Raises ValueError for a cluster with other ranks than the command starts."""
        if cluster is None:
            raise ValueError("--from needs a cluster to run on; give --cluster, as in --cluster h100:4")
        found, started = cluster_of(cluster), [self.values.get(name, [""])[0] for name in _RANKS]
        if all(map(str.isdigit, started)) and int(started[0]) * int(started[1]) != found.num_ranks:
            raise ValueError(
                f"cluster={cluster!r} has {found.num_ranks} ranks, and the command starts {started[1]} nodes of "
                f"{started[0]}; give a cluster of these"
            )
        if self.accumulation is not None:
            self.fields["global_batch"] = self.accumulation * self.fields["micro_batch"] * found.num_ranks
        return ModelRun.model_validate({"cluster": found, **self.fields, **fields})

    def sheet(self) -> Sheet:
        """Returns the table of what was read."""
        names = ", ".join(self.named(name) for name in sorted(self.unread))
        notes = [f"Not read, and so not simulated: {names}."] if names else []
        return Sheet(f"Read from what is given to {self.host}", self.rows, notes)

    def experiment(self, cluster: str | None, skew: float) -> tuple[Experiment, Space, int]:
        """Returns an experiment with the experts of one group of ranks, the strategies that the host can run, and the
        number of layers with experts that a rank has.
        """
        run = self.run_on(cluster)
        layers = -(-len(run.model.moe_layers) // run.parallelism.pp)
        workload = Generated(skew=skew, num_layers=min(layers, 2), tokens_per_rank=run.tokens_per_rank)
        setting = Setting(run.shape, run.expert_cluster, workload.num_layers, layers)
        space = default_space(setting, run.tokens_per_rank).root
        if "sharding.delay_reshard" in space:
            # Hosts keep the parameters, and take gradients from backward alone.
            space = {**space, "sharding.delay_reshard": (False,)}
        experiment = Experiment(
            name=f"from-{self.host.lower()}",
            model=run.shape,
            cluster=run.expert_cluster,
            workload=workload,
            strategies=(presets.ep(),),
            seeds=(0, 1, 2, 3),
        )
        return experiment, Space(space), layers

    def lines(self, strategy: Path) -> str:
        """Returns what makes the host run the strategy in a file: its own command, or lines of its program."""
        if self.host == "torchtitan":
            words = shlex.join(
                [*self.command, "--override.imports", f'moesys.torchtitan.experts={{"strategy": "{strategy}"}}']
            )
            return " ".join([words, *(each for each in _TITAN_NEEDS if each.split()[0] not in self.command)]) + "\n"
        if self.host == "transformers":
            return (
                "# The arguments stay. In the program, after the model is made and before the optimizer is:\n"
                "import moesys as ms\n\n"
                f"with open({str(strategy)!r}) as file:\n    strategy = ms.Strategy.from_toml(file.read())\n"
                "ms.parallelize(model, strategy)\n"
            )
        return (
            "# The command stays. In the program that it runs, where the specification of the model's layers is made:\n"
            "import moesys as ms\nfrom moesys.megatron import experts\n\n"
            f"with open({str(strategy)!r}) as file:\n    strategy = ms.Strategy.from_toml(file.read())\n"
            "transformer_layer_spec = experts(transformer_layer_spec, strategy)\n"
        )


def read_host(source: str) -> HostConfig:
    """Reads a command line, or the file that it is in. Raises ValueError, which names the option, for what is missing,
    is no number, or is not simulated.
    """
    # A command may be longer than the name of a file can be.
    path = Path(source if len(source) < 256 else "")
    text = path.read_text(encoding="utf-8") if path.is_file() else source
    found = _of_file(path, text) if path.suffix in (".yaml", ".yml", ".json") else _of_command(source, text)
    found.unread = found.values.keys() - set(_RANKS)
    if _TITAN in found.command:
        found.host, read = "torchtitan", _torchtitan
    elif "num-experts" in found.values:
        found.host, read = "Megatron", _megatron
    elif "model-name-or-path" in found.values:
        found.host, read = "transformers", _transformers
    else:
        raise ValueError(
            f"{source!r} has neither --num-experts, as commands of Megatron-LM have, nor {_TITAN}, nor "
            "model_name_or_path; give the command or the file that starts a training of an MoE model (of "
            "Megatron-Bridge the run_config.yaml of a checkpoint, as overrides have no model), or use --model"
        )
    found.fields = read(found)
    return found


def _of_command(source: str, text: str) -> HostConfig:
    text = re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text)
    for name, value in re.findall(r"""^\s*(?:export\s+)?(\w+)=("[^"\n]*"|[^\s("';]+)""", text, re.MULTILINE):
        text = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value.strip('"').replace("\\", r"\\"), text)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(
            f"{source!r} is no command line ({error}); give one in quotes, or the path of a script"
        ) from None
    # A script may have all options in one string.
    words = [each for word in words for each in (word.split() if re.search(r"\s--", word) else [word])]
    found, option = HostConfig(words), ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.removeprefix("--").partition("=")
            found.values[option := option.replace("_", "-")] = [value] if equals else []
        elif option and not re.fullmatch(r"\)|\w+=\(?.*", word):
            found.values[option].append(word)
    return found


def _of_file(path: Path, text: str) -> HostConfig:
    """Reads the leaves of a YAML or JSON file as options of a command."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(f"{str(path)!r} is read by pyyaml, which is not there ({error}); install it") from None
    found = HostConfig([])

    def add(content: Any) -> None:
        for name, value in content.items() if isinstance(content, dict) else ():
            option, reverse = _BRIDGE.get(name.replace("_", "-"), (name.replace("_", "-"), False))
            if name == "mixed_precision" and isinstance(value, str):
                # This is the name of a recipe, such as bf16_mixed.
                option, value = next((each for each in ("bf16", "fp16") if each in value), option), True
            if isinstance(value, dict):
                add(value)
            elif name.startswith("_"):
                # Bridge writes here how it makes the object.
                continue
            elif isinstance(value, bool) and value != reverse:
                found.values[option] = []
            elif value is not None and not isinstance(value, bool):
                found.values[option] = [str(value)]
            found.shown[option] = name

    try:
        # JSON is YAML too.
        add(yaml.safe_load(text))
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no YAML or JSON of options ({error}); correct it") from None
    return found


def _megatron(of: HostConfig) -> dict[str, Any]:
    """Returns what Megatron-LM's arguments declare. What is assumed is Megatron's default, but for the vocabulary."""
    for needed, why in (("swiglu", "MLPs have no gate"), ("disable-bias-linear", "experts have biases")):
        if not of.flag(needed, needed):
            raise ValueError(
                f"without {of.named(needed)} {why}, which --from does not simulate; change it, or use --model"
            )
    number, H, L = of.number, of.number("hidden_size", "hidden-size"), of.number("layers", "num-layers")
    heads, width = number("heads", "num-attention-heads"), number("width", "ffn-hidden-size", 4 * H * 2 // 3 // 64 * 64)
    attention: Gqa | Mla
    if of.flag("latent attention", "multi-latent-attention"):
        attention = Mla(
            num_heads=heads,
            q_lora_rank=number("q_lora_rank", "q-lora-rank", 0) or None,
            kv_lora_rank=number("kv_lora_rank", "kv-lora-rank", 32),
            qk_nope_head_dim=number("qk_nope_head_dim", "qk-head-dim", 128),
            qk_rope_head_dim=number("qk_rope_head_dim", "qk-pos-emb-head-dim", 64),
            v_head_dim=number("v_head_dim", "v-head-dim", 128),
        )
    else:
        # Megatron-LM has its own switch.
        grouped = not of.command or of.flag("grouped queries", "group-query-attention")
        kv_heads = number("heads of keys", "num-query-groups", None if of.command else heads) if grouped else heads
        attention = Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=number("head_dim", "kv-channels", H // heads))
    dtype: Any = "bfloat16" if of.flag("bfloat16", "bf16") else "float16" if of.flag("float16", "fp16") else "float32"
    shape = ModelShape(
        hidden_size=H,
        intermediate_size=number("width of experts", "moe-ffn-hidden-size", width),
        num_experts=number("num_experts", "num-experts"),
        top_k=number("top_k", "moe-router-topk", 2),
        dtype=dtype,
    )
    shared = number("width of shared experts", "moe-shared-expert-intermediate-size", 0)
    experts, dense = MoeMlp(shape=shape, shared_intermediate_size=shared or None), DenseMlp(intermediate_size=width)
    frequency = of.word("layers with experts", "moe-layer-freq", 1)
    parts = re.findall(r"\[([01,\s]+)\](?:\s*\*\s*(\d+))?", frequency)
    pattern = [each.strip() == "1" for part, times in parts for each in part.split(",") * int(times or 1)]
    if frequency.isdigit() and int(frequency):
        pattern = [layer % int(frequency) == 0 for layer in range(L)]
    if len(pattern) != L:
        raise ValueError(
            f"{of.named('moe-layer-freq')} is {frequency!r}, of {len(pattern)} layers, and there are {L}; give as many"
        )
    tp, pp = number("tp", "tensor-model-parallel-size", 1), number("pp", "pipeline-model-parallel-size", 1)
    if (etp := number("tensor parallelism of experts", "expert-tensor-parallel-size", tp)) != 1:
        raise ValueError(f"{of.named('expert-tensor-parallel-size')} is {etp}, and experts are never cut so; use 1")
    if not (vp := number("vp", "num-virtual-stages-per-pipeline-rank", 0)):
        in_part = number("layers of a part", "num-layers-per-virtual-pipeline-stage", -(-L // pp))
        vp = -(-L // pp) // max(1, in_part)
    parallelism = {
        "tp": tp,
        "cp": number("cp", "context-parallel-size", 1),
        "pp": pp,
        "vp": vp,
        "ep": number("ep", "expert-model-parallel-size", 1),
        "recompute": of.word("recompute", "recompute-granularity", "none"),
        "dense": "optimizer" if of.flag("sharded optimizer", "use-distributed-optimizer") else "replicated",
        "overlap_micro_batches": of.flag("overlap_micro_batches", "overlap-moe-expert-parallel-comm"),
    }
    if not (has_batch := "global-batch-size" in of.values):
        of.word("global_batch", "global-batch-size", "a micro-batch of each data-parallel rank")
    return {
        "model": ModelSpec(
            name="of the command",
            hidden_size=H,
            vocab_size=number("vocab_size", "vocab-size", 128_000),
            tied_embeddings=not of.flag("head of its own", "untie-embeddings-and-output-weights"),
            layers=tuple(LayerSpec(attention=attention, mlp=experts if each else dense) for each in pattern),
            dtype=dtype,
        ),
        "parallelism": Parallelism.model_validate(parallelism),
        "seq_len": number("seq_len", "seq-length"),
        "micro_batch": number("micro_batch", "micro-batch-size"),
        "global_batch": number("global_batch", "global-batch-size") if has_batch else None,
        "optimizer": of.word("optimizer", "optimizer", "adam"),
    }


def _transformers(of: HostConfig) -> dict[str, Any]:
    """Returns what ``TrainingArguments`` declare. What is assumed of them are their defaults."""
    length = next((name for name in _LENGTHS if name in of.values), _LENGTHS[0])
    recomputes = of.flag("recompute", "gradient-checkpointing")
    of.rows.append(HostField("dense", "full", "assumed: ms.parallelize shards all but experts by FSDP2"))
    of.accumulation = of.number("accumulation", "gradient-accumulation-steps", 1)
    return {
        "model": ModelSpec.from_config(of.word("model", "model-name-or-path")),
        "parallelism": Parallelism(dense="full", recompute="full" if recomputes else "none"),
        "seq_len": of.number("seq_len", length),
        "micro_batch": of.number("micro_batch", "per-device-train-batch-size", 8),
        "optimizer": "sgd" if of.word("optimizer", "optim", "adamw_torch") == "sgd" else "adam",
    }


def _torchtitan(of: HostConfig) -> dict[str, Any]:
    """Returns what torchtitan's configuration with the options of the command declares."""
    try:
        from torchtitan.config import ConfigManager
    except ImportError as error:
        raise ValueError(f"torchtitan, which makes its configuration, is not there ({error}); install it") from None
    config: Any = ConfigManager().parse_args(of.command[of.command.index(_TITAN) + 1 :])
    of.unread, model = set(), config.model_spec.model

    def read(name: str, where: str) -> Any:
        value = config
        for each in where.split("."):
            value = getattr(value, each)
        of.rows.append(HostField(name, str(value), where))
        return value

    kind = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    of.rows += [
        HostField("model", f"{len(model.layers)} layers, hidden size {model.dim}", "model_spec"),
        HostField("recompute", kind, "activation_checkpoint"),
        HostField("dense", "full", "assumed: all ranks shard dense parameters"),
    ]
    parallelism = {
        "tp": read("tp", "parallelism.tensor_parallel_degree"),
        "cp": read("cp", "parallelism.context_parallel_degree"),
        "pp": read("pp", "parallelism.pipeline_parallel_degree"),
        "ep": read("ep", "parallelism.expert_parallel_degree"),
        "recompute": {"FullAC": "full", "SelectiveAC": "selective"}.get(kind, "none"),
        "dense": "full",
    }
    global_batch = read("global_batch", "training.global_batch_size")
    return {
        "model": ModelSpec(
            name=config.model_spec.name,
            hidden_size=model.dim,
            vocab_size=model.vocab_size,
            tied_embeddings=model.enable_weight_tying,
            layers=tuple(map(_layer, model.layers)),
        ),
        "parallelism": Parallelism.model_validate(parallelism),
        "seq_len": read("seq_len", "training.seq_len"),
        "micro_batch": read("micro_batch", "training.local_batch_size"),
        "global_batch": global_batch if global_batch > 0 else None,
    }


def _layer(layer: Any) -> LayerSpec:
    of, heads = layer.attention, layer.attention.n_heads
    attention: Gqa | Mla
    if hasattr(of, "kv_lora_rank"):
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes = {name: getattr(of, name) for name in names}
        attention = Mla(num_heads=heads, q_lora_rank=of.q_lora_rank or None, **sizes)
    else:
        attention = Gqa(num_heads=heads, num_kv_heads=of.n_kv_heads or heads, head_dim=of.head_dim or of.dim // heads)
    if layer.moe is None:
        return LayerSpec(attention=attention, mlp=DenseMlp(intermediate_size=layer.feed_forward.w1.out_features))
    experts, shared = layer.moe.routed_experts.inner_experts, layer.moe.shared_experts
    shape = ModelShape(
        hidden_size=experts.dim,
        intermediate_size=experts.hidden_dim,
        num_experts=experts.num_experts,
        top_k=layer.moe.router.top_k,
    )
    width = None if shared is None else shared.w1.out_features
    return LayerSpec(attention=attention, mlp=MoeMlp(shape=shape, shared_intermediate_size=width))
