"""Draws layers in an explanation's tree: all of them in one table, and one in detail."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moesys.config import Strategy
from moesys.lab.explanation.layer_explanation import ExpertChange, LayerExplanation, Traffic
from moesys.lab.explanation.tree_words import MOST_SHOWN, add_head, add_line, counted, listed, ms_table, new_table
from moesys.lab.show.tables import figure
from moesys.simulator.simulation import COMPUTED_KINDS

MIB = 2**20


def layers_table(layers: Iterable[LayerExplanation]) -> Table:
    table = new_table(
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


def layer_branch(tree: Tree, layer: LayerExplanation, strategy: Strategy, critical_rank: int) -> None:
    branch = add_head(tree, f"layer {layer.layer}")
    _load_branch(branch, layer)
    _layout_branch(branch, layer, strategy)
    _split_branch(branch, layer)
    add_head(branch, "bytes of one all-to-all").add(_traffic_table(layer.traffic))
    times = add_head(branch, "the layer's share of the step")
    times.add(ms_table(critical_rank, layer.critical_ms, layer.mean_ms))


def _load_branch(branch: Tree, layer: LayerExplanation) -> None:
    load = add_head(
        branch, f"load: {layer.num_tokens} tokens routed, experts max/mean {layer.expert_max_over_mean:.2f}"
    )
    mean = layer.num_tokens / len(layer.tokens_E)
    hottest = [
        f"expert {expert} {layer.tokens_E[expert]} ({layer.tokens_E[expert] / mean:.2f} × the mean)"
        for expert in layer.hottest(3)
        if layer.tokens_E[expert]
    ]
    add_line(load, "hottest", ", ".join(hottest) or "none, for there are no tokens")
    add_line(load, "without tokens", listed("expert", layer.starved))


def _layout_branch(branch: Tree, layer: LayerExplanation, strategy: Strategy) -> None:
    if strategy.lag == 0:
        add_line(branch, "layout", f"planned by {strategy.balance.kind} on this micro-batch's own counts")
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
        f"layout: planned by {strategy.balance.kind} on {history} ({strategy.predictor.kind}), "
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
        add_line(split, name, f"{tokens} tokens ({100 * tokens / max(1, layer.num_tokens):.1f} %)")
    add_line(split, "seconds", str(layer.seconds))
    rank = layer.busiest_rank
    experts = ", ".join(f"expert {expert} {tokens}" for expert, tokens in layer.busiest_tokens.items() if tokens)
    add_line(split, "busiest", f"rank {rank} with {layer.tokens_R[rank]} tokens: {experts or 'none'}")


def _traffic_table(traffic: Iterable[Traffic]) -> Table:
    table = new_table("all-to-all", "intra node MiB", "inter node MiB", "times a step", "ms, links to itself")
    for one in traffic:
        mib = (figure(count / MIB) for count in (one.intra_node_bytes, one.inter_node_bytes))
        table.add_row(one.kind, *mib, str(one.times), figure(one.alone_ms))
    return table
