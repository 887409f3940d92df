"""Tells how an experiment goes while it runs: one live display on a terminal, one line a trial in a pipe or a file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Generated, Measured, ModelTraining, Replay, Training
from moesys.lab.runs.records import Record


@dataclass(frozen=True)
class StepFile:
    """Steps of the trial that runs, counted as the bytes of a file: any process may ``tick``, any other ``count``."""

    path: Path

    def tick(self) -> None:
        with self.path.open("ab") as file:
            file.write(b".")

    def count(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


class Progress(Protocol):
    """Who is told how an experiment goes; ``end`` always comes, also after an error."""

    def begin(self, experiment: Experiment, recorded: Sequence[Record], num_left: int) -> None: ...

    def start(self, trial: Trial, steps: StepFile) -> None: ...

    def finish(self, record: Record) -> None: ...

    def end(self) -> None: ...


class Silence:
    """Says nothing."""

    def begin(self, experiment: Experiment, recorded: Sequence[Record], num_left: int) -> None: ...

    def start(self, trial: Trial, steps: StepFile) -> None: ...

    def finish(self, record: Record) -> None: ...

    def end(self) -> None: ...


def progress_on(file: TextIO) -> Progress:
    """The display for ``file``: live where it is a terminal that can redraw, else plain lines."""
    console = Console(file=file)
    return LiveProgress(console) if console.is_terminal and not console.is_dumb_terminal else LineProgress(file)


class LineProgress:
    """A line when the run begins, and one a trial when it ends."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def begin(self, experiment: Experiment, recorded: Sequence[Record], num_left: int) -> None:
        self._tally = _Tally(experiment, recorded)
        self._print(_opening(experiment, len(recorded), num_left))

    def start(self, trial: Trial, steps: StepFile) -> None: ...

    def finish(self, record: Record) -> None:
        self._tally.add(record)
        self._print(self._tally.line(record))

    def end(self) -> None: ...

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)


class LiveProgress:
    """One live display: all trials, the trial now with its steps, the best so far, the time left.

    A failure is printed above it when it happens.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display: _Display | None = None

    def begin(self, experiment: Experiment, recorded: Sequence[Record], num_left: int) -> None:
        self._console.print(_opening(experiment, len(recorded), num_left), highlight=False, markup=False)
        self._tally = _Tally(experiment, recorded)
        self._display = _Display(self._tally, num_left, self._console)
        self._display.start()

    def start(self, trial: Trial, steps: StepFile) -> None:
        if self._display:
            self._display.show(trial, steps)

    def finish(self, record: Record) -> None:
        self._tally.add(record)
        if record.status == "failed":
            self._console.print(Text(self._tally.line(record), style="red"))

    def end(self) -> None:
        if self._display:
            self._display.stop()
            self._display = None


class _Display(Bars):
    """Two bars and a line; what they show is read when they are drawn."""

    def __init__(self, tally: _Tally, num_left: int, console: Console) -> None:
        self._tally = tally
        self._last = tally.num_done + num_left
        self._steps: StepFile | None = None
        self._started_s = time.monotonic()
        super().__init__(
            # Names are not markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._all = self.add_task("trials", total=tally.num_trials)
        self._one = self.add_task("", total=tally.num_steps, visible=False)

    def show(self, trial: Trial, steps: StepFile) -> None:
        self._steps, self._started_s = steps, time.monotonic()
        self.update(self._one, description=f"{trial.strategy.name}, seed {trial.seed}", completed=0, visible=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        # Only known once the constructor of the base, which draws, is through.
        if hasattr(self, "_one") and self._steps:
            self.update(self._all, completed=self._tally.num_done)
            self.update(self._one, completed=self._steps.count())
        yield Group(self.make_tasks_table(self.tasks), Text(self._outlook(), style="dim"))

    def _outlook(self) -> str:
        left_s = self._tally.seconds_left(self._last - self._tally.num_done, time.monotonic() - self._started_s)
        return "; ".join(filter(None, [self._tally.best(), left_s]))


class _Tally:
    """Trials that are done, the strategies' medians so far, and how long trials take."""

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
        # When those of this run did.
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
            # Trials may run side by side. Without the first, which has the start of ranks in it.
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
    on_gpus = " on GPUs" if isinstance(experiment.workload, Measured) and experiment.workload.device == "cuda" else ""
    measured = experiment.source == "measured"
    where = f"on {experiment.cluster.num_ranks} ranks{on_gpus}" if measured else "in the cost model"
    return f"{experiment.name}: {num_left} trials to run {where}{recorded}"
