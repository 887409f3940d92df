"""``moesys run``: from an experiment file to its table.

Exit codes, here and in ``moesys compare``: 0, all is well; 1, a trial failed; 2, what was asked for cannot be done, and
a message says why; 130, Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from moesys.lab.files import load_experiment
from moesys.lab.progress import progress_on
from moesys.lab.runner import Interrupted, run

Format = Literal["table", "markdown", "csv", "json", "latex"]


def run_file(
    file: Path,
    out: Path,
    form: Format = "table",
    *,
    num_seeds: int | None = None,
    threads: int = 1,
    fail_fast: bool = False,
    retry_failed: bool = False,
    fresh: bool = False,
) -> int:
    """Run what is left of the experiment in ``file``, then print its table. Under torchrun only rank 0 speaks.

    Progress goes where the table goes, but to stderr where the table is for a machine to read.
    """
    speaks = os.environ.get("RANK", "0") == "0"
    told = sys.stdout if form == "table" else sys.stderr
    try:
        experiment = load_experiment(file)
        if num_seeds is not None:
            experiment = experiment.replace(seeds=tuple(range(num_seeds)))
        result = run(
            experiment,
            out,
            fail_fast=fail_fast,
            retry_failed=retry_failed,
            fresh=fresh,
            threads=threads,
            progress=progress_on(told),
        )
    except ValueError as error:
        return refused(error) if speaks else 2
    except Interrupted as stop:
        if speaks:
            print(stop, file=sys.stderr)
        return 130
    if not speaks:
        return 0
    print(result, file=told)
    # Not at the top: a typo in the file is told before torch and scipy are there.
    from moesys.lab.commands.compare import report

    report(result, form)
    return result.exit_code


def refused(error: ValueError) -> int:
    print(f"Error: {error}", file=sys.stderr)
    return 2
