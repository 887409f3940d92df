"""One explained step: what is known of it, and how it is shown, as a tree for the terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Annotated

import numpy as np
from rich.text import Text
from rich.tree import Tree

from moesys.config import ClusterSpec, Strategy
from moesys.config.base import python_value
from moesys.display import Columns, Display, counted, listed
from moesys.lab.runs.declarations import member_words
from moesys.lab.show.sheets import Column, Sheet, WholeTable, add_head, add_line, figure, print_full
from moesys.simulator.simulation import COMPUTED_KINDS

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
    tokens_R: tokens that each rank computes. busiest_rank: the rank with most; busiest_tokens: by its heaviest experts.
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
    busiest_tokens: dict[int, int]
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

    def hottest(self, count: int) -> list[int]:
        """Returns the experts with most tokens, the lower of equals first."""
        return sorted(range(len(self.tokens_E)), key=lambda expert: (-self.tokens_E[expert], expert))[:count]

    @property
    def starved(self) -> list[int]:
        """Returns the experts without tokens."""
        return [expert for expert, tokens in enumerate(self.tokens_E) if not tokens]


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
    if explanation.strategy.overlap.reaches_memory:
        add_line(tree, "plans", _planning_words(explanation.strategy))
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


def _planning_words(strategy: Strategy) -> str:
    """Describes where ranks plan a micro-batch, and why."""
    if strategy.plans_on_device:
        return "on the devices, from counts that travel with the tokens' flag: no host waits"
    if not strategy.split.on_device:
        return "on the hosts, which wait for all counts: devices keep no cap and know no exact traffic"
    return "on the hosts, which wait for all counts: MegaKernel(most_tokens=...) would let devices plan"


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
    _split_branch(branch, layer)
    add_head(branch, "bytes of one all-to-all").add(_table(layer.traffic))
    times = add_head(branch, "the layer's share of the step")
    times.add(_ms_table(critical_rank, layer.critical_ms, layer.mean_ms))


def _load_branch(branch: Tree, layer: LayerExplanation) -> None:
    load = add_head(
        branch, f"load: {layer.num_tokens:,} tokens routed, experts max/mean {layer.expert_max_over_mean:.2f}"
    )
    mean = layer.num_tokens / len(layer.tokens_E)
    hottest = [
        f"expert {expert} {layer.tokens_E[expert]:,} ({layer.tokens_E[expert] / mean:.2f} × the mean)"
        for expert in layer.hottest(3)
        if layer.tokens_E[expert]
    ]
    add_line(load, "hottest", ", ".join(hottest) or "none, for there are no tokens")
    add_line(load, "without tokens", listed("expert", layer.starved))


def _layout_branch(branch: Tree, layer: LayerExplanation, strategy: Strategy) -> None:
    if strategy.lag == 0:
        add_line(branch, "layout", f"planned by {member_words(strategy.balance)} on this micro-batch's own counts")
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
        f"layout: planned by {member_words(strategy.balance)} on {history} ({strategy.predictor.kind}), "
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


def _split_branch(branch: Tree, layer: LayerExplanation) -> None:
    split = add_head(
        branch,
        f"split: ranks max/mean {layer.max_over_mean:.3f}, by an even split {layer.even_max_over_mean:.3f}, "
        f"least over this layout {layer.least_max_over_mean:.3f}",
    )
    for name, tokens in (
        ("stay on their rank", layer.on_rank),
        ("leave the rank, not the node", layer.within_node),
        ("leave the node", layer.between_nodes),
    ):
        add_line(split, name, f"{tokens:,} tokens ({100 * tokens / max(1, layer.num_tokens):.1f} %)")
    rank = layer.busiest_rank
    experts = ", ".join(f"expert {expert} {tokens:,}" for expert, tokens in layer.busiest_tokens.items() if tokens)
    add_line(split, "busiest", f"rank {rank} with {layer.tokens_R[rank]:,} tokens: {experts or 'none'}")


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
