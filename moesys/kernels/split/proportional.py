"""The proportional split of counts that are on a device: quotas by operators of torch, none of which waits, and then
one kernel.

It is ``Proportional`` (docs/math.md), to the byte: a replica's quota of its expert is in proportion to the room that
the other experts leave on its rank, rounded by largest remainder, ties by rank from the one at ``turn`` on.

R ranks, E experts, P replicas, as in ``tables``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moesys.kernels.host_copies import to_device
from moesys.kernels.split.sources import fill_quotas
from moesys.kernels.split.tables import IntArray, SplitTables

# Products of two numbers of so many bits together fit int64.
PRODUCT_BITS = 62


class ProportionalTables(NamedTuple):
    """Made once a layout, on one device. ``replicas_RE`` int64: slots of each expert on each rank; ``bits_63``: 1, 2, 4
    and so on, to find how many bits a number has.
    """

    split: SplitTables
    replicas_RE: Tensor
    bits_63: Tensor


def proportional_tables(split: SplitTables, replicas_RE: IntArray) -> ProportionalTables:
    """``replicas_RE`` of the layout that ``split`` is of."""
    device = split.rank_P.device
    return ProportionalTables(
        split,
        to_device(replicas_RE.copy(), device),
        torch.ones(63, dtype=torch.int64, device=device) << torch.arange(63, device=device),
    )


def proportional_split(tokens_RE: Tensor, tables: ProportionalTables, turn: int) -> Tensor:
    """``tokens_RP`` int64: what each source of ``tokens_RE`` int64 [R, E] sends to each replica."""
    replicas_RE, tokens_E = tables.replicas_RE, tokens_RE.sum(0)
    holds_RE = replicas_RE > 0
    even_RE = tokens_E * replicas_RE // replicas_RE.sum(0)
    others_RE = even_RE.sum(1, keepdim=True) - even_RE
    holding = holds_RE.any(1).sum()
    mean = (tokens_E.sum() + holding - 1) // holding
    room_RE = torch.where(holds_RE, (mean - others_RE).clamp(min=0), 0)
    # Rooms lose low bits only where their product with an expert's tokens would not fit.
    num_bits = (mean >= tables.bits_63).sum() + (tokens_E.max() >= tables.bits_63).sum()
    room_RE = room_RE >> (num_bits - PRODUCT_BITS).clamp(min=0)
    weight_RE = torch.where(room_RE.any(0), room_RE, replicas_RE)
    quota_RE = _apportioned(tokens_E, weight_RE, holds_RE, turn)
    quota_P = quota_RE[tables.split.rank_P, tables.split.expert_P]
    return fill_quotas(tokens_RE.contiguous(), quota_P, tables.split)


def _apportioned(tokens_E: Tensor, weight_RE: Tensor, holds_RE: Tensor, turn: int) -> Tensor:
    """``tokens_E`` in proportion to the weights of each column: floors, and one more for the largest remainders."""
    share_RE, sum_E = tokens_E * weight_RE, weight_RE.sum(0)
    quota_RE = share_RE // sum_E
    place_RE = (holds_RE.cumsum(0) - 1 - turn) % holds_RE.sum(0)
    place_RE = torch.where(holds_RE, place_RE, len(holds_RE))
    # Ranks by place, and then, as sorts are stable, by remainder: the largest first.
    by_place_RE = place_RE.argsort(dim=0, stable=True)
    remainder_RE = (share_RE % sum_E).gather(0, by_place_RE)
    ranked_RE = by_place_RE.gather(0, remainder_RE.argsort(dim=0, descending=True, stable=True))
    return quota_RE + (ranked_RE.argsort(dim=0) < tokens_E - quota_RE.sum(0))
