"""Options of commands that write: what could not be written is refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer


def in_a_folder(path: Path | None) -> Path | None:
    """Refuses what could not be written when all is measured. The first of torchrun's ranks writes; other hosts need
    no such folder.
    """
    if os.environ.get("RANK", "0") != "0":
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


ResultFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what was measured to this file.", callback=in_a_folder)
]

ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Write the tables as a dated page into this folder.", exists=True, file_okay=False
    ),
]
