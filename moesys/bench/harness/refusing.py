"""Mistakes on a command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def refusing() -> Iterator[None]:
    """What the arguments cannot mean is told as the command line's other mistakes are."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
