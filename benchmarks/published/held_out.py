"""Cross-validation: fitted on each of the four shapes, judged on the three others, beside what has no simulator."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from benchmarks.published.baselines import copied_row_errors, fitted_closed_form
from benchmarks.published.fit import Fit, Simulated, figures_of, fit, row_errors, steps_by
from benchmarks.published.laer_figures import ROWS, PublishedRow
from benchmarks.published.laer_setup import LAER_MODELS
from moesys.lab.show.sheets import Column

# Errors of seconds, and of speed-ups over FSDP+EP.
Errors = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class HeldOut:
    """Absolute errors of what was not fitted on. constants: the fitted ones."""

    fitted_on: Annotated[str, Column("fitted on")]
    by: Annotated[str, Column("by")]
    seconds_median: Annotated[float, Column("seconds: median %", ".1f", 100)]
    seconds_worst: Annotated[float, Column("worst %", ".1f", 100)]
    speed_ups_median: Annotated[float, Column("speed-ups: median %", ".1f", 100)]
    speed_ups_worst: Annotated[float, Column("worst % ", ".1f", 100)]
    constants: Annotated[str, Column("constants")] = ""


def judged(fitted_on: str, by: str, errors: Iterable[Errors], constants: str = "") -> HeldOut:
    """Of all errors together."""
    seconds, speed_ups = ([abs(error) for of in part for error in of] for part in zip(*errors, strict=True))
    return HeldOut(
        fitted_on,
        by,
        statistics.median(seconds),
        max(seconds),
        statistics.median(speed_ups),
        max(speed_ups),
        constants,
    )


def cross_validation(
    simulated: Simulated, rows: Sequence[PublishedRow] = ROWS
) -> tuple[dict[str, list[Fit]], list[HeldOut]]:
    """By shape all fits, best first; and what the best leaves of the other shapes, beside the baselines."""
    shapes = [model.name for model in LAER_MODELS]
    fits = {shape: fit(simulated, shape, figures_of(shape, rows)) for shape in shapes}
    found = []
    for shape in shapes:
        best, others = fits[shape][0].constants, [other for other in shapes if other != shape]
        form = fitted_closed_form(shape, figures_of(shape, rows).rows)
        by_simulator, by_form = [], []
        for other in others:
            of_other = figures_of(other, rows).rows
            steps = steps_by(simulated, other, best)
            by_simulator.append(row_errors({method: of.rows.total for method, of in steps.items()}, of_other))
            by_form.append(row_errors(form.seconds(other), of_other))
        fitted = ("skew_growth", "unrest", "rows_slowdown", "dispatcher_ms")
        words = ", ".join(f"{name} {getattr(best, name):g}" for name in fitted)
        found += [
            judged(shape, "simulator", by_simulator, words),
            judged(shape, "closed form", by_form, f"growth {form.growth:g}, overhead {form.overhead_ms:g} ms"),
            judged(shape, "copied row", [copied_row_errors(other, rows) for other in others]),
        ]
    return fits, found
