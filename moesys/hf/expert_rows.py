"""The rows of experts and their order: by (expert, token, choice), a pure function of the routing.

T tokens, K top-k, E experts, P rows of experts with their padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.kernels.routing.routing import route_reference
from moesys.overlap.routes import SlotRows


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all experts, each expert's padded to the least number that a ``RowRule`` allows.

    entry_P: the choice t·K + k that a row is of; padding repeats its expert's first row.
    row_TK: the row of each choice, P for those that have none.
    """

    entry_P: Tensor
    row_TK: Tensor
    experts: tuple[SlotRows, ...]

    @staticmethod
    def of(index_TK: Tensor, num_experts: int, min_rows: int) -> ExpertRows:
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
        return ExpertRows(
            entry_P=routing.entry_P[first_E[expert_P] + offset_P],
            row_TK=torch.where(kept_TK, routing.row_TK + shift_TK, len(expert_P)).int(),
            experts=tuple(SlotRows(e, starts[e], valids[e], paddeds[e]) for e in range(num_experts) if valids[e]),
        )
