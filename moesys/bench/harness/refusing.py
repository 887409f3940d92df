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


def options_given(ctx: typer.Context) -> dict[str, str]:
    """Returns the options that stand on the command line, by the name of their parameter; a default is not given."""
    given = {}
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            given[option.name or ""] = option.opts[0]
    return given
