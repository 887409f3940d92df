"""Runs the trials of an experiment that are not recorded yet, and records each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from moesys.balance.replay import routing_of
from moesys.config.base import check_type, python_value
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Replay
from moesys.display import Columns, Display
from moesys.lab.ranks.process_start import RunInterruption, sigterm_as_ctrl_c
from moesys.lab.runs.environment import collect_environment, save_environment
from moesys.lab.runs.places import TrialError, TrialResult, place_for
from moesys.lab.runs.records import Record, RunFolder, latest
from moesys.lab.runs.slurm import Slurm, SlurmTrials
from moesys.step_lines import NumberLog
from moesys.traces import save_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moesys.lab.runs.comparison import Comparison


class QuietProgress:
    """Hears of the progress of a run and shows nothing; subclasses show it. ``end`` is called after errors too."""

    def begin(self, experiment: Experiment, recorded: Sequence[Record], num_left: int) -> None: ...

    def start(self, trial: Trial) -> None: ...

    def finish(self, record: Record) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, repr=False)
class RunResult(Display):
    """The records of an experiment in its run folder, after a run.

    ``records``: the last one of each trial that has any, in the order of ``Experiment.trials()``. ``num_run``: the
    number of trials of this run.
    """

    experiment: Experiment
    path: Path
    records: tuple[Record, ...]
    num_run: int

    @property
    def failed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.status == "failed")

    @property
    def exit_code(self) -> int:
        """1 if a trial failed, in this run or in one before that nobody retried."""
        return int(bool(self.failed))

    @cached_property
    def comparison(self) -> Comparison:
        """The statistics of the records."""
        # This import is here because it imports scipy, which help and errors need not wait for.
        from moesys.lab.runs.comparison import compare_records

        return compare_records(self.experiment, self.records)

    @property
    def summary(self) -> str:
        """The numbers of trials that were run, are recorded, and failed."""
        recorded = f"{len(self.records)} of {len(self.experiment.trials())} trials are recorded"
        failed = f", {len(self.failed)} of them failed (--retry-failed runs those again)" if self.failed else ""
        return f"{f'{self.num_run} run' if self.num_run else 'nothing to do'}: {recorded}{failed}"

    def _facts(self) -> str:
        return f"{self.experiment.name!r} in {self.path}, {self.summary}"

    def _columns(self) -> Columns:
        return self.comparison._columns()

    def plot(self) -> Axes:
        """Draws the speed-up of each strategy, as ``Comparison.plot``."""
        return self.comparison.plot()

    def __str__(self) -> str:
        return f"{self.comparison}\n{self.summary}; folder: {self.path}"

    def _repr_html_(self) -> str:
        return f"{self.comparison._repr_html_()}<p>{escape(f'{self.summary}; folder: {self.path}')}</p>"


def run(
    experiment: Experiment,
    out: str | Path = "runs",
    *,
    retry_failed: bool = False,
    fresh: bool = False,
    threads: int = 1,
    jobs: int | Slurm | None = None,
    progress: QuietProgress | None = None,
    log: Callable[..., object] | None = None,
) -> RunResult:
    """Runs the trials of ``experiment`` that its folder under ``out`` does not hold, in the order of their pairing.

    A trial that fails is recorded with its traceback, and the others still run; ``retry_failed`` runs the trials that
    failed before again; ``fresh`` starts a new folder. ``threads``: torch's threads per rank. Under torchrun every rank
    calls this and gets the same result.

    ``jobs``: the number of simulated trials that run at a time, on worker processes as soon as they take more than
    seconds; None: one per core, 1: in this process. It does not change records, their order or tables. Trainings on
    local ranks run one at a time. ``Slurm(...)`` makes every trial, of either kind, a job of a cluster.

    ``log``: a function such as ``wandb.log``, which is called for each trial that ended well, with ``step`` the number
    of trials so far and a dict of the trial's median samples and last loss, such as {"fsep/step_ms": 69.2}.

    A script that calls this needs ``if __name__ == "__main__":`` around the call, because ranks and workers are
    processes that import it.

    Raises ValueError, before any trial, for what cannot run or be resumed, and ``RunInterruption`` for Ctrl-C and, in
    the main thread of a program that does not handle it by itself, for SIGTERM.
    """
    check_type(Experiment, experiment=experiment)
    threads, jobs = python_value(threads), python_value(jobs)
    routing: dict[int, str] = {}
    if isinstance(experiment.workload, Replay):
        # A trace that is missing or does not fit is one error, not one a trial.
        for seed in experiment.seeds:
            routing[seed] = routing_of(experiment.workload, experiment.model, experiment.cluster, seed).digest
    with sigterm_as_ctrl_c(), ExitStack() as opened:
        make = partial(SlurmTrials, jobs) if isinstance(jobs, Slurm) else partial(place_for, jobs=jobs)
        place = opened.enter_context(closing(make(experiment, threads)))
        recorder = place.on_writer(lambda: _Recorder(experiment, RunFolder.open(experiment, out, fresh=fresh), routing))
        if recorder:
            opened.enter_context(closing(recorder))
        left = place.share(recorder.left(retry_failed) if recorder else None)
        num_run = 0
        try:
            if recorder and left:
                recorder.progress = progress or QuietProgress()
                recorder.log = log and NumberLog(log)
                opened.callback(recorder.progress.end)
                recorder.begin(left, threads)
            started, folder = (recorder.start, recorder.folder) if recorder else (lambda _: None, Path())
            for result in place.run_all(left, experiment, started, folder):
                if recorder:
                    recorder.finish(result)
                num_run += 1
        except KeyboardInterrupt:
            if recorder:
                for result in place.finished():
                    recorder.finish(result)
            raise RunInterruption(recorder.how_to_resume() if recorder else "") from None
        return place.share(recorder.result(num_run) if recorder else None)


class _Recorder:
    """Writes the records of a run, and reports its progress, on the process that writes.

    ``routing``: digests of the traces to replay, by seed. Raises ValueError for records that it cannot read, and for
    records of other traces.
    """

    progress: QuietProgress
    log: NumberLog | None = None

    def __init__(self, experiment: Experiment, folder: RunFolder, routing: Mapping[int, str]) -> None:
        self.experiment, self._folder, self._routing = experiment, folder, routing
        self.folder = folder.path
        self.trials = experiment.trials()
        try:
            self._recorded = latest(folder.records())
            self._check_routing()
        except ValueError:
            folder.close()
            raise

    def close(self) -> None:
        self._folder.close()

    def _check_routing(self) -> None:
        for record in self.records():
            if record.status == "ok" and record.routing != self._routing.get(record.seed, ""):
                raise ValueError(
                    f"the trace of seed {record.seed} is another one than {self.folder} has replayed "
                    f"({self._routing[record.seed]}, there {record.routing}); bring that back, or start a folder "
                    "beside it with --fresh (fresh=True)"
                )

    def left(self, retry_failed: bool) -> tuple[Trial, ...]:
        """Returns the trials that this run has to run."""
        again = {record.identity for record in self._recorded.values() if retry_failed and record.status == "failed"}
        return tuple(trial for trial in self.trials if trial.identity in again or trial.identity not in self._recorded)

    def begin(self, left: Sequence[Trial], threads: int) -> None:
        anew = {trial.identity for trial in left}
        self.progress.begin(self.experiment, [r for r in self.records() if r.identity not in anew], len(left))
        # This imports torch, so it comes after the progress has begun.
        self._here = collect_environment(threads)

    def start(self, trial: Trial) -> None:
        self.progress.start(trial)

    def finish(self, result: TrialResult) -> None:
        """Records a trial; its routing first, so that a recorded trial has it."""
        trial, measurement = result.trial, result.measurement
        assert measurement is not None
        record = Record(
            identity=trial.identity,
            strategy=trial.strategy.name,
            seed=trial.seed,
            repeat=trial.repeat,
            source=self.experiment.source,
            status="ok",
            started=result.started.isoformat(timespec="seconds"),
            seconds=result.seconds,
            environment=save_environment(result.environment or self._here, self.folder),
            routing=self._routing.get(trial.seed, ""),
        )
        if isinstance(measurement, TrialError):
            record = replace(record, status="failed", error=str(measurement), trace=measurement.trace)
        else:
            names = ("samples", "losses", "tokens_LE", "would_not_run")
            record = replace(record, **{name: getattr(measurement, name) for name in names})
            if measurement.routing:
                save_trace(measurement.routing, trace_path(self.folder, trial))
        self._folder.append(record)
        self._recorded[record.identity] = record
        self.progress.finish(record)
        if self.log and record.status == "ok":
            numbers = {name: of.median for name, of in record.samples.items() if of.values}
            numbers |= {"loss": record.losses[-1]} if record.losses else {}
            self.log({f"{record.strategy}/{name}": value for name, value in numbers.items()}, len(self._recorded))

    def records(self) -> tuple[Record, ...]:
        return tuple(self._recorded[trial.identity] for trial in self.trials if trial.identity in self._recorded)

    def result(self, num_run: int) -> RunResult:
        return RunResult(self.experiment, self.folder, self.records(), num_run)

    def how_to_resume(self) -> str:
        # The file is read again, because a signal may arrive after a record was written and before it was counted here.
        self._recorded = latest(self._folder.records())
        return (
            f"stopped: {len(self.records())} of {len(self.trials)} trials are recorded in {self.folder}; "
            "the same command goes on from there"
        )


def trace_path(folder: Path, trial: Trial) -> Path:
    """Returns the path of the routing of a measured trial in a run folder, a trace for ``Replay``."""
    return folder / "traces" / f"{trial.identity}.npz"
