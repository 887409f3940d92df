"""LAER-MoE's planner-time figure: its planner here and ours, beside what its authors published of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from moesys.balance import plan_layout
from moesys.bench.harness.stopwatch import interleave
from moesys.bench.laer.published import PLANNER_MS
from moesys.config import Balance, ClusterSpec, Greedy, Laer
from moesys.load import LoadMatrix

NUM_EXPERTS, MOST_TOKENS, RANKS_PER_NODE = 32, 1_000, 8
PLANNERS: dict[str, Balance] = {"laer": Laer(), "greedy": Greedy(), "greedy, effort 0": Greedy(effort=0)}
# Scoring its candidates in exact fractions takes minutes for 1,024 ranks.
MOST_LAER_RANKS = 64


@dataclass(frozen=True)
class PlannerTime:
    """Medians in milliseconds for one size of the figure; ``published_ms`` on its authors' machine."""

    num_ranks: int
    slots: int
    published_ms: float
    measured_ms: dict[str, float]


def planner_times(
    repeats: int = 3, most_ranks: int = 1024, tell: Callable[[str], None] | None = None
) -> list[PlannerTime]:
    """All sizes up to ``most_ranks``, on loads as the figure's: whole numbers below 1,000, all as likely."""
    found = []
    for (num_ranks, slots), published_ms in sorted(PLANNER_MS.items()):
        if num_ranks > most_ranks:
            continue
        if tell:
            tell(f"planners, {num_ranks} ranks of {slots} slots")
        cluster = ClusterSpec(num_nodes=num_ranks // RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE)
        rng = np.random.default_rng(num_ranks + slots)
        load = LoadMatrix(rng.integers(0, MOST_TOKENS, (num_ranks, NUM_EXPERTS)))
        calls: dict[str, Callable[[], object]] = {
            name: partial(plan_layout, load, cluster, config, slots)
            for name, config in PLANNERS.items()
            if name != "laer" or num_ranks <= MOST_LAER_RANKS
        }
        times = {name: float(np.median(of)) for name, of in interleave(calls, repeats).items()}
        found.append(PlannerTime(num_ranks, slots, published_ms, times))
    return found
