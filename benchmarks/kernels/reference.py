"""What a layer's experts must give, in float32, one expert at a time, so that it fits beside any layer.

P rows of an expert; the other letters as in ``kernels_layer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.kernels.drawn_layer import Layer, Results


@torch.no_grad()
def relative_errors(layer: Layer, found: Results) -> dict[str, float]:
    """‖found - right‖ / ‖right‖ of every result; infinite where it has a NaN, and
    all are where one has another shape.

    ``right`` is computed from the layer's own numbers in float32, without TF32. Gradients of matrices are compared
    expert by expert and not kept.
    """
    _, T, H, I, E, K = layer.size
    if [tuple(tensor.shape) for tensor in found] != [(T, H), (T, H), (T, K), (E, 2 * I, H), (E, H, I)]:
        return dict.fromkeys(Results._fields, float("inf"))
    squares = {name: torch.zeros(2, dtype=torch.float64, device=found.y.device) for name in Results._fields}

    def compare(name: str, tensor: Tensor, right: Tensor) -> None:
        for place, difference in enumerate((tensor.float() - right, right)):
            squares[name][place] += torch.linalg.vector_norm(difference, dtype=torch.float64).square()

    y_TH, dx_TH = (torch.zeros(T, H, device=found.y.device) for _ in range(2))
    dweight_TK = torch.zeros(T, K, device=found.y.device)
    with _without_tf32():
        for expert, entry_P in enumerate(_entries(layer)):
            dgate_up_UH, ddown_HI = _expert(layer, expert, entry_P, y_TH, dx_TH, dweight_TK)
            compare("dgate_up", found.dgate_up[expert], dgate_up_UH)
            compare("ddown", found.ddown[expert], ddown_HI)
    for name, right in (("y", y_TH), ("dx", dx_TH), ("dweight", dweight_TK)):
        compare(name, getattr(found, name), right)
    return {name: _ratio(*pair.sqrt().tolist()) for name, pair in squares.items()}


def _entries(layer: Layer) -> tuple[Tensor, ...]:
    """Each expert's choices t·K + k, in order."""
    expert_P = layer.expert_TK.flatten()
    count_E = torch.bincount(expert_P, minlength=layer.size.E)
    return expert_P.argsort(stable=True).split(count_E.tolist())


def _expert(
    layer: Layer, expert: int, entry_P: Tensor, y_TH: Tensor, dx_TH: Tensor, dweight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds one expert's share to outputs and gradients of tokens; gives the gradients of its matrices."""
    token_P, weight_P1 = entry_P // layer.size.K, layer.weight_TK.flatten()[entry_P, None]
    x_PH, dy_PH = layer.x_TH[token_P].float(), layer.dy_TH[token_P].float()
    gate_up_UH, down_HI = layer.gate_up_EUH[expert].float(), layer.down_EHI[expert].float()
    gate_PI, up_PI = (x_PH @ gate_up_UH.t()).chunk(2, dim=1)
    sigmoid_PI = gate_PI.sigmoid()
    silu_PI = gate_PI * sigmoid_PI
    a_PI = silu_PI * up_PI
    # A token has an expert once, so no two rows add to the same place.
    y_TH.index_add_(0, token_P, weight_P1 * (a_PI @ down_HI.t()))
    da_PI = dy_PH @ down_HI
    dweight_TK.view(-1)[entry_P] = (da_PI * a_PI).sum(dim=1)
    da_PI *= weight_P1
    dgate_PI = da_PI * up_PI * (sigmoid_PI + silu_PI * (1 - sigmoid_PI))
    dh_PU = torch.cat([dgate_PI, da_PI * silu_PI], dim=1)
    dx_TH.index_add_(0, token_P, dh_PU @ gate_up_UH)
    return dh_PU.t() @ x_PH, dy_PH.t() @ (weight_P1 * a_PI)


def _ratio(difference: float, right: float) -> float:
    if difference == 0:
        return 0.0
    return difference / right if right > 0 and difference < float("inf") else float("inf")


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
