"""CpSat: the joint placement and split of a small instance, by OR-Tools CP-SAT, begun from Greedy's layout."""

from __future__ import annotations

import numpy as np

from moesys.balance.flow_split import least_loaded_quotas
from moesys.balance.greedy import greedy_layout
from moesys.balance.max_load import min_max_load
from moesys.balance.replicas import layout_from_rows, usable_slots
from moesys.config import ClusterSpec, Greedy
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix

LARGEST_INSTANCE = 256
RANDOM_SEED = 1


def cp_sat_layout(
    load: LoadMatrix,
    cluster: ClusterSpec,
    slots_R: tuple[int, ...],
    deterministic_time: float,
    previous: ExpertLayout | None,
) -> ExpertLayout:
    """The layout with the least ``min_max_load`` that CP-SAT finds in its time; Greedy's, unless one is truly better.

    y[r, e] says that rank r holds expert e, x[r, e] how many of its tokens it gets:

        minimise the busiest rank's load, with  Σ_r x[r, e] = tokens of e,  x[r, e] <= tokens of e · y[r, e],
        Σ_e y[r, e] = usable slots of r,  Σ_r y[r, e] >= 1.

    One worker, a fixed seed and a limit in deterministic seconds give the same layout in every run. Raises ValueError
    where ranks × experts exceed 256, for there the search seldom finds more than Greedy did.
    """
    num_ranks, num_experts = load.num_ranks, load.num_experts
    if num_ranks * num_experts > LARGEST_INSTANCE:
        raise ValueError(
            f"balance=CpSat() plans {num_ranks} ranks × {num_experts} experts = {num_ranks * num_experts} placements, "
            f"more than {LARGEST_INSTANCE}; use balance=Greedy()"
        )
    start = greedy_layout(load, cluster, slots_R, Greedy().search_moves, previous)
    usable_R = usable_slots(slots_R, num_experts)
    start_max, mean = min_max_load(load, start), -(-load.total // sum(slots > 0 for slots in usable_R))
    if start_max == mean:
        return start

    # imported here because it brings pandas along, which no other planner needs
    from ortools.sat.python import cp_model

    tokens_E = load.tokens_E.tolist()
    model = cp_model.CpModel()
    holds = [[model.new_bool_var(f"y[{r},{e}]") for e in range(num_experts)] for r in range(num_ranks)]
    tokens = [[model.new_int_var(0, tokens_E[e], f"x[{r},{e}]") for e in range(num_experts)] for r in range(num_ranks)]
    busiest = model.new_int_var(mean, start_max, "busiest")
    for expert in range(num_experts):
        model.add_bool_or(holds[rank][expert] for rank in range(num_ranks))
        model.add(sum(tokens[rank][expert] for rank in range(num_ranks)) == tokens_E[expert])
    for rank in range(num_ranks):
        model.add(sum(holds[rank]) == usable_R[rank])
        model.add(sum(tokens[rank]) <= busiest)
        for expert in range(num_experts):
            model.add(tokens[rank][expert] <= tokens_E[expert] * holds[rank][expert])
    model.minimize(busiest)
    quota_RE = least_loaded_quotas(load, start, cluster.node_of_rank)
    for rank, expert in np.ndindex(num_ranks, num_experts):
        model.add_hint(holds[rank][expert], int(start.replicas_RE[rank, expert]))
        model.add_hint(tokens[rank][expert], int(quota_RE[rank, expert]))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = RANDOM_SEED
    solver.parameters.max_deterministic_time = deterministic_time
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    rows = [[e for e in range(num_experts) if solver.boolean_value(holds[r][e])] for r in range(num_ranks)]
    found = layout_from_rows(rows, slots_R, num_experts)
    return found if min_max_load(load, found) < start_max else start
