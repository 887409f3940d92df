"""``moesys compare`` and ``moesys report``: the tables and pages of folders, and those at the end of ``moesys run``."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TextIO, TypeVar

from moesys.config.base import in_words
from moesys.files import write_whole
from moesys.kinds import did_you_mean
from moesys.lab.commands.options import AsJson, OutFile, Wide, argument, option, refusing
from moesys.lab.runs.comparison import Comparison, compare_records
from moesys.lab.runs.environment import Environment, differences, load_environments
from moesys.lab.runs.records import RunFolder, other_kind
from moesys.lab.runs.runner import RunResult
from moesys.lab.runs.watched_run import read_watched_run
from moesys.lab.show.comparisons import comparison_json, comparison_sheet, watched_sheet
from moesys.lab.show.sheets import CommandOutput, Report, print_sheet, publish
from moesys.step_lines import step_files

T = TypeVar("T")


def compare(runs: Path | str | Sequence[Path | str]) -> list[Comparison]:
    """Returns the comparison of each run folder: of one, or of several.

    Raises ValueError for a path that is not a run folder, and for a folder that cannot be read.
    """
    folders = [runs] if isinstance(runs, Path | str) else runs
    return [_compared(RunFolder(Path(folder))) for folder in folders]


@refusing()
def compare_command(
    folders: Annotated[list[Path], argument("RUN", "Run folders, such as runs/demo-1234abcd, or those of ms.Watch.")],
    as_json: AsJson = False,
    wide: Wide = False,
    metric: Annotated[list[str] | None, option("NAME", "Metric to add as a column; may be repeated.")] = None,
) -> int:
    """Prints a table for each of ``folders``, or one of watched trainings."""
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
    run_folders = [RunFolder(each) for each in runs]
    comparisons = [_compared(folder) for folder in run_folders]
    known = sorted({name for comparison in comparisons for row in comparison.rows for name in row.samples})
    for name in metric or ():
        if name not in known:
            choices = f"{', '.join(known) or 'none'}{did_you_mean(name, known)}"
            raise ValueError(f"--metric={name} is not recorded; choose one of {choices}")
    if len(runs) > 1 and as_json:
        raise ValueError(f"--json holds one comparison, and these folders make {len(runs)}; give them one at a time")
    environments = [_environments(*one) for one in zip(run_folders, comparisons, strict=True)]
    _warn([environment for of_folder in environments for environment in of_folder])
    for folder, comparison, of_folder in zip(runs, comparisons, environments, strict=True):
        if len(runs) > 1:
            print(folder)
        _print(comparison, as_json, _machine(of_folder), wide, metric or ())
    return max(_told_unequal(*one) for one in zip(run_folders, comparisons, strict=True))


def report(result: RunResult, as_json: bool, *, wide: bool = False) -> Comparison:
    """Prints the table of a run, and writes it to ``table.txt`` in the run folder."""
    comparison, folder, text = result.comparison, RunFolder(result.path), io.StringIO()
    environments = _environments(folder, comparison)
    print_sheet(comparison_sheet(comparison, _machine(environments)), text)
    written_for_display(lambda path: write_whole(path, text.getvalue()), folder.path / "table.txt")
    _warn(environments)
    _print(comparison, as_json, _machine(environments), wide)
    _told_unequal(folder, comparison)
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


def _compared(folder: RunFolder) -> Comparison:
    return compare_records(folder.experiment(), folder.records())


def _told_unequal(folder: RunFolder, comparison: Comparison) -> int:
    """Prints to stderr which rows have other bits than they must have, and how to find out why. Returns 1 for any."""
    baseline = comparison.baseline.name
    for row in comparison.unequal:
        assert row.agreement is not None
        step, seed = row.agreement.steps_within, row.agreement.seed
        command = ["moesys", "bisect", str(folder.path), baseline, row.strategy.name, "--seed", str(seed)]
        print(
            f"Error: {row.name} is not bit-equal to {baseline}: their losses differ from step {step} of seed {seed} "
            f"on; to find the tensor, layer and rank: {shlex.join(command)}",
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


def _environments(folder: RunFolder, comparison: Comparison) -> list[Environment]:
    """Returns the environments that the compared records come from."""
    there = load_environments(folder.path)
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
