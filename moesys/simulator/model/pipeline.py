"""A step's micro-batches on the stages of a pipeline: when each stage computes which, and what it holds meanwhile.

p stages, each with v parts of the model, m micro-batches. A part of the model is stage + p · chunk: chunk 0 of the last
stage is followed by chunk 1 of the first.

- ``1f1b``: as many forwards as fit before a backward is there, then one of each in turn (PipeDream-Flush, arXiv
  2104.04473, section 2.2); with v > 1 interleaved, in groups of p micro-batches a chunk.
- ``zero_bubble``: gradients of inputs and of weights are computed apart, and those of weights fill what would be waited
  (ZB-H1, arXiv 2401.10241, section 2.2): no stage holds more micro-batches than the first one with ``1f1b``. Where what
  fits into no bubble would hold up others, as between uneven stages, they run at once, in the order of ``1f1b``.
- ``overlap``, of ``1f1b``: once all stages are busy, a forward runs beside the backward of another micro-batch, so that
  one computes while the other's rows travel (DualPipe, DeepSeek-V3, arXiv 2412.19437, section 3.2.1; Megatron-Core's
  ``overlap_moe_expert_parallel_comm``). A pair takes what both compute or what both exchange, whichever is longer, and
  no less than either alone. A stage is one forward further ahead, but layer by layer a pair's backward frees what its
  forward keeps (``TransformerModelChunkSchedulePlan.run`` there), so that a stage holds a layer more.

Seconds throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesys.config.model_run import PipelineSchedule

Pass = Literal["forward", "backward", "weight_gradients"]


class Work(NamedTuple):
    """One pass of one micro-batch through one of a stage's parts."""

    of: Pass
    chunk: int
    micro_batch: int


class PassSeconds(NamedTuple):
    """The seconds in which a pass computes, and in which it exchanges, each by itself."""

    computed: float
    exchanged: float


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of one part of the model and one micro-batch. ``weight_gradients``: the part of ``backward`` that may
    come later. ``lanes``: forward and backward, divided into computing and exchanges; None: all is computing.
    """

    forward: float
    backward: float
    weight_gradients: float = 0.0
    lanes: tuple[PassSeconds, PassSeconds] | None = None

    def beside(self, other: PartSeconds) -> float:
        """Returns the seconds of a forward that runs with the backward of another micro-batch on the ``other`` part."""
        forward = PassSeconds(self.forward, 0.0) if self.lanes is None else self.lanes[0]
        backward = PassSeconds(other.backward, 0.0) if other.lanes is None else other.lanes[1]
        computed, exchanged = forward.computed + backward.computed, forward.exchanged + backward.exchanged
        return max(computed, exchanged, self.forward, other.backward)


# The work that a stage does at once.
Turn = tuple[Work, ...]


@dataclass(frozen=True)
class PipelineRun:
    """A step on the stages of a pipeline.

    spans: (work, start, end) of each stage in order; both works of a pair take all of its time. most_held: the largest
    number of forwards, over all chunks of each stage, whose backward is still to come.
    """

    spans: tuple[tuple[tuple[Work, float, float], ...], ...]
    most_held: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first forward until the last stage ends."""
        return max(stage[-1][2] for stage in self.spans)

    @property
    def bubble_share(self) -> float:
        """The share of the stages' time in which they wait."""
        busy = sum(end - start for stage in self.spans for start, end in {span[1:] for span in stage})
        return 1 - busy / (self.seconds * len(self.spans))


def run_pipeline(
    parts: Sequence[Sequence[PartSeconds]],
    micro_batches: int,
    schedule: PipelineSchedule = "1f1b",
    hop_seconds: float = 0.0,
    *,
    overlap: bool = False,
) -> PipelineRun:
    """Runs ``parts[stage][chunk]``. ``hop_seconds``: from a part to the next on another stage, either way; a stage goes
    on meanwhile.

    ``ModelRun`` checks that an interleaved schedule has micro-batches that fill its groups, that one which splits
    backward has one chunk a stage, and with what ``overlap`` cannot be used.
    """
    num_stages, num_chunks = len(parts), len(parts[0])
    if schedule == "zero_bubble":
        filling = _Pipeline(parts, hop_seconds, split=True).run_filling(micro_batches)
        orders = [
            list(_with_weight_gradients(_one_forward_one_backward(stage, num_stages, 1, micro_batches, 0)))
            for stage in range(num_stages)
        ]
        at_once = _Pipeline(parts, hop_seconds, split=True).run_in_order(orders)
        return min(filling, at_once, key=lambda run: run.seconds)
    further = int(overlap)
    orders = [
        _one_forward_one_backward(stage, num_stages, num_chunks, micro_batches, further) for stage in range(num_stages)
    ]
    return _Pipeline(parts, hop_seconds, split=False).run_in_order(orders)


def _one_forward_one_backward(
    stage: int, num_stages: int, num_chunks: int, micro_batches: int, further: int
) -> list[Turn]:
    """Returns the turns of a stage, which holds p - stage micro-batches; interleaved 2 (p - stage - 1) + (v - 1) p + 1
    chunks of them. One forward ``further`` ahead, forwards and backwards are pairs.
    """
    total = num_chunks * micro_batches
    ahead = num_stages - stage - 1
    if num_chunks > 1:
        ahead = 2 * ahead + (num_chunks - 1) * num_stages
    ahead = min(ahead + further, total)
    forwards = [Work("forward", *_place(turn, num_stages, num_chunks)) for turn in range(total)]
    backwards = [Work("backward", *_place(turn, num_stages, num_chunks)) for turn in range(total)]
    backwards = [work._replace(chunk=num_chunks - 1 - work.chunk) for work in backwards]
    turns: list[Turn] = [(work,) for work in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        turns += [(forward, backward)] if further else [(forward,), (backward,)]
    return turns + [(work,) for work in backwards[total - ahead :]]


def _with_weight_gradients(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yields gradients of weights right behind those of inputs, which others then have sooner than with both."""
    for turn in turns:
        yield turn
        if turn[0].of == "backward":
            yield (turn[0]._replace(of="weight_gradients"),)


def _place(turn: int, num_stages: int, num_chunks: int) -> tuple[int, int]:
    """Returns the chunk and micro-batch of a stage's turn: p micro-batches through a chunk, then through the next."""
    if num_chunks == 1:
        return 0, turn
    group, within = divmod(turn, num_stages * num_chunks)
    chunk, place = divmod(within, num_stages)
    return chunk, group * num_stages + place


class _Pipeline:
    """Clocks of the stages, and when each part of each micro-batch is through."""

    def __init__(self, parts: Sequence[Sequence[PartSeconds]], hop_seconds: float, *, split: bool) -> None:
        self.parts, self.hop_seconds, self.split = parts, hop_seconds, split
        self.num_stages, self.num_chunks = len(parts), len(parts[0])
        self.now = [0.0] * self.num_stages
        self.spans: list[list[tuple[Work, float, float]]] = [[] for _ in parts]
        self.done: dict[tuple[Pass, int, int], float] = {}
        self.held, self.most_held = [0] * self.num_stages, [0] * self.num_stages

    def run_in_order(self, orders: Sequence[Sequence[Turn]]) -> PipelineRun:
        """Runs each stage's work in its order, as soon as what it needs is there."""
        waiting = [iter(order) for order in orders]
        next_of = [next(order, None) for order in waiting]
        while any(next_of):
            moved = False
            for stage, order in enumerate(waiting):
                while (turn := next_of[stage]) is not None and (ready := self._all_ready(stage, turn)) is not None:
                    self._do(stage, turn, ready)
                    next_of[stage], moved = next(order, None), True
            assert moved, "stages wait for each other"
        return self._found()

    def run_filling(self, micro_batches: int) -> PipelineRun:
        """Runs what can begin first; of one stage a forward that it has room for, then a backward, then weight
        gradients.
        """
        forwards = [iter(range(micro_batches)) for _ in self.parts]
        next_forward = [next(each, None) for each in forwards]
        next_backward, left = [0] * self.num_stages, [list[int]() for _ in self.parts]

        def choices(stage: int) -> Iterator[tuple[float, int, Work]]:
            """Yields what the stage can do: when it can begin, the order of preference, and the work."""
            if next_backward[stage] < micro_batches:
                work = Work("backward", 0, next_backward[stage])
                if (ready := self._ready(stage, work)) is not None:
                    yield max(ready, self.now[stage]), 1, work
            forward = next_forward[stage]
            awaiting = self.held[stage] - len(left[stage])
            if forward is not None and self.held[stage] < self.num_stages and awaiting < self.num_stages - stage:
                work = Work("forward", 0, forward)
                if (ready := self._ready(stage, work)) is not None:
                    yield max(ready, self.now[stage]), 0, work
            if left[stage]:
                yield self.now[stage], 2, Work("weight_gradients", 0, left[stage][0])

        for _ in range(3 * micro_batches * self.num_stages):
            start, _, stage, work = min(
                (start, preferred, stage, work)
                for stage in range(self.num_stages)
                for start, preferred, work in choices(stage)
            )
            self._do(stage, (work,), start)
            if work.of == "forward":
                next_forward[stage] = next(forwards[stage], None)
            elif work.of == "backward":
                next_backward[stage] += 1
                left[stage].append(work.micro_batch)
            else:
                left[stage].pop(0)
        return self._found()

    def _all_ready(self, stage: int, turn: Turn) -> float | None:
        ready = [self._ready(stage, work) for work in turn]
        known = [each for each in ready if each is not None]
        return max(known) if len(known) == len(turn) else None

    def _ready(self, stage: int, work: Work) -> float | None:
        """Returns when what the work needs is there, or None while that is not known."""
        last_stage, last_chunk = self.num_stages - 1, self.num_chunks - 1
        part = stage + self.num_stages * work.chunk
        if work.of == "weight_gradients":
            return self.done.get(("backward", part, work.micro_batch))
        if work.of == "forward":
            return 0.0 if part == 0 else self._after("forward", part - 1, work.micro_batch, stage)
        if part == last_stage + self.num_stages * last_chunk:
            return self.done.get(("forward", part, work.micro_batch))
        return self._after("backward", part + 1, work.micro_batch, stage)

    def _after(self, of: Pass, part: int, micro_batch: int, stage: int) -> float | None:
        end = self.done.get((of, part, micro_batch))
        return None if end is None else end + (self.hop_seconds if part % self.num_stages != stage else 0.0)

    def _do(self, stage: int, turn: Turn, ready: float) -> None:
        start = max(self.now[stage], ready)
        end = start + self._seconds(stage, turn)
        # The backward of a pair frees while the forward keeps. Without a split, backward frees what its forward kept.
        for work in reversed(turn):
            if work.of == "forward":
                self.held[stage] += 1
            elif work.of == "weight_gradients" or not self.split:
                self.held[stage] -= 1
            self.most_held[stage] = max(self.most_held[stage], self.held[stage])
            self.done[work.of, stage + self.num_stages * work.chunk, work.micro_batch] = end
            self.spans[stage].append((work, start, end))
        self.now[stage] = end

    def _seconds(self, stage: int, turn: Turn) -> float:
        of = [self.parts[stage][work.chunk] for work in turn]
        if len(turn) == 2:
            return of[0].beside(of[1])
        match turn[0].of:
            case "forward":
                return of[0].forward
            case "backward":
                return of[0].backward - (of[0].weight_gradients if self.split else 0.0)
            case "weight_gradients":
                return of[0].weight_gradients

    def _found(self) -> PipelineRun:
        return PipelineRun(tuple(map(tuple, self.spans)), tuple(self.most_held))
