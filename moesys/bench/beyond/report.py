"""The tables of what lies beyond LAER-MoE, and ``moesys bench beyond``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesys.bench.beyond.large import COMPARED_RANKS, MEGA_KERNELS, SIZES, LargeFall, large_falls
from moesys.bench.beyond.large import LAER_STAGE as LARGE_LAER_STAGE
from moesys.bench.beyond.large import MODELS as LARGE_MODELS
from moesys.bench.beyond.large import STAGES as LARGE_STAGES
from moesys.bench.beyond.rows import LAER_STAGE, OTHER_FIT, SEEDS, STAGES, UNIFIED_STAGE, Beyond, beyond
from moesys.bench.harness.steps import steps_told
from moesys.bench.laer.step import MODELS
from moesys.bench.pages import Section, show, table
from moesys.config import Overlap

BAR = 1.15
# Letters for points in tables.
POINTS: dict[Overlap, str] = dict(zip(MEGA_KERNELS, "abcd", strict=True))

INTRODUCTION = (
    "`python -m moesys bench beyond`: strategies between LAER-MoE and `unified`, stage by stage. Nothing here was "
    "measured. What the simulator is worth is in the page of `python -m moesys bench reproduce`.",
    "Unified is FSEP with our layout, the flow split and overlap by `MegaKernel()`, as if programs reached the memory "
    "of other nodes as they reach their own node's. Before it stands overlap by `Pipelined(chunks=4)`, which needs no "
    "such thing. Each other stage changes what its name says, and keeps the rest.",
)


def row_sections(found: Beyond, refitted: Beyond) -> list[Section]:
    """The 24 rows: a waterfall, and what explains it; ``refitted``: LAER and unified by ``OTHER_FIT``."""
    laer = STAGES[LAER_STAGE]
    summary = table(
        "SIMULATED: the 24 rows, times as fast as LAER, geometric mean", ("stage", "over LAER", "over static")
    )
    for stage in STAGES:
        over_static = found.geometric_mean(stage, STAGES[0])
        summary.add_row(stage.name, f"{found.geometric_mean(stage, laer):.3f}", f"{over_static:.3f}")
    value = found.geometric_mean(STAGES[UNIFIED_STAGE], laer)
    notes = [
        f"{STAGES[UNIFIED_STAGE].name}: {value:.3f}, where {BAR} was wanted: {'met' if value >= BAR else 'not met'}.",
        f"With calm {OTHER_FIT.calm:g} and dispatcher_ms {OTHER_FIT.dispatcher_ms:g}, which fit LAER-MoE's rows worse, "
        f"but by less than two standard errors: {refitted.geometric_mean(STAGES[UNIFIED_STAGE], laer):.3f}.",
        "Up to unified, expert gradients travel in bfloat16, as LAER-MoE's do; ours travel in float32: the last row.",
    ]
    columns = ("model", "stage", "s", "over LAER", "max/mean", "exposed s", "experts late s", "inter-node %")
    detail = table("SIMULATED: stage by stage, seconds of an iteration", columns, left=2)
    for model in dict.fromkeys(MODELS.values()):
        base = found.of(model, laer).seconds.total
        for stage in STAGES:
            fall = found.of(model, stage)
            seconds = fall.seconds
            detail.add_row(
                fall.model,
                stage.name,
                f"{seconds.total:.2f}",
                f"{base / seconds.total:.3f}",
                f"{fall.max_over_mean:.3f}",
                f"{seconds.all_to_all + seconds.experts_late:.2f}",
                f"{seconds.experts_late:.2f}",
                f"{100 * fall.inter_node_share:.1f}",
            )
        detail.add_section()
    explained = [
        "exposed: not computing, mean over ranks: rows on their way, slower ranks, and experts or gradients that come "
        "late, of which the next column is.",
        "Qwen's rows are as Mixtral's of the same shape.",
    ]
    return [(summary, notes), (detail, explained)]


def large_sections(falls: Sequence[LargeFall]) -> list[Section]:
    """Published models on 8 to 1,024 GPUs."""
    columns = ["model", "GPUs", "slots", "LAER ms"]
    columns += [stage.name for stage in LARGE_STAGES if stage != LARGE_STAGES[LARGE_LAER_STAGE]]
    columns += ["by", "max/mean", "unified", "exposed ms", "unified", "inter-node %", "unified"]
    made = table("SIMULATED: times as fast as LAER's layout, a layer's forward and backward", columns)
    for index in range(0, len(falls), len(LARGE_STAGES)):
        stages = falls[index : index + len(LARGE_STAGES)]
        laer, unified = stages[LARGE_LAER_STAGE], stages[-1]
        cells = [laer.model, f"{laer.num_ranks} {laer.gpu}", str(laer.slots), f"{laer.layer_ms:.2f}"]
        cells += [f"{laer.layer_ms / stage.layer_ms:.3f}" for stage in stages if stage is not laer]
        cells += [POINTS[unified.overlap], f"{laer.max_over_mean:.3f}", f"{unified.max_over_mean:.3f}"]
        cells += [f"{laer.exposed_ms:.1f}", f"{unified.exposed_ms:.1f}"]
        cells += [f"{100 * laer.inter_node_share:.0f}", f"{100 * unified.inter_node_share:.0f}"]
        made.add_row(*cells)
        if index + len(LARGE_STAGES) < len(falls) and falls[index + len(LARGE_STAGES)].model != laer.model:
            made.add_section()
    lost = [
        f"{stages[-1].model} on {stages[-1].num_ranks} {stages[-1].gpu}"
        for index in range(0, len(falls), len(LARGE_STAGES))
        if (stages := falls[index : index + len(LARGE_STAGES)])[-1].layer_ms
        > min(stage.layer_ms for stage in stages[:-1])
    ]
    where_not = ", ".join(lost) or "nowhere"
    notes = [
        "Log-normal routing of skew 1, 8,192 tokens a rank, experts restored every pass, float32 gradients.",
        "max/mean, exposed and inter-node: of LAER's layout, then of unified.",
        f"Where a stage before it is faster than unified: {where_not}.",
        "Other stages have no search: LAER's as published, overlap in chunks by four of them.",
        "by: which of four points of MegaKernel's search space the simulator finds fastest on up to "
        f"{COMPARED_RANKS} GPUs, and the last of these on more.",
        *(f"{letter}: {_point(overlap)}." for overlap, letter in POINTS.items()),
    ]
    return [(made, notes)]


def _point(overlap: Overlap) -> str:
    fields = overlap.model_dump(exclude_defaults=True)
    return "MegaKernel(" + ", ".join(f"{name}={value}" for name, value in fields.items()) + ")"


def main(out: Path | None = None) -> int:
    """Simulate, write, print; the exit code."""
    with steps_told("beyond", 2 * (4 + 2) * len(SEEDS) + 2 * 4 + len(LARGE_MODELS) * len(SIZES)) as tell:
        found = beyond(tell=tell)
        parts = row_sections(found, beyond(OTHER_FIT, stages=(STAGES[LAER_STAGE], STAGES[UNIFIED_STAGE]), tell=tell))
        falls = large_falls(tell=tell)
    parts += large_sections(_by_gpu(falls))
    show(parts, "beyond LAER-MoE", INTRODUCTION, "beyond", out)
    return 0


def _by_gpu(falls: Sequence[LargeFall]) -> list[LargeFall]:
    """By model, GPU and size; a case's stages in their order."""
    models = list(dict.fromkeys(fall.model for fall in falls))
    return sorted(falls, key=lambda fall: (models.index(fall.model), fall.gpu, fall.num_ranks))
