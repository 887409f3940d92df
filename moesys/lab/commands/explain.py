"""``moesys explain``: the plan of one step, its load, what moved, who sends tokens to whom, and who waits for what.

All figures come from the objects that a simulated trial uses: the layouts and token plans of ``replay``, the bytes of
``cost``, and the computing and waiting of ``simulation``. So all times are simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np

from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.plan import LayerPlan, StepPlan
from moesys.balance.predictors import window
from moesys.balance.replay import Replan, ReplayBatch, replay_layer
from moesys.balance.run_planner import split_tokens
from moesys.config import Oracle, Strategy
from moesys.config.base import check_type
from moesys.config.experiment import Experiment
from moesys.config.workload import RealTraining, Replay
from moesys.cost import FloatArray, reshard_bytes, restore_bytes, restores_per_step, transfer_seconds
from moesys.lab.commands.options import AsJson, ExperimentFile, Imports, ModelLayers, Settings, Wide, option, refusing
from moesys.lab.runs.declarations import declared_in, import_modules_of_user, load_experiment, strategy_in
from moesys.lab.runs.trials import SimulatedStep, rest_of, routing_of, simulated_cluster, simulated_workload
from moesys.lab.show.sheets import print_full
from moesys.lab.show.step_explanation import (
    ExpertChange,
    LayerExplanation,
    LayoutChange,
    PathPlace,
    StepExplanation,
    Traffic,
    explanation_tree,
)
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray
from moesys.row_traffic import row_traffic
from moesys.simulator.simulation import Simulation, by_place, critical_rank, exposed_ms
from moesys.traces import Trace


@refusing()
def explain_command(
    file: ExperimentFile,
    strategy: Annotated[str | None, option("NAME", "A strategy by name, or a file of one (default: the last).")] = None,
    layer: Annotated[int | None, option("N", "Layer to show in detail (default: the least balanced one).")] = None,
    micro_batch: Annotated[int | None, option("N", "Micro-batch to explain, from 0 (default: the last one).")] = None,
    as_json: AsJson = False,
    wide: Wide = False,
    model_layers: ModelLayers = None,
    settings: Settings = None,
    imports: Imports = None,
) -> None:
    """Explains a strategy of the experiment in ``file``, by default the last one, or one in a file of its own."""
    import_modules_of_user(imports or ())
    experiment = load_experiment(file, settings or ())
    chosen = _chosen(strategy, experiment)
    explanation = explain(chosen, experiment, micro_batch=micro_batch, model_layers=model_layers)
    tree = explanation_tree(explanation, layer)
    if as_json:
        print(explanation.to_json())
    else:
        print_full(tree, wide=wide)


def _chosen(name: str | None, experiment: Experiment) -> Strategy:
    if name is None:
        return experiment.strategies[-1]
    if Path(name).suffix in (".json", ".toml") and all(strategy.name != name for strategy in experiment.strategies):
        return declared_in(Path(name), Strategy)
    return strategy_in(experiment, name, ", or a .toml or .json file")


def explain(
    strategy: Strategy, experiment: Experiment, *, micro_batch: int | None = None, model_layers: int | None = None
) -> StepExplanation:
    """Explains the plan of ``strategy`` for one micro-batch of the experiment's first seed, by default the last one.

    ``model_layers``: the number of layers of the whole model, which counts for memory; by default that of the workload.
    Layouts follow from the micro-batches before. The load of a training is known only once it runs, so it is drawn.
    Raises ValueError for a micro-batch that the workload does not have, and for a strategy that does not fit the
    experiment.
    """
    check_type(Strategy, strategy=strategy)
    check_type(Experiment, experiment=experiment)
    trace, routing = _routing(experiment)
    if micro_batch is None:
        micro_batch = trace.num_micro_batches - 1
    if not 0 <= micro_batch < trace.num_micro_batches:
        raise ValueError(
            f"micro_batch={micro_batch} is not among the workload's {trace.num_micro_batches}; "
            f"use 0 to {trace.num_micro_batches - 1}"
        )
    model, cluster = experiment.model, simulated_cluster(experiment)
    walks = [
        list(islice(replay_layer(strategy, model, cluster, tokens_SRE, layer=layer), micro_batch + 1))
        for layer, tokens_SRE in enumerate(trace.tokens_SLRE.swapaxes(0, 1))
    ]
    plans = tuple(walk[-1].plan for walk in walks)
    plan = StepPlan(strategy, model, cluster, plans)
    step = SimulatedStep((plan,), rest_of(experiment.workload))
    simulated = step.simulation
    timeline = simulated.timeline
    critical_ms, mean_ms = _spent_ms(simulated, simulated.spent_R)
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
        critical_rank=critical_rank(timeline),
        critical_ms=critical_ms,
        mean_ms=mean_ms,
        critical_path=[
            PathPlace(where, 1000 * seconds, share) for where, seconds, share in by_place(simulated.critical_path)
        ],
        layers=tuple(_explain_layer(layer, plan, walk, simulated) for layer, walk in enumerate(walks)),
        would_not_run=step.why_not(model_layers),
    )


def _spent_ms(simulated: Simulation, layers: Iterable[int | None]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the milliseconds of these layers by kind, of the rank that computes longest and the mean over ranks."""
    spent_R: dict[str, FloatArray] = defaultdict(lambda: np.zeros(simulated.cluster.num_ranks))
    for layer in layers:
        for kind, seconds_R in simulated.spent_R.get(layer, {}).items():
            spent_R[kind] += seconds_R
    rank = critical_rank(simulated.timeline)
    critical_ms = {kind: 1e3 * float(seconds_R[rank]) for kind, seconds_R in spent_R.items() if seconds_R[rank] > 0}
    return critical_ms, {kind: 1e3 * float(of_R.mean()) for kind, of_R in spent_R.items() if of_R.any()}


def _routing(experiment: Experiment) -> tuple[Trace, str]:
    """Returns what the routers want, and a description of where that comes from."""
    workload = experiment.workload
    drawn = simulated_workload(workload)
    if isinstance(drawn, Replay):
        words = f"replayed from {drawn.trace}"
    else:
        words = f"drawn, {drawn.distribution} with skew {drawn.skew:g}, drift {drawn.drift:g}, spread {drawn.spread:g}"
    if isinstance(workload, RealTraining):
        words += "; what a training's own routers want is known only once it runs"
    return routing_of(drawn, experiment.model, experiment.cluster, experiment.seeds[0]), words


# --- layouts ----------------------------------------------------------------------------------------------------


def _newest_change(walk: Sequence[ReplayBatch]) -> tuple[LayoutChange | None, int]:
    """Returns the newest plan that moved anything, and the number of later plans that moved nothing."""
    num_kept = 0
    for one in reversed(walk):
        if one.replan is None:
            continue
        if not np.array_equal(one.replan.replaced.replicas_RE, one.layout.replicas_RE):
            return _changed(one, one.replan), num_kept
        num_kept += 1
    return None, num_kept


def _changed(one: ReplayBatch, replan: Replan) -> LayoutChange:
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
    """Yields the experts that other ranks hold than before, or another number of times; most tokens first."""
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


def _explain_layer(layer: int, step: StepPlan, walk: Sequence[ReplayBatch], simulated: Simulation) -> LayerExplanation:
    plan, cluster = step.layers[layer], step.cluster
    load, layout, tokens = plan.load, plan.layout, plan.tokens
    change, num_kept = _newest_change(walk)
    late_RL = layout.expert_RS[:, layout.num_slots - step.strategy.late_slots :]
    source, _, destination, count = tokens.entries.T
    on_rank = int(count[source == destination].sum())
    between_nodes = tokens.inter_node_tokens(cluster.domain_of_rank)
    busiest = int(tokens.tokens_R.argmax())
    busiest_E = tokens.computed_RE[busiest]
    critical_ms, mean_ms = _spent_ms(simulated, [layer])
    least = min_max_load(load, layout) * load.num_ranks / load.total if load.total else 1.0
    return LayerExplanation(
        layer=layer,
        tokens_E=load.tokens_E.tolist(),
        experts_R=[list(layout.experts_of(rank)) for rank in range(layout.num_ranks)],
        late_experts_R=[row[row != EMPTY].tolist() for row in late_RL],
        change=change,
        num_kept=num_kept,
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
        critical_ms=critical_ms,
        mean_ms=mean_ms,
    )


# The stages that bring rows to their experts, and those that bring the results back.
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
