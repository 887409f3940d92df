"""Planners replayed: a layout is planned on what has been, and the tokens of a later micro-batch are split over it.

What has been is handed to the planner, load by load, and nothing else: a ``LayerPlanner`` has no trace to look into.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moesys.balance import LoadHistory, min_max_load, num_moves, plan_layout, split_tokens
from moesys.config import Balance, ClusterSpec, Eplb, EvenSplit, Greedy, Oracle, Predictor, Split
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray, LoadMatrix


@dataclass(frozen=True)
class Contender:
    """A planner, the predictor that tells it a load, and the split that its layouts are used with."""

    balance: Balance
    split: Split
    predictor: Predictor

    @property
    def name(self) -> str:
        """Kinds, and what differs from their defaults: ``greedy + flow, window_mean(steps=9)``."""
        return f"{_words(self.balance)} + {_words(self.split)}, {_words(self.predictor)}"

    def split_over(self, load: LoadMatrix, layout: ExpertLayout, cluster: ClusterSpec, turn: int) -> TokenPlan:
        """``split_tokens``; but the even split that goes with EPLB knows no nodes."""
        if isinstance(self.balance, Eplb) and isinstance(self.split, EvenSplit):
            cluster = ClusterSpec(ranks_per_node=cluster.num_ranks)
        return split_tokens(load, layout, cluster, self.split, turn)


class LayerPlanner:
    """One layer's layouts, each planned on the loads observed so far; the one before it is where a planner may begin.

    ``Oracle`` alone is told the load to come: that is its purpose, and ``plan`` refuses it to every other predictor.
    """

    def __init__(self, balance: Balance, predictor: Predictor, cluster: ClusterSpec, slots: int, num_experts: int):
        self._balance, self._cluster, self._slots = balance, cluster, slots
        self._history = None if isinstance(predictor, Oracle) else LoadHistory(predictor)
        alike = LoadMatrix(np.ones((cluster.num_ranks, num_experts), dtype=np.int64))
        self.layout = plan_layout(alike, cluster, balance, slots)

    def observe(self, load: LoadMatrix) -> None:
        if self._history is not None:
            self._history.observe(load)

    def plan(self, revealed: LoadMatrix | None = None) -> float:
        """Make ``layout`` a new one; the milliseconds of planning it, without the prediction."""
        assert (self._history is None) == (revealed is not None)
        load, balance = revealed, self._balance
        if self._history is not None:
            load = self._history.predicted()
            if isinstance(balance, Greedy):
                balance = balance.replace(move_tokens=balance.move_tokens * self._history.units_per_token)
        assert load is not None
        start = time.perf_counter()
        self.layout = plan_layout(load, self._cluster, balance, self._slots, previous=self.layout)
        return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True)
class Score:
    """One layout used on one micro-batch.

    known: the newest iteration that its planner had seen. scored: the iteration whose tokens were split.
    least_max_over_mean: what no split over this layout can be below (min-cut). inter_node_share: of the routed tokens.
    moves: replicas that are not where they were in the plan before; None for the first plan.
    layout: the layout's fingerprint.
    """

    setting: str
    contender: str
    layer: int
    known: int
    scored: int
    max_over_mean: float
    least_max_over_mean: float
    inter_node_share: float
    moves: int | None
    layout_ms: float
    split_ms: float
    layout: str

    @property
    def gap(self) -> float:
        """How much busier the busiest rank is than it had to be over this layout."""
        return self.max_over_mean / self.least_max_over_mean - 1


@dataclass(frozen=True)
class Moment:
    """Micro-batches 0 to ``num_known`` - 1 are known when the layout for micro-batch ``scored`` is planned."""

    num_known: int
    scored: int


def moments(
    iterations: Sequence[int],
    lag: int,
    first: int | None = None,
    last: int | None = None,
    every: int = 1,
    warmup: int = 1,
) -> list[Moment]:
    """When plans are made: for every ``every``-th micro-batch of iterations ``first`` to ``last``, on all those that
    are at least ``lag`` iterations older, and ``warmup`` of them at least.

    Raises ValueError where there is none.
    """
    if lag < 1:
        raise ValueError(f"lag={lag} plans on the load that is scored; use at least 1")
    known = [bisect_right(iterations, iteration - lag) for iteration in iterations]
    found = [
        Moment(num_known, scored)
        for scored, num_known in enumerate(known)
        if num_known >= warmup
        and (first is None or first <= iterations[scored])
        and (last is None or iterations[scored] <= last)
    ][::every]
    if not found:
        raise ValueError(
            f"no micro-batch is left to score: iterations {iterations[0]} to {iterations[-1]} with lag={lag}, "
            f"from_iteration={first} and to_iteration={last}; use a smaller lag or more iterations"
        )
    return found


def replay_layer(
    tokens_SRE: IntArray,
    iterations: Sequence[int],
    when: Sequence[Moment],
    cluster: ClusterSpec,
    slots: int,
    chosen: Sequence[Contender],
    *,
    setting: str = "",
    layer: int = 0,
) -> Iterator[Score]:
    """One layer's scores. Contenders that differ only in their split share their layouts, planned once."""
    loads = [LoadMatrix(tokens_RE) for tokens_RE in tokens_SRE]
    for balance, predictor in dict.fromkeys((one.balance, one.predictor) for one in chosen):
        users = [one for one in chosen if (one.balance, one.predictor) == (balance, predictor)]
        planner = LayerPlanner(balance, predictor, cluster, slots, tokens_SRE.shape[2])
        observed, before = 0, None
        for moment in when:
            for load in loads[observed : moment.num_known]:
                planner.observe(load)
            observed = moment.num_known
            current = loads[moment.scored]
            layout_ms = planner.plan(current if isinstance(predictor, Oracle) else None)
            layout = planner.layout
            least = min_max_load(current, layout) * cluster.num_ranks / max(1, current.total) or 1.0
            for one in users:
                start = time.perf_counter()
                plan = one.split_over(current, layout, cluster, moment.scored)
                split_ms = (time.perf_counter() - start) * 1e3
                yield Score(
                    setting=setting,
                    contender=one.name,
                    layer=layer,
                    known=iterations[moment.num_known - 1],
                    scored=iterations[moment.scored],
                    max_over_mean=plan.max_over_mean,
                    least_max_over_mean=least,
                    inter_node_share=plan.inter_node_tokens(cluster.node_of_rank) / max(1, current.total),
                    moves=None if before is None else num_moves(before.replicas_RE, layout.replicas_RE),
                    layout_ms=layout_ms,
                    split_ms=split_ms,
                    layout=layout.fingerprint()[:16],
                )
            before = layout


def _words(member: Balance | Split | Predictor) -> str:
    """A member's kind, and the fields that are not their defaults."""
    default = type(member)()
    changed = [f"{field}={value}" for field, value in member if field != "kind" and value != getattr(default, field)]
    return f"{member.kind}({', '.join(changed)})" if changed else member.kind
