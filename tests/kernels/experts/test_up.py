"""Up in the interpreter: h against exact sums, a against the activation of that h, one set of bits."""

from __future__ import annotations

import pytest
import torch
from expert_rows import (
    BLOCK,
    EDGES,
    HALF,
    OTHER_BLOCKS,
    Rows,
    assert_close,
    by_tma,
    every_dtype,
    not_read_by_tma,
    read_by_tma,
    rows_of,
)
from kernel_references import activation_reference, up_reference
from torch import Tensor

from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.up import up


def results(given: Rows, block: TileConfig = BLOCK) -> tuple[Tensor, Tensor]:
    """(h, a) of rows of groups alone."""
    _, tiles, matrix_G = given.groups(block)
    operands = (given.x_TH, given.gate_up_EUH, given.routing, tiles, matrix_G, given.top_k)
    h_PU, a_PI = up(*operands, given.activation, block)
    assert (h_PU.shape, a_PI.shape) == (given.h_PU.shape, given.a_PI.shape)
    return h_PU[: given.num_rows], a_PI[: given.num_rows]


def check(given: Rows, block: TileConfig = BLOCK) -> None:
    h_PU, a_PI = results(given, block)
    operands = (given.x_TH.double(), given.gate_up_EUH.double(), given.routing, given.matrix_G, given.top_k)
    assert_close(h_PU, up_reference(*operands, given.activation)[0][: given.num_rows], given.x_TH.dtype)
    # of the rounded h, so that the comparison has one rounding in it
    assert_close(a_PI, activation_reference(h_PU.float(), given.activation).double(), given.x_TH.dtype)


@every_dtype
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, dtype: torch.dtype) -> None:
    check(rows_of(edge, dtype))


@every_dtype
@pytest.mark.parametrize("activation", GATED)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    check(rows_of("odd widths", dtype, activation))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@read_by_tma
@by_tma
def test_operands_by_tma(block: TileConfig, edge: str, activation: str, dtype: torch.dtype) -> None:
    check(rows_of(edge, dtype, activation), block)


@not_read_by_tma
@by_tma
def test_what_tma_cannot_read_comes_by_pointers(block: TileConfig, edge: str, dtype: torch.dtype) -> None:
    given = rows_of(edge, dtype)
    assert all(map(torch.equal, results(given), results(given, block)))


@every_dtype
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_tiles_change_no_bit(activation: str, dtype: torch.dtype) -> None:
    """Nor does a second run."""
    given = rows_of("dropped choices", dtype, activation)
    expected = results(given)
    for block in OTHER_BLOCKS:
        assert all(map(torch.equal, results(given, block), expected)), block
