"""min_max_load: the least load of the busiest rank that any split over a layout can reach. tight_set: the proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moesys.compiled import borrowing, compiled
from moesys.layout import ExpertLayout, check_same_shape
from moesys.load import IntArray, LoadMatrix


class MinMaxFlow(NamedTuple):
    """Scratch of ``min_max_flow`` for P replicas, R ranks and E experts, and the state it leaves.

    ``tokens_P`` int64: what each replica gets; ``load_R`` int64: its sums; ``tight_R`` bool: the ranks of the set that
    proves the limit, none where that is the mean; ``overflow`` int64 [1]: tokens for which ranks filled to the mean
    have no room.
    """

    tokens_P: IntArray
    load_R: IntArray
    tight_R: IntArray
    overflow: IntArray
    distance_R: IntArray
    queue_R: IntArray
    met_E: IntArray


@compiled
def new_flow(table):  # type: ignore[no-untyped-def]
    """Returns the ``MinMaxFlow`` of a ``ReplicaTable``."""
    num_ranks, num_experts = table.holds_R.size, table.first_E.size - 1
    return MinMaxFlow(
        np.zeros(table.rank_P.size, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.bool_),
        np.zeros(1, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_experts, np.bool_),
    )


@borrowing
def min_max_flow(tokens_E, table, flow):  # type: ignore[no-untyped-def]
    """Returns the least tokens of the busiest rank, for ``tokens_E`` int64 [E]; leaves the split and its proof in
    ``flow``.
    """
    mean = limit = _water_fill_all(tokens_E, table, flow)
    flow.tight_R[:] = False
    flow.overflow[0] = 0
    while True:
        num_queued, excess, reaches = _measure_distances(limit, table, flow)
        if not excess:
            return limit
        if reaches:
            _push_all(limit, num_queued, table, flow)
            continue
        tokens = num_tight = 0
        for rank in range(flow.load_R.size):
            if limit == mean:
                flow.overflow[0] += max(flow.load_R[rank] - mean, 0)
            flow.tight_R[rank] = flow.distance_R[rank] < 0 and table.holds_R[rank]
            if flow.tight_R[rank]:
                tokens += flow.load_R[rank]
                num_tight += 1
        limit = -(-tokens // num_tight)


@borrowing
def _water_fill_all(tokens_E, table, flow):  # type: ignore[no-untyped-def]
    """Makes a first split: experts with the fewest ranks first, each poured onto its ranks up to one level. Returns the
    mean of the loads.
    """
    first_E, rank_P = table.first_E, table.rank_P
    tokens_P, load_R = flow.tokens_P, flow.load_R
    load_R[:] = 0
    total = num_holding = 0
    for expert in range(tokens_E.size):
        total += tokens_E[expert]
        first = first_E[expert]
        if first_E[expert + 1] - first == 1:
            tokens_P[first] = tokens_E[expert]
            load_R[rank_P[first]] += tokens_E[expert]
    for expert in table.shared_F:
        water_fill(tokens_E[expert], first_E[expert], first_E[expert + 1], rank_P, tokens_P, load_R)
    for rank in range(load_R.size):
        num_holding += table.holds_R[rank]
    return -(-total // num_holding)


@borrowing
def water_fill(tokens, first, end, rank_P, tokens_P, load_R):  # type: ignore[no-untyped-def]
    """Gives tokens to the lowest of the ranks ``rank_P[first:end]``, up to one level; higher ranks drop out."""
    width, water = end - first, tokens
    for replica in range(first, end):
        tokens_P[replica] = 0
        water += load_R[rank_P[replica]]
    height, dropped = 0, True
    while dropped:
        dropped = False
        height = water // width
        for replica in range(first, end):
            if tokens_P[replica] == 0 and load_R[rank_P[replica]] > height:
                tokens_P[replica] = -1
                water -= load_R[rank_P[replica]]
                width -= 1
                dropped = True
    left = water - height * width
    for replica in range(first, end):
        if tokens_P[replica] < 0:
            tokens_P[replica] = 0
        else:
            tokens_P[replica] = height - load_R[rank_P[replica]] + (left > 0)
            load_R[rank_P[replica]] += tokens_P[replica]
            left -= left > 0


@borrowing
def _measure_distances(limit, table, flow):  # type: ignore[no-untyped-def]
    """Measures the steps from each rank to the nearest with room, -1 where none is reached, and queues ranks by
    distance.
    """
    num_ranks = flow.load_R.size
    num_queued, excess = 0, False
    for rank in range(num_ranks):
        excess = excess or flow.load_R[rank] > limit
        flow.distance_R[rank] = -1
        if flow.load_R[rank] < limit and table.holds_R[rank]:
            flow.distance_R[rank] = 0
            flow.queue_R[num_queued] = rank
            num_queued += 1
    if not excess:
        return num_queued, False, False
    reaches = False
    flow.met_E[:] = False
    done = 0
    while done < num_queued:
        target = flow.queue_R[done]
        done += 1
        for index in range(table.first_R[target], table.first_R[target + 1]):
            expert = table.expert_P[table.shared_Q[index]]
            if flow.met_E[expert]:
                continue
            flow.met_E[expert] = True
            for replica in range(table.first_E[expert], table.first_E[expert + 1]):
                rank = table.rank_P[replica]
                if flow.distance_R[rank] < 0 and flow.tokens_P[replica] > 0:
                    flow.distance_R[rank] = flow.distance_R[target] + 1
                    reaches = reaches or flow.load_R[rank] > limit
                    flow.queue_R[num_queued] = rank
                    num_queued += 1
    return num_queued, True, reaches


@borrowing
def _push_all(limit, num_queued, table, flow):  # type: ignore[no-untyped-def]
    """Pushes what ranks have above the limit one step nearer, the farthest ranks first, so that it travels on."""
    for position in range(num_queued - 1, -1, -1):
        rank = flow.queue_R[position]
        if flow.distance_R[rank] == 0:
            return
        for index in range(table.first_R[rank], table.first_R[rank + 1]):
            if flow.load_R[rank] <= limit:
                break
            replica = table.shared_Q[index]
            expert = table.expert_P[replica]
            for other in range(table.first_E[expert], table.first_E[expert + 1]):
                if flow.load_R[rank] <= limit or flow.tokens_P[replica] == 0:
                    break
                target = table.rank_P[other]
                if flow.distance_R[target] != flow.distance_R[rank] - 1:
                    continue
                tokens = min(flow.load_R[rank] - limit, flow.tokens_P[replica])
                if flow.distance_R[target] == 0:
                    tokens = min(tokens, limit - flow.load_R[target])
                if tokens > 0:
                    flow.tokens_P[replica] -= tokens
                    flow.load_R[rank] -= tokens
                    flow.tokens_P[other] += tokens
                    flow.load_R[target] += tokens


@dataclass(frozen=True)
class TightSet:
    """Ranks that no split over a layout can relieve: ``experts`` live nowhere else, and are ``tokens`` in all.

    So the busiest of ``ranks`` has at least ``bound`` tokens, whatever the split.
    """

    ranks: tuple[int, ...]
    experts: tuple[int, ...]
    tokens: int

    @property
    def bound(self) -> int:
        """Tokens per rank of the set, rounded up."""
        return -(-self.tokens // len(self.ranks))


def min_max_load(load: LoadMatrix, layout: ExpertLayout) -> int:
    """Returns the least tokens of the busiest rank, over all splits of ``load`` over ``layout``; ``FlowSplit`` attains
    it.

    It is the greatest, over sets of ranks, of the tokens whose experts only they hold, per rank of the set, rounded up
    (Hall's condition; equation 3 of arXiv 2511.16947). Computed by OR-Tools, apart from the split that attains it.
    Raises ValueError when load and layout are for different ranks or experts.
    """
    check_same_shape(load, layout)
    return _hardest_set(load.tokens_E, layout.replicas_RE > 0)[0]


def tight_set(load: LoadMatrix, layout: ExpertLayout) -> TightSet:
    """Returns the set of ranks whose bound is ``min_max_load``; all ranks with an expert where that is the mean.

    Raises ValueError when load and layout are for different ranks or experts.
    """
    check_same_shape(load, layout)
    holds_RE = layout.replicas_RE > 0
    limit, in_set_R = _hardest_set(load.tokens_E, holds_RE)
    inside_E = ~holds_RE[~in_set_R].any(axis=0)
    found = TightSet(
        ranks=tuple(np.flatnonzero(in_set_R).tolist()),
        experts=tuple(np.flatnonzero(inside_E).tolist()),
        tokens=int(load.tokens_E[inside_E].sum()),
    )
    assert found.bound == limit, f"the cut proves {found.bound} tokens and not the {limit} of the flow"
    return found


def _hardest_set(tokens_E: IntArray, holds_RE: np.ndarray) -> tuple[int, np.ndarray]:
    """Returns ``min_max_load`` for ``tokens_E`` [E] and ``holds_RE`` bool [R, E], and the ranks, bool [R], that prove
    it.

    Discrete Newton on the minimum cut: a limit that is too low leaves a set of experts, and the ranks that hold them,
    too small for their tokens; their mean is the next limit. Every limit tried is a lower bound with its set, so the
    first that suffices is the answer. A handful of maximum flows, on integers throughout.
    """
    holders_E = holds_RE.sum(axis=0)
    fixed_R = holds_RE[:, holders_E == 1] @ tokens_E[holders_E == 1]
    free = np.flatnonzero((holders_E > 1) & (tokens_E > 0))
    in_set_R = holds_RE.sum(axis=1) > 0
    limit = -(-int(tokens_E.sum()) // int(in_set_R.sum()))
    if int(fixed_R.max()) > limit:
        limit, in_set_R = int(fixed_R.max()), np.arange(len(fixed_R)) == int(fixed_R.argmax())
    if not free.size:
        return limit, in_set_R
    tokens_F, holds_RF = tokens_E[free], holds_RE[:, free]
    share_F = -(-tokens_F // holders_E[free])
    if int(share_F.max()) > limit:
        limit, in_set_R = int(share_F.max()), holds_RF[:, int(share_F.argmax())]

    from ortools.graph.python.max_flow import SimpleMaxFlow

    num_ranks, num_free = holds_RF.shape
    source, sink, first_rank = num_free + num_ranks, num_free + num_ranks + 1, num_free
    expert, rank = np.nonzero(holds_RF.T)
    graph = SimpleMaxFlow()
    experts, ranks = np.arange(num_free, dtype=np.int32), np.arange(first_rank, source, dtype=np.int32)
    graph.add_arcs_with_capacity(np.full_like(experts, source), experts, tokens_F)
    graph.add_arcs_with_capacity(experts[expert], ranks[rank], tokens_F[expert])
    to_sink = graph.add_arcs_with_capacity(ranks, np.full_like(ranks, sink), limit - fixed_R)
    wanted = int(tokens_F.sum())
    while True:
        status = graph.solve(source, sink)
        assert status == SimpleMaxFlow.OPTIMAL, f"maximum flow ended with {status}"
        if graph.optimal_flow() == wanted:
            return limit, in_set_R
        tight = np.asarray(graph.get_source_side_min_cut())
        captive, holders = tight[tight < first_rank], tight[(tight >= first_rank) & (tight < source)] - first_rank
        tokens = int(tokens_F[captive].sum()) + int(fixed_R[holders].sum())
        limit, in_set_R = -(-tokens // len(holders)), np.isin(np.arange(num_ranks), holders)
        graph.set_arcs_capacity(to_sink, limit - fixed_R)
