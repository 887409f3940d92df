"""Says why plans would not run on a cluster, whatever the cost model makes of them. "" and () mean that no reason is
known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from moesys.balance.plan import LayerPlan, StepPlan
from moesys.config import MegaKernel, ModelShape, Strategy
from moesys.layout import TokenPlan
from moesys.limits import out_of_memory


def too_many_rows(
    overlap: MegaKernel, plan: TokenPlan, most_tokens: int, top_k: int, members: Sequence[int] | None = None
) -> str:
    """Returns which rank would get more rows than ``rows_cap`` times ``most_tokens`` · K choices of a rank, or "".

    ``members``: the ranks of the plan as errors name them; by default as the plan numbers them.
    """
    choices, rank = most_tokens * top_k, int(plan.tokens_R.argmax())
    num_rows = int(plan.tokens_R[rank])
    if num_rows <= overlap.rows_cap * choices:
        return ""
    rank = rank if members is None else members[rank]
    return too_many_words(rank, num_rows, choices, f"rows_cap={overlap.rows_cap:g} times {choices} choices of a rank")


def too_many_words(rank: int, num_rows: int, choices: int, bound: str) -> str:
    """Returns that ``rank`` would get ``num_rows`` rows, more than ``bound``, and the ``rows_cap`` that is enough."""
    # Rounded up, so that what is named is enough.
    hundredths = math.ceil(100 * num_rows / choices)
    # In floats 1.13 times 100 is less than 113.
    enough = (hundredths + (hundredths / 100 * choices < num_rows)) / 100
    return (
        f"rank {rank} would get {num_rows} rows, more than {bound}; "
        f"use MegaKernel(rows_cap={enough:g}), or a balance or split that loads ranks more evenly"
    )


def out_of_rows(strategy: Strategy, model: ModelShape, plans: Iterable[LayerPlan]) -> str:
    """Returns why the first plan with too many rows or tokens for a rank of a MegaKernel cannot run, or ""."""
    overlap = strategy.overlap
    if not overlap.reaches_memory:
        return ""
    declared = overlap.most_tokens if strategy.plans_on_device else None
    for plan in plans:
        most_tokens = int(plan.load.tokens_RE.sum(axis=1).max()) // model.top_k
        if declared is not None and most_tokens > declared:
            return (
                f"{most_tokens} tokens of a rank, but most_tokens={declared}; use MegaKernel(most_tokens={most_tokens})"
            )
        most_tokens = most_tokens if declared is None else declared
        if words := too_many_rows(overlap, plan.tokens, most_tokens, model.top_k):
            return words
    return ""


def why_not(
    micro_batches: Sequence[StepPlan], *, num_layers: int | None = None, recompute: bool = False
) -> tuple[str, ...]:
    """Returns all reasons why a step of these plans cannot run. ``num_layers``: the layers of the whole model, whose
    memory counts; None: those that are planned. ``recompute``: only one layer's rows are kept for backward.
    """
    return tuple(reason for reason in _reasons(micro_batches, num_layers, recompute) if reason)


def _reasons(micro_batches: Sequence[StepPlan], num_layers: int | None, recompute: bool) -> Iterator[str]:
    first = micro_batches[0]
    strategy, model, cluster = first.strategy, first.model, first.cluster
    plans = [plan for step in micro_batches for plan in step.layers]
    tokens_per_rank = max(plan.load.total for plan in plans) // (model.top_k * cluster.num_ranks)
    layers = num_layers or len(first.layers)
    yield strategy.overlap.out_of_reach(cluster)
    yield out_of_rows(strategy, model, plans)
    yield out_of_memory(strategy, model, cluster, layers, tokens_per_rank, recompute=recompute)
