"""A timeline as a file that Perfetto (ui.perfetto.dev) and Chrome (about:tracing) open: ranks are processes, lanes are
threads, spans are complete events of Chrome's trace event format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesys.timeline import Timeline


def write_chrome_trace(timeline: Timeline, path: Path) -> Path:
    """Writes ``path``, and gives it. Times are microseconds from the first span's start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = {
        "traceEvents": _events(timeline),
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source.upper()},
    }
    path.write_text(json.dumps(trace), encoding="utf-8")
    return path


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
                "ts": round(span.start_us - zero_us, 3),
                "dur": round(span.duration_us, 3),
                "args": {"detail": span.detail},
            }
        )
    return events
