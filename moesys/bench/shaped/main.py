"""``bench shaped`` as a command: what the machine lacks is said first, then cases are run, shown and written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moesys.bench.shaped.cases import Plan, bench_shaped
from moesys.bench.shaped.report import markdown, show, to_json
from moesys.lab.slow_links.namespaces import lacks
from moesys.lab.slow_links.processor_shares import lacks_shares


def main(
    plans: Sequence[Plan],
    *,
    repeats: int = 7,
    shares: bool = True,
    out: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measure, write, print; the exit code: 1 if a bit was wrong, 2 where no such hosts can be made."""
    if reason := lacks():
        print(f"error: shaped links cannot be made: {reason}", file=sys.stderr)
        return 2
    if shares and (reason := lacks_shares()):
        print(f"error: hosts cannot have a share of the processor: {reason}; or use --no-shares", file=sys.stderr)
        return 2
    results = bench_shaped(plans, repeats, shares=shares)
    if out is not None:
        out.write_text(markdown(results))
    if json_path is not None:
        json_path.write_text(to_json(results))
    show(results)
    return int(any(result.differing for result in results))
