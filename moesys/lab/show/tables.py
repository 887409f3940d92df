"""Makes tables that say what is measured, what is simulated and what is significant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from moesys.config.workload import Measured, Training
from moesys.lab.runs.comparison import JUDGED_STEPS, Comparison, Row
from moesys.lab.runs.records import setting_fingerprint
from moesys.lab.runs.statistics import MIN_SEEDS, PairedRatio


@dataclass(frozen=True)
class Sheet:
    """A comparison in words, cell by cell, for every format that people read.

    The first column is the strategy's name. ``best``: of each row, whether it is to be set off.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: tuple[bool, ...]
    legend: tuple[str, ...]


def comparison_table(comparison: Comparison, machine: str = "") -> tuple[Table, list[str]]:
    """The table and its legend; ``machine`` is what the numbers were measured on, in a line."""
    sheet = comparison_sheet(comparison, machine)
    table = Table(title=Text(sheet.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(sheet.columns):
        # Two short lines, because a terminal cuts one long line where the window is narrow.
        table.add_column(Text(column.replace(" ", "\n", 1)), justify="right" if index else "left", no_wrap=True)
    for cells, best in zip(sheet.rows, sheet.best, strict=True):
        # Text, because in a string rich would take brackets for its markup.
        table.add_row(*(Text(cell) for cell in cells), style="bold green" if best else None)
    return table, list(sheet.legend)


def comparison_sheet(comparison: Comparison, machine: str = "") -> Sheet:
    """Columns for which no row has anything to say are left out."""
    cells_of = {
        "strategy": lambda row: row.name,
        "step ms": _median("step_ms"),
        "speed-up [95 %]": lambda row: _speedup_cell(row, comparison),
        "exposed ms": _median("exposed_ms"),
        "load max/mean": _median("load_max_over_mean", ".2f"),
        "restored MiB": _median("restored_mib"),
        "plan ms": _median("plan_ms"),
        "between nodes %": _median("inter_node_share", ".1f", scale=100),
        "loss at end": lambda row: "" if row.final_loss is None else f"{row.final_loss:.4f}",
        "would run": lambda row: _runs_cell(row, comparison),
        "n": _n_cell,
        "agreement": lambda row: _agreement_cell(row, comparison),
    }
    columns = {
        header: cells for header, cell in cells_of.items() if any(cells := [cell(row) for row in comparison.rows])
    }
    return Sheet(
        title=f"{comparison.source.upper()}: {comparison.experiment.name}",
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        best=tuple(row.name in comparison.best for row in comparison.rows),
        legend=tuple(_legend(comparison, machine)),
    )


def figure(value: float) -> str:
    """Four digits, and an exponent only below 0.001 and from a million on: ``0.012``, ``1.235``, ``12346``."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 4 - len(f'{abs(value):.0f}'))}f}"


def _median(metric: str, spec: str = "", scale: float = 1.0) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if (value := row.median(metric)) is None:
            return ""
        return format(value * scale, spec) if spec else figure(value)

    return cell


def _n_cell(row: Row) -> str:
    """Seeds that ended well; fewer may be paired with the baseline's."""
    notes = [f"{row.speedup.n} paired"] if row.speedup is not None and row.speedup.n != row.n else []
    notes += [f"{len(row.failed)} failed"] if row.failed else []
    return f"{row.n}" + (f" ({', '.join(notes)})" if notes else "")


def _runs_cell(row: Row, comparison: Comparison) -> str:
    """Nothing where all would."""
    if not any(of.would_not_run for of in comparison.rows):
        return ""
    return "no" if row.would_not_run else "yes"


def _speedup_cell(row: Row, comparison: Comparison) -> str:
    if row is comparison.baseline:
        return "baseline"
    if row.agreement is not None and not row.agreement.holds:
        return "differs"
    return "" if row.speedup is None else ratio_words(row.speedup)


def ratio_words(ratio: PairedRatio) -> str:
    """``1.23 [1.10, 1.38]``, after ``~`` where the interval holds 1, else after ``?`` where seeds are too few."""
    if ratio.low is None or ratio.high is None:
        return f"? {ratio.estimate:.2f}"
    mark = "~ " if ratio.holds_one else "? " if ratio.n < MIN_SEEDS else ""
    return f"{mark}{ratio.estimate:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _agreement_cell(row: Row, comparison: Comparison) -> str:
    if comparison.source == "simulated":
        return "n/a"
    if row is comparison.baseline:
        return "reference"
    if row.agreement is None:
        return "unknown"
    agreement = row.agreement
    if agreement.exact:
        return "bit-equal" if agreement.holds else f"PARTS at step {agreement.steps_within}"
    if agreement.holds and agreement.steps_left:
        return f"for {agreement.steps_within} of {agreement.num_steps} steps"
    return "bit-equal" if agreement.bit_equal else f"{agreement.difference:.1e}"


def _legend(comparison: Comparison, machine: str) -> list[str]:
    experiment, baseline = comparison.experiment, comparison.baseline.name
    lines = [
        f"Speed-up: {baseline}'s step time over its own, above 1 is faster; the geometric mean over seeds, paired by "
        "seed, and its 95 % interval (Student's t on logarithms). ~: the interval contains 1."
    ]
    ratios = [row.speedup for row in comparison.rows if row.speedup is not None]
    if any(ratio.n < MIN_SEEDS for ratio in ratios):
        lines.append(f"?: too few seeds to tell; from {MIN_SEEDS} on chance alone becomes unlikely enough.")
    if any(row.repeat for row in comparison.rows):
        lines.append(f"{baseline} (again): the same strategy run twice; how far it is from 1 is noise and drift.")
    lines.append(f"Other columns: medians over a seed's steps, then over n seeds ({_sample_words(comparison)}).")
    agreements = [row.agreement for row in comparison.rows if row.agreement is not None]
    if any(agreement.exact for agreement in agreements):
        lines.append(
            f"Agreement: every loss must have the bits of {baseline}'s, same seed, same step, of strategies with its "
            "LayoutInvariant reduction. Where one has not, that is an error, and no speed is shown."
        )
    if tolerance := max((agreement.tolerance for agreement in agreements), default=0.0):
        lines.append(
            f"Agreement: the largest relative difference of a loss from {baseline}'s, same seed, same step. "
            f"Above {tolerance:g} ({experiment.model.dtype}) within the first {JUDGED_STEPS} steps the numbers differ, "
            "and no speed is shown."
        )
        if any(row.agreement and row.agreement.holds and row.agreement.steps_left for row in comparison.rows):
            lines.append(
                "For some steps: after those a loss is further off, as when a rounding sends a token to another expert."
            )
    starved = {row.name: sum(map(sum, row.samples.get("starved_experts", {}).values())) for row in comparison.rows}
    if any(starved.values()):
        names = ", ".join(name for name, count in starved.items() if count)
        lines.append(f"Experts without a single token in some step: {names}. Their router may be collapsing.")
    lines += [f"Would not run: {row.name}: {row.would_not_run}." for row in comparison.rows if row.would_not_run]
    lines += [
        f"Failed: {row.name}, seed {seed}: {error}" for row in comparison.rows for seed, error in row.failed.items()
    ]
    return [*lines, _source_words(comparison, machine)]


def _sample_words(comparison: Comparison) -> str:
    experiment, seeds = comparison.experiment, comparison.experiment.seeds
    steps = getattr(experiment.workload, "steps", None)
    unit = "steps" if isinstance(experiment.workload, Measured) else "micro-batches"
    asked = f"{len(seeds)} asked for"
    return f"{asked}, {steps} {unit} each" if steps else asked


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _source_words(comparison: Comparison, machine: str) -> str:
    experiment = comparison.experiment
    cluster = experiment.cluster
    ranks = f"{_counted(cluster.num_ranks, 'rank')} of {_counted(cluster.num_nodes, 'node')}"
    if comparison.source == "measured":
        how = f"Measured by the clock on {ranks}{f': {machine}' if machine else ''}."
        if isinstance(experiment.workload, Training) and experiment.workload.interpret:
            how += " Kernels ran in Triton's interpreter, whose times say nothing of a GPU's: only agreement counts."
    else:
        named = f" ({cluster.name})" if cluster.name else ""
        how = f"Simulated: a cost model's times for {ranks}{named}, no clock's."
    return f"{how} Fingerprint {setting_fingerprint(experiment)} of model, cluster and workload."
