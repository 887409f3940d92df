"""These references compute in plain torch what kernels compute.

P rows, T tokens, K choices, G groups; H, I, U, E as in ``moesys.kernels.experts``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tiles import Tiles
from moesys.kernels.routing import SortedRouting


def exact_activation(h: Tensor, activation: str) -> Tensor:
    """Returns the activation of float64 rows [..., U] by its definition: [..., I]."""
    gate, up = h.chunk(2, dim=-1) if GATED[activation] else (h, torch.ones(()))
    curve = {"swiglu": torch.special.expit, "relu2": lambda x: x.clamp_min(0)}.get(activation, torch.special.ndtr)
    return gate * curve(gate) * up


def groups_by_size_reference(first_G1: Tensor) -> Tensor:
    """Returns the result of ``groups_by_size``."""
    return (first_G1[1:] - first_G1[:-1]).argsort(descending=True, stable=True).int()


def route_reference(group_TK: Tensor, num_groups: int) -> SortedRouting:
    """Returns ``SortedRouting`` of ``group_TK``, int32 or int64 [T, K]; what is not in 0..G-1 is dropped."""
    group_P = group_TK.reshape(-1).long()
    kept_P = (group_P >= 0) & (group_P < num_groups)
    key_P = torch.where(kept_P, group_P, num_groups)
    order_P = torch.argsort(key_P, stable=True)
    count_G = torch.bincount(key_P, minlength=num_groups + 1)[:num_groups]
    first_G1 = torch.cat([count_G.new_zeros(1), count_G.cumsum(0)])
    row_P = torch.empty_like(order_P)
    row_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    entry_P = torch.where(kept_P[order_P], order_P, -1)
    row_TK = torch.where(kept_P, row_P, -1).view(group_TK.shape)
    return SortedRouting(entry_P.int(), row_TK.int(), first_G1.int())


def ordered_sum_reference(parts_NP: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Returns the sums of ``ordered_sum``, added part by part."""
    total = parts_NP.new_full((num_rows, parts_NP.shape[1]), -0.0)
    for part, row in zip(parts_NP, row_N.tolist(), strict=True):
        total[row] += part
    return total


def gather_rows_reference(x_TH: Tensor, entry_P: Tensor, first_G1: Tensor, top_k: int) -> Tensor:
    """Returns the rows of ``gather_rows``; those behind the last group's are zero."""
    x_PH = x_TH[(entry_P // top_k).clamp_min(0).long()]
    x_PH[int(first_G1[-1]) :] = 0
    return x_PH


def tile_table_reference(first_G1: Tensor, num_rows: int, block_rows: int) -> Tiles:
    """Returns ``Tiles`` of groups that begin at ``first_G1`` int32 [G + 1]; ``num_rows``: P, at least
    ``first_G1[G]``.
    """
    first = first_G1.tolist()
    num_groups = len(first) - 1
    most = -(-num_rows // block_rows) + num_groups
    groups = sorted(range(num_groups), key=lambda group: (first[group] - first[group + 1], group))
    tiles = [(group, row) for group in groups for row in range(first[group], first[group + 1], block_rows)]
    padded = torch.tensor(tiles + [(-1, -1)] * (most - len(tiles)), dtype=torch.int32, device=first_G1.device)
    count_1 = torch.tensor([len(tiles)], dtype=torch.int32, device=first_G1.device)
    group_M, row_M = padded.view(most, 2).t().contiguous()
    return Tiles(group_M, row_M, count_1, block_rows)
