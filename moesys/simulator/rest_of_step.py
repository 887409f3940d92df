"""The rest of a step: what a simulated step does besides the experts of its layers, unit by unit.

Data-parallel ranks may shard the parameters of units, as FSDP2 does (``fully_shard`` of torch.distributed.fsdp,
``_fsdp_param_group``): before a unit runs, its own gather is waited for, and the gather of the next unit is in flight;
in backward all but kept parameters are gathered again; the reduction of a unit's gradients starts after its backward,
and all reductions are waited for at the end of backward. On CPUs, whose collectives block, each is waited for where it
is issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesys.config import ClusterSpec
from moesys.config.workload import Recompute
from moesys.cost import ExpertPass, FloatArray, LinkLoad, memory_seconds
from moesys.simulator.critical_path import AllToAll
from moesys.simulator.lanes import Lanes


@dataclass(frozen=True, eq=False)
class RestUnit:
    """One unit of a model: the embedding, a layer, the head. Seconds are numbers or one a rank [R], of all but routed
    experts, which come behind where ``has_experts``. ``again_seconds``: of what runs again in backward.

    gathered, reduced: what its parameters ask of the links before each of its passes, one unit ahead, and its gradients
        after backward, where data-parallel ranks shard them; None: nothing.
    kept: parameters that stay from forward until backward, and so come once.
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
    """What a step does beside the experts of its layers.

    other_seconds: forward of the rest of a layer (attention, norms, router), before its experts, a number or one a rank
        [R].
    other_backward_seconds: its backward; None: twice as long. other_again_seconds: what of it runs again under
        ``recompute``; None: all.
    recompute: ``layers``: in backward the whole layer runs forward once more before, and its rows travel once more.
        ``selective``, as in checkpointed blocks that end with the layer: as far as backward reads it, so neither do the
        second products run again, nor do rows travel home; MegaKernels run all. ``computing``, as LAER-MoE does it:
        rows that have travelled are kept.
    optimizer_seconds: at the end of the step.
    latency_seconds: what every all-to-all of rows, experts or gradients takes before its first byte, beside what the
        cluster declares.
    gradient_bytes: of one element of an expert's gradient on its way home; None: as the strategy's reduction has it.
    every_slot_travels: an expert that a rank holds twice comes twice, and so do its gradients go home, as LAER-MoE's.
    travel_behind_rest: as FSDP does with its prefetch limit of 1, and no linked model: a layer's experts set off before
        the rest of the layer, in backward before that of the layer above; gradients are waited for at the end only.
    units_block: parameters of units come when they are needed, and gradients go when they are there, and nobody
        computes meanwhile.
    row_share: bytes of a row on its way to experts, and of a gradient on its way to them in backward, over those in the
        compute dtype, where rows are narrowed before they are sent. MegaKernels send them as they are.
    cast_bytes: read and written for each row to narrow the operands of experts' products, before their forward and
        before their backward.
    units: all of the model in the order of forward, with as many that have experts as there are layers with them; then
        ``other_seconds`` and its like are not read. None: layers with experts, and nothing else.
    """

    other_seconds: float | FloatArray = 0.0
    other_backward_seconds: float | FloatArray | None = None
    other_again_seconds: float | FloatArray | None = None
    recompute: Recompute = "none"
    optimizer_seconds: float = 0.0
    latency_seconds: float = 0.0
    gradient_bytes: int | None = None
    every_slot_travels: bool = False
    travel_behind_rest: bool = False
    units_block: bool = False
    row_share: float = 1.0
    cast_bytes: tuple[float, float] = (0.0, 0.0)
    units: Sequence[RestUnit] | None = None

    def units_of(self, num_layers: int) -> Sequence[RestUnit]:
        """Returns those of a model with ``num_layers`` layers with experts. Raises ValueError for another number."""
        if self.units is None:
            forward = self.other_seconds
            backward = 2 * forward if self.other_backward_seconds is None else self.other_backward_seconds
            again = forward if self.other_again_seconds is None else self.other_again_seconds
            return [RestUnit(forward, backward, again)] * num_layers
        if (found := sum(unit.has_experts for unit in self.units)) != num_layers:
            raise ValueError(f"units has {found} with experts, and there are plans of {num_layers}; give as many")
        return self.units

    def cast_seconds(self, rows_RE: FloatArray, cluster: ClusterSpec, of: ExpertPass) -> FloatArray:
        """Returns seconds [R] to narrow the operands of a pass. Those of weights' gradients are narrow by then; what
        pre-activations lead to is one of them.
        """
        forward, backward = self.cast_bytes
        num_bytes = {"input_gradients": backward, "weight_gradients": 0.0}.get(of, forward)
        return memory_seconds(rows_RE.sum(axis=1) * num_bytes, cluster)

    @property
    def runs_again(self) -> bool:
        """Whether a layer runs forward once more before its backward, with its rows."""
        return self.recompute in ("layers", "selective")


class ShardedRest:
    """Of one micro-batch. ``issue``: sends a load on the lane of that name. ``blocks``: nothing is under way beside
    computing.
    """

    def __init__(
        self, units: Sequence[RestUnit], lanes: Lanes, issue: Callable[[str, LinkLoad, str], AllToAll], blocks: bool
    ) -> None:
        self._units, self._lanes, self._issue, self._blocks = units, lanes, issue, blocks
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
            self._reductions.append(self._issue("reduce_scatter", reduced, f"unit {place}"))
            if self._blocks:
                self.finish()

    def finish(self) -> None:
        while self._reductions:
            self._lanes.wait(self._reductions.pop(0))

    def _gather(self, place: int) -> None:
        """Unless it is under way."""
        if place < len(self._units) and place not in self._gathers:
            load = self._units[place].gathered
            self._gathers[place] = None if load is None else self._issue("all_gather", load, f"unit {place}")

    def _wait(self, place: int) -> None:
        if (gather := self._gathers.pop(place, None)) is not None:
            self._lanes.wait(gather)
