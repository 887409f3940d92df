"""``moesys report``: the page of a watched training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesys.files import write_whole
from moesys.lab.commands.options import OutFile, refusing
from moesys.lab.runs.watched_run import read_watched_run
from moesys.lab.show.pages import watch_page


@refusing()
def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that ms.Watch or ms.hf.WatchCallback wrote to.")
    ],
    out: OutFile = None,
) -> None:
    """Writes the page of what ``ms.Watch`` wrote to ``folder``."""
    path = out or folder / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, watch_page(read_watched_run(folder)))
    print(path)
