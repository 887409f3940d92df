"""Ids of experts that a router is to choose: which can be, and how they are kept small.

L routers, T tokens, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = Tensor | NDArray[np.integer]


def compact_dtype(num_experts: int) -> torch.dtype:
    """Returns uint8 for up to 256 experts, else int16."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def checked(
    expert_LTK: Ids | Sequence[Ids], names: Sequence[str], num_experts: Sequence[int], top_k: int
) -> list[Tensor]:
    """Returns the ids [L, T, K] of each micro-batch, of whatever integer dtype they are.

    Raises TypeError for what is no tensor or array of integers, ValueError for another shape, for ids outside of
    [0, E), and for an expert twice for one token. ``names`` and ``num_experts`` are those of the L routers.
    """
    single = isinstance(expert_LTK, Tensor | np.ndarray)
    micro_batches = [expert_LTK] if single else expert_LTK
    return [
        _checked(ids, "expert_LTK" if single else f"expert_LTK[{index}]", names, num_experts, top_k)
        for index, ids in enumerate(micro_batches)
    ]


def _checked(ids: Ids, what: str, names: Sequence[str], num_experts: Sequence[int], top_k: int) -> Tensor:
    if isinstance(ids, np.ndarray):
        # torch wants memory that can be written, which that of a received buffer cannot.
        ids = torch.from_numpy(np.require(ids, requirements=["C", "W"]))
    if not isinstance(ids, Tensor):
        raise TypeError(f"{what} is a {type(ids).__name__}; give a tensor or an array [L, T, K], or a list of them")
    if ids.dtype == torch.bool or ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise TypeError(f"{what} has dtype {ids.dtype}; ids of experts are integers")
    if ids.dim() != 3 or ids.shape[0] != len(names) or ids.shape[2] != top_k:
        raise ValueError(
            f"{what} has shape {tuple(ids.shape)}; wanted [L, T, K] with L={len(names)} routers ({names[0]} to "
            f"{names[-1]}) and K={top_k}"
        )
    for layer, (name, experts) in enumerate(zip(names, num_experts, strict=True)):
        _check_layer(ids[layer], partial("{}[{}, {}]".format, what, layer), name, experts)
    return ids


def _check_layer(ids_TK: Tensor, place: Callable[[int], str], name: str, num_experts: int) -> None:
    """``place`` names a token."""
    expert_TK = ids_TK.long()
    outside_TK = (expert_TK < 0) | (expert_TK >= num_experts)
    if outside_TK.any():
        token, k = outside_TK.nonzero()[0].tolist()
        raise ValueError(f"{place(token)} has {expert_TK[token, k]}; {name} has experts 0 to {num_experts - 1}")
    sorted_TK = expert_TK.sort(dim=1).values
    twice = (sorted_TK[:, 1:] == sorted_TK[:, :-1]).nonzero()
    if len(twice):
        token, k = twice[0].tolist()
        raise ValueError(
            f"{place(token)} has expert {sorted_TK[token, k]} twice, in {expert_TK[token].tolist()}; a token of "
            f"{name} has each expert at most once"
        )
