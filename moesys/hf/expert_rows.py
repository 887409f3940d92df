"""The rows of experts and their order: by (expert, token, choice), a pure function of the routing.

T tokens, K top-k, E experts, P rows of experts with their padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.kernels.routing.routing import route_reference
from moesys.overlap.routes import ChunkRows, SlotRows


def expert_rows(index_TK: Tensor, num_experts: int, min_rows: int) -> ChunkRows:
    """Returns the rows of all experts, each expert's padded to the least number that a ``RowRule`` allows.

    A choice t·K + k is an arrival. Behind the rows of experts lies one that no expert has, for choices of experts that
    are not here.
    """
    routing = route_reference(index_TK, num_experts)
    first_E, valid_E = routing.first_G1[:-1].long(), routing.first_G1.diff().long()
    padded_E = torch.where(valid_E > 0, valid_E.clamp(min=min_rows), 0)
    start_E = padded_E.cumsum(0) - padded_E
    expert_P = torch.repeat_interleave(padded_E)
    offset_P = torch.arange(len(expert_P), device=expert_P.device) - start_E[expert_P]
    offset_P = torch.where(offset_P < valid_E[expert_P], offset_P, 0)
    kept_TK = routing.row_TK >= 0
    shift_TK = (start_E - first_E)[torch.where(kept_TK, index_TK, 0).long()]
    starts, valids, paddeds = torch.stack([start_E, valid_E, padded_E]).tolist()
    return ChunkRows(
        rows=(0, len(expert_P) + 1),
        slots=tuple(SlotRows(e, starts[e], valids[e], paddeds[e]) for e in range(num_experts) if valids[e]),
        gather_P=routing.entry_P[first_E[expert_P] + offset_P],
        return_M=torch.where(kept_TK, routing.row_TK + shift_TK, len(expert_P)).int().view(-1),
    )
