"""Timed trials, with a clock that is made up: how many there are, who is in them, who wins, what fails."""

from __future__ import annotations

import math
import random

import pytest
from tuner_cases import CLUSTERS, EP, SMALL, drawn, exhausted, memory_of, session_of, setting_of

from moesys import Fsep, SearchBounds
from moesys.tuner import timing
from moesys.tuner.costs import TuneJournal
from moesys.tuner.pick import tune_workload
from moesys.tuner.timing import MOST_TRIALS, Rounds, TrialFailedError

POINTS = list(SMALL.points(setting_of(drawn(CLUSTERS["even"], steps=1))))


class Clock:
    """Milliseconds by fingerprint, off by up to the share ``noise`` each time; every call is kept."""

    def __init__(self, ms, noise=0.0, fails=()):
        self.ms, self.noise, self.fails = ms, random.Random(0), set(fails)
        self.share, self.calls = noise, []

    def __call__(self, strategy, seed):
        self.calls.append((strategy.fingerprint(), seed))
        if strategy.fingerprint() in self.fails:
            raise TrialFailedError("it broke")
        return self.ms[strategy.fingerprint()] * self.noise.uniform(1 - self.share, 1 + self.share)


def rounds(clock, candidates=POINTS[1:20], journal=None, trials=MOST_TRIALS):
    found = Rounds(timing.Clock(clock, trials), session_of(journal), POINTS[0], seed=0, first_seed=5)
    return found.run(candidates)


def falling(points):
    """The later, the faster."""
    return {point.fingerprint(): 100.0 - place for place, point in enumerate(points)}


@pytest.mark.parametrize("trials", [2, 3, 7, 12, 30])
def test_trials_are_never_more_than_asked_for(trials):
    clock = Clock(falling(POINTS))
    result = rounds(clock, trials=trials)
    assert len(clock.calls) == result.num_trials <= trials
    assert len(set(clock.calls)) == len(clock.calls)


def test_every_round_has_the_baseline_and_a_seed_of_its_own():
    clock, baseline = Clock(falling(POINTS)), POINTS[0].fingerprint()
    rounds(clock)
    seeds = [seed for _, seed in clock.calls]
    assert seeds == sorted(seeds)
    assert sorted(set(seeds)) == [seed for fingerprint, seed in clock.calls if fingerprint == baseline]
    # Where the baseline stands in a round is by chance.
    of_rounds = ([fingerprint for fingerprint, of in clock.calls if of == seed] for seed in set(seeds))
    assert len({of_round.index(baseline) for of_round in of_rounds}) > 1


def test_the_fastest_wins_although_a_machine_drifts():
    ms = falling(POINTS)

    def drifting(strategy, seed):
        return ms[strategy.fingerprint()] * 1.5**seed

    result = rounds(drifting, POINTS[1:10])
    best = result.ranking[0]
    assert best.strategy == POINTS[9]
    assert best.ratio == pytest.approx((100 - 9) / 100)
    assert [one.ratio for one in result.ranking if one.strategy == POINTS[0]] == [1]


def test_candidates_of_the_kinds_of_the_best_come_in_later_rounds():
    fsep, ep = ([one for one in POINTS if one.sharding.kind == kind] for kind in ("fsep", "ep"))
    late = next(one for one in reversed(fsep) if one.overlap.kind == fsep[0].overlap.kind)
    ms = {one.fingerprint(): 100.0 for one in POINTS} | {fsep[0].fingerprint(): 50.0, late.fingerprint(): 40.0}
    result = rounds(Clock(ms), [fsep[0], *ep, late])
    assert result.ranking[0].strategy == late
    assert len(result.ranking[0].ms_by_seed) > 1


def test_failed_trials_are_named_and_not_run_again():
    failing = POINTS[1]
    clock = Clock(falling(POINTS), fails=[failing.fingerprint()])
    result = rounds(clock)
    assert result.failed == ((failing, "it broke"),)
    assert [fingerprint for fingerprint, _ in clock.calls].count(failing.fingerprint()) == 1
    with pytest.raises(ValueError, match=r"the baseline, strategy .* fails: it broke; put another one first"):
        rounds(Clock(falling(POINTS), fails=[POINTS[0].fingerprint()]))


def test_trials_of_the_journal_are_not_run_again(tmp_path):
    first, second = Clock(falling(POINTS)), Clock(falling(POINTS))
    whole = rounds(first, journal=TuneJournal(tmp_path / "journal.jsonl", {}))
    again = rounds(second, journal=TuneJournal(tmp_path / "journal.jsonl", {}))
    assert again == whole
    assert second.calls == []


@pytest.mark.parametrize(
    "name", [name if name == "slow ranks" else pytest.param(name, marks=pytest.mark.slow) for name in CLUSTERS]
)
def test_30_trials_find_the_clocks_best_though_the_model_is_wrong(name):
    """The clock knows another machine than the model: each kind of sharding and overlap is off by its own factor, each
    point by up to 5 %, and each trial by up to 1 %.
    """
    workload, off = drawn(CLUSTERS[name], steps=2), random.Random(1)
    simulated_ms = exhausted(workload, SMALL)
    kinds = (("ep", "sequential"), ("ep", "pipelined"), ("fsep", "sequential"))
    by_kind = {kind: off.uniform(0.7, 1.4) for kind in kinds}
    ms = {}
    for point in POINTS:
        kind = by_kind.get((point.sharding.kind, point.overlap.kind), 1.0)
        ms[point.fingerprint()] = simulated_ms[point.fingerprint()] * kind * off.uniform(0.95, 1.05)
    clock = Clock(ms, noise=0.01)
    bounds, timed = SearchBounds(budget=16), timing.Clock(clock, MOST_TRIALS)
    tuned = tune_workload(workload, [EP], session_of(), space=SMALL, bounds=bounds, clock=timed)
    assert tuned.decided_by == "measured"
    assert len(clock.calls) <= 30
    assert ms[tuned.strategy.fingerprint()] <= 1.05 * min(ms.values())
    assert math.isclose(tuned.speedup, ms[EP.fingerprint()] / ms[tuned.strategy.fingerprint()], rel_tol=0.02)


def test_what_does_not_fit_is_no_pick_however_fast_the_clock_says_it_is():
    workload = drawn(CLUSTERS["even"], steps=1)
    wide, wider = (EP.replace(name=f"{slots}", sharding=Fsep(slots_per_rank=slots)) for slots in (7, 8))
    gb = max(memory_of(point, setting_of(workload), 512).gb for point in POINTS)

    def tuned(clock):
        bounds, starts = SearchBounds(budget=8, memory_gb=gb), [wide, wider, EP]
        timed = timing.Clock(clock, 6)
        return tune_workload(workload, starts, session_of(), space=SMALL, bounds=bounds, clock=timed)

    clock = Clock(falling([EP, *POINTS[1:], wide, wider]))
    found = tuned(clock)
    assert found.timing.ranking[0].strategy == wide
    assert wider.fingerprint() not in {fingerprint for fingerprint, _ in clock.calls}
    assert memory_of(found.strategy, setting_of(workload), 512).gb <= gb
    fastest = found.timing.ranking[1]
    assert found.strategy.fingerprint() == fastest.strategy.fingerprint()
    assert found.speedup == 1 / fastest.ratio < 1
    with pytest.raises(ValueError, match=r"nothing that fits into .* GB was timed to the end, such as .*: it broke"):
        tuned(Clock(falling([wide]), fails=[point.fingerprint() for point in POINTS]))
