"""A step of all MoE layers on the lanes of a simulated cluster: forward in order, backward in reverse.

Every rank runs the program of a linked model (``overlap.chunked``, ``moe.call``, ``moe.runtime``): the same collectives
in the same order, issued and waited for at the same points. What is modelled: the products of each rank's own rows, in
tiles and waves; gathers and weighted sums; the rest of a layer; recomputation; all-to-alls, which start when the last
rank has issued them, as each pair of ranks begins when both are there (so a rank that is late makes all others wait)
and of which a rank is through with its own messages (``overlap.links``); links shared by tokens and experts; computing
that is slower while messages move beside it; the exchange of counts and of routing weights, as messages without bytes;
chunks of exactly 1/C of everything.

What is not: routers and planning, copies of experts before and behind their way, and links that are slower than
declared because many messages are short or meet in a switch.

R ranks. Seconds inside, microseconds in the ``Timeline``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from moesys.config import ClusterSpec, Fsep, MegaKernel, ModelShape, Pipelined, Strategy
from moesys.cost import (
    GRADIENT_BYTES,
    FloatArray,
    LinkLoad,
    dispatch_bytes,
    gather_seconds,
    link_load,
    pass_seconds,
    reshard_bytes,
    restore_bytes,
    rows_of,
    sum_seconds,
)
from moesys.layout import TokenPlan
from moesys.overlap.critical_path import START, Event, PathPart, Transfer, Work, walk_back
from moesys.overlap.links import ChannelName, Links
from moesys.timeline import Block, Timeline

# Of spans on the lane ``compute``.
COMPUTED_KINDS = ("experts", "weight_gradients", "gather", "sum", "other", "optimizer")
# What a rank waits for where an all-to-all has not begun: those that have not come to it yet.
SLOWER_RANKS = "slower ranks"

Recompute = Literal["none", "layers", "computing"]
Direction = Literal["forward", "recomputation", "backward"]


@dataclass(frozen=True)
class RestOfStep:
    """What a step does beside the experts of its layers.

    other_seconds: forward of the rest of a layer (attention, norms, router), before its experts, a number or one a rank
        [R]; backward takes twice that.
    recompute: ``layers``, as ``moesys.recompute`` does it: in backward the whole layer runs forward once more before,
        and its rows travel once more. ``computing``, as LAER-MoE does it: rows that have travelled are kept.
    optimizer_seconds: at the end of the step.
    latency_seconds: what every all-to-all of rows, experts or gradients takes before its first byte, beside what the
        cluster declares.
    gradient_bytes: of one element of an expert's gradient on its way home.
    travel_behind_rest: as FSDP does with its prefetch limit of 1, and no linked model: a layer's experts set off before
        the rest of the layer, in backward before that of the layer above; gradients are waited for at the end only.
    """

    other_seconds: float | FloatArray = 0.0
    recompute: Recompute = "none"
    optimizer_seconds: float = 0.0
    latency_seconds: float = 0.0
    gradient_bytes: int = GRADIENT_BYTES
    travel_behind_rest: bool = False


@dataclass(frozen=True, eq=False)
class Simulation:
    """A step: ``timeline`` of blocks, and the path through them that sets its length.

    waited_R: seconds [R] that each rank waited, by the lane of what it waited for, and as ``slower ranks`` where that
        had not begun. With ``computed_R``, and the end of a rank that is through early, that is all of its step.
    """

    cluster: ClusterSpec
    timeline: Timeline
    length_seconds: float
    waited_R: dict[str, FloatArray]
    _events: tuple[Event, ...]
    _last: tuple[int, int]

    @cached_property
    def computed_R(self) -> dict[str, FloatArray]:
        """Seconds [R] that each rank computed, by kind."""
        computed_R: dict[str, FloatArray] = {}
        for event in self._events:
            if isinstance(event, Work):
                computed_R[event.kind] = computed_R.get(event.kind, 0.0) + (event.end_R - event.start_R)
        return computed_R

    @cached_property
    def moved_L(self) -> dict[str, FloatArray]:
        """Seconds that each link would have been busy at its full rate, [2·R + 2·N] as in ``LinkLoad``, by lane."""
        moved_L: dict[str, FloatArray] = {}
        for event in self._events:
            if isinstance(event, Transfer):
                moved_L[event.lane] = moved_L.get(event.lane, 0.0) + event.flow.load.seconds_L
        return moved_L

    @cached_property
    def critical_path(self) -> tuple[PathPart, ...]:
        """From the start of the step to its end without a gap: its seconds add up to ``length_seconds``."""
        return walk_back(self._events, *self._last, self.length_seconds, self.cluster)


def simulate_step(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    plans: Sequence[TokenPlan],
    *,
    other_seconds: float = 0.0,
    latency_seconds: float = 0.0,
) -> Timeline:
    """``run_step`` of one micro-batch: forward and backward of layers with these ``plans``, in order."""
    rest = RestOfStep(other_seconds=other_seconds, latency_seconds=latency_seconds)
    return run_step(strategy, model, cluster, [plans], rest).timeline


def run_step(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    micro_batches: Sequence[Sequence[TokenPlan]],
    rest: RestOfStep | None = None,
) -> Simulation:
    """Forward and backward of each micro-batch through all layers, one micro-batch after another; zero is the start.

    ``micro_batches``: the plans of each, layer by layer. Spans are named as a measured step's: lanes ``compute`` (kinds
    are ``COMPUTED_KINDS``), ``counts``, ``dispatch``, ``combine``, ``restore`` and ``reshard``, whose kinds are named
    alike. What takes no rank any time has no span.

    Raises ValueError for a strategy whose overlap the model does not know (``require_simulated``).
    """
    require_simulated(strategy)
    rest = RestOfStep() if rest is None else rest
    step = _Step(strategy, model, cluster, rest)
    for number, plans in enumerate(micro_batches):
        step.begin(plans, f", micro-batch {number}" if len(micro_batches) > 1 else "")
        for layer in range(len(plans)):
            step.forward(layer)
        for layer in reversed(range(len(plans))):
            step.backward(layer)
        step.flush()
    step.finish()
    return step.simulation()


def require_simulated(strategy: Strategy) -> None:
    """Raises ValueError for ``MegaKernel``, whose tasks the model of cost does not know."""
    if isinstance(strategy.overlap, MegaKernel):
        raise ValueError(
            f"strategy {strategy.name!r}: overlap=MegaKernel() can be run and not simulated, as the cost model knows "
            "dispatch, experts and combine one after another or in chunks; use Sequential() or Pipelined(chunks=...)"
        )


def exposed_ms(timeline: Timeline) -> float:
    """Mean over ranks of the milliseconds in which a rank does not compute, until the last one is done: communication
    that nothing hides, and waiting for slower ranks.
    """
    busy_us = timeline.busy_us("compute")
    return (timeline.length_us - sum(busy_us.values()) / len(busy_us)) / 1000 if busy_us else 0.0


def critical_rank(timeline: Timeline) -> int:
    """The rank that computes longest, for which others wait; the lowest of equals, and 0 of an empty timeline."""
    busy_us = timeline.busy_us("compute")
    return min(busy_us, key=lambda rank: (-busy_us[rank], rank), default=0)


@dataclass
class _Exchange:
    """All-to-alls of experts or gradients, of which one begins where another ended: ``newest`` is under way, the
    ``others`` are still to be issued.
    """

    newest: Transfer
    others: list[LinkLoad]
    detail: str


class _Step:
    """Clocks of all ranks, ``now_R``, what holds each up until then, and what is on its way."""

    def __init__(self, strategy: Strategy, model: ModelShape, cluster: ClusterSpec, rest: RestOfStep) -> None:
        self.strategy, self.model, self.cluster, self.rest = strategy, model, cluster, rest
        self.suffix = ""
        self.links = Links(cluster)
        self.num_chunks = strategy.overlap.chunks if isinstance(strategy.overlap, Pipelined) else 1
        sharding = strategy.sharding
        self.prefetch_layers, self.delay_reshard, self.reshard_after_forward = 0, False, False
        if isinstance(sharding, Fsep):
            self.prefetch_layers, self.delay_reshard = sharding.prefetch_layers, sharding.delay_reshard
            self.reshard_after_forward = sharding.reshard_after_forward
        self.now_R = np.zeros(cluster.num_ranks)
        self.cause_R = np.full(cluster.num_ranks, START)
        self.events: list[Event] = []
        self.waited_R: dict[str, FloatArray] = {}
        self.newest_of: dict[ChannelName, int] = {"tokens": START, "weights": START}
        self.waiting_reshards: deque[int] = deque()
        self.reshards: deque[_Exchange] = deque()

    def begin(self, plans: Sequence[TokenPlan], suffix: str) -> None:
        """A micro-batch; experts that were brought for another one are not used. ``suffix``: of every detail."""
        self.plans, self.suffix = plans, suffix
        self.experts: dict[int, _Exchange | None] = {}
        self.restores: dict[int, tuple[LinkLoad, ...]] = {}
        self.rows: dict[int, tuple[FloatArray, LinkLoad]] = {}

    # --- a layer --------------------------------------------------------------------------------------------

    def forward(self, layer: int) -> None:
        def ready() -> None:
            self._spread(layer)
            for following in range(layer + 1, min(layer + 1 + self.prefetch_layers, len(self.plans))):
                self._start_restore(following)
            self._finish_restore(layer)

        if self.rest.travel_behind_rest:
            self._start_restore(layer)
        self._compute(self.rest.other_seconds, "other", f"layer {layer} forward")
        self._exchange_counts(layer)
        self._start_restore(layer)
        self._run(layer, "forward", ready)
        if self.reshard_after_forward:
            del self.experts[layer]

    def backward(self, layer: int) -> None:
        def found() -> None:
            self._spread(layer)
            self._finish_restore(layer)

        def ready() -> None:
            self._spread(layer)
            for before in range(layer - 1, max(layer - 1 - self.prefetch_layers, -1), -1):
                self._start_restore(before)
            self._start_reshards()
            self._finish_restore(layer)

        if self.rest.recompute == "layers":
            self._compute(self.rest.other_seconds, "other", f"layer {layer} recomputation")
            self._start_restore(layer)
            self._run(layer, "recomputation", found)
        self._start_restore(layer)
        self._run(layer, "backward", ready)
        del self.experts[layer]
        self.waiting_reshards.append(layer)
        if not self.delay_reshard:
            self._start_reshards()
        if self.rest.travel_behind_rest:
            if layer:
                self._start_restore(layer - 1)
        else:
            self._finish_reshards()
        if self.rest.recompute == "computing":
            self._compute(self.rest.other_seconds, "other", f"layer {layer} recomputation")
        self._compute(2 * self.rest.other_seconds, "other", f"layer {layer} backward")

    def flush(self) -> None:
        """Gradients that were to travel behind a layer that does not come."""
        self._start_reshards()
        self._finish_reshards()

    def finish(self) -> None:
        self._compute(self.rest.optimizer_seconds, "optimizer", "")

    def _run(self, layer: int, direction: Direction, ready: Callable[[], None]) -> None:
        """The schedule of ``ChunkedExecutor``."""
        chunks, name = self.num_chunks, f"layer {layer} {direction}"
        rows_RE, whole = self._rows(layer)
        dispatch, combine = whole.part(1 / chunks), whole.reversed().part(1 / chunks)
        here_R, chosen_R = rows_RE.sum(axis=1) / chunks, self.plans[layer].load.tokens_RE.sum(axis=1) / chunks
        backward = direction == "backward"
        going_home: deque[tuple[int, Transfer]] = deque()

        def send(chunk: int) -> Transfer:
            self._gather(chosen_R, f"{name} {chunk}")
            return self._issue("tokens", "dispatch", dispatch, f"{name} {chunk}")

        def finish() -> None:
            chunk, transfer = going_home.popleft()
            self._wait(transfer)
            self._compute(sum_seconds(chosen_R, self.model, self.cluster), "sum", f"{name} {chunk}")

        if backward:
            weights = self._send("tokens", "dispatch", whole.messages(), f"{name} weights")
        dispatched = deque([send(0)])
        for chunk in range(chunks):
            if chunk + 1 < chunks:
                dispatched.append(send(chunk + 1))
            self._wait(dispatched.popleft())
            if chunk == 0:
                if backward:
                    self._wait(weights)
                ready()
            self._experts(rows_RE / chunks, layer, direction, chunk)
            self._gather(here_R, f"{name} {chunk}")
            going_home.append((chunk, self._issue("tokens", "combine", combine, f"{name} {chunk}")))
            if chunk:
                finish()
        if chunks == 1:
            finish()
        if backward:
            weights = self._send("tokens", "combine", whole.reversed().messages(), f"{name} weights")
            seconds_R = pass_seconds(rows_RE, self.model, self.cluster, "weight_gradients")
            self._compute(seconds_R, "weight_gradients", name)
        if chunks > 1:
            finish()
        if backward:
            self._wait(weights)

    def _experts(self, rows_RE: FloatArray, layer: int, direction: Direction, chunk: int) -> None:
        def run(of: Literal["forward", "input_gradients"], name: Direction) -> None:
            seconds_R = pass_seconds(rows_RE, self.model, self.cluster, of)
            self._compute(seconds_R, "experts", f"layer {layer} {name} {chunk}")

        if direction == "backward":
            if self.rest.recompute == "computing":
                run("forward", "recomputation")
            run("input_gradients", direction)
        else:
            run("forward", direction)

    def _gather(self, rows_R: FloatArray, detail: str) -> None:
        if self.cluster.num_ranks > 1:
            self._compute(gather_seconds(rows_R, self.model, self.cluster), "gather", detail)

    def _rows(self, layer: int) -> tuple[FloatArray, LinkLoad]:
        """Of each rank and expert, and what their way to it asks of the links."""
        if layer not in self.rows:
            plan = self.plans[layer]
            self.rows[layer] = rows_of(plan), link_load(dispatch_bytes(plan, self.model), self.cluster)
        return self.rows[layer]

    def _exchange_counts(self, layer: int) -> None:
        """An all-gather: nobody knows what comes before all have said what they send."""
        sizes = np.array(self.cluster.node_sizes)
        others = np.array([sizes.repeat(sizes) > 1, np.full(self.cluster.num_ranks, len(sizes) > 1)])
        counts = LinkLoad(np.zeros(2 * (self.cluster.num_ranks + len(sizes))), others.repeat(2, axis=0))
        self._wait(self._send("tokens", "counts", counts, f"layer {layer}"))

    # --- experts and their gradients ------------------------------------------------------------------------

    def _start_restore(self, layer: int) -> None:
        """Unless the layer's experts are under way or here."""
        if layer not in self.experts:
            if layer not in self.restores:
                layout = self.plans[layer].layout
                all_bytes = restore_bytes(layout, self.model, self.cluster, self.strategy.sharding)
                self.restores[layer] = tuple(link_load(bytes_RR, self.cluster) for bytes_RR in all_bytes)
            self.experts[layer] = self._start(self.restores[layer], "restore", layer)

    def _spread(self, layer: int) -> None:
        """Issue what is left of a restore, so that it does not queue behind those of other layers."""
        if (exchange := self.experts[layer]) is not None:
            self._advance(exchange)

    def _finish_restore(self, layer: int) -> None:
        if (exchange := self.experts[layer]) is not None:
            self._finish(exchange)
            self.experts[layer] = None

    def _start_reshards(self) -> None:
        while self.waiting_reshards:
            layer = self.waiting_reshards.popleft()
            layout, sharding = self.plans[layer].layout, self.strategy.sharding
            all_bytes = reshard_bytes(layout, self.model, self.cluster, sharding, self.rest.gradient_bytes)
            loads = tuple(link_load(bytes_RR, self.cluster) for bytes_RR in all_bytes)
            if (exchange := self._start(loads, "reshard", layer)) is not None:
                self.reshards.append(exchange)

    def _finish_reshards(self) -> None:
        while self.reshards:
            self._finish(self.reshards.popleft())

    def _start(self, loads: tuple[LinkLoad, ...], lane: str, layer: int) -> _Exchange | None:
        if not loads:
            return None
        first, *others = loads
        return _Exchange(self._issue("weights", lane, first, f"layer {layer}"), others, f"layer {layer}")

    def _advance(self, exchange: _Exchange) -> None:
        """Wait for all all-to-alls of the exchange but the last, which is then under way."""
        while exchange.others:
            self._wait(exchange.newest)
            exchange.newest = self._issue("weights", exchange.newest.lane, exchange.others.pop(0), exchange.detail)

    def _finish(self, exchange: _Exchange) -> None:
        self._advance(exchange)
        self._wait(exchange.newest)

    # --- lanes ----------------------------------------------------------------------------------------------

    def _issue(self, channel: ChannelName, lane: str, load: LinkLoad, detail: str) -> Transfer:
        """An all-to-all of rows, experts or gradients."""
        return self._send(channel, lane, load, detail, self.rest.latency_seconds)

    def _send(
        self, channel: ChannelName, lane: str, load: LinkLoad, detail: str, latency_seconds: float = 0.0
    ) -> Transfer:
        last = int(self.now_R.argmax())
        issued, number = float(self.now_R[last]), len(self.events)
        flow = self.links.issue(channel, issued, load, latency_seconds)
        behind = self.newest_of[channel]
        if load.used_4R.any():
            self.newest_of[channel] = number
        transfer = Transfer(number, flow, lane, detail + self.suffix, issued, last, int(self.cause_R[last]), behind)
        self.events.append(transfer)
        return transfer

    def _wait(self, transfer: Transfer) -> None:
        end_R = self.links.end_of(transfer.flow)
        begun_R = np.clip(transfer.flow.start, self.now_R, np.maximum(end_R, self.now_R))
        for kind, seconds_R in (SLOWER_RANKS, begun_R - self.now_R), (transfer.lane, end_R - begun_R):
            self.waited_R[kind] = self.waited_R.get(kind, 0.0) + np.maximum(seconds_R, 0.0)
        self.cause_R = np.where(end_R > self.now_R, transfer.number, self.cause_R)
        self.now_R = np.maximum(self.now_R, end_R)

    def _compute(self, seconds_R: FloatArray | float, kind: str, detail: str) -> None:
        end_R = self._end_of_work(np.broadcast_to(seconds_R, self.now_R.shape))
        if (end_R > self.now_R).any():
            number, detail = len(self.events), detail + self.suffix
            work = Work(number, kind, detail, self.now_R, end_R, self.cause_R, np.arange(len(end_R)))
            self.cause_R = np.where(end_R > self.now_R, work.number, self.cause_R)
            self.events.append(work)
            self.now_R = end_R

    def _end_of_work(self, seconds_R: FloatArray) -> FloatArray:
        """Of computing that begins now: while messages of a rank move, it loses ``copy_share`` to them."""
        moving = self.links.if_nothing_follows() if self.cluster.copy_share else []
        start_FR = np.array([np.full(len(end_R), start) for start, end_R in moving]).reshape(-1, len(seconds_R))
        end_FR = np.array([end_R for _, end_R in moving]).reshape(-1, len(seconds_R))
        at_R, left_R = self.now_R, seconds_R
        for until_R in np.sort(np.concatenate([start_FR, end_FR]), axis=0):
            until_R = np.maximum(until_R, at_R)
            beside_R = ((start_FR <= at_R) & (at_R < end_FR)).any(axis=0)
            rate_R = np.where(beside_R, 1 - self.cluster.copy_share, 1.0)
            taken_R = np.minimum(left_R / rate_R, until_R - at_R)
            left_R = left_R - taken_R * rate_R
            at_R = np.where(left_R > 0, until_R, at_R + taken_R)
        return at_R + left_R

    # --- what has happened ----------------------------------------------------------------------------------

    def simulation(self) -> Simulation:
        last = int(self.now_R.argmax())
        blocks = map(self._block, self.events)
        return Simulation(
            cluster=self.cluster,
            timeline=Timeline.of_blocks(block for block in blocks if (block.end_us_R > block.start_us_R).any()),
            length_seconds=float(self.now_R[last]),
            waited_R=self.waited_R,
            _events=tuple(self.events),
            _last=(int(self.cause_R[last]), last),
        )

    def _block(self, event: Event) -> Block:
        if isinstance(event, Work):
            return Block("compute", event.kind, event.detail, 1e6 * event.start_R, 1e6 * event.end_R)
        start_R = np.full(self.cluster.num_ranks, event.flow.start)
        end_R = self.links.end_of(event.flow)
        end_R = np.where(end_R < start_R, np.nan, end_R)
        return Block(event.lane, event.lane, event.detail, 1e6 * start_R, 1e6 * end_R)
