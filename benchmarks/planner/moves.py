"""What a new plan moves: layouts in force meet later loads, and planners plan again from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from benchmarks.planner.loads import Sample, Size, zipf_sample
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.relabelling import num_moves
from moesys.balance.layouts import plan_layout
from moesys.config import Balance, Eplb, Greedy
from moesys.lab.show.sheets import Column
from moesys.lab.show.steps import steps_told
from moesys.load import LoadMatrix

# The budget, of the replicas that EPLB moves, and the effort that goes into spending it well.
BUDGET_SHARE, BUDGET_EFFORT = 0.15, 8


@dataclass(frozen=True)
class MovesRow:
    """One planner's second plan. Means over seeds, but the median of times.

    moves: replicas that it brings to ranks that did not hold them. before, after: max/mean of the best split of the
    later load over the layout in force, and over the new one.
    """

    num_experts: Annotated[int, Column("experts")]
    num_ranks: Annotated[int, Column("ranks")]
    exponent: Annotated[float, Column("Zipf", ".1f")]
    later: Annotated[str, Column("later load")]
    contender: Annotated[str, Column("planner")]
    moves: Annotated[float, Column("moves", ".1f")]
    of_eplb: Annotated[float, Column("of eplb's %", ".0f", 100)]
    before: Annotated[float, Column("before", ".4f")]
    after: Annotated[float, Column("after", ".4f")]
    layout_ms: Annotated[float, Column("layout ms", ".1f")]


def moves_rows(sizes: Sequence[Size], exponents: Sequence[float], num_seeds: int) -> list[MovesRow]:
    """For loads drawn again and disturbed. ``Eplb`` does not look at what is in force."""
    rows: list[MovesRow] = []
    with steps_told("moves", len(sizes) * len(exponents)) as tell:
        for size in sizes:
            for exponent in exponents:
                tell(f"{size.num_experts} experts on {size.num_ranks} ranks, Zipf {exponent}")
                samples = [zipf_sample(size, exponent, seed) for seed in range(num_seeds)]
                for later in ("again", "noisy"):
                    rows += _rows_of(size, exponent, later, samples)
    return rows


def _rows_of(size: Size, exponent: float, later: str, samples: Sequence[Sample]) -> list[MovesRow]:
    found: dict[str, list[tuple[float, ...]]] = {}
    for sample in samples:
        load = getattr(sample, later)
        eplb_moves = 0.0
        contenders: list[tuple[str, Balance, Balance]] = [("eplb", Eplb(), Eplb()), ("greedy", Greedy(), Greedy())]
        for name, first, second in contenders:
            found.setdefault(name, []).append(_second_plan(size, sample.exact, load, first, second))
            eplb_moves = eplb_moves or found[name][-1][0]
        budget = Greedy(max_moves=int(BUDGET_SHARE * eplb_moves), effort=BUDGET_EFFORT)
        name = f"greedy, at most {BUDGET_SHARE:.0%} of eplb's moves"
        found.setdefault(name, []).append(_second_plan(size, sample.exact, load, Greedy(), budget))
    of_eplb = max(float(np.mean([moves for moves, *_ in found["eplb"]])), 1.0)
    label = "next sample" if later == "again" else "15 % noise"
    rows = []
    for name, plans in found.items():
        moves, before, after, _ = np.mean(plans, axis=0).tolist()
        layout_ms = float(np.median([plan[3] for plan in plans]))
        figures = moves, moves / of_eplb, before, after, layout_ms
        rows.append(MovesRow(size.num_experts, size.num_ranks, exponent, label, name, *figures))
    return rows


def _second_plan(
    size: Size, load: LoadMatrix, later: LoadMatrix, first: Balance, second: Balance
) -> tuple[float, float, float, float]:
    """Moves, max/mean before and after, and milliseconds."""
    before = plan_layout(load, size.cluster, first, size.slots)
    start = time.perf_counter()
    after = plan_layout(later, size.cluster, second, size.slots, previous=before)
    layout_ms = (time.perf_counter() - start) * 1e3
    moves = num_moves(before.replicas_RE, after.replicas_RE)
    mean = later.total / size.num_ranks
    return moves, min_max_load(later, before) / mean, min_max_load(later, after) / mean, layout_ms
