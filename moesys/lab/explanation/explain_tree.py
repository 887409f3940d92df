"""An explanation as a tree for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moesys.config import ClusterSpec, Fsep, MegaKernel, Pipelined, Strategy
from moesys.lab.explanation.explanation import ExpertChange, LayerExplanation, StepExplanation, Traffic
from moesys.lab.explanation.mega_memory import MegaMemory
from moesys.lab.show.tables import figure
from moesys.simulator.simulation import COMPUTED_KINDS
from moesys.step import plans_on_device, split_on_device

MOST_SHOWN = 12
MOST_PLACES = 5
MIB = 2**20
BYTES_PER_GB = 1e9


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
    _line(tree, "load", explanation.routing)
    _line(tree, "cluster", _cluster_words(explanation.cluster))
    schedule = _head(tree, "schedule")
    for words in _schedule_words(explanation.strategy):
        schedule.add(Text(words))
    if explanation.mega is not None:
        memory = _head(tree, "memory of a rank")
        for words in _memory_words(explanation.mega):
            memory.add(Text(words))
    _time_branch(tree, explanation)
    _head(tree, _count(len(layers), "layer")).add(_layers_table(layers))
    _layer_branch(tree, layers[layer], explanation)
    return tree


def _cluster_words(cluster: ClusterSpec) -> str:
    name = f" ({cluster.name})" if cluster.name else ""
    return (
        f"{_count(cluster.num_ranks, 'rank')} of {_count(cluster.num_nodes, 'node')}{name}, declared with "
        f"{cluster.intra_node_gb_per_s:g} GB/s inside and "
        f"{cluster.inter_node_gb_per_s:g} GB/s between nodes, {cluster.expert_tflops:g} TFLOP/s a rank"
    )


def _schedule_words(strategy: Strategy) -> list[str]:
    overlap, sharding = strategy.overlap, strategy.sharding
    if isinstance(overlap, Pipelined):
        words = [f"tokens in {_count(overlap.chunks, 'chunk')}, the next arriving and the last going home behind one"]
    elif isinstance(overlap, MegaKernel):
        words = [*_mega_words(overlap), _planning_words(strategy)]
    else:
        words = ["dispatch, experts and combine one after another"]
    if isinstance(sharding, Fsep):
        words.append(
            f"experts restored {_count(sharding.prefetch_layers, 'layer')} ahead, behind those of this one"
            if sharding.prefetch_layers
            else "experts restored when they are needed, none ahead"
        )
        words.append(f"{sharding.restore} restores" + ", again for backward" * sharding.reshard_after_forward)
        words.append(f"gradients resharded {'behind the next backward' if sharding.delay_reshard else 'at once'}")
    elif sharding.lends:
        words.append("experts lent by their owners, when they are needed")
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
    words.append(f"flags of each {overlap.granularity}" + ", a token pulled once a rank" * overlap.deduplicate)
    return words


def _planning_words(strategy: Strategy) -> str:
    """Where ranks plan a micro-batch, and why."""
    overlap = strategy.overlap
    if plans_on_device(strategy):
        return "planned on the devices, from counts that travel with the tokens' flag: no host waits"
    if not split_on_device(strategy.split):
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
    branch = _head(
        tree, f"step {figure(explanation.step_ms)} ms, of which {figure(explanation.exposed_ms)} ms exposed (mean)"
    )
    branch.add(_ms_table(explanation.critical_rank, explanation.critical_ms, explanation.mean_ms))
    path = _head(tree, "critical path: what the step waited for, from its start to its end")
    for place in explanation.critical_path[:MOST_PLACES]:
        _line(path, place.where, f"{100 * place.share:.0f} % of the step ({figure(place.ms)} ms)")
    if rest := explanation.critical_path[MOST_PLACES:]:
        share = sum(place.share for place in rest)
        _line(path, _count(len(rest), "other place"), f"{100 * share:.0f} %")


def _ms_table(critical_rank: int, critical_ms: dict[str, float], mean_ms: dict[str, float]) -> Table:
    table = _table("ms", f"rank {critical_rank}, which computes longest", "mean over ranks")
    for kind in sorted({**critical_ms, **mean_ms}, key=lambda kind: -mean_ms.get(kind, 0.0)):
        table.add_row(_kind_words(kind), *(figure(ms.get(kind, 0.0)) for ms in (critical_ms, mean_ms)))
    return table


def _kind_words(kind: str) -> str:
    return f"computes {kind.replace('_', ' ')}" if kind in COMPUTED_KINDS else f"waits for {kind}"


def _layers_table(layers: Iterable[LayerExplanation]) -> Table:
    table = _table(
        *("layer", "experts max/mean", "replicas moved", "ranks, even split", "ranks, this split", "ranks, least"),
        *("leave rank %", "leave node %", "busiest rank", "wait ms (mean)"),
    )
    for layer in layers:
        shares = (layer.within_node + layer.between_nodes, layer.between_nodes)
        table.add_row(
            str(layer.layer),
            f"{layer.expert_max_over_mean:.2f}",
            _moved_cell(layer),
            *(f"{value:.3f}" for value in (layer.even_max_over_mean, layer.max_over_mean, layer.least_max_over_mean)),
            *(f"{100 * share / max(1, layer.num_tokens):.1f}" for share in shares),
            str(layer.busiest_rank),
            figure(_waiting(layer.mean_ms)),
        )
    return table


def _moved_cell(layer: LayerExplanation) -> str:
    if layer.change is None:
        return ""
    return f"{sum(len(moved.gained_ranks) for moved in layer.change.experts)} at {layer.change.since}"


def _waiting(ms: dict[str, float]) -> float:
    return sum(value for kind, value in ms.items() if kind not in COMPUTED_KINDS)


# --- a layer ------------------------------------------------------------------------------------------------------


def _layer_branch(tree: Tree, layer: LayerExplanation, explanation: StepExplanation) -> None:
    branch = _head(tree, f"layer {layer.layer}")
    _load_branch(branch, layer)
    _layout_branch(branch, layer, explanation.strategy)
    _split_branch(branch, layer)
    _head(branch, "bytes of one all-to-all").add(_traffic_table(layer.traffic))
    times = _head(branch, "the layer's share of the step")
    times.add(_ms_table(explanation.critical_rank, layer.critical_ms, layer.mean_ms))


def _load_branch(branch: Tree, layer: LayerExplanation) -> None:
    load = _head(branch, f"load: {layer.num_tokens} tokens routed, experts max/mean {layer.expert_max_over_mean:.2f}")
    mean = layer.num_tokens / len(layer.tokens_E)
    hottest = [
        f"expert {expert} {layer.tokens_E[expert]} ({layer.tokens_E[expert] / mean:.2f} × the mean)"
        for expert in layer.hottest(3)
        if layer.tokens_E[expert]
    ]
    _line(load, "hottest", ", ".join(hottest) or "none, for there are no tokens")
    _line(load, "without tokens", _numbers("expert", layer.starved))


def _layout_branch(branch: Tree, layer: LayerExplanation, strategy: Strategy) -> None:
    change = layer.change
    kept = f"; {_count(layer.num_kept, 'newer plan')} moved nothing" if layer.num_kept else ""
    if change is None:
        still = ", and for ever" if strategy.balance.kind == "static" else kept
        _line(branch, "layout", f"the first one, made before any load was known{still}")
        return
    first, last = change.history
    history = f"micro-batch {first}" if first == last else f"micro-batches {first} to {last}"
    layout = _head(
        branch,
        f"layout: planned by {strategy.balance.kind} on {history} ({strategy.predictor.kind}), "
        f"in use since {change.since}{kept}",
    )
    _line(
        layout,
        "why",
        f"on the load it was planned for, ranks max/mean is {change.max_over_mean_after:.3f}; "
        f"the one before would give {change.max_over_mean_before:.3f}",
    )
    for moved in change.experts[:MOST_SHOWN]:
        _line(layout, f"expert {moved.expert}", _moved_words(moved))
    if (more := len(change.experts) - MOST_SHOWN) > 0:
        layout.add(Text(f"and {_count(more, 'expert')} with fewer tokens; --json names them"))


def _moved_words(moved: ExpertChange) -> str:
    before, after = moved.replicas_before, moved.replicas_after
    replicas = f"{before} -> {after} replicas" if before != after else f"{_count(after, 'replica')} as before"
    ranks = [f"new on {_numbers('rank', moved.gained_ranks)}"] if moved.gained_ranks else []
    ranks += [f"gone from {_numbers('rank', moved.lost_ranks)}"] if moved.lost_ranks else []
    return f"{replicas}, it has {moved.load_over_mean:.2f} × the mean load; {', '.join(ranks)}"


def _split_branch(branch: Tree, layer: LayerExplanation) -> None:
    split = _head(
        branch,
        f"split: ranks max/mean {layer.max_over_mean:.3f}, by an even split {layer.even_max_over_mean:.3f}, "
        f"least over this layout {layer.least_max_over_mean:.3f}",
    )
    for name, tokens in (
        ("stay on their rank", layer.on_rank),
        ("leave the rank, not the node", layer.within_node),
        ("leave the node", layer.between_nodes),
    ):
        _line(split, name, f"{tokens} tokens ({100 * tokens / max(1, layer.num_tokens):.1f} %)")
    rank = layer.busiest_rank
    experts = ", ".join(f"expert {expert} {tokens}" for expert, tokens in layer.busiest_tokens.items() if tokens)
    _line(split, "busiest", f"rank {rank} with {layer.tokens_R[rank]} tokens: {experts or 'none'}")


def _traffic_table(traffic: Iterable[Traffic]) -> Table:
    table = _table("all-to-all", "intra node MiB", "inter node MiB", "times a step", "ms, links to itself")
    for one in traffic:
        mib = (figure(count / MIB) for count in (one.intra_node_bytes, one.inter_node_bytes))
        table.add_row(one.kind, *mib, str(one.times), figure(one.alone_ms))
    return table


# --- words --------------------------------------------------------------------------------------------------------


def _head(tree: Tree, words: str) -> Tree:
    return tree.add(Text(words, style="bold"))


def _line(tree: Tree, name: str, words: str) -> None:
    tree.add(Text.assemble((f"{name}: ", "cyan"), words))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _numbers(noun: str, numbers: list[int]) -> str:
    if not numbers:
        return "none"
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    more = f" and {len(numbers) - MOST_SHOWN} more" if len(numbers) > MOST_SHOWN else ""
    return f"{noun}{'s' * (len(numbers) > 1)} {shown}{more}"
