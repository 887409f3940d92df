"""CostModel: the place of simulated trials, in this process or on workers side by side, with the same results."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from moesys.config import Strategy
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Measured
from moesys.lab.runs.place import InOrder, OneProcess, Onlooker, Ran, TrialError, first_line, ran
from moesys.lab.runs.trials import Measurement, run_simulated
from moesys.lab.runs.workers import WorkerDiedError, Workers


class _TakesLongError(Exception):
    """A trial is broken off for workers to run it."""


class CostModel(OneProcess):
    """Simulated trials, ``jobs`` at a time.

    Workers take over what this process has not run in its first seconds: their start would take longer than many an
    experiment, and what is compiled once a machine is compiled here.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._workers: Workers | None = None
        self._side_by_side = InOrder()

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        return simulated(trial, experiment, tick)

    def run_all(self, trials: Sequence[Trial], experiment: Experiment, onlooker: Onlooker) -> Iterator[Ran]:
        if self._jobs > 1:
            self._workers = Workers(self._jobs, partial(_warm_up, {trial.strategy for trial in trials}))
        for position, trial in enumerate(trials):
            onlooker.start(trial)
            try:
                yield self._run_here(trial, experiment, onlooker.ticks_of(trial), is_last=position + 1 == len(trials))
            except _TakesLongError:
                yield from self._run_there(trials[position:], experiment, onlooker)
                return

    def finished(self) -> Iterator[Ran]:
        return self._side_by_side.finished()

    def close(self) -> None:
        if self._workers:
            self._workers.close()

    def _run_here(self, trial: Trial, experiment: Experiment, tick: Callable[[], None], *, is_last: bool) -> Ran:
        def counted() -> None:
            tick()
            if self._workers and self._workers.are_due and not is_last:
                raise _TakesLongError

        return ran(trial, partial(simulated, trial, experiment, counted))

    def _run_there(self, trials: Sequence[Trial], experiment: Experiment, onlooker: Onlooker) -> Iterator[Ran]:
        assert self._workers is not None
        for trial in trials:
            answer = self._workers.submit(_ran, trial, experiment, onlooker.ticks_of(trial))
            self._side_by_side.add(trial, _Asked(trial, answer))
        yield from self._side_by_side.handed_out(onlooker)


def _warm_up(strategies: Iterable[Strategy]) -> None:
    # Not at the top: whoever has nothing left to run need not wait for it.
    from moesys.balance.planners import warm_up

    for strategy in strategies:
        warm_up(strategy.balance, strategy.split, late_slots=bool(strategy.late_slots))


@dataclass(frozen=True)
class _Asked:
    """A trial that a worker runs or will."""

    trial: Trial
    answer: Future[Ran]

    def done(self) -> bool:
        return self.answer.done()

    def result(self) -> Ran:
        try:
            return self.answer.result()
        except WorkerDiedError as error:
            line = f"{self.trial.strategy.name}, seed {self.trial.seed}: {error}"
            return Ran(self.trial, TrialError(line, line), datetime.now(UTC), error.seconds)


def simulated(trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement:
    """Raises TrialError."""
    assert not isinstance(experiment.workload, Measured)
    try:
        return run_simulated(
            trial.strategy, experiment.model, experiment.cluster, experiment.workload, trial.seed, tick
        )
    except _TakesLongError:
        raise
    except Exception as error:
        raise TrialError(first_line(error), traceback.format_exc()) from None


def _ran(trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Ran:
    """Called in a worker."""
    return ran(trial, partial(simulated, trial, experiment, tick))
