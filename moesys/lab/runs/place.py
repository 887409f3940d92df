"""Place: where trials run. What all places have in common, and how each says that a trial has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from moesys.config import Strategy
from moesys.config.experiment import Experiment, Trial
from moesys.lab.runs.trials import Measurement

if TYPE_CHECKING:
    from moesys.lab.runs.environment import Environment

T = TypeVar("T")


class TrialError(Exception):
    """A trial failed. The message is one line; ``trace`` the whole traceback, of every rank that has one."""

    def __init__(self, line: str, trace: str) -> None:
        super().__init__(line, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Ran:
    """A trial that ended. ``outcome``: None on processes that do not write. ``started``: UTC, and ``seconds`` from then
    on. ``environment``: where it ran, with its changes; None for that of this process.
    """

    trial: Trial
    outcome: Measurement | TrialError | None
    started: datetime
    seconds: float
    environment: tuple[Environment, str] | None = None


class Onlooker(Protocol):
    """Who is told what runs."""

    @property
    def folder(self) -> Path:
        """Where what is run may leave what belongs to it."""

    def start(self, trial: Trial) -> None:
        """This one runs now, or is the next to be handed out."""

    def ticks_of(self, trial: Trial) -> Callable[[], None]:
        """What the trial calls after each of its steps, in whichever process: counted from zero."""


class Place(Protocol):
    """Where trials run. All its processes make the same calls; only one of them ``writes`` records and speaks."""

    writes: bool

    def on_writer(self, make: Callable[[], T]) -> T | None:
        """What ``make`` gives on the process that writes, None on the others. Its ValueError is raised on all."""

    def share(self, value: T | None) -> T:
        """The writer's ``value``, on all processes."""

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        """A measurement on the process that writes, None on the others. Raises TrialError on all."""

    def run_all(self, trials: Sequence[Trial], experiment: Experiment, onlooker: Onlooker) -> Iterator[Ran]:
        """What became of each, in the order of ``trials``, whichever ends first."""

    def finished(self) -> Iterator[Ran]:
        """Of those of a ``run_all`` that broke off what has ended and was not handed out."""

    def close(self) -> None: ...


class Ranks(Place, Protocol):
    """A place with ranks of a process group."""

    def call(self, strategies: Sequence[Strategy], function: Callable[..., T], *arguments: Any) -> T:
        """Has every rank call a module-level function, which trains under ``strategies``: what it returns, on rank 0.
        Raises TrialError on all.
        """


class OneByOne:
    """A place that runs one trial after another."""

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        raise NotImplementedError

    def run_all(self, trials: Sequence[Trial], experiment: Experiment, onlooker: Onlooker) -> Iterator[Ran]:
        for trial in trials:
            onlooker.start(trial)
            yield ran(trial, partial(self.run, trial, experiment, onlooker.ticks_of(trial)))

    def finished(self) -> Iterator[Ran]:
        return iter(())


class OneProcess(OneByOne):
    """A place whose only process writes."""

    writes = True

    def on_writer(self, make: Callable[[], T]) -> T | None:
        return make()

    def share(self, value: T | None) -> T:
        assert value is not None
        return value

    def close(self) -> None: ...


class Pending(Protocol):
    """A trial that somebody else runs."""

    def done(self) -> bool: ...

    def result(self) -> Ran:
        """Waits for it; a failure of any kind is an outcome."""


class InOrder:
    """Trials that run side by side, handed out in the order in which they were begun."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Trial, Pending]] = deque()

    def add(self, trial: Trial, pending: Pending) -> None:
        self._waiting.append((trial, pending))

    def handed_out(self, onlooker: Onlooker) -> Iterator[Ran]:
        while self._waiting:
            trial, pending = self._waiting[0]
            onlooker.start(trial)
            result = pending.result()
            self._waiting.popleft()
            yield result

    def finished(self) -> Iterator[Ran]:
        """Those that have ended, without waiting for others."""
        ended = [pending for _, pending in self._waiting if pending.done()]
        self._waiting.clear()
        for pending in ended:
            yield pending.result()


def ran(trial: Trial, run: Callable[[], Measurement | None]) -> Ran:
    """Runs a trial by the clock; TrialError is an outcome."""
    started, started_s = datetime.now(UTC), time.monotonic()
    outcome: Measurement | TrialError | None
    try:
        outcome = run()
    except TrialError as error:
        outcome = error
    return Ran(trial, outcome, started, time.monotonic() - started_s)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")


def no_tick() -> None:
    """Of trials whose steps nobody counts."""
