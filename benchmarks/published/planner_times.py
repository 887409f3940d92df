"""LAER-MoE's planner-time figure: its planner here and ours, beside what its authors published of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np

from benchmarks.published.laer_figures import PLANNER_MS
from moesys.balance.layouts import plan_layout
from moesys.config import Balance, ClusterSpec, Greedy, Laer
from moesys.lab.runs.stopwatch import interleave, machine_line, wall_ms
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
from moesys.load import LoadMatrix

NUM_EXPERTS, MOST_TOKENS, RANKS_PER_NODE = 32, 1_000, 8
PLANNERS: dict[str, Balance] = {"laer": Laer(), "greedy": Greedy(), "greedy, effort 0": Greedy(effort=0)}
# Scoring its candidates in exact fractions takes minutes for 1,024 ranks.
MOST_LAER_RANKS = 64


@dataclass(frozen=True)
class PlannerTime:
    """Medians in milliseconds for one size of the figure; ``published_ms`` on its authors' machine."""

    num_ranks: Annotated[int, Column("ranks")]
    slots: Annotated[int, Column("slots a rank")]
    published_ms: Annotated[float, Column("published", ".2f")]
    measured_ms: Annotated[Mapping[str, float], Column("{}", ".2f")]


def planner_times(repeats: int = 3, most_ranks: int = 1024) -> list[PlannerTime]:
    """All sizes up to ``most_ranks``, on loads as the figure's: whole numbers below 1,000, all as likely."""
    sizes = sorted(size for size in PLANNER_MS if size[0] <= most_ranks)
    found = []
    with steps_told("planners", len(sizes)) as tell:
        for num_ranks, slots in sizes:
            tell(f"planners, {num_ranks} ranks of {slots} slots")
            cluster = ClusterSpec(num_nodes=num_ranks // RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE)
            rng = np.random.default_rng(num_ranks + slots)
            load = LoadMatrix(rng.integers(0, MOST_TOKENS, (num_ranks, NUM_EXPERTS)))
            calls = {
                name: partial(wall_ms, partial(plan_layout, load, cluster, config, slots))
                for name, config in PLANNERS.items()
                if name != "laer" or num_ranks <= MOST_LAER_RANKS
            }
            times = {name: float(np.median(of)) for name, of in interleave(calls, repeats).items()}
            found.append(PlannerTime(num_ranks, slots, PLANNER_MS[num_ranks, slots], times))
    return found


def planner_sheet(times: list[PlannerTime]) -> Sheet:
    """Of all sizes."""
    notes = (
        f"{machine_line(1, ('numpy', 'numba'))}; medians, one call at a time.",
        "published: LAER-MoE's C++ planner on its authors' machine, which is not ours. laer: the same rule, in exact "
        f"arithmetic, timed up to {MOST_LAER_RANKS} ranks.",
    )
    title = "MEASURED: milliseconds of one layout for 32 experts, beside LAER-MoE's on other hardware"
    return Sheet(title, times, notes)
