"""The command ``beyond``: LAER-MoE's 24 rows with our split, our layouts and overlap, one after another; then sizes.

Everything but what a stage names stays as LAER-MoE has it: hardware, attention, dispatcher, recomputation, traffic of
parameters; drawn routing and constants are those of ``reproduce``. Overlap pays for its finer pieces:
where there is some, launches, flags and latencies take time and products come in waves of tiles, which LAER-MoE's own
stages are spared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

from benchmarks.published.beyond_sizes import beyond_sizes, sizes_sheet
from benchmarks.published.drawn_steps import Scenario, mean_of_seeds, simulate
from benchmarks.published.fit import ROWS_SLOWDOWNS, Fit, as_good, figures_of, fit, simulate_grid
from benchmarks.published.laer_figures import ROWS
from benchmarks.published.laer_setup import (
    CONSTANTS,
    FITTED_SHAPE,
    LAER_MODELS,
    Constants,
    LaerModel,
    laer_model,
    laer_scenario,
)
from benchmarks.published.waterfall import LAER_STAGE, UNIFIED_STAGE, Fall, waterfall
from moesys.config import ClusterSpec, MegaKernel, Overlap, Pipelined, Sequential, presets
from moesys.lab.show.reports import publish_simulated
from moesys.lab.show.sheets import Column, Sheet

# Stages differ far more than draws of routing do: one seed, and one of the rows' iterations.
SEEDS, ITERATIONS = (0,), (44,)
BAR = 1.15

INTRODUCTION = (
    "`python -m benchmarks beyond`: strategies between LAER-MoE and `unified`, stage by stage. Nothing here was "
    "measured. What the simulator is worth is in the page of `python -m benchmarks reproduce`.",
    "Unified is FSEP with our layout, the flow split and overlap that runs between nodes: on these four nodes "
    "`Pipelined(chunks=4)`. MegaKernels reach one domain of the fastest links; what they would bring if they reached "
    "other nodes' memory as their own is a row of its own. Each stage changes what its name says, and keeps the rest.",
)


@dataclass(frozen=True)
class Stage:
    """A step of the waterfall: what differs from the stage before is in its name."""

    name: str
    planner: str
    overlap: Overlap
    gradient_bytes: int = 2

    def scenario(self, model: LaerModel, constants: Constants, iterations: Sequence[int]) -> Scenario:
        of = laer_scenario(model, self.planner, constants, iterations)
        return replace(
            of,
            strategy=of.strategy.replace(overlap=self.overlap),
            cluster=of.cluster if self.overlap == Sequential() else in_tiles(of.cluster),
            rest=replace(of.rest, gradient_bytes=self.gradient_bytes),
        )


STATIC = Stage("static", "FSDP+EP", Sequential())
LAER = Stage(LAER_STAGE, "LAER", Sequential())
UNIFIED = Stage(UNIFIED_STAGE, "greedy, flow", Pipelined(chunks=4))
STAGES = (
    STATIC,
    LAER,
    Stage("flow split", "LAER, flow", Sequential()),
    Stage("our layout", "greedy, flow", Sequential()),
    UNIFIED,
    Stage("its gradients in float32", "greedy, flow", Pipelined(chunks=4), gradient_bytes=4),
    Stage("would not run: MegaKernels across nodes", "greedy, flow", MegaKernel()),
)
# Those of which the range over constants is told.
RANGED = tuple(stage for stage in STAGES if stage.gradient_bytes == 2)


@dataclass(frozen=True)
class StageMean:
    """Geometric means over the rows: how many times as fast as LAER's stage, by the best constants and by all that fit
    about as well; and as the static one.
    """

    stage: Annotated[str, Column("stage")]
    over_laer: Annotated[float, Column("over LAER", ".3f")]
    least: Annotated[float | None, Column("least", ".3f")]
    most: Annotated[float | None, Column("most", ".3f")]
    over_static: Annotated[float, Column("over static", ".3f")]
    published: Annotated[float | None, Column("published", ".3f")]


def beyond_rows(
    constants: Constants = CONSTANTS,
    seeds: Sequence[int] = SEEDS,
    iterations: Sequence[int] = ITERATIONS,
    models: Sequence[LaerModel] = LAER_MODELS,
    stages: Sequence[Stage] = STAGES,
) -> list[Fall]:
    """Every model at every stage; the same arguments give the same figures."""
    scenarios = {(model, stage): stage.scenario(model, constants, iterations) for model in models for stage in stages}
    found = simulate(scenarios.values(), seeds, "beyond")
    return [
        fall
        for model in models
        for fall in waterfall(
            {"model": model.name}, {stage.name: found[scenarios[model, stage]] for stage in stages}, "s", 1.0
        )
    ]


def in_tiles(cluster: ClusterSpec) -> ClusterSpec:
    """With the multiprocessors, tiles and latencies of an A100, as overlap needs them."""
    gpu = presets.a100(cluster.num_nodes)
    names = ("multiprocessors", "tile_rows", "tile_columns", "launch_us", "flag_us", "intra_node_us", "inter_node_us")
    return cluster.replace(**{name: getattr(gpu, name) for name in names})


def geometric_mean(falls: Sequence[Fall], stage: Stage, over: Stage) -> float:
    """Over the published rows of the models that fell: how many times as fast ``stage`` is as ``over``."""
    seconds = {(fall.of["model"], fall.stage): fall.total for fall in falls}
    models = [name for row in ROWS if ((name := laer_model(row.model).name), stage.name) in seconds]
    return statistics.geometric_mean(seconds[name, over.name] / seconds[name, stage.name] for name in models)


def ranges(
    fits: Sequence[Fit], seeds: Sequence[int] = SEEDS, models: Sequence[LaerModel] = LAER_MODELS
) -> dict[str, tuple[float, float]]:
    """By stage how many times as fast as LAER's it is at least and at most, over the constants of ``fits``.

    Simulated for each routing at both ends of ``ROWS_SLOWDOWNS``; what lies between follows as in ``fit``.
    """
    ends = (0.0, ROWS_SLOWDOWNS[-1])
    routings = dict.fromkeys((one.constants.skew_growth, one.constants.unrest) for one in fits)
    scenarios = {}
    for routing, model, stage, end in product(routings, models, RANGED, ends):
        constants = replace(CONSTANTS, dispatcher_ms=0.0, rows_slowdown=end, skew_growth=routing[0], unrest=routing[1])
        scenarios[routing, model, stage, end] = stage.scenario(model, constants, ITERATIONS)
    found = simulate(scenarios.values(), seeds, "beyond, all constants that fit")
    total = {key: mean_of_seeds(found[scenario]).seconds.total for key, scenario in scenarios.items()}

    def seconds(constants: Constants, model: LaerModel, stage: Stage) -> float:
        routing, share = (constants.skew_growth, constants.unrest), constants.rows_slowdown / ends[1]
        none, most = (total[routing, model, stage, end] for end in ends)
        return (1 - share) * none + share * most + model.num_passes * constants.dispatcher_ms * 1e-3

    def over_laer(constants: Constants, stage: Stage) -> float:
        of_rows = [model for row in ROWS if (model := laer_model(row.model)) in models]
        return statistics.geometric_mean(
            seconds(constants, model, LAER) / seconds(constants, model, stage) for model in of_rows
        )

    ratios = {stage.name: [over_laer(one.constants, stage) for one in fits] for stage in RANGED}
    return {name: (min(of), max(of)) for name, of in ratios.items()}


def beyond_sheets(falls: Sequence[Fall], of_fits: Mapping[str, tuple[float, float]], num_fits: int) -> list[Sheet]:
    """A waterfall, and what explains it; ``of_fits``: what ``ranges`` gives for ``num_fits`` constants."""
    published = {LAER: statistics.geometric_mean(row.fsdp_ep_s / row.laer_s for row in ROWS)}
    means = []
    for stage in STAGES:
        over_laer, over_static = (geometric_mean(falls, stage, over) for over in (LAER, STATIC))
        least, most = of_fits.get(stage.name, (None, None))
        means.append(StageMean(stage.name, over_laer, least, most, over_static, published.get(stage)))
    ends = of_fits[UNIFIED.name]
    verdict = "met by all" if ends[0] >= BAR else "met by some" if ends[1] >= BAR else "met by none"
    notes = (
        f"{UNIFIED.name}: {ends[0]:.2f} to {ends[1]:.2f}, where {BAR} was wanted: {verdict} of {num_fits} points "
        f"of the grid that fit {FITTED_SHAPE} about as well as the best.",
        "Expert gradients travel in bfloat16, as LAER-MoE's do; ours travel in float32: a row of their own.",
        "published: over static, of LAER-MoE's own rows.",
    )
    return [
        Sheet("SIMULATED: the 24 rows, times as fast as LAER, geometric mean", means, notes),
        Sheet("SIMULATED: stage by stage, seconds of an iteration", falls, group_by="of"),
    ]


def main(out: Path | None = None) -> int:
    """Simulate, write, print; the exit code."""
    fits = as_good(fit(simulate_grid((laer_model(FITTED_SHAPE),)), FITTED_SHAPE, figures_of(FITTED_SHAPE)))
    sheets = beyond_sheets(beyond_rows(fits[0].constants), ranges(fits), len(fits))
    publish_simulated("beyond", "beyond LAER-MoE", [*sheets, sizes_sheet(beyond_sizes())], INTRODUCTION, out)
    return 0
