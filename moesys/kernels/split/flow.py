"""The exact split of counts that are on a device: the tokens of each source for each replica, in three launches.

The result equals that of ``FlowSplit(traffic="fast")`` (docs/balance.md), to the byte. Tokens begin at their source
(``LocalTokens``). The tokens that a rank has above the least possible limit are pushed along cheapest paths of ranks
that hold a common expert, in phases of one labelling and ``STEPS`` steps. The limit is found first, by pushes that
count hops only: it begins as a lower bound, and where ranks reach no rank with room, their mean is a bound as well.

The first launch distributes the tokens of experts, one program per expert, and the last fills quotas, one program per
replica. In between one program pushes: each lane has one replica, with its group, expert and rank. Replicas of a group
and of an expert are neighbours, those of a rank are once they are gathered, so that every sum is a difference of prefix
sums. Lanes communicate by ``tl.gather`` and ``tl.cumsum`` only, which synchronise by themselves: no program reads
memory that it has written, or that another program of the same launch writes. Counts of tokens are int64.

R ranks, E experts, P replicas, as in ``tables``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.tile_config import all_registers
from moesys.kernels.launch import kernel
from moesys.kernels.split.tables import SplitTables, fill_quotas, lanes_of, sum_before, sum_of

# A bound that costs nothing: ordinary loads of 64 ranks take 10 to 30, the wildest that were tried no more than 64.
PHASES = 1024
# Constants of the algorithm, which decide its result: steps of a phase, the cost of leaving a node in hops, and the
# label of a rank from which no path leads to room.
STEPS = tl.constexpr(4)
CROSSING = tl.constexpr(1 << 20)
UNREACHED = tl.constexpr(1 << 50)
UNBOUNDED = tl.constexpr(1 << 62)


class TensorPlan(NamedTuple):
    """A ``TokenPlan`` as tensors, for R sources and P replicas.

    - ``tokens_RP`` int64: what each source sends to each replica;
    - ``limit_tokens`` int64 []: the least load of the busiest rank, if ``converged``;
    - ``converged`` bool []: the plan is the host's, byte for byte. If not, there were too few phases: every token still
      goes to a holder of its expert, but some rank may have more, or more may cross nodes, than need be.
    """

    tokens_RP: Tensor
    limit_tokens: Tensor
    converged: Tensor


def split(tokens_RE: Tensor, tables: SplitTables, turn: int | Tensor = 0, phases: int = PHASES) -> TensorPlan:
    """Returns the split of ``tokens_RE``, int64 [R, E], over the replicas of ``tables``.

    ``turn``, the number of the micro-batch or a tensor on the device with it, rotates remainders. ``phases``: the most;
    the kernel ends when nothing is left to push. Nothing waits for the host. Triton compiles anew for another power of
    two of R or of P, and not for other counts.

    Raises:
        ValueError: counts of another shape or dtype, or on another device than the tables; no phases.
    """
    num_experts, num_ranks = tables.replica_ER.shape
    if tuple(tokens_RE.shape) != (num_ranks, num_experts) or tokens_RE.dtype != torch.int64:
        raise ValueError(
            f"tokens_RE is {tokens_RE.dtype} {list(tokens_RE.shape)}, the layout needs int64 "
            f"{[num_ranks, num_experts]}; count tokens by source rank and expert"
        )
    if tokens_RE.device != tables.rank_P.device:
        raise ValueError(f"tokens_RE is on {tokens_RE.device}, the tables on {tables.rank_P.device}; use one device")
    if phases < 1:
        raise ValueError(f"phases={phases} leaves no push; use at least 1")
    tokens_RE, num_replicas = tokens_RE.contiguous(), len(tables.rank_P)
    turn_1, turn = (turn, 0) if isinstance(turn, Tensor) else (None, turn)
    at_source = LocalTokens(*(tokens_RE.new_empty(num_replicas) for _ in LocalTokens._fields))
    quota_P = tokens_RE.new_empty(num_replicas)
    limit, converged = tokens_RE.new_empty(()), tokens_RE.new_empty((), dtype=torch.bool)
    of_ranks, of_replicas = lanes_of(num_ranks), lanes_of(num_replicas)
    _share_out[(num_experts,)](tokens_RE, turn_1, turn, tables, at_source, num_ranks, num_experts, **of_ranks)
    alone = all_registers(of_replicas["num_warps"])
    _push[(1,)](at_source, tables, quota_P, limit, converged, num_replicas, phases, **of_replicas, **alone)
    return TensorPlan(fill_quotas(tokens_RE, quota_P, tables), limit, converged)


class LocalTokens(NamedTuple):
    """For each replica, int64: its tokens if every token stays at its source where possible, and the tokens of its
    expert that the ranks of its node have.
    """

    tokens_P: Tensor
    supply_P: Tensor


@triton.jit
def _serve(amount, wish, first):  # type: ignore[no-untyped-def]
    """Returns what each lane gets: lanes from ``first`` on in turn what they wish, while some of the amount is left."""
    return tl.minimum(tl.maximum(amount - sum_before(wish, first), 0), wish)


@triton.jit
def _share(amount, place, size, turn):  # type: ignore[no-untyped-def]
    """Returns the share at ``place`` of an amount in ``size`` equal shares; remainders begin at place ``turn``."""
    # The remainder of a negative number is negative here.
    behind = ((place - turn) % size + size) % size
    return amount // size + (behind < amount % size).to(tl.int64)


@triton.jit
def _least(values, lane, first, last, widest):  # type: ignore[no-untyped-def]
    """Returns the least of the values from lane ``first`` to lane ``last``, at most ``widest`` of them."""
    reach = 1
    while reach < widest:
        values = tl.minimum(values, tl.gather(values, tl.minimum(lane + reach, last), 0))
        reach *= 2
    return tl.gather(values, first, 0)


@kernel(do_not_specialize=["turn", "num_ranks", "num_experts"])
def _share_out(  # type: ignore[no-untyped-def]
    tokens_RE, turn_1, turn, tables, at_source, num_ranks, num_experts, LANES: tl.constexpr
):
    """Computes ``LocalTokens``, with one program per expert and one lane per rank.

    A rank keeps its own tokens for experts that it holds. The node's replicas share the other tokens of their node
    evenly, and all replicas share the tokens of nodes without a replica.
    """
    expert = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, LANES)
    inside = rank < num_ranks
    tokens = tl.load(tokens_RE + rank.to(tl.int64) * num_experts + expert, mask=inside, other=0)
    replica = tl.load(tables.replica_ER + expert * num_ranks + rank, mask=inside, other=-1)
    first = tl.load(tables.node_first_R + rank, mask=inside, other=rank)
    last = tl.load(tables.node_last_R + rank, mask=inside, other=rank)
    if turn_1 is not None:
        turn = tl.load(turn_1)
    turn = tl.cast(turn, tl.int64)

    held = replica >= 0
    holds = held.to(tl.int64)
    own = tl.where(held, tokens, 0)
    supply = sum_of(tokens, first, last)
    holders = sum_of(holds, first, last)
    near = _share(supply - sum_of(own, first, last), sum_before(holds, first), tl.maximum(holders, 1), turn)
    away = tl.sum(tl.where(holders == 0, tokens, 0), 0)
    far = _share(away, tl.cumsum(holds, 0) - holds, tl.sum(holds, 0), turn)
    tl.store(at_source.tokens_P + replica, own + near + far, mask=held)
    tl.store(at_source.supply_P + replica, supply, mask=held)


@kernel(do_not_specialize=["num_replicas", "phases"])
def _push(  # type: ignore[no-untyped-def]
    at_source, tables, quota_P, limit_1, converged_1, num_replicas, phases, LANES: tl.constexpr
):
    """Finds, in one program with one replica per lane, quotas with the least load of the busiest rank, then little
    traffic.

    A lane has its rank's load, and its group's tokens here and supply. Lanes without a replica are ranks, groups and
    experts by themselves, without tokens.
    """
    lane = tl.arange(0, LANES)
    real = lane < num_replicas
    expert = tl.load(tables.expert_P + lane, mask=real, other=0)
    expert_first = tl.where(real, tl.load(tables.first_E1 + expert, mask=real, other=0), lane)
    expert_last = tl.where(real, tl.load(tables.first_E1 + expert + 1, mask=real, other=0) - 1, lane)
    group_first = tl.load(tables.group_first_P + lane, mask=real, other=lane)
    group_last = tl.load(tables.group_last_P + lane, mask=real, other=lane)
    # ``by_rank`` lists the replicas by rank; ``rank_first`` to ``rank_last`` are the places of a rank in this list.
    rank = tl.load(tables.rank_P + lane, mask=real, other=0)
    by_rank = tl.load(tables.by_rank_P + lane, mask=real, other=lane)
    rank_first = tl.where(real, tl.load(tables.first_R1 + rank, mask=real, other=0), lane)
    rank_last = tl.where(real, tl.load(tables.first_R1 + rank + 1, mask=real, other=0) - 1, lane)
    last_there = tl.gather(rank_last, by_rank, 0)
    one_a_rank = real & (tl.gather(by_rank, rank_first, 0) == lane)
    one_a_group = group_first == lane
    widest_expert = tl.max(expert_last - expert_first, 0) + 1
    widest_group = tl.max(group_last - group_first, 0) + 1
    widest_rank = tl.max(rank_last - rank_first, 0) + 1

    supply = tl.load(at_source.supply_P + lane, mask=real, other=0)
    tokens = tl.load(at_source.tokens_P + lane, mask=real, other=0)
    load = sum_of(tl.gather(tokens, by_rank, 0), rank_first, rank_last)
    here = sum_of(tokens, group_first, group_last)
    # The mean of all ranks that hold anything, and that of each expert's.
    holding = tl.sum(one_a_rank.to(tl.int64), 0)
    width = expert_last - expert_first + 1
    mean = (tl.sum(tokens, 0) + holding - 1) // holding
    limit = tl.maximum(mean, tl.max((sum_of(tokens, expert_first, expert_last) + width - 1) // width, 0))

    busiest = tl.max(load, 0)
    crossing = 0
    phase = 0
    while (phase < phases) & ((crossing == 0) | (busiest > limit)):
        if busiest <= limit:
            # The least limit is known. Start again from the sources, now for the least traffic.
            crossing = crossing + CROSSING
            tokens = tl.load(at_source.tokens_P + lane, mask=real, other=0)
            load = sum_of(tl.gather(tokens, by_rank, 0), rank_first, rank_last)
            here = sum_of(tokens, group_first, group_last)
        else:
            # Labels: what the cheapest path to room costs. From a rank; from the best rank of the group; for a token
            # that leaves by the best group of its expert; for one that leaves a rank of the group.
            enter = tl.where(here >= supply, crossing, 0).to(tl.int64)
            leave = -tl.where(here > supply, crossing, 0).to(tl.int64)
            label = tl.where(load < limit, 0, UNREACHED)
            near, exchange, cost = label, label, label
            rounds = 0
            changes = 1
            # No cycle gains, so that no path is longer than all ranks together.
            while (changes > 0) & (rounds <= num_replicas):
                near = _least(label, lane, group_first, group_last, widest_group)
                exchange = _least(near + enter, lane, expert_first, expert_last, widest_expert)
                cost = tl.minimum(near, exchange + leave)
                onward = tl.where((tokens > 0) & (cost < UNREACHED // 2), cost + 1, UNREACHED)
                onward = _least(tl.gather(onward, by_rank, 0), lane, rank_first, last_there, widest_rank)
                changes = tl.sum((onward < label).to(tl.int32), 0)
                label = tl.minimum(label, onward)
                rounds += 1
            on_path = (cost + 1 == label) & (label < UNREACHED)
            local = cost == near

            step = 0
            moving = 1
            while (moving > 0) & (step < STEPS):
                foreign = here - supply
                enter = tl.where(foreign >= 0, crossing, 0).to(tl.int64)
                leave = -tl.where(foreign > 0, crossing, 0).to(tl.int64)

                # Each rank sends from the first of its replicas on a cheapest path: near, inside its node, or far.
                can = on_path & (tokens > 0) & (load >= limit)
                hop = tl.gather(tl.where(can, lane, LANES), by_rank, 0)
                is_hop = _least(hop, lane, rank_first, last_there, widest_rank) == lane
                spare = tl.where(label < UNREACHED, tl.maximum(load - limit, 0), 0)
                wish = tl.where(is_hop, tl.minimum(spare, tokens), 0)
                # Only tokens from other nodes leave at the lower cost.
                leaving = tl.where(foreign > 0, foreign, UNBOUNDED)
                leaving = tl.where(cost == exchange + leave, leaving, 0)
                give = _serve(tl.where(local, UNBOUNDED, leaving), wish, group_first)
                give_near = tl.where(local, give, 0)
                give_far = give - give_near
                given_near = sum_of(give_near, group_first, group_last)
                given_far = sum_of(give_far, expert_first, expert_last)

                # Each rank receives from one pool; pools inside of nodes have the lowest numbers.
                passed = tl.gather(tl.where(is_hop & (give == 0), tokens, 0), by_rank, 0)
                room = tl.maximum(limit - load, 0) + sum_of(passed, rank_first, rank_last)
                takes = (label == near) & (room > 0)
                for_far = takes & (near + enter == exchange) & (given_far > 0)
                pool = tl.where(for_far, LANES + expert_first, 2 * LANES)
                pool = tl.where(takes & (given_near > 0), group_first, pool)
                least_pool = _least(tl.gather(pool, by_rank, 0), lane, rank_first, last_there, widest_rank)
                take = tl.where((pool == least_pool) & (pool < 2 * LANES), room, 0)
                take_near = tl.where(pool < LANES, take, 0)
                take_far = take - take_near

                # A group that lacks tokens of its own node receives at most as many from other nodes.
                open_far = sum_of(take_far, group_first, group_last)
                open_far = tl.where(foreign < 0, tl.minimum(open_far, -foreign), open_far)
                open_once = tl.where(one_a_group, open_far, 0)
                moved_near = tl.minimum(given_near, sum_of(take_near, group_first, group_last))
                moved_far = tl.minimum(given_far, sum_of(open_once, expert_first, expert_last))
                entering = tl.gather(_serve(moved_far, open_once, expert_first), group_first, 0)
                far = _serve(entering, take_far, group_first) - _serve(moved_far, give_far, expert_first)
                moved = far + _serve(moved_near, take_near, group_first) - _serve(moved_near, give_near, group_first)
                tokens += moved
                load += sum_of(tl.gather(moved, by_rank, 0), rank_first, rank_last)
                here += sum_of(far, group_first, group_last)
                moving = tl.sum((moved != 0).to(tl.int32), 0)
                step += 1

            # No push has changed what ranks have that reach no room.
            tight = one_a_rank & (label == UNREACHED)
            num_tight = tl.maximum(tl.sum(tight.to(tl.int64), 0), 1)
            limit = tl.maximum(limit, (tl.sum(tl.where(tight, load, 0), 0) + num_tight - 1) // num_tight)
            phase += 1
        busiest = tl.max(load, 0)
    tl.store(quota_P + lane, tokens, mask=real)
    tl.store(limit_1, limit)
    tl.store(converged_1, (crossing > 0) & (busiest <= limit))
