"""Rows and matrices beyond 2³¹ elements: offsets are 64 bits wide.

Whatever lies far lies 2³² elements or a multiple of that behind something near, which 32 bits would take for it; so a
wrong offset reads other numbers or leaves zeros, and touches no foreign memory. Within one matrix nothing lies far.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from far_memory import give_sparse_outputs, only_outer_programs, sparse
from kernel_references import (
    activation_gradient_reference,
    combine_reference,
    grouped_gemm_reference,
    up_reference,
    weight_gradient_reference,
)
from torch import Tensor

from moesys.kernels.experts.activation_gradient import _add_partials, activation_gradient
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups, Tiles
from moesys.kernels.experts.token_rows import combine
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient
from moesys.kernels.routing import SortedRouting
from moesys.kernels.symmetric.pulls import ordered_sum

H, I = 32, 16
U = 2 * I
NEAR_ROWS, FAR_ROWS = 3, 5
ROWS = NEAR_ROWS + FAR_ROWS
# Of a row of I elements, a token of H, a matrix of H·I: each begins at a multiple of 2³² elements.
FAR_ROW, FAR_TOKEN, FAR_MATRIX = 2**32 // I, 2**32 // H, 2**32 // (H * I)
BLOCK = TileConfig(rows=16, columns=32, contraction=16, programs=2)
HALF = torch.float16


@pytest.fixture(autouse=True)
def _sparse_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    give_sparse_outputs(monkeypatch)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def apart(near: Tensor, far: Tensor, place: int) -> Tensor:
    """``near`` at the beginning and ``far`` from ``place`` on."""
    tensor = sparse(place + len(far), *near.shape[1:], dtype=near.dtype)
    tensor[: len(near)], tensor[place:] = near, far
    return tensor


class Far:
    """Two groups: rows of the first are near, as are their tokens and matrix; those of the second are far.

    ``near_*``: the same rows, tokens and matrices, one behind the other, as the references take them.
    """

    def __init__(self) -> None:
        token_P = torch.arange(ROWS, dtype=torch.int32)
        far = token_P[:FAR_ROWS] + FAR_TOKEN
        row_TK = torch.arange(ROWS, dtype=torch.int32)[:, None]
        self.near_routing = SortedRouting(token_P, row_TK, torch.tensor([0, NEAR_ROWS, ROWS], dtype=torch.int32))
        self.routing = SortedRouting(
            apart(token_P[:NEAR_ROWS], far, FAR_ROW),
            apart(row_TK[:NEAR_ROWS], row_TK[:FAR_ROWS] + FAR_ROW, FAR_TOKEN),
            torch.tensor([0, NEAR_ROWS, FAR_ROW + FAR_ROWS], dtype=torch.int32),
        )
        rows_M = torch.tensor([0, FAR_ROW], dtype=torch.int32)
        count_1 = torch.tensor([2], dtype=torch.int32)
        self.tiles = Tiles(torch.arange(2, dtype=torch.int32), rows_M, count_1, BLOCK.rows)
        self.near_matrix_G = torch.arange(2, dtype=torch.int32)
        self.matrix_G = self.near_matrix_G * FAR_MATRIX

    def rows(self, near: Tensor) -> Tensor:
        """[ROWS, width] -> rows of both groups where they lie."""
        return apart(near[:NEAR_ROWS], near[NEAR_ROWS:], FAR_ROW)

    def tokens(self, near: Tensor) -> Tensor:
        return apart(near[:NEAR_ROWS], near[NEAR_ROWS:], FAR_TOKEN)

    def matrices(self, near: Tensor) -> Tensor:
        return apart(near[:1], near[1:], FAR_MATRIX)

    def close(self, found: Tensor, expected: Tensor, far: int = FAR_ROW) -> None:
        """What was found at both ends is ``expected`` [ROWS, ...]."""
        ends = torch.cat([found[:NEAR_ROWS], found[far:]])
        torch.testing.assert_close(ends, expected, rtol=2e-3, atol=2e-3)


@pytest.fixture(scope="module")
def far() -> Far:
    return Far()


def test_up(far: Far) -> None:
    x, gate_up = normal(ROWS, H), normal(2, U, H, seed=1)
    h_PU, a_PI = up(far.tokens(x), far.matrices(gate_up), far.routing, far.tiles, far.matrix_G, 1, "swiglu", BLOCK)
    expected = up_reference(x, gate_up, far.near_routing, far.near_matrix_G, 1, "swiglu")
    far.close(h_PU, expected[0])
    far.close(a_PI, expected[1])


@pytest.mark.parametrize("transposed", [True, False], ids=["down", "input gradient"])
def test_grouped_gemm(far: Far, transposed: bool) -> None:
    rows, matrices = normal(ROWS, I if transposed else U), normal(2, *((H, I) if transposed else (U, H)), seed=1)
    tables = (far.routing.first_G1, far.tiles, far.matrix_G)
    out_PN = grouped_gemm(far.rows(rows), far.matrices(matrices), *tables, BLOCK, transposed=transposed)
    near = (far.near_routing.first_G1, far.near_matrix_G)
    far.close(out_PN, grouped_gemm_reference(rows, matrices, *near, transposed=transposed))


def test_activation_gradient(far: Far) -> None:
    dy, matrices, h = normal(ROWS, H), normal(2, H, I, seed=1), normal(ROWS, U, seed=2)
    weight = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(3))
    tables = (far.routing, RowGroups(far.routing.first_G1, far.tiles, far.matrix_G))
    with only_outer_programs():
        dh_PU, wa_PI, dweight_TK = activation_gradient(
            far.tokens(dy), far.matrices(matrices), far.rows(h), far.tokens(weight), *tables, "swiglu", BLOCK
        )
    near = (far.near_routing, far.near_matrix_G, "swiglu")
    expected = activation_gradient_reference(dy, matrices, h, weight, *near)
    far.close(dh_PU, expected[0])
    far.close(wa_PI, expected[1])
    far.close(dweight_TK, expected[2], FAR_TOKEN)


def test_sums_of_a_far_row() -> None:
    """The last step of the routing weights' gradients: entry 0 is near, entry 1 is far."""
    sums = torch.randn(2, I, generator=torch.Generator().manual_seed(0))
    dweight = torch.full((2, 1), torch.nan)
    row_TK = torch.tensor([[0], [FAR_ROW]], dtype=torch.int32)
    _add_partials[(1,)](apart(sums[:1], sums[1:], FAR_ROW), row_TK, dweight, 2, N=I, block_entries=16)
    torch.testing.assert_close(dweight[:, 0], sums.sum(dim=1))


@pytest.mark.parametrize("gathered", ["left", "right"])
def test_weight_gradient_of_far_rows_and_tokens(far: Far, gathered: Literal["left", "right"]) -> None:
    near = [normal(ROWS, H), normal(ROWS, I, seed=1)]
    sides = [far.tokens(near[0]), far.rows(near[1])]
    if gathered == "right":
        near.reverse()
        sides.reverse()
    first_G1 = torch.tensor([FAR_ROW, FAR_ROW + FAR_ROWS], dtype=torch.int32)
    order_G = torch.zeros(1, dtype=torch.int32)
    out_GLR = weight_gradient(*sides, OrderedGroups(far.routing.entry_P, first_G1, order_G), 1, gathered, BLOCK)
    expected = weight_gradient_reference(*near, *far.near_routing[::2], 1, gathered)
    torch.testing.assert_close(out_GLR, expected[1:], rtol=2e-3, atol=2e-3)


def test_weight_gradient_of_a_far_group(far: Far) -> None:
    by_token, by_row = normal(ROWS, H), normal(ROWS, I, seed=1)
    first_G1 = sparse(FAR_MATRIX + 2, dtype=torch.int32)
    first_G1[1], first_G1[-2:] = NEAR_ROWS, torch.tensor([NEAR_ROWS, ROWS])
    block = TileConfig(rows=32, columns=32, contraction=16, programs=FAR_MATRIX + 1)
    with only_outer_programs():
        order_G = torch.arange(FAR_MATRIX + 1, dtype=torch.int32)
        groups = OrderedGroups(far.near_routing.entry_P, first_G1, order_G)
        out_GLR = torch.empty(FAR_MATRIX + 1, H, I, dtype=HALF)
        weight_gradient(by_token, by_row, groups, 1, "left", block, out_GLR)
    expected = weight_gradient_reference(by_token, by_row, *far.near_routing[::2], 1, "left", HALF)
    torch.testing.assert_close(out_GLR[[0, -1]], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_combine(far: Far, weighted: bool) -> None:
    """The first and the last token; the last is far, and so is its row."""
    y = normal(ROWS, H)
    weight = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(3)) if weighted else None
    with only_outer_programs():
        out_TH = combine(far.rows(y), far.routing.row_TK, far.tokens(weight) if weighted else None, HALF)
    expected = combine_reference(y, far.near_routing.row_TK, weight, HALF)
    torch.testing.assert_close(out_TH[[0, -1]], expected[[0, -1]], rtol=2e-3, atol=2e-3)


def test_ordered_sum_of_wide_rows() -> None:
    """Its blocks are more than the 65,535 that a grid may have in its second direction; the last columns are far."""
    parts_NP = sparse(2, 2**32 + 3, dtype=torch.float32)
    near, far = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    parts_NP[:, :3], parts_NP[:, -3:] = near, far
    with only_outer_programs():
        out_EP = ordered_sum(parts_NP, torch.tensor([1, 1]), 2)
    assert torch.equal(out_EP[1, -3:], far.sum(0))
    # The first program's row has no parts.
    assert not out_EP[0, :3].any()
