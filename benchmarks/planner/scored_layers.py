"""Planners replayed: a layout is planned on what has been, and the tokens of a later micro-batch are split over it."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.relabelling import num_moves
from moesys.balance.layout_schedule import PlanRequest, PlanSource, SolvedPlan
from moesys.balance.replay import Moment, Replayed, replay_layer
from moesys.balance.splits import split_tokens
from moesys.config import Balance, ClusterSpec, Eplb, EvenSplit, Fsep, ModelShape, Oracle, Predictor, Split, Strategy
from moesys.lab.show.sheets import Column
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
        return f"{member_words(self.balance)} + {member_words(self.split)}, {member_words(self.predictor)}"

    def split_over(self, load: LoadMatrix, layout: ExpertLayout, cluster: ClusterSpec, turn: int) -> TokenPlan:
        """``split_tokens``; but the even split that goes with EPLB knows no nodes."""
        if isinstance(self.balance, Eplb) and isinstance(self.split, EvenSplit):
            cluster = ClusterSpec(ranks_per_node=cluster.num_ranks)
        return split_tokens(load, layout, cluster, self.split, turn)

    def strategy(self, slots: int) -> Strategy:
        """Planned anew with every load, in ``slots`` a rank."""
        sharding = Fsep(slots_per_rank=slots)
        return Strategy(
            name=self.name, sharding=sharding, balance=self.balance, predictor=self.predictor, split=self.split
        )


class TimedPlanner:
    """Plans at once, as declared. ``layout_ms``: what the newest plan took, without the prediction."""

    def __init__(self) -> None:
        self.layout_ms = 0.0

    def submit(self, request: PlanRequest) -> SolvedPlan:
        start = time.perf_counter()
        layout = request.solve()
        self.layout_ms = (time.perf_counter() - start) * 1e3
        return SolvedPlan(layout)


@dataclass(frozen=True)
class Score:
    """One layout used on one micro-batch.

    known: the newest iteration that its planner had seen. scored: the iteration whose tokens were split.
    least_max_over_mean: what no split over this layout can be below (min-cut). inter_node_share: of the routed tokens.
    moves: replicas that are not where they were in the plan before; None for the first plan.
    layout: the layout's fingerprint. layout_ms: 0 where nothing had to be planned.
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
    def gap(self) -> Annotated[float, Column("")]:
        """How much busier the busiest rank is than it had to be over this layout."""
        return self.max_over_mean / self.least_max_over_mean - 1


def layouts_of(
    contender: Contender,
    tokens_SRE: IntArray,
    when: Iterable[Moment] | None,
    cluster: ClusterSpec,
    slots: int,
    planner: PlanSource | None = None,
) -> Iterator[Replayed]:
    """A layer's layouts, each planned on what is known by then: ``replay_layer``, where planning is all there is.

    ``Oracle`` alone is told the load to come: that is its purpose.
    """
    model = ModelShape(hidden_size=1, intermediate_size=1, num_experts=tokens_SRE.shape[2], top_k=1)
    if when is not None and isinstance(contender.predictor, Oracle):
        when = [Moment(moment.micro_batch, moment.micro_batch) for moment in when]
    return replay_layer(contender.strategy(slots), model, cluster, tokens_SRE, moments=when, planner=planner)


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


def score_layer(
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
    for balance, predictor in dict.fromkeys((one.balance, one.predictor) for one in chosen):
        users = [one for one in chosen if (one.balance, one.predictor) == (balance, predictor)]
        planner, before = TimedPlanner(), None
        walk = layouts_of(users[0], tokens_SRE, when, cluster, slots, planner)
        for moment, replayed in zip(when, walk, strict=True):
            load, layout = replayed.load, replayed.layout
            least = min_max_load(load, layout) * cluster.num_ranks / max(1, load.total) or 1.0
            for one in users:
                start = time.perf_counter()
                plan = one.split_over(load, layout, cluster, moment.micro_batch)
                split_ms = (time.perf_counter() - start) * 1e3
                yield Score(
                    setting=setting,
                    contender=one.name,
                    layer=layer,
                    known=iterations[moment.num_known - 1],
                    scored=iterations[moment.micro_batch],
                    max_over_mean=plan.max_over_mean,
                    least_max_over_mean=least,
                    inter_node_share=plan.inter_node_tokens(cluster.domain_of_rank) / max(1, load.total),
                    moves=None if before is None else num_moves(before.replicas_RE, layout.replicas_RE),
                    layout_ms=planner.layout_ms if replayed.replan else 0.0,
                    split_ms=split_ms,
                    layout=layout.fingerprint()[:16],
                )
            before = layout


def member_words(member: Balance | Split | Predictor) -> str:
    """A member's kind, and the fields that are not their defaults."""
    defaults = {name: field.default for name, field in type(member).model_fields.items()}
    changed = [f"{field}={value}" for field, value in member if field != "kind" and value != defaults[field]]
    return f"{member.kind}({', '.join(changed)})" if changed else member.kind
