"""``moesys report``: the page of a watched training."""

from __future__ import annotations

from pathlib import Path

from moesys.files import write_whole
from moesys.lab.commands import refused
from moesys.lab.runs.watched_run import read_watched_run
from moesys.lab.show.pages import watch_page


def report_command(folder: Path, out: Path | None = None) -> int:
    """Write the page of what ``ms.Watch`` wrote to ``folder``, by default into it; 2 where there is nothing to show."""
    try:
        page = watch_page(read_watched_run(folder))
        path = out if out is not None else folder / "report.html"
        write_whole(path, page)
    except (ValueError, OSError) as error:
        return refused(error)
    print(path)
    return 0
