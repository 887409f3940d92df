"""Times few trials, in rounds, the baseline in every round, so that what drifts on a machine drifts for all.

A round runs its strategies on one seed, in an order by chance. A strategy is judged by its time over the baseline's in
the same rounds. The better half goes on and meets neighbours of the best, until the trials are spent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moesys.config import Strategy
from moesys.tuner.costs import Told
from moesys.tuner.deadline import Deadline, OutOfTimeError
from moesys.tuner.journal import Entry, Journal

MOST_TRIALS = 30
# Of all trials, how many the first round has; of a round, how many the next one has.
_FIRST_SHARE, _NEXT_SHARE = 0.3, 0.6

# Milliseconds of a step of a strategy on a seed: a trial's median, of the slowest rank in each step. Raises
# TrialFailedError.
Timer = Callable[[Strategy, int], float]


class TrialFailedError(Exception):
    """A timed trial ended without a time; the message says why."""


@dataclass(frozen=True)
class Timed:
    """A strategy that was timed. ``ms_by_seed``: a trial each; ``ratio``: its time over the baseline's, the geometric
    mean over their common seeds.
    """

    strategy: Strategy
    ms_by_seed: dict[int, float] = field(hash=False)
    ratio: float


@dataclass(frozen=True)
class TimingResult:
    """``ranking``: those of the last round, best first. ``failed``: with their reasons. ``num_trials``: all there are,
    those of the journal included.
    """

    ranking: tuple[Timed, ...]
    baseline: Timed
    failed: tuple[tuple[Strategy, str], ...]
    num_trials: int


@dataclass(frozen=True)
class Clock:
    """What times a strategy, how many trials it may time, and until when. Raises ValueError for fewer than 2 trials and
    more than 30.
    """

    timer: Timer
    trials: int
    deadline: Deadline = field(default_factory=Deadline)

    def __post_init__(self) -> None:
        if not 2 <= self.trials <= MOST_TRIALS:
            raise ValueError(f"{self.trials} timed trials; use 2 to {MOST_TRIALS}, or 0 for none")


class Rounds:
    """Timed trials of ``candidates``, the most promising first; ``baseline`` is timed in every round.

    ``neighbours``: for a strategy its neighbours, the most promising first, asked after the first round. ``seed``: of
    the order within rounds; ``first_seed``: of the first round's trials, and each round has the next one.
    """

    def __init__(
        self,
        clock: Clock,
        journal: Journal,
        baseline: Strategy,
        candidates: Sequence[Strategy],
        neighbours: Callable[[Strategy], Iterable[Strategy]],
        *,
        seed: int,
        first_seed: int,
        told: Told,
    ) -> None:
        self.timer, self.journal, self.told, self.deadline = clock.timer, journal, told, clock.deadline
        self.baseline, self.neighbours = baseline, neighbours
        self.candidates = [one for one in candidates if one.fingerprint() != baseline.fingerprint()]
        self.trials, self.draws, self.first_seed = clock.trials, random.Random(seed), first_seed
        self.num_trials = 0
        self.last: list[Timed] = []
        self.ms: dict[str, dict[int, float]] = {}
        self.failed: dict[str, tuple[Strategy, str]] = {}
        self.known = {baseline.fingerprint(): baseline}

    def run(self) -> TimingResult:
        """The trials that there is time for: in any case the baseline's and another one's.

        Raises ValueError where the baseline itself fails.
        """
        try:
            self._run()
        except OutOfTimeError:
            self.last = self.last or self._ranking(self.candidates)
        return TimingResult(
            tuple(sorted([self._timed(self.baseline), *self.last], key=lambda timed: timed.ratio)),
            self._timed(self.baseline),
            tuple(self.failed.values()),
            self.num_trials,
        )

    def _run(self) -> None:
        width = max(1, min(round(self.trials * _FIRST_SHARE), self.trials - 1))
        entrants, number = self.candidates[:width], 0
        waiting = self.candidates[width:]
        while self.num_trials + 1 + len(entrants) <= self.trials and (entrants or not number):
            self._round(self.first_seed + number, entrants)
            self.last = self._ranking(entrants)
            width, number = max(2, math.ceil(width * _NEXT_SHARE)), number + 1
            survivors = [timed.strategy for timed in self.last[: max(2, width // 2)]]
            entrants = survivors + self._newcomers(survivors, waiting, width - len(survivors))

    def _round(self, seed: int, entrants: Sequence[Strategy]) -> None:
        runners = [self.baseline, *entrants]
        self.told.stage(f"timing {len(runners)} strategies on seed {seed}", len(runners))
        self.draws.shuffle(runners)
        for strategy in runners:
            self.known[strategy.fingerprint()] = strategy
            self._trial(strategy, seed)

    def _trial(self, strategy: Strategy, seed: int) -> None:
        fingerprint, of = strategy.fingerprint(), f"seed {seed}"
        entry = self.journal.find(fingerprint, of)
        if entry is None:
            if self.baseline.fingerprint() in self.ms and len(self.ms) > 1:
                self.deadline.check()
            try:
                entry = Entry.about(strategy, "measured", of, self.timer(strategy, seed))
            except TrialFailedError as error:
                entry = Entry.about(strategy, "refused", of, None, str(error))
            self.journal.add(entry)
        self.num_trials += 1
        self.told.point(entry)
        if entry.ms is not None:
            self.ms.setdefault(fingerprint, {})[seed] = entry.ms
        elif fingerprint == self.baseline.fingerprint():
            raise ValueError(f"the baseline, strategy {strategy.name!r}, fails: {entry.reason}; put another one first")
        else:
            self.failed[fingerprint] = (strategy, entry.reason)

    def _ranking(self, strategies: Sequence[Strategy]) -> list[Timed]:
        left = [one for one in strategies if one.fingerprint() in self.ms and one.fingerprint() not in self.failed]
        return sorted((self._timed(strategy) for strategy in left), key=lambda timed: timed.ratio)

    def _timed(self, strategy: Strategy) -> Timed:
        ms, baseline_ms = self.ms[strategy.fingerprint()], self.ms[self.baseline.fingerprint()]
        logs = [math.log(ms[seed] / baseline_ms[seed]) for seed in ms if seed in baseline_ms]
        return Timed(strategy, dict(ms), math.exp(math.fsum(logs) / len(logs)))

    def _newcomers(self, survivors: Sequence[Strategy], waiting: list[Strategy], count: int) -> list[Strategy]:
        """Neighbours of the best that nobody has timed, then candidates that had no place."""
        found: list[Strategy] = []
        for strategy in [*(self.neighbours(survivors[0]) if survivors and count > 0 else ()), *waiting]:
            if len(found) >= count:
                break
            if strategy.fingerprint() not in self.known:
                self.known[strategy.fingerprint()] = strategy
                found.append(strategy)
        return found
