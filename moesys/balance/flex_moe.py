"""FlexMoE: a few expand and shrink moves a plan, from the layout in force (arXiv 2304.03946)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import numpy as np
from pydantic import Field

from moesys.balance.planning_problem import PlanningProblem, common_shares, layout_from_rows
from moesys.balance.static import Static
from moesys.config.member import Balance, unfit_moves
from moesys.layout import ExpertLayout


class FlexMoe(Balance):
    """FlexMoE (arXiv 2304.03946) as a baseline: a few expand and shrink moves from the layout in force."""

    kind: Literal["flex_moe"] = "flex_moe"
    max_moves: int = Field(10, ge=0, description="replicas that change from one plan to the next")

    def unfit_for_lag_0(self) -> str:
        return unfit_moves(self, self.max_moves)

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Makes at most ``max_moves`` moves from the layout in force, or from ``Static``'s where there is none.

        A move gives an expert one replica more, on a rank that does not hold it yet: in a free slot where there is one,
        else in place of a replica of another expert, that with the fewest tokens a replica of those that have more than
        one and one on such a rank. Of these ranks it takes that after which the busiest rank has least, at a tie the
        idlest most. A move is accepted if the busiest rank falls, or at an equal one the ratio of busiest to idlest.
        Experts are tried from the most tokens a replica down; the first accepted move is made, and where there is none
        the plan ends.

        What is known of the original: replicas expand and shrink step by step while an estimate improves; and of its
        re-implementation for the evaluation of LAER-MoE (arXiv 2602.11686): at most 10 moves a plan, accepted if the
        maximum load or the ratio of maximum to minimum improves. Our reading: those two in that order, on an even split
        over replicas; the pairing of expand with shrink; the next expert where one's move is refused; the choice of the
        rank; ties by lowest index. It knows no nodes and no links. Loads are compared exactly.
        """
        load, slots_R = problem.load, problem.slots_R
        start = problem.layout or Static().layout(problem)
        rows = [list(start.experts_of(rank)) for rank in range(start.num_ranks)]
        tokens_E = load.tokens_E.tolist()
        for _ in range(self.max_moves):
            replicas_E = np.bincount(list(chain.from_iterable(rows)), minlength=load.num_experts).tolist()
            share_E = common_shares(tokens_E, replicas_E)
            hottest_first = sorted(range(load.num_experts), key=lambda expert: -share_E[expert])
            if not any(_expanded(expert, rows, tokens_E, replicas_E, share_E, slots_R) for expert in hottest_first):
                break
        return layout_from_rows(rows, slots_R, load.num_experts)


def _expanded(
    hot: int,
    rows: list[list[int]],
    tokens_E: Sequence[int],
    replicas_E: Sequence[int],
    share_E: Sequence[int],
    slots_R: Sequence[int],
) -> bool:
    """Adds a replica of ``hot`` to ``rows``, the experts of each rank, and returns True, if the move is accepted."""
    without = [rank for rank, slots in enumerate(slots_R) if slots and hot not in rows[rank]]
    cold, ranks = None, [rank for rank in without if len(rows[rank]) < slots_R[rank]]
    if not ranks:
        spare = {expert for rank in without for expert in rows[rank] if replicas_E[expert] > 1}
        cold = min(spare, key=lambda expert: (share_E[expert], expert), default=None)
        ranks = [rank for rank in without if cold in rows[rank]]
    if not ranks:
        return False

    after_E = list(replicas_E)
    after_E[hot] += 1
    if cold is not None:
        after_E[cold] -= 1
    # one factor for both, so that loads before and after compare
    both = common_shares([*tokens_E, *tokens_E], [*replicas_E, *after_E])
    old_E, new_E = both[: len(tokens_E)], both[len(tokens_E) :]
    kept = _loads(rows, new_E)
    gain = new_E[hot] - (0 if cold is None else new_E[cold])

    def measure(loads: Sequence[int]) -> tuple[int, int]:
        used = [tokens for tokens, slots in zip(loads, slots_R, strict=True) if slots]
        return max(used), -min(used)

    def measure_on(rank: int) -> tuple[int, int]:
        return measure([tokens + gain * (other == rank) for other, tokens in enumerate(kept)])

    best = min(ranks, key=lambda rank: (measure_on(rank), rank))
    if measure_on(best) >= measure(_loads(rows, old_E)):
        return False
    if cold is None:
        rows[best].append(hot)
    else:
        rows[best][rows[best].index(cold)] = hot
    return True


def _loads(rows: Sequence[Sequence[int]], share_E: Sequence[int]) -> list[int]:
    """Returns the load of each rank, [R], in the unit of ``share_E``."""
    return [sum(share_E[expert] for expert in row) for row in rows]
