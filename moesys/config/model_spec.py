"""A whole model: embedding, layers, head; and how it is read from a config.json of transformers.

Families differ in the names of fields, in the defaults of missing fields, and in biases, norms and sinks, for which
there are no fields.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, Self

import pydantic_core
from pydantic import Field, model_validator

from moesys.config.base import BYTES_PER_ELEMENT, Declaration, DisplayName, DType
from moesys.config.model import DenseMlp, Gqa, LayerSpec, Mla, ModelShape, MoeMlp
from moesys.display import Columns, Display, by_column, counted
from moesys.kinds import did_you_mean


class ModelSpec(Display, Declaration):
    """A decoder of transformers' families: an embedding, layers, an RMSNorm, and a head that predicts the next token.

    ``dtype`` is that of activations and of the weights that products read; masters are float32 whatever it says. In
    another declaration, a string stands for what ``from_config`` makes of it.
    """

    name: DisplayName = Field("", description="name in tables; not part of the fingerprint")
    hidden_size: int = Field(ge=1, description="H, width of a token")
    vocab_size: int = Field(ge=1, description="V, rows of the embedding")
    tied_embeddings: bool = Field(False, description="the head has the embedding's weights")
    layers: tuple[LayerSpec, ...] = Field(min_length=1, description="layers in order")
    dtype: DType = Field("bfloat16", description="dtype of activations and of weights in products")

    @classmethod
    def from_config(
        cls, model: str | PathLike[str] | Mapping[str, Any], *, dtype: DType = "bfloat16", name: str | None = None
    ) -> Self:
        """Returns the model of a config.json of transformers: a file, a folder with one, the name of a packaged one
        (small: ``model_names()``; published: ``published_names()``, such as "qwen3-30b-a3b"), or what is in it.

        Families: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3 (Kimi-K2), GPT-OSS, GLM-4-MoE. What the
        file leaves out is what transformers takes then. Heads that predict further tokens are left out, as there.

        Raises ValueError for a family that is not known, and for a field that is missing or cannot be.
        """
        config = model if isinstance(model, Mapping) else read_config(fspath(model))
        name = _name_of(model) if name is None else name
        with config_named(name):
            return cls(name=name, dtype=dtype, **hub_model(config, dtype))

    @model_validator(mode="before")
    @classmethod
    def _read(cls, fields: Any) -> Any:
        return dict(cls.from_config(fields)) if isinstance(fields, str) else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, layer in enumerate(self.layers):
            if not isinstance(layer.mlp, MoeMlp):
                continue
            for field in ("hidden_size", "dtype"):
                ours, theirs = getattr(self, field), getattr(layer.mlp.shape, field)
                if ours != theirs:
                    raise ValueError(
                        f"{field}={ours!r}, but the experts of layers[{index}] have {field}={theirs!r}; give both the "
                        "same"
                    )
        return self

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def _facts(self) -> str:
        experts = next((layer.mlp.shape for layer in self.layers if isinstance(layer.mlp, MoeMlp)), None)
        routed = "" if experts is None else f", {experts.num_experts} experts, top_k={experts.top_k}"
        billions = f"{self.num_parameters / 1e9:,.2f} B parameters, {self.active_parameters / 1e9:,.2f} B active"
        layers = counted(self.num_layers, "layer")
        return f"{self.name!r}, {layers}, hidden size {self.hidden_size:,}{routed}, {billions}"

    def _columns(self) -> Columns:
        return self._by_layer("layer", enumerate(self.layers))

    def _shown(self) -> Columns:
        """Returns a row for each kind of layer."""
        return self._by_layer("layers", ((count, kind) for kind, count in self.layer_counts.items()))

    def _by_layer(self, name: str, layers: Iterable[tuple[int, LayerSpec]]) -> Columns:
        H = self.hidden_size
        return by_column(
            (name, "attention", "mlp", "parameters", "active_parameters"),
            [(n, of.attention.kind, of.mlp.kind, of.num_parameters(H), of.active_parameters(H)) for n, of in layers],
        )

    @property
    def layer_counts(self) -> dict[LayerSpec, int]:
        """How many layers there are of each kind, in the order in which kinds first come."""
        return Counter(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_experts)

    @property
    def embedding_parameters(self) -> int:
        """V·H, of the embedding; the head has as many, which are the same where ``tied_embeddings``."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters: ``sum(p.numel() for p in model.parameters())`` of transformers' model."""
        layers = sum(count * layer.num_parameters(self.hidden_size) for layer, count in self.layer_counts.items())
        return layers + self.hidden_size + self.embedding_parameters * (1 if self.tied_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that compute with one token: K experts a layer, all else but the embedding, of which a token reads
        one row. The head counts, tied or not (as in GPT-OSS's model card, arXiv 2508.10925, table 1).
        """
        layers = sum(count * layer.active_parameters(self.hidden_size) for layer, count in self.layer_counts.items())
        return layers + self.hidden_size + self.embedding_parameters

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element in ``dtype``."""
        return BYTES_PER_ELEMENT[self.dtype]


def _name_of(model: str | PathLike[str] | Mapping[str, Any]) -> str:
    """Returns the name of a packaged configuration, or of the folder in which a config.json lies."""
    if isinstance(model, Mapping):
        return str(model.get("model_type", ""))
    path = Path(os.path.expanduser(fspath(model)))
    return path.resolve().parent.name if path.name == "config.json" else path.name.removesuffix(".json")


# Configurations of another model_type that are one of these families.
SAME_AS = {"kimi_k2": "deepseek_v3"}
NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    # A model whose dense layers are wider names both.
    "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
}
# A config.json with more layers is taken for a slip, because each layer becomes an object.
MOST_LAYERS = 10_000
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_PACKAGED = files("moesys.config") / "models"
_PUBLISHED = _PACKAGED / "published"
# By model_type: the defaults of the configuration classes of transformers 5.23, without those that are None or False.
_FAMILIES = _PACKAGED / "families"


def model_names() -> list[str]:
    """Returns the names of the packaged configurations of small models, made for moesys."""
    return _names_in(_PACKAGED)


def published_names() -> list[str]:
    """Returns the names of the packaged configurations of published models: what decides sizes in the config.json of
    huggingface.co's repository ``_name_or_path``.
    """
    return _names_in(_PUBLISHED)


def family_names() -> list[str]:
    """Returns the ``model_type`` of each family whose layers are known."""
    return _names_in(_FAMILIES)


def family_defaults(family: str) -> dict[str, Any]:
    """Returns the fields of a family that transformers fills in."""
    defaults: dict[str, Any] = json.loads((_FAMILIES / f"{family}.json").read_text(encoding="utf-8"))
    return defaults


def _names_in(folder: Traversable) -> list[str]:
    return sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json"))


def read_config(model: str) -> dict[str, Any]:
    """Returns the content of a config.json: a file, that of a folder, or a packaged one by its name.

    Raises ValueError where there is none, or it is no JSON object.
    """
    if model in model_names():
        text, source = (_PACKAGED / f"{model}.json").read_text(encoding="utf-8"), model
    elif model in published_names():
        text, source = (_PUBLISHED / f"{model}.json").read_text(encoding="utf-8"), model
    else:
        path = Path(os.path.expanduser(model))
        path = path / "config.json" if path.is_dir() else path
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no regular file")
            text, source = path.read_text(encoding="utf-8"), str(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is no text: {error}"
            names = [*model_names(), *published_names()]
            raise ValueError(
                f"model={model!r}: cannot read {path}: {reason}; give a config.json, a folder with one, or one of "
                f"{', '.join(names)}{did_you_mean(model, names)}"
            ) from None
    return parse_config(text, f"model={model!r}: {source}")


def parse_config(text: str, source: str) -> dict[str, Any]:
    """Returns the JSON object that ``text`` is. Raises ValueError, in which ``source`` says where it is from."""
    try:
        config = pydantic_core.from_json(text.encode())
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{source} holds no JSON object, so it is no config.json of transformers")
    return config


@contextmanager
def config_named(source: str) -> Iterator[None]:
    """Adds ``source`` to errors about the content of a config.json that do not name the file."""
    try:
        yield
    except ValueError as error:
        if "config.json" in str(error):
            raise
        raise ValueError(f"the config.json of {source}: {error}") from None


def shape_of(config: Mapping[str, Any], dtype: DType) -> ModelShape:
    """Returns the shape of a layer's experts. Raises ValueError for a configuration that does not say it."""
    found: dict[str, Any] = {}
    for field, names in NAMES.items():
        values = [_whole(config, name) for name in names if config.get(name) is not None]
        if not values:
            way_out = (
                "take that of the language model, which is its text_config"
                if "text_config" in config
                else "take a Mixture-of-Experts model, set what is null, and write the file with save_pretrained()"
            )
            raise ValueError(
                f"the config.json of model_type={config.get('model_type')!r} has none of {', '.join(names)}, so it "
                f"does not say how large its experts are; {way_out}"
            )
        found[field] = values[0]
    return ModelShape(**found, dtype=dtype)


def moe_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Returns for each layer whether it has experts: those of ``mlp_layer_types`` that are not dense; without it, all
    but the first ``first_k_dense_replace``, those in ``mlp_only_layers``, and of ``decoder_sparse_step`` all but the
    last.
    """
    num_layers = _whole(config, "num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise ValueError(f"the config.json has num_hidden_layers={num_layers}; use at most {MOST_LAYERS}")
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        if num_layers not in (0, len(kinds)):
            raise ValueError(
                f"the config.json has num_hidden_layers={num_layers} and {len(kinds)} mlp_layer_types; give one a layer"
            )
        return tuple(kind != "dense" for kind in kinds)
    listed, every = config.get("mlp_only_layers"), _whole(config, "decoder_sparse_step") or 1
    dense = listed if isinstance(listed, list) else []
    first = max(_whole(config, name) for name in _FIRST_DENSE)
    return tuple(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))


def _whole(config: Mapping[str, Any], name: str) -> int:
    """Returns a number, 0 where it is not there."""
    value = config.get(name) or 0
    if not isinstance(value, int):
        raise ValueError(f"the config.json has {name}={value!r}, which is no whole number")
    return value


# Fields with which a model is other than transformers' code and this page have it; what they may say.
_ONLY: dict[str, tuple[object, ...]] = {"mlp_bias": (False, None), "moe_layer_freq": (1, None)}


def hub_model(config: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """Returns the fields of a ``ModelSpec`` that a config.json declares. Raises ValueError for a configuration that
    does not declare them.
    """
    fields = _Fields(config)
    fields.whole("num_hidden_layers")
    has_experts_L = moe_layers(fields.values)
    # Each kind of layer is read once, because layers of a kind are equal.
    experts = _experts(fields, dtype) if any(has_experts_L) else None
    dense = DenseMlp(intermediate_size=fields.whole("intermediate_size")) if not all(has_experts_L) else None
    layers = tuple(
        LayerSpec(attention=_attention(fields, layer), mlp=experts if has_experts else dense)
        for layer, has_experts in enumerate(has_experts_L)
    )
    return {
        "hidden_size": fields.whole("hidden_size"),
        "vocab_size": fields.whole("vocab_size"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "layers": layers,
    }


class _Fields:
    """The fields of a config.json, with what its family takes for those that are left out."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        model_type = config.get("model_type")
        self.family = SAME_AS.get(str(model_type), str(model_type))
        families = family_names()
        if self.family not in families:
            text = config.get("text_config")
            text_type = str(text.get("model_type")) if isinstance(text, dict) else ""
            way_out = (
                "take that of the language model, which is its text_config"
                if SAME_AS.get(text_type, text_type) in families
                else f"known are {', '.join(sorted({*families, *SAME_AS}))}; "
                "or declare an ms.models.ModelSpec, layer by layer"
            )
            raise ValueError(f"the config.json has model_type={model_type!r}, whose layers are not known; {way_out}")
        # A field of several names that the file gives under one is not taken from the defaults under another.
        several = (NAMES["num_experts"], NAMES["top_k"])
        given = {name for names in several if not config.keys().isdisjoint(names) for name in names}
        defaults = family_defaults(self.family)
        self.values = {name: value for name, value in defaults.items() if name not in given} | dict(config)
        for name, allowed in _ONLY.items():
            if self.values.get(name) not in allowed:
                raise self.wrong(
                    name, f"and moesys knows models with {name}={allowed[0]!r} alone; declare an ms.models.ModelSpec"
                )

    def whole(self, name: str) -> int:
        if (value := self.optional(name)) is None:
            raise self.wrong(name, "and no other is known for it; write a whole number of at least 1")
        return value

    def optional(self, name: str, least: int = 1) -> int | None:
        """Returns a number, or None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"which is no whole number of at least {least}")
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name) or False
        if not isinstance(value, bool):
            raise self.wrong(name, "which is neither true nor false")
        return value

    def wrong(self, name: str, what: str) -> ValueError:
        model_type = self.values.get("model_type")
        return ValueError(f"the config.json of model_type={model_type!r} has {name}={self.values.get(name)!r}, {what}")


def _attention(fields: _Fields, layer: int) -> Gqa | Mla:
    match fields.family:
        case "deepseek_v2" | "deepseek_v3":
            return Mla(
                num_heads=fields.whole("num_attention_heads"),
                q_lora_rank=fields.optional("q_lora_rank"),
                kv_lora_rank=fields.whole("kv_lora_rank"),
                qk_nope_head_dim=fields.whole("qk_nope_head_dim"),
                qk_rope_head_dim=fields.whole("qk_rope_head_dim"),
                v_head_dim=fields.whole("v_head_dim"),
                bias=fields.flag("attention_bias"),
            )
        case "mixtral":
            return _gqa(fields, window=fields.optional("sliding_window"))
        case "qwen2_moe":
            alternates = fields.flag("use_sliding_window") and layer < fields.whole("max_window_layers")
            return _gqa(fields, qkv_bias=fields.flag("qkv_bias"), window=_window(fields, layer, alternates))
        case "qwen3_moe":
            bias = fields.flag("attention_bias")
            window = fields.optional("sliding_window") if fields.flag("use_sliding_window") else None
            return _gqa(fields, qkv_bias=bias, output_bias=bias, qk_norm="head", window=window)
        case "olmoe":
            bias = fields.flag("attention_bias")
            return _gqa(fields, qkv_bias=bias, output_bias=bias, qk_norm="row")
        case "glm4_moe":
            qk_norm: Literal["head"] | None = "head" if fields.flag("use_qk_norm") else None
            return _gqa(fields, qkv_bias=fields.flag("attention_bias"), qk_norm=qk_norm)
        case "gpt_oss":
            bias = fields.flag("attention_bias")
            window = _window(fields, layer, alternates=True)
            return _gqa(fields, qkv_bias=bias, output_bias=bias, sinks=True, window=window)
        case unknown:
            raise AssertionError(f"family {unknown} has defaults and no attention")


def _gqa(fields: _Fields, **what: Any) -> Gqa:
    num_heads = fields.whole("num_attention_heads")
    return Gqa(
        num_heads=num_heads,
        num_kv_heads=fields.optional("num_key_value_heads") or num_heads,
        head_dim=fields.optional("head_dim") or fields.whole("hidden_size") // num_heads,
        **what,
    )


def _window(fields: _Fields, layer: int, alternates: bool) -> int | None:
    """Returns the window of a layer: as ``layer_types`` says, or without it of every other layer from the first on."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        slides = alternates and layer % 2 == 0
    elif isinstance(kinds, list) and len(kinds) > layer and kinds[layer] in ("sliding_attention", "full_attention"):
        slides = kinds[layer] == "sliding_attention"
    else:
        raise fields.wrong("layer_types", "which is no list of sliding_attention and full_attention for each layer")
    return fields.whole("sliding_window") if slides else None


def _experts(fields: _Fields, dtype: DType) -> MoeMlp:
    shape = shape_of(fields.values, dtype)
    match fields.family:
        case "mixtral":
            return MoeMlp(shape=shape)
        case "gpt_oss":
            # The softmax over the K best is that over all, divided by the sum of the K.
            return MoeMlp(shape=shape, expert_bias=True, router_bias=True)
        case "qwen2_moe":
            return MoeMlp(
                shape=shape.replace(norm_topk_prob=fields.flag("norm_topk_prob")),
                shared_intermediate_size=fields.whole("shared_expert_intermediate_size"),
                shared_gate=True,
            )
        case "qwen3_moe" | "olmoe":
            return MoeMlp(shape=shape.replace(norm_topk_prob=fields.flag("norm_topk_prob")))
    beside = {
        "n_shared_experts": fields.optional("n_shared_experts", least=0) or 0,
        "routed_scaling_factor": fields.values["routed_scaling_factor"],
    }
    if fields.family == "deepseek_v2":
        # Its choice limited to groups by softmax is none that ``ModelShape`` has; sizes do not depend on it.
        return MoeMlp(shape=shape.replace(norm_topk_prob=False, **beside))
    return MoeMlp(
        shape=shape.replace(
            scoring_func="sigmoid",
            norm_topk_prob=fields.flag("norm_topk_prob"),
            n_group=fields.optional("n_group") or 1,
            topk_group=fields.optional("topk_group") or 1,
            **beside,
        )
    )
