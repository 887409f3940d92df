"""ExpertStore: a layer's experts on this rank, from masters into the slots of a layout, and gradients home again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moesys.balance.layout_schedule import LayoutSchedule
from moesys.config import ClusterSpec, Ep, Fsep, LayoutInvariant, MegaKernel, ModelShape, Sharding, Strategy
from moesys.layout import ExpertLayout
from moesys.moe.expert_form import ExpertForm
from moesys.moe.kept_casts import KeptCasts
from moesys.moe.masters import Masters
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.shards import Cross, ExpertShards, HeldByRank, Restored
from moesys.moe.whole_experts import WholeExperts
from moesys.overlap.comm.channel import Channel


class ExpertStore:
    """Restores experts for a call, or ahead of the coming one, and reshards their gradients.

    ``shards`` is the geometry, ``masters`` has the parameters; ``schedule`` says which layout the coming micro-batch
    has. ``channel``: where experts and their gradients travel; one of their own in a linked model.
    """

    def __init__(
        self,
        layer_index: int,
        sharding: Sharding,
        shards: ExpertShards,
        masters: Masters,
        schedule: LayoutSchedule,
        channel: Channel,
    ) -> None:
        self.layer_index, self.shards, self.masters = layer_index, shards, masters
        self.schedule, self.channel = schedule, channel
        self.casts = KeptCasts(masters.state)
        # EP keeps what it lent until backward: sending it twice would cost more than the memory is worth.
        self.reshard_after_forward, self.prefetch_layers, self.delay_reshard = False, 0, False
        if isinstance(sharding, Fsep):
            self.reshard_after_forward = sharding.reshard_after_forward
            self.prefetch_layers, self.delay_reshard = sharding.prefetch_layers, sharding.delay_reshard
        # What the layer computes in: its last call's dtype; None before the first.
        self.dtype: torch.dtype | None = None
        self._prefetched: tuple[tuple[ExpertLayout, int, torch.dtype | None], Restored] | None = None

    def start_restore(self, layout: ExpertLayout, dtype: torch.dtype, generation: int) -> Restored:
        """Starts bringing the experts of ``layout`` here, to be computed with in ``dtype``, by messages of
        ``generation``. A collective.
        """
        return self._start(self.shards.held_by_rank(layout), dtype, generation, "")

    def start_late(
        self, early: Restored, early_layout: ExpertLayout, layout: ExpertLayout, generation: int
    ) -> Restored:
        """Starts bringing what ``layout`` has more than ``early_layout``, whose experts are ``early``. A collective,
        where it has more on any rank.
        """
        rank = self.shards.rank
        settled, held = self.shards.held_by_rank(early_layout), self.shards.held_by_rank(layout)
        if settled == held:
            return early
        missing = [
            tuple(expert for expert in wanted if expert not in there)
            for wanted, there in zip(held, settled, strict=True)
        ]
        late = self._start(missing, early.dtype, generation, " late")
        return self.shards.together(early, settled[rank], late, held[rank])

    def _start(self, held: HeldByRank, dtype: torch.dtype, generation: int, when: str) -> Restored:
        name, channel = f"layer {self.layer_index}{when}", self.channel.tagged(generation)
        restored = self.shards.restore(self.masters.local(), dtype, held, channel, name)
        restored.kept = self.casts
        return restored

    def prefetch(self, pass_number: int, generation: int) -> None:
        """Starts bringing the experts of the coming micro-batch that are settled, unless it is done already or masters
        are not at hand. With ``lag=0`` none are.
        """
        if self.schedule.strategy.lag == 0:
            return
        if self.dtype is not None and not self._is_prefetched(pass_number) and self.masters.at_hand:
            layout = self.schedule.layout
            self._prefetched = (layout, pass_number, self.dtype), self.start_restore(layout, self.dtype, generation)

    def take_prefetched(self, pass_number: int, layout: ExpertLayout, generation: int) -> Restored | None:
        """Returns the experts of ``layout`` if those settled were brought ahead for this pass, and forgets them. Late
        ones set off now: a collective, where there are some.
        """
        restored = None
        if self._prefetched is not None and self._is_prefetched(pass_number):
            restored = self.start_late(self._prefetched[1], self.schedule.layout, layout, generation)
        self.drop_prefetched()
        return restored

    def drop_prefetched(self) -> None:
        """Forgets what was brought ahead."""
        self._prefetched = None

    def _is_prefetched(self, pass_number: int) -> bool:
        """Whether experts were brought ahead for this very pass: one that was broken off leaves some behind, which the
        next optimizer step makes stale.
        """
        return self._prefetched is not None and self._prefetched[0] == (self.schedule.layout, pass_number, self.dtype)

    def new_gradients(self, layout: ExpertLayout) -> Tensor:
        """Returns memory for the gradients of the slots of ``layout``, [D, padded_parameters]: float64 where those of
        several ranks are added up, and the order may not show.
        """
        invariant = isinstance(self.schedule.strategy.reduction, LayoutInvariant)
        added = invariant and bool((layout.replicas_RE > 0).sum(axis=0).max() > 1)
        return self.shards.new_gradients(layout, self.masters.device, torch.float64 if added else torch.float32)

    def start_reshard(self, grads_DP: Tensor, layout: ExpertLayout, generation: int) -> Cross:
        """Starts on the way of slot gradients to their owners (``ExpertShards.reshard``). A collective."""
        return self.shards.reshard(grads_DP, layout, self.channel.tagged(generation), f"layer {self.layer_index}")


def shards_of(
    strategy: Strategy,
    shape: ModelShape,
    cluster: ClusterSpec,
    rank: int,
    group: dist.ProcessGroup | None,
    form: ExpertForm | None = None,
) -> ExpertShards:
    """Returns this rank's shards, as a strategy asks for them. ``group``: the ranks of ``cluster``; None for one rank
    alone. ``form``: of masters that are not flat.
    """
    match strategy.sharding:
        case Ep(lend=lend):
            return WholeExperts(shape, rank, cluster.node_of_rank, lend == "hierarchical", form)
        case Fsep() as sharding:
            overlap, node_of_rank = strategy.overlap, cluster.node_of_rank
            if isinstance(overlap, MegaKernel) and group is not None and sharding.flat and form is None:
                # Here, so that Triton is loaded only where it runs.
                from moesys.moe.pulled_experts import PulledExperts

                return PulledExperts(shape, rank, node_of_rank, sharding, group, overlap.timeout_s)
            return ShardedExperts(shape, rank, node_of_rank, sharding, form)
