"""plan_layout: a load in, who holds what out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import assert_never

from moesys.balance.baselines.eplb import eplb_layout
from moesys.balance.baselines.flex_moe import flex_moe_layout
from moesys.balance.baselines.laer import laer_layout
from moesys.balance.baselines.static import static_layout
from moesys.balance.certificate import domains_of
from moesys.balance.cp_sat.cp_sat import cp_sat_layout
from moesys.balance.greedy.greedy import greedy_layout
from moesys.balance.replicas import experts_with_room
from moesys.config import Balance, ClusterSpec, CpSat, Eplb, FlexMoe, Greedy, Laer, Static
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
    ``CpSat`` stay with it when it is as good as a new one, and is where ``FlexMoe`` begins; the others do not look.

    Only the proportions of ``load`` matter, so a sum over micro-batches serves as well as their mean; but
    ``Greedy.move_tokens`` counts in its unit.

    Raises ValueError, with the way out, when load, cluster, slots and previous do not belong together, and when no
    layout is what ``config`` asks for: too few slots, or too few of them on distinct ranks of a node or domain.
    """
    slots_R = _checked_slots(load, cluster, slots_per_rank)
    if previous is not None:
        _check_previous(previous, load, slots_R)
    if isinstance(config, Greedy | CpSat):
        _check_replicas(config, load.num_experts, cluster, slots_R)
    match config:
        case Static():
            return static_layout(slots_R, load.num_experts)
        case Eplb():
            return eplb_layout(load, cluster, slots_R, config)
        case Laer():
            return laer_layout(load, cluster, slots_R, config.candidates)
        case FlexMoe():
            return flex_moe_layout(load, slots_R, config.max_moves, previous)
        case Greedy():
            return greedy_layout(load, cluster, slots_R, config, previous)
        case CpSat():
            return cp_sat_layout(load, cluster, slots_R, config, previous)
        case _:
            assert_never(config)


def plan_layouts(
    loads: Sequence[LoadMatrix],
    cluster: ClusterSpec,
    config: Balance,
    slots_per_rank: int | Sequence[int],
    previous: Sequence[ExpertLayout] | None = None,
    threads: int = 1,
) -> list[ExpertLayout]:
    """``plan_layout`` for each of several layers, of one cluster and as many slots; ``previous`` has one a layer.

    Layers are planned by ``threads`` threads: ``Greedy``'s compiled loops run side by side. The layouts do not depend
    on how many there are.
    """
    if previous is not None and len(previous) != len(loads):
        raise ValueError(f"previous has {len(previous)} layouts for {len(loads)} loads; give one a load, or None")
    if threads < 1:
        raise ValueError(f"threads={threads}; use at least 1")

    def plan(layer: int) -> ExpertLayout:
        return plan_layout(loads[layer], cluster, config, slots_per_rank, previous[layer] if previous else None)

    if threads == 1:
        return [plan(layer) for layer in range(len(loads))]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(plan, range(len(loads))))


def _checked_slots(load: LoadMatrix, cluster: ClusterSpec, slots_per_rank: int | Sequence[int]) -> tuple[int, ...]:
    if load.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"the load counts {load.num_ranks} source ranks but the cluster has {cluster.num_ranks}; "
            "give one row of tokens_RE a rank"
        )
    one_for_all = not isinstance(slots_per_rank, Iterable)
    given = tuple(slots_per_rank) if isinstance(slots_per_rank, Iterable) else (slots_per_rank,) * cluster.num_ranks
    if not all(isinstance(slots, Integral) and not isinstance(slots, bool) for slots in given):
        raise ValueError(f"slots_per_rank={slots_per_rank} counts slots; give integers")
    slots_R = tuple(map(int, given))
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


def _check_replicas(config: Greedy | CpSat, num_experts: int, cluster: ClusterSpec, slots_R: tuple[int, ...]) -> None:
    """That every expert can have its replicas on distinct ranks of one place, at once with all others."""
    wanted, within = config.min_replicas, config.replicas_within
    if wanted == 1 and within == "cluster":
        return  # slots are enough
    slots_by_place: dict[int, list[int]] = {}
    for slots, place in zip(slots_R, domains_of(cluster, within), strict=True):
        slots_by_place.setdefault(place, []).append(slots)
    most = max(sum(slots > 0 for slots in place) for place in slots_by_place.values())
    if wanted > most:
        if within == "cluster":
            raise ValueError(
                f"min_replicas={wanted} needs as many ranks with slots, and there are {most}; "
                f"use min_replicas <= {most} or give more ranks slots"
            )
        raise ValueError(
            f"min_replicas={wanted} with replicas_within={within!r} needs as many ranks with slots in one {within}, "
            f"and the most are {most}; use min_replicas <= {most} or replicas_within='cluster'"
        )
    room = [experts_with_room(wanted, place, num_experts) for place in slots_by_place.values()]
    if sum(room) >= num_experts:
        return
    if within == "cluster":
        usable = sum(min(slots, num_experts) for slots in slots_R)
        raise ValueError(
            f"min_replicas={wanted} for {num_experts} experts takes {wanted * num_experts} slots, at most "
            f"{num_experts} of them on a rank, and there are {usable}; add at least {wanted * num_experts - usable} or "
            "use a smaller min_replicas"
        )
    raise ValueError(
        f"replicas_within={within!r} with min_replicas={wanted} has room for {room} experts by {within}, in all "
        f"{sum(room)} of {num_experts}; add slots, use a smaller min_replicas or replicas_within='cluster'"
    )
