"""Options that several commands share, and how a command refuses what it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from moesys.lab.ranks.process_start import writes


@contextmanager
def refusing() -> Iterator[None]:
    """Raises typer.BadParameter for a ValueError, so that a wrong argument is reported as other mistakes are."""
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


def in_a_folder(path: Path | None) -> Path | None:
    """Raises typer.BadParameter for a file that could not be written, before anything is measured.

    Only the first of torchrun's ranks writes, so other hosts need no such folder.
    """
    if not writes():
        return path
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a folder; make it, or write elsewhere")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file in it")
    if path is not None:
        try:
            TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise typer.BadParameter(f"{path.parent} takes no file: {error.strerror}; write elsewhere") from None
    return path


def spec_file(path: Path | None) -> Path | None:
    """Raises typer.BadParameter for a ClusterSpec's file of another kind, or one that could not be written."""
    if path is not None and path.suffix not in (".toml", ".json"):
        raise typer.BadParameter(f"{path} is neither .toml nor .json; name a file of one of these kinds")
    return in_a_folder(path)


ResultFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what was measured to this file.", callback=in_a_folder)
]

ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Write the tables as a dated page into this folder.", exists=True, file_okay=False
    ),
]
