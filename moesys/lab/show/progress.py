"""Progress: bars on a terminal that can redraw, and plain lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import RealTraining
from moesys.display import counted, printable
from moesys.lab.runs.records import Record
from moesys.lab.runs.runner import QuietProgress
from moesys.lab.show.sheets import figure

if TYPE_CHECKING:
    from moesys.tuner.costs import Entry


# In a pipe, work that shows words on a status line is silent for no longer.
_SILENT_S = 20.0


class Bars(Progress):
    """Bars, and a line below them. ``refreshed`` reads the numbers of the bars and returns the line, whenever both are
    drawn.
    """

    # The constructor of the base draws before there are tasks.
    refreshed: Callable[[], str] | None = None

    def __init__(self, console: Console, *columns: ProgressColumn, transient: bool = True) -> None:
        # Rich must not read names as markup. The time left is estimated from all steps so far, however long they take.
        shown = TextColumn("{task.description}", markup=False), BarColumn(), *columns
        super().__init__(
            *shown, console=console, transient=transient, refresh_per_second=4, speed_estimate_period=float("inf")
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        line = self.refreshed() if self.refreshed else ""
        yield from super().get_renderables()
        yield from [Text(line, style="dim")] * (line != "")


def is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and not console.quiet


@contextmanager
def steps_told(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the name of each of ``total`` steps when it begins.

    It shows them on stderr, because tables go to stdout; ``quiet``: not at all.
    """
    console = Console(stderr=True, quiet=quiet)
    bars = Bars(console, MofNCompleteColumn(), TimeRemainingColumn()) if is_live(console) else None
    with bars or nullcontext():
        task, begun = bars.add_task(what, total=total) if bars else TaskID(0), 0

        def show(name: str) -> None:
            nonlocal begun
            if quiet:
                return
            if bars is None:
                print(f"{what} [{begun + 1}/{total}] {name}", file=sys.stderr, flush=True)
            else:
                bars.update(task, description=f"{what}: {name}", completed=begun)
            begun += 1

        yield show


@contextmanager
def status_line(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the words that it is called with on stderr: on the last line of a terminal, or
    elsewhere as a line when ``_SILENT_S`` have passed without one. ``quiet``: not at all.
    """
    console, said_s = Console(stderr=True, quiet=quiet), time.monotonic()

    def show(words: str) -> None:
        nonlocal said_s
        # Rich takes a string of a status line for its markup, whatever the console says.
        status.update(Text(printable(words)))
        if not (quiet or is_live(console)) and time.monotonic() - said_s >= _SILENT_S:
            said_s = time.monotonic()
            print(printable(words), file=sys.stderr, flush=True)

    with console.status(Text()) as status:
        yield show


# --- experiments ------------------------------------------------------------------------------------------------------


class _Display:
    """A console with bars if it can redraw; lines are printed above them. A quiet console shows errors alone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None

    def _say(self, line: str, is_error: bool = False) -> None:
        if self._console.quiet and not is_error:
            return
        if is_live(self._console):
            self._console.print(Text(line, style="red" if is_error else ""))
        else:
            print(line, file=self._console.file, flush=True)


class RunProgress(_Display, QuietProgress):
    """Shows the progress of an experiment. Without bars, it prints a line when the run begins, and one per trial.

    With bars, it shows all trials, the time left, the running trial and the best strategy so far; failures are printed
    above as they happen.
    """

    def begin(self, experiment: Experiment, recorded: Sequence[Record], num_left: int) -> None:
        self._num_trials, self._num_done = len(experiment.trials()), len(recorded)
        self._widest = max(len(strategy.name) for strategy in experiment.strategies)
        self._step_ms: dict[str, list[float]] = {}
        self._running = ""
        for record in recorded:
            self._note(record)
        self._say(_opening(experiment, len(recorded), num_left))
        if is_live(self._console):
            self._bars = Bars(self._console, MofNCompleteColumn(), TimeRemainingColumn())
            self._all = self._bars.add_task("trials", total=self._num_trials, completed=self._num_done)
            self._bars.refreshed = self._refreshed
            self._bars.start()

    def start(self, trial: Trial) -> None:
        self._running = f"{trial.strategy.name}, seed {trial.seed}"

    def finish(self, record: Record) -> None:
        self._num_done += 1
        self._note(record)
        if record.status == "failed" or self._bars is None:
            self._say(self._line(record), is_error=record.status == "failed")

    def end(self) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None

    def _note(self, record: Record) -> None:
        if record.status == "ok":
            self._step_ms.setdefault(record.strategy, []).append(record.samples["step_ms"].median)

    def _line(self, record: Record) -> str:
        width = len(str(self._num_trials))
        head = f"[{self._num_done:{width}}/{self._num_trials}] {record.strategy:{self._widest}} seed {record.seed}"
        if record.status == "failed":
            return f"{head}: FAILED after {record.seconds:.1f} s: {record.error}"
        again = ", again" if record.repeat else ""
        return f"{head}{again}: {figure(record.samples['step_ms'].median)} ms a step, {record.seconds:.1f} s"

    def _refreshed(self) -> str:
        if self._bars:
            self._bars.update(self._all, completed=self._num_done)
        if not self._step_ms:
            return self._running
        step_ms, name = min((statistics.median(values), name) for name, values in self._step_ms.items())
        return f"{self._running}; best so far: {name}, {figure(step_ms)} ms a step"


def _opening(experiment: Experiment, num_recorded: int, num_left: int) -> str:
    recorded = f", {num_recorded} recorded already" if num_recorded else ""
    on_gpus = (
        " on GPUs" if isinstance(experiment.workload, RealTraining) and experiment.workload.device == "cuda" else ""
    )
    measured = experiment.source == "measured"
    where = f"on {counted(experiment.cluster.num_ranks, 'rank')}{on_gpus}" if measured else "in the cost model"
    return f"{experiment.name}: {counted(num_left, 'trial')} to run {where}{recorded}"


# --- tunings ------------------------------------------------------------------------------------------------------


class TuneProgress(_Display):
    """Shows the stages and points of a tuning until ``close``. Each stage ends with a line that has its best."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._words, self._num_points = "", 0
        self._best_ms: float | None = None
        self._task: TaskID | None = None
        if is_live(console):
            self._bars = Bars(console, MofNCompleteColumn(), TimeElapsedColumn(), transient=False)
            self._bars.start()

    def close(self) -> None:
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
            self._say(f"  {entry.name}: {result}", is_error=entry.ms is None)
        if self._bars and self._task is not None:
            self._bars.advance(self._task)

    def _end_of_stage(self) -> None:
        if self._words:
            best = f", best {self._best_ms:,.4g} ms" if self._best_ms is not None else ""
            self._say(f"{self._words}: {self._num_points} through{best}")
            if self._bars and self._task is not None:
                self._bars.remove_task(self._task)
        self._words, self._best_ms, self._num_points, self._task = "", None, 0, None
