"""The search in the cost model against all there is to find, and what it keeps to on the way."""

from __future__ import annotations

import os

import pytest
from tuner_cases import (
    CLUSTERS,
    EP,
    SMALL,
    SPACE,
    changed,
    cost,
    costs_of,
    drawn,
    exhausted,
    memory_of,
    session_of,
    setting_of,
)

from moesys import CpSat, FlowSplit, Greedy, MegaKernel, Pipelined, SearchBounds, Sequential, Space
from moesys.config import ClusterSpec, Fsep, Strategy
from moesys.tuner.pick import SearchResult, search, tune_workload
from moesys.tuner.tuned_workload import Fidelity, ladder

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"


@pytest.fixture(scope="module")
def slow_links():
    """A workload, and the milliseconds of all points."""
    workload = drawn(CLUSTERS["slow links"], steps=2)
    return workload, exhausted(workload, SMALL)


def searched(workload, space: Space = SMALL, budget: int = 16, seed: int = 0, **changes) -> SearchResult:
    return search(space, costs_of(workload, **changes), budget=budget, seed=seed)


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(one, id=name, marks=[] if name == "slow links" else pytest.mark.slow)
        for name, one in CLUSTERS.items()
    ],
)
@pytest.mark.parametrize("skew", (0.3, 1.0, 1.5) if SWEEP else (1.0,))
def test_the_pick_is_within_5_percent_of_all_points(cluster, skew):
    space, budget, seeds = (SPACE, 32, range(6)) if SWEEP else (SMALL, 8, range(2))
    for tokens_per_rank in (512, 4096) if SWEEP else (512,):
        workload = drawn(cluster, skew, tokens_per_rank, steps=4 if SWEEP else 3)
        step_ms = exhausted(workload, space)
        for seed in seeds:
            found = searched(workload, space, budget, seed)
            pick = found.ranking[0]
            assert pick.ms == step_ms[pick.strategy.fingerprint()]
            assert pick.ms <= 1.05 * min(step_ms.values())
            # A search that looked at all would show nothing.
            assert found.num_points <= 0.8 * len(step_ms)


def test_a_space_within_the_budget_is_exhausted_and_one_seed_gives_one_search(slow_links):
    workload, step_ms = slow_links
    found = searched(workload, budget=10_000)
    assert found.ranking[0].ms == min(step_ms.values())
    assert found.num_points >= len(step_ms)
    first, second, other = (searched(workload, budget=10, seed=seed) for seed in (3, 3, 5))
    assert first == second
    assert first != other


def test_a_space_within_the_budget_is_exhausted_whatever_the_starts():
    values = {"sharding": ("fsep",), "sharding.slots_per_rank": (2, 3), "balance": ("greedy",), "split": ("flow",)}
    space = Space(values | {"overlap": ("sequential", "pipelined"), "overlap.chunks": (2,)})
    workload = drawn(CLUSTERS["even"], steps=2)
    starts = [EP, *(EP.replace(name=f"{chunks}", overlap=Pipelined(chunks=chunks)) for chunks in (8, 16))]
    costs = costs_of(workload, starts=starts)
    search(space, costs, budget=space.num_combinations, seed=0)
    assert space.num_combinations == 4
    assert costs.session.observer.stages[0] == "simulating 7 points, 2 steps of seed 0"


def test_what_the_baseline_costs_is_known_however_slow_it_is():
    slow = Strategy(name="slow", sharding=Fsep(slots_per_rank=8), overlap=Pipelined(chunks=8))
    workload = drawn(CLUSTERS["slow links"])
    found = searched(workload, budget=12, starts=[slow])
    assert found.baseline.strategy == slow
    assert found.baseline in found.ranking[1:]


def test_points_that_cannot_be_planned_are_refused_with_the_reason():
    space = changed(SMALL, {"balance": ("static", CpSat(min_replicas=5))})
    found = searched(drawn(CLUSTERS["even"], steps=2), space, budget=30)
    assert found.refused
    assert all(isinstance(strategy.balance, CpSat) and "min_replicas=5" in reason for strategy, reason in found.refused)
    assert not any(isinstance(one.strategy.balance, CpSat) for one in found.ranking)


def test_mega_kernels_that_cannot_be_simulated_wait_for_a_clock():
    class WithoutMegaKernels:
        def __init__(self, workload):
            self.seeds, self.num_steps, self.walk = workload.seeds, workload.num_steps, workload.walk
            self.model, self.cluster, self.workload = workload.model, workload.cluster, workload.workload
            self.simulated = workload.step_ms

        def step_ms(self, step):
            if isinstance(step[0].strategy.overlap, MegaKernel):
                raise ValueError("no model of that")
            return self.simulated(step)

    space = changed(SMALL, {"overlap": ("sequential", "mega_kernel"), "overlap.deduplicate": (False, True)})
    cluster = CLUSTERS["even"].replace(ranks_per_domain=4)
    found = searched(WithoutMegaKernels(drawn(cluster, skew=0.1, steps=2)), space, budget=20)
    # Plans that send some rank too many rows are refused before anybody asks for their seconds.
    assert {reason for _, reason in found.refused if "rows_cap" not in reason} == {"no model of that"}
    assert all(isinstance(strategy.overlap, MegaKernel) for strategy, _ in found.refused)
    assert all(isinstance(one.strategy.overlap, Sequential) for one in found.ranking)


def test_mega_kernels_on_several_domains_are_refused_and_never_ranked():
    space = changed(SMALL, {"overlap": ("sequential", "mega_kernel")})
    workload, fused = drawn(CLUSTERS["even"], skew=0.1, steps=2), EP.replace(name="fused", overlap=MegaKernel())
    found = searched(workload, space, budget=20, starts=[EP, fused])
    assert not any(isinstance(one.strategy.overlap, MegaKernel) for one in found.ranking)
    assert "fused" in {strategy.name for strategy, _ in found.refused}
    assert all("reaches the ranks of one domain" in reason for _, reason in found.refused)


def test_a_plan_above_rows_cap_is_refused_with_its_words():
    workload = drawn(ClusterSpec(ranks_per_node=4), skew=3.0)
    entry = cost(costs_of(workload), EP.replace(overlap=MegaKernel(rows_cap=1.0)), ladder(workload)[0])
    assert entry.stage == "refused"
    assert "more than rows_cap=1 times 1024 choices of a rank; use MegaKernel(rows_cap=" in entry.reason


def test_a_start_that_does_not_fit_rules_nothing_out():
    workload = drawn(ClusterSpec(ranks_per_node=4, expert_tflops=0.1), skew=3.5, steps=2)
    sharding = Fsep(slots_per_rank=8, reshard_after_forward=False)
    wide = Strategy(name="wide", sharding=sharding, balance=Greedy(), split=FlowSplit())
    space = changed(SMALL, {"sharding.ep.slots_per_rank": (None,), "sharding.delay_reshard": (False,)})
    gb = max(memory_of(point, setting_of(workload), 512).gb for point in space.points(setting_of(workload)))
    costs = costs_of(workload, setting=setting_of(workload, memory_gb=gb), starts=[wide])
    assert not costs.fits(wide)
    found = search(space, costs, budget=30, seed=0)
    step_ms = exhausted(workload, space)
    assert found.baseline.ms < min(step_ms.values())
    assert found.ranking[0].ms == min(step_ms.values())


def test_the_cost_of_another_value_is_that_of_the_fastest_strategy_with_it(slow_links):
    workload, step_ms = slow_links
    tuned = tune_workload(workload, [EP], session_of(), space=SMALL, bounds=SearchBounds(budget=10_000))
    pick = tuned.search.ranking[0]
    choices = {choice.field: choice for choice in tuned.choices}

    def slots(point):
        same = point.sharding.kind == pick.strategy.sharding.kind
        return str(point.sharding.slots_per_rank) if same else None

    for field, value in {
        "balance": lambda point: point.balance.kind,
        "overlap.kind": lambda point: point.overlap.kind,
        "sharding.kind": lambda point: point.sharding.kind,
        "sharding.slots_per_rank": slots,
    }.items():
        of_field = [(value(point), step_ms[point.fingerprint()]) for point in SMALL.points(setting_of(workload))]
        fastest_ms = min(ms for other, ms in of_field if other not in (None, value(pick.strategy)))
        assert choices[field].costs == fastest_ms / pick.ms - 1 >= 0


def test_looks_get_longer_until_all_is_seen():
    looks = [str(fidelity) for fidelity in ladder(drawn(CLUSTERS["even"], steps=30))]
    assert looks == [f"{steps} steps of seed 0" for steps in (2, 8, 30)]
    assert str(Fidelity((0, 3), 4)) == "4 steps of seeds 0, 3"


def test_a_step_is_simulated_once_however_often_it_is_part_of_a_mean():
    workload, seen = drawn(CLUSTERS["even"], steps=9), []

    class Counting:
        def __getattr__(self, name):
            return getattr(workload, name)

        def step_ms(self, step):
            seen.append(step[0].strategy.fingerprint())
            return workload.step_ms(step)

    costs = costs_of(workload)
    costs.plans.workload = Counting()
    for fidelity in ladder(workload):
        cost(costs, EP, fidelity)
    assert len(seen) == 9
    assert {seed: len(ms) for seed, ms in costs.steps_ms[EP.fingerprint()].items()} == {0: 9}
    # The journal alone gives the same steps.
    again = costs_of(workload, session_of(costs.session.journal))
    cost(again, EP, ladder(workload)[-1])
    assert again.steps_ms[EP.fingerprint()] == costs.steps_ms[EP.fingerprint()]
