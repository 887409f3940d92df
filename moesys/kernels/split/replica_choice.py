"""Which replica every choice of a token goes to: one row of a token plan, applied to the choices of its source.

A source's choices of an expert form a line in (token, choice) order, and the plan cuts it into ranges, one a replica in
the order of ranks. ``route`` has the place of a choice on its line; a binary search among the ends of the ranges finds
the replica. Nothing depends on which program comes first.

T tokens, K choices of each, R ranks, E experts, P replicas, as in ``split_tables``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.routing.routing import Routing
from moesys.kernels.split.tables import SplitTables

BLOCK_CHOICES = 256


class Destinations(NamedTuple):
    """Where each choice goes, int32 [T, K]; -1 where it is dropped.

    ``replica_TK``; ``rank_TK``: whose replica it is; ``slot_TK``: in which slot of that rank's distinct experts.
    """

    replica_TK: Tensor
    rank_TK: Tensor
    slot_TK: Tensor


def choose_replicas(expert_TK: Tensor, routing: Routing, tokens_P: Tensor, tables: SplitTables) -> Destinations:
    """The ``Destinations`` of ``expert_TK``, int32 or int64 [T, K], by its source's row of a plan, ``tokens_P`` int64.

    ``routing``: that of the same choices, with experts for groups. A choice of no expert of 0..E-1 is dropped, and so
    are the last ones of an expert for which the plan has fewer tokens than there are choices. One prefix sum of torch's
    and one kernel: neither waits for the host, no count makes Triton compile anew.

    Raises:
        ValueError: choices of another dtype or shape than the routing's, a row for another layout.
    """
    if expert_TK.dtype not in (torch.int32, torch.int64) or expert_TK.shape != routing.row_TK.shape:
        raise ValueError(
            f"choices are {expert_TK.dtype} {list(expert_TK.shape)}, the routing is for {list(routing.row_TK.shape)}; "
            "give the int32 or int64 choices that were routed"
        )
    num_experts, num_replicas = len(tables.first_E1) - 1, len(tables.rank_P)
    if len(routing.first_G1) != num_experts + 1:
        raise ValueError(
            f"the routing has {len(routing.first_G1) - 1} groups, the layout {num_experts} experts; route by expert"
        )
    if tuple(tokens_P.shape) != (num_replicas,) or tokens_P.dtype != torch.int64:
        raise ValueError(
            f"tokens_P is {tokens_P.dtype} {list(tokens_P.shape)}, the layout needs int64 {[num_replicas]}; "
            "give the source's row of tokens_RP"
        )
    num_choices = expert_TK.numel()
    found = Destinations(*(torch.empty_like(routing.row_TK) for _ in range(3)))
    _search[(triton.cdiv(num_choices, BLOCK_CHOICES),)](
        expert_TK.contiguous(),
        routing.row_TK,
        routing.first_G1,
        tokens_P.cumsum(0),
        tables.first_E1,
        tables.rank_P,
        tables.slot_P,
        *found,
        num_choices,
        num_experts,
        BLOCK_CHOICES,
    )
    return found


@triton.jit(do_not_specialize=["num_choices", "num_experts"])
def _search(  # type: ignore[no-untyped-def]
    expert_TK,
    row_TK,
    first_G1,
    end_P,
    first_E1,
    rank_P,
    slot_P,
    replica_TK,
    rank_TK,
    slot_TK,
    num_choices,
    num_experts,
    BLOCK: tl.constexpr,
):
    """One block of choices a program; ``end_P``: where on one line of all experts a replica's range ends."""
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = choice < num_choices
    expert = tl.load(expert_TK + choice, mask=inside, other=-1)
    kept = (expert >= 0) & (expert < num_experts)
    place = tl.load(row_TK + choice, mask=kept, other=0) - tl.load(first_G1 + expert, mask=kept, other=0)
    low = tl.load(first_E1 + expert, mask=kept, other=0)
    last = tl.load(first_E1 + expert + 1, mask=kept, other=0)
    place += tl.load(end_P + low - 1, mask=kept & (low > 0), other=0)
    # The first range that ends behind the place.
    high = last
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        searching = low < high
        behind = tl.load(end_P + middle, mask=searching, other=0) > place
        high = tl.where(searching & behind, middle, high)
        low = tl.where(searching & ~behind, middle + 1, low)
    kept = kept & (low < last)
    rank = tl.load(rank_P + low, mask=kept, other=-1)
    slot = tl.load(slot_P + low, mask=kept, other=-1)
    tl.store(replica_TK + choice, tl.where(kept, low, -1), mask=inside)
    tl.store(rank_TK + choice, rank, mask=inside)
    tl.store(slot_TK + choice, slot, mask=inside)


def choose_replicas_reference(
    expert_TK: Tensor, routing: Routing, tokens_P: Tensor, tables: SplitTables
) -> Destinations:
    """``Destinations`` of the same arguments: each expert's choices in order, cut into ranges."""
    expert_N = expert_TK.reshape(-1).long()
    replica_N = torch.full_like(expert_N, -1)
    for expert, (first, last) in enumerate(tables.first_E1.unfold(0, 2, 1).tolist()):
        choice_M = (expert_N == expert).nonzero()[:, 0]
        place_M = torch.arange(len(choice_M), device=choice_M.device)
        replica_M = first + torch.searchsorted(tokens_P[first:last].cumsum(0), place_M, right=True)
        replica_N[choice_M] = replica_M.where(replica_M < last, -1)
    replica_TK = replica_N.view(expert_TK.shape)
    dropped_TK = replica_TK < 0
    rank_TK, slot_TK = (of_P[replica_TK].masked_fill(dropped_TK, -1) for of_P in (tables.rank_P, tables.slot_P))
    return Destinations(replica_TK.int(), rank_TK, slot_TK)
