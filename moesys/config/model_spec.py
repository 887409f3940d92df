"""A whole model: embedding, layers, head."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from moesys.config.base import BYTES_PER_ELEMENT, Declaration, DisplayName, DType
from moesys.config.hub import config_named, hub_model, read_config
from moesys.config.model import LayerSpec, MoeMlp
from moesys.display import Columns, Display, by_column, counted


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
            return cls(name=name, dtype=dtype, **hub_model(config, dtype)._asdict())

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
