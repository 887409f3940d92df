"""Replays loads that are known beforehand: the one walk from history to layout to plan.

Simulated trials, ``explain``, the tuner and the leaderboard walk here, with the layouts that training would
have: those of ``LayoutSchedule``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from moesys.balance.layout_schedule import InlinePlanner, LayoutSchedule, PlanRequest, PlanSource, PlanTicket
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import Generated, Replay
from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix
from moesys.traces import Trace, generate, load_trace


@dataclass(frozen=True)
class Moment:
    """Micro-batches 0 to ``num_known`` - 1 are known when ``micro_batch`` is run."""

    num_known: int
    micro_batch: int


@dataclass(frozen=True)
class Replan:
    """A plan that came into force.

    made_after: the newest micro-batch whose load was known when it was requested. replaced: the layout before it.
    """

    request: PlanRequest
    made_after: int
    replaced: ExpertLayout


@dataclass(frozen=True)
class ReplayBatch:
    """One micro-batch through one layer.

    layout: the one in force before the counts are known; ``plan`` has late slots, and with ``lag=0`` another one.
    replan: the plan that brought it; None where it is that of the micro-batch before.
    """

    strategy: Strategy
    model: ModelShape
    cluster: ClusterSpec
    micro_batch: int
    load: LoadMatrix
    layout: ExpertLayout
    replan: Replan | None

    @cached_property
    def plan(self) -> LayerPlan:
        """The plan of this layer, computed when it is first read."""
        return plan_layer(self.strategy, self.model, self.cluster, self.load, layout=self.layout, turn=self.micro_batch)


def replay_layer(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    tokens_SRE: IntArray,
    *,
    layer: int = 0,
    moments: Iterable[Moment] | None = None,
    planner: PlanSource | None = None,
) -> Iterator[ReplayBatch]:
    """Walks one layer through the loads ``tokens_SRE``, int64 [S, R, E], of its micro-batches.

    Layouts follow from history as in training: the strategy's own predictor, ``replan_every`` and ``lag``; only
    ``Oracle`` knows what is to come. ``moments``: which micro-batches are run, and how many are known by then; by
    default all, each when those before it are known. If a moment adds no loads, nothing is planned for it. ``planner``
    makes the plans; by default the strategy's own, at once and without a deadline.
    """
    schedule = LayoutSchedule(layer, strategy, model, cluster, tokens_SRE)
    schedule.source = requests = _Requests(planner or InlinePlanner())
    asked: deque[tuple[int, PlanRequest]] = deque()
    if moments is None:
        moments = (Moment(index, index) for index in range(len(tokens_SRE)))
    for moment in moments:
        for tokens_RE in tokens_SRE[schedule.micro_batch : moment.num_known]:
            schedule.record(partial(LoadMatrix, tokens_RE))
        schedule.request()
        asked.extend((moment.num_known - 1, request) for request in requests.taken())
        replaced, replan = schedule.layout, None
        schedule.commit(agreed=True)
        while asked and asked[0][0] + strategy.lag <= schedule.micro_batch:
            made_after, request = asked.popleft()
            replan = Replan(request, made_after, replaced)
        load = LoadMatrix(tokens_SRE[moment.micro_batch])
        yield ReplayBatch(strategy, model, cluster, moment.micro_batch, load, schedule.layout, replan)


def replay_steps(
    strategy: Strategy, model: ModelShape, cluster: ClusterSpec, tokens_SLRE: IntArray
) -> Iterator[StepPlan]:
    """Walks all layers through the loads ``tokens_SLRE``, int64 [S, L, R, E], and gives each micro-batch's plans."""
    layers = [
        replay_layer(strategy, model, cluster, tokens_SLRE[:, layer], layer=layer)
        for layer in range(tokens_SLRE.shape[1])
    ]
    for replayed in zip(*layers, strict=True):
        yield StepPlan(strategy, model, cluster, tuple(one.plan for one in replayed))


class _Requests:
    """Passes requests to a planner, and keeps those that were not read yet."""

    def __init__(self, planner: PlanSource) -> None:
        self._planner = planner
        self._new: list[PlanRequest] = []

    def submit(self, request: PlanRequest) -> PlanTicket:
        self._new.append(request)
        return self._planner.submit(request)

    def taken(self) -> list[PlanRequest]:
        new, self._new = self._new, []
        return new


def routing_of(workload: Replay | Generated, model: ModelShape, cluster: ClusterSpec, seed: int) -> Trace:
    """Returns the routing, the same for every strategy: drawn with ``seed``, or read from the trace file of the seed.

    Raises ValueError for a trace that is missing, too short, or does not fit the model or the cluster.
    """
    if isinstance(workload, Generated):
        return generate(workload, cluster.num_ranks, model.num_experts, model.top_k, seed)
    path = workload.trace.replace("{seed}", str(seed))
    trace = load_trace(path)
    try:
        trace = trace.fold(cluster.num_ranks)
    except ValueError as error:
        raise ValueError(f"trace {path} on a cluster of {cluster.num_ranks} ranks: {error}") from None
    if (trace.num_experts, trace.top_k) != (model.num_experts, model.top_k):
        raise ValueError(
            f"trace {path} is of {trace.num_experts} experts and top_k={trace.top_k}, but the model has "
            f"num_experts={model.num_experts} and top_k={model.top_k}; replay it on a model that has as many"
        )
    if workload.warmup + workload.micro_batches > trace.num_micro_batches:
        raise ValueError(
            f"warmup={workload.warmup} leaves nothing to time of the {trace.num_micro_batches} micro-batches that "
            f"trace {path} has on {cluster.num_ranks} ranks, with micro_batches={workload.micro_batches} a step; "
            f"use warmup and micro_batches that are at most {trace.num_micro_batches} together"
        )
    empty_S = trace.tokens_SLRE.sum(axis=(1, 2, 3)) == 0
    if empty_S.any():
        raise ValueError(
            f"trace {path} has no token in micro-batch {empty_S.argmax()} on {cluster.num_ranks} ranks; leave it out"
        )
    return trace if workload.tokens_per_rank is None else trace.scaled(workload.tokens_per_rank)
