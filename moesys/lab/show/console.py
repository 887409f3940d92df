"""Prints tables and trees that survive a pipe. Imports rich and nothing else, so that it works where others do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.measure import Measurement


def print_full(content: RenderableType, notes: Sequence[str] = (), file: TextIO | None = None) -> None:
    """Print a table or a tree and, below it, its notes, one a line; ``file`` is stdout by default.

    On a terminal it fits the window, and notes break between words. In a pipe or a file it is plain and as wide as its
    content, because rich would cut names at 80 columns there; the variable COLUMNS has the last word.
    """
    file = file or sys.stdout
    console = Console(file=file)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        widest = Console(file=file, width=10_000)
        console = Console(file=file, width=Measurement.get(widest, widest.options, content).maximum)
    console.print(content)
    for note in notes:
        console.print(note, soft_wrap=not console.is_terminal, highlight=False, markup=False)
