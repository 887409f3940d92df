"""``moesys tune``: from an experiment file to its fastest strategy and the reasons for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypedDict, Unpack

from moesys.lab.commands import refused
from moesys.lab.commands.declarations import space_of
from moesys.lab.ranks.process_start import writes
from moesys.lab.runs.experiment_files import load_experiment
from moesys.lab.show.tables import print_sheet
from moesys.tuner.space import SearchBounds


class TuneOptions(TypedDict, total=False):
    """Options of ``tune``, with its defaults."""

    timed: int | None
    threads: int
    fresh: bool


def tune_file(
    file: Path,
    space: Path | None = None,
    bounds: SearchBounds | None = None,
    out: Path = Path("runs"),
    **options: Unpack[TuneOptions],
) -> int:
    """Tune the experiment in ``file``, print what was found, and leave it in a folder; under torchrun rank 0 speaks."""
    speaks = writes()
    try:
        experiment = load_experiment(file)
        declared = None if space is None else space_of(space)
        # Not at the top: a typo in the file is told before torch is there.
        from moesys.lab.runs.tuning import tune
        from moesys.lab.show.progress import TuneProgress

        with TuneProgress() as told:
            result = tune(experiment, declared, bounds, out=out, told=told if speaks else None, **options)
    except (ValueError, OSError) as error:
        return refused(error) if speaks else 2
    except KeyboardInterrupt:
        if speaks:
            print("stopped: what was found out is in the journal; the same command goes on from there", file=sys.stderr)
        return 130
    if speaks:
        from moesys.lab.show.tune_tables import tune_sheets

        tuned = result.tuned
        for sheet in tune_sheets(tuned, experiment.name):
            print_sheet(sheet)
        print(
            f"Decided by {tuned.decided_by} times: {tuned.speedup:.3f} x as fast as {tuned.baseline.name}.\n"
            f"The strategy and its reasons: {result.path / 'tuned.toml'}\n"
            f"With it as the last strategy, for moesys run and explain: {result.path / 'experiment.toml'}"
        )
    return 0
