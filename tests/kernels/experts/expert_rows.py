"""Rows of experts at every edge, which the tests of ops share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from kernel_references import route_reference, tile_table_reference
from torch import Tensor

from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import RowGroups
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
    """``groups``: those that the choices of each token name; what names none that there is is dropped. ``matrices``:
    which one each group uses.
    """

    groups: list[list[int]]
    matrices: tuple[int, ...] = (2, 0, 1)
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
    "empty groups, first, between and last": Edge([[1, 3]] * 9, (3, 0, 4, 2, 1)),
    "all tokens to one group": Edge([[2]] * 50),
    "dropped choices": Edge([[t % 4 - 1, (t + 2) % 4] for t in range(21)]),
    "everything dropped": Edge([[-1, 7]] * 5, H=20),
    "whole tiles": Edge([[t // 16] for t in range(48)], H=64, I=32),
    "replicas of a matrix": Edge([[t % 2, 2] for t in range(9)], (1, 1, 0)),
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
    matrix_G: Tensor
    activation: str

    @property
    def top_k(self) -> int:
        return self.weight_TK.shape[1]

    @property
    def num_rows(self) -> int:
        return int(self.routing.first_G1[-1])

    def groups(self, block: TileConfig) -> RowGroups:
        tiles = tile_table_reference(self.routing.first_G1, len(self.routing.entry_P), block.rows)
        return RowGroups(self.routing.first_G1, tiles, self.matrix_G)


def rows_of(edge: str | Edge, dtype: torch.dtype, activation: str = "swiglu") -> Rows:
    groups, matrices, H, I = EDGES[edge] if isinstance(edge, str) else edge
    group_TK = torch.tensor(groups).reshape(len(groups), -1 if groups else 2).long()
    T, K = group_TK.shape
    E, U = max(matrices) + 2, 2 * I if GATED[activation] else I
    routing = route_reference(group_TK, len(matrices))
    generator = torch.Generator().manual_seed(T * 1000 + H * 10 + I)
    x_TH, dy_TH = (torch.randn(T, H, generator=generator).to(dtype) for _ in range(2))
    h_PU, a_PI, y_PH = (torch.randn(T * K, width, generator=generator).to(dtype) for width in (U, I, H))
    gate_up, down = (torch.randn(E, *size, generator=generator) / H**0.5 for size in ((U, H), (H, I)))
    for rows in (h_PU, a_PI, y_PH):
        rows[int(routing.first_G1[-1]) :] = torch.nan
    gate_up[-1] = down[-1] = torch.nan
    weight_TK = torch.where(routing.row_TK < 0, torch.nan, torch.rand(T, K, generator=generator))
    matrix_G = torch.tensor(matrices, dtype=torch.int32)
    experts = (gate_up.to(dtype), down.to(dtype))
    return Rows(x_TH, dy_TH, weight_TK, h_PU, a_PI, y_PH, *experts, routing, matrix_G, activation)
