"""What lies beyond LAER-MoE: its 24 rows with our split, our layouts and overlap, one after another.

Everything but what a stage names stays as LAER-MoE has it: hardware, attention, dispatcher, recomputation, traffic of
parameters; drawn routing and constants are those of ``moesys bench reproduce``. Overlap pays for its finer pieces:
where there is some, launches, flags and latencies take time and products come in waves of tiles, which LAER-MoE's own
stages are spared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from moesys.bench.laer.constants import CONSTANTS
from moesys.bench.laer.plans import Planner, Plans, mean_max_over_mean
from moesys.bench.laer.published import ROWS
from moesys.bench.laer.reproduction import mean_seconds, planned, seed_seconds
from moesys.bench.laer.step import MODELS, Constants, LaerModel, Seconds, laer_strategy
from moesys.config import ClusterSpec, MegaKernel, Overlap, Pipelined, Sequential, presets

# Stages differ far more than draws of routing do: fewer seeds than the published rows take.
SEEDS = (0, 1, 2)
ITERATIONS = (20, 44, 68)
_SEQUENTIAL = Sequential()


@dataclass(frozen=True)
class Stage:
    """A step of the waterfall: what differs from the stage before is in its name."""

    name: str
    planner: Planner
    overlap: Overlap = _SEQUENTIAL
    gradient_bytes: int = 2


STAGES = (
    Stage("static", "FSDP+EP"),
    Stage("LAER's layout", "LAER"),
    Stage("flow split", "LAER, flow"),
    Stage("our layout", "greedy, flow"),
    Stage("overlap in 4 chunks", "greedy, flow", Pipelined(chunks=4)),
    Stage("MegaKernel: unified", "greedy, flow", MegaKernel()),
    Stage("its gradients in float32", "greedy, flow", MegaKernel(), gradient_bytes=4),
)
LAER_STAGE, UNIFIED_STAGE = 1, 5
# The least calm that LAER-MoE's fitted rows leave room for, within two standard errors of their draws (the page of
# ``moesys bench reproduce``): to see what hangs on it.
OTHER_FIT = replace(CONSTANTS, calm=4.0, dispatcher_ms=8.0)


@dataclass(frozen=True)
class Fall:
    """A shape at a stage. inter_node_share: of the routed rows."""

    model: str
    stage: Stage
    seconds: Seconds
    max_over_mean: float
    inter_node_share: float


@dataclass(frozen=True)
class Beyond:
    """All shapes at all stages."""

    falls: tuple[Fall, ...]

    def of(self, model: LaerModel, stage: Stage) -> Fall:
        return next(fall for fall in self.falls if MODELS[fall.model] == model and fall.stage == stage)

    def geometric_mean(self, stage: Stage, over: Stage) -> float:
        """Over the rows of the shapes simulated: how many times the seconds of ``over`` are those of ``stage``."""
        ratios = [
            self.of(MODELS[row.model], over).seconds.total / self.of(MODELS[row.model], stage).seconds.total
            for row in ROWS
            if any(MODELS[fall.model] == MODELS[row.model] for fall in self.falls)
        ]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))


def beyond(
    constants: Constants = CONSTANTS,
    seeds: Sequence[int] = SEEDS,
    iterations: Sequence[int] = ITERATIONS,
    tell: Callable[[str], None] | None = None,
    models: Collection[LaerModel] = tuple(MODELS.values()),
    stages: Sequence[Stage] = STAGES,
) -> Beyond:
    """The waterfall of every shape; the same arguments give the same figures."""
    planners = tuple(dict.fromkeys(stage.planner for stage in stages))
    settings = tuple(dict.fromkeys(model.setting for model in models))
    found = planned(planners, constants, seeds, settings, iterations, tell)
    falls = []
    for model, name in {model: name for name, model in reversed(MODELS.items()) if model in models}.items():
        if tell:
            tell(f"stages of {name}")
        for stage in stages:
            plans = found[model.setting, stage.planner]
            strategy = laer_strategy(model).replace(overlap=stage.overlap)
            changed = replace(model, gradient_bytes=stage.gradient_bytes)
            cluster = constants.cluster if stage.overlap == _SEQUENTIAL else in_tiles(constants.cluster)
            of_seeds = seed_seconds(changed, constants, plans, iterations, strategy=strategy, cluster=cluster)
            falls.append(
                Fall(
                    name,
                    stage,
                    mean_seconds(of_seeds),
                    mean_max_over_mean(plans, iterations),
                    _inter_node_share(plans, constants),
                )
            )
    return Beyond(tuple(falls))


def in_tiles(cluster: ClusterSpec) -> ClusterSpec:
    """With the multiprocessors, tiles and latencies of an A100, as overlap needs them."""
    gpu = presets.a100(cluster.num_nodes)
    names = ("multiprocessors", "tile_rows", "tile_columns", "launch_us", "flag_us", "intra_node_us", "inter_node_us")
    return cluster.replace(**{name: getattr(gpu, name) for name in names})


def _inter_node_share(found: Sequence[Plans], constants: Constants) -> float:
    nodes = constants.cluster.node_of_rank
    plans = [plan for of_seed in found for parts in of_seed.values() for part in parts for plan in part]
    return sum(plan.inter_node_tokens(nodes) for plan in plans) / sum(plan.load.total for plan in plans)
