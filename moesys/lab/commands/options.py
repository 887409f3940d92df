"""Options that several commands share, and how a command ends that cannot do what it was asked to do.

Importing this module imports neither torch nor pydantic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EPERM, EROFS
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

import typer

from moesys.lab.ranks.process_start import RunInterruption, writes


@contextmanager
def refusing() -> Iterator[None]:
    """Prints the message of a ValueError or OSError to stderr and ends the command with code 2; after Ctrl-C in a run
    that can go on, prints how, and ends it with code 130. Of torchrun's ranks only the first one prints.

    A reader that closes the pipe, such as ``head``, is no error: it is raised again, and ``typer`` ends in silence.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except RunInterruption as stop:
        message, code = str(stop), 130
    except (ValueError, OSError) as error:
        message, code = f"Error: {_reason(error)}", 2
    else:
        return
    if writes():
        from moesys.lab.show.tables import printable

        print(printable(message, keep="\n"), file=sys.stderr)
    raise typer.Exit(code)


def _reason(error: ValueError | OSError) -> str:
    # Not at the top: it needs pydantic.
    from moesys.config.base import in_words

    if not (isinstance(error, OSError) and error.filename):
        return in_words(error)
    way_out = "; give another path, or get access to this one" if error.errno in (EACCES, EPERM, EROFS) else ""
    return f"{error.strerror}: {error.filename}{way_out}"


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


ExperimentFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A .py file with a function that returns an Experiment; or .json, .toml."),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="A module or .py file with planners of yours, which a .toml or .json file names; may be repeated.",
    ),
]
RunFolders = Annotated[Path, typer.Option(help="Folder of run folders.")]
ModelLayers = Annotated[
    int | None, typer.Option(min=1, help="Of the whole model, whose memory counts; the workload's by default.")
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that simulate; one a core by default, 1: no others. The results are the same."),
]
Format = Literal["table", "markdown", "csv", "json", "latex"]
FormatOption = Annotated[Format, typer.Option("--format", help="All but table print nothing else to stdout.")]
Wide = Annotated[bool, typer.Option("--wide", help="Print all columns of tables, even if the terminal breaks them.")]
ResultFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what was measured to this file.", callback=in_a_folder)
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Write the tables as a dated page into this folder.", exists=True, file_okay=False
    ),
]
