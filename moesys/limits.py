"""Counts what a rank must hold at least under a strategy, and says why a plan or a strategy would not run.

Memory is counted by closed forms of shapes: P_e parameters of an expert, b bytes of an element, R ranks, E experts,
S slots, L layers, T tokens of a rank, K top-k, H hidden size, I expert width. The count leaves out embeddings,
attention, logits, message buffers and allocator overhead. So what does not fit by this count does not fit, and what
fits by it may still not.

Functions that return reasons return "" where they know of none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moesys.config import BYTES_PER_GB, ClusterSpec, Ep, Fsep, ModelShape, Strategy
from moesys.config.overlap import MegaKernel
from moesys.layout import TokenPlan

# The master of a parameter, its gradient and the two moments of Adam, all float32.
_STATE_BYTES = 16


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most. ``state_bytes``: masters, gradients and optimizer of the experts it owns;
    ``slot_bytes``: experts in the compute dtype, in as many layers as have theirs at once; ``gradient_bytes``:
    gradients of held experts, on their way to the owners; ``row_bytes``: saved for backward; ``shared_bytes``: rows
    that peers reach.
    """

    state_bytes: int
    slot_bytes: int
    gradient_bytes: int
    row_bytes: int
    shared_bytes: int

    @property
    def gb(self) -> float:
        """Returns all bytes in units of 1e9 bytes."""
        all_bytes = self.state_bytes + self.slot_bytes + self.gradient_bytes + self.row_bytes + self.shared_bytes
        return all_bytes / BYTES_PER_GB

    def shortage(self, cluster: ClusterSpec, num_layers: int) -> str:
        """Returns why a rank lacks memory for ``num_layers`` layers; "" if it has enough, or if that is unknown."""
        if cluster.memory_gb is None or self.gb <= cluster.memory_gb:
            return ""
        return f"a rank holds {self.gb:.2f} GB at least, of {num_layers} layers, and has {cluster.memory_gb:g}"


def rank_memory(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    num_layers: int,
    tokens_per_rank: int,
    *,
    recompute: bool = False,
) -> RankMemory:
    """Returns a lower bound, for ``tokens_per_rank`` evenly balanced tokens of each rank in a micro-batch.

    Raises ValueError for a strategy that does not fit the model.
    """
    num_ranks = cluster.num_ranks
    sharding, num_experts, parameters = strategy.sharding, model.num_experts, model.expert_parameters
    slots = min(num_experts, max(strategy.slots(model, cluster)))
    owned_parameters = -(-num_experts // num_ranks) * parameters
    if isinstance(sharding, Fsep):
        owned_parameters = -(-parameters // num_ranks) * num_experts
    # If nobody borrows experts, gradients are computed in place and need no memory here.
    borrows = num_ranks > 1 and not (isinstance(sharding, Ep) and not sharding.lends)
    num_lent = borrows * min(num_layers, 1 + sharding.delay_reshard)
    # A layer keeps its pre-activations [T·K, 2I], and with some overlaps its rows [T·K, H].
    kept_width = model.hidden_size * strategy.overlap.keep_x + 2 * model.intermediate_size
    rows_kept = tokens_per_rank * model.top_k * (1 if recompute else num_layers)
    return RankMemory(
        state_bytes=_STATE_BYTES * owned_parameters * num_layers,
        slot_bytes=_slot_bytes(strategy, model, num_ranks, num_layers, slots),
        gradient_bytes=num_lent * slots * parameters * strategy.reduction.gradient_bytes,
        row_bytes=rows_kept * kept_width * model.bytes_per_element,
        # Rows that peers reach, for all layers together: x, once more for backward, and outputs.
        shared_bytes=strategy.overlap.reaches_memory * tokens_per_rank * (2 + model.top_k) * model.row_bytes,
    )


def _slot_bytes(strategy: Strategy, model: ModelShape, num_ranks: int, num_layers: int, slots: int) -> int:
    """Returns the bytes of experts in slots. A rank that owns experts whole and computes in float32 uses its
    masters.
    """
    sharding, layers_at_once = strategy.sharding, num_layers
    if sharding.reshard_after_forward:
        layers_at_once = min(num_layers, 1 + sharding.prefetch_layers)
    if isinstance(sharding, Ep) and model.dtype == "float32":
        slots = max(0, slots - -(-model.num_experts // num_ranks))
    return layers_at_once * slots * model.expert_parameters * model.bytes_per_element


def too_many_rows(
    overlap: MegaKernel, plan: TokenPlan, most_tokens: int, top_k: int, members: Sequence[int] | None = None
) -> str:
    """Returns which rank would get more rows than ``rows_cap`` times ``most_tokens`` · K choices of a rank, or "".

    ``members``: the ranks of the plan as errors name them; by default as the plan numbers them.
    """
    choices, rank = most_tokens * top_k, int(plan.tokens_R.argmax())
    num_rows = int(plan.tokens_R[rank])
    if num_rows <= overlap.rows_cap * choices:
        return ""
    rank = rank if members is None else members[rank]
    return too_many_words(rank, num_rows, choices, f"rows_cap={overlap.rows_cap:g} times {choices} choices of a rank")


def too_many_words(rank: int, num_rows: int, choices: int, bound: str) -> str:
    """Returns that ``rank`` would get ``num_rows`` rows, more than ``bound``, and the ``rows_cap`` that is enough."""
    # Rounded up, so that what is named is enough.
    hundredths = math.ceil(100 * num_rows / choices)
    # In floats 1.13 times 100 is less than 113.
    enough = (hundredths + (hundredths / 100 * choices < num_rows)) / 100
    return (
        f"rank {rank} would get {num_rows} rows, more than {bound}; "
        f"use MegaKernel(rows_cap={enough:g}), or a balance or split that loads ranks more evenly"
    )
