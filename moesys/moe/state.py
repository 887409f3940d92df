"""A layer's state in the names and shapes of transformers' MoE blocks: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3.

``gate.weight`` [E, H], ``experts.gate_up_proj`` [E, 2I, H], ``experts.down_proj`` [E, H, I], and where they exist
``gate.e_score_correction_bias`` [E] and ``shared_experts.{gate,up,down}_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from moesys.config import ModelShape
from moesys.moe.expert_form import ExpertForm

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def join_state(full_EP: Tensor, shape: ModelShape, replicated: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All experts' flat parameters [E, P_e] and the replicated modules, by name; copies."""
    gate_up, down = ExpertForm.of(shape).views(full_EP)
    state = {GATE_UP: gate_up.contiguous(), DOWN: down.contiguous()}
    for prefix, module in replicated.items():
        state |= {f"{prefix}.{name}": tensor.clone() for name, tensor in module.state_dict().items()}
    return state


def split_state(
    state: Mapping[str, Tensor], shape: ModelShape, replicated: Mapping[str, nn.Module]
) -> Iterator[tuple[int, Tensor]]:
    """Loads the replicated modules, and gives every expert's flat parameters [P_e] in turn.

    Raises KeyError for a name that is missing, ValueError for a shape that differs or a name too many, before anything
    is loaded.
    """
    H, I, E = shape.hidden_size, shape.intermediate_size, shape.num_experts
    wanted: dict[str, torch.Size] = {GATE_UP: torch.Size((E, 2 * I, H)), DOWN: torch.Size((E, H, I))}
    for prefix, module in replicated.items():
        wanted |= {f"{prefix}.{name}": tensor.shape for name, tensor in module.state_dict().items()}
    if missing := [name for name in wanted if name not in state]:
        raise KeyError(f"state has no {missing[0]}, which this layer has; its names are {', '.join(wanted)}")
    if unknown := sorted(set(state) - set(wanted)):
        raise ValueError(f"state has {unknown}, which this layer has not; drop them or change the shape")
    for name, size in wanted.items():
        if state[name].shape != size:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}; this layer's is {tuple(size)}")
    for prefix, module in replicated.items():
        module.load_state_dict(
            {name.removeprefix(f"{prefix}."): each for name, each in state.items() if name.startswith(f"{prefix}.")}
        )
    for expert in range(E):
        yield expert, torch.cat([state[GATE_UP][expert].reshape(-1), state[DOWN][expert].reshape(-1)])
