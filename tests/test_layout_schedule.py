"""LayoutSchedule: which loads a plan is made for, in which unit, and what a resumed one knows."""

from __future__ import annotations

import copy
import json
import pickle
import zlib
from base64 import b64decode, b64encode

import numpy as np
import pytest

import moesys as ms
from moesys import Greedy, plan_layout
from moesys.balance.layout_schedule import (
    InlinePlanner,
    LayoutSchedule,
    PlanOutcome,
    PlanRequest,
    PlanTicket,
)
from moesys.balance.planning_problem import PlanningProblem
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix

MODEL = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=6, top_k=2)
CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Greedy(), split=ms.FlowSplit())
TOKENS_SRE = np.random.default_rng(0).integers(0, 50, (12, 4, 6)) * np.array([1, 1, 4, 1, 9, 1])


class Kept(InlinePlanner):
    """Plans at once and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[PlanRequest] = []

    def submit(self, request: PlanRequest) -> PlanTicket:
        self.requests.append(request)
        return super().submit(request)


def walk(schedule: LayoutSchedule, first: int, last: int, by_vote: bool = False) -> list[ExpertLayout]:
    """The layouts of micro-batches ``first`` to ``last`` - 1 of ``TOKENS_SRE``."""
    layouts = []
    for now in range(first, last):
        schedule.commit(agreed=not by_vote or schedule.ready(0.0))
        layouts.append(schedule.layout)
        schedule.observe(LoadMatrix(TOKENS_SRE[now]))
    return layouts


def requests_of(strategy: ms.Strategy) -> list[PlanRequest]:
    schedule = LayoutSchedule(0, strategy, MODEL, CLUSTER, TOKENS_SRE)
    schedule.source = kept = Kept()
    walk(schedule, 0, len(TOKENS_SRE))
    return kept.requests


# --- the oracle


@pytest.mark.parametrize(("replan_every", "lag"), [(1, 1), (1, 3), (4, 2)])
def test_an_oracle_plans_for_the_first_micro_batch_that_its_plan_serves(replan_every: int, lag: int) -> None:
    strategy = FSEP.replace(balance=ms.Eplb(), predictor=ms.Oracle(), replan_every=replan_every, lag=lag)
    layouts = walk(LayoutSchedule(0, strategy, MODEL, CLUSTER, TOKENS_SRE), 0, 12)
    made_after = range(replan_every - 1, 12 - lag, replan_every)
    assert len(made_after) >= 2
    for now in (made + lag for made in made_after):
        assert layouts[now] == plan_layout(LoadMatrix(TOKENS_SRE[now]), CLUSTER, ms.Eplb(), 3)
    # and asks for no plan that would serve after the end
    assert len(requests_of(strategy)) == len(made_after)


def test_an_oracle_may_be_told_from_a_micro_batch_on_and_no_more() -> None:
    strategy = FSEP.replace(balance=ms.Eplb(), predictor=ms.Oracle())
    schedule = LayoutSchedule(0, strategy, MODEL, CLUSTER)
    for first in (0, 5):
        schedule.foresee(TOKENS_SRE[first : first + 5])
        layouts = walk(schedule, first, first + 5)
        planned = [plan_layout(LoadMatrix(tokens), CLUSTER, ms.Eplb(), 3) for tokens in TOKENS_SRE[first : first + 5]]
        assert layouts == planned
    schedule.foresee(TOKENS_SRE)
    assert schedule.due
    # The load did not come.
    schedule.foresee(None)
    assert not schedule.due
    with pytest.raises(ValueError, match="plans for loads that are still to come"):
        walk(schedule, 10, 11)


def test_no_other_predictor_looks_ahead() -> None:
    for predictor in (ms.Last(), ms.WindowMean(), ms.Ema(), ms.Adaptive()):
        strategy = FSEP.replace(predictor=predictor, balance=ms.Eplb())
        knowing, not_knowing = (LayoutSchedule(0, strategy, MODEL, CLUSTER, known) for known in (TOKENS_SRE, None))
        assert walk(knowing, 0, 12) == walk(not_knowing, 0, 12)


# --- what a plan is made with


@pytest.mark.parametrize(
    ("predictor", "replan_every", "move_tokens"),
    [
        (ms.Last(), 1, [100, 100, 100]),
        (ms.Last(), 3, [34, 34, 34]),
        (ms.WindowMean(steps=2), 1, [100, 200, 200]),
        (ms.Ema(), 1, [25600, 25600, 25600]),
        (ms.Ema(), 2, [12800, 12800, 12800]),
    ],
)
def test_moves_cost_tokens_over_a_plans_life_in_the_unit_of_the_load(monkeypatch, predictor, replan_every, move_tokens):
    asked: list[int] = []

    def note(problem: PlanningProblem, config: Greedy) -> tuple[ExpertLayout | None, bytes]:
        asked.append(config.move_tokens)
        return problem.layout, b""

    strategy = FSEP.replace(balance=ms.Greedy(move_tokens=100), predictor=predictor, replan_every=replan_every)
    requests = requests_of(strategy)
    monkeypatch.setattr("moesys.balance.layout_schedule.planned", note)
    for request in requests:
        request.solve()
    assert asked[:3] == move_tokens


def test_only_a_plan_that_one_rank_makes_for_all_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float | None] = []

    def note(problem: PlanningProblem, config: Greedy) -> tuple[ExpertLayout, bytes]:
        deadlines.append(config.deadline_ms)
        return ms.Static().layout(problem), b""

    monkeypatch.setattr("moesys.balance.layout_schedule.planned", note)
    [request, *_] = requests_of(FSEP.replace(balance=ms.Greedy(deadline_ms=5.0)))
    assert set(deadlines) == {None}
    deadlines.clear()
    request.solve()
    request.solve(alike=True)
    assert deadlines == [5.0, None]


# --- resuming


@pytest.mark.parametrize(
    ("predictor", "balance", "stops"),
    [
        *((predictor, ms.Eplb(), (0, 1, 6)) for predictor in (ms.Last(), ms.WindowMean(steps=3), ms.Ema())),
        *((ms.Adaptive(), ms.Eplb(), (0, 1, 6)), (ms.Last(), ms.Greedy(), (1,)), (ms.Adaptive(), ms.Greedy(), (6,))),
    ],
    ids=repr,
)
def test_a_schedule_that_was_stopped_goes_on_as_if_it_were_not(predictor, balance, stops) -> None:
    strategy = FSEP.replace(predictor=predictor, lag=2, balance=balance)
    straight = walk(LayoutSchedule(0, strategy, MODEL, CLUSTER), 0, 12)
    for stop in stops:
        stopped, resumed = (LayoutSchedule(0, strategy, MODEL, CLUSTER) for _ in range(2))
        walk(stopped, 0, stop)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict(0.0))))
        assert walk(resumed, stop, 12) == straight[stop:]
        assert resumed.events == []


MADE = plan_layout(LoadMatrix(TOKENS_SRE[1]), CLUSTER, ms.Eplb(), 3)


class Failing(InlinePlanner):
    """A planner that makes the first plan, drops the second and fails in the third."""

    def __init__(self) -> None:
        self.tickets = [PlanOutcome(MADE), PlanOutcome(), PlanOutcome(error=ValueError("no room"))]

    def submit(self, request: PlanRequest) -> PlanTicket:
        return self.tickets.pop(0)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), "state"])
def test_plans_that_were_not_made_are_late_in_copies_and_resumed_runs(through: object) -> None:
    first = LayoutSchedule(0, FSEP.replace(lag=3, replan_every=2 - (through == "state")), MODEL, CLUSTER)
    first.source = Failing()
    for now in range(2):
        first.observe(LoadMatrix(TOKENS_SRE[now]))
    first.keep_made_plans()
    if callable(through):
        gone_on = through(first)
    else:
        gone_on = LayoutSchedule(0, first.strategy, MODEL, CLUSTER)
        gone_on.load_state_dict(json.loads(json.dumps(first.state_dict(0.0))))
    for schedule in (first, gone_on):
        schedule.source = InlinePlanner()
    assert walk(gone_on, 2, 8, by_vote=True) == walk(first, 2, 8, by_vote=True)
    assert gone_on.events == first.events
    assert len(first.events) == (through == "state")


def test_the_error_of_a_plan_is_raised_when_it_is_due() -> None:
    schedule = LayoutSchedule(0, FSEP.replace(lag=1), MODEL, CLUSTER)
    schedule.source = Failing()
    schedule.source.tickets = schedule.source.tickets[2:]
    schedule.observe(LoadMatrix(TOKENS_SRE[0]))
    schedule.keep_made_plans()
    with pytest.raises(ValueError, match="no room"):
        schedule.ready(0.0)


def test_a_history_of_another_predictor_is_begun_anew_and_said() -> None:
    stopped = LayoutSchedule(0, FSEP.replace(predictor=ms.Ema(decay=0.5)), MODEL, CLUSTER)
    walk(stopped, 0, 5)
    resumed = LayoutSchedule(0, FSEP.replace(predictor=ms.WindowMean(steps=2)), MODEL, CLUSTER)
    resumed.load_state_dict(stopped.state_dict(0.0))
    assert resumed.layout == stopped.layout
    assert [event.what for event in resumed.events] == ["history is of another predictor: begun anew, layout kept"]
    resumed.source = kept = Kept()
    walk(resumed, 5, 6)
    assert kept.requests[0].load == LoadMatrix(TOKENS_SRE[5])


# --- experts chosen on the counts


def test_late_slots_are_no_part_of_what_history_plans_and_keeps() -> None:
    strategy = FSEP.replace(sharding=ms.Fsep(slots_per_rank=(5, 3, 0, 4)), late_slots=2)
    schedule = LayoutSchedule(0, strategy, MODEL, CLUSTER)
    schedule.source = kept = Kept()
    walk(schedule, 0, 3)
    assert [request.slots_R for request in kept.requests] == [(3, 1, 0, 2)] * 3
    resumed = LayoutSchedule(0, strategy, MODEL, CLUSTER)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict(timeout_s=1))))
    assert walk(resumed, 3, 6) == walk(schedule, 3, 6)
    assert resumed.events == []


def test_with_lag_0_nothing_is_asked_of_history() -> None:
    for predictor in (ms.Last(), ms.Oracle()):
        schedule = LayoutSchedule(0, FSEP.replace(lag=0, predictor=predictor), MODEL, CLUSTER)
        schedule.source = kept = Kept()
        layouts = walk(schedule, 0, 3)
        assert kept.requests == []
        assert layouts == [schedule.layout] * 3


# --- what Greedy remembers


GREEDY = FSEP.replace(balance=ms.Greedy(), lag=2)


@pytest.mark.parametrize(
    ("before", "cluster"),
    [
        (GREEDY.replace(sharding=ms.Ep(slots_per_rank=3)), CLUSTER),
        (GREEDY, CLUSTER.replace(num_nodes=4, ranks_per_node=1)),
        (GREEDY.replace(predictor=ms.Adaptive()), CLUSTER.replace(num_nodes=1, ranks_per_node=4)),
    ],
    ids=["sharding", "nodes", "predictor"],
)
def test_what_was_remembered_elsewhere_is_forgotten(before: ms.Strategy, cluster: ms.ClusterSpec) -> None:
    stopped, resumed, fresh = (
        LayoutSchedule(0, before, MODEL, cluster),
        *(LayoutSchedule(0, GREEDY, MODEL, CLUSTER) for _ in "12"),
    )
    walk(stopped, 0, 5)
    state = json.loads(json.dumps(stopped.state_dict(0.0)))
    resumed.load_state_dict(state)
    fresh.load_state_dict(state | {"memory": ""})
    assert walk(resumed, 5, 12) == walk(fresh, 5, 12)


def test_a_damaged_state_is_found_when_it_is_loaded() -> None:
    stopped, resumed = LayoutSchedule(0, GREEDY, MODEL, CLUSTER), LayoutSchedule(0, GREEDY, MODEL, CLUSTER)
    walk(stopped, 0, 5)
    state = stopped.state_dict(0.0)
    number, tokens, held = state["recent"][0]
    fewer_ranks = zlib.decompress(b64decode(tokens))[: -8 * MODEL.num_experts]
    fewer = b64encode(zlib.compress(fewer_ranks)).decode()
    for damaged in ({"memory": state["memory"][:200]}, {"recent": [(number, fewer, held)]}):
        with pytest.raises(ValueError, match=r"the state of layer 0 is damaged: .*; load another checkpoint"):
            resumed.load_state_dict(state | damaged)


@pytest.mark.parametrize(
    ("predictor", "fields", "message"),
    [
        (ms.Last(), {"shape": [3, 4]}, "the state of layer 0 is damaged: history is of loads of shape"),
        (ms.Last(), {"memory": [[[1, 2, 3, 4, 5, 6]]]}, "the state of a load history is damaged"),
        (ms.Ema(), {"weight": -1}, "the state of a load history is damaged: .*weight=-1"),
        (ms.Ema(), {"mean": [[-1, 2, 3, 4, 5, 6]] * 4}, "load history is damaged"),
        (ms.Adaptive(), {"errors": [0.5]}, "load history is damaged: .*errors are"),
    ],
)
def test_a_damaged_history_is_found_when_it_is_loaded(predictor, fields, message) -> None:
    schedule = LayoutSchedule(0, FSEP.replace(predictor=predictor), MODEL, CLUSTER)
    walk(schedule, 0, 1)
    state = schedule.state_dict(0.0)
    own = fields.keys() & {"shape", "memory"}
    state["history"] |= fields if own else {"memory": state["history"]["memory"] | fields}
    with pytest.raises(ValueError, match=message):
        schedule.load_state_dict(state)


def test_an_oracle_is_told_of_no_batches_before_a_resume() -> None:
    stopped = LayoutSchedule(0, GREEDY, MODEL, CLUSTER)
    walk(stopped, 0, 5)
    resumed, fresh = (
        LayoutSchedule(0, GREEDY.replace(predictor=ms.Oracle()), MODEL, CLUSTER, TOKENS_SRE) for _ in range(2)
    )
    resumed.load_state_dict(stopped.state_dict(0.0))
    resumed.foresee(TOKENS_SRE[5:])
    walk(resumed, 5, 9)
    assert all(not request.recent for request in [*kept_requests(resumed, 9, 12), *kept_requests(fresh, 0, 3)])


def kept_requests(schedule: LayoutSchedule, first: int, last: int) -> list[PlanRequest]:
    schedule.source = kept = Kept()
    walk(schedule, first, last)
    return kept.requests


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_ranks_plan_alike_after_a_plan_that_only_some_of_them_have(lag: int) -> None:
    """A rank that has the late plan remembers no more than one that lacks it."""
    has, lacks = (LayoutSchedule(0, GREEDY.replace(lag=lag), MODEL, CLUSTER) for _ in range(2))
    for schedule in (has, lacks):
        walk(schedule, 0, 5)
    lacks._newest = PlanOutcome()
    lacks._pending[-1] = (lacks._pending[-1][0], PlanOutcome())
    for now in range(5, 12):
        agreed = all(each.ready(0.0) for each in (has, lacks))
        for schedule in (has, lacks):
            schedule.commit(agreed)
        if now > 5 + lag:
            assert has.layout == lacks.layout
        for schedule in (has, lacks):
            schedule.observe(LoadMatrix(TOKENS_SRE[now]))
