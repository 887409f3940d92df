"""Parallelism: how ranks share everything but the routed experts, and in what pieces a step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import Declared
from moesys.config.cluster import ClusterSpec

PipelineSchedule = Literal["1f1b", "zero_bubble"]
# What of a layer runs forward again in backward.
LayerRecompute = Literal["none", "selective", "full"]


class Parallelism(Declared):
    """Groups of ranks, numbered as Megatron does: tensor groups are neighbours, then context, then data, and pipeline
    stages lie farthest apart. Expert groups are neighbours inside a stage; each has its own layouts.

    Inside tensor and context groups a rank has its share of every sequence's tokens (sequence parallelism), so that
    experts never see a token twice.
    """

    tensor: int = Field(1, ge=1, description="ranks that share each product of attention and dense layers")
    context: int = Field(1, ge=1, description="ranks that share a sequence")
    pipeline: int = Field(1, ge=1, description="stages")
    virtual_stages: int = Field(1, ge=1, description="parts of the model in each stage; more than 1: interleaved")
    expert: int | None = Field(None, ge=1, description="ranks of an expert group; None: all of a stage")
    schedule: PipelineSchedule = "1f1b"
    overlap_micro_batches: bool = Field(
        False, description="a micro-batch's forward runs beside another's backward: one computes while the other sends"
    )
    dense: Literal["replicated", "optimizer", "full"] = Field(
        "optimizer", description="what data-parallel ranks shard of dense parameters: nothing, optimizer states, or all"
    )
    recompute: LayerRecompute = Field(
        "none", description="what runs again in backward: nothing, what backward reads and is cheap, or whole layers"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_stages={self.virtual_stages} interleaves the stages of a pipeline, but pipeline=1; "
                "use virtual_stages=1, or more stages"
            )
        if self.virtual_stages > 1 and self.schedule == "zero_bubble":
            raise ValueError(
                f"schedule='zero_bubble' has one part of the model a stage, not virtual_stages={self.virtual_stages}; "
                "use schedule='1f1b', or virtual_stages=1"
            )
        if self.overlap_micro_batches and self.schedule == "zero_bubble":
            raise ValueError(
                "overlap_micro_batches=True pairs forwards with whole backwards, which schedule='zero_bubble' splits; "
                "use schedule='1f1b'"
            )
        if self.overlap_micro_batches and self.pipeline > 1 and self.virtual_stages == 1:
            raise ValueError(
                f"overlap_micro_batches=True with pipeline={self.pipeline} needs interleaved stages, as Megatron-Core "
                "does: else each stage waits for the next one's pair; use virtual_stages=2 or more, or pipeline=1"
            )
        return self

    def groups(self, cluster: ClusterSpec) -> Groups:
        """Returns the sizes of all groups. Raises ValueError where they do not multiply to the cluster's ranks."""
        ranks, replica = cluster.num_ranks, self.tensor * self.context * self.pipeline
        if ranks % replica:
            raise ValueError(
                f"tensor={self.tensor}, context={self.context} and pipeline={self.pipeline} multiply to {replica}, "
                f"which does not divide the cluster's {ranks} ranks; choose divisors of {ranks}"
            )
        stage = ranks // self.pipeline
        expert = stage if self.expert is None else self.expert
        if stage % expert:
            raise ValueError(
                f"expert={expert} does not divide the {stage} ranks of a stage ({ranks} ranks, pipeline="
                f"{self.pipeline}); choose a divisor of {stage}, or None for all of them"
            )
        return Groups(data=ranks // replica, stage=stage, expert=expert, expert_data=stage // expert)


@dataclass(frozen=True)
class Groups:
    """Ranks of a group: data parallel, of a pipeline stage, of experts, and that hold the same experts."""

    data: int
    stage: int
    expert: int
    expert_data: int
