"""The contestants of the kernel benchmark: moesys, torch's grouped GEMM in four ways, and code of other projects.

The code of other projects is read from local folders and is never a dependency. Each function for one of them takes the
folder that holds its package, adds it to the path, and raises ImportError if the package cannot be imported.

T tokens, H hidden, I expert width, U = 2·I (gate above up), E experts, K choices per token, P = T·K rows.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.kernels.drawn_layer import Implementation
from moesys.kernels.experts.experts import moe_experts

OURS = "moesys"
# The contestants whose errors bound those of moesys.
GROUPED = ("grouped_mm", "transformers", "grouped_mm compiled", "grouped_mm max-autotune")


def contestants(names: Sequence[str], peers: Mapping[str, Path]) -> dict[str, Callable[[], Implementation]]:
    """Returns a constructor for each contestant, by name; the constructor raises if the contestant is not installed.

    ``names``: those of moesys and torch; empty for all of them. ``peers``: the folder of each other project. Those that
    bound moesys' error come before it. Raises ValueError for an unknown name.
    """
    known: dict[str, Callable[[], Implementation]] = {
        "grouped_mm": lambda: Implementation(grouped_mm_experts),
        "transformers": lambda: Implementation(transformers_experts),
        "grouped_mm compiled": lambda: Implementation(torch.compile(grouped_mm_experts, dynamic=False)),
        "grouped_mm max-autotune": lambda: Implementation(
            torch.compile(grouped_mm_experts, dynamic=False, mode="max-autotune-no-cudagraphs")
        ),
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
    """Computes as torchtitan does: sort, gather, grouped GEMM, SwiGLU, grouped GEMM, and a weighted sum in float32."""
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
    """Computes the experts of transformers' Qwen3-MoE with its implementation ``grouped_mm``."""
    matrices = {"gate_up_proj": gate_up_EUH, "down_proj": down_EHI}
    module = _transformers_module(*down_EHI.shape, expert_TK.shape[1])
    y_TH: Tensor = torch.func.functional_call(module, matrices, (x_TH, expert_TK, weight_TK))
    return y_TH


@cache
def _transformers_module(E: int, H: int, I: int, K: int) -> nn.Module:
    """Returns a module whose own matrices take no memory."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module: nn.Module = Qwen3MoeExperts(config)
    return module


# --- other projects ---------------------------------------------------------------------------------------------------


def scattermoe(folder: Path) -> Implementation:
    """Computes as the GLUMLP of shawntan/scattermoe does, with the gate in the upper half as in moesys."""
    package: Any = _import_from(folder, "scattermoe", "scattermoe")

    def experts(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor) -> Tensor:
        order = package.flatten_sort_count(expert_TK, num_experts=len(down_EHI))
        K = expert_TK.shape[1]
        h_PU = package.parallel_linear(x_TH, gate_up_EUH.permute(0, 2, 1), K, *order, grouped_out=True)
        gate_PI, up_PI = h_PU.chunk(2, dim=1)
        a_PI = functional.silu(gate_PI) * up_PI
        gates = weight_TK.to(x_TH.dtype)
        y_TH: Tensor = package.parallel_linear(a_PI, down_EHI.permute(0, 2, 1), 1, *order, grouped_in=True, gates=gates)
        return y_TH

    return Implementation(experts)


def liger(folder: Path) -> Implementation:
    """Computes with the fused Triton experts of linkedin/Liger-Kernel, which take the layouts of moesys."""
    module: Any = _import_from(folder, "liger_kernel", "liger_kernel.ops.fused_moe")

    def experts(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor) -> Tensor:
        y_TH: Tensor = module.LigerFusedMoEFunction.apply(x_TH, gate_up_EUH, down_EHI, expert_TK.int(), weight_TK)
        return y_TH

    return Implementation(experts)


def sonicmoe(folder: Path) -> Implementation:
    """Computes with Dao-AILab/sonic-moe's function for given choices. Older versions alternate rows of gate and up."""
    module: Any = _import_from(folder, "sonicmoe", "sonicmoe.functional")
    enums: Any = importlib.import_module("sonicmoe.enums")
    compute = module.moe_general_routing_inputs
    takes_ours = "concat_layout" in inspect.signature(compute).parameters

    def experts(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down_EHI: Tensor) -> Tensor:
        T, K = expert_TK.shape
        token_P = torch.arange(T, dtype=torch.int32, device=x_TH.device).repeat_interleave(K)
        y_TH: Tensor = compute(
            x_TH,
            weight_TK.flatten(),
            token_P,
            expert_TK.flatten().int(),
            gate_up.permute(1, 2, 0),
            None,
            down_EHI.permute(1, 2, 0),
            None,
            E=len(down_EHI),
            stream_id=torch.cuda.current_stream().cuda_stream,
            activation_type=enums.ActivationType.SWIGLU,
            is_inference_mode_enabled=False,
            **({"concat_layout": True} if takes_ours else {}),
        )[0]
        return y_TH

    if takes_ours:
        return Implementation(experts)
    return Implementation(experts, to_own=alternate, from_own=concatenate)


PEERS: Mapping[str, Callable[[Path], Implementation]] = MappingProxyType(
    {"scattermoe": scattermoe, "liger": liger, "sonicmoe": sonicmoe}
)


def alternate(gate_up_EUH: Tensor) -> Tensor:
    """Converts gate above up into alternating rows."""
    return torch.stack(gate_up_EUH.chunk(2, dim=1), dim=2).flatten(1, 2)


def concatenate(alternating_EUH: Tensor) -> Tensor:
    """Converts alternating rows into gate above up."""
    return torch.cat([alternating_EUH[:, 0::2], alternating_EUH[:, 1::2]], dim=1)


def _import_from(folder: Path, package: str, module: str) -> ModuleType:
    """Imports ``module`` of the ``package`` in ``folder`` or ``folder/src``."""
    for path in (folder, folder / "src"):
        if (path / package).is_dir():
            if str(path.resolve()) not in sys.path:
                sys.path.insert(0, str(path.resolve()))
            return importlib.import_module(module)
    raise ImportError(f"{folder} has no folder {package}; give the one that holds the package")
