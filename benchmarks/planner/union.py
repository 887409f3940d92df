"""Whether a planner of the union is ever better than Greedy: drawn settings, a simulated step, the worst named.

Models, clusters, slots, skew, drift and nodes of their own are drawn. Every planner has the same slots and lag and runs
on the same later load, of fully sharded experts, one part after another. Splits are those of the union, and rivals are
counted with the better one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.planner.seconds import TOKENS_PER_RANK, Planner
from moesys.balance.plan import StepPlan, plan_layer
from moesys.balance.warm_up import warm_up
from moesys.config import (
    Balance,
    ClusterSpec,
    Eplb,
    EvenSplit,
    FlexMoe,
    FlowSplit,
    Fsep,
    Greedy,
    Laer,
    ModelShape,
    Split,
    Static,
    Strategy,
    presets,
)
from moesys.config.workload import Generated
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.simulator.step_program import simulate
from moesys.traces import generate

GREEDY = Planner("greedy", Greedy(), FlowSplit(max_inter_node="seconds"), by_seconds=True)
RIVALS: dict[str, Balance] = {"static": Static(), "eplb": Eplb(), "laer": Laer(), "flex_moe": FlexMoe()}
SPLITS: tuple[Split, ...] = (EvenSplit(), FlowSplit())
# How much above the best Greedy may be.
BAR = 0.005
NUM_WORST = 10

MODELS = {
    "Qwen3-30B-A3B": presets.QWEN3_30B_A3B,
    "DeepSeek-V3": presets.DEEPSEEK_V3,
    "OLMoE-1B-7B": presets.OLMOE_1B_7B,
    "Mixtral-8x7B": presets.MIXTRAL_8X7B,
    "e16k4": presets.LAER_E16K4,
}
CLUSTERS = {
    "8 H100": presets.h100(1),
    "2 x 8 H100": presets.h100(2),
    "4 x 8 H100": presets.h100(4),
    "8 x 8 H100": presets.h100(8),
    "16 x 8 H100": presets.h100(16),
    "4 x 8 A100": presets.a100(4),
    "4 x 8 H100, NICs of a tenth": presets.h100(4).replace(inter_node_gb_per_s=36.0),
    "8 x 8 H100, domains of 32": presets.h100(8).replace(ranks_per_domain=32),
    "4 x 8 H100, domains of 4": presets.h100(4).replace(ranks_per_domain=4),
    "72 GB200, a rack": presets.gb200(18),
    "2 x 32 GB300, half racks": presets.gb300(16).replace(ranks_per_domain=32),
}


@dataclass(frozen=True)
class Drawn:
    """One setting; ``number`` is its seed."""

    number: int
    model: str
    cluster: str
    slots: int
    skew: float
    drift: float
    spread: float

    @classmethod
    def of(cls, number: int) -> Drawn:
        rng = np.random.default_rng(number)
        model, cluster = (str(rng.choice(list(names))) for names in (MODELS, CLUSTERS))
        least = -(-MODELS[model].num_experts // CLUSTERS[cluster].num_ranks)
        return cls(
            number=number,
            model=model,
            cluster=cluster,
            slots=min(least + int(rng.integers(0, 5)), MODELS[model].num_experts),
            skew=round(float(rng.uniform(0, 2)), 2),
            # half of them stay as they are, as between two micro-batches of a training
            drift=round(float(rng.uniform(0, 0.6)) * int(rng.integers(0, 2)), 2),
            spread=float(rng.choice([0.1, 1.0])),
        )

    def loads(self, model: ModelShape, cluster: ClusterSpec) -> tuple[LoadMatrix, ...]:
        """One after another: past, to plan for, to run."""
        drawn = Generated(
            skew=self.skew,
            drift=self.drift,
            spread=self.spread,
            num_layers=1,
            tokens_per_rank=TOKENS_PER_RANK,
            warmup=0,
            steps=3,
        )
        trace = generate(drawn, cluster.num_ranks, model.num_experts, model.top_k, self.number)
        return tuple(map(LoadMatrix, trace.tokens_SLRE[:, 0]))


@dataclass(frozen=True)
class Row:
    """One setting. ``layer_ms``: of each planner with the better split, simulated."""

    setting: Drawn
    layer_ms: dict[str, float]

    @property
    def number(self) -> Annotated[int, Column("setting")]:
        return self.setting.number

    @property
    def model(self) -> Annotated[str, Column("model")]:
        return self.setting.model

    @property
    def cluster(self) -> Annotated[str, Column("cluster")]:
        return self.setting.cluster

    @property
    def slots(self) -> Annotated[int, Column("slots")]:
        return self.setting.slots

    @property
    def routing(self) -> Annotated[str, Column("skew, drift, spread")]:
        return f"{self.setting.skew:g}, {self.setting.drift:g}, {self.setting.spread:g}"

    @property
    def best_rival(self) -> Annotated[str, Column("best rival")]:
        return min(RIVALS, key=lambda name: self.layer_ms[name])

    @property
    def greedy_ms(self) -> Annotated[float, Column("greedy, ms", ".2f")]:
        return self.layer_ms[GREEDY.name]

    @property
    def rival_ms(self) -> Annotated[float, Column("rival, ms", ".2f")]:
        return self.layer_ms[self.best_rival]

    @property
    def above(self) -> Annotated[float, Column("greedy over it", ".3f")]:
        return self.greedy_ms / self.rival_ms


@dataclass(frozen=True)
class Summary:
    """Settings of a kind."""

    kind: Annotated[str, Column("settings")]
    count: Annotated[int, Column("number")]
    median: Annotated[float, Column("greedy over best rival, median", ".3f")]
    worst: Annotated[float, Column("worst", ".3f")]
    beyond: Annotated[int, Column("more than 0.5 % above")]
    worst_named: Annotated[str, Column("worst setting and rival")]

    @classmethod
    def of(cls, kind: str, rows: list[Row]) -> Summary:
        worst = max(rows, key=lambda row: row.above)
        return cls(
            kind=kind,
            count=len(rows),
            median=statistics.median(row.above for row in rows),
            worst=worst.above,
            beyond=sum(row.above > 1 + BAR for row in rows),
            worst_named=f"{worst.number}: {worst.model}, {worst.cluster}, {worst.best_rival}",
        )


def main(num_settings: int, *, out: Path | None = None, json_path: Path | None = None) -> int:
    """Simulates, writes, prints; the exit code is 1 where Greedy is above the best by more than the bar."""
    warm_up()
    with steps_told("union", num_settings) as tell:
        rows = [_row(Drawn.of(number), tell) for number in range(num_settings)]
    steady = [row for row in rows if row.setting.drift == 0]
    drifting = [row for row in rows if row.setting.drift > 0]
    kinds = {"all": rows, "no drift": steady, "drift": drifting}
    summaries = [Summary.of(kind, of_kind) for kind, of_kind in kinds.items() if of_kind]
    worst = sorted(rows, key=lambda row: -row.above)[:NUM_WORST]
    firsts = Counter(row.best_rival for row in rows)
    notes = [
        f"A layer's forward and backward of {TOKENS_PER_RANK} tokens a rank, experts fully sharded, one part after "
        "another. Layouts are planned on one load and run on a later one, the same for all.",
        "Greedy knows the model, and the drift from the load before to the one it plans for; its split takes the limit "
        "of the fewest seconds. Rivals have the better of the even split and the flow split.",
        "Best rivals: " + ", ".join(f"{name} {count}" for name, count in firsts.most_common()) + ".",
    ]
    title = "SIMULATED: Greedy against all planners of the union"
    sheets = [
        Sheet(title, summaries, notes),
        Sheet(f"The {len(worst)} worst settings for Greedy", worst),
    ]
    report = Report("planner-union", title, "simulated", sheets, data={"rows": rows})
    publish(report, page=out, json_path=json_path)
    return int(summaries[0].beyond > 0)


def _row(setting: Drawn, tell: Callable[[str], None]) -> Row:
    tell(f"{setting.number}: {setting.model}, {setting.cluster}, {setting.slots} slots")
    model, cluster = MODELS[setting.model], CLUSTERS[setting.cluster]
    past, planned_for, later = setting.loads(model, cluster)

    def layer_ms(layout: ExpertLayout, split: Split) -> float:
        strategy = Strategy(name="union", sharding=Fsep(slots_per_rank=setting.slots), split=split)
        layer = plan_layer(strategy, model, cluster, later, layout=layout)
        return simulate(StepPlan(strategy, model, cluster, (layer,))).length_us / 1e3

    found = {GREEDY.name: layer_ms(GREEDY.layout(model, cluster, setting.slots, past, planned_for), GREEDY.split)}
    for name, balance in RIVALS.items():
        layout = Planner(name, balance, EvenSplit()).layout(model, cluster, setting.slots, past, planned_for)
        found[name] = min(layer_ms(layout, split) for split in SPLITS)
    return Row(setting, found)
