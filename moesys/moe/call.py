"""LayerCall: one micro-batch's way through one layer, from its plan to its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moesys.layout import ExpertLayout
from moesys.moe.expert_store import ExpertStore
from moesys.moe.shards import Restored
from moesys.overlap.executor import Executor


class Neighbours(NamedTuple):
    """What surrounds a call in its forward pass; nothing, where layers are not linked.

    ``previous``: the call of the layer before, for which backward restores. ``upcoming``: the next layers, whose
    experts may travel meanwhile. ``pass_number`` tells passes apart.
    """

    previous: LayerCall | None = None
    upcoming: tuple[ExpertStore, ...] = ()
    pass_number: int = 0


class LayerCall:
    """What forward, recomputation and backward of one micro-batch share.

    It owns the layout of its micro-batch, so that however many micro-batches are under way, in whatever order their
    backwards run, each finds the experts where its own forward had them. Late ones are among them.

    ``counts``: gives the choices of each expert, int64 [E], once forward is launched; None where nobody learns.
    ``dtype``: what experts compute in. ``generation``: the generation of its messages (``Channel.tagged``). ``check``:
    waits for the device, and raises the errors that the host did not know of when forward was launched.
    ``expects_backward``: whether forward saves anything for a backward.
    """

    def __init__(
        self,
        store: ExpertStore,
        executor: Executor,
        layout: ExpertLayout,
        neighbours: Neighbours,
        counts: Callable[[], Tensor] | None,
        dtype: torch.dtype,
        generation: int,
        check: Callable[[], None] | None,
    ) -> None:
        self.store, self.executor, self.counts, self.dtype = store, executor, counts, dtype
        self.generation, self.check = generation, check
        self.layout = layout
        self.previous, self._upcoming, self._pass_number = neighbours
        self.expects_backward = False
        # A recomputation runs this call's forward again, and something behind it may read what comes of it.
        self.replayed, self.output_read = False, True
        store.dtype = dtype
        self._restored = store.take_prefetched(self._pass_number, layout, generation)

    def restore(self) -> Restored:
        """Returns the experts of this call, on their way or here; starts bringing them if nobody has."""
        if self._restored is None:
            self._restored = self.store.start_restore(self.layout, self.dtype, self.generation)
        return self._restored

    def restore_ahead(self) -> None:
        """Starts bringing the experts of this call for its backward, where masters are at hand."""
        if self.store.masters.at_hand:
            self.restore()

    def prefetch_upcoming(self) -> None:
        """Starts bringing the next layers' experts, the first time it is called."""
        for store in self._upcoming:
            store.prefetch(self._pass_number, self.generation)
        self._upcoming = ()

    def release(self) -> None:
        """Frees the experts, which may be restored again."""
        self._restored = None
