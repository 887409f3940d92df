"""Counts what a ``MegaKernel`` takes of a rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

from moesys.balance.plan import LayerPlan
from moesys.config import Fsep, MegaKernel, ModelShape, Strategy


@dataclass(frozen=True)
class MegaMemory:
    """Bytes of a rank of a linked model.

    symmetric_bytes: of the arena that peers reach, which all layers share; pulled_bytes: of those where peers reach
    experts and their gradients, which all layers share too, 0 where those are sent or stay. num_rows: of the rank that
    gets most, in any layer, of ``most_rows`` that ``rows_cap`` allows. held_rows: for which there is memory, all of
    them where devices plan. kept_bytes: of those from forward to backward, of a layer; backward_bytes: more during
    backward.
    """

    symmetric_bytes: int
    pulled_bytes: int
    num_rows: int
    most_rows: int
    held_rows: int
    kept_bytes: int
    backward_bytes: int


def mega_memory(strategy: Strategy, model: ModelShape, plans: tuple[LayerPlan, ...]) -> MegaMemory | None:
    """Of these layers; None where the overlap is another."""
    overlap = strategy.overlap
    if not isinstance(overlap, MegaKernel):
        return None
    # Here, as others do without Triton.
    from moesys.moe.pulled_experts import ring_bytes
    from moesys.overlap.device_split import room_for_rows
    from moesys.overlap.mega_executor import symmetric_bytes

    on_device = strategy.plans_on_device
    num_ranks, num_slots = plans[0].layout.expert_RS.shape
    most_tokens = max(int(plan.load.tokens_RE.sum(1).max()) for plan in plans) // model.top_k
    if on_device and overlap.most_tokens is not None:
        most_tokens = overlap.most_tokens
    num_replicas = max(int((plan.layout.replicas_RE > 0).sum()) for plan in plans)
    num_rows = max(int(plan.tokens.tokens_R.max()) for plan in plans)
    most_rows = room_for_rows(overlap, most_tokens, model.top_k, num_ranks)
    held_rows = most_rows if on_device else num_rows
    hidden, width, size = model.hidden_size, model.intermediate_size, model.bytes_per_element
    waiting = overlap.combine_share > 0 or overlap.fused in ("dispatch", "none")
    # As MoELayer decides: what comes node by node is sent.
    pulls = num_ranks > 1 and isinstance(strategy.sharding, Fsep) and strategy.sharding.flat
    return MegaMemory(
        symmetric_bytes(overlap, model, most_tokens, num_ranks, num_replicas),
        ring_bytes(model, num_ranks, num_slots, strategy.reduction.gradient_bytes) if pulls else 0,
        num_rows,
        most_rows,
        held_rows,
        # h, and x, then or later; dy, dh and the weighted activations, and dx where it waits for a task that pushes it.
        kept_bytes=held_rows * (hidden * overlap.keep_x + 2 * width) * size,
        backward_bytes=held_rows * (hidden * (1 + waiting + (not overlap.keep_x)) + 3 * width) * size,
    )
