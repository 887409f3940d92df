"""``moesys explain``: the plan of one step, its load, what moved, who sends tokens to whom, and who waits for what.

All figures come from the objects that a simulated trial uses: the layouts and token plans of ``replay``, the bytes of
``cost``, and the computing and waiting of ``simulation``. So all times are simulated.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.text import Text
from rich.tree import Tree

from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.plan import LayerPlan, StepPlan
from moesys.balance.predictors import window
from moesys.balance.replay import Replan, ReplayBatch, replay_layer, routing_of
from moesys.balance.run_planner import split_tokens
from moesys.config import ClusterSpec, Oracle, Strategy
from moesys.config.base import check_type, python_value
from moesys.config.experiment import Experiment
from moesys.config.workload import RealTraining, Replay
from moesys.cost import FloatArray, reshard_bytes, restore_bytes, restores_per_step, transfer_seconds
from moesys.display import Columns, Display, counted, listed
from moesys.lab.commands.options import AsJson, ExperimentFile, Imports, ModelLayers, Settings, Wide, option, refusing
from moesys.lab.runs.declarations import declared_in, import_modules_of_user, load_experiment, strategy_in
from moesys.lab.runs.trials import simulated_cluster, simulated_workload
from moesys.lab.show.sheets import Column, Sheet, WholeTable, add_head, add_line, figure, print_full
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray
from moesys.row_traffic import row_traffic
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.simulation import COMPUTED_KINDS, Simulation, by_place, critical_rank, exposed_ms
from moesys.simulator.step_program import SimulatedStep
from moesys.traces import Trace
from moesys.tuner.tuned_workload import value_words


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
    step = SimulatedStep((plan,), RestOfStep.of(experiment.workload))
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
        busiest_rank=int(tokens.tokens_R.argmax()),
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


# --- what is known of a step, and how it is shown --------------------------------------------------------------------

MOST_PLACES = 5
MOST_SHOWN = 12
MIB = 2**20


@dataclass(frozen=True)
class ExpertChange:
    """An expert whose replicas moved. ``load_over_mean``: its tokens divided by the mean, in the load planned for."""

    expert: int
    replicas_before: int
    replicas_after: int
    gained_ranks: list[int]
    lost_ranks: list[int]
    load_over_mean: float


@dataclass(frozen=True)
class LayoutChange:
    """The newest plan that moved anything, against the layout that it replaced.

    since: the first micro-batch that used it. history: the first and the last micro-batch that it was planned on; with
    ``Oracle``, the one to come.
    max_over_mean_before, max_over_mean_after: tokens of the busiest rank divided by the mean, on the load that it was
    planned for.
    """

    since: int
    history: tuple[int, int]
    max_over_mean_before: float
    max_over_mean_after: float
    experts: list[ExpertChange]


@dataclass(frozen=True)
class Traffic:
    """All-to-alls of one kind: the bytes of one over all ranks, by kind of link; their number per step; and the
    milliseconds of one that shares its links with no other.
    """

    kind: Annotated[str, Column("all-to-all")]
    intra_node_bytes: Annotated[int, Column("intra node MiB", figure, 1 / MIB)]
    inter_node_bytes: Annotated[int, Column("inter node MiB", figure, 1 / MIB)]
    times: Annotated[int, Column("times a step")]
    alone_ms: Annotated[float, Column("ms, links to itself", figure)]


@dataclass(frozen=True)
class LayerExplanation:
    """One layer: its load, what moved in its layout, its token split, its bytes and its times.

    tokens_E: tokens of each expert. experts_R: the experts in each rank's slots; late_experts_R: those in late slots.
    change: None if the layout is still the first one. num_kept: the number of plans after it that moved nothing.
    tokens_R: tokens that each rank computes. busiest_rank: the rank with most.
    max_over_mean: over ranks; under ``EvenSplit``; and the least that any split over this layout reaches.
    on_rank, within_node, between_nodes: tokens whose expert is on their own rank, on another of its node, elsewhere.
    mean_ms, critical_ms: the layer's part of those of ``StepExplanation``.
    """

    layer: Annotated[int, Column("layer", align="left")]
    tokens_E: list[int]
    experts_R: list[list[int]]
    late_experts_R: list[list[int]]
    change: LayoutChange | None
    num_kept: int
    tokens_R: list[int]
    max_over_mean: Annotated[float, Column("ranks, this split", ".3f")]
    even_max_over_mean: Annotated[float, Column("ranks, even split", ".3f")]
    least_max_over_mean: Annotated[float, Column("ranks, least", ".3f")]
    on_rank: int
    within_node: int
    between_nodes: int
    busiest_rank: Annotated[int, Column("busiest rank")]
    traffic: list[Traffic]
    critical_ms: dict[str, float]
    mean_ms: dict[str, float]

    @property
    def expert_max_over_mean(self) -> Annotated[float, Column("experts max/mean", ".2f", after="layer")]:
        return max(self.tokens_E) / np.mean(self.tokens_E).item() if any(self.tokens_E) else 1.0

    @property
    def num_moved(self) -> Annotated[str | None, Column("replicas moved", after="expert_max_over_mean", align="right")]:
        if self.change is None:
            return None
        return f"{sum(len(moved.gained_ranks) for moved in self.change.experts):,} at {self.change.since}"

    @property
    def leaving_rank(self) -> Annotated[float, Column("leave rank %", ".1f", 100, after="least_max_over_mean")]:
        """The share of tokens whose expert is on another rank."""
        return (self.within_node + self.between_nodes) / max(1, self.num_tokens)

    @property
    def leaving_node(self) -> Annotated[float, Column("leave node %", ".1f", 100, after="leaving_rank")]:
        """The share of tokens whose expert is on another node."""
        return self.between_nodes / max(1, self.num_tokens)

    @property
    def waiting_ms(self) -> Annotated[float, Column("wait ms (mean)", figure)]:
        return sum(value for kind, value in self.mean_ms.items() if kind not in COMPUTED_KINDS)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_E)


@dataclass(frozen=True)
class PathPlace:
    """A place on the critical path, such as ``node 2's NIC in``, and its share of the path."""

    where: str
    ms: float
    share: float


@dataclass(frozen=True, repr=False)
class StepExplanation(Display):
    """One micro-batch through all layers, forward and backward.

    routing: the source of the load. micro_batch: one of 0..num_micro_batches-1, warm-up included.
    critical_ms, mean_ms: milliseconds of the rank that computes longest, and the mean over ranks: of computing by kind
        (``COMPUTED_KINDS``), and of waiting by what was waited for, as in ``Simulation.waited_R``. They add up to
        ``step_ms``.
    exposed_ms: all waiting, the mean over ranks.
    critical_path: the places that determine the step's length, most milliseconds first; they add up to ``step_ms``.
    would_not_run: the reasons why it would not run on such a cluster, if there are any.
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
    would_not_run: tuple[str, ...] = ()

    def _facts(self) -> str:
        return (
            f"{self.strategy.name!r} of {self.experiment!r}, micro-batch {self.micro_batch}, "
            f"{counted(len(self.layers), 'layer')} on {counted(self.cluster.num_ranks, 'rank')}, "
            f"{self.step_ms:,.3f} ms, {self.exposed_ms:,.3f} ms exposed"
        )

    def _columns(self) -> Columns:
        shown = ("layer", "num_tokens", "max_over_mean", "least_max_over_mean", "busiest_rank")
        columns = {name: [getattr(layer, name) for layer in self.layers] for name in shown}
        return columns | {"mean_ms": [sum(layer.mean_ms.values()) for layer in self.layers]}

    def to_json(self) -> str:
        declared = {name: getattr(self, name).model_dump(mode="json") for name in ("strategy", "cluster")}
        return json.dumps({"source": "simulated", **asdict(self), **declared}, indent=2, default=python_value)

    def __str__(self) -> str:
        text = StringIO()
        print_full(explanation_tree(self), file=text)
        return text.getvalue().rstrip()


def explanation_tree(explanation: StepExplanation, layer: int | None = None) -> Tree:
    """Draws all layers in one table and one of them in detail, by default the one with the least balanced ranks.

    Raises ValueError for a layer that does not exist.
    """
    layers = explanation.layers
    if layer is None:
        layer = max(range(len(layers)), key=lambda index: layers[index].max_over_mean)
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer={layer} is not among the step's {len(layers)}; use 0 to {len(layers) - 1}")
    title = (
        f"SIMULATED: {explanation.strategy.name} of {explanation.experiment}, micro-batch {explanation.micro_batch} "
        f"of 0 to {explanation.num_micro_batches - 1}, seed {explanation.seed}"
    )
    tree = Tree(Text(title, style="bold"), guide_style="dim")
    add_line(tree, "load", explanation.routing)
    add_line(tree, "cluster", _cluster_words(explanation.cluster))
    for reason in explanation.would_not_run:
        add_line(tree, "would not run", reason)
    add_line(tree, "strategy", repr(explanation.strategy))
    _time_branch(tree, explanation)
    add_head(tree, counted(len(layers), "layer")).add(_table(layers))
    _layer_branch(tree, layers[layer], explanation.strategy, explanation.critical_rank)
    return tree


def _cluster_words(cluster: ClusterSpec) -> str:
    name = f" ({cluster.hardware})" if cluster.hardware else ""
    return (
        f"{counted(cluster.num_ranks, 'rank')} of {counted(cluster.num_nodes, 'node')}{name}, with "
        f"{cluster.intra_node_gb_per_s:g} GB/s inside and "
        f"{cluster.inter_node_gb_per_s:g} GB/s between nodes, {cluster.expert_tflops:g} TFLOP/s a rank"
    )


def _time_branch(tree: Tree, explanation: StepExplanation) -> None:
    branch = add_head(
        tree, f"step {figure(explanation.step_ms)} ms, of which {figure(explanation.exposed_ms)} ms exposed (mean)"
    )
    branch.add(_ms_table(explanation.critical_rank, explanation.critical_ms, explanation.mean_ms))
    path = add_head(tree, "critical path: what the step waited for, from its start to its end")
    for place in explanation.critical_path[:MOST_PLACES]:
        add_line(path, place.where, f"{100 * place.share:.0f} % of the step ({figure(place.ms)} ms)")
    if rest := explanation.critical_path[MOST_PLACES:]:
        share = sum(place.share for place in rest)
        add_line(path, counted(len(rest), "other place"), f"{100 * share:.0f} %")


# --- layers ---


def _layer_branch(tree: Tree, layer: LayerExplanation, strategy: Strategy, critical_rank: int) -> None:
    branch = add_head(tree, f"layer {layer.layer}")
    _load_branch(branch, layer)
    _layout_branch(branch, layer, strategy)
    add_head(branch, "bytes of one all-to-all").add(_table(layer.traffic))
    times = add_head(branch, "the layer's share of the step")
    times.add(_ms_table(critical_rank, layer.critical_ms, layer.mean_ms))


def _load_branch(branch: Tree, layer: LayerExplanation) -> None:
    mean = layer.num_tokens / len(layer.tokens_E)
    hottest = sorted(enumerate(layer.tokens_E), key=lambda of: -of[1])[:3]
    words = [f"expert {expert} {tokens:,} ({tokens / mean:.2f} × the mean)" for expert, tokens in hottest if tokens]
    add_line(branch, f"load of {layer.num_tokens:,} tokens", ", ".join(words) or "none")


def _layout_branch(branch: Tree, layer: LayerExplanation, strategy: Strategy) -> None:
    if strategy.lag == 0:
        add_line(branch, "layout", f"planned by {value_words(strategy.balance)} on this micro-batch's own counts")
        return
    if strategy.late_slots:
        late = [f"expert {e} on rank {rank}" for rank, experts in enumerate(layer.late_experts_R) for e in experts]
        add_line(branch, "late slots", ", ".join(late) or "nothing that pays")
    change = layer.change
    kept = f"; {counted(layer.num_kept, 'newer plan')} moved nothing" if layer.num_kept else ""
    if change is None:
        still = ", and for ever" if strategy.balance.kind == "static" else kept
        add_line(branch, "layout", f"the first one, made before any load was known{still}")
        return
    first, last = change.history
    history = f"micro-batch {first}" if first == last else f"micro-batches {first} to {last}"
    layout = add_head(
        branch,
        f"layout: planned by {value_words(strategy.balance)} on {history} ({strategy.predictor.kind}), "
        f"in use since {change.since}{kept}",
    )
    add_line(
        layout,
        "why",
        f"on the load it was planned for, ranks max/mean is {change.max_over_mean_after:.3f}; "
        f"the one before would give {change.max_over_mean_before:.3f}",
    )
    for moved in change.experts[:MOST_SHOWN]:
        add_line(layout, f"expert {moved.expert}", _moved_words(moved))
    if (more := len(change.experts) - MOST_SHOWN) > 0:
        layout.add(Text(f"and {counted(more, 'expert')} with fewer tokens; --json names them"))


def _moved_words(moved: ExpertChange) -> str:
    before, after = moved.replicas_before, moved.replicas_after
    replicas = f"{before} -> {after} replicas" if before != after else f"{counted(after, 'replica')} as before"
    ranks = [f"new on {listed('rank', moved.gained_ranks)}"] if moved.gained_ranks else []
    ranks += [f"gone from {listed('rank', moved.lost_ranks)}"] if moved.lost_ranks else []
    return f"{replicas}, it has {moved.load_over_mean:.2f} × the mean load; {', '.join(ranks)}"


# --- branches and tables ---


def _table(rows: Sequence[object]) -> WholeTable:
    return WholeTable(Sheet("", rows), framed=False)


@dataclass(frozen=True)
class SpentTime:
    """A row: the milliseconds of one kind of work or of waiting, by the header of their column."""

    kind: Annotated[str, Column("ms")]
    ms: Annotated[Mapping[str, float], Column("{}", figure)]


def _ms_table(critical_rank: int, critical_ms: dict[str, float], mean_ms: dict[str, float]) -> WholeTable:
    by_column = {f"rank {critical_rank}, which computes longest": critical_ms, "mean over ranks": mean_ms}
    kinds = sorted({**critical_ms, **mean_ms}, key=lambda kind: -mean_ms.get(kind, 0.0))
    words = [f"computes {kind.replace('_', ' ')}" if kind in COMPUTED_KINDS else f"waits for {kind}" for kind in kinds]
    spent = [{name: ms.get(kind, 0.0) for name, ms in by_column.items()} for kind in kinds]
    return _table(list(map(SpentTime, words, spent)))
