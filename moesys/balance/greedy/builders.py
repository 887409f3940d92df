"""Builders: layouts in one go, of the whole cluster, node by node, node first, or by parts that replicas keep to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.balance.greedy.construction import build_each_node, build_part, part_of_experts, spread_replicas
from moesys.balance.greedy.numbering import Numbers
from moesys.balance.late_slots import FetchPrices, late_experts
from moesys.compiled import borrowing, compiled
from moesys.layout import EMPTY
from moesys.load import IntArray


@borrowing
def _put_at_owners(owner_E, slots_R, filled_R, expert_RS):  # type: ignore[no-untyped-def]
    for expert in range(owner_E.size):
        rank = owner_E[expert]
        if filled_R[rank] == slots_R[rank]:
            return False
        expert_RS[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
    return True


@compiled
def pin_owners(supply_NE, owner_E, slots_R, node_R, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS`` [R, S], empty before, with every expert on its owner; free slots of a node then take the
    experts that its own ranks want most of those that live elsewhere, each on the rank with least to do. Returns
    whether owners have slots for what they own.

    ``supply_NE``: tokens of each node for each expert; what a node wants of an expert that it lacks is computed
    by its owner.
    """
    num_nodes, num_experts = supply_NE.shape
    filled_R, load_R = np.zeros(slots_R.size, np.int64), np.zeros(slots_R.size, np.int64)
    free_N, has_NE = np.zeros(num_nodes, np.int64), np.zeros((num_nodes, num_experts), np.bool_)
    if not _put_at_owners(owner_E, slots_R, filled_R, expert_RS):
        return False
    for expert in range(num_experts):
        has_NE[node_R[owner_E[expert]], expert] = True
    for rank in range(slots_R.size):
        free_N[node_R[rank]] += slots_R[rank] - filled_R[rank]
    lendable_N = np.full(num_nodes, -(-free_N.sum() // num_nodes))
    for wanted in np.argsort(-supply_NE.ravel(), kind="mergesort"):
        node, expert = wanted // num_experts, wanted % num_experts
        own = node_R[owner_E[expert]]
        if free_N[node] and lendable_N[own] and supply_NE[node, expert] and not has_NE[node, expert]:
            has_NE[node, expert] = True
            free_N[node] -= 1
            lendable_N[own] -= 1
    for expert in range(num_experts):
        for node in range(num_nodes):
            if not has_NE[node, expert] or node == node_R[owner_E[expert]]:
                load_R[owner_E[expert]] += supply_NE[node, expert]
    for node in range(num_nodes):
        for expert in np.argsort(-supply_NE[node], kind="mergesort"):
            if not has_NE[node, expert] or node == node_R[owner_E[expert]]:
                continue
            least = -1
            for rank in range(slots_R.size):
                is_open = node_R[rank] == node and filled_R[rank] < slots_R[rank]
                if is_open and (least < 0 or load_R[rank] < load_R[least]):
                    least = rank
            expert_RS[least, filled_R[least]] = expert
            filled_R[least] += 1
            load_R[least] += supply_NE[node, expert]
    return True


# Parts of a token in which ranks are levelled.
PARTS_BITS = 16


@compiled
def spread(tokens_E, slots_R, node_R, rank_A, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS`` [R, S], empty before. ``slots_R``: usable slots, for all experts of ``tokens_E``, which come
    heaviest first; ``rank_A``: ranks with slots, in the order that goes round the nodes.
    """
    num_experts, num_ranks = tokens_E.size, slots_R.size
    num_nodes = node_R[num_ranks - 1] + 1
    left, num_holders = slots_R.sum(), (slots_R > 0).sum()
    replicas_E = np.ones(num_experts, np.int64)
    if num_nodes * num_experts <= left:
        replicas_E[:] = min(num_nodes, num_holders)
    left -= replicas_E.sum()
    done_E = np.zeros(num_experts, np.bool_)
    while left > 0:
        best = -1
        for expert in range(num_experts):
            if not done_E[expert] and (
                best < 0 or tokens_E[expert] * replicas_E[best] > tokens_E[best] * replicas_E[expert]
            ):
                best = expert
        if best < 0:
            break
        step = num_nodes if replicas_E[best] >= num_nodes else 1
        if step > left or replicas_E[best] + step > num_holders:
            done_E[best] = True
            continue
        replicas_E[best] += step
        left -= step
    filled_R, load_R = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    holds_RE, placed_NE = np.zeros((num_ranks, num_experts), np.bool_), np.zeros((num_nodes, num_experts), np.int64)
    share_E = (tokens_E << PARTS_BITS) // replicas_E
    of_node_N = np.zeros(num_nodes, np.int64)
    state = (slots_R, node_R, rank_A, of_node_N, filled_R, load_R, holds_RE, placed_NE, expert_RS)
    for expert in np.argsort(-share_E, kind="mergesort"):
        for _ in range(replicas_E[expert]):
            _place(expert, share_E[expert], state)
    # what is left takes the most tokens a replica, rank by rank
    for rank in range(num_ranks):
        while filled_R[rank] < slots_R[rank]:
            best = -1
            for expert in range(num_experts):
                if not holds_RE[rank, expert] and (
                    best < 0 or tokens_E[expert] * replicas_E[best] > tokens_E[best] * replicas_E[expert]
                ):
                    best = expert
            _put(rank, best, np.int64(0), state)
            replicas_E[best] += 1


@borrowing
def _place(expert, share, state):  # type: ignore[no-untyped-def]
    slots_R, node_R, rank_A, of_node_N, filled_R, load_R, holds_RE, placed_NE, _ = state
    best = -1
    for rank in rank_A:
        if filled_R[rank] == slots_R[rank] or holds_RE[rank, expert]:
            continue
        if best >= 0:
            node, other = node_R[rank], node_R[best]
            if placed_NE[node, expert] > placed_NE[other, expert]:
                continue
            if placed_NE[node, expert] == placed_NE[other, expert]:
                if load_R[rank] > load_R[best]:
                    continue
                if load_R[rank] == load_R[best] and of_node_N[node] >= of_node_N[other]:
                    continue
        best = rank
    if best >= 0:
        _put(best, expert, share, state)


@borrowing
def _put(rank, expert, share, state):  # type: ignore[no-untyped-def]
    _, node_R, _, of_node_N, filled_R, load_R, holds_RE, placed_NE, expert_RS = state
    expert_RS[rank, filled_R[rank]] = expert
    filled_R[rank] += 1
    load_R[rank] += share
    of_node_N[node_R[rank]] += share
    holds_RE[rank, expert] = True
    placed_NE[node_R[rank], expert] += 1


@compiled
def build_nodes(ranks, supply_NE, slots_N, parts, group, scenarios_each, before_RS, expert_RS):  # type: ignore[no-untyped-def]
    """Fills ``expert_RS`` node by node with the experts that nodes choose of all, each ``group`` of nodes for itself;
    returns nodes' places for experts, int64 [N, E], and whether a node's ranks were filled or there are none, bool [N].
    """
    slots_R, node_R, rank_A = ranks
    num_nodes, drawn = slots_N.size, (scenarios_each, scenarios_each)
    node_A, built_N, places_NE = node_R[rank_A], np.ones(num_nodes, np.bool_), np.zeros(supply_NE.shape, np.int64)
    ranks_N = np.bincount(node_A, minlength=num_nodes)
    for first in range(0, num_nodes, group):
        end = min(first + group, num_nodes)
        places_NE[first:end], tokens_NE = deal_to_nodes(
            supply_NE[first:end], slots_N[first:end], ranks_N[first:end], parts
        )
        for node in range(first, end):
            if ranks_N[node]:
                tokens_E, expert_D = tokens_NE[node - first], np.flatnonzero(places_NE[node])
                heaviest_D, rank_B = expert_D[np.argsort(-tokens_E[expert_D], kind="mergesort")], rank_A[node_A == node]
                built_N[node] = build_part(
                    slots_R, node_R, rank_B, tokens_E, supply_NE, heaviest_D, drawn, before_RS, expert_RS
                )
    return places_NE, built_N


# A node that takes an expert alone may so have at most so many tenths of its share: the rest levels nodes.
FILLED_TENTHS = 9


@compiled
def deal_to_nodes(supply_NE, slots_N, ranks_N, parts):  # type: ignore[no-untyped-def]
    """Returns each node's places for each expert, int64 [N, E], and the tokens that it is to compute, int64 [N, E].

    ``supply_NE``: tokens by source node; ``slots_N``, ``ranks_N``: of each node, those of ranks that have slots. There
    are as many places as slots, and none of an expert more than ranks.
    """
    num_nodes, num_experts = supply_NE.shape
    tokens_E = supply_NE.sum(axis=0)
    mean = max(tokens_E.sum() // ranks_N.sum(), 1)
    place = max(mean // parts, 1)
    lacking_E = _needed(tokens_E, place, slots_N.sum())
    places_NE = np.zeros((num_nodes, num_experts), np.int64)
    free_N = slots_N.copy()
    _take_own(supply_NE, tokens_E, ranks_N, mean, place, lacking_E, places_NE, free_N)
    tokens_NE = level(supply_NE, places_NE, ranks_N)
    load_N = tokens_NE.sum(axis=1)
    for expert in np.argsort(-tokens_E, kind="mergesort"):
        while lacking_E[expert]:
            best = -1
            for node in range(num_nodes):
                if not free_N[node] or places_NE[node, expert] == ranks_N[node]:
                    continue
                if best < 0 or load_N[node] * ranks_N[best] < load_N[best] * ranks_N[node]:
                    best = node
            if best < 0:
                break
            places_NE[best, expert] += 1
            free_N[best] -= 1
            load_N[best] += min(place, tokens_E[expert])
            lacking_E[expert] -= 1
    _fill(supply_NE, ranks_N, places_NE, free_N)
    return places_NE, level(supply_NE, places_NE, ranks_N)


@compiled
def _needed(tokens_E, mean, num_slots):  # type: ignore[no-untyped-def]
    """Returns how many places each expert needs, int64 [E]: one for each rank's mean, or part of one."""
    needed_E = -(-tokens_E // mean) + (tokens_E == 0)
    while needed_E.sum() > num_slots:
        # of those with several, the one that misses its last one the least
        best = -1
        for expert in range(tokens_E.size):
            if needed_E[expert] > 1 and (
                best < 0 or tokens_E[expert] * (needed_E[best] - 1) < tokens_E[best] * (needed_E[expert] - 1)
            ):
                best = expert
        needed_E[best] -= 1
    return needed_E


@compiled
def _take_own(supply_NE, tokens_E, ranks_N, mean, place, lacking_E, places_NE, free_N):  # type: ignore[no-untyped-def]
    num_nodes, num_experts = supply_NE.shape
    place_P2 = _places_by_worth(supply_NE, place)
    owner_E, alone_N = np.full(num_experts, -1), np.zeros(num_nodes, np.int64)
    num_ranks, num_free, num_lacking = ranks_N.sum(), free_N.sum(), lacking_E.sum()
    for index in range(place_P2.shape[0]):
        node, expert = place_P2[index, 0], place_P2[index, 1]
        still_lacking = num_lacking - (lacking_E[expert] > 0)
        reserved = max(still_lacking * ranks_N[node] // num_ranks, 0)
        if free_N[node] - 1 < reserved or num_free - 1 < still_lacking or places_NE[node, expert] == ranks_N[node]:
            continue
        if owner_E[expert] < 0:
            if (alone_N[node] + tokens_E[expert]) * 10 > mean * ranks_N[node] * FILLED_TENTHS:
                continue
            owner_E[expert] = node
            alone_N[node] += tokens_E[expert]
        elif not places_NE[node, expert]:
            alone_N[node] += supply_NE[node, expert]
            alone_N[owner_E[expert]] -= supply_NE[node, expert]
        places_NE[node, expert] += 1
        free_N[node] -= 1
        num_free -= 1
        num_lacking = still_lacking
        lacking_E[expert] = max(lacking_E[expert] - 1, 0)


@compiled
def _places_by_worth(supply_NE, mean):  # type: ignore[no-untyped-def]
    """Returns the node and expert of each place, int64 [P, 2]: those that would keep the most tokens first."""
    num_nodes, num_experts = supply_NE.shape
    num_places = (-(-supply_NE // mean)).sum()
    key_P, place_P2, bits = np.empty(num_places, np.int64), np.empty((num_places, 2), np.int64), 0
    while num_places >> bits:
        bits += 1
    place = num_places
    for node in range(num_nodes):
        for expert in range(num_experts):
            left = supply_NE[node, expert]
            while left > 0:
                place -= 1
                place_P2[place, 0], place_P2[place, 1] = node, expert
                # the place's number in its lowest bits: numbers are sorted faster than what points to them
                key_P[place] = min(left, mean) << bits | place
                left -= mean
    key_P.sort()
    return place_P2[key_P[::-1] & ((1 << bits) - 1)]


@borrowing
def _fill(supply_NE, ranks_N, places_NE, free_N):  # type: ignore[no-untyped-def]
    """Gives places that are left to the experts of the node with the most tokens a place."""
    num_nodes, num_experts = supply_NE.shape
    for node in range(num_nodes):
        while free_N[node]:
            best = -1
            for expert in range(num_experts):
                if places_NE[node, expert] == ranks_N[node]:
                    continue
                if best < 0 or supply_NE[node, expert] * (places_NE[node, best] + 1) > supply_NE[node, best] * (
                    places_NE[node, expert] + 1
                ):
                    best = expert
            if best < 0:
                break
            places_NE[node, best] += 1
            free_N[node] -= 1


@compiled
def level(supply_NE, places_NE, ranks_N):  # type: ignore[no-untyped-def]
    """Returns the tokens of each node and expert, int64 [N, E]: nodes keep their own, and others' go to level them.

    Experts with the fewest nodes come first, and of these those with the most tokens.
    """
    num_nodes = supply_NE.shape[0]
    tokens_NE = supply_NE * (places_NE > 0)
    load_N = tokens_NE.sum(axis=1)
    away_E = supply_NE.sum(axis=0) - tokens_NE.sum(axis=0)
    width_E = (places_NE > 0).sum(axis=0)
    by_tokens_E = np.argsort(-away_E, kind="mergesort")
    for expert in by_tokens_E[np.argsort(width_E[by_tokens_E], kind="mergesort")]:
        away = away_E[expert]
        while away > 0 and width_E[expert]:
            # to the lowest, up to the next one, or all there is
            lowest = next_load = -1
            for node in range(num_nodes):
                if not places_NE[node, expert]:
                    continue
                if lowest < 0 or load_N[node] * ranks_N[lowest] < load_N[lowest] * ranks_N[node]:
                    lowest = node
            for node in range(num_nodes):
                if places_NE[node, expert] and load_N[node] * ranks_N[lowest] > load_N[lowest] * ranks_N[node]:
                    up_to = load_N[node] * ranks_N[lowest] // ranks_N[node]
                    if next_load < 0 or up_to < next_load:
                        next_load = up_to
            step = away if next_load < 0 else max(min(next_load - load_N[lowest], away), 1)
            if next_load < 0 and width_E[expert] > 1:
                # all are level: an equal share each, the rest to the first
                step = -(-away // width_E[expert])
            tokens_NE[lowest, expert] += step
            load_N[lowest] += step
            away -= step
    return tokens_NE


class BuiltLayout(NamedTuple):
    """A layout, and the parts of the cluster that its replicas keep to in search; int64 [R, S] and [R]."""

    expert_RS: IntArray
    part_R: IntArray


class Builders:
    """Builds layouts near ``before_RS``, which may have none. ``part_R``: parts that every expert's ``min_replicas``
    and more must keep to; ``scenarios_each``: how many later loads a layout is built for.
    """

    def __init__(
        self, numbers: Numbers, part_R: IntArray, min_replicas: int, scenarios_each: int, before_RS: IntArray
    ) -> None:
        self.numbers, self.part_R, self.before_RS = numbers, part_R, before_RS
        self.min_replicas, self.scenarios_each = min_replicas, scenarios_each

    def replicas_spread(self) -> BuiltLayout:
        """Returns a layout with every expert's replicas on as many nodes as can be (``spread``)."""
        n, expert_RS = self.numbers, self.numbers.empty()
        spread(n.tokens_E, n.slots_R, n.node_R, n.rank_A, expert_RS)
        return BuiltLayout(expert_RS, self.part_R)

    def whole(self) -> BuiltLayout:
        """Returns a layout of the whole cluster at once."""
        n, expert_RS = self.numbers, self.numbers.empty()
        self._build(expert_RS, n.rank_A, n.tokens_E, np.arange(len(n.tokens_E)))
        return BuiltLayout(expert_RS, self.part_R)

    def at_home(self) -> BuiltLayout | None:
        """Returns a layout with every expert on its owner, and copies where they are wanted (``pinned``); None where
        owners have no slots for what they own.
        """
        n, expert_RS = self.numbers, self.numbers.empty()
        found = pin_owners(n.supply_NE, n.owner_E, n.slots_R, n.node_R, expert_RS)
        return BuiltLayout(expert_RS, self.part_R) if found else None

    def copies_that_pay(self, prices: FetchPrices) -> BuiltLayout | None:
        """Returns a layout with every expert on its owner, and the copies that late slots would get (``late_slots``);
        None where owners have no slots for what they own.
        """
        n = self.numbers
        spare_R = n.slots_R - np.bincount(n.owner_E, minlength=len(n.slots_R))
        if spare_R.min() < 0 or not spare_R.any():
            return None
        num_homes = int((n.slots_R - spare_R).max())
        wide_RS = np.full((len(n.slots_R), num_homes + int(spare_R.max())), EMPTY)
        for rank, row_S in enumerate(wide_RS):
            experts = np.flatnonzero(n.owner_E == rank)
            row_S[: len(experts)] = experts
        parts = n.node_R, n.nics_R
        wide_RS[:, num_homes:] = late_experts(n.tokens_RE, wide_RS, spare_R, n.owner_E, parts, prices)
        expert_RS = n.empty()
        for row_S, wide_S in zip(expert_RS, wide_RS, strict=True):
            experts = wide_S[wide_S != EMPTY]
            row_S[: len(experts)] = experts
        return BuiltLayout(expert_RS, self.part_R)

    def each_node(self) -> BuiltLayout | None:
        """Returns a layout of each node for what its ranks send; None where some node cannot hold every expert."""
        n, expert_RS = self.numbers, self.numbers.empty()
        if (np.bincount(n.node_R, n.slots_R) < len(n.tokens_E)).any():
            return None
        if not build_each_node(
            n.slots_R, n.node_R, n.rank_A, n.supply_NE, self.scenarios_each, self.before_RS, expert_RS
        ):
            return None
        return BuiltLayout(expert_RS, n.node_R)

    def node_first(self, parts: int, group: int) -> BuiltLayout | None:
        """Returns a layout whose nodes have the experts that their own ranks want most, of all that each ``group`` of
        nodes has between them; None where one of these cannot hold every expert.
        """
        n, expert_RS, each = self.numbers, self.numbers.empty(), self.scenarios_each
        node_A = n.node_R[n.rank_A]
        slots_N = np.bincount(n.node_R, n.slots_R, n.num_nodes).astype(np.int64)
        if (np.add.reduceat(slots_N, np.arange(0, n.num_nodes, group)) < len(n.tokens_E)).any():
            return None
        places_NE, built_N = build_nodes(
            (n.slots_R, n.node_R, n.rank_A), n.supply_NE, slots_N, parts, group, each, self.before_RS, expert_RS
        )
        for node in np.flatnonzero(~built_N).tolist():
            self._spread(expert_RS, n.rank_A[node_A == node], np.flatnonzero(places_NE[node]))
        return BuiltLayout(expert_RS, n.node_R)

    def by_parts(self) -> BuiltLayout:
        """Returns a layout with every expert in one part of the cluster, with the replicas that it needs."""
        n, expert_RS = self.numbers, self.numbers.empty()
        part_E = part_of_experts(n.tokens_E, n.slots_R, self.part_R, self.min_replicas)
        for part in range(int(self.part_R.max()) + 1):
            rank_A, expert_D = n.rank_A[self.part_R[n.rank_A] == part], np.flatnonzero(part_E == part)
            if not len(expert_D):
                continue
            if self.min_replicas == 1:
                self._build(expert_RS, rank_A, np.where(part_E == part, n.tokens_E, 0), expert_D)
            else:
                self._spread(expert_RS, rank_A, expert_D)
        return BuiltLayout(expert_RS, self.part_R)

    def _build(self, expert_RS: IntArray, rank_A: IntArray, tokens_E: IntArray, expert_D: IntArray) -> None:
        """Fills the rows of ``rank_A`` with the experts ``expert_D``, balanced for ``tokens_E``."""
        n, drawn = self.numbers, (self.scenarios_each, self.scenarios_each)
        parts = n.slots_R, n.node_R, rank_A
        if not build_part(*parts, tokens_E, n.supply_NE, expert_D, drawn, self.before_RS, expert_RS):
            self._spread(expert_RS, rank_A, expert_D)

    def _spread(self, expert_RS: IntArray, rank_A: IntArray, expert_D: IntArray) -> None:
        n = self.numbers
        rows = spread_replicas(n.tokens_E, n.slots_R, self.min_replicas, expert_D.tolist(), rank_A.tolist())
        for rank, experts in zip(rank_A.tolist(), rows, strict=True):
            expert_RS[rank, : len(experts)] = experts
