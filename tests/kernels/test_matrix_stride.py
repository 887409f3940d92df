"""Matrices with gaps between them, as one buffer holds both of an expert: the same bits, and nothing in the gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import assert_equal
from kernel_references import route_reference, tile_table_reference
from torch import Tensor

from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.experts import ExpertMatrices, experts_backward, experts_forward
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import Operands, TileConfig, TileConfigs
from moesys.kernels.experts.tiles import RowGroups, groups_by_size
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient

T, K, E, I, H = 9, 2, 3, 24, 40
BLOCK = TileConfig(rows=16, columns=16, contraction=16, warps=4)
GENERATOR = torch.Generator().manual_seed(0)
GROUP_TK = torch.tensor([[t % 4, (t + 1) % 3] for t in range(T)])  # 3: a choice that is dropped
ROUTING = route_reference(GROUP_TK, E)
TILES = tile_table_reference(ROUTING.first_G1, T * K, BLOCK.rows)
MATRIX_G = torch.tensor([2, 0, 1], dtype=torch.int32)
WEIGHT_TK = torch.rand(T, K, generator=GENERATOR)


def flat(padding: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """E experts' parameters, gate_up and then down, and ``padding`` elements behind them; all NaN."""
    return torch.full((E, 3 * I * H + padding), torch.nan, dtype=dtype)


def views(flat_EP: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] of a flat buffer."""
    gate_up, down, _ = flat_EP.split([2 * I * H, I * H, flat_EP.shape[1] - 3 * I * H], dim=1)
    return gate_up.unflatten(1, (2 * I, H)), down.unflatten(1, (H, I))


def weights(padding: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up, down = views(flat(padding, dtype))
    for matrices in (gate_up, down):
        matrices.copy_(torch.randn(matrices.shape, generator=torch.Generator().manual_seed(1)))
    return gate_up, down


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


def of_up(gate_up: Tensor, down: Tensor, block: TileConfig) -> tuple[Tensor, ...]:
    x_TH = rows(T, H, gate_up.dtype)
    return up(x_TH, gate_up, ROUTING, TILES, MATRIX_G, K, activation="swiglu", block=block)


def of_down(_: Tensor, matrices: Tensor, block: TileConfig) -> tuple[Tensor, ...]:
    a_PI = rows(T * K, I, matrices.dtype)
    return (grouped_gemm(a_PI, matrices, ROUTING.first_G1, TILES, MATRIX_G, block, transposed=True),)


def of_input_gradient(gate_up: Tensor, _: Tensor, block: TileConfig) -> tuple[Tensor, ...]:
    dh_P2I = rows(T * K, 2 * I, gate_up.dtype)
    return (grouped_gemm(dh_P2I, gate_up, ROUTING.first_G1, TILES, MATRIX_G, block, transposed=False),)


def of_activation_gradient(_: Tensor, matrices: Tensor, block: TileConfig) -> tuple[Tensor, ...]:
    dy_TH, h_P2I = rows(T, H, matrices.dtype), rows(T * K, 2 * I, matrices.dtype)
    groups = RowGroups(ROUTING.first_G1, TILES, MATRIX_G)
    return activation_gradient(dy_TH, matrices, h_P2I, WEIGHT_TK, ROUTING, groups, "swiglu", block)


OPS = [of_up, of_down, of_input_gradient, of_activation_gradient]
Op = Callable[[Tensor, Tensor, TileConfig], tuple[Tensor, ...]]


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
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__[3:])
def test_gaps_change_no_bit(op: Op, dtype: torch.dtype, padding: int, operands: Operands) -> None:
    with_gaps = weights(padding, dtype)
    kept = int(ROUTING.first_G1[-1])
    together = op(*(matrices.contiguous() for matrices in with_gaps), BLOCK)
    for found, expected in zip(op(*with_gaps, replace(BLOCK, operands=operands)), together, strict=True):
        here = slice(None) if found.shape == WEIGHT_TK.shape else slice(kept)
        assert torch.equal(found[here], expected[here])


def test_gradients_are_written_where_they_belong() -> None:
    """Into one flat buffer, from forward and backward on another, and nothing behind an expert's parameters."""
    x_TH, dy_TH = rows(T, H, torch.float32), rows(T, H, torch.float32).flip(0)
    blocks = TileConfigs.all_of(BLOCK)
    results = []
    for padding in (0, 5):
        gate_up, down = weights(padding, torch.float32)
        if not padding:
            gate_up, down = gate_up.contiguous(), down.contiguous()
        gradients = flat(padding)
        matrices = ExpertMatrices(gate_up, down, MATRIX_G, "swiglu")
        y_TH, state = experts_forward(x_TH, ROUTING, WEIGHT_TK, matrices, blocks)
        out = views(gradients) if padding else (torch.empty_like(gate_up), torch.empty_like(down))
        found = experts_backward(dy_TH, x_TH, WEIGHT_TK, matrices, state, blocks, out)
        results.append([y_TH, *found, *out])
        if padding:
            assert gradients[:, 3 * I * H :].isnan().all()
    assert_equal(*results)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__[3:])
def test_gaps_within_a_matrix_are_refused(op: Op) -> None:
    gate_up, down = weights(0, torch.float32)
    with pytest.raises(ValueError, match="each matrix"):
        op(gate_up.mT.contiguous().mT, down.mT.contiguous().mT, BLOCK)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__[3:])
def test_tiles_of_another_height_are_refused(op: Op) -> None:
    with pytest.raises(ValueError, match="tiles of 16 rows for blocks of 32"):
        op(*weights(0, torch.float32), replace(BLOCK, rows=32))


@pytest.mark.parametrize(
    "out_GLR",
    [torch.zeros(E + 1, I, H), torch.zeros(E, H, I).mT],
    ids=["shape", "transposed"],
)
def test_a_gradient_that_does_not_fit_is_refused(out_GLR: Tensor) -> None:
    dh_PI, x_TH = rows(T * K, I, torch.float32), rows(T, H, torch.float32)
    with pytest.raises(ValueError, match=r"give contiguous matrices of shape \(3, 24, 40\)"):
        weight_gradient(
            dh_PI,
            x_TH,
            OrderedGroups(ROUTING.entry_P, ROUTING.first_G1, groups_by_size(ROUTING.first_G1)),
            K,
            "right",
            BLOCK,
            out_GLR,
        )
