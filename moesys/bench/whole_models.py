"""``moesys bench models``: training steps of transformers' own models on local ranks, under strategies and under
transformers' own expert parallelism.

T tokens of a rank, H hidden, E experts, K top-k, L layers with experts.
"""

from __future__ import annotations

import importlib
import logging
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesys.balance.warm_up import warm_up
from moesys.bench.harness.bench_ranks import Ranks, joins, start_ranks
from moesys.bench.harness.contest import Case, Contestant, Outcome, hold, of_all_ranks, relative_difference
from moesys.bench.harness.names import chosen
from moesys.bench.harness.reports import Report, publish
from moesys.bench.harness.sheets import Column, Sheet
from moesys.bench.harness.steps import steps_told
from moesys.bench.harness.stopwatch import Spread, machine_line
from moesys.config import Ep, FlowSplit, Fsep, Greedy, Pipelined, Strategy
from moesys.hf.registration import register
from moesys.hf.routers import routers_of
from moesys.hf.routing_replay import replay_routing
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.slow_links.namespaces import namespace_name
from moesys.lab.slow_links.processor_shares import join, lacks_shares, processor_shares
from moesys.moe.experts import experts_of

THEIRS = "all_to_all"
E, K = 8, 2
LENGTH = 256
HIDDEN = 256
# Until the peak of memory stays where it is.
MEMORY_STEPS = 6
ROUTINGS = ("balanced", "skewed")
# Of popularity, the n-th expert's is 1 / n to this power.
ZIPF = 1.2
# Largest ‖a - b‖ / ‖b‖ of the loss and of any gradient from transformers' own at which a speed is shown.
TOLERANCE = 1e-5
_RANKS_TIMEOUT_S = 1800.0

_COMMON = {"vocab_size": 512, "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4}
_HEADS = {"num_key_value_heads": 2, "head_dim": 64}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64}
# What grows with the hidden size.
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")
# A config and a model of each family, in transformers' own names.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 512, "num_experts": E}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_COMMON, **_HEADS, "moe_intermediate_size": 512, "num_experts": E, "norm_topk_prob": True},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **(_COMMON | _LATENT),
            **{"num_key_value_heads": 4, "intermediate_size": 512, "moe_intermediate_size": 512},
            **{"n_routed_experts": E, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1},
        },
    ),
}


def strategies(num_ranks: int) -> list[Strategy]:
    """Returns those that are compared: with and without balance, with and without overlap."""
    spare = E // num_ranks + 2
    balanced: dict[str, Any] = {"balance": Greedy(), "split": FlowSplit()}
    ep = Strategy(name="ep")
    lent = Strategy(name="lent ep", sharding=Ep(slots_per_rank=spare), **balanced)
    return [
        ep,
        lent,
        lent.replace(name="lent ep, pipelined", overlap=Pipelined(chunks=2)),
        Strategy(name="fsep", sharding=Fsep(slots_per_rank=spare), **balanced),
    ]


@dataclass(frozen=True)
class Part:
    """A model of some hidden size, how its tokens are routed, and of how many sequences a rank's batch is."""

    model: str
    routing: str
    sequences: int
    hidden_size: int = HIDDEN


@dataclass(frozen=True)
class Row:
    """One way to run a model.

    samples_ms: the slowest rank's step, forward, backward and optimizer, by repetition; empty where it was wrong.
    theirs_ms: of transformers' own. max_over_mean: of the busiest rank's tokens, the mean over layers. peak_mib: the
    most memory that a rank's process had at once, where that was asked for; slots_mib: of experts in the slots that the
    strategy declares beyond a rank's own.
    """

    part: Annotated[str, Column("model")]
    routing: Annotated[str, Column("routing")]
    name: Annotated[str, Column("experts")]
    samples_ms: list[float]
    theirs_ms: list[float]
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")]
    peak_mib: Annotated[float | None, Column("peak MiB", ",.0f")]
    slots_mib: Annotated[float | None, Column("slots MiB", ",.0f")]
    wrong: Annotated[str, Column("wrong")]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ".0f", after="name")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def speed(self) -> Annotated[Spread | None, Column(f"{THEIRS} / this", after="step_ms")]:
        return Spread.of_ratios(self.theirs_ms, self.samples_ms) if self.samples_ms and self.theirs_ms else None


@dataclass(frozen=True)
class Setting:
    """Where parts are measured.

    share: of a processor, that each rank has, whether others compute or wait; None: what the system gives it, so that
    where ranks are more than processors, one computes faster while another waits.
    memory: whether peaks of memory are measured too, each contestant's on ranks of its own.
    """

    num_ranks: int = 2
    repeats: int = 9
    share: float | None = None
    memory: bool = False

    def __post_init__(self) -> None:
        if self.share is None:
            return
        if not 0.05 <= self.share <= 1:
            raise ValueError(f"share={self.share:g} of a processor a rank must be between 0.05 and 1, or left out")
        if joins():
            raise ValueError(f"share={self.share:g} is of local ranks; leave it out under torchrun")
        if reason := lacks_shares():
            raise ValueError(f"ranks cannot be given share={self.share:g} of a processor: {reason}")

    @property
    def line(self) -> str:
        """Says it, for notes."""
        share = "" if self.share is None else f", each with {self.share:g} of a processor"
        return f"{self.num_ranks} ranks of one thread{share}"


def select(model: str = "all", routing: str = "all", sequences: int = 8, hidden_size: int = HIDDEN) -> list[Part]:
    """Returns the parts of these names. Raises ValueError for a name that is not there."""
    models, ways = chosen("model", model, MODELS), chosen("routing", routing, ROUTINGS)
    return [Part(of, way, sequences, hidden_size) for of in models for way in ways]


def main(parts: Sequence[Part], setting: Setting, json_path: Path | None = None) -> int:
    """Measures, writes, prints; the exit code: 1 if a loss or a gradient was wrong."""
    rows = bench_models(parts, setting)
    machine = f"{machine_line(1, ('torch', 'transformers'))}; {setting.line}"
    notes = [
        machine,
        f"A step is forward, backward and AdamW on {parts[0].sequences} x {LENGTH} tokens a rank, in float32, of the "
        f"slowest rank; median of {setting.repeats} repetitions, in turns. {THEIRS}: transformers' own, with "
        "grouped_mm.",
        f"{THEIRS} / this: above 1 it is faster than transformers' own; median [p20, p80], paired.",
        f"Routing is replayed: balanced gives every expert as many tokens; skewed draws experts by 1 / n^{ZIPF}, the "
        "order of experts by layer.",
        f"A speed is shown where the loss and all gradients are transformers' own in the same run, to {TOLERANCE:g}.",
    ]
    if setting.memory:
        notes.append(
            f"peak MiB: resident memory of the largest rank over {MEMORY_STEPS} steps, in processes that train nothing "
            "else; moesys and its planners' machine code are loaded in all of them. slots MiB: of the slots that the "
            "strategy declares beyond the rank's own part of the experts."
        )
    title = "MEASURED: a training step of transformers' models, ms (median)"
    data = {"machine": machine, "num_ranks": setting.num_ranks, "share": setting.share, "rows": rows}
    without = () if setting.memory else ("peak_mib", "slots_mib")
    sheet = Sheet(title, rows, notes, "part", without=without)
    publish(Report("models", title, "measured", [sheet], data=data), json_path=json_path)
    return int(any(row.wrong for row in rows))


def bench_models(parts: Sequence[Part], setting: Setting) -> list[Row]:
    """Measures every part on local ranks."""
    rows = []
    with ExitStack() as opened, steps_told("models", len(parts)) as tell:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        ranks = _ranks(setting, opened)
        for part in parts:
            tell(f"{part.model}, {part.routing}")
            path = folder / part.model
            if not path.exists():
                _new_model(part).save_pretrained(path)
            outcomes = of_all_ranks(ranks.run(measure, part, path, setting.repeats, timeout_s=_RANKS_TIMEOUT_S))
            theirs_ms = outcomes[THEIRS].samples_ms.get("step", [])
            peaks_mib = _peaks_mib(part, path, setting.num_ranks) if setting.memory else {}
            contestants = _contestants(setting.num_ranks)
            slots_mib = {name: _slots_mib(part, each, setting.num_ranks) for name, each in contestants.items()}
            for name, outcome in outcomes.items():
                samples_ms, metrics = outcome.samples_ms.get("step", []), (outcome.metrics or [None])[0]
                numbers = (samples_ms, theirs_ms, metrics, peaks_mib.get(name), slots_mib[name])
                rows.append(Row(part.model, part.routing, name, *numbers, outcome.wrong))
    return rows


def _ranks(setting: Setting, opened: ExitStack) -> Ranks:
    """Returns ranks that end with ``opened``, each in its share of the processor."""
    groups: tuple[Path, ...] = ()
    if setting.share is not None:
        names = [namespace_name(f"rank{rank}") for rank in range(setting.num_ranks)]
        groups = opened.enter_context(processor_shares(names, setting.share))
    ranks, _ = start_ranks(setting.num_ranks)
    opened.enter_context(closing(ranks))
    if groups:
        ranks.run(_join_its_share, groups)
    return ranks


def _peaks_mib(part: Part, folder: Path, num_ranks: int) -> dict[str, float]:
    """Returns the peak of the largest rank by contestant, each in processes that nothing else has run in."""
    peaks_mib = {}
    for name, strategy in _contestants(num_ranks).items():
        with LocalRanks(num_ranks) as ranks:
            peaks_mib[name] = max(ranks.run(peak_mib, part, folder, strategy, timeout_s=_RANKS_TIMEOUT_S))
    return peaks_mib


def _slots_mib(part: Part, strategy: Strategy | None, num_ranks: int) -> float | None:
    """Returns what experts take in the slots beyond a rank's own: lent ones stay in all layers until backward, those
    that are put together of slices are there layer by layer.
    """
    if strategy is None:
        return None
    options, of_a_layer = MODELS[part.model][1], 3 * 2 * part.hidden_size**2 * 4 / 2**20
    match strategy.sharding:
        case Ep(slots_per_rank=None):
            return 0.0
        case Ep(slots_per_rank=int(slots)):
            layers = options["num_hidden_layers"] - options.get("first_k_dense_replace", 0)
            return (slots - E // num_ranks) * layers * of_a_layer
        case Fsep(slots_per_rank=int(slots)):
            return slots * of_a_layer
    raise AssertionError(strategy)


def _contestants(num_ranks: int) -> dict[str, Strategy | None]:
    return {THEIRS: None, **{each.name: each for each in strategies(num_ranks)}}


# --- on a rank --------------------------------------------------------------------------------------------------------


def _join_its_share(groups: Sequence[Path]) -> None:
    join(groups[dist.get_rank()])


def measure(part: Part, folder: Path, repeats: int) -> Mapping[str, Outcome]:
    """All contestants of ``part``, called on all ranks at once."""
    # Gradients are gathered once, to be compared, however many messages that takes.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    contestants = _contestants(dist.get_world_size())
    setups = {name: partial(_contestant, part, folder, strategy) for name, strategy in contestants.items()}
    return hold(Case(setups, _Agrees(), before=dist.barrier), repeats)


def peak_mib(part: Part, folder: Path, strategy: Strategy | None) -> float:
    """Most memory that this process has had, in MiB, after a few steps of one contestant; called on all ranks. Planners
    are loaded by all contestants, as their machine code takes the same for models of any size.
    """
    warm_up()
    step = _contestant(part, folder, strategy).works["step"]
    for _ in range(MEMORY_STEPS):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class _Agrees:
    """``Case.wrong``: results are those of the first contestant."""

    def __init__(self) -> None:
        self._expected: dict[str, Tensor] | None = None

    def __call__(self, name: str, results: dict[str, Tensor]) -> str:
        if self._expected is None:
            self._expected = results
        errors = {part: relative_difference(results[part], wanted) for part, wanted in self._expected.items()}
        worst = max(errors, key=lambda part: errors[part])
        return "" if errors[worst] <= TOLERANCE else f"{worst} differs from {THEIRS} by {errors[worst]:.1e}"


def _contestant(part: Part, folder: Path, strategy: Strategy | None) -> Contestant:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    num_ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens_BC = torch.randint(512, (part.sequences, LENGTH), generator=generator)
    name = THEIRS if strategy is None else register(strategy)
    sizes = DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=sizes, experts_implementation="grouped_mm", dtype=torch.float32
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    expert_LTK = _routing(part.routing, len(routers_of(model)), tokens_BC.numel())

    def backward() -> Tensor:
        with replay_routing(model, expert_LTK):
            loss: Tensor = model(input_ids=tokens_BC, labels=tokens_BC).loss
            loss.backward()
        return loss.detach()

    def results() -> dict[str, Tensor]:
        # Of the second pass, before which layouts settle.
        backward()
        optimizer.zero_grad()
        loss = backward()
        grads = {of: _whole(p.grad) for of, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        return {"loss": loss, **grads}

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    def max_over_mean() -> float | None:
        plans = [experts.last_plan for experts in experts_of(model)]
        return statistics.mean(plan.tokens.max_over_mean for plan in plans if plan) if plans else None

    return Contestant(results, {"step": step}, max_over_mean)


def _new_model(part: Part) -> Any:
    family, options = MODELS[part.model]
    options = options | {name: options[name] * part.hidden_size // HIDDEN for name in _WIDTHS if name in options}
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**options, num_experts_per_tok=K, max_position_embeddings=LENGTH)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def _routing(routing: str, num_layers: int, num_tokens: int) -> Tensor:
    """Returns this rank's experts [L, T, K]."""
    if routing == "balanced":
        return (torch.arange(num_tokens * K) % E).view(1, num_tokens, K).expand(num_layers, -1, -1)
    popularity_E = torch.arange(1, E + 1).double() ** -ZIPF
    layers = []
    for layer in range(num_layers):
        order_E = torch.randperm(E, generator=torch.Generator().manual_seed(layer))
        generator = torch.Generator().manual_seed(1000 * layer + dist.get_rank())
        drawn = torch.multinomial(popularity_E.expand(num_tokens, E), K, generator=generator)
        layers.append(order_E[drawn])
    return torch.stack(layers)


def _whole(grad: Tensor) -> Tensor:
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
