"""Shows simulated steps, a row a strategy: how long, what is exposed, what they hang on, and how far draws differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from moesys.balance.plan import StepPlan
from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.show.tables import figure, ratio_words
from moesys.simulator.critical_path import by_place
from moesys.simulator.simulation import Simulation, exposed_ms

TOKENS, EXPERTS = ("counts", "dispatch", "combine"), ("restore", "reshard")
COLUMNS = (
    *("step ms", "speed-up", "load max/mean", "experts ms", "other ms", "exposed ms"),
    *("tokens ms", "restore ms", "waiting ms"),
)
LEGEND = (
    "Means over ranks, but for the step. exposed = tokens + restore + waiting: a rank computes nothing meanwhile.",
    "tokens: until rows have come; restore: until experts have, or gradients; waiting: for slower ranks.",
    "critical path: what the step waited for, from its start to its end, as shares of it; most first.",
)


@dataclass(frozen=True)
class StepFigures:
    """Of one step of one draw: milliseconds, means over ranks but for the step's own. ``path``: shares of its critical
    path by place. ``would_not_run``: what stands against it.
    """

    step_ms: float
    max_over_mean: float
    experts_ms: float
    other_ms: float
    exposed_ms: float
    tokens_ms: float
    restore_ms: float
    path: dict[str, float]
    would_not_run: tuple[str, ...]

    @classmethod
    def of(
        cls, simulated: Simulation, micro_batches: Sequence[StepPlan], would_not_run: tuple[str, ...]
    ) -> StepFigures:
        computed_ms = {kind: 1e3 * float(seconds_R.mean()) for kind, seconds_R in simulated.computed_R.items()}
        waited_ms = {kind: 1e3 * float(seconds_R.mean()) for kind, seconds_R in simulated.waited_R.items()}
        experts_ms = sum(computed_ms.get(kind, 0.0) for kind in ("experts", "weight_gradients"))
        tokens_ms, restore_ms = (sum(waited_ms.get(kind, 0.0) for kind in kinds) for kinds in (TOKENS, EXPERTS))
        return cls(
            step_ms=1e3 * simulated.length_seconds,
            max_over_mean=float(np.mean([plan.tokens.max_over_mean for step in micro_batches for plan in step.layers])),
            experts_ms=experts_ms,
            other_ms=sum(computed_ms.values()) - experts_ms,
            exposed_ms=exposed_ms(simulated.timeline),
            tokens_ms=tokens_ms,
            restore_ms=restore_ms,
            path={where: share for where, _, share in by_place(simulated.critical_path)},
            would_not_run=would_not_run,
        )

    @property
    def waiting_ms(self) -> float:
        return max(self.exposed_ms - self.tokens_ms - self.restore_ms, 0.0)


@dataclass(frozen=True)
class StepDraws:
    """Steps of one strategy, a draw each."""

    name: str
    draws: tuple[StepFigures, ...]

    def mean(self, figure_of: str) -> float:
        return float(np.mean([getattr(draw, figure_of) for draw in self.draws]))

    @property
    def would_not_run(self) -> tuple[str, ...]:
        """Of the first draw against which anything stands."""
        return next((draw.would_not_run for draw in self.draws if draw.would_not_run), ())

    @property
    def by_draw(self) -> dict[int, list[float]]:
        """For ``paired_ratio``."""
        return {number: [draw.step_ms] for number, draw in enumerate(self.draws)}


def step_table(title: str, of_strategies: Sequence[StepDraws], draws: str) -> tuple[Table, list[str]]:
    """The table and its legend. ``draws``: what a draw is, in words."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for column in COLUMNS:
        table.add_column(Text(column.replace(" ", "\n", 1)), justify="right", no_wrap=True)
    table.add_column("critical path")
    # Of what would run, where anything would.
    baseline = min(of_strategies, key=lambda of: bool(of.would_not_run))
    for of in of_strategies:
        table.add_row(*map(Text, _cells(of, baseline)))
    against = [f"{of.name} would not run: {reason}." for of in of_strategies for reason in of.would_not_run]
    return table, [*LEGEND, *_draw_words(of_strategies, draws), *against]


def _draw_words(of_strategies: Sequence[StepDraws], draws: str) -> Iterator[str]:
    if any(len(of.draws) > 1 for of in of_strategies):
        yield (
            f"Draws: {draws}. step ms: their median [p10, p90]; speed-up: paired, draw by draw, with its 95 % interval "
            "(Student's t on logarithms; ~: it contains 1, ?: too few draws); other columns: means."
        )


def _cells(of: StepDraws, baseline: StepDraws) -> Iterator[str]:
    yield of.name
    yield _spread([draw.step_ms for draw in of.draws])
    if of.would_not_run:
        yield "would not run"
    elif of is baseline:
        yield "1.00"
    else:
        yield _speedup(of, baseline)
    yield f"{of.mean('max_over_mean'):.2f}"
    for name in ("experts_ms", "other_ms", "exposed_ms", "tokens_ms", "restore_ms", "waiting_ms"):
        yield figure(of.mean(name))
    shares = {where: 0.0 for draw in of.draws for where in draw.path}
    for draw in of.draws:
        for where, share in draw.path.items():
            shares[where] += share / len(of.draws)
    most = sorted(shares.items(), key=lambda place: -place[1])[:3]
    yield ", ".join(f"{where} {100 * share:.0f} %" for where, share in most)


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return figure(values[0])
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{figure(float(middle))} [{figure(float(low))}, {figure(float(high))}]"


def _speedup(of: StepDraws, baseline: StepDraws) -> str:
    """Of as many draws as both have. Nothing where a step takes no time."""
    if not all(draw.step_ms for draw in (*of.draws, *baseline.draws)):
        return ""
    ratio = paired_ratio(baseline.by_draw, of.by_draw)
    if ratio is None:
        return ""
    return f"{ratio.estimate:.2f}" if ratio.n == 1 else ratio_words(ratio)
