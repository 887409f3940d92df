"""``moesys bench uniep``: UniEP's published range (arXiv 2604.19241, abstract: 1.03x to 1.38x on Hopper), simulated.

A layer's forward and backward on one node: ``Sequential``, and the same kernels one after another, against the best of
a few points of ``MegaKernel``'s search space, all under one ``ClusterSpec``. The paper names neither its shapes nor its
baselines in what is public; here are those that its authors' repository tests whole layers with (Triton-distributed,
commit 1512a811), and Qwen3-30B-A3B, which that holds its layer against.

The constants are the cluster's: matmul rate, memory, NVLink, multiprocessors, microseconds of a launch, a flag and a
message. None is fitted to the range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np

from moesys.bench.harness.reports import publish_simulated
from moesys.bench.harness.sheets import Column, Sheet
from moesys.bench.harness.steps import steps_told
from moesys.bench.published.hopper_parts import APART, MEGA_EP_TEST_32K, EvenLayer, parts_sheet
from moesys.config import ClusterSpec, MegaKernel, Overlap, Sequential, Strategy, presets
from moesys.simulator.step_program import run_step

PUBLISHED = (1.03, 1.38)
CLUSTERS = (presets.h100(), presets.h800())
LAYERS = (
    EvenLayer("mega EP test", 1536, 480, 64, 8, 1024),
    EvenLayer("mega EP test", 1536, 480, 64, 8, 8192),
    MEGA_EP_TEST_32K,
    EvenLayer("FlashComm overlap test", 8192, 2560, 160, 8, 4096),
    EvenLayer("Qwen3-30B-A3B", 2048, 768, 128, 8, 8192),
)
POINTS = tuple(
    MegaKernel(dispatch_share=dispatch, combine_share=combine, deduplicate=deduplicate)
    for dispatch, combine, deduplicate in product((0.0, 0.25, 0.5), (0.0, 0.1, 0.25), (False, True))
)

INTRODUCTION = (
    f"`python -m moesys bench uniep`: UniEP (arXiv 2604.19241) publishes {PUBLISHED[0]}x to {PUBLISHED[1]}x over "
    "sequential execution on Hopper, and in public neither its shapes nor its baselines. Simulated here: forward and "
    "backward of the layers that its authors' repository tests, on one node, equally popular experts, the best of "
    f"{len(POINTS)} points of the search space.",
    "The constants are those of the presets `h100` and `h800`, each with its source there; none is fitted to it.",
)


@dataclass(frozen=True)
class OverlapRow:
    """Milliseconds of one layer's forward and backward; ``best``: the point of the search space that is quickest.

    ``apart_ms``: of the same kernels one after another, which have no rows to put in another order.
    """

    layer: Annotated[Mapping[str, str], Column("{}")]
    sequential_ms: Annotated[float, Column("sequential ms", ".3f")]
    apart_ms: Annotated[float, Column("kernels apart ms", ".3f")]
    mega_ms: Annotated[float, Column("MegaKernel ms", ".3f")]
    best: MegaKernel

    @property
    def published(self) -> Annotated[str, Column("published", after="mega_ms")]:
        return f"{PUBLISHED[0]} to {PUBLISHED[1]}"

    @property
    def ratio(self) -> Annotated[float, Column("to sequential", ".2f", after="published")]:
        return self.sequential_ms / self.mega_ms

    @property
    def to_apart(self) -> Annotated[float, Column("to apart", ".2f", after="ratio")]:
        return self.apart_ms / self.mega_ms

    @property
    def in_range(self) -> Annotated[str, Column("in range", after="to_apart")]:
        inside = sum(PUBLISHED[0] <= ratio <= PUBLISHED[1] for ratio in (self.ratio, self.to_apart))
        return ("none", "one", "both")[inside]

    @property
    def point(self) -> Annotated[str, Column("best point")]:
        fields = ("dispatch_share", "combine_share", "deduplicate")
        return ", ".join(f"{field}={getattr(self.best, field)}" for field in fields)


def overlap_row(cluster: ClusterSpec, layer: EvenLayer, points: Sequence[MegaKernel] = POINTS) -> OverlapRow:
    """Of one layer on one node."""
    plan = layer.plan(cluster)

    def step_ms(overlap: Overlap) -> float:
        strategy = Strategy(name="simulated", overlap=overlap)
        return run_step(strategy, layer.model, cluster, [[plan]]).timeline.length_us / 1000

    mega_ms = [step_ms(point) for point in points]
    best = int(np.argmin(mega_ms))
    return OverlapRow(layer.words, step_ms(Sequential()), step_ms(APART), mega_ms[best], points[best])


def overlap_sheet(rows: Sequence[OverlapRow], cluster: ClusterSpec) -> Sheet:
    """Times of a MegaKernel as fast as ``Sequential``, and as its own kernels one after another."""
    name = cluster.name or f"{cluster.num_ranks} ranks"
    notes = (
        "to sequential: rows gathered, sent, computed and summed by kernels of their own, and sent by NCCL's.",
        "to apart: the MegaKernel's own tasks, launched one kind after another.",
    )
    return Sheet(f"SIMULATED: {name}; published {PUBLISHED[0]} to {PUBLISHED[1]}", rows, notes)


def main(out: Path | None = None) -> int:
    """Simulate, write, print; the exit code."""
    sheets = []
    with steps_told("uniep", len(CLUSTERS) * len(LAYERS)) as tell:
        for cluster in CLUSTERS:
            rows = []
            for layer in LAYERS:
                tell(f"{cluster.name}: {layer.name}, {layer.tokens} tokens")
                rows.append(overlap_row(cluster, layer))
            sheets.append(overlap_sheet(rows, cluster))
    publish_simulated("uniep", "UniEP's range", [*sheets, parts_sheet()], INTRODUCTION, out)
    return 0
