"""Comparison of the strategies of an experiment with its baseline, from the records of its trials."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moesys.config import DType, LayoutInvariant, Strategy
from moesys.config.experiment import Experiment, Source, Trial
from moesys.display import Columns, Display, by_column, counted, html_part, named, pyplot_axes
from moesys.lab.runs.records import Record, latest
from moesys.lab.runs.statistics import PairedRatio, paired_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Largest relative difference of a loss that the order of sums explains.
LOSS_TOLERANCE: Mapping[DType, float] = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
# Over so many first steps it must hold, in which a wrong gradient shows. Later a rounding may send a token to another
# expert, where two score alike, and from there two right trainings part.
JUDGED_STEPS = 10
SPEED = "step_ms"


@dataclass(frozen=True)
class Agreement:
    """How far losses are from the baseline's, over the same seeds and steps: |a - b| / |b|.

    difference: the largest of all steps. steps_within: of ``num_steps``, the first ones in which none is above
    ``tolerance``, which is 0 where every bit must be the same. seed: one that is above it first; None where none is.
    """

    difference: float
    tolerance: float
    steps_within: int
    num_steps: int
    seed: int | None = None

    @property
    def exact(self) -> bool:
        """True if no bit of a loss may differ."""
        return self.tolerance == 0

    @property
    def bit_equal(self) -> bool:
        return self.difference == 0

    @property
    def holds(self) -> bool:
        """True if both compute the same in the first ``JUDGED_STEPS`` steps, or in all if no bit may differ."""
        return self.steps_within >= (self.num_steps if self.exact else min(self.num_steps, JUDGED_STEPS))


@dataclass(frozen=True, repr=False)
class Row:
    """One strategy, or the baseline's repetition (``repeat`` 1).

    samples: of each metric, by seed. units: of each metric. losses: of all steps, by seed.
    speedup: against the baseline; None for the baseline itself, where no seed is shared, or where the numbers differ.
    agreement: with the baseline; None for the baseline itself, where no seed is shared, and where it is simulated.
    failed: the one-line error by seed. would_not_run: what stands against it on such a cluster; "" where nothing does.
    """

    name: str
    strategy: Strategy
    repeat: int
    samples: dict[str, dict[int, list[float]]]
    units: dict[str, str]
    losses: dict[int, list[float]]
    failed: dict[int, str]
    speedup: PairedRatio | None = None
    agreement: Agreement | None = None
    would_not_run: str = ""

    @property
    def n(self) -> int:
        """The number of seeds that did not fail."""
        return len(self.losses)

    def median(self, metric: str) -> float | None:
        """Returns the median over seeds of the median of each seed; None if there are no samples."""
        by_seed = [float(np.median(values)) for values in self.samples.get(metric, {}).values() if values]
        return float(np.median(by_seed)) if by_seed else None

    @property
    def is_oracle(self) -> bool:
        """This is true if the planner knows the load in advance."""
        return self.strategy.predictor.kind == "oracle"

    @property
    def final_loss(self) -> float | None:
        """The loss of the last step, the median over seeds; None if nothing was trained."""
        last = [losses[-1] for losses in self.losses.values() if losses]
        return float(np.median(last)) if last else None

    @property
    def words(self) -> str:
        """The name, the step time, the speed-up and the number of seeds."""
        step_ms = self.median(SPEED)
        step = "no step time" if step_ms is None else f"{step_ms:,.4g} ms per step"
        ratio = "" if self.speedup is None else f", speed-up {self.speedup:.2f}"
        return f"{self.name!r}, {step}{ratio}, n = {self.n}"

    def __repr__(self) -> str:
        return f"<Row: {self.words}>"

    def speedup_over(self, other: Row) -> PairedRatio | None:
        """Returns the ratio of step times, paired by seed; None if no seed has both. Two seeds have no interval, as
        Student's factor for them is 12.7, and 4.3 for three.
        """
        ratio = paired_ratio(other.samples.get(SPEED, {}), self.samples.get(SPEED, {}))
        return replace(ratio, low=None, high=None) if ratio and ratio.n < 3 else ratio

    def is_faster_than(self, other: Row) -> bool:
        ratio = self.speedup_over(other)
        return ratio is not None and ratio.verdict == "faster"


@dataclass(frozen=True, repr=False)
class Comparison(Display):
    """Rows of one experiment: the baseline, its repetition if there is one, then the others from fast to slow, those
    that would not run behind the rest.

    Rows whose numbers differ from the baseline's, and those without samples, come last, in declared order.
    ``environments``: ids of those that the records come from; more than one deserves a warning.
    """

    experiment: Experiment
    source: Source
    rows: tuple[Row, ...]
    environments: tuple[str, ...] = ()

    @property
    def baseline(self) -> Row:
        return self.rows[0]

    @property
    def n(self) -> int:
        """The number of seeds of the row that has most."""
        return max(row.n for row in self.rows)

    @property
    def unequal(self) -> tuple[Row, ...]:
        """Rows whose losses have other bits than the baseline's, and may not."""
        return tuple(row for row in self.rows if row.agreement and row.agreement.exact and not row.agreement.holds)

    @property
    def rivals(self) -> list[Row]:
        """The rows that can run and have a speed-up over the baseline, from fast to slow."""
        runnable = (row for row in self.rows[1:] if not (row.repeat or row.would_not_run or row.is_oracle))
        return [row for row in runnable if row.speedup]

    @property
    def _contenders(self) -> list[Row]:
        would_run = self.baseline.n > 0 and not self.baseline.would_not_run
        return [*self.rivals, *[self.baseline] * would_run]

    @cached_property
    def fastest(self) -> Row:
        """The row with the largest speed-up of those that would run, which may be due to chance."""
        contenders = self._contenders or [self.baseline]
        return max(contenders, key=lambda row: row.speedup.estimate if row.speedup else 1.0)

    @cached_property
    def best(self) -> frozenset[str]:
        """The name of the winner: the row that is faster than each of the others that would run, where the paired
        interval of both excludes 1. Empty if there is none, as with too few seeds.
        """
        others = [row for row in self._contenders if row is not self.fastest]
        wins = others and all(self.fastest.is_faster_than(row) for row in others)
        return frozenset([self.fastest.name]) if wins else frozenset()

    def plot(self) -> Axes:
        """Draws each speed-up with its interval, in a new figure of pyplot. Raises ValueError if there is none."""
        if all(row.speedup is None for row in self.rows):
            raise ValueError("no strategy has a speed-up to draw; compare at least two that ran under the same seeds")
        return pyplot_axes("moesys.lab.show.figures:draw_speedups", self)

    def _facts(self) -> str:
        head = f"{self.source} {self.experiment.name!r}, {counted(len(self.rows), 'row')}"
        return f"{head}, baseline {self.baseline.name!r}, fastest {self.fastest.words}"

    def _columns(self) -> Columns:
        """Returns a row for each strategy, seed and timed step; ``repeat`` is 1 for the repetition of the baseline."""
        metrics = list(dict.fromkeys(metric for row in self.rows for metric in row.samples))
        rows = [
            (row.strategy.name, row.repeat, seed, step, *values)
            for row in self.rows
            for seed in row.losses
            for step, values in enumerate(zip_longest(*(row.samples.get(name, {}).get(seed, ()) for name in metrics)))
        ]
        return by_column(("strategy", "repeat", "seed", "step", *metrics), rows)

    def __str__(self) -> str:
        text = io.StringIO()
        named("moesys.lab.show.sheets:print_sheet")(self._sheet, text)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        columns = named("moesys.lab.show.sheets:written_columns")(self._sheet)
        right = [column.name for column in columns if column.align == "right"]
        return html_part(self._sheet.title, {of.name: of.cells for of in columns}, self._sheet.notes, right)

    @cached_property
    def _sheet(self) -> Any:
        return named("moesys.lab.show.comparisons:comparison_sheet")(self)


def compare_records(experiment: Experiment, records: Iterable[Record]) -> Comparison:
    """Compares the strategies of an experiment from the records of its trials; other records are ignored.

    The last record of a trial counts. Raises ValueError where a record is of another source than the workload makes
    them: simulated and measured never mix.
    """
    source, by_identity = experiment.source, latest(records)
    rows: dict[tuple[str, int], list[tuple[Trial, Record]]] = {
        (strategy.name, repeat): []
        for repeat in range(1 + experiment.repeat_baseline)
        for strategy in (experiment.strategies if not repeat else [experiment.baseline])
    }
    for trial in experiment.trials():
        if (record := by_identity.get(trial.identity)) is not None:
            if record.source != source:
                raise ValueError(
                    f"{trial.strategy.name} with seed {trial.seed} was {record.source}, and this comparison is "
                    f"{source}; compare simulated and measured trials side by side, in two tables"
                )
            rows[trial.strategy.name, trial.repeat].append((trial, record))
    strategies = {strategy.name: strategy for strategy in experiment.strategies}
    plain = [_row(strategies[name], repeat, results) for (name, repeat), results in rows.items()]
    baseline = plain[0]
    seen = dict.fromkeys(record.environment for results in rows.values() for _, record in results)

    def judged_of(row: Row) -> Row:
        """Adds the agreement of a row, and its speed-up if it was simulated or its losses agree with the baseline."""
        # No other machine, version or number of threads is promised the same bits.
        of = baseline.strategy.reduction
        exact = len(seen) == 1 and isinstance(of, LayoutInvariant) and row.strategy.reduction == of
        tolerance = 0.0 if exact else LOSS_TOLERANCE[experiment.model.dtype]
        agrees = agreement(baseline.losses, row.losses, tolerance) if source == "measured" else None
        may_show = source == "simulated" or (agrees is not None and agrees.holds)
        return replace(row, speedup=row.speedup_over(baseline) if may_show else None, agreement=agrees)

    judged = list(map(judged_of, plain[1:]))
    judged.sort(
        key=lambda row: (-row.repeat, bool(row.would_not_run), -row.speedup.estimate if row.speedup else math.inf)
    )
    return Comparison(experiment, source, (baseline, *judged), tuple(seen))


def agreement(
    baseline: Mapping[int, Sequence[float]], losses: Mapping[int, Sequence[float]], tolerance: float
) -> Agreement | None:
    """Compares the losses of the seeds that both have. Returns None if there are none.

    A loss that is not finite agrees with none, but where ``tolerance`` is 0 with its like; another number of steps is
    infinitely far.
    """
    seeds = [seed for seed in sorted(baseline.keys() & losses.keys()) if len(baseline[seed]) or len(losses[seed])]
    if not seeds:
        return None
    num_steps = max(len(baseline[seed]) for seed in seeds)
    exact = tolerance == 0
    differences = {seed: _differences(losses[seed], baseline[seed], num_steps, exact) for seed in seeds}
    difference_S = np.max(list(differences.values()), axis=0, initial=0)
    above = np.flatnonzero(difference_S > tolerance)
    first = int(above[0]) if above.size else num_steps
    seed = next((seed for seed in seeds if above.size and differences[seed][first] > tolerance), None)
    return Agreement(float(difference_S.max(initial=0)), tolerance, first, num_steps, seed)


def _differences(
    losses: Sequence[float], reference: Sequence[float], num_steps: int, exact: bool
) -> NDArray[np.float64]:
    """Returns |a - b| / |b| of each step; with ``exact``, 0 for two equal losses of any kind, nan too."""
    if len(losses) != len(reference):
        return np.full(num_steps, math.inf)
    a, b = np.asarray(losses, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    difference_S = np.zeros(num_steps)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(a - b) / np.abs(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b)) if exact else (a == 0) & (b == 0)
    difference_S[: len(a)] = np.where(same, 0.0, np.where(np.isfinite(relative), relative, math.inf))
    return difference_S


def _row(strategy: Strategy, repeat: int, results: list[tuple[Trial, Record]]) -> Row:
    ok = [(trial.seed, record) for trial, record in results if record.status == "ok"]
    metrics = dict.fromkeys(metric for _, record in ok for metric in record.samples)
    return Row(
        name=f"{strategy.name} (again)" if repeat else strategy.name,
        strategy=strategy,
        repeat=repeat,
        samples={
            metric: {seed: record.samples[metric].values for seed, record in ok if metric in record.samples}
            for metric in metrics
        },
        units={metric: samples.unit for _, record in ok for metric, samples in record.samples.items()},
        losses={seed: record.losses for seed, record in ok},
        failed={trial.seed: record.error for trial, record in results if record.status == "failed"},
        would_not_run=next((record.would_not_run for _, record in ok if record.would_not_run), ""),
    )
