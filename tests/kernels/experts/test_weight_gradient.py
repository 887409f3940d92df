"""Gradients of experts' matrices in the interpreter: right, zero where nothing is, with bits that no tile decides."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pytest
import torch
from expert_rows import EDGES, HALF, every_dtype, rows_of
from kernel_references import groups_by_size_reference, route_reference, weight_gradient_reference
from torch import Tensor

from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient

Side = Literal["left", "right"]
BLOCK = TileConfig(rows=16, columns=32, contraction=16)
# The same bits are promised for all of these.
OTHER_BLOCKS = {
    "the same once more": BLOCK,
    "wide tiles": TileConfig(rows=32, columns=64, contraction=16),
    "narrow tiles": TileConfig(rows=16, columns=16, contraction=16, raster=2),
    "one program, rasters of one": TileConfig(rows=16, columns=32, contraction=16, raster=1, programs=1),
    "more programs than tiles": TileConfig(rows=32, columns=16, contraction=16, programs=99),
}


class Operands(NamedTuple):
    left: Tensor
    right: Tensor
    groups: OrderedGroups
    top_k: int
    gathered: Side


def operands(edge: str, dtype: torch.dtype, gathered: Side) -> Operands:
    given = rows_of(edge, dtype)
    first_G1 = given.routing.first_G1
    groups = OrderedGroups(given.routing.entry_P, first_G1, groups_by_size_reference(first_G1))
    sides = (given.dy_TH, given.a_PI) if gathered == "left" else (given.h_PU, given.x_TH)
    return Operands(*sides, groups, given.top_k, gathered)


def without_order(given: Operands) -> tuple:
    """What the reference takes."""
    return (*given[:2], *given.groups[:2], *given[3:])


def exact(given: Operands) -> tuple[Tensor, Tensor]:
    """(sums, sums of magnitudes) in float64, by a loop over rows."""
    G, L, R = len(given.groups.first_G1) - 1, given.left.shape[1], given.right.shape[1]
    out_GLR, magnitude_GLR = torch.zeros(2, G, L, R, dtype=torch.float64)
    first = given.groups.first_G1.tolist()
    for group in range(G):
        for row in range(first[group], first[group + 1]):
            token = int(given.groups.entry_P[row]) // given.top_k
            left_L = given.left[token if given.gathered == "left" else row].double()
            right_R = given.right[token if given.gathered == "right" else row].double()
            out_GLR[group] += left_L[:, None] * right_R
            magnitude_GLR[group] += (left_L[:, None] * right_R).abs()
    return out_GLR, magnitude_GLR


@pytest.mark.parametrize("gathered", ["left", "right"])
@every_dtype
@pytest.mark.parametrize("edge", EDGES)
def test_agrees_with_float64(edge: str, dtype: torch.dtype, gathered: Side) -> None:
    given = operands(edge, dtype, gathered)
    expected_GLR, magnitude_GLR = exact(given)
    out_GLR = weight_gradient(*given, BLOCK)
    assert out_GLR.dtype == torch.float32
    assert out_GLR.shape == expected_GLR.shape
    # Products of 16 bits are exact in float32, so only float32's own roundings of a few rows are left.
    largest = magnitude_GLR.amax(dim=(1, 2), keepdim=True)
    for found_GLR in (out_GLR, weight_gradient_reference(*without_order(given))):
        assert ((found_GLR.double() - expected_GLR).abs() <= 1e-6 * largest).all()
    empty_G = given.groups.first_G1[1:] == given.groups.first_G1[:-1]
    assert (out_GLR[empty_G] == 0).all()


@every_dtype
@pytest.mark.parametrize("other", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_tiles_and_programs_change_no_bit(other: TileConfig, dtype: torch.dtype) -> None:
    for gathered in ("left", "right"):
        given = operands("odd widths", dtype, gathered)
        assert torch.equal(weight_gradient(*given, other), weight_gradient(*given, BLOCK))


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 0, 4, 1, 3)], ids=["from behind", "mixed"])
def test_the_order_of_groups_changes_no_bit(order: tuple[int, ...]) -> None:
    given = operands("empty groups, first, between and last", torch.float32, "left")
    other = given._replace(groups=given.groups._replace(order_G=torch.tensor(order, dtype=torch.int32)))
    assert torch.equal(weight_gradient(*other, BLOCK), weight_gradient(*given, BLOCK))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_result_in_16_bits_is_the_float32_sum_rounded_once(dtype: torch.dtype) -> None:
    given = operands("dropped choices", dtype, "right")
    in_float32 = weight_gradient(*given, BLOCK)
    assert torch.equal(weight_gradient(*given, BLOCK, torch.empty_like(in_float32, dtype=dtype)), in_float32.to(dtype))


@pytest.mark.parametrize(("order", "left_over"), [((0, 1, 2), 0.0), ((1, 0, 2), 0.0), ((0, 2, 1), 1.0)])
def test_steps_are_summed_in_order(order: tuple[int, ...], left_over: float) -> None:
    """Steps of rows that hold a large, a small and a minus large value: what is left depends on the order."""
    rows = 3 * BLOCK.contraction
    left_P1 = torch.zeros(rows, 1)
    for step, value in zip(order, (2.0**24, 1.0, -(2.0**24)), strict=True):
        left_P1[step * BLOCK.contraction] = value
    routing = route_reference(torch.zeros(rows, 1, dtype=torch.int64), 1)
    groups = OrderedGroups(routing.entry_P, routing.first_G1, torch.zeros(1).int())
    given = Operands(left_P1, torch.ones(rows, 1), groups, 1, "right")
    assert weight_gradient(*given, BLOCK).item() == left_over
