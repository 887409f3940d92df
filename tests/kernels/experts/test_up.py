"""Up in the interpreter: h against exact sums, a against the activation of that h, one set of bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from kernel_references import activation_reference, route_reference, tile_table_reference, up_reference
from test_grouped_gemm import BLOCK, HALF, OTHER_BLOCKS, assert_close, by_tma, every_dtype
from torch import Tensor

from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.up import up
from moesys.kernels.routing import SortedRouting


class Shape(NamedTuple):
    """T tokens, H hidden, I width, G groups, K choices; what is chosen; and which matrix each group uses."""

    T: int = 21
    H: int = 40
    I: int = 24
    G: int = 4
    K: int = 2
    choices: str = "any"
    matrices: tuple[int, ...] | None = None


EDGES = {
    "nothing a multiple of anything": Shape(T=37, H=51, I=27, G=5, K=3),
    "everything whole tiles": Shape(T=16, H=64, I=32, G=2, K=2),
    "one token": Shape(T=1),
    "no token": Shape(T=0),
    "one choice, fewer rows than a tile": Shape(T=3, K=1),
    "each token to every group": Shape(G=3, K=3),
    "empty groups": Shape(G=7, choices="odd groups"),
    "all to one group": Shape(T=40, K=1, choices="last group"),
    "dropped choices": Shape(choices="some dropped"),
    "all dropped": Shape(choices="all dropped"),
    "replicas": Shape(matrices=(1, 0, 1, 2)),
    "width of one": Shape(I=1),
    "hidden of one": Shape(H=1),
}


class Case(NamedTuple):
    x_TH: Tensor
    gate_up_EUH: Tensor
    routing: SortedRouting
    matrix_G: Tensor
    K: int
    activation: str

    def up(self, block: TileConfig = BLOCK) -> tuple[Tensor, Tensor]:
        tiles = tile_table_reference(self.routing.first_G1, self.routing.entry_P.numel(), block.rows)
        return up(
            self.x_TH,
            self.gate_up_EUH,
            self.routing,
            tiles,
            self.matrix_G,
            self.K,
            self.activation,
            block,
        )

    def rows(self) -> int:
        return int(self.routing.first_G1[-1])


def case(shape: Shape, dtype: torch.dtype, activation: str = "swiglu") -> Case:
    generator = torch.Generator().manual_seed(shape.T)
    T, H, G, K = shape.T, shape.H, shape.G, shape.K
    group_TK = torch.rand(T, G, generator=generator).argsort(dim=1)[:, :K]
    if shape.choices == "odd groups":
        group_TK = group_TK % (G // 2) * 2 + 1
    elif shape.choices == "last group":
        group_TK = torch.full_like(group_TK, G - 1)
    elif shape.choices == "some dropped":
        group_TK = torch.where(torch.rand(T, K, generator=generator) < 0.3, G, group_TK)
        group_TK[0] = -1
    elif shape.choices == "all dropped":
        group_TK = torch.full_like(group_TK, G)
    matrices = shape.matrices or tuple(reversed(range(G)))
    U = shape.I * (2 if GATED[activation] else 1)
    x_TH = torch.randn(T, H, generator=generator).to(dtype)
    gate_up_EUH = (torch.randn(max(matrices) + 1, U, H, generator=generator) / H**0.5).to(dtype)
    matrix_G = torch.tensor(matrices, dtype=torch.int32)
    return Case(x_TH, gate_up_EUH, route_reference(group_TK, G), matrix_G, K, activation)


def check(case: Case, h_PU: Tensor, a_PI: Tensor) -> None:
    rows = case.rows()
    reference = up_reference(
        case.x_TH.double(), case.gate_up_EUH.double(), case.routing, case.matrix_G, case.K, case.activation
    )
    assert h_PU.dtype == a_PI.dtype == case.x_TH.dtype
    assert h_PU.shape == reference[0].shape
    assert a_PI.shape == reference[1].shape
    assert_close(h_PU[:rows], reference[0][:rows])
    # of the rounded h, so that the comparison has one rounding in it
    assert_close(a_PI[:rows], activation_reference(h_PU[:rows].float(), case.activation).double())


@every_dtype
@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
def test_edges(shape: Shape, dtype: torch.dtype) -> None:
    edge = case(shape, dtype)
    check(edge, *edge.up())


@every_dtype
@pytest.mark.parametrize("activation", GATED)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    any_case = case(Shape(), dtype, activation)
    check(any_case, *any_case.up())


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(T=30, I=21),
        EDGES["everything whole tiles"],
        EDGES["replicas"],
        EDGES["no token"],
        EDGES["dropped choices"],
    ],
    ids=["a width no multiple of the tile", "whole tiles", "replicas", "no token", "dropped choices"],
)
@by_tma
def test_operands_by_tma(block: TileConfig, shape: Shape, activation: str, dtype: torch.dtype) -> None:
    some = case(shape, dtype, activation)
    check(some, *some.up(block))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(EDGES["nothing a multiple of anything"], torch.bfloat16), (Shape(), torch.float32)],
    ids=["rows that TMA cannot read", "float32"],
)
@by_tma
def test_what_tma_cannot_read_comes_by_pointers(block: TileConfig, shape: Shape, dtype: torch.dtype) -> None:
    some = case(shape, dtype)
    rows = some.rows()
    for expected, found in zip(some.up(), some.up(block), strict=True):
        assert torch.equal(found[:rows], expected[:rows])


@every_dtype
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_tiles_change_no_bit(activation: str, dtype: torch.dtype) -> None:
    """Nor does a second run."""
    some = case(Shape(T=37, choices="some dropped"), dtype, activation)
    rows = some.rows()
    expected = some.up()
    for block in OTHER_BLOCKS:
        for actual, first in zip(some.up(block), expected, strict=True):
            assert torch.equal(actual[:rows], first[:rows]), block
