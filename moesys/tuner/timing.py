"""Few timed trials, in rounds. The baseline runs in every round, so that a machine's drift affects all alike.

A round runs its strategies on one seed, in random order. A strategy is judged by its time divided by the baseline's
time in the same rounds. The better half goes on and meets others of the best one's kinds, until all trials are used.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moesys.config import Strategy
from moesys.tuner.costs import Entry, Session

MOST_TRIALS = 30
# The share of all trials in the first round, and the size of a round relative to the round before it.
_FIRST_SHARE, _NEXT_SHARE = 0.3, 0.6

# Returns milliseconds of a step of a strategy on a seed: the median over the steps of a trial, each of which takes as
# long as its slowest rank. Raises TrialFailedError.
Timer = Callable[[Strategy, int], float]


class TrialFailedError(Exception):
    """A timed trial ended without a time; the message says why."""


@dataclass(frozen=True)
class TimedStrategy:
    """A strategy that was timed. ``ms_by_seed``: of each trial; ``ratio``: its time divided by the baseline's, the
    geometric mean over their common seeds.
    """

    strategy: Strategy
    ms_by_seed: dict[int, float] = field(hash=False)
    ratio: float


@dataclass(frozen=True)
class TimingResult:
    """``ranking``: the strategies of the last round, best first. ``failed``: strategies with the reason.
    ``num_trials``: all trials, those of the journal included.
    """

    ranking: tuple[TimedStrategy, ...]
    failed: tuple[tuple[Strategy, str], ...]
    num_trials: int


@dataclass(frozen=True)
class Clock:
    """A timer and the number of trials that it may run, from 2 to ``MOST_TRIALS``."""

    timer: Timer
    trials: int


class Rounds:
    """Timed trials against ``baseline``. ``seed``: of the order within rounds; ``first_seed``: of the first round's
    trials; each round uses the next one.
    """

    def __init__(self, clock: Clock, session: Session, baseline: Strategy, *, seed: int, first_seed: int) -> None:
        self.clock, self.session, self.baseline = clock, session, baseline
        self.draws, self.first_seed = random.Random(seed), first_seed
        self.num_trials = 0
        self.ms: dict[str, dict[int, float]] = {}
        self.failed: dict[str, tuple[Strategy, str]] = {}

    def run(self, candidates: Sequence[Strategy]) -> TimingResult:
        """Runs the trials of ``candidates``, the most promising first. After the first round, candidates of the kinds
        of the best come first.

        Raises ValueError where the baseline itself fails.
        """
        trials, seed = self.clock.trials, self.first_seed
        width = max(1, min(round(trials * _FIRST_SHARE), trials - 1))
        distinct = {one.fingerprint(): one for one in candidates if one.fingerprint() != self.baseline.fingerprint()}
        waiting = list(distinct.values())
        entrants, waiting, ranked = waiting[:width], waiting[width:], list[TimedStrategy]()
        while self.num_trials + 1 + len(entrants) <= trials and (entrants or seed == self.first_seed):
            self._round(seed, entrants)
            ranked = self._ranking(entrants)
            width, seed = max(2, math.ceil(width * _NEXT_SHARE)), seed + 1
            entrants = [timed.strategy for timed in ranked[: max(2, width // 2)]]
            best = kinds_of(entrants[0] if entrants else self.baseline)
            waiting.sort(key=lambda one: kinds_of(one) != best)
            room = max(0, width - len(entrants))
            entrants, waiting = [*entrants, *waiting[:room]], waiting[room:]
        ranking = sorted([self._timed(self.baseline), *ranked], key=lambda timed: timed.ratio)
        return TimingResult(tuple(ranking), tuple(self.failed.values()), self.num_trials)

    def _round(self, seed: int, entrants: Sequence[Strategy]) -> None:
        runners = [self.baseline, *entrants]
        self.session.observer.stage(f"timing {len(runners)} strategies on seed {seed}", len(runners))
        self.draws.shuffle(runners)
        for strategy in runners:
            self._trial(strategy, seed)

    def _trial(self, strategy: Strategy, seed: int) -> None:
        fingerprint, of, journal = strategy.fingerprint(), f"seed {seed}", self.session.journal
        entry = journal.find(fingerprint, of)
        if entry is None:
            try:
                entry = Entry.about(strategy, "measured", of, self.clock.timer(strategy, seed))
            except TrialFailedError as error:
                entry = Entry.about(strategy, "refused", of, None, str(error))
            journal.add(entry)
        self.num_trials += 1
        self.session.observer.point(entry)
        if entry.ms is not None:
            self.ms.setdefault(fingerprint, {})[seed] = entry.ms
        elif fingerprint == self.baseline.fingerprint():
            raise ValueError(f"the baseline, strategy {strategy.name!r}, fails: {entry.reason}; put another one first")
        else:
            self.failed[fingerprint] = (strategy, entry.reason)

    def _ranking(self, strategies: Sequence[Strategy]) -> list[TimedStrategy]:
        left = [one for one in strategies if one.fingerprint() in self.ms and one.fingerprint() not in self.failed]
        return sorted(map(self._timed, left), key=lambda timed: timed.ratio)

    def _timed(self, strategy: Strategy) -> TimedStrategy:
        ms, baseline_ms = self.ms[strategy.fingerprint()], self.ms[self.baseline.fingerprint()]
        logs = [math.log(ms[seed] / baseline_ms[seed]) for seed in ms if seed in baseline_ms]
        return TimedStrategy(strategy, dict(ms), math.exp(math.fsum(logs) / len(logs)))


def kinds_of(strategy: Strategy) -> tuple[str, str]:
    """Returns the kinds of sharding and overlap."""
    return strategy.sharding.kind, strategy.overlap.kind
