"""Writes a timeline for Perfetto (ui.perfetto.dev) and Chrome (about:tracing): ranks are processes, lanes are threads,
spans are complete events of Chrome's trace event format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moesys.simulator.critical_path import PathPart
from moesys.timeline import Source, Timeline

# Of the process that shows the critical path; ranks have their own numbers.
PATH_PROCESS = -1


def write_chrome_trace(timeline: Timeline, path: Path, critical_path: Sequence[PathPart] = ()) -> Path:
    """Writes ``path``, and gives it. Times are microseconds from the first span's start, which is the path's too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = {
        "traceEvents": [*_path_events(critical_path, timeline.source), *_events(timeline)],
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source.upper()},
    }
    path.write_text(json.dumps(trace), encoding="utf-8")
    return path


def _path_events(critical_path: Sequence[PathPart], source: Source) -> Iterator[dict[str, Any]]:
    """A process of its own above the ranks, with one event a part, named for where it was."""
    if critical_path:
        name = {"name": f"{source.upper()}: critical path"}
        yield {"ph": "M", "name": "process_name", "pid": PATH_PROCESS, "args": name}
        yield {"ph": "M", "name": "process_sort_index", "pid": PATH_PROCESS, "args": {"sort_index": PATH_PROCESS}}
    end_us = 0.0
    for part in critical_path:
        start_us, end_us = end_us, end_us + 1e6 * part.seconds
        yield {
            "ph": "X",
            "name": part.where,
            "cat": part.lane,
            "pid": PATH_PROCESS,
            "tid": 0,
            **_times(start_us, end_us),
            "args": {"kind": part.kind, "detail": part.detail, "share": round(part.share, 6)},
        }


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    zero_us = min((span.start_us for span in timeline.spans), default=0.0)
    lanes = {lane: number for number, lane in enumerate(sorted({span.lane for span in timeline.spans}))}
    events = []
    for rank in sorted({span.rank for span in timeline.spans}):
        title = f"{timeline.source.upper()}: rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": title}})
    for rank, lane in sorted({(span.rank, span.lane) for span in timeline.spans}):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lanes[lane], "args": {"name": lane}})
    for span in timeline.spans:
        events.append(
            {
                "ph": "X",
                "name": span.kind,
                "cat": span.lane,
                "pid": span.rank,
                "tid": lanes[span.lane],
                **_times(span.start_us - zero_us, span.end_us - zero_us),
                "args": {"detail": span.detail},
            }
        )
    return events


def _times(start_us: float, end_us: float) -> dict[str, float]:
    """In whole nanoseconds. Both ends are rounded, not the length, or a span could end after the next one begins."""
    start_ns, end_ns = round(1000 * start_us), round(1000 * end_us)
    return {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
