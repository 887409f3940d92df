"""Planners side by side: on a recorded trace, and on routing like that of LAER-MoE's two settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from moesys.bench.harness.steps import steps_told
from moesys.bench.harness.stopwatch import machine_line
from moesys.bench.planner.replay import Contender, Score, moments, score_layer
from moesys.config import (
    Adaptive,
    Balance,
    ClusterSpec,
    Eplb,
    EvenSplit,
    FlexMoe,
    FlowSplit,
    Greedy,
    Laer,
    Last,
    Predictor,
    Split,
    Static,
    WindowMean,
    presets,
)
from moesys.config.laer_routing import LAER_E8K2_ROUTING, LAER_E16K4_ROUTING
from moesys.lab.show.console import print_full
from moesys.replay import Moment
from moesys.traces import Trace, generate, load_trace

PACKAGES = ("numpy", "numba", "ortools")

LAER = Contender(Laer(), EvenSplit(), WindowMean(steps=5))
DEFAULT_CONTENDERS = (
    Contender(Static(), EvenSplit(), Last()),
    Contender(Eplb(), EvenSplit(), Last()),
    Contender(Eplb(), FlowSplit(), Last()),
    LAER,
    Contender(FlexMoe(), EvenSplit(), Last()),
    Contender(Greedy(), FlowSplit(), Last()),
)
LAER_CONTENDERS = (
    LAER,
    *(Contender(Greedy(), FlowSplit(max_inter_node=share), Adaptive()) for share in (None, 0.10, 0.02)),
)


def contenders(
    balances: Sequence[Balance] = (), splits: Sequence[Split] = (), predictors: Sequence[Predictor] = ()
) -> tuple[Contender, ...]:
    """Every combination of what is given; where nothing is, ``DEFAULT_CONTENDERS``.

    What is left out: all balances of ``DEFAULT_CONTENDERS``, both even and flow split, the newest load.
    """
    if not (balances or splits or predictors):
        return DEFAULT_CONTENDERS
    chosen = product(
        balances or dict.fromkeys(contender.balance for contender in DEFAULT_CONTENDERS),
        splits or (EvenSplit(), FlowSplit()),
        predictors or (Last(),),
    )
    return tuple(dict.fromkeys(Contender(*members) for members in chosen))


# --- a trace --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Traces on a cluster, and who plans for them. One trace a seed, or one alone."""

    name: str
    traces: tuple[Trace, ...]
    cluster: ClusterSpec
    slots: int
    chosen: tuple[Contender, ...]
    when: tuple[Moment, ...]
    layers: tuple[int, ...]


def trace_settings(
    trace: Trace,
    *,
    ranks_per_node: int | None = None,
    slots: Sequence[int] = (),
    chosen: Sequence[Contender] = DEFAULT_CONTENDERS,
    lag: int = 10,
    from_iteration: int | None = None,
    to_iteration: int | None = None,
    layers: Sequence[int] = (),
    every: int = 1,
) -> list[Setting]:
    """A setting for each number of slots, by default one more than the experts of a rank.

    Raises ValueError, with the way out, for nodes, layers, slots and iterations that the trace has not.
    """
    R, E = trace.num_ranks, trace.num_experts
    in_node = ranks_per_node or R
    if R % in_node:
        raise ValueError(f"ranks_per_node={in_node} does not divide the trace's {R} ranks; use a divisor of {R}")
    if outside := [layer for layer in layers if not 0 <= layer < trace.num_layers]:
        raise ValueError(f"layers={outside} are not in the trace; its layers are 0 to {trace.num_layers - 1}")
    if few := [number for number in slots if number * R < E]:
        raise ValueError(
            f"slots={few[0]} gives {few[0] * R} slots on {R} ranks for {E} experts; use at least {-(-E // R)}"
        )
    cluster = ClusterSpec(num_nodes=R // in_node, ranks_per_node=in_node)
    when = tuple(moments(trace.iterations, lag, from_iteration, to_iteration, every))
    return [
        Setting(
            f"{number} slots",
            (trace,),
            cluster,
            number,
            tuple(chosen),
            when,
            tuple(layers) or tuple(range(trace.num_layers)),
        )
        for number in (slots or (-(-E // R) + 1,))
    ]


def laer_settings(
    num_seeds: int = 3,
    steps: int = 5,
    num_layers: int | None = None,
    chosen: Sequence[Contender] = LAER_CONTENDERS,
) -> list[Setting]:
    """LAER-MoE's two, on routing drawn like its own: lag 1, and five micro-batches to plan on before the first plan."""
    settings = []
    for name, routing, num_experts, top_k in (
        ("e8k2", LAER_E8K2_ROUTING, 8, 2),
        ("e16k4", LAER_E16K4_ROUTING, 16, 4),
    ):
        drawn = routing.replace(warmup=5, steps=steps, num_layers=num_layers or routing.num_layers)
        cluster = presets.LAER_A100
        traces = tuple(generate(drawn, cluster.num_ranks, num_experts, top_k, seed) for seed in range(num_seeds))
        when = tuple(moments(traces[0].iterations, lag=1, warmup=5))
        layers = tuple(range(drawn.num_layers))
        settings.append(Setting(f"{name}, {top_k} slots", traces, cluster, top_k, tuple(chosen), when, layers))
    return settings


def replay(settings: Sequence[Setting]) -> list[Score]:
    """All scores, setting by setting and layer by layer. Says how far it is."""
    scores: list[Score] = []
    for setting in settings:
        warm = setting.traces[0].tokens_SLRE[:1, 0].repeat(2, axis=0)
        for _ in score_layer(warm, (0, 1), (Moment(1, 1),), setting.cluster, setting.slots, setting.chosen):
            """Compiled code is there before anything is timed."""
    with steps_told("replay", sum(len(setting.traces) * len(setting.layers) for setting in settings)) as tell:
        for setting in settings:
            for trace in setting.traces:
                for layer in setting.layers:
                    tell(f"{setting.name}, layer {layer}")
                    scores += score_layer(
                        trace.tokens_SLRE[:, layer],
                        trace.iterations,
                        setting.when,
                        setting.cluster,
                        setting.slots,
                        setting.chosen,
                        setting=setting.name,
                        layer=layer,
                    )
    return scores


# --- what is shown --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A contender's scores in one setting: means, but medians of times. ``num_scores`` layouts were used."""

    setting: str
    contender: str
    num_scores: int
    max_over_mean: float
    p95: float
    worst: float
    inter_node_share: float
    moves: float | None
    layout_ms: float
    split_ms: float
    gap: float


def summarise(scores: Sequence[Score]) -> list[Summary]:
    rows = []
    for setting, contender in dict.fromkeys((score.setting, score.contender) for score in scores):
        of = [score for score in scores if (score.setting, score.contender) == (setting, contender)]
        max_over_mean = np.array([score.max_over_mean for score in of])
        moves = [score.moves for score in of if score.moves is not None]
        rows.append(
            Summary(
                setting=setting,
                contender=contender,
                num_scores=len(of),
                max_over_mean=float(max_over_mean.mean()),
                p95=float(np.quantile(max_over_mean, 0.95)),
                worst=float(max_over_mean.max()),
                inter_node_share=float(np.mean([score.inter_node_share for score in of])),
                moves=float(np.mean(moves)) if moves else None,
                layout_ms=float(np.median([score.layout_ms for score in of])),
                split_ms=float(np.median([score.split_ms for score in of])),
                gap=float(np.mean([score.gap for score in of])),
            )
        )
    return rows


def report(summaries: Sequence[Summary], source: str) -> tuple[Table, list[str]]:
    """The table and its legend. ``source`` says what was replayed."""
    title = "MEASURED: layouts planned on the past, tokens of later micro-batches split over them"
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    columns = "setting", "planner + split, predictor", "max/mean", "p95", "worst", "gap %", "inter-node %", "moves"
    for index, column in enumerate((*columns, "layout ms", "split ms", "n")):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for index, row in enumerate(summaries):
        if index and row.setting != summaries[index - 1].setting:
            table.add_section()
        table.add_row(
            row.setting,
            Text(row.contender),
            f"{row.max_over_mean:.4f}",
            f"{row.p95:.3f}",
            f"{row.worst:.3f}",
            f"{100 * row.gap:.2f}",
            f"{100 * row.inter_node_share:.2f}",
            "" if row.moves is None else f"{row.moves:.1f}",
            f"{row.layout_ms:.3f}",
            f"{row.split_ms:.3f}",
            str(row.num_scores),
        )
    legend = [
        f"{source}; {machine_line(1, PACKAGES)}",
        "max/mean: tokens of the busiest rank over the mean; mean, 95th percentile and worst of n uses of a layout.",
        "gap: how much busier the busiest rank is than the best split over the same layout leaves it (min-cut bound).",
        "even: over replicas on the source's node, if any, as LAER-MoE; eplb + even: over all replicas alike.",
        "inter-node: tokens that leave their node. moves: replicas a plan brings to ranks that did not hold them.",
        "ms: medians of the whole call, without the prediction.",
    ]
    return table, legend


def main_trace(
    path: Path,
    *,
    ranks_per_node: int | None,
    slots: Sequence[int],
    chosen: Sequence[Contender],
    lag: int,
    from_iteration: int | None,
    to_iteration: int | None,
    layers: Sequence[int],
    every: int,
    json_path: Path | None = None,
) -> int:
    """Replay a trace file; the exit code. Raises ValueError where it does not fit what is asked for."""
    settings = trace_settings(
        load_trace(path),
        ranks_per_node=ranks_per_node,
        slots=slots,
        chosen=chosen,
        lag=lag,
        from_iteration=from_iteration,
        to_iteration=to_iteration,
        layers=layers,
        every=every,
    )
    when, cluster = settings[0].when, settings[0].cluster
    nodes = f"{cluster.num_nodes} nodes of {cluster.ranks_per_node}"
    source = f"{path.name} on {nodes}, lag {lag}, {len(when)} micro-batches scored"
    return show(replay(settings), source, json_path)


def main_laer(chosen: Sequence[Contender] | None, num_seeds: int, json_path: Path | None = None) -> int:
    """Replay LAER-MoE's two settings; the exit code."""
    settings = laer_settings(num_seeds, chosen=chosen or LAER_CONTENDERS)
    source = (
        "routing drawn like LAER-MoE's, 4 nodes of 8, lag 1; its own log has a mean max/mean of 1.38 (p95 1.67) for "
        "e8k2 and 1.27 (p95 1.59) for e16k4"
    )
    return show(replay(settings), source, json_path)


def show(scores: Sequence[Score], source: str, json_path: Path | None) -> int:
    """Write and print; the exit code."""
    summaries = summarise(scores)
    table, legend = report(summaries, source)
    if json_path is not None:
        json_path.write_text(json.dumps(to_json(scores, summaries, source), indent=1) + "\n")
    print_full(table, legend)
    return 0


def to_json(scores: Sequence[Score], summaries: Sequence[Summary], source: str) -> dict[str, Any]:
    """Everything that was scored."""
    return {
        "benchmark": "planner",
        "source": "measured",
        "replayed": source,
        "machine": machine_line(1, PACKAGES),
        "summaries": [asdict(summary) for summary in summaries],
        "scores": [{**asdict(score), "gap": score.gap} for score in scores],
    }
