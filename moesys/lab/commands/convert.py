"""``moesys convert``: checkpoints of the hub's format and distributed ones, each from the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from moesys.lab.commands import refused


def convert_command(source: Path, out: Path, config: Path | None = None) -> int:
    """Convert what ``source`` is to what it is not; 2 where it, or ``out``, cannot be taken."""
    from moesys.hf.registration import check_transformers

    try:
        check_transformers()
        from moesys.hf.convert import convert

        with _progress_on(sys.stderr) as tick:
            convert(source, out, config, tick)
    except ImportError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        return refused(error)
    print(out)
    return 0


@contextmanager
def _progress_on(file: TextIO) -> Iterator[Callable[[int, int], None]]:
    """Gives who is told of bytes done, of all: a bar where ``file`` is a terminal, else a line each tenth."""
    console = Console(file=file)
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task("")
            yield lambda done, total: bars.update(task, completed=done, total=total)
        return
    tenths = 0

    def line(done: int, total: int) -> None:
        nonlocal tenths
        if 10 * done // total > tenths:
            tenths = 10 * done // total
            print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB", file=file, flush=True)

    yield line
