"""Peers' kernels beside ours, from local copies of their code: never a dependency.

Each function takes the folder that a peer's package lies in, puts it on the path and gives the peer as a contestant. It
raises ImportError where the package or something that it needs is not there.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.drawn_layer import Implementation


def scattermoe(folder: Path) -> Implementation:
    """shawntan/scattermoe: what its GLUMLP does, with the gate in the upper half as ours."""
    package: Any = _import_from(folder, "scattermoe", "scattermoe")

    def experts(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor) -> Tensor:
        order = package.flatten_sort_count(expert_TK, num_experts=len(down_EHI))
        K = expert_TK.shape[1]
        h_PU = package.parallel_linear(x_TH, gate_up_EUH.permute(0, 2, 1), K, *order, grouped_out=True)
        gate_PI, up_PI = h_PU.chunk(2, dim=1)
        a_PI = torch.nn.functional.silu(gate_PI) * up_PI
        gates = weight_TK.to(x_TH.dtype)
        y_TH: Tensor = package.parallel_linear(a_PI, down_EHI.permute(0, 2, 1), 1, *order, grouped_in=True, gates=gates)
        return y_TH

    return Implementation(experts)


def liger(folder: Path) -> Implementation:
    """linkedin/Liger-Kernel: its fused experts in Triton, whose layouts are ours."""
    module: Any = _import_from(folder, "liger_kernel", "liger_kernel.ops.fused_moe")

    def experts(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor) -> Tensor:
        y_TH: Tensor = module.LigerFusedMoEFunction.apply(x_TH, gate_up_EUH, down_EHI, expert_TK.int(), weight_TK)
        return y_TH

    return Implementation(experts)


def sonicmoe(folder: Path) -> Implementation:
    """Dao-AILab/sonic-moe: its entry for given choices. Older versions want rows of gate and up to alternate."""
    functional: Any = _import_from(folder, "sonicmoe", "sonicmoe.functional")
    enums: Any = importlib.import_module("sonicmoe.enums")
    compute = functional.moe_general_routing_inputs
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
    """Gate above up -> rows of both in turn."""
    return torch.stack(gate_up_EUH.chunk(2, dim=1), dim=2).flatten(1, 2)


def concatenate(alternating_EUH: Tensor) -> Tensor:
    """Rows of gate and up in turn -> gate above up."""
    return torch.cat([alternating_EUH[:, 0::2], alternating_EUH[:, 1::2]], dim=1)


def _import_from(folder: Path, package: str, module: str) -> ModuleType:
    """``module`` of the ``package`` in ``folder`` or ``folder/src``."""
    for path in (folder, folder / "src"):
        if (path / package).is_dir():
            if str(path.resolve()) not in sys.path:
                sys.path.insert(0, str(path.resolve()))
            return importlib.import_module(module)
    raise ImportError(f"{folder} has no folder {package}; give the one that holds the package")
