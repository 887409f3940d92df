"""Repair: few replicas, each of which lowers what ranks filled to the mean have no room for."""

from itertools import product

import numpy as np
import pytest
from balance_cases import instances
from hypothesis import assume, given
from hypothesis import strategies as st

from moesys.balance.eplb import Eplb
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_flow, min_max_load, new_flow
from moesys.balance.flow.token_routes import list_replicas
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.greedy.local_search import MoveConstraints, climbed, local_search, neighbour
from moesys.balance.greedy.numbering import num_moves
from moesys.balance.greedy.robust_cost import NO_LIMIT
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.balance.static import Static
from moesys.config import ClusterSpec
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import LoadMatrix

# 256 experts on 8 nodes of 8, one redundant slot per rank.
LARGE, LARGE_SLOTS = ClusterSpec(num_nodes=8, ranks_per_node=8), 5


def zipf_loads(exponent, seed):
    """Returns two loads of 8,192 top-8 tokens per rank under Zipf popularity in shuffled order; the popularity of
    the second one is disturbed by log-normal noise of 15 %.
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 256, 64))))
    share_E = np.arange(1, 257) ** -exponent
    rng.shuffle(share_E)
    noisy_E = share_E * np.exp(0.15 * rng.standard_normal(256))
    exact, _, noisy = (
        LoadMatrix(rng.multinomial(65_536, popularity_E / popularity_E.sum(), size=64))
        for popularity_E in (share_E, share_E, noisy_E)
    )
    return exact, noisy


def overflow_of(tokens_E, expert_RS):
    table = list_replicas(expert_RS, len(tokens_E))
    flow = new_flow(table)
    min_max_flow(tokens_E, table, flow)
    return int(flow.overflow[0])


@given(
    instance=instances(max_ranks=8, max_experts=14),
    budget=st.integers(0, 6),
    least=st.integers(1, 2),
    by_node=st.booleans(),
)
def test_every_move_lowers_the_overflow_within_the_constraints(instance, budget, least, by_node):
    tokens_E, num_experts = instance.load.tokens_E, instance.load.num_experts
    before = plan_layout(instance.load, instance.cluster, Static(), instance.slots)
    assume(before.num_duplicates == 0)
    # a copy, as the loop would be compiled anew for what is read-only
    filled_R = before.filled_R.copy()
    node_R = np.array(instance.cluster.node_of_rank)
    group_R = node_R if by_node else np.zeros_like(node_R)
    expert_RS, least_replicas_E = before.expert_RS.copy(), np.minimum(before.replicas_RE.sum(axis=0), least)
    overflow = overflow_of(tokens_E, expert_RS)
    for _ in range(budget):
        earlier_RS = expert_RS.copy()
        moves = local_search(tokens_E, MoveConstraints(filled_R, group_R, least), True, expert_RS, 10**6, 1, 0)
        now = ExpertLayout(expert_RS, num_experts)
        assert moves == num_moves(ExpertLayout(earlier_RS, num_experts).replicas_RE, now.replicas_RE) <= 1
        assert now.num_duplicates == 0
        assert (now.filled_R == filled_R).all()
        assert (now.replicas_RE.sum(axis=0) >= least_replicas_E).all()
        for group in range(group_R.max() + 1):
            held = (before.replicas_RE[group_R == group].sum(axis=0) > 0).tolist()
            assert (now.replicas_RE[group_R == group].sum(axis=0) > 0).tolist() == held
        later = overflow_of(tokens_E, expert_RS)
        assert later < overflow if moves else later == overflow
        overflow = later
    at_once_RS = before.expert_RS.copy()
    local_search(tokens_E, MoveConstraints(filled_R, group_R, least), True, at_once_RS, 10**6, budget, 0)
    np.testing.assert_array_equal(at_once_RS, expert_RS)


def test_a_replica_goes_to_the_rank_that_has_room():
    """Expert 0 has three times the mean of a rank, and rank 2 one fourth of it; expert 2 can spare a replica."""
    tokens_E = np.array([300, 25, 50, 25])
    expert_RS = np.array([[0, 1], [0, 3], [2, 1], [2, 0]])
    constraints = MoveConstraints(np.full(4, 2), np.zeros(4, np.int64), 1)
    assert overflow_of(tokens_E, expert_RS) > 0
    assert local_search(tokens_E, constraints, True, expert_RS, 10**6, NO_LIMIT, 0) == 1
    assert overflow_of(tokens_E, expert_RS) == 0
    assert 0 in expert_RS[2]
    assert (expert_RS != EMPTY).all()


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_a_few_moves_make_a_layout_fit_a_later_load(exponent):
    """At most 15 % of the replicas that EPLB moves, for 0.5 % of balance; and without a budget at most 60 %."""
    moves, of_eplb, worst = [], [], []
    for seed in range(3):
        exact, noisy = zipf_loads(exponent, seed)
        before, eplb = (plan_layout(exact, LARGE, kind, LARGE_SLOTS) for kind in (Greedy(), Eplb()))
        eplb_later = plan_layout(noisy, LARGE, Eplb(), LARGE_SLOTS)
        of_eplb.append(num_moves(eplb.replicas_RE, eplb_later.replicas_RE))
        budget = int(0.15 * of_eplb[-1])
        few = plan_layout(noisy, LARGE, Greedy(max_moves=budget, effort=8), LARGE_SLOTS, previous=before)
        assert num_moves(before.replicas_RE, few.replicas_RE) <= budget
        worst.append(min_max_load(noisy, few) * LARGE.num_ranks / noisy.total)
        free = plan_layout(noisy, LARGE, Greedy(), LARGE_SLOTS, previous=before)
        moves.append(num_moves(before.replicas_RE, free.replicas_RE))
    assert max(worst) <= 1.005
    assert sum(moves) <= 0.6 * sum(of_eplb)


def test_a_plan_near_the_layout_in_force_keeps_whole_experts():
    """On a cluster of one node the load is the same, so nothing has a reason to move."""
    exact, _ = zipf_loads(1.0, 0)
    cluster = ClusterSpec(ranks_per_node=64)
    first = plan_layout(exact, cluster, Greedy(), LARGE_SLOTS)
    second = plan_layout(exact, cluster, Greedy(), LARGE_SLOTS, previous=first)
    alone_E = first.replicas_RE.sum(axis=0) == 1
    stay = (first.replicas_RE[:, alone_E] == second.replicas_RE[:, alone_E]).all(axis=0)
    assert stay.mean() > 0.8


def test_promised_replicas_stay_where_they_are():
    """One replica too few in force: the new layout is the old one but for that, on whichever ranks it lies."""
    num_ranks, num_experts, cluster = 8, 12, ClusterSpec(ranks_per_node=8)
    load = LoadMatrix(np.tile(np.arange(num_experts, 0, -1) * 100, (num_ranks, 1)))
    first = plan_layout(load, cluster, Greedy(min_replicas=2), 4)
    rows_RS = np.roll(first.expert_RS, 1, axis=0).copy()
    expert = int(np.flatnonzero(first.replicas_RE.sum(axis=0) == 2)[0])
    rank = int(np.flatnonzero((rows_RS == expert).any(axis=1))[0])
    other = next(other for other in range(num_experts) if other not in rows_RS[rank])
    rows_RS[rank][rows_RS[rank] == expert] = other
    before = ExpertLayout(rows_RS, num_experts)
    after = plan_layout(load, cluster, Greedy(min_replicas=2), 4, previous=before)
    assert num_moves(before.replicas_RE, after.replicas_RE) <= 2


def test_more_budget_is_never_worse():
    load = LoadMatrix(
        [
            [383, 493, 394, 21],
            [930, 131, 591, 0],
            [622, 435, 648, 57],
            [500, 426, 656, 85],
            [12, 542, 281, 158],
            [185, 40, 475, 111],
        ]
    )
    before = ExpertLayout([[1, -1], [2, 3], [1, 2], [-1, -1], [0, -1], [2, -1]], 4)
    slots, cluster = (1, 2, 2, 0, 1, 1), ClusterSpec(ranks_per_node=6)
    busiest = [
        min_max_load(load, plan_layout(load, cluster, Greedy(max_moves=budget), slots, previous=before))
        for budget in range(4)
    ]
    assert busiest[1:] == [1704] * 3
    assert busiest[0] >= busiest[1]


def test_a_split_of_very_many_tokens_ends():
    num_ranks, tokens_RE = 12, np.zeros((12, 2), np.int64)
    tokens_RE[0, 0], tokens_RE[1, 1] = 2**56 - 2**52, 2**56 + 2**52
    load = LoadMatrix(tokens_RE)
    layout = ExpertLayout([[0]] + [[1]] * (num_ranks - 1), 2)
    plan = split_tokens(load, layout, ClusterSpec(ranks_per_node=num_ranks), FlowSplit())
    assert plan.tokens_R.max() == min_max_load(load, layout)


def test_a_deadline_ends_repair_too():
    exact, noisy = zipf_loads(1.5, 0)
    before = plan_layout(exact, LARGE, Greedy(), LARGE_SLOTS)
    late = Greedy(deadline_ms=1e-6, effort=100)
    after = plan_layout(noisy, LARGE, late, LARGE_SLOTS, previous=before)
    assert after.num_duplicates == 0


def test_moves_are_replicas_on_new_ranks():
    before = ExpertLayout([[0, 1], [2, 0]], num_experts=3)
    assert num_moves(before.replicas_RE, before.replicas_RE) == 0
    assert num_moves(before.replicas_RE, ExpertLayout([[1, 0], [0, 2]], num_experts=3).replicas_RE) == 0
    assert num_moves(before.replicas_RE, ExpertLayout([[2, 1], [0, 2]], num_experts=3).replicas_RE) == 1


@st.composite
def placed(draw):
    """(layout [R, S] in which all experts have a replica, usable slots of each rank, number of experts)."""
    slots_R = np.array(draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any)))
    num_experts = draw(st.integers(1, int(min(slots_R.sum(), 6))))
    expert_RS = np.full((len(slots_R), 4), EMPTY)
    for expert in range(num_experts):
        free = [rank for rank, slots in enumerate(slots_R) if (expert_RS[rank] != EMPTY).sum() < slots]
        rank = draw(st.sampled_from(free))
        expert_RS[rank, (expert_RS[rank] != EMPTY).sum()] = expert
    return expert_RS, slots_R, num_experts


@given(placed(), st.booleans(), st.integers(0, 10**6))
def test_a_neighbour_differs_in_one_slot_or_an_exchange(found, empties, draw):
    before_RS, slots_R, num_experts = found
    given_RS = before_RS.copy()
    after_RS = neighbour(before_RS, slots_R, num_experts, empties, draw)
    assert (before_RS == given_RS).all()
    assert (neighbour(before_RS, slots_R, num_experts, empties, draw) == after_RS).all()
    changed = np.argwhere(after_RS != before_RS)
    assert len(changed) <= 2
    if len(changed) == 2:
        one, other = map(tuple, changed)
        assert one[0] != other[0]
        assert (after_RS[one], after_RS[other]) == (before_RS[other], before_RS[one])
    for row_S, slots in zip(after_RS, slots_R, strict=True):
        experts = row_S[row_S != EMPTY]
        assert len(set(experts)) == len(experts)
        assert (row_S[slots:] == EMPTY).all()
    assert set(after_RS.ravel()) - {EMPTY} == set(range(num_experts))
    assert empties or (after_RS != EMPTY).sum() >= (before_RS != EMPTY).sum()


def test_every_neighbour_is_drawn_and_climbing_finds_the_cheapest_layout():
    start_RS, slots_R = np.array([[0, EMPTY], [1, 2]]), np.array([2, 2])

    def is_valid(layout):
        rows = [[expert for expert in row if expert != EMPTY] for row in layout]
        return {expert for row in rows for expert in row} == {0, 1, 2} and all(
            len(set(row)) == len(row) for row in rows
        )

    def is_near(layout):
        """This is true for one changed slot, and for the exchange of a slot between both ranks."""
        (a, b), (c, d) = layout
        exchanged = [((1, EMPTY), (0, 2)), ((2, EMPTY), (1, 0)), ((0, 1), (EMPTY, 2)), ((0, 2), (1, EMPTY))]
        return sum([a != 0, b != EMPTY, c != 1, d != 2]) == 1 or layout in exchanged

    rows = list(product(range(EMPTY, 3), repeat=2))
    layouts = list(filter(is_valid, product(rows, rows)))
    drawn = {tuple(map(tuple, neighbour(start_RS, slots_R, 3, True, draw).tolist())) for draw in range(400)}
    assert drawn - {((0, EMPTY), (1, 2))} == {layout for layout in layouts if is_near(layout)}
    weight_RS = np.array([[5, -3], [2, -1]])

    def cost(expert_RS, most):
        return int((np.asarray(expert_RS) * weight_RS).sum())

    assert climbed(start_RS, slots_R, 3, cost, range(0)) is start_RS
    least_RS = climbed(start_RS, slots_R, 3, cost, range(400))
    assert cost(least_RS, NO_LIMIT) == min(cost(layout, NO_LIMIT) for layout in layouts)
