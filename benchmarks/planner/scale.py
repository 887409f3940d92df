"""Planners over sizes: what a layout and a split take, and how even they leave the ranks, on loads that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from benchmarks.planner.loads import EXPONENTS, SIZES, Sample, Size, zipf_sample
from benchmarks.planner.many_ranks import LARGE, TOKENS_PER_RANK, TOP_K, Large, large_rows
from benchmarks.planner.moves import moves_rows
from benchmarks.planner.peer_eplb import PEER, Rebalance, even_max_over_mean, load_peer, peer_layouts
from benchmarks.planner.scored_layers import Contender
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.layouts import plan_layout
from moesys.config import Eplb, EvenSplit, FlowSplit, Greedy, Laer, Last
from moesys.lab.runs.stopwatch import machine_line, repeated_ms
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told

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

    num_experts: Annotated[int, Column("experts")]
    num_ranks: Annotated[int, Column("ranks")]
    exponent: Annotated[float, Column("Zipf", ".1f")]
    contender: Annotated[str, Column("planner + split")]
    layout_ms: Annotated[float, Column("layout ms", ".3f")]
    split_ms: Annotated[float | None, Column("split ms", ".3f")]
    max_over_mean: Annotated[float, Column("max/mean", ".4f")]
    worst: Annotated[float, Column("worst", ".4f")]
    gap: Annotated[float | None, Column("gap %", ".2f", 100)]
    duplicates: Annotated[int, Column("duplicates")]
    inter_node_share: Annotated[float | None, Column("inter-node %", ".1f", 100)]
    next_sample: Annotated[float, Column("next sample", ".4f")]
    noisy: Annotated[float, Column("15 % noise", ".4f")]


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
        layout_ms += repeated_ms(partial(plan_layout, sample.exact, cluster, contender.balance, size.slots), repeats)
        split_ms += repeated_ms(partial(contender.split_over, sample.exact, layout, cluster, 0), repeats)
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
        times_ms += repeated_ms(partial(peer, *arguments), repeats)
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
    machine = machine_line(1, PACKAGES)
    notes = [
        f"{machine}; {TOKENS_PER_RANK} tokens a rank, top-{TOP_K}, nodes of 8; {num_seeds} seeds",
        f"ms: medians of {repeats} calls a seed, after one of warm-up. gap: over the min-cut bound of the layout.",
        "even: over the replicas on the source's node, if it has any; EPLB's: over all replicas alike.",
        "next sample, 15 % noise: the same layout on loads drawn again, and drawn under log-normal noise.",
    ]
    moves_notes = ["before, after: max/mean of the best split of the later load over either layout."]
    sheets = [
        Sheet("MEASURED: planners on known loads, one redundant slot a rank", rows, notes, group_by="exponent"),
        Sheet("MEASURED: planning again from the layout in force", moves, moves_notes, group_by="num_experts"),
        Sheet("MEASURED: many ranks, many layers", large),
    ]
    data = {"machine": machine, "sizes": rows, "moves": moves, "large": large}
    publish(Report("planner scale", "Planners over sizes", "measured", sheets, data=data), json_path=json_path)
    return 0
