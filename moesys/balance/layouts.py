"""plan_layout: a load in, who holds what out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moesys.balance.own_planners import own_layout
from moesys.balance.planning_problem import PlanningProblem
from moesys.config import (
    Balance,
    ClusterSpec,
    CpSat,
    Eplb,
    FasterMoe,
    FlexMoe,
    Greedy,
    Laer,
    Llep,
    ModelShape,
    MoonEp,
    Static,
    Strategy,
    UltraEp,
)
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix


def plan_layout(
    load: LoadMatrix,
    cluster: ClusterSpec,
    config: Balance,
    slots_per_rank: int | Sequence[int],
    *,
    model: ModelShape | None = None,
    previous: ExpertLayout | None = None,
    strategy: Strategy | None = None,
    units_per_token: int = 1,
) -> ExpertLayout:
    """Returns the layout that ``config`` chooses for ``load``, with S as wide as the widest rank.

    ``slots_per_rank`` is one number for all ranks or one a rank. ``previous``, the layout in force, lets ``Greedy`` and
    ``CpSat`` stay with it when it is as good as a new one, and is where ``FlexMoe`` begins; the others do not look.
    ``model`` is the layer's shape where it is known: then ``Greedy`` weighs balance against tokens between nodes by
    their seconds on ``cluster``. With ``strategy``, of which it asks how experts and rows travel, it weighs experts on
    their way as well, so that it may leave slots empty. The others count tokens.

    Only the proportions of ``load`` matter, so a sum over micro-batches serves as well as their mean; but
    ``Greedy.move_tokens`` counts in its unit, and beside experts on their way a token is ``units_per_token`` of them.

    Raises ValueError, with the way out, when load, model, cluster, slots and previous do not belong together, and when
    no layout is what ``config`` asks for: too few slots, or too few of them on distinct ranks of a node or domain. So
    does a planner of one's own that raises, or returns what is no layout for these ranks and slots.
    """
    problem = PlanningProblem.of_layout(load, cluster, slots_per_rank, model, previous, strategy, units_per_token)
    # A planner is imported when it is named: some of them load compilers and solvers.
    match config:
        case Static():
            from moesys.balance.baselines.static import static_layout

            return static_layout(problem, config)
        case Eplb():
            from moesys.balance.baselines.eplb import eplb_layout

            return eplb_layout(problem, config)
        case Laer():
            from moesys.balance.baselines.laer import laer_layout

            return laer_layout(problem, config)
        case FlexMoe():
            from moesys.balance.baselines.flex_moe import flex_moe_layout

            return flex_moe_layout(problem, config)
        case Greedy():
            from moesys.balance.greedy.greedy import greedy_layout

            return greedy_layout(problem, config)
        case CpSat():
            from moesys.balance.cp_sat.cp_sat import cp_sat_layout

            return cp_sat_layout(problem, config)
        case MoonEp() | Llep() | UltraEp() | FasterMoe():
            from moesys.balance.quotas import plan_quotas

            return plan_quotas(problem, config).layout
        case _:
            return own_layout(problem, config)


def plan_layouts(
    loads: Sequence[LoadMatrix],
    cluster: ClusterSpec,
    config: Balance,
    slots_per_rank: int | Sequence[int],
    *,
    model: ModelShape | None = None,
    previous: Sequence[ExpertLayout] | None = None,
    threads: int = 1,
) -> list[ExpertLayout]:
    """Returns ``plan_layout`` for each of several layers, of one model and cluster and with as many slots; ``previous``
    has one layout a layer.

    Layers are planned by ``threads`` threads: ``Greedy``'s compiled loops run side by side. The layouts do not depend
    on how many there are.
    """
    if previous is not None and len(previous) != len(loads):
        raise ValueError(f"previous has {len(previous)} layouts for {len(loads)} loads; give one a load, or None")
    if threads < 1:
        raise ValueError(f"threads={threads}; use at least 1")

    def plan(layer: int) -> ExpertLayout:
        in_force = previous[layer] if previous else None
        return plan_layout(loads[layer], cluster, config, slots_per_rank, model=model, previous=in_force)

    if threads == 1:
        return [plan(layer) for layer in range(len(loads))]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(plan, range(len(loads))))
