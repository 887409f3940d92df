"""The table of simulated steps, one row per strategy: times, exposed communication, critical path, and the spread over
draws of the routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from moesys.balance.plan import StepPlan
from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.show.comparisons import ratio_words
from moesys.lab.show.tables import Column, Sheet, figure
from moesys.simulator.critical_path import by_place
from moesys.simulator.simulation import Simulation, exposed_ms

TOKENS, EXPERTS = ("counts", "dispatch", "combine"), ("restore", "reshard")
LEGEND = (
    "Means over ranks, but for the step. exposed = tokens + restore + waiting: a rank computes nothing meanwhile.",
    "tokens: until rows have come; restore: until experts have, or gradients; waiting: for slower ranks.",
    "critical path: what the step waited for, from its start to its end, as shares of it; most first.",
)


@dataclass(frozen=True)
class StepFigures:
    """One step of one draw: milliseconds, means over ranks except for the step's own. ``path``: shares of the critical
    path by place. ``would_not_run``: the reasons why it would not run, if there are any.
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
    """Steps of one strategy, one per draw."""

    name: str
    draws: tuple[StepFigures, ...]

    @property
    def would_not_run(self) -> tuple[str, ...]:
        """The reasons of the first draw that has any."""
        return next((draw.would_not_run for draw in self.draws if draw.would_not_run), ())


@dataclass(frozen=True)
class SimulatedStrategy:
    """A row of the table. Columns without an interval are means over draws."""

    strategy: Annotated[str, Column("strategy", align="left")]
    step_ms: Annotated[str, Column("step\nms")]
    speedup: Annotated[str, Column("speed-up", align="right")]
    max_over_mean: Annotated[float, Column("load\nmax/mean", ".2f")]
    experts_ms: Annotated[float, Column("experts\nms", figure)]
    other_ms: Annotated[float, Column("other\nms", figure)]
    exposed_ms: Annotated[float, Column("exposed\nms", figure)]
    tokens_ms: Annotated[float, Column("tokens\nms", figure)]
    restore_ms: Annotated[float, Column("restore\nms", figure)]
    waiting_ms: Annotated[float, Column("waiting\nms", figure)]
    critical_path: Annotated[str, Column("critical path", align="left", wraps=True)]


_MEANS = ("max_over_mean", "experts_ms", "other_ms", "exposed_ms", "tokens_ms", "restore_ms", "waiting_ms")


def step_sheet(title: str, of_strategies: Sequence[StepDraws], draws: str) -> Sheet:
    """Returns the table and its legend. ``draws`` describes what a draw is."""
    # The first strategy that would run, or the first one if none would.
    baseline = min(of_strategies, key=lambda of: bool(of.would_not_run))
    rows = [
        SimulatedStrategy(
            strategy=of.name,
            step_ms=_spread([draw.step_ms for draw in of.draws]),
            speedup=_speedup(of, baseline),
            critical_path=_path_words(of),
            **{name: float(np.mean([getattr(draw, name) for draw in of.draws])) for name in _MEANS},
        )
        for of in of_strategies
    ]
    against = [f"{of.name} would not run: {reason}." for of in of_strategies for reason in of.would_not_run]
    return Sheet(title, rows, [*LEGEND, *_draw_words(of_strategies, draws), *against])


def _draw_words(of_strategies: Sequence[StepDraws], draws: str) -> Iterator[str]:
    if any(len(of.draws) > 1 for of in of_strategies):
        yield (
            f"Draws: {draws}. step ms: their median [p10, p90]; speed-up: paired, draw by draw, with its 95 % interval "
            "(Student's t on logarithms; ~: it contains 1, ?: too few draws); other columns: means."
        )


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return figure(values[0])
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{figure(float(middle))} [{figure(float(low))}, {figure(float(high))}]"


def _speedup(of: StepDraws, baseline: StepDraws) -> str:
    """Compares the draws that both have. Returns "" if a step takes no time."""
    if of.would_not_run:
        return "would not run"
    if of is baseline:
        return "1.00"
    if not all(draw.step_ms for draw in (*of.draws, *baseline.draws)):
        return ""
    own_ms, baseline_ms = ({place: [draw.step_ms] for place, draw in enumerate(one.draws)} for one in (of, baseline))
    ratio = paired_ratio(baseline_ms, own_ms)
    if ratio is None:
        return ""
    return f"{ratio.estimate:.2f}" if ratio.n == 1 else ratio_words(ratio)


def _path_words(of: StepDraws) -> str:
    """Describes the three places with the largest mean shares of the critical path."""
    shares = {where: 0.0 for draw in of.draws for where in draw.path}
    for draw in of.draws:
        for where, share in draw.path.items():
            shares[where] += share / len(of.draws)
    most = sorted(shares.items(), key=lambda place: -place[1])[:3]
    return ", ".join(f"{where} {100 * share:.0f} %" for where, share in most)
