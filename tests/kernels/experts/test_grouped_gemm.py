"""The grouped GEMM in the interpreter, either way: against exact sums, and one set of bits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from kernel_references import grouped_gemm_reference, tile_table_reference
from torch import Tensor

from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import TileConfig

HALF = pytest.param(torch.float16, marks=pytest.mark.slow)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, HALF, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
# Relative to the largest value of all; and to that of the row: the last place of the dtype, which covers half a place
# of rounding and the roundings of the sum.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
BLOCK = TileConfig(rows=16, columns=16, contraction=32, raster=2)
OTHER_BLOCKS = (
    BLOCK,
    TileConfig(rows=32, columns=16, contraction=32, raster=1, programs=1),
    TileConfig(rows=16, columns=32, contraction=32, raster=8, programs=7),
    TileConfig(rows=64, columns=64, contraction=32, raster=3, programs=2, stages=5, warps=4),
)
BY_TMA = {"tma": replace(BLOCK, operands="tma"), "specialised": replace(BLOCK, operands="specialised", warps=4)}
by_tma = pytest.mark.parametrize("block", BY_TMA.values(), ids=BY_TMA)
either_way = pytest.mark.parametrize("transposed", [False, True], ids=["as it lies", "transposed"])


class Shape(NamedTuple):
    """Rows of each group, rows that were dropped behind them, widths, and which matrix each group uses."""

    counts: tuple[int, ...] = (17, 9, 30)
    dropped: int = 0
    L: int = 40
    N: int = 24
    matrices: tuple[int, ...] | None = None


EDGES = {
    "nothing a multiple of anything": Shape((37, 5, 19), L=51, N=27),
    "everything whole tiles": Shape((32, 16), L=64, N=32),
    "one row": Shape((1,)),
    "no row": Shape((0, 0)),
    "no row but dropped ones": Shape((0, 0), dropped=5),
    "groups smaller than a tile": Shape((1, 2, 3, 1)),
    "empty groups": Shape((0, 20, 0, 0, 3, 0)),
    "all in one group": Shape((0, 0, 45)),
    "dropped rows": Shape(dropped=7),
    "replicas": Shape(matrices=(1, 0, 1)),
    "rows of one": Shape(L=1),
    "result of one": Shape(N=1),
}


class Case(NamedTuple):
    rows_PL: Tensor
    matrices: Tensor
    first_G1: Tensor
    matrix_G: Tensor
    transposed: bool

    def multiply(self, block: TileConfig = BLOCK) -> Tensor:
        tiles = tile_table_reference(self.first_G1, len(self.rows_PL), block.rows)
        operands = (self.rows_PL, self.matrices, self.first_G1, tiles, self.matrix_G, block)
        return grouped_gemm(*operands, transposed=self.transposed)

    def rows(self) -> int:
        return int(self.first_G1[-1])


def case(shape: Shape, dtype: torch.dtype, transposed: bool) -> Case:
    generator = torch.Generator().manual_seed(shape.L)
    matrices = shape.matrices or tuple(reversed(range(len(shape.counts))))
    P = sum(shape.counts) + shape.dropped
    rows_PL = torch.randn(P, shape.L, generator=generator).to(dtype)
    widths = (shape.N, shape.L) if transposed else (shape.L, shape.N)
    weights = torch.randn(max(matrices) + 1, *widths, generator=generator).to(dtype)
    first_G1 = torch.tensor((0, *shape.counts)).cumsum(0).int()
    return Case(rows_PL, weights, first_G1, torch.tensor(matrices, dtype=torch.int32), transposed)


def assert_close(actual: Tensor, exact: Tensor) -> None:
    """Within ``TOLERANCE``; NaN, with which outputs are born, is not."""
    if exact.numel() == 0:
        return
    error, size = (actual.double() - exact).abs(), exact.abs()
    scale = size.max() if actual.dtype == torch.float32 else size.amax(dim=1, keepdim=True)
    assert (error <= TOLERANCE[actual.dtype] * scale).all()


def check(case: Case, out_PN: Tensor) -> None:
    rows = case.rows()
    operands = (case.rows_PL.double(), case.matrices.double(), case.first_G1, case.matrix_G)
    exact = grouped_gemm_reference(*operands, transposed=case.transposed)
    assert out_PN.dtype == case.rows_PL.dtype
    assert out_PN.shape == exact.shape
    assert_close(out_PN[:rows], exact[:rows])


@either_way
@every_dtype
@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
def test_edges(shape: Shape, dtype: torch.dtype, transposed: bool) -> None:
    edge = case(shape, dtype, transposed)
    check(edge, edge.multiply())


@either_way
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [Shape(N=40), EDGES["everything whole tiles"], EDGES["replicas"], EDGES["no row"], EDGES["dropped rows"]],
    ids=["columns no multiple of the tile", "whole tiles", "replicas", "no row", "dropped rows"],
)
@by_tma
def test_operands_by_tma(block: TileConfig, shape: Shape, dtype: torch.dtype, transposed: bool) -> None:
    some = case(shape, dtype, transposed)
    check(some, some.multiply(block))


@either_way
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(EDGES["nothing a multiple of anything"], torch.bfloat16), (Shape(), torch.float32)],
    ids=["rows that TMA cannot read", "float32"],
)
@by_tma
def test_what_tma_cannot_read_comes_by_pointers(
    block: TileConfig, shape: Shape, dtype: torch.dtype, transposed: bool
) -> None:
    some = case(shape, dtype, transposed)
    rows = some.rows()
    assert torch.equal(some.multiply()[:rows], some.multiply(block)[:rows])


@either_way
@every_dtype
def test_tiles_change_no_bit(dtype: torch.dtype, transposed: bool) -> None:
    """Nor does a second run."""
    some = case(Shape((37, 0, 20), L=70, N=50), dtype, transposed)
    rows = some.rows()
    expected = some.multiply()
    for block in OTHER_BLOCKS:
        assert torch.equal(some.multiply(block)[:rows], expected[:rows]), block
