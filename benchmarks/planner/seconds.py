"""Planners by the seconds of a step: what balance brings, and what rows between nodes cost.

Layouts are planned on one sample of routing and run on a later one. A step is a layer's forward and backward,
simulated, one part after another (``Sequential``), of fully sharded experts: planners differ in their layouts alone.
Sharded experts and their gradients travel between those parts, or behind them, as LAER-MoE has them (section 4).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from moesys.balance.homes import Homes, planned_homes
from moesys.balance.layouts import plan_layout
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.balance.predictors import measured_drift
from moesys.balance.seconds_certificate import certify_seconds
from moesys.balance.warm_up import warm_up
from moesys.config import (
    Balance,
    ClusterSpec,
    Ep,
    Eplb,
    EvenSplit,
    FlexMoe,
    FlowSplit,
    Fsep,
    Greedy,
    Laer,
    ModelShape,
    Overlap,
    Sequential,
    Sharding,
    Split,
    Static,
    Strategy,
    presets,
)
from moesys.config.workload import Generated
from moesys.lab.runs.stopwatch import Spread, machine_line
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.simulator.step_program import simulate
from moesys.traces import generate

TOKENS_PER_RANK = 8192
# A layer is what a step of more equal layers takes longer, so that neither its first nor its last one counts.
FEW_LAYERS, MORE_LAYERS = 2, 6


@dataclass(frozen=True)
class Setting:
    """A model on H100 nodes of 8. ``spread``: of each rank's own preferences; at 1 nodes have hot experts of their
    own.
    """

    name: str
    model: ModelShape
    num_nodes: int
    slots: int
    spread: float = 0.1

    def loads(self, seed: int, drift: float) -> tuple[LoadMatrix, LoadMatrix, LoadMatrix]:
        """Returns one load after another: one that is past, the one to plan for, and the one that is run."""
        drawn = Generated(
            drift=drift, spread=self.spread, num_layers=1, tokens_per_rank=TOKENS_PER_RANK, warmup=0, steps=3
        )
        trace = generate(drawn, 8 * self.num_nodes, self.model.num_experts, self.model.top_k, seed)
        past, planned_for, later = map(LoadMatrix, trace.tokens_SLRE[:, 0])
        return past, planned_for, later


_QWEN, _V3, _MIXTRAL = presets.QWEN3_30B_A3B, presets.DEEPSEEK_V3, presets.MIXTRAL_8X7B
SETTINGS = (
    *(Setting("Qwen3-30B-A3B", _QWEN, nodes, slots) for nodes, slots in ((2, 10), (4, 5), (4, 8), (8, 8), (16, 6))),
    Setting("Qwen3-30B-A3B, hot experts by node", _QWEN, 4, 8, spread=1.0),
    *(Setting("DeepSeek-V3", _V3, nodes, slots) for nodes, slots in ((4, 10), (8, 6), (16, 3), (16, 6))),
    *(Setting("Mixtral-8x7B", _MIXTRAL, nodes, 2) for nodes in (1, 4, 16)),
)


_FLAT = Fsep(slots_per_rank=0)
_NODE_BY_NODE = _FLAT.replace(restore="hierarchical", reshard="hierarchical")
_DIRECT, _ONCE = Sequential(), Sequential(node_dispatch="once", combine="per_node")


@dataclass(frozen=True)
class Planner:
    """``by_seconds``: whether the planner is told the model, and so can weigh seconds, and how much loads drift.
    ``sharding``: but for its slots, which are the setting's. ``homes``: whether it first chooses who owns which expert.
    """

    name: str
    balance: Balance
    split: Split
    by_seconds: bool = False
    overlap: Overlap = _DIRECT
    sharding: Sharding = _FLAT
    homes: bool = False

    def behind(self) -> Planner:
        """Returns it with sharded experts that travel behind the layer before, and gradients behind the one after."""
        if isinstance(self.sharding, Fsep):
            return replace(self, sharding=self.sharding.replace(prefetch_layers=1, delay_reshard=True))
        return self

    def strategy(self, slots: int) -> Strategy:
        sharding = self.sharding.replace(slots_per_rank=slots)
        return Strategy(name=self.name, sharding=sharding, balance=self.balance, split=self.split, overlap=self.overlap)

    def numbered(
        self, loads: tuple[LoadMatrix, LoadMatrix, LoadMatrix], cluster: ClusterSpec
    ) -> tuple[LoadMatrix, LoadMatrix, LoadMatrix]:
        """Returns ``Setting.loads``, where it chooses homes with experts in the order of these."""
        if not self.homes:
            return loads
        homes = Homes(planned_homes(loads[0], cluster), cluster.num_ranks)
        past, planned_for, later = map(homes.numbered, loads)
        return past, planned_for, later

    def layout(
        self, model: ModelShape, cluster: ClusterSpec, slots: int, past: LoadMatrix, planned_for: LoadMatrix
    ) -> ExpertLayout:
        """Plans for ``planned_for``; how much it differs from ``past`` is how much it is to differ from what comes."""
        if not self.by_seconds:
            return plan_layout(planned_for, cluster, self.balance, slots)
        balance = self.balance.replace(drift=measured_drift(past, planned_for))
        return plan_layout(planned_for, cluster, balance, slots, model=model, strategy=self.strategy(slots))


_BY_SECONDS = FlowSplit(max_inter_node="seconds")
_PINNED = Planner(
    "pinned homes",
    Greedy(),
    _BY_SECONDS,
    True,
    sharding=Ep(slots_per_rank=0, lend="hierarchical"),
    homes=True,
)
BASELINE = Planner("laer, even split", Laer(), EvenSplit())
PLANNERS = (
    BASELINE,
    Planner("laer, flow split", Laer(), FlowSplit()),
    Planner("static, even split", Static(), EvenSplit()),
    Planner("eplb, flow split", Eplb(), FlowSplit()),
    Planner("flex_moe, flow split", FlexMoe(), FlowSplit()),
    Planner("greedy by counts", Greedy(), FlowSplit()),
    Planner("greedy by seconds", Greedy(), _BY_SECONDS, by_seconds=True),
    replace(BASELINE, name="laer, even split; once a node", overlap=_ONCE),
    Planner("greedy by seconds; once a node", Greedy(), _BY_SECONDS, True, _ONCE),
    replace(BASELINE, name="laer, even split; experts node by node", sharding=_NODE_BY_NODE),
    Planner(
        "greedy by seconds; experts node by node",
        Greedy(),
        _BY_SECONDS,
        True,
        sharding=_NODE_BY_NODE,
    ),
    _PINNED,
    replace(_PINNED, name="pinned homes; once a node", overlap=_ONCE),
)


@dataclass(frozen=True)
class Row:
    """One planner in one setting. ``layer_ms``, ``max_over_mean``, ``crossing`` and ``planning_ms``: one a seed."""

    setting: Annotated[str, Column("model")]
    num_ranks: Annotated[int, Column("ranks")]
    slots: Annotated[int, Column("slots")]
    planner: Annotated[str, Column("planner")]
    layer_ms: list[float]
    max_over_mean: list[float]
    crossing: list[float]
    planning_ms: list[float]
    bound_ms: list[float]
    baseline_ms: list[float]

    @property
    def step_ms(self) -> Annotated[float, Column("a layer, ms", ".2f")]:
        return statistics.mean(self.layer_ms)

    @property
    def over_laer(self) -> Annotated[Spread, Column("over LAER, even")]:
        return Spread.of_ratios(self.layer_ms, self.baseline_ms)

    @property
    def over_bound(self) -> Annotated[Spread, Column("over the bound")]:
        return Spread.of_ratios(self.layer_ms, self.bound_ms)

    @property
    def imbalance(self) -> Annotated[float, Column("max/mean", ".3f")]:
        return statistics.mean(self.max_over_mean)

    @property
    def crossing_percent(self) -> Annotated[float, Column("between nodes %", ".1f")]:
        return 100 * statistics.mean(self.crossing)

    @property
    def plan_ms(self) -> Annotated[float, Column("planning, ms", ".1f")]:
        return statistics.median(self.planning_ms)


def simulated_ms(strategy: Strategy, model: ModelShape, cluster: ClusterSpec, layer: LayerPlan) -> float:
    """Returns the milliseconds of a layer, forward and backward, among equal ones."""
    few_us, more_us = (
        simulate(StepPlan(strategy, model, cluster, (layer,) * number)).length_us
        for number in (FEW_LAYERS, MORE_LAYERS)
    )
    return (more_us - few_us) / 1e3 / (MORE_LAYERS - FEW_LAYERS)


def main(
    num_seeds: int,
    drift: float = 0.0,
    behind: bool = False,
    *,
    out: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Simulates, writes, prints; the exit code. ``behind``: whether sharded experts travel behind other layers."""
    warm_up()
    planners = [planner.behind() if behind else planner for planner in PLANNERS]
    with steps_told("seconds", len(SETTINGS)) as tell:
        rows = [row for setting in SETTINGS for row in _rows(setting, planners, range(num_seeds), drift, tell)]
    machine = machine_line(1, ("numpy", "numba"))
    notes = [
        f"A layer's forward and backward of {TOKENS_PER_RANK} tokens a rank on H100 nodes of 8, experts fully sharded, "
        f"one part after another; log-normal popularity of skew 1, drift {drift:g} to the later sample; {num_seeds} "
        "seeds.",
        "Sharded experts and their gradients travel behind other layers (prefetch_layers=1, delay_reshard=True)."
        if behind
        else "Experts and their gradients travel when nothing else does (prefetch_layers=0, delay_reshard=False).",
        "once a node: a token crosses to a node once, and one sum a node comes home.",
        "experts node by node: they reach a node once, and one sum of their gradients leaves it.",
        "pinned homes: experts whole on owners, chosen on the past load; what fills other slots is lent, once a node.",
        "over the bound: products, rows between nodes and experts that no layout with these slots costs less than.",
        "over LAER, even: below 1 is faster than LAER-MoE's planner with its even split; median [p20, p80] over seeds.",
        f"Planning is measured: {machine}.",
    ]
    title = "SIMULATED: planners by the seconds of a layer"
    data = {"machine": machine, "drift": drift, "behind": behind, "rows": rows}
    report = Report("planner-seconds", title, "simulated", [Sheet(title, rows, notes, "setting")], data=data)
    publish(report, page=out, json_path=json_path)
    return 0


def _rows(
    setting: Setting, planners: Sequence[Planner], seeds: Sequence[int], drift: float, tell: Callable[[str], None]
) -> Iterator[Row]:
    tell(f"{setting.name}, {8 * setting.num_nodes} ranks, {setting.slots} slots")
    loads = [setting.loads(seed, drift) for seed in seeds]
    baseline = _row(setting, planners[0], loads, [])
    yield replace(baseline, baseline_ms=baseline.layer_ms)
    for planner in planners[1:]:
        yield _row(setting, planner, loads, baseline.layer_ms)


def _row(
    setting: Setting,
    planner: Planner,
    loads: Sequence[tuple[LoadMatrix, LoadMatrix, LoadMatrix]],
    baseline_ms: list[float],
) -> Row:
    model, cluster = setting.model, presets.h100(setting.num_nodes)
    strategy = planner.strategy(setting.slots)
    row = Row(setting.name, cluster.num_ranks, setting.slots, planner.name, [], [], [], [], [], baseline_ms)
    for loads_3 in loads:
        past, planned_for, later = planner.numbered(loads_3, cluster)
        begin_s = time.perf_counter()
        layout = planner.layout(setting.model, cluster, setting.slots, past, planned_for)
        row.planning_ms.append(1e3 * (time.perf_counter() - begin_s))
        layer = plan_layer(strategy, model, cluster, later, layout=layout)
        row.bound_ms.append(1e3 * certify_seconds(layer.tokens, cluster, model, strategy).bound_s)
        row.layer_ms.append(simulated_ms(strategy, model, cluster, layer))
        row.max_over_mean.append(layer.tokens.max_over_mean)
        row.crossing.append(layer.tokens.inter_node_tokens(cluster.node_of_rank) / later.total)
    return row
