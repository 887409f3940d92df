"""Input gradient in the interpreter: against exact sums, and one set of bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moesys.kernels.input_gradient import input_gradient, input_gradient_reference
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
    U: int = 40
    H: int = 24
    matrices: tuple[int, ...] | None = None


EDGES = {
    "nothing a multiple of anything": Shape((37, 5, 19), U=51, H=27),
    "everything whole tiles": Shape((32, 16), U=64, H=32),
    "one row": Shape((1,)),
    "no row": Shape((0, 0)),
    "no row but dropped ones": Shape((0, 0), dropped=5),
    "groups smaller than a tile": Shape((1, 2, 3, 1)),
    "empty groups": Shape((0, 20, 0, 0, 3, 0)),
    "all in one group": Shape((0, 0, 45)),
    "dropped rows": Shape(dropped=7),
    "replicas": Shape(matrices=(1, 0, 1)),
    "width of one": Shape(U=1),
    "hidden of one": Shape(H=1),
}


class Case(NamedTuple):
    dh_PU: Tensor
    gate_up_EUH: Tensor
    first_G1: Tensor
    matrix_G: Tensor

    def input_gradient(self, block: Block = BLOCK, descriptor: bool = False) -> Tensor:
        tiles = tile_table_reference(self.first_G1, len(self.dh_PU), block.rows)
        return input_gradient(
            self.dh_PU, self.gate_up_EUH, self.first_G1, tiles, self.matrix_G, block, descriptor=descriptor
        )

    def rows(self) -> int:
        return int(self.first_G1[-1])


def case(shape: Shape, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(shape.U)
    matrices = shape.matrices or tuple(reversed(range(len(shape.counts))))
    P = sum(shape.counts) + shape.dropped
    dh_PU = torch.randn(P, shape.U, generator=generator).to(dtype)
    gate_up_EUH = torch.randn(max(matrices) + 1, shape.U, shape.H, generator=generator).to(dtype)
    first_G1 = torch.tensor((0, *shape.counts)).cumsum(0).int()
    return Case(dh_PU, gate_up_EUH, first_G1, torch.tensor(matrices, dtype=torch.int32))


def check(case: Case, dx_PH: Tensor) -> None:
    """Within ``TOLERANCE``; NaN, with which outputs are born, is not."""
    rows = case.rows()
    exact = input_gradient_reference(case.dh_PU.double(), case.gate_up_EUH.double(), case.first_G1, case.matrix_G)
    assert dx_PH.dtype == case.dh_PU.dtype
    assert dx_PH.shape == exact.shape
    if rows == 0:
        return
    error, size = (dx_PH - exact)[:rows].abs(), exact[:rows].abs()
    scale = size.max() if dx_PH.dtype == torch.float32 else size.amax(dim=1, keepdim=True)
    assert (error <= TOLERANCE[dx_PH.dtype] * scale).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
def test_edges(shape: Shape, dtype: torch.dtype) -> None:
    edge = case(shape, dtype)
    check(edge, edge.input_gradient())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [Shape(H=40), EDGES["everything whole tiles"], EDGES["replicas"], EDGES["no row"], EDGES["dropped rows"]],
    ids=["columns no multiple of the tile", "whole tiles", "replicas", "no row", "dropped rows"],
)
def test_operands_by_descriptor(shape: Shape, dtype: torch.dtype) -> None:
    some = case(shape, dtype)
    check(some, some.input_gradient(descriptor=True))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(EDGES["nothing a multiple of anything"], torch.bfloat16), (Shape(), torch.float32)],
    ids=["rows that TMA cannot read", "float32"],
)
def test_descriptor_that_cannot_be_is_none(shape: Shape, dtype: torch.dtype) -> None:
    some = case(shape, dtype)
    rows = some.rows()
    assert torch.equal(some.input_gradient()[:rows], some.input_gradient(descriptor=True)[:rows])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tiles_change_no_bit(dtype: torch.dtype) -> None:
    """Nor does a second run."""
    some = case(Shape((37, 0, 20), U=70, H=50), dtype)
    rows = some.rows()
    expected = some.input_gradient()
    for block in (
        BLOCK,
        Block(rows=32, columns=16, contraction=32, raster=1, programs=1),
        Block(rows=16, columns=32, contraction=32, raster=8, programs=7),
        Block(rows=64, columns=64, contraction=32, raster=3, programs=2, stages=5, warps=4),
    ):
        assert torch.equal(some.input_gradient(block)[:rows], expected[:rows]), block


def test_tiles_of_another_size_are_refused() -> None:
    some = case(Shape(), torch.float32)
    tiles = tile_table_reference(some.first_G1, len(some.dh_PU), 32)
    with pytest.raises(ValueError, match="tiles of 32 rows for blocks of 16"):
        input_gradient(some.dh_PU, some.gate_up_EUH, some.first_G1, tiles, some.matrix_G, BLOCK)
