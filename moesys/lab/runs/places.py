"""The places where trials run: this process and worker processes, for simulated trials, or ranks, for measured ones.

Importing this module imports no torch: a run that has nothing left to do need not wait for it.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moesys.config import BYTES_PER_GB, Strategy
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import ModelTraining, RealTraining, Training
from moesys.display import counted
from moesys.files import number_set
from moesys.lab.ranks.process_start import check_main_guard, first_line, joins
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.trials import Measurement, run_measured, run_simulated
from moesys.limits import rank_memory

if TYPE_CHECKING:
    from concurrent.futures import Future

    from moesys.lab.ranks.pool import Workers
    from moesys.lab.ranks.torchrun_ranks import Ranks
    from moesys.lab.runs.environment import Environment

T = TypeVar("T")

# Collectives notice lost ranks long before; this only ends what would hang for ever.
_TRIAL_TIMEOUT_S = 24 * 3600.0
# Triton reads this variable when it is loaded.
_INTERPRETING = {"TRITON_INTERPRET": "1"}
# torch reads this variable when it first maps peers' memory. It allows several ranks to share a GPU.
_SHARING_GPUS = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


class TrialError(Exception):
    """A trial failed. The message is one line; ``trace`` is the whole traceback, of every rank that has one."""

    def __init__(self, line: str, trace: str) -> None:
        super().__init__(line, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial. ``measurement``: an error if it failed; None on processes that do not write.

    started: UTC. seconds: from then on. environment: where it ran; None for that of this process.
    """

    trial: Trial
    measurement: Measurement | TrialError | None
    started: datetime
    seconds: float
    environment: Environment | None = None


@dataclass(frozen=True)
class PendingTrial:
    """A trial that another process runs. ``result`` waits for it; a failure of any kind is a result."""

    trial: Trial
    done: Callable[[], bool]
    result: Callable[[], TrialResult]


class Place:
    """A place where trials run, one after another unless a subclass does otherwise.

    Under torchrun each rank has one, and all make the same calls; only one of them ``writes`` records and prints.
    """

    writes = True

    def __init__(self) -> None:
        self._pending: deque[PendingTrial] = deque()

    def share(self, value: T | None) -> T:
        """Returns the ``value`` of the process that writes, on all processes."""
        assert value is not None
        return value

    def on_writer(self, make: Callable[[], T]) -> T | None:
        """Returns the result of ``make`` on the process that writes, None on others. Raises its ValueError on all."""
        made, refusal = None, ""
        if self.writes:
            try:
                made = make()
            except ValueError as error:
                refusal = str(error)
        if refusal := self.share(refusal):
            raise ValueError(refusal)
        return made

    def run(self, trial: Trial, experiment: Experiment) -> Measurement | None:
        """Returns the measurement on the process that writes, None on the others. Raises TrialError on all."""
        raise NotImplementedError

    def run_all(
        self, trials: Sequence[Trial], experiment: Experiment, started: Callable[[Trial], None], folder: Path
    ) -> Iterator[TrialResult]:
        """Yields the results in the order of ``trials``, whichever ends first. ``started`` is called with a trial that
        runs now, or is the next one whose result is returned; ``folder``: for files that belong to the trials.
        """
        for trial in trials:
            started(trial)
            yield result_of(trial, partial(self.run, trial, experiment))

    def finished(self) -> Iterator[TrialResult]:
        """Yields the results that an interrupted ``run_all`` has not yielded, without waiting for other trials."""
        ended = [pending for pending in self._pending if pending.done()]
        self._pending.clear()
        for pending in ended:
            yield pending.result()

    def close(self) -> None: ...

    def _in_order(self, started: Callable[[Trial], None]) -> Iterator[TrialResult]:
        while self._pending:
            started(self._pending[0].trial)
            result = self._pending[0].result()
            self._pending.popleft()
            yield result


def place_for(experiment: Experiment, threads: int, jobs: int | None = None) -> Place:
    """Returns worker processes for a simulated experiment, ``jobs`` of them; ranks for a measured one.

    Raises ValueError if ``jobs``, or the ranks that torchrun started, do not suit the experiment, and in a rank or a
    worker, which imports a script that runs one.
    """
    check_main_guard()
    if experiment.source == "simulated":
        if joins():
            raise ValueError("this experiment runs in the cost model, which needs no ranks; leave torchrun out")
        return SimulatedTrials(num_workers(jobs))
    if num_workers(jobs) > 1 and jobs is not None:
        raise ValueError(
            f"jobs={jobs}: workload={type(experiment.workload).__name__} is timed, and trials side by side would slow "
            "each other down; leave jobs out, or use Slurm(...) for hosts of their own"
        )
    return RankTrials(experiment, threads)


def num_workers(jobs: int | None) -> int:
    """Returns ``jobs``; for None, the number of cores that this process may use. Raises ValueError for less than 1."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}; use at least 1, which is this process alone, or none for a worker on each core")
    return available_cores() if jobs is None else jobs


def result_of(trial: Trial, run: Callable[[], Measurement | None]) -> TrialResult:
    """Runs a trial and measures its duration; a TrialError is a result."""
    started, started_s = datetime.now(UTC), time.monotonic()
    measurement: Measurement | TrialError | None
    try:
        measurement = run()
    except TrialError as error:
        measurement = error
    return TrialResult(trial, measurement, started, time.monotonic() - started_s)


# --- ranks --------------------------------------------------------------------------------------------------------


class RankTrials(Place):
    """Measured trials on the ranks that torchrun started, or on new processes of this machine.

    These start with the first trial and stay for all, except that they start again after a failure. Raises ValueError
    if the ranks of torchrun, or the device, do not suit the experiment.
    """

    def __init__(self, experiment: Experiment, threads: int) -> None:
        super().__init__()
        workload = experiment.workload
        assert isinstance(workload, RealTraining)
        if isinstance(workload, ModelTraining) and find_spec("transformers") is None:
            raise ValueError(
                "workload=ms.models.ModelTraining(...) trains models of transformers: pip install 'moesys[hf]'"
            )
        self._experiment, self._workload, self._threads = experiment, workload, threads
        self._num_ranks = experiment.cluster.num_ranks
        self._ranks: Ranks | None = None
        if not joins():
            self._backend = _backend_of(workload, self._num_ranks)
            return
        world_size = number_set("WORLD_SIZE", 1)
        if world_size != self._num_ranks:
            raise ValueError(
                f"torchrun started {world_size} ranks but the experiment's cluster has {self._num_ranks}; "
                f"start {self._num_ranks} in all (--nproc-per-node times --nnodes), or leave torchrun out"
            )
        os.environ.update(_environment_of(workload))
        from moesys.lab.ranks.torchrun_ranks import TorchrunRanks

        backend = _backend_of(workload, number_set("LOCAL_WORLD_SIZE", world_size))
        self._ranks = TorchrunRanks(backend, threads=threads)
        self.writes = self._ranks.writes

    def share(self, value: T | None) -> T:
        return self._ranks.share(value) if self._ranks else super().share(value)

    def run_all(
        self, trials: Sequence[Trial], experiment: Experiment, started: Callable[[Trial], None], folder: Path
    ) -> Iterator[TrialResult]:
        # Compiling for a later strategy would disturb the times of a trial, and be shown as a part of it.
        self._prepare(dict.fromkeys(trial.strategy for trial in trials))
        yield from super().run_all(trials, experiment, started, folder)

    def run(self, trial: Trial, experiment: Experiment) -> Measurement | None:
        arguments = (trial.strategy, experiment.model, experiment.cluster, self._workload, trial.seed)
        return self.call((trial.strategy,), run_measured, *arguments)

    def call(self, strategies: Iterable[Strategy], function: Callable[..., T], *arguments: Any) -> T:
        """Calls a module-level function, which trains under ``strategies``, on every rank.

        Returns the result of rank 0, or under torchrun of the calling rank. Raises TrialError on all.
        """
        from moesys.lab.ranks.pool import RankError

        self._prepare(strategies)
        if self._ranks is None:
            self._ranks = self._local_ranks()
        try:
            return self._ranks.call(function, *arguments)
        except RankError as error:
            raise TrialError(str(error).partition("\n")[0], str(error)) from None

    def _prepare(self, strategies: Iterable[Strategy]) -> None:
        """Checks what local ranks need, and compiles loops in this process, not in all ranks at once."""
        if not joins():
            if self._ranks is None:
                _check_text(self._workload)
                _check_memory(self._experiment)
            _warm_up(strategies)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def _local_ranks(self) -> Ranks:
        from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
        from moesys.lab.ranks.torchrun_ranks import COLLECTIVE_TIMEOUT_S

        learner = "model_learner" if isinstance(self._workload, ModelTraining) else "language_model"
        return LocalRanks(
            self._num_ranks,
            threads=self._threads,
            timeouts=RankTimeouts(run_s=_TRIAL_TIMEOUT_S, collective_s=COLLECTIVE_TIMEOUT_S),
            environment=_environment_of(self._workload),
            preload=("moesys.lab.runs.trials", f"moesys.lab.train.{learner}"),
            backend=self._backend,
        )


def _check_text(workload: RealTraining) -> None:
    if isinstance(workload, ModelTraining):
        for field, path in [*(("data", path) for path in workload.data), ("tokenizer", workload.tokenizer)]:
            if (field, path) != ("tokenizer", "bytes") and not os.path.exists(os.path.expanduser(path)):
                raise ValueError(f"{field}={path!r} does not exist; correct the path, or leave {field} out")


def _check_memory(experiment: Experiment) -> None:
    """Raises ValueError for a strategy whose experts need more than the free memory of this machine."""
    import psutil

    workload, free_gb = experiment.workload, psutil.virtual_memory().available / BYTES_PER_GB
    assert isinstance(workload, Training | ModelTraining)
    shape = experiment.model, experiment.cluster, workload.num_layers, workload.batch * workload.context
    for strategy in experiment.strategies if workload.device == "cpu" else ():
        needed_gb = experiment.cluster.num_ranks * rank_memory(strategy, *shape, recompute=workload.recompute).gb
        if needed_gb > free_gb:
            raise ValueError(
                f"experts of strategy {strategy.name!r} need at least {needed_gb:,.1f} GB, on "
                f"{counted(experiment.cluster.num_ranks, 'rank')} and in {counted(workload.num_layers, 'layer')}, "
                f"and {free_gb:,.1f} GB are free; use a smaller model, or simulate this one (moesys simulate)"
            )


def _environment_of(workload: RealTraining) -> dict[str, str]:
    """Returns the variables that ranks need before they import anything."""
    if workload.device == "cuda":
        return _SHARING_GPUS
    return _INTERPRETING if isinstance(workload, Training) and workload.interpret else {}


def _backend_of(workload: RealTraining, ranks_of_host: int) -> str:
    """Raises ValueError for GPUs if there are none."""
    if workload.device == "cpu":
        return "gloo"
    from moesys.lab.ranks.process import gpu_backend

    return gpu_backend(ranks_of_host)


def _warm_up(strategies: Iterable[Strategy]) -> None:
    for strategy in strategies:
        if strategy.balance.is_compiled or strategy.split.is_compiled or strategy.late_slots:
            from moesys.balance.run_planner import warm_up

            warm_up(strategy.balance, strategy.split, late_slots=bool(strategy.late_slots))


# --- simulated trials ---------------------------------------------------------------------------------------------


class _TakesLongError(Exception):
    """A trial is interrupted, because workers will run it."""


class SimulatedTrials(Place):
    """Simulated trials, ``jobs`` at a time.

    Workers take over what this process has not run in its first seconds: their start would take longer than many an
    experiment, and what is compiled once per installation is compiled here.
    """

    def __init__(self, jobs: int) -> None:
        super().__init__()
        self._jobs = jobs
        self._workers: Workers | None = None

    def run_all(
        self, trials: Sequence[Trial], experiment: Experiment, started: Callable[[Trial], None], folder: Path
    ) -> Iterator[TrialResult]:
        if self._jobs > 1:
            self._workers = simulating_workers(self._jobs, partial(_warm_up, {trial.strategy for trial in trials}))
        for position, trial in enumerate(trials):
            started(trial)
            workers = self._workers if position + 1 < len(trials) else None
            try:
                yield result_of(trial, partial(simulated, trial, experiment, workers))
            except _TakesLongError:
                assert self._workers is not None
                yield from self._run_on(self._workers, trials[position:], experiment, started)
                return

    def close(self) -> None:
        if self._workers:
            self._workers.close()

    def _run_on(
        self, workers: Workers, trials: Sequence[Trial], experiment: Experiment, started: Callable[[Trial], None]
    ) -> Iterator[TrialResult]:
        for trial in trials:
            answer = workers.submit(result_of, trial, partial(simulated, trial, experiment))
            self._pending.append(PendingTrial(trial, answer.done, partial(_answered, trial, answer)))
        yield from self._in_order(started)


def simulating_workers(jobs: int, prepare: Callable[[], object]) -> Workers:
    """Returns worker processes that have what a simulated trial imports. ``prepare`` is that of ``Workers``."""
    from moesys.lab.ranks.pool import Workers

    return Workers(jobs, prepare, (__name__, "moesys.balance.replay", "moesys.simulator.step_program"))


def simulated(trial: Trial, experiment: Experiment, workers: Workers | None = None) -> Measurement:
    """Raises TrialError, and _TakesLongError as soon as ``workers`` are due."""

    def tick() -> None:
        if workers is not None and workers.are_due:
            raise _TakesLongError

    assert not isinstance(experiment.workload, RealTraining)
    try:
        return run_simulated(
            trial.strategy, experiment.model, experiment.cluster, experiment.workload, trial.seed, tick
        )
    except _TakesLongError:
        raise
    except Exception as error:
        raise TrialError(first_line(error), traceback.format_exc()) from None


def _answered(trial: Trial, answer: Future[TrialResult]) -> TrialResult:
    from moesys.lab.ranks.pool import WorkerDiedError

    try:
        return answer.result()
    except WorkerDiedError as error:
        line = f"{trial.strategy.name}, seed {trial.seed}: {error}"
        return TrialResult(trial, TrialError(line, line), datetime.now(UTC), error.seconds)
