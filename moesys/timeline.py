"""Timeline: what happened, when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from moesys.display import Columns, Display, by_column, counted, pyplot_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Source = Literal["simulated", "measured"]


@dataclass(frozen=True, order=True)
class Span:
    """One piece of work of one rank on one lane. Times in microseconds from the timeline's zero."""

    rank: int
    lane: str
    start_us: float
    end_us: float
    kind: str
    detail: str = ""

    def __post_init__(self) -> None:
        if not self.end_us >= self.start_us:
            raise ValueError(f"span {self.kind} on lane {self.lane} ends at {self.end_us} before it starts")

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    def overlaps(self, other: Span) -> bool:
        return self.start_us < other.end_us and other.start_us < self.end_us


@dataclass(frozen=True, eq=False)
class Block:
    """The same piece of work of all ranks, float64 [R] microseconds: a span on each; nan for a rank without a part."""

    lane: str
    kind: str
    detail: str
    start_us_R: npt.NDArray[np.float64]
    end_us_R: npt.NDArray[np.float64]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Timeline(Display):
    """Spans of all ranks, sorted by rank, lane and time; on one lane of one rank none overlap.

    ``source``: did a clock or a model make it.
    ``blocks``: what a model has, whose spans are spelled out only when somebody reads them; empty of a measured one.
    """

    blocks: tuple[Block, ...]
    source: Source

    def __init__(self, spans: Iterable[Span], source: Source) -> None:
        if source not in ("simulated", "measured"):
            raise ValueError(f"source={source!r} must be 'simulated' or 'measured'")
        self.__dict__.update(blocks=(), source=source, spans=tuple(sorted(spans)))
        for before, after in pairwise(self.spans):
            if (before.rank, before.lane) == (after.rank, after.lane) and before.end_us > after.start_us:
                raise ValueError(f"spans overlap on lane {before.lane} of rank {before.rank}: {before} and {after}")

    @classmethod
    def of_blocks(cls, blocks: Iterable[Block]) -> Timeline:
        """Returns a simulated timeline. The blocks of a lane are given in their order in time and overlap on no rank,
        which is not checked.
        """
        timeline = object.__new__(cls)
        timeline.__dict__.update(blocks=tuple(blocks), source="simulated")
        return timeline

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans_of(range(len(self.blocks[0].start_us_R) if self.blocks else 0)))

    def only(self, ranks: Iterable[int]) -> Timeline:
        """Returns the timeline of some ranks, in their order; spans of other ranks of a simulated one are not made."""
        timeline, wanted = object.__new__(type(self)), sorted(set(ranks))
        spans = self._spans_of(wanted) if self.blocks else (span for span in self.spans if span.rank in set(wanted))
        timeline.__dict__.update(blocks=(), source=self.source, spans=tuple(spans))
        return timeline

    def _spans_of(self, ranks: Iterable[int]) -> Iterator[Span]:
        """Yields spans without the checks of a dataclass, which blocks keep by construction."""
        by_lane = sorted(self.blocks, key=lambda block: block.lane)
        table = [(block, block.start_us_R.tolist(), block.end_us_R.tolist()) for block in by_lane]
        for rank in ranks:
            for block, start_us_R, end_us_R in table:
                start_us, end_us = start_us_R[rank], end_us_R[rank]
                if end_us >= start_us:
                    span = object.__new__(Span)
                    span.__dict__.update(
                        rank=rank,
                        lane=block.lane,
                        start_us=start_us,
                        end_us=end_us,
                        kind=block.kind,
                        detail=block.detail,
                    )
                    yield span

    def of(self, kind: str, rank: int | None = None) -> tuple[Span, ...]:
        """Returns the spans of one kind, of one rank or of all."""
        return tuple(s for s in self.spans if s.kind == kind and rank in (None, s.rank))

    @cached_property
    def length_us(self) -> float:
        if self.blocks:
            end_us = max(np.nanmax(block.end_us_R) for block in self.blocks)
            return float(end_us - min(np.nanmin(block.start_us_R) for block in self.blocks))
        return max((s.end_us for s in self.spans), default=0.0) - min((s.start_us for s in self.spans), default=0.0)

    def busy_us(self, lane: str) -> dict[int, float]:
        """Returns the microseconds that each rank of the timeline is busy on a lane."""
        if self.blocks:
            busy_us_R = np.zeros_like(self.blocks[0].start_us_R)
            for block in self.blocks:
                if block.lane == lane:
                    busy_us_R += np.nan_to_num(block.end_us_R - block.start_us_R)
            return dict(enumerate(busy_us_R.tolist()))
        busy_us: dict[int, float] = defaultdict(float)
        for span in self.spans:
            busy_us[span.rank] += span.duration_us if span.lane == lane else 0.0
        return dict(busy_us)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and (self.source, self.spans) == (other.source, other.spans)

    def plot(self, ranks: Sequence[int] | None = None) -> Axes:
        """Draws the lanes of some ranks over time, in a new figure of pyplot. By default they are the rank that
        computes longest and the one that computes least. Raises ValueError if there are no spans.
        """
        return pyplot_axes("moesys.lab.show.figures:draw_timeline", self, ranks)

    def _facts(self) -> str:
        spans, ranks = sum(self._shown()["spans"]), len(self.busy_us("compute"))
        return f"{self.source}, {self.length_us / 1000:,.3f} ms, {counted(ranks, 'rank')}, {counted(spans, 'span')}"

    def _columns(self) -> Columns:
        return {each.name: [getattr(span, each.name) for span in self.spans] for each in fields(Span)}

    def _shown(self) -> Columns:
        """Returns sums over ranks by lane and kind. It does not spell out the spans of blocks."""
        sums: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for block in self.blocks:
            us_R, (spans, us) = block.end_us_R - block.start_us_R, sums[block.lane, block.kind]
            sums[block.lane, block.kind] = spans + int(np.isfinite(us_R).sum()), us + float(np.nansum(us_R))
        for span in () if self.blocks else self.spans:
            spans, us = sums[span.lane, span.kind]
            sums[span.lane, span.kind] = spans + 1, us + span.duration_us
        rows = [(*place, spans, us / 1000) for place, (spans, us) in sorted(sums.items())]
        return by_column(("lane", "kind", "spans", "ms, sum of ranks"), rows)
