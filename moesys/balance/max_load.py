"""min_max_load: the least load of the busiest rank that any split over a layout can reach."""

from __future__ import annotations

import numpy as np
from ortools.graph.python.max_flow import SimpleMaxFlow

from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix


def min_max_load(load: LoadMatrix, layout: ExpertLayout) -> int:
    """The least tokens of the busiest rank, over all splits of ``load`` over ``layout``; ``FlowSplit`` attains it.

    It is the greatest, over sets of ranks, of the tokens whose experts only they hold, per rank of the set, rounded up
    (Hall's condition; equation 3 of arXiv 2511.16947).
    Raises ValueError when load and layout are for different ranks or experts.
    """
    if (load.num_ranks, load.num_experts) != (layout.num_ranks, layout.num_experts):
        raise ValueError(
            f"the load is for {load.num_ranks} ranks and {load.num_experts} experts, the layout for "
            f"{layout.num_ranks} and {layout.num_experts}; plan both for the same cluster and model"
        )
    return least_max_load(load.tokens_E, layout.replicas_RE > 0)


def least_max_load(tokens_E: IntArray, holds_RE: np.ndarray) -> int:
    """The same for ``tokens_E`` [E] and ``holds_RE`` bool [R, E]; every expert is held.

    Discrete Newton on the minimum cut: a limit that is too low leaves a set of experts, and the ranks that hold them,
    too small for their tokens; their mean is the next limit. Every limit tried is a lower bound, so the first that
    suffices is the answer. A handful of maximum flows, on integers throughout.
    """
    holders_E = holds_RE.sum(axis=0)
    fixed_R = holds_RE[:, holders_E == 1] @ tokens_E[holders_E == 1]
    free = np.flatnonzero((holders_E > 1) & (tokens_E > 0))
    num_holding = int(holds_RE.any(axis=1).sum())
    limit = max(int(fixed_R.max()), -(-int(tokens_E.sum()) // num_holding))
    if not free.size:
        return limit
    tokens_F, holds_RF = tokens_E[free], holds_RE[:, free]
    limit = max(limit, int((-(-tokens_F // holders_E[free])).max()))

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
            return limit
        tight = np.asarray(graph.get_source_side_min_cut())
        captive, holders = tight[tight < first_rank], tight[(tight >= first_rank) & (tight < source)] - first_rank
        tokens = int(tokens_F[captive].sum()) + int(fixed_R[holders].sum())
        limit = -(-tokens // len(holders))
        graph.set_arcs_capacity(to_sink, limit - fixed_R)
