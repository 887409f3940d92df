"""What blocks cost: simulated seconds of layers whose experts' rows are split in whole blocks (``LayoutInvariant``).

Settings, loads and planners are those of ``seconds``. A layout is planned once and the tokens are split over it once;
then the split is priced as it is, rounded to blocks (``balance.blocks``), and with gradients that travel in float64
besides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from benchmarks.planner.seconds import PLANNERS, SETTINGS, TOKENS_PER_RANK, Planner, Setting, simulated_ms
from moesys.balance.blocks import by_blocks
from moesys.balance.plan import plan_layer
from moesys.balance.warm_up import warm_up
from moesys.config import LayoutInvariant, presets
from moesys.lab.runs.stopwatch import Spread
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told

# Of each way to shard one that is planned in seconds, and LAER-MoE's.
CHOSEN = ("laer, even split", "greedy by seconds", "greedy by seconds; experts node by node", "pinned homes")


@dataclass(frozen=True)
class Row:
    """One planner in one setting; ``layer_ms``, ``blocks_ms``, ``all_ms`` and the rest: one a seed."""

    setting: Annotated[str, Column("model")]
    num_ranks: Annotated[int, Column("ranks")]
    slots: Annotated[int, Column("slots")]
    planner: Annotated[str, Column("planner")]
    layer_ms: list[float]
    blocks_ms: list[float]
    all_ms: list[float]
    max_over_mean: list[float]
    blocks_over_mean: list[float]

    @property
    def whole_ms(self) -> Annotated[float, Column("a layer, ms", ".2f")]:
        return statistics.mean(self.layer_ms)

    @property
    def lost_percent(self) -> Annotated[float, Column("lost to blocks, %", ".2f")]:
        """Of the seconds of all seeds."""
        return 100 * (sum(self.blocks_ms) / sum(self.layer_ms) - 1)

    @property
    def over_whole(self) -> Annotated[Spread, Column("in blocks, over without", ".3f")]:
        return Spread.of_ratios(self.blocks_ms, self.layer_ms)

    @property
    def imbalance(self) -> Annotated[float, Column("max/mean", ".3f")]:
        return statistics.mean(self.max_over_mean)

    @property
    def imbalance_in_blocks(self) -> Annotated[float, Column("in blocks", ".3f")]:
        return statistics.mean(self.blocks_over_mean)

    @property
    def all_percent(self) -> Annotated[float, Column("lost with float64 gradients, %", ".1f")]:
        return 100 * (sum(self.all_ms) / sum(self.layer_ms) - 1)


def main(
    num_seeds: int,
    block_rows: int,
    drift: float = 0.0,
    behind: bool = False,
    *,
    out: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Simulates, writes, prints; the exit code."""
    warm_up()
    chosen = [planner.behind() if behind else planner for planner in PLANNERS if planner.name in CHOSEN]
    rows: list[Row] = []
    with steps_told("blocks", len(SETTINGS)) as tell:
        for setting in SETTINGS:
            tell(f"{setting.name}, {8 * setting.num_nodes} ranks, {setting.slots} slots")
            rows += _rows(setting, chosen, range(num_seeds), block_rows, drift)
    notes = [
        f"A layer's forward and backward of {TOKENS_PER_RANK} tokens a rank on H100 nodes of 8, one part after "
        f"another; log-normal popularity of skew 1, drift {drift:g} to the later sample; {num_seeds} seeds.",
        f"In blocks: an expert's rows, of all ranks in a line, go to ranks in whole blocks of {block_rows}. "
        "One layout, one split, one simulator: only the rounding of the split differs. Median [p20, p80] over seeds.",
        "Sharded experts and their gradients travel behind other layers."
        if behind
        else "Experts and their gradients travel when nothing else does.",
        "With float64 gradients: experts' gradients on their way home have 8 bytes an element instead of 4, as sums "
        "without an order need.",
    ]
    title = "SIMULATED: what blocks cost a layer"
    data = {"drift": drift, "behind": behind, "block_rows": block_rows, "rows": rows}
    report = Report("planner-blocks", title, "simulated", [Sheet(title, rows, notes, "setting")], data=data)
    publish(report, page=out, json_path=json_path)
    return 0


def _rows(
    setting: Setting, planners: Sequence[Planner], seeds: Sequence[int], block_rows: int, drift: float
) -> Iterator[Row]:
    model, cluster = setting.model, presets.h100(setting.num_nodes)
    loads = [setting.loads(seed, drift) for seed in seeds]
    for planner in planners:
        strategy = planner.strategy(setting.slots)
        invariant = strategy.replace(reduction=LayoutInvariant(block_rows=block_rows))
        row = Row(setting.name, cluster.num_ranks, setting.slots, planner.name, [], [], [], [], [])
        for loads_3 in loads:
            past, planned_for, later = planner.numbered(loads_3, cluster)
            layout = planner.layout(model, cluster, setting.slots, past, planned_for)
            layer = plan_layer(strategy, model, cluster, later, layout=layout)
            in_blocks = replace(layer, tokens=by_blocks(layer.tokens, block_rows))
            row.layer_ms.append(simulated_ms(strategy, model, cluster, layer))
            row.blocks_ms.append(simulated_ms(strategy, model, cluster, in_blocks))
            row.all_ms.append(simulated_ms(invariant, model, cluster, in_blocks))
            row.max_over_mean.append(layer.tokens.max_over_mean)
            row.blocks_over_mean.append(in_blocks.tokens.max_over_mean)
        yield row
