"""``moesys report``: the page of a folder that moesys wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

from moesys.files import read_bytes
from moesys.lab.commands.compare import written_for_display
from moesys.lab.commands.options import OutFile, argument, refusing
from moesys.lab.show.run_page import page_of_run, write_index, write_page


@refusing()
def report_command(
    folder: Annotated[Path, argument("DIR", "A folder of moesys run or ms.Watch, or a folder of several.")],
    out: OutFile = None,
) -> None:
    """Writes the page of ``folder``, and prints its path. It is report.html in the folder, or index.html of several."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    print(write_page(folder, out))


def print_locations(folders: Sequence[Path], told: TextIO) -> None:
    """Writes the pages of runs and the list of all runs beside them, and prints where they are."""
    print(file=told)
    for folder in folders:
        print(f"Results: {folder}", file=told)
        if page := written_for_display(page_of_run, folder):
            # Between the table and the facts about the run are the figures that this run has.
            figures = re.findall("<h2>(.*?)</h2>", read_bytes(page).decode())[1:-1]
            print(f"  {page.name}: {', '.join(['table', *figures]).lower()}", file=told)
    if page := written_for_display(write_index, folders[-1].parent):
        print(f"All runs: {page}", file=told)
