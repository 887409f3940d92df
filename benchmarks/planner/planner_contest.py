"""Planners side by side: on a recorded trace, and on routing like that of LAER-MoE's two settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.planner.scored_layers import Contender, Score, moments, score_layer
from moesys.balance.replay import Moment
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
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
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


@dataclass(frozen=True)
class TraceOptions:
    """What of a trace is replayed, and how.

    ranks_per_node: all in one node by default. slots: one setting for each number, by default one more than the experts
    of a rank. lag, from_iteration, to_iteration, every: of ``moments``. layers: all by default.
    """

    ranks_per_node: int | None = None
    slots: Sequence[int] = ()
    lag: int = 10
    from_iteration: int | None = None
    to_iteration: int | None = None
    layers: Sequence[int] = ()
    every: int = 1


def trace_settings(trace: Trace, chosen: Sequence[Contender], options: TraceOptions) -> list[Setting]:
    """A setting for each number of slots.

    Raises ValueError, with the way out, for nodes, layers, slots and iterations that the trace has not.
    """
    R, E = trace.num_ranks, trace.num_experts
    in_node = options.ranks_per_node or R
    if R % in_node:
        raise ValueError(f"ranks_per_node={in_node} does not divide the trace's {R} ranks; use a divisor of {R}")
    if outside := [layer for layer in options.layers if not 0 <= layer < trace.num_layers]:
        raise ValueError(f"layers={outside} are not in the trace; its layers are 0 to {trace.num_layers - 1}")
    if few := [number for number in options.slots if number * R < E]:
        raise ValueError(
            f"slots={few[0]} gives {few[0] * R} slots on {R} ranks for {E} experts; use at least {-(-E // R)}"
        )
    cluster = ClusterSpec(num_nodes=R // in_node, ranks_per_node=in_node)
    bounds = options.from_iteration, options.to_iteration, options.every
    when = tuple(moments(trace.iterations, options.lag, *bounds))
    layers = tuple(options.layers) or tuple(range(trace.num_layers))
    return [
        Setting(f"{number} slots", (trace,), cluster, number, tuple(chosen), when, layers)
        for number in (options.slots or (-(-E // R) + 1,))
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

    setting: Annotated[str, Column("setting")]
    contender: Annotated[str, Column("planner + split, predictor")]
    max_over_mean: Annotated[float, Column("max/mean", ".4f")]
    p95: Annotated[float, Column("p95", ".3f")]
    worst: Annotated[float, Column("worst", ".3f")]
    gap: Annotated[float, Column("gap %", ".2f", 100)]
    inter_node_share: Annotated[float, Column("inter-node %", ".2f", 100)]
    moves: Annotated[float | None, Column("moves", ".1f")]
    layout_ms: Annotated[float, Column("layout ms", ".3f")]
    split_ms: Annotated[float, Column("split ms", ".3f")]
    num_scores: Annotated[int, Column("n")]

    @staticmethod
    def of(scores: Sequence[Score]) -> Summary:
        """``scores`` are of one setting and contender."""
        max_over_mean = np.array([score.max_over_mean for score in scores])
        moves = [score.moves for score in scores if score.moves is not None]
        return Summary(
            setting=scores[0].setting,
            contender=scores[0].contender,
            max_over_mean=float(max_over_mean.mean()),
            p95=float(np.quantile(max_over_mean, 0.95)),
            worst=float(max_over_mean.max()),
            gap=float(np.mean([score.gap for score in scores])),
            inter_node_share=float(np.mean([score.inter_node_share for score in scores])),
            moves=float(np.mean(moves)) if moves else None,
            layout_ms=float(np.median([score.layout_ms for score in scores])),
            split_ms=float(np.median([score.split_ms for score in scores])),
            num_scores=len(scores),
        )


def summarise(scores: Sequence[Score]) -> list[Summary]:
    by_contender: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        by_contender.setdefault((score.setting, score.contender), []).append(score)
    return [Summary.of(of_one) for of_one in by_contender.values()]


def main_trace(path: Path, chosen: Sequence[Contender], options: TraceOptions, json_path: Path | None = None) -> int:
    """Replay a trace file; the exit code. Raises ValueError where it does not fit what is asked for."""
    settings = trace_settings(load_trace(path), chosen, options)
    when, cluster = settings[0].when, settings[0].cluster
    nodes = f"{cluster.num_nodes} nodes of {cluster.ranks_per_node}"
    source = f"{path.name} on {nodes}, lag {options.lag}, {len(when)} micro-batches scored"
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
    """Write and print; the exit code. ``source`` says what was replayed."""
    summaries, machine = summarise(scores), machine_line(1, PACKAGES)
    notes = [
        f"{source}; {machine}",
        "max/mean: tokens of the busiest rank over the mean; mean, 95th percentile and worst of n uses of a layout.",
        "gap: how much busier the busiest rank is than the best split over the same layout leaves it (min-cut bound).",
        "even: over replicas on the source's node, if any, as LAER-MoE; eplb + even: over all replicas alike.",
        "inter-node: tokens that leave their node. moves: replicas a plan brings to ranks that did not hold them.",
        "ms: medians of the whole call, without the prediction.",
    ]
    title = "MEASURED: layouts planned on the past, tokens of later micro-batches split over them"
    sheet = Sheet(title, summaries, notes, group_by="setting")
    data = {"replayed": source, "machine": machine, "summaries": summaries, "scores": scores}
    publish(Report("planner", title, "measured", [sheet], data=data), json_path=json_path)
    return 0
