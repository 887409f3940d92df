"""Planners over sizes: what a layout and a split take, and how even they leave the ranks, on loads that are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text

from moesys.balance import min_max_load, plan_layout
from moesys.bench.harness.steps import steps_told
from moesys.bench.harness.stopwatch import interleave, machine_line
from moesys.bench.planner.large import LARGE, TOKENS_PER_RANK, TOP_K, Large, LargeRow, cell, large_report, large_rows
from moesys.bench.planner.loads import EXPONENTS, SIZES, Sample, Size, zipf_sample
from moesys.bench.planner.moves import MovesRow, moves_report, moves_rows
from moesys.bench.planner.peer_eplb import PEER, Rebalance, even_max_over_mean, load_peer, peer_layouts
from moesys.bench.planner.replay import Contender
from moesys.config import Eplb, EvenSplit, FlowSplit, Greedy, Laer, Last
from moesys.lab.show.console import print_full

PACKAGES = ("numpy", "numba", "ortools", "torch")


CONTENDERS = (
    Contender(Greedy(), FlowSplit(), Last()),
    Contender(Eplb(), EvenSplit(), Last()),
    Contender(Laer(), EvenSplit(), Last()),
)


@dataclass(frozen=True)
class ScaleRow:
    """One planner at one size. Means over seeds, but medians of times, and the worst for what ends in worst.

    max_over_mean: on the loads that were planned on. gap: over the min-cut bound of the layout. next_sample, noisy: the
    same layout on ``Sample.again`` and ``Sample.noisy``. None: the planner says nothing of it.
    """

    num_experts: int
    num_ranks: int
    exponent: float
    contender: str
    layout_ms: float
    split_ms: float | None
    max_over_mean: float
    worst: float
    gap: float | None
    duplicates: int
    inter_node_share: float | None
    next_sample: float
    noisy: float


def scale_rows(
    sizes: Sequence[Size] = SIZES,
    exponents: Sequence[float] = EXPONENTS,
    *,
    num_seeds: int = 3,
    repeats: int = 9,
    tokens_per_rank: int = TOKENS_PER_RANK,
    peer: Rebalance | None = None,
) -> list[ScaleRow]:
    """Every size under every exponent. What a planner is compiled to is there before it is timed."""
    rows: list[ScaleRow] = []
    with steps_told("scale", len(sizes) * len(exponents)) as tell:
        for size in sizes:
            for exponent in exponents:
                tell(f"{size.num_experts} experts on {size.num_ranks} ranks, Zipf {exponent}")
                samples = [zipf_sample(size, exponent, seed, tokens_per_rank) for seed in range(num_seeds)]
                rows += [_ours(size, exponent, samples, contender, repeats) for contender in CONTENDERS]
                if peer is not None:
                    rows.append(_of_peer(size, exponent, samples, peer, repeats))
    return rows


def _ours(size: Size, exponent: float, samples: Sequence[Sample], contender: Contender, repeats: int) -> ScaleRow:
    cluster, node_of_rank = size.cluster, size.cluster.node_of_rank
    layout_ms, split_ms, plans, nexts, noisies = [], [], [], [], []
    for sample in samples:
        layout = plan_layout(sample.exact, cluster, contender.balance, size.slots)
        # one after the other: they are not compared, and what a split has in its caches a layout would take
        planning = {"layout": partial(plan_layout, sample.exact, cluster, contender.balance, size.slots)}
        layout_ms += interleave(planning, repeats)["layout"]
        splitting = {"split": partial(contender.split_over, sample.exact, layout, cluster, 0)}
        split_ms += interleave(splitting, repeats)["split"]
        plans.append(contender.split_over(sample.exact, layout, cluster, 0))
        nexts.append(contender.split_over(sample.again, layout, cluster, 0).max_over_mean)
        noisies.append(contender.split_over(sample.noisy, layout, cluster, 0).max_over_mean)
    return ScaleRow(
        num_experts=size.num_experts,
        num_ranks=size.num_ranks,
        exponent=exponent,
        contender=contender.name.partition(",")[0],
        layout_ms=float(np.median(layout_ms)),
        split_ms=float(np.median(split_ms)),
        max_over_mean=float(np.mean([plan.max_over_mean for plan in plans])),
        worst=max(plan.max_over_mean for plan in plans),
        gap=float(np.mean([plan.tokens_R.max() / min_max_load(plan.load, plan.layout) - 1 for plan in plans])),
        duplicates=sum(plan.layout.num_duplicates for plan in plans),
        inter_node_share=float(np.mean([plan.inter_node_tokens(node_of_rank) / plan.load.total for plan in plans])),
        next_sample=float(np.mean(nexts)),
        noisy=float(np.mean(noisies)),
    )


def _of_peer(size: Size, exponent: float, samples: Sequence[Sample], peer: Rebalance, repeats: int) -> ScaleRow:
    """Its global form, and the share that it reckons with: of an expert's tokens the same for every replica."""
    times_ms: list[float] = []
    max_over_mean: dict[str, list[float]] = {"exact": [], "again": [], "noisy": []}
    duplicates = 0
    for sample in samples:
        loads_LE = torch.from_numpy(sample.exact.tokens_E[None])
        arguments = (loads_LE, size.slots * size.num_ranks, 1, 1, size.num_ranks)
        times_ms += interleave({"layout": partial(peer, *arguments)}, repeats)["layout"]
        layout = peer_layouts(peer, loads_LE, size.num_ranks, size.slots)[0]
        duplicates += layout.num_duplicates
        for which, found in max_over_mean.items():
            found.append(even_max_over_mean(getattr(sample, which).tokens_E, layout))
    return ScaleRow(
        num_experts=size.num_experts,
        num_ranks=size.num_ranks,
        exponent=exponent,
        contender=PEER,
        layout_ms=float(np.median(times_ms)),
        split_ms=None,
        max_over_mean=float(np.mean(max_over_mean["exact"])),
        worst=max(max_over_mean["exact"]),
        gap=None,
        duplicates=duplicates,
        inter_node_share=None,
        next_sample=float(np.mean(max_over_mean["again"])),
        noisy=float(np.mean(max_over_mean["noisy"])),
    )


def scale_report(rows: Sequence[ScaleRow], num_seeds: int, repeats: int) -> tuple[Table, list[str]]:
    """The table of sizes and its legend."""
    title = "MEASURED: planners on known loads, one redundant slot a rank"
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    columns = "experts", "ranks", "Zipf", "planner + split", "layout ms", "split ms", "max/mean", "worst", "gap %"
    for index, column in enumerate((*columns, "duplicates", "inter-node %", "next sample", "15 % noise")):
        table.add_column(column, justify="left" if index == 3 else "right", no_wrap=True)
    for index, row in enumerate(rows):
        if index and (row.num_experts, row.exponent) != (rows[index - 1].num_experts, rows[index - 1].exponent):
            table.add_section()
        table.add_row(
            str(row.num_experts),
            str(row.num_ranks),
            str(row.exponent),
            row.contender,
            f"{row.layout_ms:.3f}",
            cell(row.split_ms, ".3f"),
            f"{row.max_over_mean:.4f}",
            f"{row.worst:.4f}",
            cell(row.gap, ".2f", 100),
            str(row.duplicates),
            cell(row.inter_node_share, ".1f", 100),
            f"{row.next_sample:.4f}",
            f"{row.noisy:.4f}",
        )
    legend = [
        f"{machine_line(1, PACKAGES)}; {TOKENS_PER_RANK} tokens a rank, top-{TOP_K}, nodes of 8; {num_seeds} seeds",
        f"ms: medians of {repeats} calls a seed, after one of warm-up. gap: over the min-cut bound of the layout.",
        "even: over the replicas on the source's node, if it has any; EPLB's: over all replicas alike.",
        "next sample, 15 % noise: the same layout on loads drawn again, and drawn under log-normal noise.",
    ]
    return table, legend


def main(
    *,
    sizes: Sequence[Size] = SIZES,
    cases: Sequence[Large] = LARGE,
    num_seeds: int = 3,
    repeats: int = 9,
    peer_path: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measure, write, print; the exit code. Raises ValueError for a peer that is not there."""
    peer = load_peer(peer_path) if peer_path else None
    rows = scale_rows(sizes, num_seeds=num_seeds, repeats=repeats, peer=peer)
    moves = moves_rows(sizes, EXPONENTS, num_seeds)
    large = large_rows(cases, repeats=repeats, peer=peer_path)
    table, legend = scale_report(rows, num_seeds, repeats)
    if json_path is not None:
        json_path.write_text(json.dumps(to_json(rows, moves, large), indent=1) + "\n")
    print_full(table, legend)
    print_full(moves_report(moves), ["before, after: max/mean of the best split of the later load over either layout."])
    print_full(large_report(large))
    return 0


def to_json(rows: Sequence[ScaleRow], moves: Sequence[MovesRow], large: Sequence[LargeRow]) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "benchmark": "planner scale",
        "source": "measured",
        "machine": machine_line(1, PACKAGES),
        "sizes": [asdict(row) for row in rows],
        "moves": [asdict(row) for row in moves],
        "large": [asdict(row) for row in large],
    }
