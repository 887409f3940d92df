"""The progress of runs and tunings, while they run: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, TaskID, TimeElapsedColumn
from rich.text import Text

from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Generated, ModelTraining, RealTraining, Replay, Training
from moesys.lab.runs.records import Record
from moesys.lab.runs.runner import QuietProgress, StepCounter
from moesys.lab.show.steps import Bars, is_live

if TYPE_CHECKING:
    from moesys.tuner.journal import Entry


class RunProgress(QuietProgress):
    """Shows the progress of an experiment. Without bars, it prints a line when the run begins, and one per trial.

    With bars, it shows all trials, the running trial with its steps, the best so far and the time left; failures are
    printed above as they happen.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None

    def begin(self, experiment: Experiment, recorded: Sequence[Record], num_left: int) -> None:
        self._tally = _Tally(experiment, recorded)
        self._last = self._tally.num_done + num_left
        self._steps: StepCounter | None = None
        self._started_s = time.monotonic()
        self._say(_opening(experiment, len(recorded), num_left))
        if is_live(self._console):
            self._bars = Bars(self._console, MofNCompleteColumn(), refresh=self._refresh)
            self._all = self._bars.add_task("trials", total=self._tally.num_trials)
            self._one = self._bars.add_task("", total=self._tally.num_steps, visible=False)
            self._bars.start()

    def start(self, trial: Trial, steps: StepCounter) -> None:
        if self._bars:
            self._steps, self._started_s = steps, time.monotonic()
            words = f"{trial.strategy.name}, seed {trial.seed}"
            self._bars.update(self._one, description=words, completed=0, visible=True)

    def finish(self, record: Record) -> None:
        self._tally.add(record)
        if record.status == "failed" or self._bars is None:
            self._say(self._tally.line(record), style="red")

    def end(self) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None

    def _refresh(self) -> str:
        if self._bars and self._steps:
            self._bars.update(self._all, completed=self._tally.num_done)
            self._bars.update(self._one, completed=self._steps.count())
        left_s = self._tally.seconds_left(self._last - self._tally.num_done, time.monotonic() - self._started_s)
        return "; ".join(filter(None, [self._tally.best(), left_s]))

    def _say(self, line: str, style: str = "") -> None:
        if is_live(self._console):
            self._console.print(Text(line, style=style))
        else:
            print(line, file=self._console.file, flush=True)


class _Tally:
    """The trials that are done, the medians of strategies so far, and the duration of trials."""

    def __init__(self, experiment: Experiment, recorded: Sequence[Record]) -> None:
        self.num_trials = len(experiment.trials())
        self.num_done = len(recorded)
        workload = experiment.workload
        match workload:
            case Replay():
                self.num_steps = None
            case Generated():
                self.num_steps = workload.warmup + workload.steps * workload.micro_batches
            case Training() | ModelTraining():
                self.num_steps = workload.warmup + workload.steps
        self._widest = max(len(strategy.name) for strategy in experiment.strategies)
        self._step_ms: dict[str, list[float]] = {}
        self._seconds: list[float] = []
        # The ends of the trials of this run.
        self._finished_s: list[float] = []
        for record in recorded:
            self._note(record)

    def add(self, record: Record) -> None:
        self.num_done += 1
        self._finished_s.append(time.monotonic())
        self._note(record)

    def line(self, record: Record) -> str:
        width = len(str(self.num_trials))
        head = f"[{self.num_done:{width}}/{self.num_trials}] {record.strategy:{self._widest}} seed {record.seed}"
        if record.status == "failed":
            return f"{head}: FAILED after {record.seconds:.1f} s: {record.error}"
        again = ", again" if record.repeat else ""
        return f"{head}{again}: {_median_ms(record):,.1f} ms a step, {record.seconds:.1f} s"

    def best(self) -> str:
        if not self._step_ms:
            return ""
        step_ms, name = min((statistics.median(values), name) for name, values in self._step_ms.items())
        return f"best so far: {name}, {step_ms:,.1f} ms a step"

    def seconds_left(self, num_left: int, elapsed_s: float) -> str:
        if not self._seconds:
            return ""
        each_s = statistics.median(self._seconds)
        if len(self._finished_s) > 1:
            # Trials may run at the same time. The first one includes the start of ranks.
            each_s = (self._finished_s[-1] - self._finished_s[0]) / (len(self._finished_s) - 1)
        left_s = max(0.0, each_s * num_left - elapsed_s)
        return f"about {int(left_s // 60)}:{int(left_s % 60):02} left"

    def _note(self, record: Record) -> None:
        if record.status == "ok":
            self._seconds.append(record.seconds)
            self._step_ms.setdefault(record.strategy, []).append(_median_ms(record))


def _median_ms(record: Record) -> float:
    return statistics.median(record.samples["step_ms"].values)


def _opening(experiment: Experiment, num_recorded: int, num_left: int) -> str:
    recorded = f", {num_recorded} recorded already" if num_recorded else ""
    on_gpus = (
        " on GPUs" if isinstance(experiment.workload, RealTraining) and experiment.workload.device == "cuda" else ""
    )
    measured = experiment.source == "measured"
    where = f"on {experiment.cluster.num_ranks} ranks{on_gpus}" if measured else "in the cost model"
    return f"{experiment.name}: {num_left} trials to run {where}{recorded}"


# --- tunings ------------------------------------------------------------------------------------------------------


class TuneProgress(AbstractContextManager["TuneProgress"]):
    """Shows the stages and points of a tuning, on stdout by default. Each stage ends with a line that has its best."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file or sys.stdout)
        live = is_live(self._console)
        columns = (MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(self._console, *columns, transient=False) if live else None
        self._words, self._num_points = "", 0
        self._best_ms: float | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TuneProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_of_stage()
        if self._bars:
            self._bars.stop()

    def stage(self, words: str, num_points: int) -> None:
        self._end_of_stage()
        self._words = words
        if self._bars:
            self._task = self._bars.add_task(words, total=num_points)

    def point(self, entry: Entry) -> None:
        self._num_points += 1
        if entry.stage in ("simulated", "measured") and entry.ms is not None:
            self._best_ms = entry.ms if self._best_ms is None else min(self._best_ms, entry.ms)
        if entry.stage == "measured" or (entry.stage == "refused" and entry.of.startswith("seed")):
            result = f"{entry.ms:,.1f} ms" if entry.ms is not None else f"FAILED: {entry.reason}"
            self._say(f"  {entry.name}: {result}")
        if self._bars and self._task is not None:
            self._bars.advance(self._task)

    def _end_of_stage(self) -> None:
        if self._words:
            best = f", best {self._best_ms:,.4g} ms" if self._best_ms is not None else ""
            self._say(f"{self._words}: {self._num_points} through{best}")
            if self._bars and self._task is not None:
                self._bars.remove_task(self._task)
        self._words, self._best_ms, self._num_points, self._task = "", None, 0, None

    def _say(self, line: str) -> None:
        if self._bars:
            self._console.print(Text(line))
        else:
            print(line, file=self._console.file, flush=True)
