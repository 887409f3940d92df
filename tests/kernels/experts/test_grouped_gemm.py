"""The grouped GEMM in the interpreter, either way: against exact sums, and one set of bits."""

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
from kernel_references import grouped_gemm_reference
from torch import Tensor

from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import TileConfig

either_way = pytest.mark.parametrize("transposed", [False, True], ids=["as it lies", "transposed"])


def factors(given: Rows, transposed: bool) -> tuple[Tensor, Tensor]:
    return (given.a_PI, given.down_EHI) if transposed else (given.h_PU, given.gate_up_EUH)


def product(given: Rows, transposed: bool, block: TileConfig = BLOCK) -> Tensor:
    """Rows of groups alone."""
    out_PN = grouped_gemm(*factors(given, transposed), *given.groups(block), block, transposed=transposed)
    assert len(out_PN) == len(given.h_PU)
    return out_PN[: given.num_rows]


def check(given: Rows, transposed: bool, block: TileConfig = BLOCK) -> None:
    operands = (*(each.double() for each in factors(given, transposed)), given.routing.first_G1, given.matrix_G)
    exact = grouped_gemm_reference(*operands, transposed=transposed)[: given.num_rows]
    assert_close(product(given, transposed, block), exact, given.x_TH.dtype)


@either_way
@every_dtype
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, dtype: torch.dtype, transposed: bool) -> None:
    check(rows_of(edge, dtype), transposed)


@either_way
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=["float16", "bfloat16"])
@read_by_tma
@by_tma
def test_operands_by_tma(block: TileConfig, edge: str, dtype: torch.dtype, transposed: bool) -> None:
    check(rows_of(edge, dtype), transposed, block)


@either_way
@not_read_by_tma
@by_tma
def test_what_tma_cannot_read_comes_by_pointers(
    block: TileConfig, edge: str, dtype: torch.dtype, transposed: bool
) -> None:
    given = rows_of(edge, dtype)
    assert torch.equal(product(given, transposed), product(given, transposed, block))


@either_way
@every_dtype
def test_tiles_change_no_bit(dtype: torch.dtype, transposed: bool) -> None:
    """Nor does a second run."""
    given = rows_of("odd widths", dtype)
    expected = product(given, transposed)
    for block in OTHER_BLOCKS:
        assert torch.equal(product(given, transposed, block), expected), block
