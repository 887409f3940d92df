"""These references compute in plain torch what kernels compute.

P rows, T tokens, K choices, G groups; H, I, U, E as in ``moesys.kernels.experts``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tiles import Tiles
from moesys.kernels.experts.weight_gradient import OrderedGroups, RowBlocks
from moesys.kernels.routing import SortedRouting


def exact_activation(h: Tensor, activation: str) -> Tensor:
    """Returns the activation of float64 rows [..., U] by its definition: [..., I]."""
    gate, up = h.chunk(2, dim=-1) if GATED[activation] else (h, torch.ones(()))
    curve = {"swiglu": torch.special.expit, "relu2": lambda x: x.clamp_min(0)}.get(activation, torch.special.ndtr)
    return gate * curve(gate) * up


def activation_reference(h: Tensor, activation: str) -> Tensor:
    """Returns the activation of rows [..., U], computed in float32, in the dtype of ``h``: [..., I]."""
    if GATED[activation]:
        gate, up = h.float().chunk(2, dim=-1)
        curve = torch.nn.functional.silu if activation == "swiglu" else torch.nn.functional.gelu
        return (curve(gate) * up).to(h.dtype)
    if activation == "gelu":
        return torch.nn.functional.gelu(h.float()).to(h.dtype)
    return torch.nn.functional.relu(h.float()).square().to(h.dtype)


def slopes_reference(h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns (activation [..., I], its slopes along every element of ``h`` [..., U]), float32, by autograd."""
    h = h.detach().float().requires_grad_()
    with torch.enable_grad():
        a = activation_reference(h, activation)
        (slope,) = torch.autograd.grad(a.sum(), h)
    return a.detach(), slope


def grouped_gemm_reference(
    rows_PL: Tensor, matrices: Tensor, first_G1: Tensor, matrix_G: Tensor, *, transposed: bool
) -> Tensor:
    """Returns the result of ``grouped_gemm`` in the dtype of the rows; rows behind the last group's are zero."""
    matrices_ELN = matrices.mT if transposed else matrices
    out_PN = rows_PL.new_zeros(len(rows_PL), matrices_ELN.shape[2])
    first = first_G1.tolist()
    for group, matrix in enumerate(matrix_G.tolist()):
        rows = slice(first[group], first[group + 1])
        out_PN[rows] = rows_PL[rows] @ matrices_ELN[matrix]
    return out_PN


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


def combine_reference(y_PH: Tensor, row_TK: Tensor, weight_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the sums of ``combine``."""
    total_TH = torch.zeros((row_TK.shape[0], y_PH.shape[1]), device=y_PH.device)
    for k, row_T in enumerate(row_TK.unbind(1)):
        term_TH = y_PH[row_T.clamp_min(0)].float()
        if weight_TK is not None:
            term_TH = term_TH * weight_TK[:, k, None]
        total_TH += torch.where(row_T[:, None] >= 0, term_TH, 0.0)
    return total_TH.to(dtype)


def activation_gradient_reference(
    dy_TH: Tensor,
    down_EHI: Tensor,
    h_PU: Tensor,
    weight_TK: Tensor,
    routing: SortedRouting,
    matrix_G: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of ``activation_gradient``; rows behind the last group are zeros."""
    rows, halves = int(routing.first_G1[-1]), h_PU.shape[1] // down_EHI.shape[2]
    entry = routing.entry_P[:rows].long()
    dy = dy_TH[entry // weight_TK.shape[1]].float()
    da = grouped_gemm_reference(dy, down_EHI.float(), routing.first_G1, matrix_G, transposed=False)
    a, slope = slopes_reference(h_PU[:rows], activation)
    weight = weight_TK.reshape(-1)[entry, None]
    dh_PU, wa_PI = torch.zeros_like(h_PU), h_PU.new_zeros(len(h_PU), down_EHI.shape[2])
    dh_PU[:rows], wa_PI[:rows] = weight * da.repeat(1, halves) * slope, weight * a
    dweight_TK = torch.zeros_like(weight_TK)
    dweight_TK.view(-1)[entry] = (da * a).sum(1)
    return dh_PU, wa_PI, dweight_TK


def up_reference(
    x_TH: Tensor, gate_up_EUH: Tensor, routing: SortedRouting, matrix_G: Tensor, top_k: int, activation: str
) -> tuple[Tensor, Tensor]:
    """Returns the results of ``up`` in the dtype of x; rows behind the last group's are zero."""
    x_PH = x_TH[routing.entry_P.clamp_min(0).long() // top_k]
    h_PU = grouped_gemm_reference(x_PH, gate_up_EUH, routing.first_G1, matrix_G, transposed=True)
    return h_PU, activation_reference(h_PU, activation)


def weight_gradient_reference(
    left: Tensor,
    right: Tensor,
    entry_P: Tensor,
    first_G1: Tensor,
    top_k: int,
    gathered: Literal["left", "right"],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the result of ``weight_gradient``."""
    left_PL, right_PR = _by_rows(left, right, entry_P, top_k, gathered)
    first = first_G1.tolist()
    groups = [slice(*bounds) for bounds in pairwise(first)]
    return torch.stack([left_PL[rows].float().t() @ right_PR[rows].float() for rows in groups]).to(dtype)


def block_gradient_reference(
    left: Tensor,
    right: Tensor,
    groups: OrderedGroups,
    top_k: int,
    gathered: Literal["left", "right"],
    blocks: RowBlocks,
) -> Tensor:
    """Returns the result of ``weight_gradient`` by blocks of rows."""
    left_PL, right_PR = _by_rows(left, right, groups.entry_P, top_k, gathered)
    grids, totals = blocks.grid_G.tolist(), []
    for group, (first, end) in enumerate(pairwise(groups.first_G1.tolist())):
        total_LR = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
        num_blocks = max((2 * (end - first) + blocks.rows) // (2 * blocks.rows), int(end > first))
        stops = [first + blocks.rows * number for number in range(num_blocks)] + [end]
        for row, stop in pairwise(stops):
            rows = slice(row, stop)
            sum_LR = (left_PL[rows].float().t() @ right_PR[rows].float()).double()
            total_LR += sum_LR.div_(grids[group]).round_().mul_(grids[group])
        totals.append(total_LR)
    return torch.stack(totals)


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


def _by_rows(
    left: Tensor, right: Tensor, entry_P: Tensor, top_k: int, gathered: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    """Returns both sides by rows, [P, L] and [P, R]."""
    token_P = (entry_P // top_k).clamp_min(0)
    return (left[token_P], right) if gathered == "left" else (left, right[token_P])
