"""Products of tokens that do not travel, by Triton kernels: no bit of a row or of a block shows what others there are.

Tiles are fixed, so that nothing at all follows from the number of tokens. T tokens, A and B any widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tile_tuner import INTERPRETED, SINGLE
from moesys.kernels.experts.tiles import tile_table
from moesys.kernels.experts.weight_gradient import OrderedGroups, RowBlocks, block_gradient
from moesys.kernels.host_copies import to_device


def token_product(x_TA: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """Returns x @ weight [T, B] in their dtype, of ``weight`` [A, B], or [B, A] where it is ``transposed``."""
    if not len(x_TA):
        return x_TA.new_empty(0, weight.shape[0 if transposed else 1])
    tile, (first_2, only_1) = _tile_of(x_TA), _one_group(x_TA)
    tiles = tile_table(first_2, len(x_TA), tile.rows)
    return grouped_gemm(x_TA.contiguous(), weight[None], first_2, tiles, only_1, tile, transposed=transposed)


def token_gradient(dy_TB: Tensor, x_TA: Tensor, num_tokens: int, grid: Tensor) -> Tensor:
    """Returns dyᵀ @ x summed over blocks of ``num_tokens``, float64 [B, A], on ``grid``, a float64 on the device."""
    first_2, only_1 = _one_group(x_TA)
    groups = OrderedGroups(torch.arange(len(x_TA), dtype=torch.int32, device=x_TA.device), first_2, only_1)
    blocks = RowBlocks(num_tokens, grid.view(1))
    return block_gradient(dy_TB, x_TA, groups, 1, "right", blocks, _tile_of(x_TA))[0]


def _one_group(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the one group of all rows begins and ends, and its number."""
    device = rows.device
    return to_device([0, len(rows)], device, torch.int32), torch.zeros(1, dtype=torch.int32, device=device)


def _tile_of(rows: Tensor) -> TileConfig:
    if rows.device.type == "cpu":
        return INTERPRETED
    return SINGLE if rows.dtype == torch.float32 else TileConfig()
