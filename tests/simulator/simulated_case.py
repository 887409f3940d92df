"""Layers under simulated MegaKernels, and the times of their transfers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import moesys as ms
from moesys.cost import dispatch_bytes, restore_bytes, transfer_seconds
from moesys.layout import ExpertLayout, TokenPlan

# A GPU of few multiprocessors, so that small layers keep it as busy as large ones keep an H100.
GPU = ms.ClusterSpec(
    ranks_per_node=8,
    intra_node_gb_per_s=36,
    inter_node_gb_per_s=12,
    expert_tflops=62,
    memory_gb_per_s=335,
    multiprocessors=13,
    tile_rows=128,
    tile_columns=256,
    launch_us=3,
    flag_us=1,
    intra_node_us=1,
    inter_node_us=4,
)
# Nothing takes time but products and links.
PLAIN = GPU.replace(memory_gb_per_s=None, launch_us=0, flag_us=0, intra_node_us=0, inter_node_us=0)

SHAPES = {
    "UniEP's test": (1536, 480, 64, 8),
    "Qwen3-30B": (2048, 768, 128, 8),
    "160 experts": (5120, 2560, 160, 8),
    "Mixtral": (4096, 14336, 8, 2),
}


def dispatch_seconds(plan: TokenPlan, model: ms.ModelShape, cluster: ms.ClusterSpec) -> float:
    """Returns the seconds of dispatch; combine takes as long, because links are as fast in both directions."""
    return transfer_seconds(dispatch_bytes(plan, model), cluster)


def restore_seconds(
    layout: ExpertLayout, model: ms.ModelShape, cluster: ms.ClusterSpec, sharding: ms.Ep | ms.Fsep
) -> float:
    """Returns the seconds of the all-to-alls that restore the experts of ``layout``; 0 if nothing is missing."""
    return sum(transfer_seconds(bytes_RR, cluster) for bytes_RR in restore_bytes(layout, model, cluster, sharding))


def shape(name: str) -> ms.ModelShape:
    hidden, width, experts, top_k = SHAPES[name]
    return ms.ModelShape(
        hidden_size=hidden, intermediate_size=width, num_experts=experts, top_k=top_k, dtype="bfloat16"
    )


def plan_of(model: ms.ModelShape, num_ranks: int, tokens: int, skew: float = 0.0, seed: int = 0) -> TokenPlan:
    """Experts whole on their owners; popularity is log-normal of deviation ``skew``."""
    numbers = np.random.default_rng(seed)
    popularity = np.exp(skew * numbers.normal(size=model.num_experts))
    chosen = [numbers.multinomial(tokens * model.top_k, popularity / popularity.sum()) for _ in range(num_ranks)]
    cluster = ms.ClusterSpec(ranks_per_node=num_ranks)
    return ms.planning.plan_layer(
        ms.Strategy(name="ep"), model, cluster, ms.planning.LoadMatrix(np.stack(chosen))
    ).tokens


@dataclass(frozen=True)
class Case:
    """``tokens``: of each rank."""

    name: str
    num_ranks: int
    tokens: int
    skew: float
    overlap: ms.MegaKernel
    backward: bool

    @property
    def model(self) -> ms.ModelShape:
        return shape(self.name)

    @property
    def cluster(self) -> ms.ClusterSpec:
        return GPU.replace(ranks_per_node=self.num_ranks)

    @property
    def plan(self) -> TokenPlan:
        return plan_of(self.model, self.num_ranks, self.tokens, self.skew)


def drawn_case(seed: int, deduplicate: bool = False) -> Case:
    """Of all shapes, numbers of ranks and points of the search space."""
    numbers = np.random.default_rng(seed)

    def one_of(*values: object) -> object:
        return values[numbers.integers(len(values))]

    fused, alone = one_of("both", "dispatch", "combine", "none"), one_of(True, True, False)
    overlap = ms.MegaKernel(
        fused=fused,
        granularity=one_of("tile", "expert"),
        tile_order=one_of("largest_first", "slots"),
        dispatch_share=one_of(0.0, 0.25, 0.5, 1.0),
        combine_share=one_of(0.0, 0.2) if fused in ("both", "combine") else 0.0,
        reduce_share=one_of(0.0, 0.2) if alone else 0.0,
        overlap_weight_gradients=alone,
        keep_x=one_of(True, False),
        deduplicate=deduplicate,
    )
    name = one_of(*SHAPES)
    tokens = one_of(500, 1000) if name in ("160 experts", "Mixtral") else one_of(500, 1000, 2000)
    return Case(name, one_of(1, 2, 4, 8), tokens, one_of(0.0, 0.5, 1.0), overlap, one_of(True, False))
