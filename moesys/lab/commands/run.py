"""``moesys run``: from an experiment file to its table, or its tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypedDict, Unpack

from pydantic import ValidationError
from rich.console import Console

from moesys.config import Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import Training
from moesys.lab.commands import Format, refused
from moesys.lab.commands.declarations import slurm_of, strategy_of
from moesys.lab.ranks.process_start import writes
from moesys.lab.runs.experiment_files import in_words, load_experiments
from moesys.lab.runs.runner import Interrupted, RunResult, run
from moesys.lab.runs.slurm import Slurm
from moesys.lab.show.progress import RunProgress

if TYPE_CHECKING:
    from moesys.lab.runs.comparison import Comparison


class RunOptions(TypedDict, total=False):
    """Options of ``run``, with its defaults."""

    threads: int
    fail_fast: bool
    retry_failed: bool
    fresh: bool
    record_routing: Path | None


def run_file(
    file: Path,
    out: Path,
    form: Format = "table",
    *,
    num_seeds: int | None = None,
    interpret: bool = False,
    strategies: Sequence[Path] = (),
    jobs: int | None = None,
    slurm: str | None = None,
    **options: Unpack[RunOptions],
) -> int:
    """Runs what is left of each experiment in ``file``, and prints its table; for a sweep, draws the chart beside the
    run folders. ``strategies``: files of more strategies, for each experiment. ``slurm``: options of its jobs. Under
    torchrun only rank 0 prints.

    Progress goes where the tables go, or to stderr if a table is for a machine to read.
    """
    speaks = writes()
    told = sys.stdout if form == "table" else sys.stderr
    comparisons: list[Comparison] = []
    code = 0
    try:
        where = jobs if slurm is None else _slurm(slurm, jobs)
        for experiment in _experiments(file, form, num_seeds, interpret, strategies):
            if comparisons:
                print(file=told)
            result = run(experiment, out, progress=RunProgress(Console(file=told)), jobs=where, **options)
            if speaks:
                comparisons.append(_report(result, form, told))
                code = max(code, result.exit_code, int(bool(comparisons[-1].unequal)))
            if result.stopped:
                break
    except (ValueError, OSError) as error:
        return refused(error) if speaks else 2
    except Interrupted as stop:
        if speaks:
            print(stop, file=sys.stderr)
        return 130
    if len(comparisons) > 1:
        _draw(comparisons, out / file.stem, told)
    return code


def _slurm(text: str, jobs: int | None) -> Slurm:
    if jobs is not None:
        raise ValueError(
            f"--jobs={jobs} are processes of this machine, and --slurm takes others; leave out one of them"
        )
    return slurm_of(text)


def _experiments(
    file: Path, form: Format, num_seeds: int | None, interpret: bool, strategies: Sequence[Path]
) -> list[Experiment]:
    experiments = load_experiments(file)
    if len(experiments) > 1 and form in ("csv", "json"):
        raise ValueError(
            f"--format={form} holds one comparison, and {file} has {len(experiments)} experiments; "
            "leave it out here, and give their run folders to moesys compare one at a time"
        )
    seeds = {} if num_seeds is None else {"seeds": tuple(range(num_seeds))}
    further = [strategy_of(path) for path in strategies]
    workloads = [_interpreted(experiment) if interpret else experiment.workload for experiment in experiments]
    return [
        _with(further, experiment.replace(workload=workload, **seeds))
        for experiment, workload in zip(experiments, workloads, strict=True)
    ]


def _with(further: Sequence[Strategy], experiment: Experiment) -> Experiment:
    """Adds strategies, except for those that the experiment already has, under any name."""
    there = {strategy.fingerprint() for strategy in experiment.strategies}
    new = [strategy for strategy in further if strategy.fingerprint() not in there]
    try:
        return experiment.replace(strategies=(*experiment.strategies, *new)) if new else experiment
    except ValidationError as error:
        raise ValueError(in_words(error)) from None


def _interpreted(experiment: Experiment) -> Training:
    if not isinstance(experiment.workload, Training):
        raise ValueError(
            f"--interpret has the kernels of workload=Training(...) interpreted, and that of {experiment.name} is "
            f"{type(experiment.workload).__name__}; leave it out"
        )
    return experiment.workload.replace(interpret=True)


def _report(result: RunResult, form: Format, told: TextIO) -> Comparison:
    # Not at the top, here and below: a typo in the file is told before torch and scipy are there.
    from moesys.lab.commands.compare import report

    print(result, file=told)
    return report(result, form)


def _draw(comparisons: Sequence[Comparison], path_stem: Path, told: TextIO) -> None:
    if paths := _sweep_files(comparisons, path_stem):
        print(f"\nspeed-up along the sweep: {', '.join(str(path) for path in paths)}", file=told)


def _swept_field(experiments: Sequence[Experiment]) -> str | None:
    """Returns the number of the workload in which experiments differ that are otherwise equal except for their names;
    None if there is no such field.
    """
    first = experiments[0]
    for one in experiments:
        if one.replace(name=first.name, description=first.description, workload=first.workload) != first:
            return None
    if len({type(one.workload) for one in experiments}) > 1:
        return None
    values = {name: [getattr(one.workload, name) for one in experiments] for name in type(first.workload).model_fields}
    fields = [name for name, of_field in values.items() if any(value != of_field[0] for value in of_field)]
    if len(fields) != 1 or not all(isinstance(value, int | float) for value in values[fields[0]]):
        return None
    return fields[0]


def _sweep_files(comparisons: Sequence[Comparison], path_stem: Path) -> list[Path]:
    """Draws the speed-up along the swept field, as SVG and PNG; draws no file if these comparisons make no sweep."""
    experiments = [comparison.experiment for comparison in comparisons]
    if (field := _swept_field(experiments)) is None:
        return []
    # Not at the top: most runs draw nothing.
    from moesys.lab.show.figures import speedup_chart

    first = experiments[0]
    rows = [{row.name: row for row in comparison.rows if not row.repeat} for comparison in comparisons]
    return speedup_chart(
        field,
        [getattr(experiment.workload, field) for experiment in experiments],
        {one.name: [row[one.name].speedup for row in rows] for one in first.strategies if one != first.baseline},
        path_stem,
        name=path_stem.name,
        source=comparisons[0].source,
        baseline=comparisons[0].baseline.name,
    )
