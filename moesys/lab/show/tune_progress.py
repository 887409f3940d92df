"""Tells how a search goes: a live bar on a terminal, a line a stage and timed trial elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from moesys.tuner.journal import Entry


class TuneProgress(AbstractContextManager["TuneProgress"]):
    """Told of stages and points, on stdout by default. The best of a stage stands behind its bar, or in its line."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        console = Console(file=self._file)
        self._bars: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            # Names are not markup.
            words = TextColumn("{task.description}", markup=False)
            self._bars = Progress(words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._words, self._num_points = "", 0
        self._best_ms: float | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
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
            told = f"{entry.ms:,.1f} ms" if entry.ms is not None else f"FAILED: {entry.reason}"
            self._say(f"  {entry.name}: {told}")
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
            self._bars.console.print(Text(line))
        else:
            print(line, file=self._file, flush=True)
