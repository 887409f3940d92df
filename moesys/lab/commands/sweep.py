"""Draws the chart of a sweep: experiments of one file that differ in one number of their workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesys.config.experiment import Experiment
from moesys.lab.runs.comparison import Comparison


def swept_field(experiments: Sequence[Experiment]) -> str | None:
    """The number of the workload in which experiments differ that are alike but for their names; None for others."""
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


def draw_sweep(comparisons: Sequence[Comparison], path_stem: Path) -> list[Path]:
    """Speed-up along the swept field, as SVG and PNG; no file where these comparisons make no sweep."""
    experiments = [comparison.experiment for comparison in comparisons]
    if (field := swept_field(experiments)) is None:
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
