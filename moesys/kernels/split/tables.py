"""Index tables of a layout, by which the splits on a device find replicas, and what all plans on a device share.

A *replica* is an expert on a rank that holds it, by expert, then rank; a second slot of a rank for the same expert is
none. A *group* is an expert's replicas on one node. The host makes the tables once for each layout. ``fill_quotas``
says how much each source sends to each replica, with the fewest tokens on wires: a lane has a rank, and what lanes need
of each other goes through prefix sums and gathers inside the program. ``keep_within`` replaces a plan that cannot be
run by one without tokens: a rank would get more rows than its memory holds, or the counts do not belong together.

R ranks, E experts, P replicas, L levels of parts of the cluster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel, to_device

IntArray = npt.NDArray[np.int64]
# The fewest lanes of a program, those that a warp gets, and the most warps.
FEWEST_LANES = 32
LANES_OF_WARP = 64
MOST_WARPS = 32


class SplitTables(NamedTuple):
    """All int32, on one device.

    - ``expert_P``, ``rank_P``: whose a replica is;
    - ``replica_ER`` [E, R]: the replica of an expert on a rank, -1 where there is none;
    - ``first_E1`` [E + 1]: expert e's replicas are ``first_E1[e]`` up to ``first_E1[e + 1]``;
    - ``group_first_P``, ``group_last_P``: the first and the last replica of a replica's group;
    - ``by_rank_P``: replicas by rank, then expert; ``first_R1`` [R + 1]: those of rank r are at ``first_R1[r]`` up to
      ``first_R1[r + 1]`` there;
    - ``node_first_R``, ``node_last_R``: the first and the last rank of a rank's node;
    - ``part_first_LR``, ``part_last_LR``: those of its part of the cluster at each level. Parts of the first level are
      ranks, that of the last is everything.
    """

    expert_P: Tensor
    rank_P: Tensor
    replica_ER: Tensor
    first_E1: Tensor
    group_first_P: Tensor
    group_last_P: Tensor
    by_rank_P: Tensor
    first_R1: Tensor
    node_first_R: Tensor
    node_last_R: Tensor
    part_first_LR: Tensor
    part_last_LR: Tensor


def tables_of(
    expert_RS: IntArray, num_experts: int, node_R: IntArray, part_LR: IntArray, device: torch.device | str
) -> SplitTables:
    """Returns the tables of ``expert_RS`` [R, S], the expert in every slot, -1 for none; every expert has a slot.

    ``node_R``: each rank's node; ``part_LR``: its part of the cluster at each level between ranks and everything, the
    finest first. Neither falls from one rank to the next.
    """
    num_ranks = len(expert_RS)
    held_ER = np.zeros((num_experts, num_ranks), dtype=bool)
    for rank in range(num_ranks):
        held_ER[expert_RS[rank][expert_RS[rank] >= 0], rank] = True
    expert_P, rank_P = np.nonzero(held_ER)
    replica_ER = np.full(held_ER.shape, -1)
    replica_ER[expert_P, rank_P] = np.arange(len(rank_P))
    by_rank_P = np.argsort(rank_P, kind="stable")
    group_first_P, group_last_P = _ends_of(expert_P * num_ranks + node_R[rank_P])
    node_first_R, node_last_R = _ends_of(node_R)
    ranks = np.arange(num_ranks)
    part_ends = [_ends_of(part_R) for part_R in (ranks, *part_LR, np.zeros_like(ranks))]
    part_first_LR, part_last_LR = (np.stack(ends) for ends in zip(*part_ends, strict=True))
    tables = (
        expert_P,
        rank_P,
        replica_ER,
        np.searchsorted(expert_P, np.arange(num_experts + 1)),
        group_first_P,
        group_last_P,
        by_rank_P,
        np.searchsorted(rank_P[by_rank_P], np.arange(num_ranks + 1)),
        node_first_R,
        node_last_R,
        part_first_LR,
        part_last_LR,
    )
    return SplitTables(*(to_device(table, device, torch.int32) for table in tables))


def entries_of(tokens_RP: Tensor, tables: SplitTables) -> Tensor:
    """Returns rows (source, expert, destination, tokens) int64 [N, 4] of the plan ``tokens_RP`` int64, sorted, on the
    host, which waits for them.
    """
    tokens_RP = tokens_RP.cpu()
    source, replica = tokens_RP.nonzero(as_tuple=True)
    expert, destination = (of_P.cpu()[replica].long() for of_P in (tables.expert_P, tables.rank_P))
    return torch.stack([source, expert, destination, tokens_RP[source, replica]], dim=1)


def _ends_of(of_N: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the first and the last place of the value at each place; values never fall."""
    return np.searchsorted(of_N, of_N), np.searchsorted(of_N, of_N, side="right") - 1


def fill_quotas(tokens_RE: Tensor, quota_P: Tensor, tables: SplitTables) -> Tensor:
    """Returns ``tokens_RP`` int64: what each source of ``tokens_RE`` int64 [R, E] sends to each replica, so that it
    gets its quota; those of an expert sum to its tokens. A launch, for which nothing waits.
    """
    num_ranks, num_experts = tokens_RE.shape
    num_replicas = len(quota_P)
    tokens_RP = tokens_RE.new_empty(num_ranks, num_replicas)
    _fill_quotas[(num_replicas,)](
        tokens_RE, quota_P, tables, tokens_RP, num_ranks, num_experts, len(tables.part_first_LR), **lanes_of(num_ranks)
    )
    return tokens_RP


def lanes_of(number: int) -> dict[str, int]:
    """Returns the launch options of a program with at least ``number`` lanes, two of them per thread."""
    lanes = max(FEWEST_LANES, triton.next_power_of_2(number))
    return {"LANES": lanes, "num_warps": min(MOST_WARPS, max(1, lanes // LANES_OF_WARP))}


@triton.jit
def sum_of(values, first, last):  # type: ignore[no-untyped-def]
    """Returns the sum of the values from lane ``first`` to lane ``last``."""
    up_to = tl.cumsum(values, 0)
    return tl.gather(up_to, last, 0) - tl.gather(up_to - values, first, 0)


@triton.jit
def sum_before(values, first):  # type: ignore[no-untyped-def]
    """Returns the sum of the values from lane ``first`` up to the own lane, which does not count."""
    before = tl.cumsum(values, 0) - values
    return before - tl.gather(before, first, 0)


@kernel(do_not_specialize=["num_ranks", "num_experts", "num_levels"])
def _fill_quotas(  # type: ignore[no-untyped-def]
    tokens_RE, quota_P, tables, tokens_RP, num_ranks, num_experts, num_levels, LANES: tl.constexpr
):
    """Computes the tokens that each source sends to a replica, with one replica per program and one source per lane.

    In each part of the cluster, an expert's sources are intervals one after another, each as long as its tokens, and so
    are its replicas: a source sends to a replica the overlap of the two intervals. The finest parts come first.
    """
    replica = tl.program_id(0).to(tl.int64)
    expert, own_rank = tl.load(tables.expert_P + replica).to(tl.int64), tl.load(tables.rank_P + replica)
    rank = tl.arange(0, LANES)
    inside = rank < num_ranks
    own = rank == own_rank
    supply = tl.load(tokens_RE + rank.to(tl.int64) * num_experts + expert, mask=inside, other=0)
    holder = tl.load(tables.replica_ER + expert * num_ranks + rank, mask=inside, other=-1)
    demand = tl.load(quota_P + holder, mask=holder >= 0, other=0)
    sent = tl.zeros([LANES], tl.int64)
    for level in range(num_levels):
        first = tl.load(tables.part_first_LR + level * num_ranks + rank, mask=inside, other=rank)
        last = tl.load(tables.part_last_LR + level * num_ranks + rank, mask=inside, other=rank)
        begin, begin_demand = sum_before(supply, first), sum_before(demand, first)
        end, end_demand = begin + supply, begin_demand + demand
        own_first = tl.sum(tl.where(own, first, 0), 0)
        own_begin, own_end = tl.sum(tl.where(own, begin_demand, 0), 0), tl.sum(tl.where(own, end_demand, 0), 0)
        overlap = tl.maximum(tl.minimum(end, own_end) - tl.maximum(begin, own_begin), 0)
        sent += tl.where(first == own_first, overlap, 0)
        # The shorter line of a part is used up, the longer one as far as that reaches.
        length, length_demand = tl.gather(end, last, 0), tl.gather(end_demand, last, 0)
        supply = tl.minimum(supply, tl.maximum(end - length_demand, 0))
        demand = tl.minimum(demand, tl.maximum(end_demand - length, 0))
    tl.store(tokens_RP + rank.to(tl.int64) * tl.num_programs(0) + replica, sent, mask=inside)


def keep_within(
    tokens_RP: Tensor, tables: SplitTables, room: int, choices: int, origin_R2: Tensor, call: int, found_9: Tensor
) -> Tensor:
    """Returns the plan ``tokens_RP`` int64, or a plan without tokens if it cannot be run; the reason is written into
    ``found_9`` int64. Takes one launch.

    If the plan sends a rank more than ``room`` rows, ``found_9[:4]`` is (the first rank that gets most rows, its rows,
    ``room``, ``choices``). If the counts of a rank belong to another call than ``call`` (``origin_R2``: the ``Origin``
    of each rank), or if some of its choices name no expert, ``found_9[4:]`` is (the first rank in another call + 1, its
    call, the first rank with choices that name no expert + 1, the number of these choices, ``call``).
    """
    num_ranks, num_replicas = tokens_RP.shape
    kept_RP = torch.empty_like(tokens_RP)
    lanes = triton.next_power_of_2(num_replicas)
    bounds = (room, choices, call, num_replicas)
    _keep[(num_ranks,)](tokens_RP, tables, kept_RP, found_9, origin_R2, *bounds, LANES=lanes)
    return kept_RP


@kernel(do_not_specialize=["room", "choices", "call", "num_replicas"])
def _keep(  # type: ignore[no-untyped-def]
    tokens_RP, tables, kept_RP, found_9, origin_R2, room, choices, call, num_replicas, LANES: tl.constexpr
):
    """Keeps the plan of one source per program; each program reads the whole plan."""
    own, num_ranks = tl.program_id(0), tl.num_programs(0)
    replica = tl.arange(0, LANES)
    inside = replica < num_replicas
    rank = tl.load(tables.rank_P + replica, mask=inside, other=-1)
    tokens = tl.zeros([LANES], tl.int64)
    stranger = tl.full([], 0, tl.int64)
    strangers_call = tl.full([], 0, tl.int64)
    loser = tl.full([], 0, tl.int64)
    lost = tl.full([], 0, tl.int64)
    for source in range(num_ranks):
        sent = tl.load(tokens_RP + source * num_replicas + replica, mask=inside, other=0)
        tokens += sent
        its_call, its_choices = tl.load(origin_R2 + source * 2), tl.load(origin_R2 + source * 2 + 1)
        other = (its_call != call) & (its_call != 0) & (stranger == 0)
        stranger = tl.where(other, source + 1, stranger)
        strangers_call = tl.where(other, its_call, strangers_call)
        missing = its_choices - tl.sum(sent, 0)
        loses = (its_choices >= 0) & (missing != 0) & (loser == 0)
        loser = tl.where(loses, source + 1, loser)
        lost = tl.where(loses, missing, lost)
    most = tl.full([], -1, tl.int64)
    busiest = tl.full([], 0, tl.int64)
    for each in range(num_ranks):
        rows = tl.sum(tl.where(rank == each, tokens, 0), 0)
        busiest = tl.where(rows > most, each, busiest)
        most = tl.maximum(most, rows)
    at = own * num_replicas + replica
    sent = tl.load(tokens_RP + at, mask=inside, other=0)
    together = (stranger == 0) & (loser == 0)
    tl.store(kept_RP + at, tl.where((most <= room) & together, sent, 0), mask=inside)
    if own == 0:
        if most > room:
            tl.store(found_9, busiest)
            tl.store(found_9 + 1, most)
            tl.store(found_9 + 2, tl.cast(room, tl.int64))
            tl.store(found_9 + 3, tl.cast(choices, tl.int64))
        if not together:
            tl.store(found_9 + 4, stranger)
            tl.store(found_9 + 5, strangers_call)
            tl.store(found_9 + 6, loser)
            tl.store(found_9 + 7, lost)
            tl.store(found_9 + 8, tl.cast(call, tl.int64))
