"""plan_layout and split_tokens: a declared planner or split, applied to a problem that was checked before.

What a planner or a split of the user's own returns is checked too, before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from moesys.balance.planning_problem import PastBatch, PlanningProblem
from moesys.compiled import compile_or_use_python
from moesys.config import Balance, ClusterSpec, Ep, ModelShape, Overlap, Split, Strategy
from moesys.layout import EMPTY, ExpertLayout, TokenPlan
from moesys.load import LoadMatrix


def plan_layout(
    load: LoadMatrix,
    cluster: ClusterSpec,
    config: Balance | str,
    slots_per_rank: int | Sequence[int],
    *,
    model: ModelShape | None = None,
    previous: ExpertLayout | None = None,
    strategy: Strategy | None = None,
    units_per_token: int = 1,
) -> ExpertLayout:
    """Returns the layout that ``config`` chooses for ``load``, with S as wide as the widest rank.

    ``config`` is a planner or, for its defaults, its kind alone, such as "greedy".
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
    if not isinstance(config, Balance):
        config = Balance.model_validate(config)
    return planned(problem, config)[0]


def planned(problem: PlanningProblem, config: Balance) -> tuple[ExpertLayout, bytes]:
    """Returns the layout that ``config`` chooses, and what it is to find in ``problem.memory`` the next time."""
    if config.kind not in Balance.table:
        return checked_layout(problem, config), b""
    plan: tuple[ExpertLayout, bytes] = config.plan(problem)
    return plan


def split_tokens(
    load: LoadMatrix,
    layout: ExpertLayout,
    cluster: ClusterSpec,
    config: Split | str,
    turn: int = 0,
    *,
    model: ModelShape | None = None,
    overlap: Overlap | None = None,
) -> TokenPlan:
    """Divides the tokens of ``load`` over the replicas of ``layout``, as ``config`` says, which is a split or, for its
    defaults, its kind alone.

    ``turn``, the number of the micro-batch, rotates the tokens that do not divide evenly over the replicas. ``model``
    is the layer's shape, if known: ``FlowSplit(max_inter_node="seconds")`` needs it, other splits count tokens.
    ``overlap`` decides how rows travel: if each node returns one sum, ``FlowSplit`` prefers near nodes.

    Raises ValueError when load, model, layout and cluster do not belong together, where a split by seconds gets no
    model, for ``Quotas``, and where a split of one's own raises, or returns what does not send every token to a holder.
    """
    problem = PlanningProblem.of_split(load, layout, cluster, turn, model, overlap)
    if not isinstance(config, Split):
        config = Split.model_validate(config)
    plan: TokenPlan = config.split(problem) if config.kind in Split.table else checked_split(problem, config)
    return plan


def checked_layout(problem: PlanningProblem, config: Balance) -> ExpertLayout:
    """Returns ``config.layout(problem)``.

    Raises ValueError, which names the class, where that raises, and where it is no layout for the problem: of other
    ranks, experts or slots, with more experts on a rank than it has slots, or with one twice on a rank.
    """
    name = f"balance={config.kind}"
    layout = _called(f"{name}: layout(problem)", config.layout, problem, ExpertLayout)
    R, S, E = len(problem.slots_R), max(problem.slots_R), problem.load.num_experts
    if (layout.expert_RS.shape, layout.num_experts) != ((R, S), E):
        raise ValueError(
            f"{name}: layout(problem) returned expert_RS of shape {list(layout.expert_RS.shape)} for "
            f"{layout.num_experts} experts; return [{R}, {S}] for {E}, rows as wide as the most slots of a rank, with "
            f"{EMPTY} in empty slots"
        )
    for rank, (filled, slots) in enumerate(zip(layout.filled_R.tolist(), problem.slots_R, strict=True)):
        if filled > slots:
            raise ValueError(
                f"{name}: layout(problem) put {filled} experts on rank {rank}, which has {slots} slots; put at most as "
                f"many as problem.slots_R says, and {EMPTY} into the rest of the row"
            )
    if layout.num_duplicates:
        rank, expert = np.argwhere(layout.replicas_RE > 1)[0].tolist()
        raise ValueError(
            f"{name}: layout(problem) put expert {expert} on rank {rank} {layout.replicas_RE[rank, expert]} times, "
            f"which wastes a slot; put it on another rank, or leave the slot empty ({EMPTY})"
        )
    return layout


def checked_split(problem: PlanningProblem, config: Split) -> TokenPlan:
    """Returns ``config.split(problem)``.

    Raises ValueError, which names the class, where that raises, and where it is no plan for the problem: where it does
    not sum to the load, or sends tokens to a rank that does not hold their expert.
    """
    name = f"split={config.kind}"
    plan = _called(f"{name}: split(problem)", config.split, problem, TokenPlan)
    try:
        # Built again, because a split of one's own may return a plan that was not checked, or one for another load.
        return TokenPlan(plan.entries, problem.load, problem.layout_in_force)
    except ValueError as error:
        raise ValueError(f"{name}: split(problem) returned a plan that cannot be: {error}") from None


def _called(what: str, method: Callable[[PlanningProblem], Any], problem: PlanningProblem, kind: type[Any]) -> Any:
    try:
        returned = method(problem)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}") from error
    if not isinstance(returned, kind):
        raise ValueError(f"{what} returned {type(returned).__name__}; let it return an ms.planning.{kind.__name__}")
    return returned


# Ranks times experts of a problem that is planned in Python within a few tenths of a second.
_SMALL = 64


def warm_up(
    balance: Balance | None = None,
    split: Split | None = None,
    *,
    late_slots: bool = False,
    load_size: int | None = None,
) -> None:
    """Loads the compiled loops that a planner and a split need (``Greedy``'s and ``FlowSplit``'s, if none are given),
    and with ``late_slots`` the choice of what fills them.

    They are compiled once per installation, which takes about two minutes, says so in a line, and lets other processes
    wait; then they are kept on disk beside the source (or where NUMBA_CACHE_DIR says). Processes that start
    others, or that others wait for, call this before; loading takes less than a second, and is done once per process.
    ``load_size``: ranks times experts of the problems to come. For a small one nothing is compiled: without
    machine code on the disk, Python makes the same plans.
    """
    loops = "greedy" if balance is None or balance.is_compiled else "static"
    # One's own may not be made for so small a problem, and has nothing of ours to compile.
    config = None
    if split is None or split.own_code is None:
        config = Split.class_of("flow")() if split is None or split.follows_planner else split
    _load_loops(loops, config, late_slots, load_size is not None and load_size <= _SMALL)


@cache
def _load_loops(loops: str, split: Split | None, late_slots: bool, small: bool) -> None:
    command = "python -c 'from moesys.balance.run_planner import warm_up; warm_up()'"
    way_out = f"to compile them once, or to wait for a process that does: {command}" if small else ""
    run = partial(_run_loops, Balance.class_of(loops)(), split, late_slots)
    compile_or_use_python(Path(__file__).parent, run, way_out)


def _run_loops(planner: Balance, split: Split | None, late_slots: bool) -> None:
    """Plans a small problem by all loops of the planner and the split, with a history as in training."""
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=2)
    load = LoadMatrix(np.array([[9, 1, 1, 1], [1, 9, 1, 1], [5, 2, 2, 2], [1, 1, 1, 7]]))
    model = ModelShape(hidden_size=1, intermediate_size=1, num_experts=4, top_k=1)
    layout = plan_layout(load, cluster, planner, 3)
    turned, lent = LoadMatrix(load.tokens_RE[:, ::-1]), Strategy(name="lent", sharding=Ep(slots_per_rank=3))
    problem = PlanningProblem.of_layout(turned, cluster, 3, model, layout, lent)
    recent = tuple(PastBatch(number, each, layout) for number, each in enumerate((load, turned) * 2))
    layout, _ = planned(replace(problem, recent=recent), planner)
    if late_slots:
        from moesys.balance.late_slots import fill_late_slots

        layout = fill_late_slots(turned, layout, cluster, model, Ep(), (1,) * 4)
    if split is not None:
        from moesys.balance.row_blocks import by_blocks

        by_blocks(split_tokens(turned, layout, cluster, split, model=model), 2)
