"""Down in the interpreter: against exact sums, and one set of bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moesys.kernels.down import down, down_reference
from moesys.kernels.tiles import Block, tile_table_reference

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Relative to the largest value of all; and to that of the row: the last place of the dtype, which covers half a place
# of rounding and the roundings of the sum.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
BLOCK = Block(rows=16, columns=16, contraction=32, raster=2)


class Shape(NamedTuple):
    """Rows of each group, rows that were dropped behind them, widths, and which matrix each group uses."""

    counts: tuple[int, ...] = (17, 9, 30)
    dropped: int = 0
    I: int = 40
    H: int = 24
    matrices: tuple[int, ...] | None = None


EDGES = {
    "nothing a multiple of anything": Shape((37, 5, 19), I=51, H=27),
    "everything whole tiles": Shape((32, 16), I=64, H=32),
    "one row": Shape((1,)),
    "no row": Shape((0, 0)),
    "no row but dropped ones": Shape((0, 0), dropped=5),
    "groups smaller than a tile": Shape((1, 2, 3, 1)),
    "empty groups": Shape((0, 20, 0, 0, 3, 0)),
    "all in one group": Shape((0, 0, 45)),
    "dropped rows": Shape(dropped=7),
    "replicas": Shape(matrices=(1, 0, 1)),
    "width of one": Shape(I=1),
    "hidden of one": Shape(H=1),
}


class Case(NamedTuple):
    a_PI: Tensor
    down_EHI: Tensor
    first_G1: Tensor
    matrix_G: Tensor

    def down(self, block: Block = BLOCK, descriptor: bool = False) -> Tensor:
        tiles = tile_table_reference(self.first_G1, len(self.a_PI), block.rows)
        return down(self.a_PI, self.down_EHI, self.first_G1, tiles, self.matrix_G, block, descriptor=descriptor)

    def rows(self) -> int:
        return int(self.first_G1[-1])


def case(shape: Shape, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(shape.I)
    matrices = shape.matrices or tuple(reversed(range(len(shape.counts))))
    P = sum(shape.counts) + shape.dropped
    a_PI = torch.randn(P, shape.I, generator=generator).to(dtype)
    down_EHI = torch.randn(max(matrices) + 1, shape.H, shape.I, generator=generator).to(dtype)
    first_G1 = torch.tensor((0, *shape.counts)).cumsum(0).int()
    return Case(a_PI, down_EHI, first_G1, torch.tensor(matrices, dtype=torch.int32))


def check(case: Case, y_PH: Tensor) -> None:
    """Within ``TOLERANCE``; NaN, with which outputs are born, is not."""
    rows = case.rows()
    exact = down_reference(case.a_PI.double(), case.down_EHI.double(), case.first_G1, case.matrix_G)
    assert y_PH.dtype == case.a_PI.dtype
    assert y_PH.shape == exact.shape
    if rows == 0:
        return
    error, size = (y_PH - exact)[:rows].abs(), exact[:rows].abs()
    scale = size.max() if y_PH.dtype == torch.float32 else size.amax(dim=1, keepdim=True)
    assert (error <= TOLERANCE[y_PH.dtype] * scale).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
def test_edges(shape: Shape, dtype: torch.dtype) -> None:
    edge = case(shape, dtype)
    check(edge, edge.down())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [Shape(H=21), EDGES["everything whole tiles"], EDGES["replicas"], EDGES["no row"], EDGES["dropped rows"]],
    ids=["columns no multiple of the tile", "whole tiles", "replicas", "no row", "dropped rows"],
)
def test_operands_by_descriptor(shape: Shape, dtype: torch.dtype) -> None:
    some = case(shape, dtype)
    check(some, some.down(descriptor=True))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(EDGES["nothing a multiple of anything"], torch.bfloat16), (Shape(), torch.float32)],
    ids=["rows that TMA cannot read", "float32"],
)
def test_descriptor_that_cannot_be_is_none(shape: Shape, dtype: torch.dtype) -> None:
    some = case(shape, dtype)
    rows = some.rows()
    assert torch.equal(some.down()[:rows], some.down(descriptor=True)[:rows])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tiles_change_no_bit(dtype: torch.dtype) -> None:
    """Nor does a second run."""
    some = case(Shape((37, 0, 20), I=70, H=50), dtype)
    rows = some.rows()
    expected = some.down()
    for block in (
        BLOCK,
        Block(rows=32, columns=16, contraction=32, raster=1, programs=1),
        Block(rows=16, columns=32, contraction=32, raster=8, programs=7),
        Block(rows=64, columns=64, contraction=32, raster=3, programs=2, stages=5, warps=4),
    ):
        assert torch.equal(some.down(block)[:rows], expected[:rows]), block


def test_tiles_of_another_size_are_refused() -> None:
    some = case(Shape(), torch.float32)
    tiles = tile_table_reference(some.first_G1, len(some.a_PI), 32)
    with pytest.raises(ValueError, match="tiles of 32 rows for blocks of 16"):
        down(some.a_PI, some.down_EHI, some.first_G1, tiles, some.matrix_G, BLOCK)
