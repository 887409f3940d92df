"""Routing metadata: which row of which expert every choice of a token is, and back.

T tokens, K choices of each, G groups: an expert's slot, P = T·K rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Rows in order of (group, token, choice); all int32, on the device of the choices.

    ``entry_P`` [T·K]: the choice t·K + k of each row, -1 behind the last group's rows. ``row_TK``: the row of each
    choice, -1 where it is dropped. ``first_G1`` [G + 1]: group g's rows are ``first_G1[g]`` up to ``first_G1[g + 1]``.
    """

    entry_P: Tensor
    row_TK: Tensor
    first_G1: Tensor


def route_reference(group_TK: Tensor, num_groups: int) -> Routing:
    """``Routing`` of ``group_TK``, int32 or int64 [T, K]; what is not in 0..G-1 is dropped."""
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
    return Routing(entry_P.int(), row_TK.int(), first_G1.int())
