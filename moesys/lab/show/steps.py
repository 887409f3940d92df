"""How far a benchmark is: a bar on a terminal, else a line a step. On stderr, because tables go to stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def steps_told(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """What is yielded is called with its name when each of ``total`` steps begins."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        done = 0

        def say(name: str) -> None:
            nonlocal done
            done += 1
            print(f"{what} [{done}/{total}] {name}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=total)
        begun = False

        def show(name: str) -> None:
            nonlocal begun
            bars.update(task, description=f"{what}: {name}", advance=int(begun))
            begun = True

        yield show
