"""RestOfStep: what a simulated step does beside the experts of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from moesys.config.workload import Recompute
from moesys.cost import GRADIENT_BYTES, FloatArray, LinkLoad


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
    gradient_bytes: of one element of an expert's gradient on its way home.
    every_slot_travels: an expert that a rank holds twice comes twice, and so do its gradients go home, as LAER-MoE's.
    travel_behind_rest: as FSDP does with its prefetch limit of 1, and no linked model: a layer's experts set off before
        the rest of the layer, in backward before that of the layer above; gradients are waited for at the end only.
    gathered, reduced: what the parameters of the rest of a layer ask of the links before each of its passes, one layer
        ahead, and its gradients after it, where data-parallel ranks shard them; None: nothing.
    """

    other_seconds: float | FloatArray = 0.0
    other_backward_seconds: float | FloatArray | None = None
    other_again_seconds: float | FloatArray | None = None
    recompute: Recompute = "none"
    optimizer_seconds: float = 0.0
    latency_seconds: float = 0.0
    gradient_bytes: int = GRADIENT_BYTES
    every_slot_travels: bool = False
    travel_behind_rest: bool = False
    gathered: LinkLoad | None = None
    reduced: LinkLoad | None = None

    @property
    def backward_seconds(self) -> float | FloatArray:
        """Backward of the rest of a layer."""
        return 2 * self.other_seconds if self.other_backward_seconds is None else self.other_backward_seconds

    @property
    def again_seconds(self) -> float | FloatArray:
        """What of the rest of a layer runs again, where anything does."""
        return self.other_seconds if self.other_again_seconds is None else self.other_again_seconds

    @property
    def runs_again(self) -> bool:
        """Whether a layer runs forward once more before its backward, with its rows."""
        return self.recompute in ("layers", "selective")
