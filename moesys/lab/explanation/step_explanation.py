"""Shows one step that was explained: as a tree for the terminal, or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from io import StringIO

from rich.text import Text
from rich.tree import Tree

from moesys.config import ClusterSpec, Fsep, MegaKernel, Pipelined, Strategy
from moesys.lab.explanation.layer_explanation import LayerExplanation
from moesys.lab.explanation.layer_tree import layer_branch, layers_table
from moesys.lab.explanation.mega_memory import MegaMemory
from moesys.lab.explanation.tree_words import add_head, add_line, counted, ms_table
from moesys.lab.show.console import print_full
from moesys.lab.show.tables import figure

MOST_PLACES = 5
BYTES_PER_GB = 1e9


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
    would_not_run: what stands against it on such a cluster; empty where nothing does.
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
    would_not_run: tuple[str, ...] = ()

    def to_json(self) -> str:
        declared = {name: getattr(self, name).model_dump(mode="json") for name in ("strategy", "cluster")}
        return json.dumps({"source": "simulated", **asdict(self), **declared}, indent=2)

    def __str__(self) -> str:
        text = StringIO()
        print_full(explanation_tree(self), file=text)
        return text.getvalue().rstrip()


def explanation_tree(explanation: StepExplanation, layer: int | None = None) -> Tree:
    """All layers in one table, then one in detail, by default the one whose ranks are loaded least evenly.

    Raises ValueError for a layer that is not there.
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
    schedule = add_head(tree, "schedule")
    for words in _schedule_words(explanation.strategy, explanation.cluster.num_nodes):
        schedule.add(Text(words))
    if explanation.mega is not None:
        memory = add_head(tree, "memory of a rank")
        for words in _memory_words(explanation.mega):
            memory.add(Text(words))
    _time_branch(tree, explanation)
    add_head(tree, counted(len(layers), "layer")).add(layers_table(layers))
    layer_branch(tree, layers[layer], explanation.strategy, explanation.critical_rank)
    return tree


def _cluster_words(cluster: ClusterSpec) -> str:
    name = f" ({cluster.name})" if cluster.name else ""
    return (
        f"{counted(cluster.num_ranks, 'rank')} of {counted(cluster.num_nodes, 'node')}{name}, declared with "
        f"{cluster.intra_node_gb_per_s:g} GB/s inside and "
        f"{cluster.inter_node_gb_per_s:g} GB/s between nodes, {cluster.expert_tflops:g} TFLOP/s a rank"
    )


def _schedule_words(strategy: Strategy, num_nodes: int) -> list[str]:
    overlap, sharding = strategy.overlap, strategy.sharding
    if isinstance(overlap, Pipelined):
        words = [f"tokens in {counted(overlap.chunks, 'chunk')}, the next arriving and the last going home behind one"]
    elif isinstance(overlap, MegaKernel):
        words = [*_mega_words(overlap), _planning_words(strategy)]
    else:
        words = ["dispatch, experts and combine one after another"]
    if overlap.crosses_once(num_nodes):
        home = "one partial sum a node comes home" if overlap.sums_by_node(num_nodes) else "every row comes home"
        words.append(f"a token crosses to a node once and spreads inside; {home}")
    if strategy.lag == 0:
        words.append("a layout for every micro-batch, planned on its own counts: no expert is brought ahead in forward")
    elif strategy.late_slots:
        late = counted(strategy.late_slots, "late slot")
        words.append(f"{late} of each rank filled on the counts, where that pays")
    if isinstance(sharding, Fsep):
        words.append(
            f"experts restored {counted(sharding.prefetch_layers, 'layer')} ahead, behind those of this one"
            if sharding.prefetch_layers
            else "experts restored when they are needed, none ahead"
        )
        words.append(f"{sharding.restore} restores" + ", again for backward" * sharding.reshard_after_forward)
        summed = "summed inside nodes and " * (sharding.reshard == "hierarchical")
        words.append(
            f"gradients {summed}resharded {'behind the next backward' if sharding.delay_reshard else 'at once'}"
        )
    elif sharding.lends:
        by_node = ", a copy a node that is passed on there; gradients return so" * (sharding.lend == "hierarchical")
        words.append(f"experts lent by their owners, when they are needed{by_node}")
    else:
        words.append("experts stay on their owners")
    return words


def _mega_words(overlap: MegaKernel) -> list[str]:
    """In the order in which a rank's programs take tasks from their queue."""
    share, order = overlap.dispatch_share, overlap.tile_order.replace("_", " ")
    if overlap.fused in ("both", "dispatch"):
        pulls = "all pulls first" if share == 1 else f"at least {share:.0%} of the first tasks pull rows"
        words = [f"dispatch and the first product in one kernel: {pulls}, the others are tiles, {order}"]
    else:
        words = [f"dispatch in a kernel of its own, then the first product's tiles, {order}"]
    if overlap.fused in ("both", "combine"):
        share = overlap.combine_share
        pushes = f"at most {share:.0%} of the tasks push rows home" if share else "tiles push their rows home"
        words.append(f"the second product and combine in one kernel: {pushes}, then sums of what came home")
    else:
        words.append("the second product's tiles, pushes and sums in kernels of their own, one after another")
    if overlap.overlap_weight_gradients:
        share = overlap.reduce_share
        sums = f"among them at most {share:.0%} sums" if share else "before the sums"
        words.append(f"backward: tiles of weight gradients between pushes and sums, {sums}")
    else:
        words.append("backward: weight gradients when all else is done")
    if not overlap.keep_x:
        words.append("backward pulls rows of x again beside those of dy")
    words.append(f"flags of each {overlap.granularity}" + ", a token pulled once a rank" * overlap.deduplicate)
    return words


def _planning_words(strategy: Strategy) -> str:
    """Where ranks plan a micro-batch, and why."""
    overlap = strategy.overlap
    if strategy.plans_on_device:
        return "planned on the devices, from counts that travel with the tokens' flag: no host waits"
    if not strategy.split.on_device:
        return "planned on the hosts, which wait for all counts: devices keep no cap and know no exact traffic"
    assert isinstance(overlap, MegaKernel)
    return "planned on the hosts, which wait for all counts: MegaKernel(most_tokens=...) would let devices plan"


def _memory_words(memory: MegaMemory) -> list[str]:
    pulled_gb = memory.pulled_bytes / BYTES_PER_GB
    return [
        f"{memory.symmetric_bytes / BYTES_PER_GB:.3f} GB that peers reach, for all layers together",
        *([f"{pulled_gb:.3f} GB where they pull experts and gradients, for all layers together"] if pulled_gb else []),
        f"{memory.num_rows} private rows on the busiest, of {memory.most_rows} that rows_cap allows"
        f"{' and there is always memory for' if memory.held_rows > memory.num_rows else ''}: "
        f"{memory.kept_bytes / BYTES_PER_GB:.3f} GB a layer from forward to backward, "
        f"{memory.backward_bytes / BYTES_PER_GB:.3f} GB more in backward",
    ]


# --- the step -----------------------------------------------------------------------------------------------------


def _time_branch(tree: Tree, explanation: StepExplanation) -> None:
    branch = add_head(
        tree, f"step {figure(explanation.step_ms)} ms, of which {figure(explanation.exposed_ms)} ms exposed (mean)"
    )
    branch.add(ms_table(explanation.critical_rank, explanation.critical_ms, explanation.mean_ms))
    path = add_head(tree, "critical path: what the step waited for, from its start to its end")
    for place in explanation.critical_path[:MOST_PLACES]:
        add_line(path, place.where, f"{100 * place.share:.0f} % of the step ({figure(place.ms)} ms)")
    if rest := explanation.critical_path[MOST_PLACES:]:
        share = sum(place.share for place in rest)
        add_line(path, counted(len(rest), "other place"), f"{100 * share:.0f} %")
