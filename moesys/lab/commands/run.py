"""``moesys run``: from an experiment file to its table, or its tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from moesys.config import Strategy
from moesys.config.experiment import Experiment
from moesys.lab.commands.options import (
    ExperimentFile,
    Imports,
    Jobs,
    RunFolders,
    Settings,
    Threads,
    flag,
    option,
    refusing,
)
from moesys.lab.ranks.process_start import writes
from moesys.lab.runs.declarations import declared_in, import_modules_of_user, load_experiments
from moesys.lab.runs.runner import run
from moesys.lab.runs.slurm import Slurm, slurm_of
from moesys.lab.show.progress import RunProgress
from moesys.lab.show.sheets import AS_TABLES, CommandOutput

if TYPE_CHECKING:
    from moesys.lab.runs.comparison import Comparison


@refusing()
def run_command(
    file: ExperimentFile,
    out: RunFolders = Path("runs"),
    output: CommandOutput = AS_TABLES,
    seeds: Annotated[int | None, option("N", "Use the seeds 0 to N-1 instead of the experiment's.", min=1)] = None,
    threads: Threads = 1,
    jobs: Jobs = None,
    slurm: Annotated[
        str | None, option("OPTIONS", "Run trials as Slurm jobs: time=120,partition=gpu, or a .toml or .json file.")
    ] = None,
    retry_failed: Annotated[bool, flag("Run trials again that failed earlier.", "--retry-failed")] = False,
    fresh: Annotated[bool, flag("Start a new run folder.", "--fresh")] = False,
    strategy: Annotated[list[Path] | None, option("FILE", "Add a Strategy in a file; may be repeated.")] = None,
    settings: Settings = None,
    imports: Imports = None,
) -> int:
    """Runs what is left of each experiment in ``file``, and prints its table. Returns the exit code. Under torchrun
    only rank 0 prints.

    Progress goes where the tables go, or to stderr if a table is for a machine to read.
    """
    import_modules_of_user(imports or ())
    told = sys.stderr if output.as_json else sys.stdout
    comparisons: list[Comparison] = []
    folders: list[Path] = []
    code = 0
    where = jobs if slurm is None else _slurm(slurm, jobs)
    experiments = load_experiments(file, settings or ())
    if len(experiments) > 1 and output.as_json:
        raise ValueError(
            f"--json holds one comparison, and {file} has {len(experiments)} experiments; "
            "leave it out here, and give their run folders to moesys compare one at a time"
        )
    further = [declared_in(path, Strategy) for path in strategy or ()]
    for experiment in [_changed(one, seeds, further) for one in experiments]:
        if comparisons and not output.quiet:
            print(file=told)
        result = run(
            experiment,
            out,
            retry_failed=retry_failed,
            fresh=fresh,
            threads=threads,
            jobs=where,
            progress=RunProgress(Console(file=told, quiet=output.quiet)),
        )
        if writes():
            if not output.quiet:
                print(result.summary, file=told)
            # This import is late, so that a typo in the file is reported before torch and scipy are loaded.
            from moesys.lab.commands.compare import print_locations, report

            comparisons.append(report(result, output.as_json, wide=output.wide))
            folders.append(result.path)
            code = max(code, result.exit_code, int(bool(comparisons[-1].unequal)))
    if folders:
        print_locations(folders, told)
    return code


def _slurm(text: str, jobs: int | None) -> Slurm:
    if jobs is not None:
        raise ValueError(
            f"--jobs={jobs} are processes of this machine, and --slurm takes others; leave out one of them"
        )
    return slurm_of(text)


def _changed(experiment: Experiment, num_seeds: int | None, further: Sequence[Strategy]) -> Experiment:
    """Returns the experiment with other seeds, and with further strategies but those that it has already, under any
    name.
    """
    there = {strategy.fingerprint() for strategy in experiment.strategies}
    new = [strategy for strategy in further if strategy.fingerprint() not in there]
    return experiment.replace(
        seeds=experiment.seeds if num_seeds is None else tuple(range(num_seeds)),
        strategies=(*experiment.strategies, *new),
    )
