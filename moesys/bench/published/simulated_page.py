"""The dated page of a simulated bench."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from moesys.bench.harness.reports import Report, publish
from moesys.bench.harness.sheets import Sheet


def show(sheets: Sequence[Sheet], subject: str, introduction: Sequence[str], name: str, out: Path | None) -> None:
    """Prints the tables; with a folder ``out``, writes them there first, as ``<name>_simulated_<date>.md``."""
    page = None if out is None else out / f"{name}_simulated_{date.today().isoformat()}.md"
    publish(Report(name, f"SIMULATED: {subject}", "simulated", sheets, introduction=introduction), page=page)
