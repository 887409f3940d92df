"""Timeline: what happened, when."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


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


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, sorted; on one lane of one rank none overlap. ``source``: did a clock or a model make it."""

    spans: tuple[Span, ...]
    source: Literal["simulated", "measured"]

    def __post_init__(self) -> None:
        if self.source not in ("simulated", "measured"):
            raise ValueError(f"source={self.source!r} must be 'simulated' or 'measured'")
        spans = tuple(sorted(self.spans))
        object.__setattr__(self, "spans", spans)
        for before, after in pairwise(spans):
            if (before.rank, before.lane) == (after.rank, after.lane) and before.end_us > after.start_us:
                raise ValueError(f"spans overlap on lane {before.lane} of rank {before.rank}: {before} and {after}")

    def of(self, kind: str, rank: int | None = None) -> tuple[Span, ...]:
        """The spans of one kind, of one rank or of all."""
        return tuple(s for s in self.spans if s.kind == kind and rank in (None, s.rank))

    @property
    def length_us(self) -> float:
        return max((s.end_us for s in self.spans), default=0.0) - min((s.start_us for s in self.spans), default=0.0)

    @staticmethod
    def merge(timelines: list[Timeline]) -> Timeline:
        """One timeline of several ranks' own; simulated and measured never mix."""
        sources = {timeline.source for timeline in timelines}
        if len(sources) != 1:
            raise ValueError(f"cannot merge timelines from {sorted(sources)}; compare them side by side instead")
        return Timeline(tuple(span for timeline in timelines for span in timeline.spans), sources.pop())
