"""Workloads: where the routing that strategies are compared on comes from, by training or through the cost model.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import Declaration, KindUnion, LongName
from moesys.config.model import ModelShape
from moesys.config.model_spec import config_named, moe_layers, parse_config, read_config, shape_of

# The parts that run forward again in backward: none; whole layers; layers as far as backward reads them; computing.
Recompute = Literal["none", "layers", "selective", "computing"]
# The fields of a config.json that declare a shared expert, which transformers computes after the routed experts.
_SHARED = ("n_shared_experts", "shared_expert_intermediate_size")
# Fields of earlier releases, whose files are read if these fields have their defaults.
_REMOVED: dict[str, Any] = {"shaped_links": False, "cpus_per_host": None}


def _without_adam(identity: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the optimizer of earlier releases, so that fingerprints stay."""
    return {name: value for name, value in identity.items() if (name, value) != ("optimizer", "adam")}


class RealTraining(Declaration):
    """The fields that all training on real ranks has in common."""

    context: int = Field(128, ge=2, description="tokens of a sequence")
    batch: int = Field(4, ge=1, description="sequences of a rank in a micro-batch")
    micro_batches: int = Field(1, ge=1, description="forward and backward passes of a step")
    warmup: int = Field(3, ge=0, description="first steps, trained but not timed")
    steps: int = Field(30, ge=1, description="timed steps")
    learning_rate: float = Field(1e-3, gt=0, description="learning rate of the optimizer")
    optimizer: Literal["adam", "muon"] = Field(
        "adam", description="Adam, or `ms.Muon` of the matrices at the rate of Adam (`match_rms_adamw`), undecayed"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradient norm above which gradients are scaled down")
    recompute: bool = Field(False, description="activation checkpointing of every block")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where ranks compute; cuda: each on a GPU")

    @model_validator(mode="before")
    @classmethod
    def _without_removed_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if name not in _REMOVED or value != _REMOVED[name]}

    def _identity(self) -> dict[str, Any]:
        # Trials that an earlier release has recorded keep their fingerprints.
        return _without_adam(super()._identity() | _REMOVED)

    @property
    def recomputed(self) -> Recompute:
        """The part of a block that runs again: what backward reads, because the block ends with its routed experts."""
        return "selective" if self.recompute else "none"


class Training(RealTraining):
    """Real training on real ranks: a byte-level language model on the source code of Python's standard library.

    Every rank is a data-parallel replica of embedding, attention and router; the ranks share the experts of each block.
    """

    kind: Literal["training"] = "training"
    num_layers: int = Field(2, ge=1, description="blocks of attention and experts")
    num_heads: int = Field(4, ge=1, description="attention heads")
    interpret: bool = Field(False, description="kernels in Triton's interpreter on the CPU; its times mean nothing")

    @model_validator(mode="after")
    def _interprets_on_the_cpu(self) -> Self:
        if self.interpret and self.device != "cpu":
            raise ValueError(f"interpret=True runs kernels on the CPU, so device={self.device!r} is not used; drop one")
        return self


class ModelTraining(RealTraining):
    """Real training of a model of transformers on real ranks, with what else it has sharded by FSDP2.

    ``model``: a config.json, a folder with one, or the name of a packaged one (``model_names()``). The weights are
    those of the folder if it has any, and else drawn with the trial's seed. Batches are drawn with the seed either way.

    ``data``: text files, folders of them, or ``.bin`` files of tokens (unsigned integers, little-endian, nothing else:
    uint16 for vocabularies of up to 65,536, else uint32); by default the source code of Python's standard library.
    ``tokenizer``: a tokenizer.json, or "bytes".
    """

    kind: Literal["model_training"] = "model_training"
    model: str = Field(min_length=1, description="a config.json, its folder, or a packaged name")
    data: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Text files, folders of them, or .bin files of tokens."""
    tokenizer: str = Field("bytes", min_length=1)
    """A tokenizer.json, or "bytes"."""
    dtype: Annotated[Literal["float32", "bfloat16"], LongName] = Field(
        "float32", description="dtype of layers; masters are float32"
    )
    config: str = Field("", description="content of the config.json; read if left out", repr=False)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if isinstance(data := fields.get("data"), str):
            fields = fields | {"data": (data,)}
        config = fields.get("config")
        if not config and isinstance(model := fields.get("model"), str):
            fields = fields | {"config": json.dumps(read_config(model))}
        elif isinstance(config, str) and config:
            parse_config(config, "config")
        return fields

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed, validated as a whole. Another ``model`` has its config.json read."""
        return super().replace(**({"config": ""} | changes if "model" in changes else changes))

    @model_validator(mode="after")
    def _has_experts(self) -> Self:
        with config_named(self.model):
            has_experts = self.shape and self.num_layers
        if not has_experts:
            raise ValueError(f"model={self.model!r} has no layer with experts; choose a Mixture-of-Experts model")
        return self

    @property
    def config_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.config)
        return fields

    @property
    def shape(self) -> ModelShape:
        """The shape of one MoE layer."""
        return shape_of(self.config_fields, self.dtype)

    @property
    def num_layers(self) -> int:
        """The number of layers with experts."""
        return sum(moe_layers(self.config_fields))

    @property
    def recomputed(self) -> Recompute:
        """The part of a block that runs again: all of it if a shared expert runs after the routed experts."""
        fields = self.config_fields
        return "layers" if self.recompute and any(fields.get(name) for name in _SHARED) else super().recomputed


class CostModelWorkload(Declaration):
    """The fields of all workloads of the cost model: the rest of a step, which moves and computes the same under every
    strategy.
    """

    micro_batches: int = Field(1, ge=1, description="forward and backward passes of a step")
    other_ms: float = Field(0.0, ge=0, description="forward of the rest of a layer; backward takes twice that")
    recompute: Recompute = Field(
        "none",
        description="what runs again in backward: nothing, whole layers, what it reads, or layers without all-to-alls",
    )
    optimizer: Literal["adam", "muon"] = Field(
        "adam", description="`muon` adds what `ms.Muon` takes for the experts, which differs by sharding"
    )
    optimizer_ms: float = Field(0.0, ge=0, description="time of the rest of the optimizer in a step")

    def _identity(self) -> dict[str, Any]:
        return _without_adam(super()._identity())


class Replay(CostModelWorkload):
    """Recorded routing through the cost model: trace files of ``moesys.traces``.

    A trace of fewer ranks than the cluster has is folded: consecutive micro-batches become further source ranks.
    """

    kind: Literal["replay"] = "replay"
    trace: str = Field(min_length=1, description="path of a trace; {seed} becomes the trial's seed")
    warmup: int = Field(0, ge=0, description="first micro-batches, seen by planners but not timed")
    tokens_per_rank: int | None = Field(None, ge=1, description="scale each rank to this number; None: as recorded")


class Generated(CostModelWorkload):
    """Drawn routing through the cost model, with a declared skew.

    ``skew`` is the standard deviation of the logarithm of expert popularity (log-normal), or the exponent (Zipf).
    ``drift`` is the share of an expert's log-popularity that is drawn anew at each step; ``spread`` the standard
    deviation of each source rank's own log-preference around it, which drifts as slowly. ``concentration``: tokens of a
    document are alike, so a rank's shares in one micro-batch stray as if it had only so many tokens.
    """

    kind: Literal["generated"] = "generated"
    distribution: Literal["uniform", "log_normal", "zipf"] = "log_normal"
    """Distribution of expert popularity."""
    skew: float = Field(1.0, ge=0, le=100, description="standard deviation of log-popularity, or Zipf's exponent")
    drift: float = Field(0.05, ge=0, le=1, description="share of log-popularity that changes per micro-batch")
    spread: float = Field(0.1, ge=0, description="standard deviation of each rank's log-preference")
    concentration: float | None = Field(
        None, gt=0, description="concentration of the Dirichlet distribution of a rank's shares; None: none"
    )
    num_layers: int = Field(2, ge=1, description="number of layers")
    tokens_per_rank: int = Field(16384, ge=1, description="tokens of a rank in a micro-batch")
    warmup: int = Field(5, ge=0, description="first micro-batches, seen by planners but not timed")
    steps: int = Field(20, ge=1, description="timed steps")


Workload = Annotated[Training | ModelTraining | Replay | Generated, KindUnion()]
