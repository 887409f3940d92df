"""Progress bars on a terminal that can redraw, and plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


class Bars(Progress):
    """Bars, and a line below them, whose numbers ``refresh`` reads whenever they are drawn; it returns the line."""

    def __init__(
        self,
        console: Console,
        *columns: ProgressColumn,
        refresh: Callable[[], str] | None = None,
        transient: bool = True,
    ) -> None:
        self._refresh: Callable[[], str] | None = None
        # Names are not markup.
        words = TextColumn("{task.description}", markup=False)
        super().__init__(words, BarColumn(), *columns, console=console, transient=transient, refresh_per_second=4)
        # The constructor of the base draws before there are tasks.
        self._refresh = refresh

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._refresh is None:
            yield self.make_tasks_table(self.tasks)
        else:
            line = self._refresh()
            yield Group(self.make_tasks_table(self.tasks), Text(line, style="dim"))


def is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def steps_told(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the name of each of ``total`` steps when it begins.

    It shows them on stderr, because tables go to stdout.
    """
    console = Console(stderr=True)
    begun = 0

    def show(name: str) -> None:
        nonlocal begun
        if bars is None:
            print(f"{what} [{begun + 1}/{total}] {name}", file=sys.stderr, flush=True)
        else:
            bars.update(task, description=f"{what}: {name}", completed=begun)
        begun += 1

    if not is_live(console):
        bars = None
        yield show
        return
    with Bars(console, MofNCompleteColumn(), TimeRemainingColumn()) as bars:
        task = bars.add_task(what, total=total)
        yield show


@contextmanager
def bytes_progress(file: TextIO) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with the number of bytes that are done, and of all; without bars, it prints tenths."""
    console = Console(file=file)
    tenths = 0

    def show(done: int, total: int) -> None:
        nonlocal tenths
        if bars is not None:
            bars.update(task, completed=done, total=total)
        elif 10 * done // total > tenths:
            tenths = 10 * done // total
            print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB", file=file, flush=True)

    if not is_live(console):
        bars = None
        yield show
        return
    with Bars(console, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as bars:
        task = bars.add_task("")
        yield show
