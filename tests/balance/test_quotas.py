"""Planners of the current counts against references written from their descriptions, and what their papers promise."""

from math import ceil

import numpy as np
import pytest
import quota_planners
from hypothesis import given
from hypothesis import strategies as st

from moesys.balance.faster_moe import FasterMoe
from moesys.balance.llep import Llep
from moesys.balance.moon_ep import MoonEp
from moesys.balance.plan import plan_layer
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.quotas import Quotas
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.balance.ultra_ep import UltraEp
from moesys.config import ClusterSpec, Ep, ModelShape, Strategy
from moesys.load import LoadMatrix


@st.composite
def problems(draw, spare=None):
    """Ranks in nodes, experts that need not divide by them, counts with ties and without, homes and sources without
    tokens. ``spare``: slots beyond those of experts at home, drawn by default.
    """
    node_sizes = draw(st.sampled_from([(1,), (2,), (4,), (2, 2), (1, 3), (2, 2, 2), (6,), (4, 4)]))
    R, E = sum(node_sizes), draw(st.integers(1, 16))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    match draw(st.sampled_from(["ties", "few", "skewed", "hot ranks"])):
        case "ties":
            drawn_RE = rng.choice([0, 5, 5, 20], (R, E))
        case "few":
            drawn_RE = rng.random((R, E)) < 0.1
        case "skewed":
            drawn_RE = rng.poisson(rng.lognormal(2, 1.5, E), (R, E))
        case _:
            drawn_RE = rng.integers(0, 9, (R, E)) * np.repeat(rng.choice([0, 1, 1, 50], R), -(-E // R))[:E]
    idle_R = draw(st.lists(st.booleans(), min_size=R, max_size=R))
    tokens_RE = [[0] * E if idle else row for idle, row in zip(idle_R, drawn_RE.astype(int).tolist(), strict=True)]
    home = quota_planners.homes(tokens_RE)
    spare = draw(st.integers(0, 4)) if spare is None else ceil(E / R) if spare == "homes" else spare
    slots = tuple(home.count(rank) + spare for rank in range(R))
    cluster = ClusterSpec(num_nodes=len(node_sizes), ranks_per_node=node_sizes)
    return PlanningProblem.of_layout(LoadMatrix(tokens_RE), cluster, slots)


def as_dict(plan):
    return {(source, expert, rank): tokens for source, expert, rank, tokens in plan.entries.tolist()}


def check_layout(problem, plan):
    """Homes come first and are never given up, and a copy is no duplicate."""
    home = quota_planners.homes(problem.load.tokens_RE.tolist())
    for rank in range(problem.load.num_ranks):
        held = plan.layout.experts_of(rank)
        at_home = [e for e in range(problem.load.num_experts) if home[e] == rank]
        assert list(held[: len(at_home)]) == at_home
        assert len(set(held)) == len(held) <= problem.slots_R[rank]


@given(problem=problems(spare="homes"))
def test_moon_ep(problem):
    plan = MoonEp().token_plan(problem)
    check_layout(problem, plan)
    assert as_dict(plan) == quota_planners.moon_ep(problem.load.tokens_RE.tolist())
    assert plan.tokens_R.max() - plan.tokens_R.min() <= 1
    home = quota_planners.homes(problem.load.tokens_RE.tolist())
    for rank in range(problem.load.num_ranks):
        assert len({home[e] for e in plan.layout.experts_of(rank)} - {rank}) <= 1


@given(
    problem=problems(),
    alpha=st.sampled_from([100, 110, 150]),
    min_tokens=st.sampled_from([1, 4, 1024]),
    skip=st.sampled_from([0, 130]),
)
def test_llep(problem, alpha, min_tokens, skip):
    plan = Llep(alpha=alpha / 100, min_tokens=min_tokens, skip_below=skip / 100).token_plan(problem)
    check_layout(problem, plan)
    tokens_RE = problem.load.tokens_RE.tolist()
    assert as_dict(plan) == quota_planners.llep(tokens_RE, alpha, min_tokens, skip, problem.slots_R)


@given(problem=problems(spare=12))
def test_llep_with_all_slots_keeps_its_cap(problem):
    plan = Llep(min_tokens=1, skip_below=0).token_plan(problem)
    R, total = problem.load.num_ranks, problem.load.total
    if total >= R:
        # Of total // R; what does not divide has to go somewhere.
        assert plan.tokens_R.max() <= total // R + total % R


@given(problem=problems(), tolerance=st.sampled_from([0, 1, 20]), min_tokens=st.sampled_from([1, 4, 1024]))
def test_ultra_ep(problem, tolerance, min_tokens):
    plan = UltraEp(tolerance=tolerance / 100, min_tokens=min_tokens).token_plan(problem)
    check_layout(problem, plan)
    domain = problem.cluster.domain_of_rank
    domains = [[r for r, each in enumerate(domain) if each == d] for d in sorted(set(domain))]
    tokens_RE, home = problem.load.tokens_RE.tolist(), quota_planners.homes(problem.load.tokens_RE.tolist())
    assert as_dict(plan) == quota_planners.ultra_ep(tokens_RE, tolerance, min_tokens, problem.slots_R, domains)
    for rank in range(problem.load.num_ranks):
        assert {domain[home[e]] for e in plan.layout.experts_of(rank)} <= {domain[rank]}


@given(problem=problems(), gb_per_s=st.sampled_from([6.25, 1e3, 1e5, 1e9]))
def test_faster_moe(problem, gb_per_s):
    plan = FasterMoe(gb_per_s=gb_per_s).token_plan(problem)
    check_layout(problem, plan)
    net, d, alpha = gb_per_s * 1e9, 2048, 2
    price = 3 * (4 * alpha * d**2 / 11.5e12) + 4 * (d * 4 / net)
    tokens_RE = problem.load.tokens_RE.tolist()
    assert as_dict(plan) == quota_planners.faster_moe(tokens_RE, price, 2 * alpha * d**2 * 4 / net, problem.slots_R)


@pytest.mark.parametrize(("most", "shadowed"), [(767, False), (768, True)])
def test_by_faster_moes_defaults_a_shadow_pays_from_768_tokens_on(most, shadowed):
    load = LoadMatrix([[most + 10, 10], [0, 0]])
    plan = FasterMoe().token_plan(PlanningProblem.of_layout(load, ClusterSpec(ranks_per_node=2), 2))
    assert (0 in plan.layout.experts_of(1)) == shadowed


# --- one worked example: counts 40 16 | 30 20 | 6 4 | 24 20


EXAMPLE = LoadMatrix([[10, 16, 30, 20, 6, 4, 24, 20], *([n] + [0] * 7 for n in (12, 8, 10))])


@pytest.mark.parametrize(
    ("config", "slots", "tokens_R", "borrowed"),
    [
        (MoonEp(), 4, [40, 40, 40, 40], {(0, 2): 30, (2, 0): 14, (6, 1): 4}),
        (Llep(min_tokens=1), 8, [40, 40, 40, 40], {(0, 2): 16, (2, 2): 10, (6, 2): 4}),
        (UltraEp(min_tokens=1), 3, [47, 47, 19, 47], {(0, 2): 9, (2, 3): 3}),
        (UltraEp(min_tokens=1), 4, [44, 44, 28, 44], {(0, 2): 12, (2, 2): 6}),
        (UltraEp(), 5, [41, 41, 37, 41], {(0, 2): 15, (2, 2): 9, (6, 2): 3}),
    ],
    ids=str,
)
def test_a_worked_example(config, slots, tokens_R, borrowed):
    cluster, model = (
        ClusterSpec(ranks_per_node=4),
        ModelShape(hidden_size=8, intermediate_size=8, num_experts=8, top_k=1),
    )
    strategy = Strategy(name="now", sharding=Ep(slots_per_rank=slots), balance=config, split=Quotas(), lag=0)
    plan = plan_layer(strategy, model, cluster, EXAMPLE).tokens
    assert plan.tokens_R.tolist() == tokens_R
    quota_ER = plan.tokens_RER.sum(axis=0)
    away = {(e, r): int(quota_ER[e, r]) for e in range(8) for r in range(4) if r != e // 2 and quota_ER[e, r]}
    assert away == borrowed
    if slots == 5:
        # Quotas 25 and 15: both keep their own, the others spread theirs 15 : 7.
        assert plan.tokens_RER[:, 0, [0, 2]].tolist() == [[10, 0], [8, 4], [0, 8], [7, 3]]


# --- as members of the union


@pytest.mark.parametrize("config", [MoonEp(), Llep(min_tokens=1), UltraEp(min_tokens=1), FasterMoe()], ids=str)
def test_they_plan_layouts_from_history_too(config):
    cluster = ClusterSpec(ranks_per_node=4)
    layout = plan_layout(EXAMPLE, cluster, config, 4)
    assert split_tokens(EXAMPLE, layout, cluster, Strategy(name="ep").split).tokens_R.sum() == 160


def test_many_tokens_are_planned_without_counting_them():
    load = LoadMatrix(np.array([[2**30, 1, 5, 7]] * 4))
    for config in (MoonEp(), Llep(), UltraEp(), FasterMoe()):
        plan = config.token_plan(PlanningProblem.of_layout(load, ClusterSpec(ranks_per_node=4), 4))
        assert plan.tokens_R.sum() == load.total
