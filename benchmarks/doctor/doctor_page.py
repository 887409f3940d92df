"""The page to send back: written anew after each check, so that whatever ends the examination leaves it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.doctor.verdicts import Verdict
from moesys.lab.show.reports import Report, to_markdown, write
from moesys.lab.show.sheets import Sheet
from moesys.whole_file import write_whole

PAGE, DATA = "doctor.md", "doctor.json"
# The last lines of a failure's traceback.
TRACE_LINES = 30


def report_of(verdicts: Sequence[Verdict], rehearsed: bool, without: Sequence[str] = ()) -> Report:
    """Of checks that are through, and of those to come; ``without``: fields that no column shows."""
    first = next((of for of in verdicts if of.state == "failed"), None)
    counts = {state: sum(of.state == state for of in verdicts) for state in ("passed", "failed", "left out", "to come")}
    source = "rehearsed" if rehearsed else "measured"
    notes = [
        ", ".join(f"{number} {state}" for state, number in counts.items() if number),
        f"First to mend: '{first.name}', {first.layer}." if first else "No check failed.",
        f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}",
    ]
    if rehearsed:
        notes.append("REHEARSED without a GPU, in Triton's interpreter and on toys: it proves the checks, and no GPU.")
    title = f"Doctor of a GPU, {source}"
    sheet = Sheet("Checks", verdicts, notes, without=without)
    return Report("doctor gpu", title, source, [sheet], data={"verdicts": verdicts})


def write_page(folder: Path, verdicts: Sequence[Verdict], rehearsed: bool) -> None:
    """The table, tracebacks of what failed, and the pages that checks left in the folder, the machine's first."""
    report = report_of(verdicts, rehearsed)
    write(report, json_path=folder / DATA)
    parts = [to_markdown(report)]
    for of in verdicts:
        for rank, trace in of.traces.items():
            last = "\n".join(trace.rstrip().splitlines()[-TRACE_LINES:])
            parts.append(f"## {of.name}, {rank}\n\n```\n{last}\n```\n")
    pages = sorted(page for page in folder.rglob("*.md") if page != folder / PAGE)
    parts += [re.sub(r"^(#+ )", r"#\1", page.read_text(encoding="utf-8"), flags=re.MULTILINE) for page in pages]
    write_whole(folder / PAGE, "\n".join(parts))
