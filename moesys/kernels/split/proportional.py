"""The proportional split of counts that are on a device: a kernel that finds quotas, and one that fills them.

It is ``Proportional`` (docs/math.md), to the byte: a replica's quota of its expert is in proportion to the room that
the other experts leave on its rank, rounded by largest remainder, ties by rank from the one at ``turn`` on.

R ranks, E experts, P replicas, as in ``tables``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.host_copies import to_device
from moesys.kernels.launch import kernel
from moesys.kernels.split.sources import fill_quotas
from moesys.kernels.split.tables import IntArray, SplitTables

# Products of two numbers of so many bits together fit int64.
PRODUCT_BITS = tl.constexpr(62)
# Experts that a program looks at together, and its warps.
EXPERTS = 16
WARPS = 8


class ProportionalTables(NamedTuple):
    """Made once a layout, on one device. ``replicas_RE`` int64: slots of each expert on each rank."""

    split: SplitTables
    replicas_RE: Tensor


def proportional_tables(split: SplitTables, replicas_RE: IntArray) -> ProportionalTables:
    """``replicas_RE`` of the layout that ``split`` is of."""
    return ProportionalTables(split, to_device(replicas_RE.copy(), split.rank_P.device))


def proportional_split(tokens_RE: Tensor, tables: ProportionalTables, turn: int) -> Tensor:
    """``tokens_RP`` int64: what each source of ``tokens_RE`` int64 [R, E] sends to each replica. Two launches."""
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
    """One expert a program, one rank a lane; each looks at all experts, for what they leave of ranks."""
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

    # In proportion: floors, and one more for the largest remainders, of equal ones by place.
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
    """How many bits a number has."""
    bit = tl.arange(0, 64).to(tl.int64)
    # Of the last only that it is none.
    return tl.sum(((bit < 63) & (number >= tl.full([], 1, tl.int64) << tl.minimum(bit, 62))).to(tl.int64), 0)
