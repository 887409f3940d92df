"""Minimum-cost pushes, compiled: which rank gets how many tokens of an expert, for the least traffic between nodes.

Every token begins at its source where possible (``local_first``), which is the least traffic without a limit on
loads. Pushing what ranks have above the limit along cheapest paths keeps the traffic the least for that limit
(successive shortest paths, on all ranks at once). A path goes from rank to rank, each time by tokens of an expert that
both hold. A hop costs 1; a hop by which tokens leave their node costs ``CROSSING`` more, and one that brings such
tokens back costs as much less.

A *phase* labels every rank with the cost of its cheapest path to a rank with room, and takes ``STEPS`` steps. In a
*step* every rank above the limit gives what it can along one of its cheapest hops. Tokens of an expert that stay in a
node form a pool, and those that cross form one; a rank receives from the pool of the lowest number only: nodes' pools
first, each kind by expert. Senders and receivers of a pool are served in the order of their ranks. No step depends on
the order in which ranks or pools are visited, so that ``kernels.split`` can do the same on a GPU, to the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.balance.flow.token_routes import Indices
from moesys.compiled import borrowing, compiled, inlined
from moesys.load import IntArray

CROSSING = 1 << 20
UNREACHED = 1 << 50
STEPS = 4


class Labels(NamedTuple):
    """Costs of cheapest paths, int64. ``rank_R``: from a rank to room; ``inside_G``: from a group's best rank;
    ``from_G``: of a token that leaves a rank of the group by its expert; ``exchange_E``: by the best of all groups.

    The rest is scratch. ``hop_R``: the replica by which a rank sends in a step; ``take_R``: the tokens that it may
    receive; ``give_R``: those that it sends; ``receiver_R``: the pool from which it receives; ``local_G`` and
    ``across_E``: the tokens that are sent to each pool.
    """

    rank_R: IntArray
    inside_G: IntArray
    from_G: IntArray
    exchange_E: IntArray
    hop_R: IntArray
    take_R: IntArray
    give_R: IntArray
    receiver_R: IntArray
    local_G: IntArray
    across_E: IntArray
    waiting_E: npt.NDArray[np.bool_]
    queue_E: Indices


@compiled
def min_cost_push(table, groups, assigned, limit):  # type: ignore[no-untyped-def]
    """Pushes until no rank has more than ``limit``; returns the phases it took, or -1 where no split keeps the limit.

    ``assigned``: a ``local_first.Assignment``, whose ``tokens_P``, ``here_G`` and ``load_R`` change.
    """
    num_ranks, num_groups, num_experts = assigned.load_R.size, groups.expert_G.size, groups.first_E.size - 1
    labels = Labels(
        np.empty(num_ranks, np.int64),
        np.empty(num_groups, np.int64),
        np.empty(num_groups, np.int64),
        np.empty(num_experts, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_groups, np.int64),
        np.empty(num_experts, np.int64),
        np.empty(num_experts, np.bool_),
        np.empty(num_experts, np.uint32),
    )
    return _push(table, groups, assigned, limit, labels)


@borrowing
def _push(table, groups, assigned, limit, labels):  # type: ignore[no-untyped-def]
    phases = 0
    while _exceeds(assigned.load_R, limit):
        _label(table, groups, assigned, limit, labels)
        reached = False
        for rank in range(assigned.load_R.size):
            reached = reached or (assigned.load_R[rank] > limit and labels.rank_R[rank] < UNREACHED // 2)
        if not reached:
            return -1
        for _ in range(STEPS):
            if not _step(table, groups, assigned, limit, labels):
                break
        phases += 1
    return phases


@borrowing
def _exceeds(load_R, limit):  # type: ignore[no-untyped-def]
    exceeds = False
    for rank in range(load_R.size):
        exceeds = exceeds or load_R[rank] > limit
    return exceeds


@borrowing
def _label(table, groups, assigned, limit, labels):  # type: ignore[no-untyped-def]
    """Finds the cheapest paths by relaxing experts whose ranks have new labels until none has; the result does not
    depend on their order. It ends because no cycle gains: all tokens went along cheapest paths.
    """
    rank_P, tokens_P, first_G, end_G = table.rank_P, assigned.tokens_P, groups.first_G, groups.end_G
    rank_R, inside_G, from_G, exchange_E = labels.rank_R, labels.inside_G, labels.from_G, labels.exchange_E
    num_ranks, num_experts = rank_R.size, exchange_E.size
    waiting_E, queue_E = labels.waiting_E, labels.queue_E
    waiting_E[:] = False
    done = num_waiting = 0
    inside_G[:], from_G[:], exchange_E[:] = UNREACHED, UNREACHED, UNREACHED
    for rank in range(num_ranks):
        rank_R[rank] = UNREACHED
        if assigned.load_R[rank] < limit and table.holds_R[rank]:
            rank_R[rank] = 0
            for position in range(table.first_R[rank], table.first_R[rank + 1]):
                expert = table.expert_P[table.shared_Q[position]]
                if not waiting_E[expert]:
                    waiting_E[expert] = True
                    queue_E[num_waiting] = expert
                    num_waiting += 1
    while num_waiting:
        expert = queue_E[done % num_experts]
        done += 1
        num_waiting -= 1
        waiting_E[expert] = False
        exchange = UNREACHED
        for group in range(groups.first_E[expert], groups.first_E[expert + 1]):
            inside = UNREACHED
            for index in range(first_G[group], end_G[group]):
                inside = min(inside, rank_R[rank_P[index]])
            inside_G[group] = inside
            leaves_node = assigned.here_G[group] >= assigned.supply_G[group]
            exchange = min(exchange, inside + (CROSSING if leaves_node else 0))
        exchange_E[expert] = exchange
        for group in range(groups.first_E[expert], groups.first_E[expert + 1]):
            from_G[group] = min(inside_G[group], _cost_to_leave(groups, assigned, labels, group))
            if from_G[group] > UNREACHED // 2:
                continue
            for index in range(first_G[group], end_G[group]):
                rank = rank_P[index]
                if tokens_P[index] == 0 or from_G[group] + 1 >= rank_R[rank]:
                    continue
                rank_R[rank] = from_G[group] + 1
                for position in range(table.first_R[rank], table.first_R[rank + 1]):
                    other = table.expert_P[table.shared_Q[position]]
                    if not waiting_E[other]:
                        waiting_E[other] = True
                        queue_E[(done + num_waiting) % num_experts] = other
                        num_waiting += 1


@inlined
def _cost_to_leave(groups, assigned, labels, group):  # type: ignore[no-untyped-def]
    """Returns the cost of a token that leaves a group for another node: a crossing less if it is from another node."""
    returns = assigned.here_G[group] > assigned.supply_G[group]
    return labels.exchange_E[groups.expert_G[group]] - (CROSSING if returns else 0)


@borrowing
def _step(table, groups, assigned, limit, labels):  # type: ignore[no-untyped-def]
    """Takes one step; returns whether any token moved."""
    rank_P, tokens_P, load_R = table.rank_P, assigned.tokens_P, assigned.load_R
    first_G, end_G, here_G, supply_G = groups.first_G, groups.end_G, assigned.here_G, assigned.supply_G
    rank_R, inside_G, from_G = labels.rank_R, labels.inside_G, labels.from_G
    hop_R, take_R, give_R, receiver_R = labels.hop_R, labels.take_R, labels.give_R, labels.receiver_R
    num_groups = inside_G.size
    local_G, across_E = labels.local_G, labels.across_E
    local_G[:], across_E[:], give_R[:], receiver_R[:] = 0, 0, 0, -1
    any_sender = False

    for rank in range(rank_R.size):
        if load_R[rank] <= limit or rank_R[rank] > UNREACHED // 2:
            continue
        index = _find_hop(table, groups, assigned, labels, rank)
        hop_R[rank] = index
        if index < 0:
            continue
        group = groups.group_P[index]
        give = min(load_R[rank] - limit, tokens_P[index])
        if from_G[group] == inside_G[group]:
            local_G[group] += give
        elif from_G[group] == _cost_to_leave(groups, assigned, labels, group):
            if here_G[group] > supply_G[group]:
                # Only tokens from other nodes leave at the lower cost.
                give = min(give, here_G[group] - supply_G[group] - _given(table, groups, labels, group, rank))
            across_E[groups.expert_G[group]] += give
        else:
            give = 0
        give_R[rank] = give
        any_sender = any_sender or give > 0
    if not any_sender:
        return False

    # the pool that each rank receives from, the lowest number first
    for group in range(num_groups):
        if local_G[group]:
            for index in range(first_G[group], end_G[group]):
                _offer(table, groups, assigned, labels, limit, group, index, group)
    for expert in groups.expert_F:
        if not across_E[expert]:
            continue
        for group in range(groups.first_E[expert], groups.first_E[expert + 1]):
            leaves_node = here_G[group] >= supply_G[group]
            if inside_G[group] + (CROSSING if leaves_node else 0) == labels.exchange_E[expert]:
                for index in range(first_G[group], end_G[group]):
                    _offer(table, groups, assigned, labels, limit, group, index, num_groups + expert)

    moved = False
    for group in range(num_groups):
        if not local_G[group]:
            continue
        open_tokens = 0
        for index in range(first_G[group], end_G[group]):
            if receiver_R[rank_P[index]] == group:
                open_tokens += take_R[rank_P[index]]
        giving = receiving = min(local_G[group], open_tokens)
        moved = moved or giving > 0
        for index in range(first_G[group], end_G[group]):
            rank = rank_P[index]
            if give_R[rank] and hop_R[rank] == index:
                tokens = min(giving, give_R[rank])
                giving -= tokens
                tokens = -tokens
            elif receiver_R[rank] == group:
                tokens = min(receiving, take_R[rank])
                receiving -= tokens
            else:
                continue
            tokens_P[index] += tokens
            load_R[rank] += tokens
    for expert in groups.expert_F:
        if not across_E[expert]:
            continue
        open_tokens = 0
        for group in range(groups.first_E[expert], groups.first_E[expert + 1]):
            open_tokens += _open_to_cross(table, groups, assigned, labels, group, num_groups + expert)
        giving = receiving = min(across_E[expert], open_tokens)
        moved = moved or giving > 0
        for group in range(groups.first_E[expert], groups.first_E[expert + 1]):
            entering = min(receiving, _open_to_cross(table, groups, assigned, labels, group, num_groups + expert))
            receiving -= entering
            for index in range(first_G[group], end_G[group]):
                rank = rank_P[index]
                if give_R[rank] and hop_R[rank] == index and from_G[group] != inside_G[group]:
                    tokens = min(giving, give_R[rank])
                    giving -= tokens
                    tokens = -tokens
                elif receiver_R[rank] == num_groups + expert:
                    tokens = min(entering, take_R[rank])
                    entering -= tokens
                else:
                    continue
                tokens_P[index] += tokens
                load_R[rank] += tokens
                here_G[group] += tokens
    return moved


@inlined
def _find_hop(table, groups, assigned, labels, rank):  # type: ignore[no-untyped-def]
    """Returns the first replica of a rank by which its cheapest path begins; -1 where tokens for it have run out."""
    for position in range(table.first_R[rank], table.first_R[rank + 1]):
        index = table.shared_Q[position]
        if assigned.tokens_P[index] > 0 and labels.from_G[groups.group_P[index]] + 1 == labels.rank_R[rank]:
            return index
    return -1


@inlined
def _offer(table, groups, assigned, labels, limit, group, index, pool):  # type: ignore[no-untyped-def]
    """Lets a replica's rank take from a pool: up to the limit, or what it can pass on, if it is one of the best of its
    group, gives nothing itself and has no pool yet.
    """
    rank = table.rank_P[index]
    if labels.receiver_R[rank] >= 0 or labels.give_R[rank] or labels.rank_R[rank] != labels.inside_G[group]:
        return
    take = limit - assigned.load_R[rank]
    if take <= 0:
        hop = _find_hop(table, groups, assigned, labels, rank)
        take = assigned.tokens_P[hop] if hop >= 0 else 0
    if take > 0:
        labels.receiver_R[rank] = pool
        labels.take_R[rank] = take


@inlined
def _given(table, groups, labels, group, before):  # type: ignore[no-untyped-def]
    """Returns how many tokens the lower ranks of a group give away in this step already."""
    tokens = 0
    for index in range(groups.first_G[group], groups.end_G[group]):
        rank = table.rank_P[index]
        if rank < before and labels.hop_R[rank] == index:
            tokens += labels.give_R[rank]
    return tokens


@inlined
def _open_to_cross(table, groups, assigned, labels, group, pool):  # type: ignore[no-untyped-def]
    """Returns how many tokens a group can receive from other nodes: if it lacks tokens of its node, at most as many."""
    tokens = 0
    for index in range(groups.first_G[group], groups.end_G[group]):
        if labels.receiver_R[table.rank_P[index]] == pool:
            tokens += labels.take_R[table.rank_P[index]]
    missing = assigned.supply_G[group] - assigned.here_G[group]
    return min(tokens, missing) if missing > 0 else tokens
