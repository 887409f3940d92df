"""Rows of experts at every edge, and what each op makes of them: by kernels, and in float64 by its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import pytest
import torch
from kernel_references import (
    exact_activation,
    groups_by_size_reference,
    route_reference,
    tile_table_reference,
)
from torch import Tensor
from torch.nn.functional import one_hot

from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient
from moesys.kernels.routing import SortedRouting

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = TileConfig(rows=16, columns=32, contraction=16, warps=4, raster=2)


def in_turn(name: str, values: Iterable[str]) -> pytest.MarkDecorator:
    """Gives ``name`` and ``dtype``: each value in float32 or bfloat16 in turn, and in slow tests in all dtypes."""
    cases = [
        pytest.param(value, dtype, marks=() if place == number % 2 else pytest.mark.slow)
        for number, value in enumerate(values)
        for place, dtype in enumerate(DTYPES)
    ]
    return pytest.mark.parametrize((name, "dtype"), cases, ids=str)


class Edge(NamedTuple):
    """``groups``: those that the choices of each token name; what names none of ``num_groups`` is dropped."""

    groups: list[list[int]]
    num_groups: int = 3
    H: int = 16
    I: int = 24


EDGES = {
    "one token": Edge([[1, 0]], H=20),
    "one choice": Edge([[t % 3] for t in range(20)], I=32),
    "fewer rows than a tile": Edge([[0], [2], [0]]),
    "every expert chosen": Edge([[0, 1, 2]] * 7),
    "odd widths": Edge([[t % 2, 2] for t in range(19)], H=37, I=51),
    "one by one": Edge([[0], [1], [0]], H=1, I=1),
    "a partial sum of one column": Edge([[0, 1]] * 3, I=33),
    "empty groups, first, between and last": Edge([[1, 3]] * 9, 5),
    "all tokens to one group": Edge([[2]] * 50),
    "dropped choices": Edge([[t % 4 - 1, (t + 2) % 4] for t in range(21)]),
    "everything dropped": Edge([[-1, 7]] * 5, H=20),
    "whole tiles": Edge([[t // 16] for t in range(48)], H=64, I=32),
    "no tokens": Edge([]),
}


class Rows(NamedTuple):
    """Rows behind the last group's, weights of dropped choices and matrices that no group has are NaN."""

    x_TH: Tensor
    dy_TH: Tensor
    weight_TK: Tensor
    h_PU: Tensor
    a_PI: Tensor
    y_PH: Tensor
    gate_up_EUH: Tensor
    down_EHI: Tensor
    routing: SortedRouting
    activation: str

    @property
    def top_k(self) -> int:
        return self.weight_TK.shape[1]

    @property
    def num_rows(self) -> int:
        return int(self.routing.first_G1[-1])

    def groups(self, block: TileConfig) -> RowGroups:
        tiles = tile_table_reference(self.routing.first_G1, len(self.routing.entry_P), block.rows)
        return RowGroups(self.routing.first_G1, tiles)


def rows_of(edge: str | Edge, dtype: torch.dtype, activation: str = "swiglu") -> Rows:
    groups, num_groups, H, I = EDGES[edge] if isinstance(edge, str) else edge
    group_TK = torch.tensor(groups).reshape(len(groups), -1 if groups else 2).long()
    T, K = group_TK.shape
    E, U = num_groups + 1, 2 * I if GATED[activation] else I
    routing = route_reference(group_TK, num_groups)
    generator = torch.Generator().manual_seed(T * 1000 + H * 10 + I)
    x_TH, dy_TH = (torch.randn(T, H, generator=generator).to(dtype) for _ in range(2))
    h_PU, a_PI, y_PH = (torch.randn(T * K, width, generator=generator).to(dtype) for width in (U, I, H))
    gate_up, down = (torch.randn(E, *size, generator=generator) / H**0.5 for size in ((U, H), (H, I)))
    for rows in (h_PU, a_PI, y_PH):
        rows[int(routing.first_G1[-1]) :] = torch.nan
    gate_up[-1] = down[-1] = torch.nan
    weight_TK = torch.where(routing.row_TK < 0, torch.nan, torch.rand(T, K, generator=generator))
    experts = (gate_up.to(dtype), down.to(dtype))
    return Rows(x_TH, dy_TH, weight_TK, h_PU, a_PI, y_PH, *experts, routing, activation)


Found = dict[str, Tensor]
# The right values, and the size of what is added up for them, of which float32 loses a part.
Exact = dict[str, tuple[Tensor, Tensor]]
Side = Literal["left", "right"]


class Op(NamedTuple):
    found: Callable[[Rows, TileConfig], Found]
    exact: Callable[[Rows, Found], Exact]


def places(given: Rows) -> tuple[Tensor, Tensor]:
    """The choice and the group of each row."""
    group_P = torch.searchsorted(given.routing.first_G1[1:].contiguous(), torch.arange(given.num_rows), right=True)
    return given.routing.entry_P[: given.num_rows].long(), group_P


def exact_product(given: Rows, rows_PL: Tensor, matrices_ENL: Tensor) -> tuple[Tensor, Tensor]:
    _, group_P = places(given)
    terms_PNL = rows_PL.double()[:, None] * matrices_ENL.double()[group_P]
    return terms_PNL.sum(2), terms_PNL.abs().sum(2).amax(1, keepdim=True)


def up_of(given: Rows, block: TileConfig) -> Found:
    operands = (given.x_TH, given.gate_up_EUH, given.routing, given.groups(block).tiles, given.top_k)
    return dict(zip(("h", "a"), up(*operands, given.activation, block), strict=True))


def exact_up(given: Rows, found: Found) -> Exact:
    entry_P, _ = places(given)
    # Of the rounded h, so that the comparison has one rounding in it.
    a_PI = exact_activation(found["h"].double(), given.activation)
    h = exact_product(given, given.x_TH[entry_P // given.top_k], given.gate_up_EUH)
    return {"h": h, "a": (a_PI, a_PI.abs().amax(1, keepdim=True).clamp_min(1))}


def product_of(transposed: bool) -> Op:
    def factors(given: Rows) -> tuple[Tensor, Tensor]:
        return (given.a_PI, given.down_EHI) if transposed else (given.h_PU, given.gate_up_EUH)

    def found(given: Rows, block: TileConfig) -> Found:
        return {"y": grouped_gemm(*factors(given), *given.groups(block), block, transposed=transposed)}

    def exact(given: Rows, _: Found) -> Exact:
        rows_PL, matrices = factors(given)
        return {"y": exact_product(given, rows_PL[: given.num_rows], matrices if transposed else matrices.mT)}

    return Op(found, exact)


def activation_gradient_of(given: Rows, block: TileConfig) -> Found:
    operands = (given.dy_TH, given.down_EHI, given.h_PU, given.weight_TK, given.routing)
    results = activation_gradient(*operands, given.groups(block), given.activation, block)
    return dict(zip(("dh", "wa", "dweight"), results, strict=True))


def exact_activation_gradient(given: Rows, _: Found) -> Exact:
    """By autograd of the weighted activation through each row's own matrix."""
    entry_P, group_P = places(given)
    h = given.h_PU[: given.num_rows].double().requires_grad_()
    weight = given.weight_TK.double().reshape(-1)[entry_P].requires_grad_()
    wa = weight[:, None] * exact_activation(h, given.activation)
    y = (wa[:, None, :] * given.down_EHI.double()[group_P]).sum(2)
    dh, dweight_P = torch.autograd.grad(y, (h, weight), given.dy_TH.double()[entry_P // given.top_k])
    dweight_TK = torch.zeros(given.weight_TK.numel(), dtype=torch.float64)
    dweight_TK[entry_P] = dweight_P
    values = {"dh": dh, "wa": wa.detach(), "dweight": dweight_TK.view(given.weight_TK.shape)}
    return {name: (of, torch.cat([of.abs().flatten(), torch.ones(1)]).amax()) for name, of in values.items()}


def weight_gradient_of(gathered: Side) -> Op:
    def operands(given: Rows) -> tuple[Any, ...]:
        sides = (given.dy_TH, given.a_PI) if gathered == "left" else (given.h_PU, given.x_TH)
        return *sides, given.routing.entry_P, given.routing.first_G1

    def found(given: Rows, block: TileConfig) -> Found:
        left, right, *rows = operands(given)
        groups = OrderedGroups(*rows, groups_by_size_reference(given.routing.first_G1))
        return {"dW": weight_gradient(left, right, groups, given.top_k, gathered, block)}

    def exact(given: Rows, _: Found) -> Exact:
        left, right, *_ = operands(given)
        entry_P, group_P = places(given)
        token_P, num_groups = entry_P // given.top_k, len(given.routing.first_G1) - 1
        own = left if gathered == "right" else right
        by_row = own[: given.num_rows], (right if gathered == "right" else left)[token_P]
        left_PL, right_PR = (each.double() for each in (by_row if gathered == "right" else by_row[::-1]))

        def sums(left_PL: Tensor, right_PR: Tensor) -> Tensor:
            return torch.einsum("pg,pl,pr->glr", one_hot(group_P, num_groups).double(), left_PL, right_PR)

        return {"dW": (sums(left_PL, right_PR), sums(left_PL.abs(), right_PR.abs()).amax((1, 2), keepdim=True))}

    return Op(found, exact)


OPS = {
    "up": Op(up_of, exact_up),
    "down": product_of(transposed=True),
    "input gradient": product_of(transposed=False),
    "activation gradient": Op(activation_gradient_of, exact_activation_gradient),
    "weight gradient of up": weight_gradient_of("right"),
    "weight gradient of down": weight_gradient_of("left"),
}
IN_FLOAT32 = ("dweight", "dW")
