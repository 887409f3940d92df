"""Planners on many ranks and many layers: time, and the memory that planning takes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from benchmarks.planner.peer_eplb import PEER, even_max_over_mean, load_peer, peer_layouts
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.layouts import plan_layouts
from moesys.config import ClusterSpec, Greedy
from moesys.config.workload import Generated
from moesys.lab.runs.stopwatch import Work, repeated_ms
from moesys.lab.show.sheets import Column
from moesys.lab.show.steps import steps_told
from moesys.load import LoadMatrix
from moesys.traces import generate

OURS = {"greedy": Greedy(), "greedy, effort 0": Greedy(effort=0)}
# Layers are planned side by side.
THREADS = 2
TOKENS_PER_RANK, TOP_K = 8192, 8
# EPLB's own code takes minutes for one plan on 1024 ranks.
MOST_PEER_RANKS = 256


@dataclass(frozen=True)
class LargeRow:
    """One planner on many ranks or layers: all layers' time, the median over repeats, and the peak of memory that
    planning added in a process of its own (None where the system does not tell). max_over_mean: the mean over layers,
    as ``FlowSplit`` reaches it for ours, and an even split for EPLB's own code.
    """

    case: Annotated[str, Column("case")]
    contender: Annotated[str, Column("planner")]
    layout_ms: Annotated[float, Column("layout ms", ".1f")]
    peak_mib: Annotated[float | None, Column("peak MiB", ".1f")]
    max_over_mean: Annotated[float, Column("max/mean", ".4f")]
    worst: Annotated[float, Column("worst layer", ".4f")]


@dataclass(frozen=True)
class Large:
    """Loads of some layers, a pure function of ``seed``; ``uniform``: counts of 0 to 999, as LAER-MoE times its own."""

    name: str
    num_layers: int
    num_experts: int
    num_ranks: int
    slots: int
    uniform: bool
    seed: int = 0

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec(num_nodes=self.num_ranks // 8, ranks_per_node=8)

    def loads(self) -> list[LoadMatrix]:
        if self.uniform:
            rng = np.random.Generator(np.random.Philox(self.seed))
            shape = (self.num_layers, self.num_ranks, self.num_experts)
            return [LoadMatrix(tokens_RE) for tokens_RE in rng.integers(0, 1000, shape)]
        drawn = Generated(skew=1.0, num_layers=self.num_layers, warmup=0, steps=1, tokens_per_rank=TOKENS_PER_RANK)
        trace = generate(drawn, self.num_ranks, self.num_experts, TOP_K, self.seed)
        return [LoadMatrix(tokens_RE) for tokens_RE in trace.tokens_SLRE[0]]


LARGE = (
    Large("1024 ranks, 32 experts x 16 slots", 1, 32, 1024, 16, uniform=True),
    Large("1024 ranks, 256 experts x 2 slots", 1, 256, 1024, 2, uniform=True),
    Large("32 ranks, 58 layers, 256 experts x 9 slots", 58, 256, 32, 9, uniform=False),
)


def large_rows(cases: Sequence[Large] = LARGE, *, repeats: int = 5, peer: Path | None = None) -> list[LargeRow]:
    """Each in a process of its own, whose peak of memory is that of planning."""
    rows = []
    spawn = multiprocessing.get_context("spawn")
    runs: list[tuple[Large, str, Path | None]] = [(case, ours, None) for case in cases for ours in OURS]
    runs += [(case, PEER, peer) for case in cases if peer and case.num_ranks <= MOST_PEER_RANKS]
    with steps_told("large", len(runs)) as tell:
        for case, contender, path in sorted(runs, key=lambda run: cases.index(run[0])):
            tell(f"{case.name}, {contender}")
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                rows.append(pool.submit(measure_large, case, repeats, contender, path).result())
    return rows


def measure_large(case: Large, repeats: int, contender: str, peer: Path | None = None) -> LargeRow:
    """In this process: one of ``OURS``, or EPLB's own code. One repetition of warm-up is left out."""
    loads, cluster = case.loads(), case.cluster
    small = LoadMatrix(np.ones((8, 16), dtype=np.int64))
    plan_layouts([small], ClusterSpec(ranks_per_node=8), Greedy(), 3)
    rebalance = load_peer(peer) if peer else None
    loads_LE = torch.from_numpy(np.stack([load.tokens_E for load in loads]))
    before_mib = _memory_mib("VmRSS")
    if rebalance:
        plan: Work = partial(rebalance, loads_LE, case.slots * case.num_ranks, 1, 1, case.num_ranks)
    else:
        plan = partial(plan_layouts, loads, cluster, OURS[contender], case.slots, threads=THREADS)
    times_ms = repeated_ms(plan, repeats)
    peak_mib = _memory_mib("VmHWM")
    if rebalance:
        layouts = peer_layouts(rebalance, loads_LE, case.num_ranks, case.slots)
        found = [even_max_over_mean(load.tokens_E, layout) for load, layout in zip(loads, layouts, strict=True)]
    else:
        layouts = plan_layouts(loads, cluster, OURS[contender], case.slots, threads=THREADS)
        found = [
            min_max_load(load, layout) * case.num_ranks / load.total
            for load, layout in zip(loads, layouts, strict=True)
        ]
    return LargeRow(
        case=case.name,
        contender=contender,
        layout_ms=float(np.median(times_ms)),
        peak_mib=None if before_mib is None or peak_mib is None else max(0.0, peak_mib - before_mib),
        max_over_mean=float(np.mean(found)),
        worst=max(found),
    )


def _memory_mib(field: str) -> float | None:
    """Linux's figure for this process; its VmHWM, unlike getrusage's, does not begin at the parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith(f"{field}:")), None)
    return None if kib is None else int(kib) / 1024
