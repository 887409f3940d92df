"""Says why a strategy would not run on a cluster, whatever the cost model makes of it: pure functions of what is
declared and of plans. "" and () say that nothing is known to stand in the way.

A MegaKernel reads and writes its peers' memory, as the fastest links let it (``kernels.symmetric.heap``): it reaches
the ranks of one domain. Nodes of NICs that could do the same are not what its kernels are written for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from moesys.config import ClusterSpec, MegaKernel, ModelShape, Strategy
from moesys.overlap.rows_cap import too_many_rows
from moesys.rank_memory import rank_memory

if TYPE_CHECKING:
    from moesys.step import LayerPlan, StepPlan


def out_of_reach(strategy: Strategy, cluster: ClusterSpec) -> str:
    """Of a MegaKernel on several domains."""
    domains = len(cluster.domain_sizes)
    if domains == 1 or not isinstance(strategy.overlap, MegaKernel):
        return ""
    return (
        f"overlap=MegaKernel() reaches the ranks of one domain of the fastest links, and the {cluster.num_ranks} ranks "
        f"are in {domains}; use Sequential() or Pipelined(), or ranks_per_domain={cluster.num_ranks} where NVLink "
        "joins them all"
    )


def out_of_memory(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    num_layers: int,
    tokens_per_rank: int,
    *,
    recompute: bool = False,
) -> str:
    """Of a rank that holds more than ``cluster.memory_gb`` by ``rank_memory``, which counts at least what there is."""
    if cluster.memory_gb is None:
        return ""
    needed_gb = rank_memory(strategy, model, cluster, num_layers, tokens_per_rank, recompute=recompute).gb
    if needed_gb <= cluster.memory_gb:
        return ""
    return f"a rank holds {needed_gb:.2f} GB at least, of {num_layers} layers, and has {cluster.memory_gb:g}"


def out_of_rows(strategy: Strategy, model: ModelShape, plans: Iterable[LayerPlan]) -> str:
    """Of the first plan that has too many rows or tokens for a rank of a MegaKernel."""
    overlap = strategy.overlap
    if not isinstance(overlap, MegaKernel):
        return ""
    # Here, as a typo in a space is told before planners are there.
    from moesys.step import plans_on_device

    declared = overlap.most_tokens if plans_on_device(strategy) else None
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
    """All reasons against a step of these plans. ``num_layers``: of the whole model, whose memory counts; None: those
    that are planned. ``recompute``: only one layer's rows are kept for backward.
    """
    return tuple(reason for reason in _reasons(micro_batches, num_layers, recompute) if reason)


def _reasons(micro_batches: Sequence[StepPlan], num_layers: int | None, recompute: bool) -> Iterator[str]:
    first = micro_batches[0]
    strategy, model, cluster = first.strategy, first.model, first.cluster
    plans = [plan for step in micro_batches for plan in step.layers]
    tokens_per_rank = max(plan.load.total for plan in plans) // (model.top_k * cluster.num_ranks)
    layers = num_layers or len(first.layers)
    yield out_of_reach(strategy, cluster)
    yield out_of_rows(strategy, model, plans)
    yield out_of_memory(strategy, model, cluster, layers, tokens_per_rank, recompute=recompute)
