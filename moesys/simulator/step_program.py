"""A step of all MoE layers on the lanes of a simulated cluster: forward in order, backward in reverse.

Every rank runs the program of a linked model: the stages of a layer are those of ``moesys.schedule``, which executors
run, and experts travel around them as in ``moe.call`` and ``moe.runtime``. So collectives are the same, in the same
order, issued and waited for at the same points. The simulator models the products of each rank's own rows, in tiles
and waves; gathers and weighted sums; the rest of a layer; recomputation; all-to-alls, which start when the last rank
has issued them, so that a late rank makes all others wait, and which end for each rank with its own messages
(``simulator.links``); links shared by tokens and experts; computing that is slower while messages move; the exchange of
counts and of routing weights, as messages without bytes; and chunks of exactly 1/C of everything.

It does not model routers and planning, copies of experts before and after they travel, and links that are slower than
declared because many messages are short or meet in a switch.

R ranks. Seconds inside, microseconds in the ``Timeline``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, assert_never

import numpy as np

from moesys.balance.plan import StepPlan, why_not
from moesys.balance.replay import replay_steps, routing_of
from moesys.config import ClusterSpec, Fsep, ModelShape, Overlap, Strategy
from moesys.config.overlap import MegaKernel
from moesys.config.workload import Generated, Replay
from moesys.cost import (
    ExpertPass,
    FloatArray,
    LinkLoad,
    dispatch_bytes,
    gather_seconds,
    link_load,
    pass_seconds,
    reshard_bytes,
    restore_bytes,
    sum_seconds,
)
from moesys.layout import TokenPlan
from moesys.row_traffic import RowTraffic, row_traffic
from moesys.schedule import Direction, Stage, StageKind, schedule_of
from moesys.simulator.mega_pass import mega_pass, publish_seconds
from moesys.simulator.rest_of_step import RestOfStep, ShardedRest
from moesys.simulator.simulation import SLOWER_RANKS, AllToAll, Lanes, Simulation
from moesys.timeline import Timeline


@dataclass(frozen=True)
class LayerRows:
    """The rows of each rank and expert, the load of the links if all rows go at once (``whole``), and what travels in
    each stage and part if there is one chunk.
    """

    rows_RE: FloatArray
    whole: LinkLoad
    traffic: RowTraffic
    loads: dict[tuple[StageKind, int], LinkLoad]

    @classmethod
    def of(cls, plan: TokenPlan, model: ModelShape, cluster: ClusterSpec, overlap: Overlap) -> LayerRows:
        """Returns the rows of a layer in one micro-batch."""
        traffic = row_traffic(plan, model, cluster, overlap)
        loads = traffic.stage_loads(model, cluster)
        whole = link_load(dispatch_bytes(plan, model), cluster) if ("spread", 0) in loads else loads["dispatch", 0]
        return cls(plan.computed_RE.astype(np.float64), whole, traffic, loads)


def run_step(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    micro_batches: Sequence[Sequence[TokenPlan]],
    rest: RestOfStep | None = None,
) -> Simulation:
    """Simulates forward and backward of each micro-batch through all layers, one micro-batch after another, from time
    zero on.

    ``micro_batches``: the plans of each micro-batch, layer by layer. Spans are named as in a measured step: on the lane
    ``compute`` by their kinds (``simulation.COMPUTED_KINDS``); on ``counts``, ``dispatch``, ``combine``, ``restore``,
    ``reshard``, ``all_gather``, ``reduce_scatter`` and ``mega_kernel`` as the lane. Work that takes no time on any rank
    has no span.
    """
    rest = RestOfStep() if rest is None else rest
    step = _Step(strategy, model, cluster, rest)
    for number, plans in enumerate(micro_batches):
        step.begin(plans, f", micro-batch {number}" if len(micro_batches) > 1 else "")
        for place in range(len(step.units)):
            step.forward(place)
        step.end_forward()
        for place in reversed(range(len(step.units))):
            step.backward(place)
        step.flush()
    step.finish()
    return step.simulation()


@dataclass
class _Exchange:
    """All-to-alls of experts or gradients, one after another: ``newest`` is in flight, and the ``others`` have not been
    issued.
    """

    newest: AllToAll
    others: list[LinkLoad]
    detail: str


class _Step:
    """The program of a step: the clocks of all ranks, and the exchanges that are in flight."""

    def __init__(self, strategy: Strategy, model: ModelShape, cluster: ClusterSpec, rest: RestOfStep) -> None:
        self.strategy, self.model, self.cluster, self.rest = strategy, model, cluster, rest
        self.num_chunks = strategy.overlap.chunks
        sharding = strategy.sharding
        self.prefetch_layers, self.delay_reshard = sharding.prefetch_layers, sharding.delay_reshard
        self.reshard_after_forward = sharding.reshard_after_forward
        overlap = strategy.overlap
        # With MegaKernels copy engines move sharded experts, and kernels send everything else.
        pulled = overlap.reaches_memory and isinstance(sharding, Fsep) and sharding.flat
        self.lanes = Lanes(cluster, 0.0 if pulled else cluster.copy_share, rest.latency_seconds)
        self.waiting_reshards: deque[tuple[_Exchange | None, LinkLoad, int]] = deque()
        self.reshards: deque[_Exchange | None] = deque()

    def begin(self, plans: Sequence[TokenPlan], suffix: str) -> None:
        """Begins a micro-batch, which uses no experts of another one. ``suffix``: added to every detail."""
        self.plans, self.lanes.suffix = plans, suffix
        self.units = self.rest.units_of(len(plans))
        # For each unit the number of layers with experts before it.
        self.layer_of = list(accumulate((int(unit.has_experts) for unit in self.units), initial=0))
        self.sharded = ShardedRest(self.units, self.lanes, self.rest.units_block)
        self.experts: dict[int, _Exchange | None] = {}
        self.late: dict[int, _Exchange | None] = {}
        self.restores: dict[tuple[int, str], tuple[LinkLoad, ...]] = {}
        self.rows: dict[int, LayerRows] = {}

    # --- a layer --------------------------------------------------------------------------------------------

    def forward(self, place: int) -> None:
        unit, layer = self.units[place], self.layer_of[place]
        self.lanes.layer = layer
        if unit.has_experts and self.rest.travel_behind_rest:
            self._start_settled(layer)
        self.sharded.before_forward(place)
        self.lanes.compute(unit.forward_seconds, "other", f"{self._name(place)} forward")
        if not unit.has_experts:
            return
        self._exchange_counts(layer)
        self._start_late(layer)
        self._start_restore(layer)
        self._run(layer, "forward")
        if self.reshard_after_forward:
            del self.experts[layer]

    def end_forward(self) -> None:
        self.after_forward = self.lanes.now_R, dict(self.lanes.waited_R), dict(self.lanes.moved_L)

    def backward(self, place: int) -> None:
        unit, name = self.units[place], self._name(place)
        self.lanes.layer = self.layer_of[place]
        self.sharded.before_backward(place)
        if self.rest.runs_again:
            self.lanes.compute(unit.again_seconds, "other", f"{name} recomputation")
        if unit.has_experts:
            self._experts_backward(self.layer_of[place])
        if self.rest.recompute == "computing":
            self.lanes.compute(unit.again_seconds, "other", f"{name} recomputation")
        self.lanes.compute(unit.backward_seconds, "other", f"{name} backward")
        self.sharded.after_backward(place)

    def _experts_backward(self, layer: int) -> None:
        if self.rest.runs_again:
            self._start_restore(layer)
            self._run(layer, "recomputation")
        self._start_restore(layer)
        self._run(layer, "backward")
        del self.experts[layer]
        self._start_reshard(layer)
        if not self.delay_reshard:
            self._cross_reshards()
        if self.rest.travel_behind_rest:
            if layer:
                self._start_restore(layer - 1)
        else:
            self._finish_reshards()

    def _name(self, place: int) -> str:
        return f"layer {self.layer_of[place]}" if self.units[place].has_experts else f"unit {place}"

    def flush(self) -> None:
        """Sends the gradients that waited for another layer's backward, and waits for them and those of the rest."""
        self._cross_reshards()
        self._finish_reshards()
        self.sharded.finish()

    def finish(self) -> None:
        seconds = self.rest.end_seconds(self.model, self.cluster, self.strategy.sharding, self.layer_of[-1])
        if seconds:
            self.lanes.layer = None
        self.lanes.compute(seconds, "optimizer", "")

    def _run(self, layer: int, way: Direction) -> None:
        """Runs the stages that executors run, and takes the time of each."""
        chunks, name, entered_R = self.num_chunks, f"layer {layer} {way}", self.lanes.now_R
        rows = self._rows(layer)
        under_way: dict[Stage, AllToAll] = {}
        direction: Direction = "forward" if self.rest.recompute == "layers" and way == "recomputation" else way
        parts = rows.traffic.parts
        stages = schedule_of(self.strategy.overlap, direction, self.cluster.num_nodes, parts)
        gates_sum_R = sum_seconds(rows.traffic.gate_summed_R / parts / chunks, self.model, self.cluster)
        for stage, earlier in stages.items():
            detail, came_R = f"{name} {stage.chunk}", np.zeros(self.cluster.num_ranks)
            for message in earlier:
                if message in under_way:
                    self.lanes.wait(under_way.pop(message))
                    came_R = came_R + rows.traffic.put_in_place_R(message.kind, message.part)
            if stage.kind in ("wait_for_experts", "sum"):
                self._put_in_place(came_R, detail)
            match stage.kind:
                case "dispatch_weights":
                    under_way[stage] = self.lanes.message("dispatch", rows.whole, f"{name} weights")
                case "dispatch" | "spread" | "combine" | "send_sums":
                    if stage.kind == "send_sums" or (stage.kind == "combine" and stage.part):
                        self.lanes.compute(gates_sum_R, "sum", detail)
                    if stage.kind == "combine":
                        # Results are permuted at once, also those that are sent as rows while sums are sent.
                        self._gather(rows.rows_RE.sum(axis=1) / rows.traffic.parts_of("combine") / chunks, detail)
                    elif stage.kind != "send_sums":
                        sent_RR = rows.traffic.in_stage(stage.kind, stage.part)
                        # Rows are read in the compute dtype, and written in the dtype in which they travel.
                        self._gather(sent_RR.sum(axis=1) * (1 + self.rest.row_share) / 2 / chunks, detail)
                    away = stage.kind in ("dispatch", "spread")
                    lane, share = ("dispatch", self.rest.row_share) if away else ("combine", 1.0)
                    load = rows.loads[stage.kind, stage.part].part(share / chunks)
                    under_way[stage] = self.lanes.send("tokens", lane, load, detail)
                    self._put_in_place(came_R, detail)
                case "publish":
                    self.lanes.compute(publish_seconds(*self._fused(layer, way)), "gather", name)
                case "wait_for_experts":
                    self._wait_for_experts(layer, way)
                case "experts":
                    self._experts(rows.rows_RE / chunks, layer, way, stage.chunk)
                case "pre_activations":
                    self.lanes.compute(self._pass_seconds(rows.rows_RE / chunks, stage.kind), "experts", detail)
                case "sum":
                    seconds_R = sum_seconds(rows.traffic.summed_R / chunks, self.model, self.cluster)
                    self.lanes.compute(seconds_R, "sum", detail)
                case "combine_dweights":
                    under_way[stage] = self.lanes.message("combine", rows.whole.reversed(), f"{name} weights")
                case "weight_gradients":
                    self.lanes.compute(self._pass_seconds(rows.rows_RE, stage.kind), stage.kind, name)
                case "gather_dweights":
                    pass  # one number a row
                case "mega_kernels":
                    self._run_fused(layer, way, entered_R)
                case _:
                    assert_never(stage.kind)

    def _run_fused(self, layer: int, way: Direction, entered_R: FloatArray) -> None:
        """Runs the MegaKernels of ranks that entered the layer at ``entered_R``."""
        rows = self._rows(layer)
        if way == "backward" and self.rest.recompute == "computing":
            self.lanes.compute(self._pass_seconds(rows.rows_RE, "forward"), "experts", f"layer {layer} recomputation")
        found = mega_pass(*self._fused(layer, way), entered_R, self.lanes.now_R)
        seconds_L = np.sum([moved.link_seconds_L for moved in found.moved], axis=0)
        both_ways = LinkLoad(seconds_L, rows.whole.used_4R | rows.whole.reversed().used_4R)
        self.lanes.run_fused(found, both_ways, f"layer {layer} {way}")

    def _fused(self, layer: int, way: Direction) -> tuple[MegaKernel, ModelShape, ClusterSpec, TokenPlan, bool]:
        overlap = self.strategy.overlap
        assert overlap.reaches_memory
        return overlap, self.model, self.cluster, self.plans[layer], way == "backward"

    def _wait_for_experts(self, layer: int, way: Direction) -> None:
        """Waits for the layer's experts, after it has issued the restores of the next layers, and in backward the
        gradients that waited.
        """
        # What is left of a restore comes first, so that it does not queue behind those of other layers.
        exchanges = (self.experts[layer], self.late.pop(layer, None))
        for exchange in exchanges:
            self._advance(exchange)
        if way == "forward":
            for other in range(layer + 1, min(layer + 1 + self.prefetch_layers, len(self.plans))):
                self._start_settled(other)
        elif way == "backward":
            for other in range(layer - 1, max(layer - 1 - self.prefetch_layers, -1), -1):
                self._start_restore(other)
            self._cross_reshards()
        for exchange in exchanges:
            self._finish(exchange)
        self.experts[layer] = None

    def _experts(self, rows_RE: FloatArray, layer: int, way: Direction, chunk: int) -> None:
        if way == "backward" and self.rest.recompute == "computing":
            again_R = self._pass_seconds(rows_RE, "forward")
            self.lanes.compute(again_R, "experts", f"layer {layer} recomputation {chunk}")
        seconds_R = self._pass_seconds(rows_RE, "input_gradients" if way == "backward" else "forward")
        self.lanes.compute(seconds_R, "experts", f"layer {layer} {way} {chunk}")

    def _pass_seconds(self, rows_RE: FloatArray, of: ExpertPass) -> FloatArray:
        cast_R = self.rest.cast_seconds(rows_RE, self.cluster, of)
        return pass_seconds(rows_RE, self.model, self.cluster, of) + cast_R

    def _put_in_place(self, rows_R: FloatArray, detail: str) -> None:
        if rows_R.any():
            self._gather(rows_R, detail)

    def _gather(self, rows_R: FloatArray, detail: str) -> None:
        if self.cluster.num_ranks > 1:
            self.lanes.compute(gather_seconds(rows_R, self.model, self.cluster), "gather", detail)

    def _rows(self, layer: int) -> LayerRows:
        if layer not in self.rows:
            self.rows[layer] = LayerRows.of(self.plans[layer], self.model, self.cluster, self.strategy.overlap)
        return self.rows[layer]

    def _exchange_counts(self, layer: int) -> None:
        """Waits for the all-gather of the counts, from which each rank knows how many rows it receives."""
        R, sizes = self.cluster.num_ranks, np.array(self.cluster.domain_sizes)
        others = np.array([sizes.repeat(sizes) > 1, np.full(R, len(sizes) > 1)])
        counts = LinkLoad(np.zeros(2 * (R + self.cluster.num_nodes)), others.repeat(2, axis=0))
        self.lanes.wait(self.lanes.message("counts", counts, f"layer {layer}"))
        if ("spread", 0) in (rows := self._rows(layer)).loads:
            self.lanes.wait(self.lanes.message("counts", rows.loads["dispatch", 0], f"layer {layer} visits"))

    # --- experts and their gradients ------------------------------------------------------------------------

    def _start_restore(self, layer: int) -> None:
        """Issues the restore of the layer's experts, unless it is in flight or done."""
        if layer not in self.experts:
            self.experts[layer] = self._start(self._restores(layer, "all"), "restore", layer)

    def _start_settled(self, layer: int) -> None:
        """Issues the restore of experts that are known before the counts, unless it is in flight. With ``lag=0`` there
        are none.
        """
        if layer not in self.experts and self.strategy.lag > 0:
            self.experts[layer] = self._start(self._restores(layer, "settled"), "restore", layer)

    def _start_late(self, layer: int) -> None:
        """Issues the restore of the late slots' experts, once the counts are known."""
        if layer in self.experts and self.strategy.late_slots:
            self.late[layer] = self._start(self._restores(layer, "late"), "restore", layer, " late")

    def _restores(self, layer: int, part: Literal["all", "settled", "late"]) -> tuple[LinkLoad, ...]:
        if (layer, part) not in self.restores:
            layout, sharding = self.plans[layer].layout, self.strategy.sharding
            settled = layout.without_last(self.strategy.late_slots)
            wanted, here = settled if part == "settled" else layout, settled if part == "late" else None
            every_slot = self.rest.every_slot_travels
            all_bytes = restore_bytes(wanted, self.model, self.cluster, sharding, every_slot, here)
            self.restores[layer, part] = tuple(link_load(bytes_RR, self.cluster) for bytes_RR in all_bytes)
        return self.restores[layer, part]

    def _start_reshard(self, layer: int) -> None:
        """Issues the sums of gradients inside nodes; what crosses nodes, or is not summed inside, waits."""
        places = (self.plans[layer].layout, self.model, self.cluster, self.strategy.sharding)
        of_element = self.rest.gradient_bytes or self.strategy.reduction.gradient_bytes
        all_bytes = reshard_bytes(*places, of_element, self.rest.every_slot_travels)
        if not all_bytes:
            return
        *inside, crossing = (link_load(bytes_RR, self.cluster) for bytes_RR in all_bytes)
        self.waiting_reshards.append((self._start((*inside,), "reshard", layer), crossing, layer))

    def _cross_reshards(self) -> None:
        while self.waiting_reshards:
            inside, crossing, layer = self.waiting_reshards.popleft()
            self._finish(inside)
            self.reshards.append(self._start((crossing,), "reshard", layer))

    def _finish_reshards(self) -> None:
        while self.reshards:
            self._finish(self.reshards.popleft())

    def _start(self, loads: tuple[LinkLoad, ...], lane: str, layer: int, when: str = "") -> _Exchange | None:
        if not loads:
            return None
        first, *others = loads
        detail = f"layer {layer}{when}"
        return _Exchange(self.lanes.send("weights", lane, first, detail), others, detail)

    def _advance(self, exchange: _Exchange | None) -> None:
        """Waits for all all-to-alls of the exchange but the last, which is then in flight."""
        while exchange is not None and exchange.others:
            self.lanes.wait(exchange.newest)
            load = exchange.others.pop(0)
            exchange.newest = self.lanes.send("weights", exchange.newest.lane, load, exchange.detail)

    def _finish(self, exchange: _Exchange | None) -> None:
        if exchange is not None:
            self._advance(exchange)
            self.lanes.wait(exchange.newest)

    def simulation(self) -> Simulation:
        of, timeline = self.lanes, Timeline.of_blocks(self.lanes.blocks())
        of.spend(SLOWER_RANKS, of.now_R.max() - of.now_R)
        return Simulation(
            self.cluster, timeline, *self.after_forward, of.waited_R, of.moved_L, of.spent_R, of.other_domains_R, of
        )


def simulate(step_plan: StepPlan, *, other_seconds: float = 0.0, latency_seconds: float = 0.0) -> Timeline:
    """Returns the timeline of ``simulation`` for one micro-batch.

    ``other_seconds``: the forward time of the rest of a layer; ``latency_seconds``: the least time of an all-to-all.
    """
    return simulation([step_plan], RestOfStep(other_seconds=other_seconds, latency_seconds=latency_seconds)).timeline


def simulation(micro_batches: Sequence[StepPlan], rest: RestOfStep | None = None) -> Simulation:
    """Simulates a step of these micro-batches on their cluster: returns its timeline and its critical path. The
    docstring of this module says what is modelled.

    Raises ValueError for micro-batches of different strategies, models or clusters, and for none.
    """
    if not micro_batches:
        raise ValueError("micro_batches is empty; a step has at least one")
    first = micro_batches[0]
    for index, other in enumerate(micro_batches):
        if (other.strategy, other.model, other.cluster) != (first.strategy, first.model, first.cluster):
            raise ValueError(
                f"micro_batches[{index}] has another strategy, model or cluster than the first; a step has one of each"
            )
    plans = [[plan.tokens for plan in step_plan.layers] for step_plan in micro_batches]
    return run_step(first.strategy, first.model, first.cluster, plans, rest)


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A step in the cost model: the plans of its micro-batches, and the rest of it."""

    plans: tuple[StepPlan, ...]
    rest: RestOfStep

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated step. Raises ValueError for a step that the cost model does not support."""
        return simulation(self.plans, self.rest)

    def why_not(self, num_layers: int | None = None) -> tuple[str, ...]:
        """Returns all reasons why the step cannot run. ``num_layers``: as in ``moesys.balance.plan.why_not``."""
        return why_not(self.plans, num_layers=num_layers, recompute=self.rest.recompute != "none")


def simulated_steps(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    workload: Replay | Generated,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[SimulatedStep]:
    """Yields the timed steps. Layouts follow from the micro-batches before. A step is simulated when its simulation is
    first read.

    ``tick`` is called after every micro-batch.
    """
    routing, rest, plans = routing_of(workload, model, cluster, seed), RestOfStep.of(workload), []
    for number, micro_batch in enumerate(replay_steps(strategy, model, cluster, routing.tokens_SLRE)):
        if number >= workload.warmup:
            plans.append(micro_batch)
        if len(plans) == workload.micro_batches:
            yield SimulatedStep(tuple(plans), rest)
            plans = []
        tick()
