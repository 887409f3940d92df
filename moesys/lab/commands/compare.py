"""``moesys compare`` and ``moesys report``: the tables and pages of folders, and those at the end of ``moesys run``."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TextIO, TypeVar

from moesys.config import Strategy
from moesys.config.base import in_words
from moesys.config.experiment import Experiment
from moesys.files import write_whole
from moesys.kinds import did_you_mean
from moesys.lab.commands.options import (
    AsJson,
    OutFile,
    Wide,
    argument,
    option,
    refusing,
)
from moesys.lab.runs.comparison import Comparison, compare_records
from moesys.lab.runs.environment import Environment, differences, load_environments
from moesys.lab.runs.records import RunFolder, other_kind, setting_fingerprint
from moesys.lab.runs.runner import RunResult
from moesys.lab.runs.watched_run import read_watched_run
from moesys.lab.show.comparisons import comparison_json, comparison_sheet, watched_sheet
from moesys.lab.show.sheets import CommandOutput, Report, print_sheet, publish
from moesys.step_lines import step_files

T = TypeVar("T")


def compare(runs: Path | str | Sequence[Path | str]) -> list[Comparison]:
    """Returns a comparison for each model, cluster and workload among run folders: one, or several.

    Folders with the same setting share a comparison, so seeds and strategies may come from several. Raises ValueError
    for a path that is not a run folder, and for a folder that cannot be read.
    """
    folders = [runs] if isinstance(runs, Path | str) else runs
    return [_merged(group) for group in _groups([RunFolder(Path(folder)) for folder in folders])]


@refusing()
def compare_command(
    folders: Annotated[list[Path], argument("RUN", "Run folders, such as runs/demo-1234abcd, or those of ms.Watch.")],
    as_json: AsJson = False,
    wide: Wide = False,
    metric: Annotated[list[str] | None, option("NAME", "Metric to add as a column; may be repeated.")] = None,
) -> int:
    """Prints a table for each model, cluster and workload among ``folders``, or one of watched trainings."""
    # For runs/* a shell gives the list of runs, the charts of sweeps and the folders of other commands too.
    there = [each for each in folders if not each.is_file()] or folders
    if all(watched := [_watched(each) for each in there]) and len(there) > 1:
        if metric:
            raise ValueError("--metric is for run folders, and these are watched trainings; leave it out")
        trainings = {}
        for folder, of_seeds in zip(there, watched, strict=True):
            trainings[str(folder)] = {seed: read_watched_run(path) for seed, path in of_seeds.items()}
        found = Report("compare", "", "measured", [watched_sheet(trainings)])
        publish(found, CommandOutput(None, as_json, False, wide))
        return 0
    runs = [each for each in there if not other_kind(each)] or there
    for each in there:
        if each not in runs:
            print(f"Left out: {each}, {other_kind(each)}", file=sys.stderr)
    groups = _groups([RunFolder(each) for each in runs])
    comparisons = [_merged(group) for group in groups]
    known = sorted({name for comparison in comparisons for row in comparison.rows for name in row.samples})
    for name in metric or ():
        if name not in known:
            choices = f"{', '.join(known) or 'none'}{did_you_mean(name, known)}"
            raise ValueError(f"--metric={name} is not recorded; choose one of {choices}")
    if len(groups) > 1 and as_json:
        raise ValueError(f"--json holds one comparison, and these folders make {len(groups)}; give them one at a time")
    environments = [_environments(group, comparison) for group, comparison in zip(groups, comparisons, strict=True)]
    _warn([environment for of_group in environments for environment in of_group])
    for group, comparison, of_group in zip(groups, comparisons, environments, strict=True):
        if len(groups) > 1:
            print(*(folder.path for folder in group))
        _print(comparison, as_json, _machine(of_group), wide, metric or ())
    return max(_told_unequal(comparison, group) for group, comparison in zip(groups, comparisons, strict=True))


def report(result: RunResult, as_json: bool, *, wide: bool = False) -> Comparison:
    """Prints the table of a run, and writes it to ``table.txt`` in the run folder."""
    comparison, folder, text = result.comparison, RunFolder(result.path), io.StringIO()
    environments = _environments([folder], comparison)
    print_sheet(comparison_sheet(comparison, _machine(environments)), text)
    written_for_display(lambda path: write_whole(path, text.getvalue()), folder.path / "table.txt")
    _warn(environments)
    _print(comparison, as_json, _machine(environments), wide)
    _told_unequal(comparison, [folder])
    return comparison


def written_for_display(write: Callable[[Path], T], path: Path) -> T | None:
    """Returns ``write(path)``; prints why it failed and returns None instead, because a run is not lost with what is
    written to show it.
    """
    try:
        return write(path)
    except (ValueError, OSError) as error:
        print(f"Warning: {path} has no new page, table or figure: {in_words(error)}", file=sys.stderr)
        return None


def _told_unequal(comparison: Comparison, folders: Sequence[RunFolder]) -> int:
    """Prints to stderr which rows have other bits than they must have, and how to find out why. Returns 1 for any."""
    baseline = comparison.baseline.name
    for row in comparison.unequal:
        assert row.agreement is not None
        step, seed = row.agreement.steps_within, row.agreement.seed
        names = {of.path: {strategy.name for strategy in of.experiment().strategies} for of in folders}
        # In a table of several folders a row may be named after one of them.
        folder = next((path for path, there in names.items() if {baseline, row.strategy.name} <= there), None)
        command = ["moesys", "bisect", str(folder), baseline, row.strategy.name, "--seed", str(seed)]
        how = (
            f"to find the tensor, layer and rank: {shlex.join(command)}"
            if folder is not None
            else "run both in one experiment, and moesys bisect finds the tensor, layer and rank"
        )
        print(
            f"Error: {row.name} is not bit-equal to {baseline}: their losses differ from step {step} of seed {seed} "
            f"on; {how}",
            file=sys.stderr,
        )
    return int(bool(comparison.unequal))


def _machine(environments: Sequence[Environment]) -> str:
    return environments[0].machine_line if environments else ""


def _print(comparison: Comparison, as_json: bool, machine: str, wide: bool, metrics: Sequence[str] = ()) -> None:
    if as_json:
        print(comparison_json(comparison, machine), end="")
    else:
        print_sheet(comparison_sheet(comparison, machine, metrics), wide=wide)


def _watched(folder: Path) -> dict[str, Path]:
    """Returns the folders of ``ms.Watch`` of a training: the folder, or by name those in it, one for each seed."""
    inside = {"": folder} if folder.is_dir() and step_files(folder) else {path.name: path for path in folder.glob("*/")}
    return {name: path for name, path in inside.items() if step_files(path)}


# --- several folders in one table ---------------------------------------------------------------------------------


def _groups(folders: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Collects the folders by model, cluster and workload, so that a table never mixes simulated and measured.

    A folder all of whose trials the others have is a run of theirs once more, and gets a table of its own.
    """
    groups: dict[str, list[RunFolder]] = {}
    seen: dict[str, set[str]] = {}
    for folder in folders:
        experiment = folder.experiment()
        key = setting_fingerprint(experiment)
        trials = {trial.identity for trial in experiment.trials()}
        if trials <= seen.get(key, set()):
            key = f"{key} {folder.path}"
        groups.setdefault(key, []).append(folder)
        seen[key] = seen.get(key, set()) | trials
    return list(groups.values())


def _merged(folders: Sequence[RunFolder]) -> Comparison:
    """Compares all strategies and seeds of the folders with the baseline of the first one.

    A strategy that several folders have is one row; another one under the same name is named after its folder too.
    """
    experiments = [folder.experiment() for folder in folders]
    strategies: dict[str, Strategy] = {}
    for folder, experiment in zip(folders, experiments, strict=True):
        for strategy in experiment.strategies:
            if strategy.fingerprint() in strategies:
                continue
            taken = any(other.name == strategy.name for other in strategies.values())
            named = strategy.replace(name=f"{strategy.name} ({folder.path.name})") if taken else strategy
            strategies[strategy.fingerprint()] = named
    first = experiments[0]
    merged: Experiment = first.replace(
        strategies=tuple(strategies.values()),
        seeds=tuple(dict.fromkeys(seed for experiment in experiments for seed in experiment.seeds)),
        repeat_baseline=any(experiment.repeat_baseline for experiment in experiments),
    )
    # The last record of a trial counts. If several folders have the trial, it has to be the one of the first folder.
    records = [record for folder in reversed(folders) for record in folder.records()]
    return compare_records(merged, records)


def _environments(folders: Sequence[RunFolder], comparison: Comparison) -> list[Environment]:
    """Returns the environments that the compared records come from."""
    there = {name: found for folder in folders for name, found in load_environments(folder.path).items()}
    return [there[name] for name in comparison.environments if name in there]


def _warn(environments: Sequence[Environment]) -> None:
    """Prints to stderr the fields in which environments differ from the first, which makes times hard to compare."""
    values: dict[str, list[str]] = {}
    for other in environments[1:]:
        for field, (here, there) in differences(environments[0], other).items():
            values.setdefault(field, [here]).append(there)
    if values:
        num = len({environment.id for environment in environments})
        print(f"Warning: these records come from {num} environments, which differ in", file=sys.stderr)
    for field, found in values.items():
        print(f"  {field}: {' / '.join(value or '(none)' for value in dict.fromkeys(found))}", file=sys.stderr)


# --- pages ------------------------------------------------------------------------------------------------------


@refusing()
def report_command(
    folder: Annotated[Path, argument("DIR", "A folder of moesys run or ms.Watch, or a folder of several.")],
    out: OutFile = None,
) -> None:
    """Writes the page of ``folder``, and prints its path. It is report.html in the folder, or index.html of several."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    # This import is here, and below, because it imports matplotlib.
    from moesys.lab.show.run_page import write_page

    print(write_page(folder, out))


def print_locations(folders: Sequence[Path], told: TextIO) -> None:
    """Writes the pages of runs and the list of all runs beside them, and prints where they are."""
    from moesys.lab.show.run_page import page_of_run, write_index

    print(file=told)
    for folder in folders:
        page = written_for_display(page_of_run, folder)
        print(f"Results: {page or folder}", file=told)
    if page := written_for_display(write_index, folders[-1].parent):
        print(f"All runs: {page}", file=told)
