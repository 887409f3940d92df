"""Loads, layouts, plans and certificates, for programs that call the planners themselves: ``ms.planning``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesys.balance.certificate import Certificate, certify
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.predictors import LoadHistory, measured_drift
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import ClusterSpec
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix

__all__ = [
    "Certificate",
    "ExpertLayout",
    "LayerPlan",
    "LoadHistory",
    "LoadMatrix",
    "PlanningProblem",
    "StepPlan",
    "TokenPlan",
    "certify",
    "measured_drift",
    "min_max_load",
    "plan_layer",
    "replica_budget",
    "split_tokens",
]


# A load and slots per rank in, the tokens of the busiest rank out.
Planner = Callable[[LoadMatrix, ClusterSpec, int], int]


def greedy_busiest(load: LoadMatrix, cluster: ClusterSpec, slots_per_rank: int) -> int:
    """Returns the tokens of the busiest rank under ``Greedy`` at its default effort and an exact split."""
    return min_max_load(load, plan_layout(load, cluster, Greedy(), slots_per_rank))


def replica_budget(
    loads: Sequence[LoadMatrix],
    cluster: ClusterSpec,
    total_slots: int,
    choices: Sequence[int],
    planner: Planner = greedy_busiest,
) -> tuple[int, ...]:
    """Returns the slots per rank of each layer, out of ``choices``, for which the busiest ranks of all layers have the
    fewest tokens in sum.

    ``loads``, one a layer, are what each layer is predicted to route; layers may differ in experts. ``total_slots``
    bounds the sum over layers of slots per rank × ranks. A choice that cannot hold a layer's experts is not offered to
    it. Of budgets with the least sum the one with the fewest slots is taken, and of these the one that gives the lower
    layers the fewest.

    A multiple-choice knapsack, solved exactly by dynamic programming over layers and slots per rank (CRAFT, arXiv
    2603.28768, plans replicas per layer by the same program). ``planner`` is called once a layer and choice.

    Raises ValueError when there is nothing to choose, or the slots cannot hold every layer's experts.
    """
    choices = sorted(set(choices))
    if not loads:
        raise ValueError("loads is empty; give one predicted load a layer")
    if not choices or choices[0] < 1:
        raise ValueError(f"choices={choices}; give slots per rank of at least 1 to choose from")
    fits_L = [[slots for slots in choices if slots * cluster.num_ranks >= load.num_experts] for load in loads]
    for layer, (load, fits) in enumerate(zip(loads, fits_L, strict=True)):
        if not fits:
            raise ValueError(
                f"choices={choices} gives layer {layer} at most {choices[-1] * cluster.num_ranks} slots on "
                f"{cluster.num_ranks} ranks for {load.num_experts} experts; "
                f"add the choice {-(-load.num_experts // cluster.num_ranks)}"
            )
    fewest = sum(fits[0] for fits in fits_L)
    if total_slots < fewest * cluster.num_ranks:
        raise ValueError(
            f"total_slots={total_slots} but the fewest slots of all {len(loads)} layers are "
            f"{fewest * cluster.num_ranks}; give at least so many, or smaller choices"
        )
    busiest_L = [[planner(load, cluster, slots) for slots in fits] for load, fits in zip(loads, fits_L, strict=True)]
    return _knapsack(fits_L, busiest_L, total_slots // cluster.num_ranks)


def _knapsack(slots_L: Sequence[Sequence[int]], cost_L: Sequence[Sequence[int]], most_slots: int) -> tuple[int, ...]:
    """Returns one of ``slots_L[layer]`` for each layer, at most ``most_slots`` in all, for the least sum of costs.

    Goes from the last layer to the first, so that ties can be settled for the lower layers: ``best[used]`` is the least
    (cost, slots of each layer from here on) that uses so many slots exactly. Equal costs and slots compare by the
    layers in order.
    """
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for slots, costs in zip(reversed(slots_L), reversed(cost_L), strict=True):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (cost, chosen) in best.items():
            for here, cost_here in zip(slots, costs, strict=True):
                if used + here <= most_slots:
                    candidate = cost + cost_here, (here, *chosen)
                    longer[used + here] = min(longer.get(used + here, candidate), candidate)
        best = longer
    _, _, chosen = min((cost, used, chosen) for used, (cost, chosen) in best.items())
    return chosen
