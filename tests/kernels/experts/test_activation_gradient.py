"""Backward through down projection and activation in the interpreter: right, with bits that no tile decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_rows import EDGES, Rows, every_dtype, rows_of
from kernel_references import activation_gradient_reference, exact_activation
from torch import Tensor

from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.routing import SortedRouting

BLOCK = TileConfig(rows=16, columns=32, contraction=16)
# The same bits are promised for all of these.
OTHER_BLOCKS = {
    "the same once more": BLOCK,
    "high and wide tiles": TileConfig(rows=32, columns=64, contraction=16),
    "one program, rasters of one": TileConfig(rows=16, columns=32, contraction=16, raster=1, programs=1),
    "more programs than tiles": TileConfig(rows=64, columns=128, contraction=16, raster=2, programs=99),
}


def operands(given: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, SortedRouting]:
    return given.dy_TH, given.down_EHI, given.h_PU, given.weight_TK, given.routing


def gradients(given: Rows, block: TileConfig = BLOCK) -> dict[str, Tensor]:
    """Rows of groups alone."""
    dh_PU, wa_PI, dweight_TK = activation_gradient(*operands(given), given.groups(block), given.activation, block)
    return {"dh": dh_PU[: given.num_rows], "wa": wa_PI[: given.num_rows], "dweight": dweight_TK}


def reference(given: Rows) -> dict[str, Tensor]:
    dh_PU, wa_PI, dweight_TK = activation_gradient_reference(*operands(given), given.matrix_G, given.activation)
    return {"dh": dh_PU[: given.num_rows], "wa": wa_PI[: given.num_rows], "dweight": dweight_TK}


def float64(given: Rows) -> dict[str, Tensor]:
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
@pytest.mark.parametrize("edge", EDGES)
def test_agrees_with_float64(edge: str, dtype: torch.dtype) -> None:
    given = rows_of(edge, dtype)
    expected, found = float64(given), gradients(given)
    assert_right(found, expected, dtype)
    assert_right(reference(given), expected, dtype)
    assert (found["dweight"][given.routing.row_TK < 0] == 0).all()


@every_dtype
@pytest.mark.parametrize("activation", [name for name in GATED if name != "swiglu"])
def test_every_activation_agrees_with_float64(activation: str, dtype: torch.dtype) -> None:
    given = rows_of("a partial sum of one column", dtype, activation)
    expected = float64(given)
    assert_right(gradients(given), expected, dtype)
    assert_right(reference(given), expected, dtype)


@every_dtype
@pytest.mark.parametrize("other", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_tiles_and_programs_change_no_bit(other: TileConfig, dtype: torch.dtype) -> None:
    given = rows_of("odd widths", dtype)
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
    given = rows_of(name, dtype)
    expected, found = gradients(given), gradients(given, block)
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_narrow_tiles_change_the_routing_weights_gradient_alone() -> None:
    """Below 32 columns its partial sums are as wide as a tile, which is another order."""
    given = rows_of("odd widths", torch.bfloat16)
    expected, found = gradients(given), gradients(given, TileConfig(rows=16, columns=16, contraction=16))
    assert torch.equal(found["dh"], expected["dh"])
    assert torch.equal(found["wa"], expected["wa"])
    assert_right(found, float64(given), torch.bfloat16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_that_is_not_finite_stays_alone() -> None:
    """Neither do other tokens see it, nor do columns behind the width make NaN of its infinity."""
    given = rows_of("odd widths", torch.float32)
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
