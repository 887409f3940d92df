"""A step of all MoE layers on the lanes of a simulated cluster: forward in order, backward in reverse.

Every rank runs the program of a linked model (``overlap.chunked``, ``moe.call``, ``moe.runtime``): the same collectives
in the same order, issued and waited for at the same points. What is modelled: the GEMMs of each rank's own rows;
all-to-alls, which start when the last rank has issued them and end for all ranks at once (so a rank that is late makes
all others wait); links shared by tokens and experts (``overlap.links``); chunks of exactly 1/C of everything.

What is not: routers, exchange of counts, the small messages of routing weights, gathers, activations and weighted sums,
recomputation, planning, the optimizer, GEMMs that are slow because they are small, computing that is slow because bytes
move, and links that are slower than declared because many messages are short or meet in a switch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec, Fsep, MegaKernel, ModelShape, Pipelined, Strategy
from moesys.cost import FloatArray, dispatch_bytes, expert_seconds, link_seconds, reshard_bytes, restore_bytes
from moesys.layout import TokenPlan
from moesys.overlap.links import ChannelName, Flow, Links
from moesys.timeline import Span, Timeline


def simulate_step(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    plans: Sequence[TokenPlan],
    *,
    other_seconds: float = 0.0,
    latency_seconds: float = 0.0,
) -> Timeline:
    """Forward and backward of one micro-batch through layers with these ``plans``, in order; zero is the step's start.

    Spans as a measured step has them: lanes ``compute`` (kinds ``experts``, ``weight_gradients``, ``other``),
    ``dispatch``, ``combine``, ``restore``, ``reshard`` (kinds named alike). What takes no rank any time has no span.

    other_seconds: forward of the rest of a layer (attention and so on), before its experts; backward takes twice that.
    latency_seconds: what every all-to-all takes before its first byte moves. 0 makes many chunks look better than they
        are.

    Raises ValueError for a strategy whose overlap the model does not know (``require_simulated``).
    """
    require_simulated(strategy)
    step = _Step(strategy, model, cluster, plans, other_seconds, Links(latency_seconds))
    for layer in range(len(plans)):
        step.forward(layer)
    for layer in reversed(range(len(plans))):
        step.backward(layer)
    step.flush()
    return Timeline(step.spans(), "simulated")


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
    busy_us = _busy_us(timeline)
    return (timeline.length_us - sum(busy_us.values()) / len(busy_us)) / 1000 if busy_us else 0.0


def critical_rank(timeline: Timeline) -> int:
    """The rank that computes longest, for which others wait; the lowest of equals, and 0 of an empty timeline."""
    busy_us = _busy_us(timeline)
    return min(busy_us, key=lambda rank: (-busy_us[rank], rank), default=0)


def _busy_us(timeline: Timeline) -> dict[int, float]:
    """Microseconds that each rank of the timeline computes."""
    busy_us: dict[int, float] = defaultdict(float)
    for span in timeline.spans:
        busy_us[span.rank] += span.duration_us if span.lane == "compute" else 0.0
    return busy_us


@dataclass(frozen=True)
class _Transfer:
    """An all-to-all that has been issued."""

    flow: Flow
    lane: str
    detail: str


@dataclass
class _Exchange:
    """All-to-alls of experts or gradients, of which one begins where another ended: ``newest`` is under way, the
    ``others`` are still to be issued.
    """

    newest: _Transfer
    others: list[FloatArray]


class _Step:
    """Clocks of all ranks, ``now_R`` in seconds, and what is on its way."""

    def __init__(
        self,
        strategy: Strategy,
        model: ModelShape,
        cluster: ClusterSpec,
        plans: Sequence[TokenPlan],
        other_seconds: float,
        links: Links,
    ) -> None:
        self.strategy, self.model, self.cluster, self.plans = strategy, model, cluster, plans
        self.other_seconds, self.links = other_seconds, links
        self.num_chunks = strategy.overlap.chunks if isinstance(strategy.overlap, Pipelined) else 1
        sharding = strategy.sharding
        self.prefetch_layers, self.delay_reshard, self.reshard_after_forward = 0, False, False
        if isinstance(sharding, Fsep):
            self.prefetch_layers, self.delay_reshard = sharding.prefetch_layers, sharding.delay_reshard
            self.reshard_after_forward = sharding.reshard_after_forward
        self.now_R = np.zeros(cluster.num_ranks)
        self.experts: dict[int, _Exchange | None] = {}
        self.waiting_reshards: deque[int] = deque()
        self.reshards: deque[_Exchange] = deque()
        self.transfers: list[_Transfer] = []
        self.computed: list[tuple[str, str, FloatArray, FloatArray]] = []

    # --- a layer --------------------------------------------------------------------------------------------

    def forward(self, layer: int) -> None:
        def ready() -> None:
            self._spread(layer)
            for following in range(layer + 1, min(layer + 1 + self.prefetch_layers, len(self.plans))):
                self._start_restore(following)
            self._finish_restore(layer)

        self._compute(self.other_seconds, "other", f"layer {layer} forward")
        self._start_restore(layer)
        self._run(layer, backward=False, ready=ready)
        if self.reshard_after_forward:
            del self.experts[layer]

    def backward(self, layer: int) -> None:
        def ready() -> None:
            self._spread(layer)
            for before in range(layer - 1, max(layer - 1 - self.prefetch_layers, -1), -1):
                self._start_restore(before)
            self._start_reshards()
            self._finish_restore(layer)

        self._start_restore(layer)
        self._run(layer, backward=True, ready=ready)
        del self.experts[layer]
        self.waiting_reshards.append(layer)
        if not self.delay_reshard:
            self._start_reshards()
        self._finish_reshards()
        self._compute(2 * self.other_seconds, "other", f"layer {layer} backward")

    def flush(self) -> None:
        """Gradients that were to travel behind a layer that does not come."""
        self._start_reshards()
        self._finish_reshards()

    def _run(self, layer: int, backward: bool, ready: Callable[[], None]) -> None:
        """The schedule of ``ChunkedExecutor``; with one chunk, weight gradients are computed before rows go home."""
        plan, chunks = self.plans[layer], self.num_chunks
        name = f"layer {layer} {'backward' if backward else 'forward'}"
        bytes_RR = dispatch_bytes(plan, self.model)
        dispatch_L = link_seconds(bytes_RR, self.cluster) / chunks
        combine_L = link_seconds(bytes_RR.T, self.cluster) / chunks
        all_R = expert_seconds(plan.tokens_R.astype(np.float64), self.model, self.cluster, backward)
        weight_gradients_R = all_R / 2 if backward and chunks > 1 else 0 * all_R
        experts_R = (all_R - weight_gradients_R) / chunks

        dispatched = deque([self._issue("tokens", "dispatch", dispatch_L, f"{name} 0")])
        going_home: deque[_Transfer] = deque()
        for chunk in range(chunks):
            if chunk + 1 < chunks:
                dispatched.append(self._issue("tokens", "dispatch", dispatch_L, f"{name} {chunk + 1}"))
            self._wait(dispatched.popleft())
            if chunk == 0:
                ready()
            self._compute(experts_R, "experts", f"{name} {chunk}")
            going_home.append(self._issue("tokens", "combine", combine_L, f"{name} {chunk}"))
            if chunk:
                self._wait(going_home.popleft())
        self._compute(weight_gradients_R, "weight_gradients", name)
        self._wait(going_home.popleft())

    # --- experts and their gradients ------------------------------------------------------------------------

    def _start_restore(self, layer: int) -> None:
        """Unless the layer's experts are under way or here."""
        if layer not in self.experts:
            layout = self.plans[layer].layout
            all_bytes = restore_bytes(layout, self.model, self.cluster, self.strategy.sharding)
            self.experts[layer] = self._start(all_bytes, "restore", layer)

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
            all_bytes = reshard_bytes(self.plans[layer].layout, self.model, self.cluster, self.strategy.sharding)
            if (exchange := self._start(all_bytes, "reshard", layer)) is not None:
                self.reshards.append(exchange)

    def _finish_reshards(self) -> None:
        while self.reshards:
            self._finish(self.reshards.popleft())

    def _start(self, all_bytes: tuple[FloatArray, ...], lane: str, layer: int) -> _Exchange | None:
        if not all_bytes:
            return None
        first, *others = (link_seconds(bytes_RR, self.cluster) for bytes_RR in all_bytes)
        return _Exchange(self._issue("weights", lane, first, f"layer {layer}"), others)

    def _advance(self, exchange: _Exchange) -> None:
        """Wait for all all-to-alls of the exchange but the last, which is then under way."""
        while exchange.others:
            self._wait(exchange.newest)
            lane, detail = exchange.newest.lane, exchange.newest.detail
            exchange.newest = self._issue("weights", lane, exchange.others.pop(0), detail)

    def _finish(self, exchange: _Exchange) -> None:
        self._advance(exchange)
        self._wait(exchange.newest)

    # --- lanes ----------------------------------------------------------------------------------------------

    def _issue(self, channel: ChannelName, lane: str, seconds_L: FloatArray, detail: str) -> _Transfer:
        transfer = _Transfer(self.links.issue(channel, float(self.now_R.max()), seconds_L), lane, detail)
        self.transfers.append(transfer)
        return transfer

    def _wait(self, transfer: _Transfer) -> None:
        self.now_R = np.maximum(self.now_R, self.links.end_of(transfer.flow))

    def _compute(self, seconds_R: FloatArray | float, kind: str, detail: str) -> None:
        end_R = self.now_R + seconds_R
        self.computed.append((kind, detail, self.now_R, end_R))
        self.now_R = end_R

    def spans(self) -> tuple[Span, ...]:
        """All spans, mostly in the order of a ``Timeline``, which then has little to sort."""
        computed = [
            ((1e6 * start_R).tolist(), (1e6 * end_R).tolist(), kind, detail)
            for kind, detail, start_R, end_R in self.computed
            if (end_R > start_R).any()
        ]
        moved = [
            (1e6 * transfer.flow.start, 1e6 * end, transfer.lane, transfer.detail)
            for transfer in sorted(self.transfers, key=lambda transfer: transfer.lane)
            if (end := self.links.end_of(transfer.flow)) > transfer.flow.start
        ]
        spans = []
        for rank in range(self.cluster.num_ranks):
            spans += [Span(rank, "compute", start[rank], end[rank], *what) for start, end, *what in computed]
            spans += [Span(rank, lane, start, end, lane, detail) for start, end, lane, detail in moved]
        return tuple(spans)
