"""The baselines' splits of counts that are on a device: even and proportional, the same bytes as on the host.

``even_split`` is ``EvenSplit`` (docs/balance.md), LAER-MoE's lite routing: a source's tokens for an expert go evenly
over the slots that hold it on the source's node, or over all slots if its node has none; what is left over goes one
each to consecutive slots, the first of which ``turn`` moves. It takes one kernel, on tables of R·Q numbers.

``proportional_split`` is ``Proportional`` (docs/balance.md): a replica's quota is in proportion to the room
that the other experts leave on its rank, rounded by largest remainder, ties by rank from the one at ``turn`` on. One
kernel finds quotas, and another one fills them.

R ranks, E experts, P replicas, as in ``tables``; Q filled slots, by expert, then rank.
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
from moesys.kernels.split.tables import IntArray, SplitTables, fill_quotas

# A product of two numbers that have at most this many bits together fits int64.
PRODUCT_BITS = tl.constexpr(62)
# Experts that a program looks at together, and its warps.
EXPERTS = 16
WARPS = 8


class EvenTables(NamedTuple):
    """All int64, on one device, made once a layout.

    ``expert_Q``: what a slot holds. ``sharing_RQ``: over how many slots a source's tokens for that expert go;
    ``place_RQ``: the slot's place among them, -1 where it is none of them. ``last_P``: the last slot of a replica.
    """

    expert_Q: Tensor
    sharing_RQ: Tensor
    place_RQ: Tensor
    last_P: Tensor


def even_tables(expert_RS: IntArray, node_R: IntArray, device: torch.device | str) -> EvenTables:
    """Returns the tables of ``expert_RS`` [R, S], the expert in every slot, -1 for none; ``node_R``: each
    rank's node.
    """
    rank_Q, slot_Q = np.nonzero(expert_RS >= 0)
    expert_Q = expert_RS[rank_Q, slot_Q]
    by_expert_Q = np.argsort(expert_Q, kind="stable")
    expert_Q, rank_Q = expert_Q[by_expert_Q], rank_Q[by_expert_Q]
    near_RQ = node_R[:, None] == node_R[rank_Q]
    open_RQ = near_RQ | (_counted(near_RQ, expert_Q)[1] == 0)
    place_RQ, sharing_RQ = _counted(open_RQ, expert_Q)
    last_Q = np.r_[(np.diff(expert_Q) != 0) | (np.diff(rank_Q) != 0), True]
    tables = (expert_Q, sharing_RQ, np.where(open_RQ, place_RQ, -1), np.flatnonzero(last_Q))
    return EvenTables(*(to_device(table, device) for table in tables))


def _counted(chosen_RQ: npt.NDArray[np.bool_], expert_Q: IntArray) -> tuple[IntArray, IntArray]:
    """Returns [R, Q] twice: how many of the chosen slots of a slot's expert come before it, and how many there are."""
    up_to_RQ = chosen_RQ.cumsum(1)
    first_Q, last_Q = np.searchsorted(expert_Q, expert_Q), np.searchsorted(expert_Q, expert_Q, side="right") - 1
    before_RQ = (up_to_RQ - chosen_RQ)[:, first_Q]
    return up_to_RQ - chosen_RQ - before_RQ, up_to_RQ[:, last_Q] - before_RQ


def even_split(tokens_RE: Tensor, tables: EvenTables, turn: int) -> Tensor:
    """Returns ``tokens_RP`` int64: what each source of ``tokens_RE`` int64 [R, E] sends to each replica. One launch."""
    (num_ranks, num_experts), num_slots = tokens_RE.shape, len(tables.expert_Q)
    num_replicas = len(tables.last_P)
    tokens_RP = tokens_RE.new_empty(num_ranks, num_replicas)
    lanes = triton.next_power_of_2(num_slots)
    _split_evenly[(num_ranks,)](
        tokens_RE.contiguous(), tables, tokens_RP, turn, num_experts, num_slots, num_replicas, LANES=lanes
    )
    return tokens_RP


@kernel(do_not_specialize=["turn", "num_experts", "num_slots", "num_replicas"])
def _split_evenly(  # type: ignore[no-untyped-def]
    tokens_RE, tables, tokens_RP, turn, num_experts, num_slots, num_replicas, LANES: tl.constexpr
):
    """Splits the tokens of one source per program, with one slot per lane, and then one replica."""
    source, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside = lane < num_slots
    expert = tl.load(tables.expert_Q + lane, mask=inside, other=0)
    place = tl.load(tables.place_RQ + source * num_slots + lane, mask=inside, other=-1)
    sharing = tl.load(tables.sharing_RQ + source * num_slots + lane, mask=inside, other=1)
    tokens = tl.load(tokens_RE + source * num_experts + expert, mask=inside, other=0)
    # The remainder of a negative number is negative here.
    behind = ((place - turn) % sharing + sharing) % sharing
    share = tokens // sharing + (behind < tokens % sharing).to(tl.int64)
    up_to = tl.cumsum(tl.where(place >= 0, share, 0), 0)
    real = lane < num_replicas
    last = tl.load(tables.last_P + lane, mask=real, other=0).to(tl.int32)
    before = tl.load(tables.last_P + lane - 1, mask=real & (lane > 0), other=0).to(tl.int32)
    end, begin = tl.gather(up_to, last, 0), tl.where(lane > 0, tl.gather(up_to, before, 0), 0)
    tl.store(tokens_RP + source * num_replicas + lane, end - begin, mask=real)


class ProportionalTables(NamedTuple):
    """Made once a layout, on one device. ``replicas_RE`` int64: slots of each expert on each rank."""

    split: SplitTables
    replicas_RE: Tensor


def proportional_tables(split: SplitTables, replicas_RE: IntArray) -> ProportionalTables:
    """Returns the tables of ``split`` with ``replicas_RE`` of the same layout."""
    return ProportionalTables(split, to_device(replicas_RE.copy(), split.rank_P.device))


def proportional_split(tokens_RE: Tensor, tables: ProportionalTables, turn: int) -> Tensor:
    """Returns ``tokens_RP`` int64: what each source of ``tokens_RE`` int64 [R, E] sends to each replica. Two
    launches.
    """
    num_ranks, num_experts = tokens_RE.shape
    tokens_RE, quota_P = tokens_RE.contiguous(), tokens_RE.new_empty(len(tables.split.rank_P))
    _share_by_room[(num_experts,)](
        tokens_RE,
        tables,
        quota_P,
        turn,
        num_ranks,
        num_experts,
        EXPERTS,
        triton.next_power_of_2(num_ranks),
        num_warps=WARPS,
    )
    return fill_quotas(tokens_RE, quota_P, tables.split)


@kernel(do_not_specialize=["turn", "num_ranks", "num_experts"])
def _share_by_room(  # type: ignore[no-untyped-def]
    tokens_RE, tables, quota_P, turn, num_ranks, num_experts, EXPERTS: tl.constexpr, LANES: tl.constexpr
):
    """Finds the quotas of one expert per program, one rank per lane, from the room that all other experts leave on
    ranks.
    """
    expert = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, LANES)
    inside = rank < num_ranks
    row = rank.to(tl.int64) * num_experts
    even, slots = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    total, largest = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, num_experts, EXPERTS):
        column = start + tl.arange(0, EXPERTS)
        at = row[:, None] + column[None, :]
        real = inside[:, None] & (column < num_experts)[None, :]
        of_each = tl.sum(tl.load(tokens_RE + at, mask=real, other=0), 0)
        replicas = tl.load(tables.replicas_RE + at, mask=real, other=0)
        even += tl.sum(of_each[None, :] * replicas // tl.maximum(tl.sum(replicas, 0), 1)[None, :], 1)
        slots += tl.sum(replicas, 1)
        total += tl.sum(of_each, 0)
        largest = tl.maximum(largest, tl.max(of_each, 0))
    holding = tl.sum((slots > 0).to(tl.int64), 0)
    mean = (total + holding - 1) // holding
    tokens = tl.sum(tl.load(tokens_RE + row + expert, mask=inside, other=0), 0)
    replicas = tl.load(tables.replicas_RE + row + expert, mask=inside, other=0)
    holds = replicas > 0
    others = even - tokens * replicas // tl.sum(replicas, 0)
    room = tl.where(holds, tl.maximum(mean - others, 0), 0)
    # Rooms lose low bits only where their product with an expert's tokens would not fit.
    room = room >> tl.maximum(_bits(mean) + _bits(largest) - PRODUCT_BITS, 0)
    weight = tl.where(tl.max(room, 0) > 0, room, replicas)

    # Quotas in proportion: floors, and one more for the largest remainders; the lower place wins a tie.
    share, whole = tokens * weight, tl.sum(weight, 0)
    quota, remainder = share // whole, share % whole
    holders = tl.sum(holds.to(tl.int64), 0)
    place = ((tl.cumsum(holds.to(tl.int64), 0) - 1 - turn) % holders + holders) % holders
    place = tl.where(holds, place, LANES)
    ranked = tl.zeros([LANES], tl.int64)
    for away in range(1, LANES):
        other = (rank + away) % LANES
        other_remainder, other_place = tl.gather(remainder, other, 0), tl.gather(place, other, 0)
        earlier = (other_remainder == remainder) & (other_place < place)
        ranked += ((other_remainder > remainder) | earlier).to(tl.int64)
    quota += (ranked < tokens - tl.sum(quota, 0)).to(tl.int64)
    replica = tl.load(tables.split.replica_ER + expert * num_ranks + rank, mask=inside, other=-1)
    tl.store(quota_P + replica, quota, mask=replica >= 0)


@triton.jit
def _bits(number):  # type: ignore[no-untyped-def]
    """Returns how many bits a number has."""
    bit = tl.arange(0, 64).to(tl.int64)
    # Bit 63 is left out: a shift by 63 gives a negative number.
    return tl.sum(((bit < 63) & (number >= tl.full([], 1, tl.int64) << tl.minimum(bit, 62))).to(tl.int64), 0)
