"""Says whether a plan keeps to ``MegaKernel.rows_cap``: the rule and its words, for those who run a plan and those who
only look at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moesys.config import MegaKernel
from moesys.layout import TokenPlan


def too_many_rows(
    overlap: MegaKernel, plan: TokenPlan, most_tokens: int, top_k: int, members: Sequence[int] | None = None
) -> str:
    """Which rank would get more rows than ``rows_cap`` times the ``most_tokens`` · K choices of any rank, or "".
    ``members``: the ranks of the plan, as they are to be named; by default as the plan numbers them.
    """
    choices, rank = most_tokens * top_k, int(plan.tokens_R.argmax())
    num_rows = int(plan.tokens_R[rank])
    if num_rows <= overlap.rows_cap * choices:
        return ""
    rank = rank if members is None else members[rank]
    return too_many_words(rank, num_rows, choices, f"rows_cap={overlap.rows_cap:g} times {choices} choices of a rank")


def too_many_words(rank: int, num_rows: int, choices: int, bound: str) -> str:
    """Which ``rank`` would get how many rows, of whose ``bound`` so many ``choices`` were the measure."""
    # Rounded up, so that what is named is enough.
    hundredths = math.ceil(100 * num_rows / choices)
    # In floats 1.13 times 100 is less than 113.
    enough = (hundredths + (hundredths / 100 * choices < num_rows)) / 100
    return (
        f"rank {rank} would get {num_rows} rows, more than {bound}; "
        f"use MegaKernel(rows_cap={enough:g}), or a balance or split that loads ranks more evenly"
    )
