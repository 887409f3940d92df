"""Matrices with gaps between them, as one buffer holds both of an expert: the same bits, and nothing in the gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import test_activation_gradient
import test_grouped_gemm
import test_up
import test_weight_gradient
import torch
from conftest import assert_equal
from expert_rows import Rows, rows_of
from torch import Tensor

from moesys.kernels.experts.experts import ExpertMatrices, experts_backward, experts_forward
from moesys.kernels.experts.tile_config import Operands, TileConfig, TileConfigs
from moesys.kernels.experts.weight_gradient import weight_gradient

EDGE, G, H, I = "dropped choices", 3, 16, 24
BLOCK = TileConfig(rows=16, columns=16, contraction=16, warps=4)
OPS: dict[str, Callable[[Rows, TileConfig], Sequence[Tensor]]] = {
    "up": test_up.results,
    "down": lambda given, block: (test_grouped_gemm.product(given, True, block),),
    "input gradient": lambda given, block: (test_grouped_gemm.product(given, False, block),),
    "activation gradient": lambda given, block: [*test_activation_gradient.gradients(given, block).values()],
}


def views(flat_EP: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] of a buffer of experts' parameters, behind which there is a gap."""
    gate_up, down, _ = flat_EP.split([2 * I * H, I * H, flat_EP.shape[1] - 3 * I * H], dim=1)
    return gate_up.unflatten(1, (2 * I, H)), down.unflatten(1, (H, I))


def with_gaps(given: Rows, padding: int) -> Rows:
    flat_EP = torch.full((len(given.down_EHI), 3 * I * H + padding), torch.nan, dtype=given.x_TH.dtype)
    gate_up, down = views(flat_EP)
    return given._replace(gate_up_EUH=gate_up.copy_(given.gate_up_EUH), down_EHI=down.copy_(given.down_EHI))


@pytest.mark.parametrize(
    ("dtype", "padding", "operands"),
    [
        (torch.float32, 0, "pointers"),
        (torch.float32, 5, "pointers"),
        (torch.bfloat16, 1, "pointers"),
        (torch.bfloat16, 8, "tma"),
        (torch.bfloat16, 8, "specialised"),
        (torch.bfloat16, 3, "tma"),
    ],
    ids=["neighbours", "a gap of 5", "16 bits", "TMA", "TMA of rows too", "a stride that TMA cannot have"],
)
@pytest.mark.parametrize("op", OPS)
def test_gaps_change_no_bit(op: str, dtype: torch.dtype, padding: int, operands: Operands) -> None:
    given = rows_of(EDGE, dtype)
    found = OPS[op](with_gaps(given, padding), replace(BLOCK, operands=operands))
    assert all(map(torch.equal, found, OPS[op](given, BLOCK)))


def test_gradients_are_written_where_they_belong() -> None:
    """Into one flat buffer, from forward and backward on another, and nothing behind an expert's parameters."""
    given, blocks, results = rows_of(EDGE, torch.float32), TileConfigs.all_of(BLOCK), []
    for each, padding in ((given, 0), (with_gaps(given, 5), 5)):
        gradients = torch.full((G, 3 * I * H + padding), torch.nan)
        matrices = ExpertMatrices(each.gate_up_EUH, each.down_EHI, each.matrix_G, "swiglu")
        y_TH, state = experts_forward(each.x_TH, each.routing, each.weight_TK, matrices, blocks)
        out = views(gradients) if padding else (torch.empty(G, 2 * I, H), torch.empty(G, H, I))
        found = experts_backward(each.dy_TH, each.x_TH, each.weight_TK, matrices, state, blocks, out)
        results.append([y_TH, *found, *out])
    assert gradients[:, 3 * I * H :].isnan().all()
    assert_equal(*results)


@pytest.mark.parametrize("op", OPS)
def test_gaps_within_a_matrix_are_refused(op: str) -> None:
    given = rows_of(EDGE, torch.float32)
    turned = [matrices.mT.contiguous().mT for matrices in (given.gate_up_EUH, given.down_EHI)]
    with pytest.raises(ValueError, match="each matrix"):
        OPS[op](given._replace(gate_up_EUH=turned[0], down_EHI=turned[1]), BLOCK)


@pytest.mark.parametrize("op", OPS)
def test_tiles_of_another_height_are_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = rows_of(EDGE, torch.float32).groups(BLOCK)
    monkeypatch.setattr(Rows, "groups", lambda given, block: groups)
    with pytest.raises(ValueError, match="tiles of 16 rows for blocks of 32"):
        OPS[op](rows_of(EDGE, torch.float32), replace(BLOCK, rows=32))


@pytest.mark.parametrize(
    "out_GLR", [torch.zeros(G + 1, 2 * I, H), torch.zeros(G, H, 2 * I).mT], ids=["shape", "turned"]
)
def test_a_gradient_that_does_not_fit_is_refused(out_GLR: Tensor) -> None:
    given = test_weight_gradient.operands(EDGE, torch.float32, "right")
    with pytest.raises(ValueError, match=r"give contiguous matrices of shape \(3, 48, 16\)"):
        weight_gradient(*given, BLOCK, out_GLR)
