"""Rows of the tables of a calibration: fields of the ``ClusterSpec``, and the timings that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from moesys.lab.runs.stopwatch import Spread
from moesys.lab.show.tables import Column


def four_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _errors(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{np.median(sizes):.0%}, {sizes.max():.0%}" if len(sizes) else ""


MEDIAN = Column("ms", lambda ms: four_digits(ms.median))
RANGE = (
    Column("p20 to p80", lambda spread: f"{four_digits(spread.p20)} to {four_digits(spread.p80)}"),
    Column("n", lambda spread: str(spread.n)),
)


@dataclass(frozen=True)
class Figure:
    """One field of the ``ClusterSpec``. how: the measurement, or the reason why there is none.

    spread: of samples in the field's unit. errors: of the fit, predicted divided by measured, less 1. held_out: the
    same for cases that the field was not fitted to.
    """

    field: Annotated[str, Column("field")]
    value: float
    how: Annotated[str, Column("from")]
    spread: Annotated[Spread | None, *RANGE] = None
    errors: Annotated[Sequence[float], Column("fit: median, worst error", _errors)] = ()
    held_out: Annotated[Sequence[float], Column("held out: median, worst", _errors)] = ()
    measured: bool = True

    @property
    def figure(self) -> Annotated[str, Column("figure", after="field")]:
        return four_digits(self.value) if self.measured else "n/a"


@dataclass(frozen=True)
class Timing:
    """One pass of one case, or messages of one size, and the time predicted with the fitted fields."""

    work: Annotated[str, Column("work")]
    size: Annotated[str, Column("size")]
    held_out: Annotated[bool, Column("fit", lambda held_out: "held out" if held_out else "")]
    ms: Annotated[Spread, MEDIAN, *RANGE]
    predicted_ms: Annotated[float, Column("predicted, ms", four_digits)]
    flops: int | None = None

    @property
    def tflops(self) -> Annotated[float | None, Column("TFLOP/s", four_digits, after="ms")]:
        return self.flops and self.flops / self.ms.median / 1e9

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        return self.predicted_ms / self.ms.median - 1


@dataclass(frozen=True)
class Link:
    """All-to-alls inside nodes, between nodes, or between two ranks, and the line through their times.

    messages: by the bytes of the busiest link, as the cost model counts them. peer_gb_per_s: the rate at which a rank
    sends to each peer, by the largest messages.
    """

    name: str
    latency_us: float
    gb_per_s: float
    peer_gb_per_s: float
    messages: list[Timing]
