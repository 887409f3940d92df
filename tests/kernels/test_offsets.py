"""Rows and matrices beyond 2³¹ elements: offsets are 64 bits wide.

Whatever lies far lies 2³² elements or a multiple of that behind something near, which 32 bits would take for it; so a
wrong offset reads other numbers or leaves zeros, and touches no foreign memory. Within one matrix nothing lies far.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import pytest
import torch
from expert_ops import OPS, Rows
from far_memory import give_sparse_outputs, only_outer_programs, sparse
from torch import Tensor

from moesys.kernels.experts.activation_gradient import _add_partials
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups, Tiles
from moesys.kernels.experts.token_rows import combine
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


class FarRows(Rows):
    """Of two groups: rows of the first are near, as are their tokens and matrix; those of the second are far."""

    def groups(self, block: TileConfig) -> RowGroups:
        groups_M, rows_M, count_1 = (torch.tensor(of).int() for of in ([0, FAR_MATRIX], [0, FAR_ROW], [2]))
        tiles = Tiles(groups_M, rows_M, count_1, block.rows)
        return RowGroups(self.routing.first_G1, tiles)


def by_row(near: Tensor) -> Tensor:
    return apart(near[:NEAR_ROWS], near[NEAR_ROWS:], FAR_ROW)


def by_token(near: Tensor) -> Tensor:
    return apart(near[:NEAR_ROWS], near[NEAR_ROWS:], FAR_TOKEN)


@pytest.fixture(scope="module")
def near() -> Rows:
    """The same rows, tokens and matrices as those that lie apart, one behind the other."""
    token_P = torch.arange(ROWS, dtype=torch.int32)
    routing = SortedRouting(token_P, token_P[:, None], torch.tensor([0, NEAR_ROWS, ROWS], dtype=torch.int32))
    tokens, weight = (normal(ROWS, H, seed=seed) for seed in (0, 1)), normal(ROWS, 1, seed=2).float()
    rows, matrices = (normal(ROWS, width) for width in (U, I, H)), (normal(2, *of, seed=3) for of in ((U, H), (H, I)))
    return Rows(*tokens, weight, *rows, *matrices, routing, "swiglu")


@pytest.fixture(scope="module")
def far(near: Rows) -> FarRows:
    token_P, row_TK, _ = near.routing
    routing = SortedRouting(
        apart(token_P[:NEAR_ROWS], token_P[:FAR_ROWS] + FAR_TOKEN, FAR_ROW),
        apart(row_TK[:NEAR_ROWS], row_TK[:FAR_ROWS] + FAR_ROW, FAR_TOKEN),
        apart(torch.tensor([0, NEAR_ROWS]).int(), torch.tensor([FAR_ROW, FAR_ROW + FAR_ROWS]).int(), FAR_MATRIX),
    )
    tokens, rows = map(by_token, near[:3]), map(by_row, near[3:6])
    matrices = (apart(each[:1], each[1:], FAR_MATRIX) for each in near[6:8])
    return FarRows(*tokens, *rows, *matrices, routing, near.activation)


@pytest.mark.parametrize("op", [*OPS][:4])
def test_rows_tokens_and_matrices_have_the_bits_of_near_ones(op: str, far: FarRows, near: Rows) -> None:
    # The last step of the routing weights' gradients has a program for every few tokens.
    with only_outer_programs() if op == "activation gradient" else nullcontext():
        found = OPS[op].found(far, BLOCK)
    for name, expected in OPS[op].found(near, BLOCK).items():
        place = FAR_TOKEN if name == "dweight" else FAR_ROW
        assert expected.any()
        assert torch.equal(torch.cat([found[name][:NEAR_ROWS], found[name][place:]]), expected), name


def test_sums_of_a_far_row() -> None:
    """The last step of the routing weights' gradients: entry 0 is near, entry 1 is far."""
    sums = torch.randn(2, I, generator=torch.Generator().manual_seed(0))
    dweight = torch.full((2, 1), torch.nan)
    row_TK = torch.tensor([[0], [FAR_ROW]], dtype=torch.int32)
    _add_partials[(1,)](apart(sums[:1], sums[1:], FAR_ROW), row_TK, dweight, 2, N=I, block_entries=16)
    torch.testing.assert_close(dweight[:, 0], sums.sum(dim=1))


@pytest.mark.parametrize("gathered", ["left", "right"])
def test_weight_gradient_of_far_rows_and_tokens(far: FarRows, near: Rows, gathered: Literal["left", "right"]) -> None:
    first_G1, order_G = torch.tensor([FAR_ROW, FAR_ROW + FAR_ROWS]).int(), torch.zeros(1).int()
    found_GLR, expected_GLR = (
        weight_gradient(*sides, OrderedGroups(of.routing.entry_P, first, order_G), 1, gathered, BLOCK)
        for of, first in ((far, first_G1), (near, near.routing.first_G1[1:]))
        for sides in ([of.dy_TH, of.a_PI] if gathered == "left" else [of.a_PI, of.dy_TH],)
    )
    assert expected_GLR.any()
    assert torch.equal(found_GLR, expected_GLR)


def test_weight_gradient_of_a_far_group(near: Rows) -> None:
    groups = OrderedGroups(near.routing.entry_P, near.routing.first_G1, torch.arange(2, dtype=torch.int32))
    far_GLR = sparse(2**32 + H * I, dtype=HALF).as_strided((2, H, I), (2**32, I, 1))
    of_both = [
        weight_gradient(near.dy_TH, near.a_PI, groups, 1, "left", BLOCK, out_GLR)
        for out_GLR in (far_GLR, torch.empty(2, H, I, dtype=HALF))
    ]
    assert torch.equal(*of_both)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_combine(far: FarRows, near: Rows, weighted: bool) -> None:
    """The first and the last token; the last is far, and so is its row."""
    with only_outer_programs():
        out_TH = combine(far.y_PH, far.routing.row_TK, far.weight_TK if weighted else None, HALF)
    expected = combine(near.y_PH, near.routing.row_TK, near.weight_TK if weighted else None, HALF)
    assert torch.equal(out_TH[[0, -1]], expected[[0, -1]])


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
