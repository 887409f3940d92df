"""Backward through down projection and activation in the interpreter: right, with bits that no tile decides."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from kernel_references import activation_gradient_reference, exact_activation, route_reference, tile_table_reference
from test_grouped_gemm import every_dtype
from torch import Tensor

from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups
from moesys.kernels.routing import SortedRouting

BLOCK = TileConfig(rows=16, columns=32, contraction=16)
# The same bits are promised for all of these.
OTHER_BLOCKS = {
    "the same once more": BLOCK,
    "high and wide tiles": TileConfig(rows=32, columns=64, contraction=16),
    "one program, rasters of one": TileConfig(rows=16, columns=32, contraction=16, raster=1, programs=1),
    "more programs than tiles": TileConfig(rows=64, columns=128, contraction=16, raster=2, programs=99),
}


class Case(NamedTuple):
    groups: list[list[int]]
    matrices: list[int]
    H: int
    I: int


# Each says which edge it is.
CASES = {
    "one token": Case([[1, 0]], [0, 1, 2], 20, 24),
    "one choice": Case([[t % 3] for t in range(20)], [0, 1, 2], 16, 32),
    "every expert chosen": Case([[0, 1, 2]] * 7, [0, 1, 2], 16, 16),
    "odd widths": Case([[t % 2, 2] for t in range(19)], [0, 1, 2], 37, 51),
    "one by one": Case([[0], [1], [0]], [0, 1], 1, 1),
    "a partial sum of one column": Case([[0, 1]] * 3, [0, 1], 16, 33),
    "empty groups, first, between and last": Case([[1, 3]] * 9, [0, 1, 2, 3, 4], 16, 24),
    "all tokens to one group": Case([[2]] * 40, [0, 1, 2], 16, 24),
    "dropped choices": Case([[t % 4 - 1, (t + 2) % 4] for t in range(21)], [0, 1, 2], 16, 24),
    "everything dropped": Case([[-1, 7]] * 5, [0, 1, 2], 16, 24),
    "replicas of a matrix": Case([[t % 2, 2] for t in range(9)], [1, 1, 0], 16, 24),
    "no tokens": Case([], [0, 1], 16, 16),
}


class Operands(NamedTuple):
    dy_TH: Tensor
    down_EHI: Tensor
    h_PU: Tensor
    weight_TK: Tensor
    routing: SortedRouting
    matrix_G: Tensor
    activation: str


def operands(case: Case, dtype: torch.dtype, activation: str = "swiglu") -> Operands:
    """Rows behind the last group, weights of dropped choices and matrices that no group has are NaN."""
    group_TK = torch.tensor(case.groups).reshape(len(case.groups), -1 if case.groups else 2).long()
    (T, K), (H, I) = group_TK.shape, case[2:]
    E = max(case.matrices) + 2
    routing = route_reference(group_TK, len(case.matrices))
    generator = torch.Generator().manual_seed(T * 1000 + H * 10 + I)
    h_PU = torch.randn(T * K, 2 * I if GATED[activation] else I, generator=generator)
    h_PU[int(routing.first_G1[-1]) :] = torch.nan
    down_EHI = torch.randn(E, H, I, generator=generator) / H**0.5
    down_EHI[-1] = torch.nan
    weight_TK = torch.where(routing.row_TK < 0, torch.nan, torch.rand(T, K, generator=generator))
    dy_TH = torch.randn(T, H, generator=generator)
    matrix_G = torch.tensor(case.matrices, dtype=torch.int32)
    return Operands(dy_TH.to(dtype), down_EHI.to(dtype), h_PU.to(dtype), weight_TK, routing, matrix_G, activation)


def gradients(given: Operands, block: TileConfig = BLOCK) -> dict[str, Tensor]:
    """Rows of groups alone."""
    first_G1 = given.routing.first_G1
    tiles = tile_table_reference(first_G1, len(given.routing.entry_P), block.rows)
    *rest, matrix_G, activation = given
    dh_PU, wa_PI, dweight_TK = activation_gradient(*rest, RowGroups(first_G1, tiles, matrix_G), activation, block)
    rows = int(first_G1[-1])
    return {"dh": dh_PU[:rows], "wa": wa_PI[:rows], "dweight": dweight_TK}


def reference(given: Operands) -> dict[str, Tensor]:
    dh_PU, wa_PI, dweight_TK = activation_gradient_reference(*given)
    rows = int(given.routing.first_G1[-1])
    return {"dh": dh_PU[:rows], "wa": wa_PI[:rows], "dweight": dweight_TK}


def float64(given: Operands) -> dict[str, Tensor]:
    """By autograd of the weighted activation through each row's own matrix."""
    first_G1, K = given.routing.first_G1, given.weight_TK.shape[1]
    rows = int(first_G1[-1])
    entry = given.routing.entry_P[:rows].long()
    group = torch.searchsorted(first_G1[1:].contiguous(), torch.arange(rows), right=True)
    matrix = given.down_EHI.double()[given.matrix_G[group].long()]
    h = given.h_PU[:rows].double().requires_grad_()
    weight = given.weight_TK.double().reshape(-1)[entry].requires_grad_()
    wa = weight[:, None] * exact_activation(h, given.activation)
    y = (wa[:, None, :] * matrix).sum(2)
    dh, dweight = torch.autograd.grad(y, (h, weight), given.dy_TH.double()[entry // K])
    dweight_TK = torch.zeros(given.weight_TK.numel(), dtype=torch.float64)
    dweight_TK[entry] = dweight
    return {"dh": dh, "wa": wa.detach(), "dweight": dweight_TK.view(given.weight_TK.shape)}


def assert_right(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, value in expected.items():
        assert found[name].dtype == (torch.float32 if name == "dweight" else dtype)
        assert found[name].shape == value.shape
        # Some roundings of float32 relative to the largest value, and one to dtype: half an ulp of the value.
        tolerance = 1e-6 * max(1.0, float(value.abs().max()) if value.numel() else 1.0)
        if name != "dweight":
            tolerance = tolerance + value.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
        assert ((found[name].double() - value).abs() <= tolerance).all(), name


@every_dtype
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees_with_float64(case: Case, dtype: torch.dtype) -> None:
    given = operands(case, dtype)
    expected, found = float64(given), gradients(given)
    assert_right(found, expected, dtype)
    assert_right(reference(given), expected, dtype)
    assert (found["dweight"][given.routing.row_TK < 0] == 0).all()


@every_dtype
@pytest.mark.parametrize("activation", [name for name in GATED if name != "swiglu"])
def test_every_activation_agrees_with_float64(activation: str, dtype: torch.dtype) -> None:
    given = operands(CASES["a partial sum of one column"], dtype, activation)
    expected = float64(given)
    assert_right(gradients(given), expected, dtype)
    assert_right(reference(given), expected, dtype)


@every_dtype
@pytest.mark.parametrize("other", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_tiles_and_programs_change_no_bit(other: TileConfig, dtype: torch.dtype) -> None:
    given = operands(CASES["odd widths"], dtype)
    expected, found = gradients(given), gradients(given, other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@every_dtype
@pytest.mark.parametrize("name", ["replicas of a matrix", "odd widths", "dropped choices"])
@pytest.mark.parametrize(
    "block",
    [replace(BLOCK, operands="tma"), replace(BLOCK, operands="specialised", warps=4)],
    ids=["tma", "specialised"],
)
def test_operands_by_tma_change_no_bit(block: TileConfig, name: str, dtype: torch.dtype) -> None:
    """Where they cannot be (float32 here, and odd widths), they come by pointers."""
    given = operands(CASES[name], dtype)
    expected, found = gradients(given), gradients(given, block)
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_narrow_tiles_change_the_routing_weights_gradient_alone() -> None:
    """Below 32 columns its partial sums are as wide as a tile, which is another order."""
    given = operands(CASES["odd widths"], torch.bfloat16)
    expected, found = gradients(given), gradients(given, TileConfig(rows=16, columns=16, contraction=16))
    assert torch.equal(found["dh"], expected["dh"])
    assert torch.equal(found["wa"], expected["wa"])
    assert_right(found, float64(given), torch.bfloat16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_that_is_not_finite_stays_alone() -> None:
    """Neither do other tokens see it, nor do columns behind the width make NaN of its infinity."""
    given = operands(CASES["odd widths"], torch.float32)
    given.down_EHI[:-1] = given.down_EHI[:-1].abs() + 0.1
    given.h_PU.abs_().add_(0.1)
    clean = gradients(given)
    given.dy_TH[3, 5] = torch.inf
    found = gradients(given)
    assert (found["dweight"][3] == torch.inf).all()
    others = torch.arange(len(given.dy_TH)) != 3
    assert torch.equal(found["dweight"][others], clean["dweight"][others])
    rows = torch.ones(len(found["dh"]), dtype=torch.bool)
    rows[given.routing.row_TK[3].long()] = False
    assert torch.equal(found["dh"][rows], clean["dh"][rows])
    assert torch.equal(found["wa"], clean["wa"])
