"""The rest of a step: what a simulated step does besides the experts of its layers, unit by unit.

Data-parallel ranks may shard the parameters of units, as FSDP2 does (``fully_shard`` of torch.distributed.fsdp,
``_fsdp_param_group``): before a unit runs, its own gather is waited for, and the gather of the next unit is in flight;
in backward all but kept parameters are gathered again; the reduction of a unit's gradients starts after its backward,
and all reductions are waited for at the end of backward. On CPUs, whose collectives block, each is waited for where it
is issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesys.config import ClusterSpec, Fsep, ModelShape, Sharding
from moesys.config.workload import ModelTraining, RealTraining, Recompute, Workload
from moesys.cost import ExpertPass, FloatArray, LinkLoad, memory_seconds, product_rate, transfer_seconds
from moesys.simulator.simulation import AllToAll, Lanes


@dataclass(frozen=True, eq=False)
class RestUnit:
    """One unit of a model: the embedding, a layer, the head. Seconds are a number, or one per rank [R], and leave out
    the routed experts, which run after the rest if ``has_experts``. again_seconds: of what runs again in backward.

    gathered: the load of the gather of its parameters, which is issued one unit ahead of each pass; reduced: the load
        of the reduction of its gradients after backward. None if data-parallel ranks do not shard them.
    kept: whether its parameters stay from forward until backward, and so are gathered once.
    """

    forward_seconds: float | FloatArray
    backward_seconds: float | FloatArray
    again_seconds: float | FloatArray = 0.0
    has_experts: bool = True
    gathered: LinkLoad | None = None
    reduced: LinkLoad | None = None
    kept: bool = False


@dataclass(frozen=True)
class RestOfStep:
    """The work of a step other than the experts of its layers.

    other_seconds: the forward of the rest of a layer (attention, norms, router), before its experts; a number, or one
        per rank [R]. Its backward takes twice as long; under ``recompute`` all of it runs again.
    recompute: ``layers``: before its backward the whole layer runs forward again, and its rows travel again.
        ``selective``, as in checkpointed blocks that end with the layer: the layer runs again as far as backward reads
        it, so that neither the second products nor combine run again; MegaKernels run everything again. ``computing``,
        as in LAER-MoE: rows that have travelled are kept.
    optimizer_seconds: the optimizer at the end of the step, without what ``muon`` adds.
    muon: whether ``ms.Muon`` trains the experts: those of ``MoELayer`` (``own``), or those of other models
        (``outside``), whose gradients never arrive whole.
    latency_seconds: the time before the first byte of every all-to-all of rows, experts or gradients, in addition to
        the cluster's latency.
    gradient_bytes: bytes of one element of an expert's gradient when it is sent to its owner; None: those of the
        strategy's reduction.
    every_slot_travels: an expert that a rank holds twice is sent twice, and so are its gradients, as in LAER-MoE.
    travel_behind_rest: a layer's experts are sent before the rest of the layer runs, in backward before the rest of the
        layer above runs, and gradients are waited for only at the end: as FSDP does with a prefetch limit of 1. A
        linked model does not.
    units_block: parameters of units are gathered when they are needed, gradients are reduced when they are there, and
        no rank computes meanwhile.
    row_share: bytes of a row that is sent to experts, and of a gradient that is sent to them in backward, divided by
        those in the compute dtype, if rows are narrowed before they are sent. MegaKernels send them as they are.
    cast_bytes: bytes read and written per row to narrow the operands of experts' products, before their forward and
        before their backward.
    units: all units of the model in the order of forward, as many with experts as there are layers with experts; then
        ``other_seconds`` is not read. None: layers with experts, and nothing else.
    """

    other_seconds: float | FloatArray = 0.0
    recompute: Recompute = "none"
    optimizer_seconds: float = 0.0
    muon: Literal["none", "own", "outside"] = "none"
    latency_seconds: float = 0.0
    gradient_bytes: int | None = None
    every_slot_travels: bool = False
    travel_behind_rest: bool = False
    units_block: bool = False
    row_share: float = 1.0
    cast_bytes: tuple[float, float] = (0.0, 0.0)
    units: Sequence[RestUnit] | None = None

    @classmethod
    def of(cls, workload: Workload) -> RestOfStep:
        """Returns what a workload declares; for a training, only the recomputation and Muon."""
        experts: Literal["own", "outside"] = "outside" if isinstance(workload, ModelTraining) else "own"
        muon: Literal["none", "own", "outside"] = experts if workload.optimizer == "muon" else "none"
        if isinstance(workload, RealTraining):
            return cls(recompute=workload.recomputed, muon=muon)
        return cls(
            other_seconds=workload.other_ms / 1000,
            recompute=workload.recompute,
            optimizer_seconds=workload.optimizer_ms / 1000,
            muon=muon,
        )

    def units_of(self, num_layers: int) -> Sequence[RestUnit]:
        """Returns the units of a model with so many layers with experts. Raises ValueError if ``units`` has others."""
        if self.units is None:
            return [RestUnit(self.other_seconds, 2 * self.other_seconds, self.other_seconds)] * num_layers
        if (found := sum(unit.has_experts for unit in self.units)) != num_layers:
            raise ValueError(f"units has {found} with experts, and there are plans of {num_layers}; give as many")
        return self.units

    def cast_seconds(self, rows_RE: FloatArray, cluster: ClusterSpec, of: ExpertPass) -> FloatArray:
        """Returns the seconds [R] in which the operands of a pass are narrowed. Those of weight gradients are narrow by
        then, and pre-activations have those of forward.
        """
        forward, backward = self.cast_bytes
        num_bytes = {"input_gradients": backward, "weight_gradients": 0.0}.get(of, forward)
        return memory_seconds(rows_RE.sum(axis=1) * num_bytes, cluster)

    def end_seconds(self, model: ModelShape, cluster: ClusterSpec, sharding: Sharding, num_layers: int) -> float:
        """Returns the seconds of the optimizer at the end of the step."""
        if self.muon == "none":
            return self.optimizer_seconds
        flops, sent_s = muon_work(model, cluster, sharding, own=self.muon == "own")
        return self.optimizer_seconds + num_layers * max(flops / product_rate(cluster, backward=False), sent_s)

    @property
    def runs_again(self) -> bool:
        """Whether a layer runs forward once more before its backward, with its rows."""
        return self.recompute in ("layers", "selective")


class ShardedRest:
    """The gathers and reductions of one micro-batch's units. ``blocks``: none of them runs while ranks compute."""

    def __init__(self, units: Sequence[RestUnit], lanes: Lanes, blocks: bool) -> None:
        self._units, self._lanes, self._blocks = units, lanes, blocks
        self._gathers: dict[int, AllToAll | None] = {}
        self._reductions: list[AllToAll] = []

    def before_forward(self, place: int) -> None:
        for one in (place,) if self._blocks else (place, place + 1):
            self._gather(one)
        self._wait(place)

    def before_backward(self, place: int) -> None:
        for one in (place,) if self._blocks else (place, place - 1):
            if one >= 0 and not self._units[one].kept:
                self._gather(one)
        self._wait(place)

    def after_backward(self, place: int) -> None:
        if (reduced := self._units[place].reduced) is not None:
            self._reductions.append(self._lanes.send("weights", "reduce_scatter", reduced, f"unit {place}"))
            if self._blocks:
                self.finish()

    def finish(self) -> None:
        while self._reductions:
            self._lanes.wait(self._reductions.pop(0))

    def _gather(self, place: int) -> None:
        """Issues the gather of a unit, unless there is no such unit or the gather is in flight."""
        if place < len(self._units) and place not in self._gathers:
            load, name = self._units[place].gathered, f"unit {place}"
            self._gathers[place] = None if load is None else self._lanes.send("weights", "all_gather", load, name)

    def _wait(self, place: int) -> None:
        if (gather := self._gathers.pop(place, None)) is not None:
            self._lanes.wait(gather)


def muon_work(
    model: ModelShape, cluster: ClusterSpec, sharding: Sharding, *, own: bool, groups: int = 1
) -> tuple[float, float]:
    """Returns the flops in which a rank makes the updates of a layer's experts orthogonal, and the seconds of their
    messages, if ``groups`` groups of ranks divide the experts among them. Each expert is one rank's work.

    Under ``Fsep`` parts of an update travel to that rank and back, in the compute dtype; backward sends gradients of
    ``own`` experts there in the first place, if each rank gets as many.
    """
    E, H, I, R = model.num_experts, model.hidden_size, model.intermediate_size, cluster.num_ranks
    flops = 3 * E * iteration_flops(I, H) / (R * groups)
    if not isinstance(sharding, Fsep):
        return flops, 0.0
    bytes_RR = np.full((R, R), 3 * E * H * I * model.bytes_per_element / (R * groups) / R)
    np.fill_diagonal(bytes_RR, 0.0)
    legs = 1 if own and sharding.reshard == "flat" and E % R == 0 else 2
    return flops, legs * transfer_seconds(bytes_RR, cluster)


def iteration_flops(rows: int, columns: int) -> float:
    """Returns the flops of five steps of the Newton–Schulz iteration on [m, n], m ≤ n: 5·(4m²n + 2m³)."""
    m, n = sorted((rows, columns))
    return 5.0 * (4 * m * m * n + 2 * m**3)
