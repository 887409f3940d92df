"""Top-k whose ties are decided: the same experts on every device, every run.

T rows, E columns, K chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def topk_by_index(scores: Tensor, k: int) -> Tensor:
    """Returns the columns of each row's k largest scores, largest first, equal scores by the lower column.

    ``torch.topk`` leaves the order of equal scores to the device, and routers do tie: at zero weights, after
    underflow, between groups. Scores and column are packed into one int64 key that no two columns share, so any
    correct top-k gives the one answer without sorting all E.

    ``topk_by_index(tensor([[0.5, 0.9, 0.5, 0.9]]), 3)`` is ``[[1, 3, 0]]``.

    Args:
        scores: [T, E] float32, any device; infinities are ordered, -0.0 equals 0.0. NaN is not an order: the columns
            are then valid and distinct, but which is unspecified.
        k: 0..E.

    Returns:
        [T, k] int64 on the device of ``scores``. Not differentiable: gather with it what should be.

    Raises:
        ValueError: another dtype or shape, or k outside 0..E.
    """
    if scores.dtype != torch.float32 or scores.dim() != 2:
        raise ValueError(f"scores are {scores.dtype} of {scores.dim()} dimensions; give float32 [T, E]")
    num_columns = scores.shape[1]
    if not 0 <= k <= num_columns:
        raise ValueError(f"k={k} of {num_columns} columns; use 0 <= k <= {num_columns}")
    # Adding +0.0 makes -0.0 positive. The bits of positive floats are ordered as integers; those of negative floats
    # are ordered backwards, so all but the sign is flipped.
    bits = (scores + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    key = bits.to(torch.int64)
    key <<= 32
    key |= torch.arange(num_columns - 1, -1, -1, device=scores.device)
    return (num_columns - 1) - (key.topk(k, dim=1).values & 0xFFFFFFFF)
