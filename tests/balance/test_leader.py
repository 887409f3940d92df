"""The leader: which candidate plans, judged by what candidates would have cost on the micro-batches before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from moesys.balance.flow.flow_split import FlowSplit, split_costs
from moesys.balance.flow.step_cost import prices_of, with_experts
from moesys.balance.greedy import leader
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.greedy.robust_cost import NO_LIMIT
from moesys.balance.greedy.search import LayoutSearch
from moesys.balance.laer import Laer
from moesys.balance.plan import StepPlan, plan_layer
from moesys.balance.planning_problem import PastBatch, PlanningProblem, link_domains_of
from moesys.balance.predictors import FORECAST_UNITS, forecast
from moesys.balance.run_planner import plan_layout
from moesys.config import Ep, Fsep, ModelShape, Sharding, Strategy, presets
from moesys.config.workload import Generated
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray, LoadMatrix
from moesys.simulator.step_program import simulate
from moesys.traces import generate

MODEL = ModelShape(hidden_size=2048, intermediate_size=768, num_experts=32, top_k=4)
CLUSTER = presets.h100(2)
# Slots of a rank: with the few, all candidates always plan.
SLOTS, MANY_SLOTS = 3, 7


def loads(seed: int, steps: int, drift: float, skew: float = 1.5) -> IntArray:
    workload = Generated(warmup=0, steps=steps, tokens_per_rank=2048, num_layers=1, drift=drift, skew=skew)
    return generate(workload, CLUSTER.num_ranks, MODEL.num_experts, MODEL.top_k, seed).tokens_SLRE[:, 0]


def strategy(sharding: Sharding | None = None) -> Strategy:
    sharding = sharding or Fsep(slots_per_rank=SLOTS)
    return Strategy(name="x", sharding=sharding, balance=Greedy(), split=FlowSplit(max_inter_node="seconds"))


def problems(tokens_SRE: IntArray, of: Strategy, lag: int = 1) -> Iterator[tuple[PlanningProblem, ExpertLayout, bytes]]:
    """Walks through loads as training does; yields each problem, its plan and what was remembered."""
    recent: deque[PastBatch] = deque(maxlen=Greedy.recent_batches)
    slots = of.sharding.slots_per_rank
    memory, layout = b"", plan_layout(LoadMatrix(np.ones_like(tokens_SRE[0])), CLUSTER, "static", slots)
    for number, tokens_RE in enumerate(tokens_SRE):
        load = LoadMatrix(tokens_RE)
        recent.append(PastBatch(number, load, layout))
        problem = PlanningProblem.of_layout(load, CLUSTER, slots, MODEL, layout, of)
        problem = replace(problem, recent=tuple(recent), memory=memory, lag=lag)
        layout, memory = Greedy().plan(problem)
        yield problem, layout, memory


def seconds(tokens_RE: IntArray, layout: ExpertLayout, of: Strategy) -> float:
    plan = plan_layer(of, MODEL, CLUSTER, LoadMatrix(tokens_RE), layout=layout)
    return simulate(StepPlan(of, MODEL, CLUSTER, (plan,))).length_us / 1e6


@pytest.mark.parametrize(("sharding", "drift"), [(Fsep(slots_per_rank=SLOTS), 0.0), (Ep(slots_per_rank=SLOTS), 0.5)])
def test_equal_problems_have_equal_plans_that_keep_to_the_slots(sharding: Sharding, drift: float) -> None:
    of = strategy(sharding)
    for problem, layout, memory in problems(loads(0, 12, drift), of):
        load, recent = LoadMatrix(problem.load.tokens_RE.copy()), tuple(replace(batch) for batch in problem.recent)
        again = PlanningProblem.of_layout(load, CLUSTER, SLOTS, MODEL, problem.layout, of)
        again = replace(again, recent=recent, memory=bytes(bytearray(problem.memory)))
        assert Greedy().plan(again) == (layout, memory)
        assert layout.expert_RS.shape == (CLUSTER.num_ranks, SLOTS)
        assert not layout.num_duplicates


@pytest.mark.parametrize(("lag", "slots", "still"), [(1, MANY_SLOTS, 1), (3, MANY_SLOTS, 20), (1, SLOTS, 20)])
def test_the_candidate_of_the_fewest_seconds_plans(
    monkeypatch: pytest.MonkeyPatch, lag: int, slots: int, still: int
) -> None:
    """What candidates cost is added up here once more, from the layouts that they had planned; also on loads that stood
    ``still`` for some micro-batches, in which nothing was planned. With many slots candidates take turns.
    """
    tokens_SRE, planned, most = loads(1, 40, 0.4), {}, 24
    monkeypatch.setattr(leader, "MEMORY", most)
    if still > 1:
        tokens_SRE = tokens_SRE[np.arange(40) // still]
    layouts = leader._layouts

    def kept(problem: PlanningProblem, *given: object) -> object:
        return planned.setdefault(problem.recent[-1].micro_batch, layouts(problem, *given))

    monkeypatch.setattr(leader, "_layouts", kept)
    for problem, layout, memory in problems(tokens_SRE, strategy(Fsep(slots_per_rank=slots)), lag):
        mean_C, count_C = np.ones(leader.NUM_CANDIDATES), np.zeros(leader.NUM_CANDIDATES)
        remembered = leader._Memory.read(memory, memory[:32])
        assert remembered.judged == max(planned)
        for at in range(remembered.judged + 1):
            candidates, layouts_CRS = planned[max((after for after in planned if after <= at - lag), default=0)]
            if at >= lag and len(candidates) > 1:
                judged = list(candidates)
                costs = np.array(leader._costs(problem, LoadMatrix(tokens_SRE[at]), layouts_CRS))
                count_C[judged] = np.minimum(count_C[judged] + 1, most)
                above = costs / costs.sum() * mean_C[judged].sum() - mean_C[judged]
                mean_C[judged] += above * 3 / (count_C[judged] + 2)
        assert remembered.mean_C / 1e6 == pytest.approx(mean_C, abs=1e-4)
        candidates, layouts_CRS = planned[max(planned)]
        best, *_ = sorted(candidates, key=remembered.by_rank.index)
        assert remembered.by_rank[0] == np.argmin(remembered.mean_C)
        assert np.array_equal(layout.expert_RS, layouts_CRS[candidates.index(best)])
    assert (len(planned) < 40) == (still > 1)
    turns = [set(candidates) for candidates, _ in planned.values()]
    together = leader.FIRST_PLANS if slots == MANY_SLOTS else len(turns)
    assert all(len(turn) == leader.NUM_CANDIDATES for turn in turns[:together])
    if slots == SLOTS:
        return
    turns = turns[leader.FIRST_PLANS :]
    if still == 1:
        assert set.union(*turns[:21]) == set(range(leader.NUM_CANDIDATES))
    # The leader, the second or one in turn, and one that searches.
    assert max(map(len, turns)) <= 3


LATE = {
    "fsep": Fsep(slots_per_rank=4),
    "ahead": Fsep(slots_per_rank=4, prefetch_layers=1),
    "hierarchical, ahead": Fsep(slots_per_rank=4, prefetch_layers=1, restore="hierarchical"),
    "lent": Ep(slots_per_rank=4),
    "uneven": Fsep(slots_per_rank=(1, 5, 4, 4) * 4, prefetch_layers=1),
}


@pytest.mark.parametrize("sharding", LATE.values(), ids=LATE)
def test_layouts_are_judged_with_the_late_slots_that_the_micro_batch_fills(sharding: Sharding) -> None:
    """As a layer plans them, and with what their experts cost on their way; nothing is compiled for it."""
    of = strategy(sharding).replace(late_slots=1)
    slots_R = of.early_slots(MODEL, CLUSTER)
    load, uniform = LoadMatrix(loads(0, 1, 0.0)[0]), LoadMatrix(np.ones((CLUSTER.num_ranks, MODEL.num_experts), int))
    problem = PlanningProblem.of_layout(load, CLUSTER, slots_R, MODEL, None, of)
    layouts = [plan_layout(each, CLUSTER, "greedy", slots_R) for each in (uniform, load)]
    # As many experts come, one of them late instead of early.
    fewer_RS = layouts[0].expert_RS.copy()
    replicas_E = layouts[0].replicas_RE.sum(axis=0)
    rank = next(rank for rank, slots in enumerate(slots_R) if slots and replicas_E[fewer_RS[rank, 0]] > 1)
    fewer_RS[rank, :-1], fewer_RS[rank, -1] = fewer_RS[rank, 1:].copy(), EMPTY
    layouts.append(ExpertLayout(fewer_RS, MODEL.num_experts))
    filled = [plan_layer(of, MODEL, CLUSTER, load, layout=layout).layout for layout in layouts]
    assert all((layout.expert_RS[:, max(slots_R) :] >= 0).any() for layout in (filled[0], filled[-1]))
    prices, expected = prices_of(MODEL, CLUSTER, load.total, of.overlap), []
    for layout in filled:
        beside, gradients = with_experts(prices, layout, MODEL, CLUSTER, sharding, late_slots=1)
        whole = load.tokens_RE[None], layout.expert_RS.copy(), link_domains_of(CLUSTER)
        expected.append(int(split_costs(*whole, beside, NO_LIMIT)) + gradients)
    layouts_CRS = np.stack([layout.expert_RS.astype(np.int32) for layout in layouts])
    without = leader._costs(replace(problem, late_R=()), load, layouts_CRS)
    known = set(split_costs.dispatcher.signatures)
    assert leader._costs(problem, load, layouts_CRS) == expected != without
    assert set(split_costs.dispatcher.signatures) == known


def test_what_was_remembered_with_other_late_slots_is_forgotten() -> None:
    of = strategy()
    *_, (problem, _, memory) = problems(loads(0, 3, 0.2), of)
    late_R = (1,) * CLUSTER.num_ranks
    begun = Greedy().plan(replace(problem, late_R=late_R))
    assert Greedy().plan(replace(problem, late_R=late_R, memory=memory)) == begun


def test_a_layout_is_kept_until_another_is_cheaper_on_the_remembered_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept then costs the remembered loads no more once neighbours were tried, and often less."""
    layouts, climbed, planned, kept_RS, changes = leader._layouts, leader._climbed, [], None, 0
    chosen: list[np.ndarray] = []
    gains: list[int] = []

    def watched(problem: PlanningProblem, before_RS: np.ndarray, num_plans: int) -> np.ndarray:
        after_RS = climbed(problem, before_RS, num_plans)
        both = np.stack([before_RS, after_RS])
        costs_2 = np.sum([leader._costs(problem, batch.load, both) for batch in problem.recent], axis=0)
        chosen.append(before_RS)
        gains.append(int(costs_2[0] - costs_2[1]))
        return after_RS

    monkeypatch.setattr(leader, "_climbed", watched)
    monkeypatch.setattr(leader, "_layouts", lambda *given: planned.append(layouts(*given)) or planned[-1])
    for problem, _, _ in problems(loads(1, 36, 0.4), strategy()):
        candidates, layouts_CRS = planned[-1]
        if leader.KEPT not in candidates:
            continue
        *others, climbed_RS = layouts_CRS
        now_RS = chosen[-1]
        if kept_RS is not None:
            known = np.stack([now_RS, kept_RS, *others])
            costs_of_each = [leader._costs(problem, batch.load, known) for batch in problem.recent]
            cost_C = sum(np.array(costs) / sum(costs[1:]) for costs in costs_of_each)
            if (now_RS != kept_RS).any():
                assert cost_C[0] < 0.99001 * cost_C[1]
                assert cost_C[0] == pytest.approx(min(cost_C), rel=1e-4)
                changes += 1
            elif len(planned) <= leader.FIRST_PLANS:
                assert 0.98999 * cost_C[1] <= min(cost_C)
        kept_RS = climbed_RS
    assert changes > 2
    assert min(gains) >= 0
    assert sum(gain > 0 for gain in gains) > len(gains) // 4


@pytest.mark.parametrize(
    "change",
    [
        lambda load_RE: (load_RE, loads(7, 1, 0.0)[0]),
        lambda load_RE: (load_RE, np.roll(load_RE, CLUSTER.num_ranks // 2, axis=0) * np.arange(1, 17)[:, None]),
        lambda load_RE: (load_RE, load_RE**2),
        lambda load_RE: (np.full_like(load_RE, 100), load_RE),
    ],
    ids=["popularity", "sources", "skew", "from even"],
)
def test_a_load_that_stands_still_is_not_planned_for_again(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[IntArray], tuple[IntArray, IntArray]]
) -> None:
    still, moved = change(loads(6, 1, 0.0)[0])
    layouts, planned, chosen = leader._layouts, [], []
    monkeypatch.setattr(leader, "_layouts", lambda *given: planned.append(len(chosen)) or layouts(*given))
    moves_at = leader.FIRST_PLANS + 4
    again = moves_at + Greedy.recent_batches
    for _, layout, _ in problems(np.stack([still] * moves_at + [moved] * (Greedy.recent_batches + 3)), strategy()):
        chosen.append(layout)
    assert planned == [*range(leader.FIRST_PLANS), *range(moves_at, again - 1)]
    assert chosen[leader.FIRST_PLANS - 1 : moves_at] == [chosen[moves_at - 1]] * 5
    # At first the leader may be the candidate that keeps a layout.
    assert chosen[again] != chosen[moves_at - 1]


def test_a_load_that_comes_back_is_learnt() -> None:
    """Two loads in turn: the load before is never the next one, and the mean of both is."""
    pair = [loads(seed, 1, 0.0, skew=2.0)[0] for seed in (3, 4)]
    tokens_SRE = np.stack([pair[number % 2] for number in range(16)])
    of = strategy(Fsep(slots_per_rank=SLOTS, prefetch_layers=1, delay_reshard=True))
    ours = naive = 0.0
    for number, (problem, layout, _) in enumerate(problems(tokens_SRE[:-1], of)):
        if number >= 4:
            ours += seconds(tokens_SRE[number + 1], layout, of)
            naive += seconds(tokens_SRE[number + 1], Greedy().layout(replace(problem, layout=None)), of)
    assert ours < 0.9 * naive


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_it_is_no_slower_than_laer(drift: float) -> None:
    of, ours, theirs = strategy(), 0.0, 0.0
    for seed in range(2):
        tokens_SRE = loads(seed, 16, drift)
        for number, (problem, layout, _) in enumerate(problems(tokens_SRE[:-1], of)):
            if number >= 3:
                ours += seconds(tokens_SRE[number + 1], layout, of)
                theirs += seconds(tokens_SRE[number + 1], Laer().layout(problem), of)
    assert ours < theirs


@pytest.mark.parametrize(("slots", "oldest"), [(160, 13), (192, 21), (384, 55)])
def test_loads_that_take_turns_are_judged_in_every_turn(slots: int, oldest: int) -> None:
    turns = [leader.turn_of(number, slots) for number in range(5000)]
    for candidate in range(leader.NUM_CANDIDATES):
        mine = np.flatnonzero([turn == candidate for turn in turns])
        assert np.diff(mine).max() == oldest
        for period in range(2, 17):
            assert len(np.unique(mine % period)) == period


def test_where_loads_jump_what_is_searched_for_their_mean_is_cheap_on_each() -> None:
    tokens_SRE, of = np.concatenate([loads(seed, 1, 0.0) for seed in (0, 1)]), strategy()
    mean = PlanningProblem.of_layout(LoadMatrix(tokens_SRE.sum(axis=0)), CLUSTER, SLOTS, MODEL, None, of)
    judged = []
    for later in ((), tuple(2 * tokens_SRE)):
        search = LayoutSearch(replace(mean, units_per_token=2), Greedy(drift=0.0)._options, later=later)
        assert search.judge is not None
        # Compiled loops would be compiled once more for arrays that may be written.
        assert not search.judge.later_KRE.flags.writeable
        layout = search.numbers.named(search.best_in_seconds(search.numbers.empty())[0].expert_RS)
        judged.append(sum(seconds(tokens_RE, layout, of) for tokens_RE in tokens_SRE))
    assert judged[1] < 0.99 * judged[0]


def test_what_is_remembered_of_other_slots_is_forgotten() -> None:
    *_, (problem, _, memory) = problems(loads(2, 6, 0.2), strategy())
    wider = replace(problem, slots_R=(SLOTS + 1,) * CLUSTER.num_ranks, layout=None, memory=memory)
    assert Greedy().plan(wider) == Greedy().plan(replace(wider, memory=b""))
    assert Greedy().plan(replace(problem, memory=memory)) != Greedy().plan(replace(problem, memory=b""))


def test_costs_of_very_large_loads_do_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best candidate stays the best where costs times a million pass 64 bits."""
    costs = leader._costs
    chosen = [layout for _, layout, _ in problems(loads(5, 6, 0.3), strategy())]
    monkeypatch.setattr(leader, "_costs", lambda *given: [cost << 20 for cost in costs(*given)])
    assert [layout for _, layout, _ in problems(loads(5, 6, 0.3), strategy())] == chosen


def test_empty_micro_batches_and_even_ones_say_nothing() -> None:
    even = np.full((1, CLUSTER.num_ranks, MODEL.num_experts), 64)
    expected = forecast([LoadMatrix(even[0])] * 8, lag=1)
    assert expected is not None
    assert (expected.load.tokens_RE == even[0] * FORECAST_UNITS).all()
    for problem, _, memory in problems(np.zeros_like(np.repeat(even, 6, axis=0)), strategy()):
        assert (leader._Memory.read(memory, memory[:32]).mean_C == 1_000_000).all(), problem


def test_a_forecast_finds_how_loads_move() -> None:
    """The logarithms of two loads in turn, of one that drifts, and of one that stays have known forecasts."""
    log_SE = np.random.default_rng(0).normal(0, 1, (9, 64)) + 8
    in_turn = [LoadMatrix(np.exp(log_SE[number % 2])[None].astype(int)) for number in range(8)]
    stays = [LoadMatrix(np.exp(log_SE[0])[None].astype(int))] * 8
    drifts = [log_SE[0] - 8]
    for fresh_E in log_SE[1:] - 8:
        drifts.append(0.7 * drifts[-1] + np.sqrt(1 - 0.7**2) * fresh_E)
    drift = [LoadMatrix(np.exp(each_E + 8)[None].astype(int)) for each_E in drifts]

    def error(past: list[LoadMatrix], came: LoadMatrix) -> tuple[float, float, float]:
        """Deviations of the forecast and of the newest load from the load that came, in logarithms; and the drift."""
        found = forecast(past, lag=1)
        assert found is not None
        logs = [np.log1p(each.tokens_E) for each in (found.load, past[-1], came)]
        predicted, newest, truth = (log_E - log_E.mean() for log_E in logs)
        return float((predicted - truth).std()), float((newest - truth).std()), found.drift

    assert error(stays[:7], stays[7])[0] < 0.02
    forecast_error, newest_error, _ = error(in_turn[:7], in_turn[7])
    assert forecast_error < 0.8 * newest_error
    forecast_error, newest_error, share = error(drift[:8], drift[8])
    assert forecast_error < 0.95 * newest_error
    assert share == pytest.approx(0.3, rel=0.3)
