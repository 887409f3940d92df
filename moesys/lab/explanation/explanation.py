"""Explains one step's plan: what is wanted, what moved, who goes where, who waits for what.

Every figure is read off the objects that a trial in the cost model uses: the layouts and token plans of ``replay``, the
bytes of ``cost``, the timeline of ``simulation``. So all times are a cost model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.plan import LayerPlan, StepPlan, why_not
from moesys.balance.planners import split_tokens
from moesys.balance.predictors import window
from moesys.balance.replay import Replan, Replayed, replay_layer
from moesys.balance.seconds_certificate import certify_seconds
from moesys.config import Oracle, Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import Generated, Measured, Replay
from moesys.cost import FloatArray, reshard_bytes, restore_bytes, restores_per_step, transfer_seconds
from moesys.lab.explanation.layer_explanation import ExpertChange, LayerExplanation, LayoutChange, Traffic
from moesys.lab.explanation.mega_memory import mega_memory
from moesys.lab.explanation.rank_times import RankTimes
from moesys.lab.explanation.step_explanation import PathPlace, StepExplanation
from moesys.lab.runs.trials import drawn_like, rest_of, routing_of
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray
from moesys.row_traffic import row_traffic
from moesys.simulator.critical_path import by_place
from moesys.simulator.simulation import exposed_ms
from moesys.simulator.step_program import simulation
from moesys.traces import Trace


def explain(
    strategy: Strategy, experiment: Experiment, *, micro_batch: int | None = None, model_layers: int | None = None
) -> StepExplanation:
    """The plan of ``strategy`` for one micro-batch of the experiment's first seed; for the last one by default.

    ``model_layers``: of the whole model, whose memory counts; None: those of the workload. Layouts follow from the
    micro-batches before. What training wants is known only once it runs: its load is drawn.
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
    model, cluster = experiment.model, experiment.cluster
    walks = [
        list(islice(replay_layer(strategy, model, cluster, tokens_SRE, layer=layer), micro_batch + 1))
        for layer, tokens_SRE in enumerate(trace.tokens_SLRE.swapaxes(0, 1))
    ]
    plans = tuple(walk[-1].plan for walk in walks)
    step = StepPlan(strategy, model, cluster, plans)
    rest = rest_of(experiment.workload)
    simulated = simulation([step], rest)
    timeline = simulated.timeline
    times = RankTimes(timeline, cluster.num_ranks)
    return StepExplanation(
        experiment=experiment.name,
        strategy=strategy,
        cluster=cluster,
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
        layers=tuple(_explain_layer(layer, step, walk, times) for layer, walk in enumerate(walks)),
        mega=mega_memory(strategy, model, plans),
        would_not_run=why_not([step], num_layers=model_layers, recompute=rest.recompute != "none"),
    )


def _routing(experiment: Experiment) -> tuple[Trace, str]:
    """What routers want, and where that comes from, in words."""
    workload = experiment.workload
    if isinstance(workload, Replay):
        drawn: Replay | Generated = workload
        words = f"replayed from {workload.trace}"
    else:
        drawn = drawn_like(workload) if isinstance(workload, Measured) else workload
        words = f"drawn, {drawn.distribution} with skew {drawn.skew:g}, drift {drawn.drift:g}, spread {drawn.spread:g}"
    if isinstance(workload, Measured):
        words += "; what a training's own routers want is known only once it runs"
    return routing_of(drawn, experiment.model, experiment.cluster, experiment.seeds[0]), words


# --- layouts ----------------------------------------------------------------------------------------------------


def _newest_change(walk: Sequence[Replayed]) -> tuple[LayoutChange | None, int]:
    """The newest plan that moved anything, and how many came into force after it that moved nothing."""
    num_kept = 0
    for one in reversed(walk):
        if one.replan is None:
            continue
        if not np.array_equal(one.replan.replaced.replicas_RE, one.layout.replicas_RE):
            return _changed(one, one.replan), num_kept
        num_kept += 1
    return None, num_kept


def _changed(one: Replayed, replan: Replan) -> LayoutChange:
    planned_for, predictor = replan.request.load, one.strategy.predictor
    before, after = (
        split_tokens(
            planned_for, layout, one.cluster, one.strategy.split, model=one.model, overlap=one.strategy.overlap
        ).max_over_mean
        for layout in (replan.replaced, one.layout)
    )
    num_loads = window(predictor)
    first = 0 if num_loads is None else max(0, replan.made_after + 1 - num_loads)
    return LayoutChange(
        since=one.micro_batch,
        history=(one.micro_batch,) * 2 if isinstance(predictor, Oracle) else (first, replan.made_after),
        max_over_mean_before=before,
        max_over_mean_after=after,
        experts=list(_moved(replan.replaced, one.layout, planned_for.tokens_E)),
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


def _explain_layer(layer: int, step: StepPlan, walk: Sequence[Replayed], times: RankTimes) -> LayerExplanation:
    plan, cluster = step.layers[layer], step.cluster
    load, layout, tokens = plan.load, plan.layout, plan.tokens
    change, num_kept = _newest_change(walk)
    source, expert, destination, count = tokens.entries.T
    on_rank = int(count[source == destination].sum())
    between_nodes = tokens.inter_node_tokens(cluster.domain_of_rank)
    busiest = int(tokens.tokens_R.argmax())
    busiest_E = np.zeros(load.num_experts, dtype=np.int64)
    np.add.at(busiest_E, expert[destination == busiest], count[destination == busiest])
    least = min_max_load(load, layout) * load.num_ranks / load.total if load.total else 1.0
    return LayerExplanation(
        layer=layer,
        tokens_E=load.tokens_E.tolist(),
        experts_R=[list(layout.experts_of(rank)) for rank in range(layout.num_ranks)],
        late_experts_R=_late_experts(layout, step.strategy.late_slots),
        change=change,
        num_kept=num_kept,
        tokens_R=tokens.tokens_R.tolist(),
        max_over_mean=tokens.max_over_mean,
        even_max_over_mean=split_tokens(load, layout, cluster, EvenSplit(), plan.turn).max_over_mean,
        least_max_over_mean=least,
        seconds=certify_seconds(tokens, cluster, step.model, step.strategy),
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


def _late_experts(layout: ExpertLayout, late_slots: int) -> list[list[int]]:
    late_RL = layout.expert_RS[:, layout.num_slots - late_slots :]
    return [row[row != EMPTY].tolist() for row in late_RL]


# Stages that bring rows to their experts, and home.
_WAYS = (("dispatch", "spread"), ("combine", "send_sums"))


def _traffic(plan: LayerPlan, step: StepPlan) -> list[Traffic]:
    model, cluster, sharding = step.model, step.cluster, step.strategy.sharding
    domain_R = np.asarray(cluster.domain_of_rank)
    same_domain_RR = domain_R[:, None] == domain_R[None, :]
    rows = row_traffic(plan.tokens, model, cluster, step.strategy.overlap)
    there, home = ([rows.bytes_RR(kind, model) for kind in rows.rows_RR if kind in of] for of in _WAYS)

    def traffic(kind: str, times: int, *all_bytes: FloatArray) -> Traffic:
        return Traffic(
            kind=kind,
            intra_node_bytes=int(sum(bytes_RR[same_domain_RR].sum() for bytes_RR in all_bytes)),
            inter_node_bytes=int(sum(bytes_RR[~same_domain_RR].sum() for bytes_RR in all_bytes)),
            times=times,
            alone_ms=1000 * sum(transfer_seconds(bytes_RR, cluster) for bytes_RR in all_bytes),
        )

    late, settled = [], plan.layout.without_last(step.strategy.late_slots)
    if step.strategy.late_slots:
        late_bytes = restore_bytes(plan.layout, model, cluster, sharding, here=settled)
        late = [traffic("late restore", restores_per_step(sharding), *late_bytes)]
    return [
        traffic("dispatch", 2, *there),
        traffic("combine", 2, *home),
        traffic("restore", restores_per_step(sharding), *restore_bytes(settled, model, cluster, sharding)),
        *late,
        traffic("reshard", 1, *reshard_bytes(plan.layout, model, cluster, sharding)),
    ]
