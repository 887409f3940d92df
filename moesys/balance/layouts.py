"""plan_layout: a load in, who holds what out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from moesys.balance.cp_sat import cp_sat_layout
from moesys.balance.eplb import eplb_layout
from moesys.balance.greedy import greedy_layout
from moesys.balance.laer import laer_layout
from moesys.balance.static import static_layout
from moesys.config import Balance, ClusterSpec, CpSat, Eplb, Greedy, Laer, Static
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix


def plan_layout(
    load: LoadMatrix,
    cluster: ClusterSpec,
    config: Balance,
    slots_per_rank: int | Sequence[int],
    previous: ExpertLayout | None = None,
) -> ExpertLayout:
    """The layout that ``config`` chooses for ``load``, with S as wide as the widest rank.

    ``slots_per_rank`` is one number for all ranks or one a rank. ``previous``, the layout in force, lets ``Greedy`` and
    ``CpSat`` stay with it when it is as good as a new one; the other planners do not look at it.

    Only the proportions of ``load`` matter, so a sum over micro-batches serves as well as their mean.

    Raises ValueError when load, cluster, slots and previous do not belong together, or slots are fewer than experts.
    """
    slots_R = _checked_slots(load, cluster, slots_per_rank)
    if previous is not None:
        _check_previous(previous, load, slots_R)
    match config:
        case Static():
            return static_layout(slots_R, load.num_experts)
        case Eplb():
            return eplb_layout(load, slots_R)
        case Laer():
            return laer_layout(load, cluster, slots_R, config.candidates)
        case Greedy():
            return greedy_layout(load, cluster, slots_R, config.search_moves, previous)
        case CpSat():
            return cp_sat_layout(load, cluster, slots_R, config.deterministic_time, previous)
        case _:
            assert_never(config)


def _checked_slots(load: LoadMatrix, cluster: ClusterSpec, slots_per_rank: int | Sequence[int]) -> tuple[int, ...]:
    if load.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"the load counts {load.num_ranks} source ranks but the cluster has {cluster.num_ranks}; "
            "give one row of tokens_RE a rank"
        )
    one_for_all = isinstance(slots_per_rank, int)
    slots_R = (
        (slots_per_rank,) * cluster.num_ranks if isinstance(slots_per_rank, int) else tuple(map(int, slots_per_rank))
    )
    if len(slots_R) != cluster.num_ranks:
        raise ValueError(
            f"slots_per_rank names {len(slots_R)} ranks but the cluster has {cluster.num_ranks}; "
            "give one number a rank, or one for all"
        )
    if min(slots_R) < 0:
        raise ValueError(f"slots_per_rank={list(slots_R)} has a negative count; use 0 for a rank that holds nothing")
    missing = load.num_experts - sum(slots_R)
    if missing > 0:
        way_out = f"use at least {-(-load.num_experts // len(slots_R))}" if one_for_all else f"add at least {missing}"
        raise ValueError(
            f"slots_per_rank={slots_per_rank if one_for_all else list(slots_R)} gives {sum(slots_R)} slots on "
            f"{len(slots_R)} ranks for {load.num_experts} experts; {way_out}"
        )
    return slots_R


def _check_previous(previous: ExpertLayout, load: LoadMatrix, slots_R: tuple[int, ...]) -> None:
    shape = (previous.num_ranks, previous.num_slots, previous.num_experts)
    wanted = (load.num_ranks, max(slots_R), load.num_experts)
    if shape != wanted:
        raise ValueError(
            f"previous has (ranks, slots, experts) = {shape} but the plan is for {wanted}; "
            "give a previous layout of the same shape, or previous=None"
        )
    for rank, (filled, slots) in enumerate(zip(previous.filled_R.tolist(), slots_R, strict=True)):
        if filled > slots:
            raise ValueError(
                f"previous fills {filled} slots of rank {rank}, which has {slots}; "
                "give a previous layout that fits the slots, or previous=None"
            )
