"""PlanningState: what attached experts have learnt of loads, for a checkpoint beside the model's."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from moesys.moe.experts import Experts, experts_of


class PlanningState:
    """Load history, layouts and plans on their way of all experts of ``model``, for ``torch.distributed.checkpoint``:
    ``dcp.save({"model": ..., "optimizer": ..., "planning": PlanningState(model)}, checkpoint_id=folder)``.

    With it a run that is resumed on the same ranks has the same bits as one that was not stopped; without it planning
    begins anew. Models with ``MoELayer``s have it in their own state already. Groups of experts keep what is theirs, so
    load it into as many groups of the same ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._experts = {_key(experts): experts for experts in experts_of(model)}

    def state_dict(self) -> dict[str, str]:
        """Returns JSON text by layer and ranks."""
        return {key: experts.get_extra_state() for key, experts in self._experts.items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Raises KeyError where a layer or its ranks are not in ``state``."""
        for key, experts in self._experts.items():
            experts.set_extra_state(state[key])


def _key(experts: Experts) -> str:
    ranks = [0] if experts.group is None else dist.get_process_group_ranks(experts.group)
    return f"layer {experts.layer_index} on ranks {ranks[0]} to {ranks[-1]}"
