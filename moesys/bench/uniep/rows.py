"""UniEP's published range (arXiv 2604.19241, abstract: 1.03x to 1.38x over the state of the art, on Hopper), simulated.

A layer's forward and backward on one node: ``Sequential``, and the same kernels one after another, against the best of
a few points of ``MegaKernel``'s search space, all under one ``ClusterSpec``. The paper names neither its shapes nor its
baselines in what is public; here are those that its authors' repository tests whole layers with (Triton-distributed,
commit 1512a811), and Qwen3-30B-A3B, which that holds its layer against.

The constants are the cluster's: matmul rate, memory, NVLink, multiprocessors, microseconds of a launch, a flag and a
message. None is fitted to the range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from moesys.config import ClusterSpec, MegaKernel, ModelShape, Overlap, Sequential, Strategy
from moesys.layout import TokenPlan
from moesys.load import LoadMatrix
from moesys.simulator.step_program import run_step
from moesys.step import plan_layer

PUBLISHED = (1.03, 1.38)


@dataclass(frozen=True)
class Layer:
    """``tokens`` of each rank."""

    name: str
    model: ModelShape
    tokens: int


def bfloat16_layer(name: str, hidden: int, width: int, experts: int, top_k: int, tokens: int) -> Layer:
    model = ModelShape(hidden_size=hidden, intermediate_size=width, num_experts=experts, top_k=top_k, dtype="bfloat16")
    return Layer(name, model, tokens)


MEGA_EP_TEST_32K = bfloat16_layer("mega EP test", 1536, 480, 64, 8, 32768)
LAYERS = (
    bfloat16_layer("mega EP test", 1536, 480, 64, 8, 1024),
    bfloat16_layer("mega EP test", 1536, 480, 64, 8, 8192),
    MEGA_EP_TEST_32K,
    bfloat16_layer("FlashComm overlap test", 8192, 2560, 160, 8, 4096),
    bfloat16_layer("Qwen3-30B-A3B", 2048, 768, 128, 8, 8192),
)

POINTS = tuple(
    MegaKernel(dispatch_share=dispatch, combine_share=combine, deduplicate=deduplicate)
    for dispatch, combine, deduplicate in product((0.0, 0.25, 0.5), (0.0, 0.1, 0.25), (False, True))
)


APART = MegaKernel(fused="none", dispatch_share=1, overlap_weight_gradients=False)


@dataclass(frozen=True)
class Row:
    """Milliseconds of one layer's forward and backward; ``best``: the point of the search space that is quickest.

    ``apart_ms``: of the same kernels one after another, which have no rows to put in another order.
    """

    layer: Layer
    sequential_ms: float
    apart_ms: float
    mega_ms: float
    best: MegaKernel

    @property
    def ratio(self) -> float:
        return self.sequential_ms / self.mega_ms


def even_plan(of: Layer, cluster: ClusterSpec, seed: int = 0) -> TokenPlan:
    """Of experts that are equally popular and tokens that choose them by chance."""
    even_E = np.full(of.model.num_experts, 1 / of.model.num_experts)
    numbers = np.random.default_rng(seed)
    load = LoadMatrix(numbers.multinomial(of.tokens * of.model.top_k, even_E, size=cluster.num_ranks))
    return plan_layer(Strategy(name="ep"), of.model, cluster, load).tokens


def uniep_rows(
    cluster: ClusterSpec, layers: Sequence[Layer] = LAYERS, points: Sequence[MegaKernel] = POINTS
) -> list[Row]:
    """Of each layer, by ``even_plan``."""
    rows = []
    for of in layers:
        plan = even_plan(of, cluster)

        def step_ms(overlap: Overlap, model: ModelShape = of.model, plan: TokenPlan = plan) -> float:
            strategy = Strategy(name="simulated", overlap=overlap)
            return run_step(strategy, model, cluster, [[plan]]).timeline.length_us / 1000

        mega_ms = [step_ms(point) for point in points]
        best = int(np.argmin(mega_ms))
        rows.append(Row(of, step_ms(Sequential()), step_ms(APART), mega_ms[best], points[best]))
    return rows
