"""MegaKernels on Hopper, simulated: ``python -m experiments.published.uniep`` writes this text above its tables.

UniEP (arXiv 2604.19241, abstract) publishes 1.03x to 1.38x over state-of-the-art work on Hopper, and in public neither
its shapes nor that work: no ratio here is the same quantity. Simulated are a layer's forward and backward on one node,
with equally popular experts: ``Sequential``, the MegaKernel's own tasks one after another, and the fastest of 18 points
of ``MegaKernel``'s search space at each rate. The layers are those that its authors' repository tests whole layers with
(Triton-distributed, commit 1512a811), and Qwen3-30B-A3B, which it compares its layer on. The constants are those of the
presets ``h100`` and ``h800``, which name their sources.

``ClusterSpec.fused_rate``, the rate of a product's tiles inside a fused kernel over their rate in a kernel of their
own, is not published for these kernels. So ratios are shown over a range of it, and the last table shows published
times of kernels like the MegaKernels' parts at each rate. These are other people's kernels on other layers, some in
FP8: what holds for all of them may hold for this project's. Their sources:

- mega EP test: Triton-distributed, docs/kernels/nvidia/ep_all2all_fused.rst (commit 1512a811), whose kernels push rows
  where these pull them. A token is sent to a rank once: 201 GB/s in 3.5 ms are 8 rows of 1,536 elements per token. One
  figure, 5.9 ms, stands for dispatch and product in one kernel. Experts and width are those of its fused test.
- Kraken: github.com/meta-pytorch/kraken pull request 32 (2026); 33.55 MB per rank are one row per token. No experts
  compute there, and its times include the exchange of counts, which is not simulated.
- DeepSeek-V3, V4-Flash, V4-Pro: DeepGEMM's fused layers in FP8, and on H200 DeepEP with DeepGEMM's grouped products
  (layer, apart); github.com/deepseek-ai/DeepGEMM pull requests 352 (a comment) and 383. Links are as much faster as FP8
  rows are smaller. H200: the rate is that of DeepGEMM's grouped products on H800; H20: its peak.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from pydantic import BaseModel
from scipy.optimize import brentq

from moesys.balance.plan import plan_layer
from moesys.config import ClusterSpec, ModelShape, Overlap, Strategy, presets
from moesys.config.overlap import MegaKernel, Sequential
from moesys.lab.commands.options import AsJson, OutFolder, Quiet, Wide
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import Column, CommandOutput, Report, Sheet, publish
from moesys.layout import TokenPlan
from moesys.load import LoadMatrix
from moesys.simulator.mega_pass import mega_pass
from moesys.simulator.step_program import run_step

# The rates of the tables; the rate that is fitted to one published time follows them. No kernel has slower tiles than
# ``SLOWEST``.
RATES, SLOWEST = (1.0, 0.85, 0.7), 0.05
APART = MegaKernel(fused="none", dispatch_share=1, overlap_weight_gradients=False)
KERNELS = {"apart": APART, "deduplicated": APART.replace(deduplicate=True), "fused": MegaKernel(deduplicate=True)}
POINTS = tuple(
    MegaKernel(dispatch_share=dispatch, combine_share=combine, deduplicate=deduplicate)
    for dispatch, combine, deduplicate in product((0.0, 0.25, 0.5), (0.0, 0.1, 0.25), (False, True))
)


def _in_fp8(preset: ClusterSpec, name: str, expert_tflops: float, **fields: float) -> ClusterSpec:
    """Returns a node whose links are as much faster as rows are smaller that leave as FP8 with their scales, 7,392 B of
    7,168 elements, and come home in bfloat16.
    """
    links = preset.intra_node_gb_per_s * 2 * 14336 / (7392 + 14336)
    return preset.replace(name=name, expert_tflops=expert_tflops, intra_node_gb_per_s=links, **fields)


CLUSTERS = {
    "1 x 8 H100": presets.h100(),
    "1 x 8 H800": presets.h800(),
    "1 x 2 H100": presets.h100().replace(ranks_per_node=2, name="1 x 2 H100"),
    # DeepGEMM's grouped products in FP8 on H800, the mean of two shapes (its pull request 73, 2025).
    "1 x 8 H200, FP8": _in_fp8(presets.h200(), "1 x 8 H200, FP8", (1381 + 1262) / 2),
    # H100's links, and of H20's data sheet the peak in FP8: nobody publishes a rate that was reached.
    "1 x 8 H20, FP8": _in_fp8(presets.h100(), "1 x 8 H20, FP8", 296.0, multiprocessors=78, memory_gb_per_s=4000.0),
}


class EvenLayer(BaseModel, frozen=True):
    """A layer of ``tokens`` per rank in bfloat16; tokens choose among equally popular experts by chance."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int
    tokens: int

    @property
    def words(self) -> dict[str, str]:
        """Returns the columns that name the layer in tables."""
        shape = f"{self.hidden}, {self.width}, {self.experts}, {self.top_k}"
        return {"layer": self.name, "tokens a rank": f"{self.tokens:,}", "H, I, E, K": shape}

    @property
    def model(self) -> ModelShape:
        return ModelShape(
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_experts=self.experts,
            top_k=self.top_k,
            dtype="bfloat16",
        )

    def plan(self, cluster: ClusterSpec) -> TokenPlan:
        """Returns where tokens are computed under expert parallelism."""
        even_E = np.full(self.experts, 1 / self.experts)
        numbers = np.random.default_rng(0)
        load = LoadMatrix(numbers.multinomial(self.tokens * self.top_k, even_E, size=cluster.num_ranks))
        return plan_layer(Strategy(name="ep"), self.model, cluster, load).tokens


_TEST = EvenLayer(name="mega EP test", hidden=1536, width=480, experts=64, top_k=8, tokens=1024)
LAYERS = (
    *(_TEST.model_copy(update={"tokens": tokens}) for tokens in (1024, 8192, 32768)),
    EvenLayer(name="FlashComm overlap test", hidden=8192, width=2560, experts=160, top_k=8, tokens=4096),
    EvenLayer(name="Qwen3-30B-A3B", hidden=2048, width=768, experts=128, top_k=8, tokens=8192),
)


class HopperPart(EvenLayer, frozen=True):
    """A published time of a part of a layer's forward that all ranks enter together.

    not_published: what of the layer is assumed. kernel: one of ``KERNELS``. measured: the end of the part; "product"
    begins with the dispatch.
    """

    use: Literal["part", "fitted", "held out"]
    part: str
    cluster: str
    not_published: str
    published_ms: float
    kernel: str
    measured: Literal["dispatch", "combine", "product", "layer"]

    def simulated_ms(self, fused_rate: float = 1.0) -> float:
        cluster = CLUSTERS[self.cluster].replace(fused_rate=fused_rate)
        layer = (KERNELS[self.kernel], self.model, cluster, self.plan(cluster))
        found = mega_pass(*layer, backward=False, start_R=np.zeros(cluster.num_ranks))
        dispatch, combine = found.moved
        start_R, end_R = {
            "dispatch": (dispatch.start_R, dispatch.end_R),
            "combine": (combine.start_R, combine.end_R),
            "product": (dispatch.start_R, found.computed[0].end_R),
            "layer": (np.zeros(1), found.end_R),
        }[self.measured]
        return 1e3 * float(end_R.max() - start_R.min())

    def explaining_rate(self) -> float | None:
        """Returns the rate at which the part takes as long as published; None where even the full rate is slower, or
        where no tile is fused.
        """
        if self.kernel != "fused" or self.simulated_ms() >= self.published_ms:
            return None
        return float(brentq(lambda rate: self.simulated_ms(rate) - self.published_ms, SLOWEST, 1.0, xtol=1e-3))


def published_parts() -> list[HopperPart]:
    text = (Path(__file__).parent / "hopper_parts.csv").read_text(encoding="utf-8")
    return [HopperPart.model_validate(row) for row in csv.DictReader(text.splitlines())]


@dataclass(frozen=True)
class PartRow:
    """A published part, simulated at full rate, with its error by ``fused_rate``."""

    of: Annotated[Mapping[str, str], Column("{}")]
    published_ms: Annotated[float, Column("published ms", ".3f")]
    simulated_ms: Annotated[float, Column("simulated ms", ".3f")]
    error: Annotated[Mapping[str, float], Column("error % at {}", "+.1f", 100)]
    explained_by: Annotated[float | None, Column("explained by", ".2f")]


def part_row(part: HopperPart, rates: Sequence[float]) -> PartRow:
    """Simulates a part at each rate; without fused tiles, all rates are the same."""
    words = {"part": part.part, **part.words, "cluster": part.cluster, "not published": part.not_published}
    at_rates = {f"{rate:.2f}": part.simulated_ms(rate) / part.published_ms - 1 for rate in rates}
    fitted = {"part": "", "fitted": "yes", "held out": "held out"}[part.use]
    of = {**words, "fitted on": fitted}
    return PartRow(of, part.published_ms, part.simulated_ms(), at_rates, part.explaining_rate())


@dataclass(frozen=True)
class OverlapRow:
    """Milliseconds of one layer's forward and backward, of MegaKernels by ``fused_rate``.

    apart_ms: of the same tasks one kind after another. best: the point of the search space that is the fastest at the
    first rate.
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
    """Simulates one layer on one node."""
    plan = layer.plan(cluster)

    def step_ms(overlap: Overlap, rate: float = 1.0) -> float:
        strategy, at_rate = Strategy(name="simulated", overlap=overlap), cluster.replace(fused_rate=rate)
        return run_step(strategy, layer.model, at_rate, [[plan]]).timeline.length_us / 1000

    mega_ms = np.array([[step_ms(point, rate) for point in points] for rate in rates])
    best_ms = {f"{rate:.2f}": float(ms) for rate, ms in zip(rates, mega_ms.min(axis=1), strict=True)}
    best = points[int(mega_ms[0].argmin())]
    return OverlapRow(layer.words, step_ms(Sequential()), step_ms(APART), best_ms, best)


def overlap_sheet(rows: Sequence[OverlapRow], cluster: str) -> Sheet:
    notes = (
        "to sequential: rows are gathered, sent, computed and summed by kernels of their own, and sent by NCCL's.",
        "to apart: the MegaKernel's own tasks, launched one kind after another.",
        "The number after the comma is fused_rate.",
    )
    return Sheet(f"SIMULATED: {cluster}, by fused_rate", rows, notes)


def main(out: OutFolder = None, as_json: AsJson = False, quiet: Quiet = False, wide: Wide = False) -> None:
    """Simulate MegaKernels on Hopper against one stage after another, over a range of rates of fused tiles."""
    parts, sheets = published_parts(), []
    fitted = next(part for part in parts if part.use == "fitted").explaining_rate()
    assert fitted is not None
    rates = (*RATES, fitted)
    nodes = ("1 x 8 H100", "1 x 8 H800")
    with steps_told("uniep", len(nodes) * len(LAYERS) + 1, quiet) as tell:
        for name in nodes:
            overlaps = []
            for layer in LAYERS:
                tell(f"{name}: {layer.name}, {layer.tokens} tokens")
                overlaps.append(overlap_row(CLUSTERS[name], layer, rates=rates))
            sheets.append(overlap_sheet(overlaps, name))
        tell("published parts")
        rows = [part_row(part, rates) for part in parts]
    note = "explained by: the fused_rate at which a fused part takes as long as published; empty where 1 is too slow."
    sheets.append(Sheet("SIMULATED beside published: parts of a layer forward, by fused_rate", rows, [note]))
    title, introduction = "SIMULATED: MegaKernels beside UniEP's range", (__doc__ or "").strip().split("\n\n")
    report = Report("uniep", title, "simulated", sheets, introduction=introduction)
    publish(report, CommandOutput(out, as_json, quiet, wide))


if __name__ == "__main__":
    typer.run(main)
