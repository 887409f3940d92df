"""The problem that plan_layout is given: what it takes, of any size, and what it refuses and how."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from balance_cases import instances, layouts
from hypothesis import assume, given
from hypothesis import strategies as st

from moesys.balance.cp_sat import CpSat
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.laer import Laer
from moesys.balance.run_planner import plan_layout
from moesys.config import Balance, ClusterSpec
from moesys.layout import EMPTY
from moesys.load import LoadMatrix

# Balancers with quotas need slots for the experts of a rank (test_quotas.py), and CpSat takes seconds (test_cp_sat.py).
PLANNERS = [planner() for kind, planner in Balance.kinds().items() if not planner.has_quotas and kind != "cp_sat"]
PLANNERS += [Greedy(effort=0), Laer(candidates=("even",)), Laer(candidates=("proportional",))]


def flat_load(num_ranks, num_experts):
    return LoadMatrix(np.ones((num_ranks, num_experts), dtype=np.int64))


# --- any size


@pytest.mark.parametrize("config", PLANNERS, ids=repr)
@given(data=st.data(), instance=instances())
def test_planners_hold_every_expert_within_the_slots_whatever_was_before(config, data, instance):
    previous = data.draw(st.none() | layouts(instance))
    slots = instance.slots if previous is None else (previous.num_slots,) * instance.load.num_ranks
    layout = plan_layout(instance.load, instance.cluster, config, slots, previous=previous)
    assert set(layout.expert_RS.ravel()) - {EMPTY} == set(range(instance.load.num_experts))
    assert (layout.filled_R <= slots).all()
    assert layout.expert_RS.shape == (instance.cluster.num_ranks, max(slots))
    if config.kind in ("static", "greedy"):
        assert layout.num_duplicates == 0
        assert previous is not None or layout.filled_R.tolist() == [min(of, layout.num_experts) for of in slots]
    again = plan_layout(instance.load, instance.cluster, config, list(slots), previous=previous)
    assert again.expert_RS.tobytes() == layout.expert_RS.tobytes()


@pytest.mark.parametrize("config", PLANNERS, ids=repr)
@pytest.mark.parametrize(
    ("node_sizes", "slots", "num_experts"),
    [
        ((1,), 3, 3),
        ((1,), 9, 3),
        ((1, 1), 2, 3),
        ((2, 1), (0, 0, 7), 5),
        ((2, 1), (0, 5, 1), 5),
        ((2, 5, 1), 2, 13),
        ((4, 4), 3, 17),  # more experts than a node has slots
        ((13,), 1, 13),
    ],
)
def test_no_size_is_special(config, node_sizes, slots, num_experts):
    cluster = ClusterSpec(num_nodes=len(node_sizes), ranks_per_node=node_sizes)
    tokens_RE = np.arange(cluster.num_ranks * num_experts).reshape(cluster.num_ranks, num_experts) % 11
    layout = plan_layout(LoadMatrix(tokens_RE), cluster, config, slots)
    assert (layout.replicas_RE.sum(axis=0) >= 1).all()


# --- replicas of every expert, on distinct ranks of one place


@cache
def fits(num_experts, replicas, slots):
    """Whether so many experts find ``replicas`` distinct ranks each: every choice of ranks, expert by expert."""
    if not num_experts:
        return True
    return any(
        fits(num_experts - 1, replicas, tuple(sorted(left - (rank in chosen) for rank, left in enumerate(slots))))
        for chosen in combinations(range(len(slots)), replicas)
        if all(slots[rank] for rank in chosen)
    )


@given(
    slots=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    num_experts=st.integers(1, 6),
    replicas=st.integers(1, 4),
    place=st.sampled_from(["cluster", "node", "domain"]),
    config=st.sampled_from([Greedy(effort=0), CpSat(deterministic_time=1e-3)]),
    data=st.data(),
)
def test_exactly_what_cannot_be_is_refused(slots, num_experts, replicas, place, config, data):
    assume(sum(slots) >= num_experts)
    cut = data.draw(st.integers(1, len(slots)))
    sizes = [size for size in (cut, len(slots) - cut) if size]
    # nodes of one rank in domains of the drawn sizes, or the drawn nodes with a domain for each rank
    cluster = (
        ClusterSpec(num_nodes=len(slots), ranks_per_node=1, ranks_per_domain=tuple(sizes))
        if data.draw(st.booleans())
        else ClusterSpec(num_nodes=len(sizes), ranks_per_node=tuple(sizes), ranks_per_domain=1)
    )
    ends = np.cumsum({"cluster": (len(slots),), "node": cluster.node_sizes, "domain": cluster.domain_sizes}[place])
    places = [tuple(sorted(part.tolist())) for part in np.split(np.array(slots), ends[:-1])]
    room = sum(max(k for k in range(num_experts + 1) if fits(k, replicas, part)) for part in places)
    load = flat_load(len(slots), num_experts)
    asked = config.replace(min_replicas=replicas, replicas_within=place)
    if room < num_experts:
        with pytest.raises(ValueError, match=r"min_replicas=\d.*; (use|add)"):
            plan_layout(load, cluster, asked, slots)
        return
    assert plan_layout(load, cluster, asked, slots).num_experts == num_experts
