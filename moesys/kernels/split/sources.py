"""Fills the quotas of replicas: how much each source sends to each, with the fewest tokens on wires.

A lane has a rank; what lanes need of each other goes through prefix sums and gathers inside the program.

R ranks, E experts, P replicas, as in ``tables``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.split.tables import SplitTables

# The fewest lanes of a program, those that a warp gets, and the most warps.
FEWEST_LANES = 32
LANES_OF_WARP = 64
MOST_WARPS = 32


def fill_quotas(tokens_RE: Tensor, quota_P: Tensor, tables: SplitTables) -> Tensor:
    """``tokens_RP`` int64: what each source of ``tokens_RE`` int64 [R, E] sends to each replica, so that it gets its
    quota; those of an expert sum to its tokens. A launch, for which nothing waits.
    """
    num_ranks, num_experts = tokens_RE.shape
    num_replicas = len(quota_P)
    tokens_RP = tokens_RE.new_empty(num_ranks, num_replicas)
    _fill_quotas[(num_replicas,)](
        tokens_RE,
        quota_P,
        tables,
        tokens_RP,
        num_ranks,
        num_experts,
        len(tables.part_first_LR),
        **lanes_of(num_ranks),
    )
    return tokens_RP


def lanes_of(number: int) -> dict[str, int]:
    """A program of at least so many lanes, two of them a thread."""
    lanes = max(FEWEST_LANES, triton.next_power_of_2(number))
    return {"LANES": lanes, "num_warps": min(MOST_WARPS, max(1, lanes // LANES_OF_WARP))}


@triton.jit
def sum_of(values, first, last):  # type: ignore[no-untyped-def]
    """Of the values from lane ``first`` to lane ``last``, the sum."""
    up_to = tl.cumsum(values, 0)
    return tl.gather(up_to, last, 0) - tl.gather(up_to - values, first, 0)


@triton.jit
def sum_before(values, first):  # type: ignore[no-untyped-def]
    """Of the values from lane ``first`` up to the own, which does not count, the sum."""
    before = tl.cumsum(values, 0) - values
    return before - tl.gather(before, first, 0)


@kernel(do_not_specialize=["num_ranks", "num_experts", "num_levels"])
def _fill_quotas(  # type: ignore[no-untyped-def]
    tokens_RE,
    quota_P,
    tables,
    tokens_RP,
    num_ranks,
    num_experts,
    num_levels,
    LANES: tl.constexpr,
):
    """One replica a program, one source a lane: what each source sends to the replica.

    In each part of the cluster, an expert's sources lie on a line one after another, each as long as its tokens, and so
    do its replicas: what a source sends to a replica is where the two overlap. Finest parts come first.
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
