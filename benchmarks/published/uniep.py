"""The command ``uniep``: what MegaKernels take and gain, beside UniEP's published range (arXiv 2604.19241, abstract:
1.03x to 1.38x over state-of-the-art work, on Hopper).

That range is over other systems, which nothing public names, and so are its shapes: no ratio here is the same
quantity. Simulated: a layer's forward and backward on one node, ``Sequential``, and the same kernels one after another,
against the best of a few points of ``MegaKernel``'s search space, all under one ``ClusterSpec``. The layers are those
that its authors' repository tests whole layers with (Triton-distributed, commit 1512a811), and Qwen3-30B-A3B, which
that holds its layer against.

The constants are the cluster's: matmul rate, memory, NVLink, multiprocessors, microseconds of a launch, a flag and a
message. How fast a product's tiles are inside a fused kernel is not known, so ratios are shown over a range of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.published.fused_rate import RATES, fused_rate_of, fused_sheet
from benchmarks.published.hopper_parts import APART, FITTED_PART, MEGA_EP_TEST_32K, EvenLayer, parts_sheet
from moesys.config import ClusterSpec, MegaKernel, Overlap, Sequential, Strategy, presets
from moesys.lab.show.reports import publish_simulated
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
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
    f"`python -m benchmarks uniep`: UniEP (arXiv 2604.19241, abstract) publishes {PUBLISHED[0]}x to {PUBLISHED[1]}x "
    "over state-of-the-art work on Hopper, and in public neither its shapes nor which work. Simulated here is another "
    "quantity: MegaKernels over moesys' own kernels one after another, forward and backward of the layers that its "
    "authors' repository tests, on one node, equally popular experts, at each rate the best of "
    f"{len(POINTS)} points of the search space.",
    "The constants are those of the presets `h100` and `h800`, each with its source there. `fused_rate`, what "
    "a product's tile reaches inside a MegaKernel of its rate in a kernel of its own, is not published for these "
    f"kernels: all ratios are shown at {', '.join(map(str, RATES))} of it, and at the rate fitted on one published "
    "time.",
)


@dataclass(frozen=True)
class OverlapRow:
    """Milliseconds of one layer's forward and backward, of MegaKernels by ``fused_rate``.

    ``apart_ms``: of the same kernels one after another, which have no rows to put in another order. ``best``: the point
    of the search space that is quickest at the first rate.
    """

    layer: Annotated[Mapping[str, str], Column("{}")]
    sequential_ms: Annotated[float, Column("sequential ms", ".3f")]
    apart_ms: Annotated[float, Column("kernels apart ms", ".3f")]
    mega_ms: Annotated[Mapping[str, float], Column("MegaKernel ms, {}", ".3f")]
    best: MegaKernel

    @property
    def ratio(self) -> Annotated[Mapping[str, float], Column("to sequential, {}", ".2f", after="mega_ms")]:
        return {rate: self.sequential_ms / ms for rate, ms in self.mega_ms.items()}

    @property
    def to_apart(self) -> Annotated[Mapping[str, float], Column("to apart, {}", ".2f", after="ratio")]:
        return {rate: self.apart_ms / ms for rate, ms in self.mega_ms.items()}

    @property
    def point(self) -> Annotated[str, Column("best point")]:
        fields = ("dispatch_share", "combine_share", "deduplicate")
        return ", ".join(f"{field}={getattr(self.best, field)}" for field in fields)


def overlap_row(
    cluster: ClusterSpec, layer: EvenLayer, points: Sequence[MegaKernel] = POINTS, rates: Sequence[float] = RATES
) -> OverlapRow:
    """Of one layer on one node."""
    plan = layer.plan(cluster)

    def step_ms(overlap: Overlap, rate: float = 1.0) -> float:
        strategy, at_rate = Strategy(name="simulated", overlap=overlap), cluster.replace(fused_rate=rate)
        return run_step(strategy, layer.model, at_rate, [[plan]]).timeline.length_us / 1000

    mega_ms = np.array([[step_ms(point, rate) for point in points] for rate in rates])
    best_ms = {f"{rate:.2f}": float(ms) for rate, ms in zip(rates, mega_ms.min(axis=1), strict=True)}
    best = points[int(mega_ms[0].argmin())]
    return OverlapRow(layer.words, step_ms(Sequential()), step_ms(APART), best_ms, best)


def overlap_sheet(rows: Sequence[OverlapRow], cluster: ClusterSpec) -> Sheet:
    """Times of a MegaKernel over a range of ``fused_rate``, ``Sequential``'s, and those of its own kernels apart."""
    name = cluster.name or f"{cluster.num_ranks} ranks"
    notes = (
        "to sequential: rows gathered, sent, computed and summed by kernels of their own, and sent by NCCL's.",
        "to apart: the MegaKernel's own tasks, launched one kind after another.",
        "Behind a comma: fused_rate.",
    )
    return Sheet(f"SIMULATED: {name}, by fused_rate", rows, notes)


def main(out: Path | None = None) -> int:
    """Simulate, write, print; the exit code."""
    sheets = []
    with steps_told("uniep", 1 + len(CLUSTERS) * len(LAYERS)) as tell:
        tell("the rate of fused tiles")
        fitted = fused_rate_of(FITTED_PART)
        assert fitted is not None
        rates = (*RATES, fitted)
        fused = fused_sheet(rates)
        for cluster in CLUSTERS:
            rows = []
            for layer in LAYERS:
                tell(f"{cluster.name}: {layer.name}, {layer.tokens} tokens")
                rows.append(overlap_row(cluster, layer, rates=rates))
            sheets.append(overlap_sheet(rows, cluster))
    publish_simulated("uniep", "MegaKernels beside UniEP's range", [*sheets, fused, parts_sheet()], INTRODUCTION, out)
    return 0
