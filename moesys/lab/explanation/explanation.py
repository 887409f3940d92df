"""explain: one step's plan, and why it is so: what is wanted, what moved, who goes where, who waits for what.

Every figure is read off the objects that a trial in the cost model uses: the layouts of ``LayoutSchedule``, the token
plans of ``plan_layer``, the bytes of ``cost``, the timeline of ``simulation``. So all times are a cost model's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import StringIO

import numpy as np

from moesys.balance import min_max_load, split_tokens, window
from moesys.config import ClusterSpec, EvenSplit, Oracle, Strategy
from moesys.config.experiment import Experiment, Generated, Replay, Training
from moesys.cost import FloatArray, dispatch_bytes, reshard_bytes, restore_bytes, restores_per_step, transfer_seconds
from moesys.lab.explanation.mega_memory import MegaMemory, mega_memory
from moesys.lab.explanation.rank_times import RankTimes
from moesys.lab.runs.trials import rest_of, routing_of
from moesys.lab.show.console import print_full
from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix
from moesys.moe.planning import InlinePlanner, LayoutSchedule, PlanRequest, PlanTicket
from moesys.simulator.critical_path import by_place
from moesys.simulator.simulation import exposed_ms
from moesys.step import LayerPlan, StepPlan, plan_layer, simulation
from moesys.traces import Trace


@dataclass(frozen=True)
class ExpertChange:
    """An expert whose replicas moved. ``load_over_mean``: its tokens over the mean's, in the load planned for."""

    expert: int
    replicas_before: int
    replicas_after: int
    gained_ranks: list[int]
    lost_ranks: list[int]
    load_over_mean: float


@dataclass(frozen=True)
class LayoutChange:
    """The newest plan that moved anything, against the layout that it replaced.

    since: the micro-batch from which on it is in use. history: the first and last micro-batch that it was planned on,
    which with ``Oracle`` is the one to come.
    max_over_mean_before, max_over_mean_after: the busiest rank over the mean, on the load that it was planned for.
    """

    since: int
    history: tuple[int, int]
    max_over_mean_before: float
    max_over_mean_after: float
    experts: list[ExpertChange]


@dataclass(frozen=True)
class Traffic:
    """All-to-alls of one kind: bytes of one, over all ranks, by link class; how many a step has; the milliseconds that
    one takes where it has the links for itself.
    """

    kind: str
    intra_node_bytes: int
    inter_node_bytes: int
    times: int
    alone_ms: float


@dataclass(frozen=True)
class LayerExplanation:
    """One layer.

    tokens_E: of each expert. experts_R: in each rank's slots.
    change: None where the layout is still the first one. num_kept: plans after it that moved nothing.
    tokens_R: that each rank computes. busiest_rank: who has most; ``busiest_tokens`` says of its heaviest experts.
    max_over_mean: of ranks; under ``EvenSplit``; and what no split over this layout can be below.
    on_rank, within_node, between_nodes: tokens whose expert is on their own rank, on another of its node, elsewhere.
    mean_ms, critical_ms: the layer's share of ``StepExplanation``'s.
    """

    layer: int
    tokens_E: list[int]
    experts_R: list[list[int]]
    change: LayoutChange | None
    num_kept: int
    tokens_R: list[int]
    max_over_mean: float
    even_max_over_mean: float
    least_max_over_mean: float
    on_rank: int
    within_node: int
    between_nodes: int
    busiest_rank: int
    busiest_tokens: dict[int, int]
    traffic: list[Traffic]
    critical_ms: dict[str, float]
    mean_ms: dict[str, float]

    @property
    def expert_max_over_mean(self) -> float:
        return max(self.tokens_E) / np.mean(self.tokens_E).item() if any(self.tokens_E) else 1.0

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_E)

    def hottest(self, count: int) -> list[int]:
        """Experts with most tokens, the lower of equals first."""
        return sorted(range(len(self.tokens_E)), key=lambda expert: (-self.tokens_E[expert], expert))[:count]

    @property
    def starved(self) -> list[int]:
        """Experts without tokens."""
        return [expert for expert, tokens in enumerate(self.tokens_E) if not tokens]


@dataclass(frozen=True)
class PathPlace:
    """A place on the critical path, such as ``node 2's NIC in``, and how much of the path is there."""

    where: str
    ms: float
    share: float


@dataclass(frozen=True)
class StepExplanation:
    """One micro-batch through all layers, forward and backward.

    routing: where the load comes from. micro_batch: of 0..num_micro_batches-1, warm-up included.
    critical_ms, mean_ms: milliseconds of the rank that computes longest, and the mean over ranks: of computing by kind
        (``COMPUTED_KINDS``) and of waiting by what for (``dispatch``, ``combine``, ``restore``,
        ``reshard``, ``slower ranks``). They add up to ``step_ms``.
    exposed_ms: all waiting, a mean over ranks.
    critical_path: what sets the step's length, most milliseconds first; they add up to ``step_ms``.
    mega: of a ``MegaKernel``, else None.
    """

    experiment: str
    strategy: Strategy
    cluster: ClusterSpec
    routing: str
    seed: int
    micro_batch: int
    num_micro_batches: int
    step_ms: float
    exposed_ms: float
    critical_rank: int
    critical_ms: dict[str, float]
    mean_ms: dict[str, float]
    critical_path: list[PathPlace]
    layers: tuple[LayerExplanation, ...]
    mega: MegaMemory | None = None

    def to_json(self) -> str:
        declared = {name: getattr(self, name).model_dump(mode="json") for name in ("strategy", "cluster")}
        return json.dumps({"source": "simulated", **asdict(self), **declared}, indent=2)

    def __str__(self) -> str:
        from moesys.lab.explanation.explain_tree import explanation_tree

        text = StringIO()
        print_full(explanation_tree(self), file=text)
        return text.getvalue().rstrip()


def explain(strategy: Strategy, experiment: Experiment, *, micro_batch: int | None = None) -> StepExplanation:
    """The plan of ``strategy`` for one micro-batch of the experiment's first seed; for the last one by default.

    Layouts follow from the micro-batches before. What training wants is known only once it runs: its load is drawn.
    Raises ValueError for a micro-batch that the workload has not, and a strategy that does not fit the experiment.
    """
    trace, routing = _routing(experiment)
    if micro_batch is None:
        micro_batch = trace.num_micro_batches - 1
    if not 0 <= micro_batch < trace.num_micro_batches:
        raise ValueError(
            f"micro_batch={micro_batch} is not among the workload's {trace.num_micro_batches}; "
            f"use 0 to {trace.num_micro_batches - 1}"
        )
    histories = [_History(strategy, experiment, layer, trace) for layer in range(trace.num_layers)]
    for history in histories:
        history.walk(micro_batch)
    plans = tuple(
        plan_layer(
            strategy,
            experiment.model,
            experiment.cluster,
            LoadMatrix(trace.tokens_SLRE[micro_batch, layer]),
            layout=history.layout,
            turn=micro_batch,
        )
        for layer, history in enumerate(histories)
    )
    step = StepPlan(strategy, experiment.model, experiment.cluster, plans)
    simulated = simulation([step], rest_of(experiment.workload))
    timeline = simulated.timeline
    times = RankTimes(timeline, experiment.cluster.num_ranks)
    return StepExplanation(
        experiment=experiment.name,
        strategy=strategy,
        cluster=experiment.cluster,
        routing=routing,
        seed=experiment.seeds[0],
        micro_batch=micro_batch,
        num_micro_batches=trace.num_micro_batches,
        step_ms=timeline.length_us / 1000,
        exposed_ms=exposed_ms(timeline),
        critical_rank=times.critical_rank,
        critical_ms=times.critical_ms(),
        mean_ms=times.mean_ms(),
        critical_path=[
            PathPlace(where, 1000 * seconds, share) for where, seconds, share in by_place(simulated.critical_path)
        ],
        layers=tuple(_explain_layer(layer, step, history, times) for layer, history in enumerate(histories)),
        mega=mega_memory(strategy, experiment.model, plans),
    )


def _routing(experiment: Experiment) -> tuple[Trace, str]:
    """What routers want, and where that comes from, in words."""
    workload = experiment.workload
    if isinstance(workload, Replay):
        drawn: Replay | Generated = workload
        words = f"replayed from {workload.trace}"
    else:
        drawn = like(workload) if isinstance(workload, Training) else workload
        words = f"drawn, {drawn.distribution} with skew {drawn.skew:g}, drift {drawn.drift:g}, spread {drawn.spread:g}"
    if isinstance(workload, Training):
        words += "; what a training's own routers want is known only once it runs"
    return routing_of(drawn, experiment.model, experiment.cluster, experiment.seeds[0]), words


def like(workload: Training) -> Generated:
    """As many layers, micro-batches and tokens as a training has."""
    return Generated(
        num_layers=workload.num_layers,
        tokens_per_rank=workload.batch * workload.context,
        warmup=workload.warmup * workload.micro_batches,
        steps=workload.steps,
        micro_batches=workload.micro_batches,
        recompute="layers" if workload.recompute else "none",
    )


# --- layouts ----------------------------------------------------------------------------------------------------


class _KeptRequests(InlinePlanner):
    """Plans at once, and remembers the newest request."""

    newest: PlanRequest | None = None

    def submit(self, request: PlanRequest) -> PlanTicket:
        self.newest = request
        return super().submit(request)


class _History:
    """One layer's layouts, micro-batch by micro-batch, as a trial has them."""

    def __init__(self, strategy: Strategy, experiment: Experiment, layer: int, trace: Trace) -> None:
        self.strategy, self.cluster, self.tokens_SRE = strategy, experiment.cluster, trace.tokens_SLRE[:, layer]
        self.change: LayoutChange | None = None
        self.num_kept = 0
        self._planner = _KeptRequests()
        self._schedule = LayoutSchedule(layer, strategy, experiment.model, experiment.cluster, self.tokens_SRE)
        self._schedule.source = self._planner

    @property
    def layout(self) -> ExpertLayout:
        return self._schedule.layout

    def walk(self, micro_batch: int) -> None:
        """Up to the layout of ``micro_batch``."""
        requests: dict[int, PlanRequest] = {}
        replaced, moved_after = self.layout, None
        for now in range(micro_batch + 1):
            before = self.layout
            self._schedule.commit(agreed=True)
            if (made_after := now - self.strategy.lag) in requests:
                if np.array_equal(before.replicas_RE, self.layout.replicas_RE):
                    self.num_kept += 1
                else:
                    replaced, moved_after, self.num_kept = before, made_after, 0
            if now < micro_batch:
                self._planner.newest = None
                self._schedule.observe(LoadMatrix(self.tokens_SRE[now]))
                if self._planner.newest is not None:
                    requests[now] = self._planner.newest
        if moved_after is not None:
            self.change = self._changed(requests[moved_after].load, replaced, moved_after)

    def _changed(self, planned_for: LoadMatrix, replaced: ExpertLayout, made_after: int) -> LayoutChange:
        before, after = (
            split_tokens(planned_for, layout, self.cluster, self.strategy.split).max_over_mean
            for layout in (replaced, self.layout)
        )
        since, num_loads = made_after + self.strategy.lag, window(self.strategy.predictor)
        first = 0 if num_loads is None else max(0, made_after + 1 - num_loads)
        return LayoutChange(
            since=since,
            history=(since, since) if isinstance(self.strategy.predictor, Oracle) else (first, made_after),
            max_over_mean_before=before,
            max_over_mean_after=after,
            experts=list(_moved(replaced, self.layout, planned_for.tokens_E)),
        )


def _moved(before: ExpertLayout, after: ExpertLayout, tokens_E: IntArray) -> Iterator[ExpertChange]:
    """Experts that are held by other ranks than before, or another number of times; most tokens first."""
    more_RE = after.replicas_RE - before.replicas_RE
    changed = np.flatnonzero(more_RE.any(axis=0))
    for expert in changed[np.argsort(-tokens_E[changed], kind="stable")].tolist():
        yield ExpertChange(
            expert=expert,
            replicas_before=int(before.replicas_RE[:, expert].sum()),
            replicas_after=int(after.replicas_RE[:, expert].sum()),
            gained_ranks=np.flatnonzero(more_RE[:, expert] > 0).tolist(),
            lost_ranks=np.flatnonzero(more_RE[:, expert] < 0).tolist(),
            load_over_mean=float(tokens_E[expert] / tokens_E.mean()) if tokens_E.any() else 1.0,
        )


# --- a layer ----------------------------------------------------------------------------------------------------


def _explain_layer(layer: int, step: StepPlan, history: _History, times: RankTimes) -> LayerExplanation:
    plan, cluster = step.layers[layer], step.cluster
    load, layout, tokens = plan.load, plan.layout, plan.tokens
    source, expert, destination, count = tokens.entries.T
    on_rank = int(count[source == destination].sum())
    between_nodes = tokens.inter_node_tokens(cluster.node_of_rank)
    busiest = int(tokens.tokens_R.argmax())
    busiest_E = np.zeros(load.num_experts, dtype=np.int64)
    np.add.at(busiest_E, expert[destination == busiest], count[destination == busiest])
    least = min_max_load(load, layout) * load.num_ranks / load.total if load.total else 1.0
    return LayerExplanation(
        layer=layer,
        tokens_E=load.tokens_E.tolist(),
        experts_R=[list(layout.experts_of(rank)) for rank in range(layout.num_ranks)],
        change=history.change,
        num_kept=history.num_kept,
        tokens_R=tokens.tokens_R.tolist(),
        max_over_mean=tokens.max_over_mean,
        even_max_over_mean=split_tokens(load, layout, cluster, EvenSplit(), plan.turn).max_over_mean,
        least_max_over_mean=least,
        on_rank=on_rank,
        within_node=load.total - on_rank - between_nodes,
        between_nodes=between_nodes,
        busiest_rank=busiest,
        busiest_tokens={
            expert: int(busiest_E[expert]) for expert in np.argsort(-busiest_E, kind="stable").tolist()[:8]
        },
        traffic=_traffic(plan, step),
        critical_ms=times.critical_ms(layer),
        mean_ms=times.mean_ms(layer),
    )


def _traffic(plan: LayerPlan, step: StepPlan) -> list[Traffic]:
    model, cluster, sharding = step.model, step.cluster, step.strategy.sharding
    node = np.asarray(cluster.node_of_rank)
    same_node_RR = node[:, None] == node[None, :]
    rows_RR = dispatch_bytes(plan.tokens, model)

    def traffic(kind: str, times: int, *all_bytes: FloatArray) -> Traffic:
        return Traffic(
            kind=kind,
            intra_node_bytes=int(sum(bytes_RR[same_node_RR].sum() for bytes_RR in all_bytes)),
            inter_node_bytes=int(sum(bytes_RR[~same_node_RR].sum() for bytes_RR in all_bytes)),
            times=times,
            alone_ms=1000 * sum(transfer_seconds(bytes_RR, cluster) for bytes_RR in all_bytes),
        )

    return [
        traffic("dispatch", 2, rows_RR),
        traffic("combine", 2, rows_RR.T),
        traffic("restore", restores_per_step(sharding), *restore_bytes(plan.layout, model, cluster, sharding)),
        traffic("reshard", 1, *reshard_bytes(plan.layout, model, cluster, sharding)),
    ]
