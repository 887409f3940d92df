"""Sums up what ranks spend a simulated step on: computing, and waiting for what."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator

from moesys.simulator.lanes import SLOWER_RANKS
from moesys.simulator.simulation import critical_rank
from moesys.timeline import Span, Timeline

# The layer of the optimizer, of waits beside it, and of a wait of a rank that has nothing to do at all.
OF_NO_LAYER = -1


class RankTimes:
    """Milliseconds of every rank by layer and kind: of computing, and of waiting by what for."""

    def __init__(self, timeline: Timeline, num_ranks: int) -> None:
        self.critical_rank = critical_rank(timeline)
        self._ms_R: list[dict[tuple[int, str], float]] = [defaultdict(float) for _ in range(num_ranks)]
        spans_R: list[list[Span]] = [[] for _ in range(num_ranks)]
        for span in timeline.spans:
            spans_R[span.rank].append(span)
        for ms, spans in zip(self._ms_R, spans_R, strict=True):
            for layer, kind, us in _spent(spans, timeline.length_us):
                ms[layer, kind] += us / 1000

    def critical_ms(self, layer: int | None = None) -> dict[str, float]:
        """Of the rank that computes longest, by kind; of one layer or of all."""
        return self._sum([self._ms_R[self.critical_rank]], layer)

    def mean_ms(self, layer: int | None = None) -> dict[str, float]:
        """The mean over ranks, by kind; of one layer or of all."""
        return {kind: ms / len(self._ms_R) for kind, ms in self._sum(self._ms_R, layer).items()}

    @staticmethod
    def _sum(ms_R: list[dict[tuple[int, str], float]], layer: int | None) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for of_rank in ms_R:
            for (of_layer, kind), ms in of_rank.items():
                if layer in (None, of_layer):
                    total[kind] += ms
        return dict(total)


def _spent(spans: list[Span], end_us: float) -> Iterator[tuple[int, str, float]]:
    """(layer, kind, microseconds) of one rank, from 0 to ``end_us``.

    A wait ends with the all-to-all that it was for. So, from its end backwards, a moment of it belongs to the
    all-to-all under way that ends last but not after the wait; where none is, to ranks slower to come to the next one.
    """
    computed = [span for span in spans if span.lane == "compute"]
    moved = sorted((span for span in spans if span.lane != "compute"), key=lambda span: span.end_us)
    for span in computed:
        yield _layer_of(span), span.kind, span.duration_us
    starts = [0.0, *(span.end_us for span in computed)]
    ends = [*(span.start_us for span in computed), end_us]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        beside = computed[index : index + 1] or computed[-1:]
        layer = _layer_of(beside[0]) if beside else OF_NO_LAYER
        first, last = (bisect_right(moved, us, key=lambda span: span.end_us) for us in (start, end))
        for transfer in reversed(moved[first:last]):
            if transfer.end_us < end:
                yield layer, SLOWER_RANKS, end - transfer.end_us
                end = transfer.end_us
            if transfer.start_us < end:
                layer = _layer_of(transfer)
                begin = max(transfer.start_us, start)
                yield layer, transfer.kind, end - begin
                end = begin
        if start < end:
            yield layer, SLOWER_RANKS, end - start


def _layer_of(span: Span) -> int:
    """The simulator's details begin with ``layer`` and its number, but for the optimizer's."""
    return int(span.detail.split()[1]) if span.detail.startswith("layer ") else OF_NO_LAYER
