"""min_max_load: the least load of the busiest rank that any split over a layout can reach. tight_set: the proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix


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
    """The least tokens of the busiest rank, over all splits of ``load`` over ``layout``; ``FlowSplit`` attains it.

    It is the greatest, over sets of ranks, of the tokens whose experts only they hold, per rank of the set, rounded up
    (Hall's condition; equation 3 of arXiv 2511.16947). Computed by OR-Tools, apart from the split that attains it.
    Raises ValueError when load and layout are for different ranks or experts.
    """
    _check_same_shape(load, layout)
    return _hardest_set(load.tokens_E, layout.replicas_RE > 0)[0]


def tight_set(load: LoadMatrix, layout: ExpertLayout) -> TightSet:
    """The set of ranks whose bound is ``min_max_load``; all ranks with an expert where that is the mean.

    Raises ValueError when load and layout are for different ranks or experts.
    """
    _check_same_shape(load, layout)
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


def _check_same_shape(load: LoadMatrix, layout: ExpertLayout) -> None:
    if (load.num_ranks, load.num_experts) != (layout.num_ranks, layout.num_experts):
        raise ValueError(
            f"the load is for {load.num_ranks} ranks and {load.num_experts} experts, the layout for "
            f"{layout.num_ranks} and {layout.num_experts}; plan both for the same cluster and model"
        )


def _hardest_set(tokens_E: IntArray, holds_RE: np.ndarray) -> tuple[int, np.ndarray]:
    """``min_max_load`` for ``tokens_E`` [E] and ``holds_RE`` bool [R, E], and the ranks, bool [R], that prove it.

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
