"""Who computes experts in the bench of the kernels: ours, torch's grouped GEMM in three ways, and peers' own code.

T tokens, H hidden, I expert width, U = 2·I (gate above up), E experts, K choices of a token, P = T·K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.kernels.drawn_layer import Implementation
from benchmarks.kernels.peers import PEERS
from moesys.kernels.experts.experts import moe_experts

OURS = "moesys"
# Whose error bounds ours.
GROUPED = ("grouped_mm", "transformers", "grouped_mm compiled")


def contestants(names: Sequence[str], peers: Mapping[str, Path]) -> dict[str, Callable[[], Implementation]]:
    """What makes each contestant, by name; making one that is not installed raises.

    ``names``: of ours and torch's; none for all of them. ``peers``: the folder of each peer's code. All that bounds
    ours comes before it. Raises ValueError for a name that is not known.
    """
    known: dict[str, Callable[[], Implementation]] = {
        "grouped_mm": lambda: Implementation(grouped_mm_experts),
        "transformers": lambda: Implementation(transformers_experts),
        "grouped_mm compiled": lambda: Implementation(torch.compile(grouped_mm_experts, dynamic=False)),
        OURS: lambda: Implementation(moe_experts),
    }
    for name in names:
        if name not in known:
            raise ValueError(f"contestant={name!r} is not known; use some of {', '.join(known)}, or --peer NAME=DIR")
    for name in peers:
        if name not in PEERS:
            raise ValueError(f"peer={name!r} is not known; use some of {', '.join(PEERS)}")
    chosen = {name: make for name, make in known.items() if not names or name in names}
    return chosen | {name: partial(PEERS[name], folder) for name, folder in peers.items()}


def grouped_mm_experts(
    x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor
) -> Tensor:
    """Sort, gather, grouped GEMM, SwiGLU, grouped GEMM, and a weighted sum in float32, as torchtitan does."""
    T, K = expert_TK.shape
    expert_P, entry_P = expert_TK.flatten().sort(stable=True)
    every_E = torch.arange(len(down_EHI), device=x_TH.device)
    end_E = torch.searchsorted(expert_P, every_E, right=True, out_int32=True)
    h_PU = functional.grouped_mm(x_TH[entry_P // K], gate_up_EUH.transpose(1, 2), offs=end_E)
    gate_PI, up_PI = h_PU.chunk(2, dim=1)
    y_PH = functional.grouped_mm(functional.silu(gate_PI) * up_PI, down_EHI.transpose(1, 2), offs=end_E)
    by_choice_TKH = y_PH[entry_P.argsort()].view(T, K, -1)
    return (by_choice_TKH.float() * weight_TK[:, :, None]).sum(dim=1).to(x_TH.dtype)


def transformers_experts(
    x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor
) -> Tensor:
    """The experts of transformers' Qwen3-MoE with its own implementation ``grouped_mm``."""
    matrices = {"gate_up_proj": gate_up_EUH, "down_proj": down_EHI}
    module = _transformers_module(*down_EHI.shape, expert_TK.shape[1])
    y_TH: Tensor = torch.func.functional_call(module, matrices, (x_TH, expert_TK, weight_TK))
    return y_TH


@cache
def _transformers_module(E: int, H: int, I: int, K: int) -> nn.Module:
    """Without memory for its own matrices."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module: nn.Module = Qwen3MoeExperts(config)
    return module
