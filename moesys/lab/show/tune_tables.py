"""Shows a tuning in tables: what was fastest by which kind of time, and why each field has its value."""

from __future__ import annotations

import statistics

from rich import box
from rich.table import Table
from rich.text import Text

from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.show.tables import figure, ratio_words
from moesys.tuner.tune import Tuned

MOST_SHOWN = 8


def simulated_table(tuned: Tuned, name: str) -> tuple[Table, list[str]]:
    """The fastest points in the cost model and the baseline, on all of the workload."""
    table = _table(f"SIMULATED: {name}, tuning", "strategy", "step ms", "speed-up")
    baseline = tuned.search.baseline
    shown = list(tuned.search.ranking[:MOST_SHOWN])
    # It is shown where it is slow or too large as well.
    shown += [baseline] if baseline is not None and baseline not in shown else []
    for one in shown:
        ratio = "" if baseline is None else f"{baseline.ms / one.ms:.3f}"
        _row(table, one.strategy.name, figure(one.ms), "baseline" if one == baseline else ratio)
    notes = [
        f"{tuned.search.num_points} of {tuned.space.num_combinations} combinations were looked at in the cost model; "
        f"speed-up is over {tuned.baseline.name}."
    ]
    if tuned.not_seen:
        notes.append(
            f"Stopped when the time was over, while {tuned.not_seen}: costs are of {tuned.search.of}, and what comes "
            "later was not looked at. The same command goes on from here."
        )
    baseline_reasons = [reason for strategy, reason in tuned.search.refused if strategy == tuned.baseline]
    notes += [f"The baseline would not run: {reason}." for reason in baseline_reasons]
    if tuned.search.refused:
        strategy, reason = tuned.search.refused[0]
        notes.append(
            f"{len(tuned.search.refused)} points would not run, or cannot be simulated, such as {strategy.name}: "
            f"{reason}"
        )
    return table, notes


def draws_table(tuned: Tuned, name: str) -> tuple[Table, list[str]]:
    """The fastest in the cost model against the baseline, draw by draw. Raises ValueError without draws."""
    table = _table(
        f"SIMULATED: {name}, the fastest on further draws", "strategy", "step ms", "speed-up [95 %]", "draws"
    )
    for draws in tuned.draws:
        ratio = paired_ratio(draws.baseline_ms, draws.own_ms)
        if ratio is None:
            raise ValueError(f"{draws.strategy.name} and the baseline share no draw")
        mean_ms = statistics.fmean(statistics.fmean(ms) for ms in draws.own_ms.values())
        _row(table, draws.strategy.name, figure(mean_ms), ratio_words(ratio), str(ratio.n))
    seeds = "seeds" if tuned.search.baseline and len(tuned.search.of.seeds) > 1 else "seeds, or steps of the only one"
    return table, [f"A draw: {seeds}. Paired with {tuned.baseline.name}'s; Student's t on logarithms."]


def measured_table(tuned: Tuned, name: str) -> tuple[Table, list[str]]:
    """Those of the last round of timed trials. Raises ValueError where nothing was timed."""
    if tuned.timing is None:
        raise ValueError("nothing was timed")
    table = _table(f"MEASURED: {name}, tuning", "strategy", "step ms", "speed-up", "trials")
    for timed in tuned.timing.ranking:
        ratio = "baseline" if timed.strategy == tuned.baseline else f"{1 / timed.ratio:.3f}"
        median_ms = statistics.median(timed.ms_by_seed.values())
        _row(table, timed.strategy.name, figure(median_ms), ratio, str(len(timed.ms_by_seed)))
    notes = [
        f"{tuned.timing.num_trials} timed trials in all. A trial's time is the median of its steps, a step's that of "
        f"its slowest rank. Speed-up: over {tuned.baseline.name} on the same seeds, geometric mean; of so few trials "
        "it is an estimate, which moesys run with more seeds tests."
    ]
    notes += [f"Failed: {strategy.name}: {reason}" for strategy, reason in tuned.timing.failed]
    return table, notes


def choices_table(tuned: Tuned) -> Table:
    """The pick, field by field."""
    table = _table("The pick, field by field", "field", "value", "why")
    for choice in tuned.choices:
        _row(table, choice.field, choice.value, str(choice))
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="left" if column in ("value", "why") else "right")
    return table


def _row(table: Table, *cells: str) -> None:
    # Text, because in a string rich would take brackets for its markup.
    table.add_row(*(Text(cell) for cell in cells))
