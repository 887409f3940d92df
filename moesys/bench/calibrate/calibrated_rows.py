"""What a calibration shows: figures of a ``ClusterSpec``, and the messages and products that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from moesys.bench.calibrate.cluster_fit import MessageLine
from moesys.bench.calibrate.rank_timings import ExpertCase
from moesys.bench.harness.sheets import Column
from moesys.bench.harness.stopwatch import Spread


def four_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _range(spread: Spread) -> str:
    return f"{four_digits(spread.p20)} to {four_digits(spread.p80)}"


# Of a ``Spread``, beside its median.
RANGE = (Column("p20 to p80", _range), Column("n", lambda spread: str(spread.n)))


def _errors(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{np.median(sizes):.0%}, {sizes.max():.0%}" if len(sizes) else ""


@dataclass(frozen=True)
class Figure:
    """One field of the ``ClusterSpec``. how: from what; or why it is not measured.

    spread: of the samples, in the field's unit; None where there are none of their own. errors: of the fit that gives
    it, predicted over measured less 1; empty where it is no fit.
    """

    field: Annotated[str, Column("field")]
    value: float
    how: Annotated[str, Column("from")]
    spread: Annotated[Spread | None, *RANGE] = None
    errors: Annotated[Sequence[float], Column("fit: median, worst error", _errors)] = ()
    measured: bool = True

    @property
    def figure(self) -> Annotated[str, Column("figure", after="field")]:
        return four_digits(self.value) if self.measured else "n/a"


@dataclass(frozen=True)
class Link:
    """All-to-alls inside nodes or between them, or messages from one rank to another.

    seconds: by bytes, for an all-to-all those of its busiest link, as the cost model counts them.
    """

    name: str
    seconds: dict[int, Spread]
    line: MessageLine

    @property
    def messages(self) -> list[Message]:
        return [
            Message(self.name, num_bytes, of.times(1e6), self.line.errors[num_bytes])
            for num_bytes, of in self.seconds.items()
        ]


@dataclass(frozen=True)
class Message:
    """Messages of one size over one link. error: of the link's line, predicted over measured, less 1."""

    link: Annotated[str, Column("link")]
    num_bytes: Annotated[int, Column("bytes", ",")]
    us: Annotated[Spread, Column("us", lambda us: four_digits(us.median)), *RANGE]
    error: Annotated[float, Column("error", "+.0%")]

    @property
    def fit_us(self) -> Annotated[float, Column("fit, us", four_digits, after="us")]:
        return self.us.median * (1 + self.error)


@dataclass(frozen=True)
class Product:
    """Forward products of a rank's experts, and what the cluster that was found predicts."""

    case: Annotated[
        ExpertCase,
        Column("H", lambda case: str(case.hidden_size)),
        Column("I", lambda case: str(case.intermediate_size)),
        Column("experts × rows", lambda case: f"{len(case.rows)} × {case.rows[0]}"),
    ]
    ms: Annotated[Spread, Column("ms", lambda ms: four_digits(ms.median)), *RANGE]
    predicted_ms: Annotated[float, Column("predicted, ms", four_digits)]

    @property
    def tflops(self) -> Annotated[float, Column("TFLOP/s", four_digits, after="ms")]:
        return self.case.flops / self.ms.median / 1e9

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        return self.predicted_ms / self.ms.median - 1
