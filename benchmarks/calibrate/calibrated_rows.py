"""What a calibration shows: figures of a ``ClusterSpec``, and the messages and works that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from benchmarks.calibrate.block_timings import AttentionCase, ElementwiseCase
from benchmarks.calibrate.cluster_fit import MessageLine
from benchmarks.calibrate.expert_passes import ExpertCase, Pass
from moesys.lab.runs.stopwatch import Spread
from moesys.lab.show.sheets import Column


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
    it, predicted over measured less 1; empty where it is no fit. held_out: the same of cases that it was not fitted to.
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


def _in_words(rows: Sequence[int]) -> str:
    """``8 × 21``, or each expert's."""
    return f"{len(rows)} × {rows[0]}" if len(set(rows)) == 1 else ", ".join(map(str, rows))


@dataclass(frozen=True)
class Product:
    """A pass of a rank's experts, and what the cluster that was found predicts."""

    case: Annotated[
        ExpertCase,
        Column("H", lambda case: str(case.hidden_size)),
        Column("I", lambda case: str(case.intermediate_size)),
        Column("experts × rows", lambda case: _in_words(case.rows)),
        Column("fit", lambda case: "held out" if case.held_out else ""),
    ]
    of: Annotated[Pass, Column("pass", lambda of: of.replace("_", " "))]
    ms: Annotated[Spread, Column("ms", lambda ms: four_digits(ms.median)), *RANGE]
    predicted_ms: Annotated[float, Column("predicted, ms", four_digits)]

    @property
    def tflops(self) -> Annotated[float, Column("TFLOP/s", four_digits, after="ms")]:
        return self.case.flops * (2 if self.of == "backward" else 1) / self.ms.median / 1e9

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        return self.predicted_ms / self.ms.median - 1


def _size_words(case: AttentionCase | ElementwiseCase) -> str:
    if isinstance(case, AttentionCase):
        return f"{case.num_heads} heads of {case.head_dim}, {case.seq_len} tokens"
    return f"{case.num_tokens} tokens of {case.hidden_size}"


@dataclass(frozen=True)
class BlockWork:
    """Attention, or what is no product, one way; and what the cluster that was found predicts."""

    work: Annotated[str, Column("work")]
    case: Annotated[
        AttentionCase | ElementwiseCase,
        Column("size", _size_words),
        Column("fit", lambda case: "held out" if case.held_out else ""),
    ]
    ms: Annotated[Spread, Column("ms", lambda ms: four_digits(ms.median)), *RANGE]
    predicted_ms: Annotated[float, Column("predicted, ms", four_digits)]

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        return self.predicted_ms / self.ms.median - 1
