"""Grouped products in float64, relative errors, and fits by the parts of a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Returns what ``torch._grouped_mm`` does: [M, K] × [G, K, N] for rows in groups that end at ``ends``, or [M, K] ×
    [K, N] → [G, M, N] for groups of the inner dimension. Rows behind the last group are NaN, where the kernel leaves
    memory as it was, so that an operator that reads them is found.
    """
    bounds = [0, *ends.tolist()]
    if b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(bounds)])
    rows = [a[i:j] @ b[group] for group, (i, j) in enumerate(pairwise(bounds))]
    return torch.cat([*rows, a.new_full((len(a) - bounds[-1], b.shape[-1]), math.nan)])


def error_of(got: Tensor, right: Tensor, scale: float = 0.0) -> float:
    """Returns |got − right| / max(|right|, ``scale``) by Frobenius norms; infinite for another shape, and for NaN."""
    if got.shape != right.shape:
        return math.inf
    difference = float((got.double() - right.double()).norm())
    if difference == 0.0:
        return 0.0
    error = difference / max(float(right.double().norm()), scale, 1e-300)
    return math.inf if math.isnan(error) else error


def fit(got: Tensor, vectors: Sequence[Tensor]) -> tuple[list[float], float]:
    """Returns the coefficients of the ``vectors`` whose sum is nearest to ``got``, NaN for a vector of zeros, and the
    relative residual.
    """
    matrix, right = torch.stack([vector.double().flatten() for vector in vectors]), got.double().flatten()
    norms = matrix.norm(dim=1)
    used = norms > 1e-10 * norms.max()
    coefficients = torch.full((len(vectors),), math.nan, dtype=torch.float64)
    if not used.any() or not right.isfinite().all():
        return coefficients.tolist(), 1.0
    scaled = matrix[used] / norms[used, None]
    solution = torch.linalg.pinv(scaled @ scaled.T, hermitian=True) @ (scaled @ right)
    coefficients[used] = solution / norms[used]
    residual = float((solution @ scaled - right).norm()) / max(float(right.norm()), 1e-300)
    return coefficients.tolist(), residual


def fraction(value: float) -> str:
    """Returns a number as a fraction where it is a simple one: ``2``, ``1/2``, ``3/4``."""
    for below in (1, 2, 3, 4, 6, 8) if math.isfinite(value) else ():
        if abs(value * below - round(value * below)) < 1e-4 and abs(value * below) < 100:
            return f"{round(value * below)}" + (f"/{below}" if below > 1 else "")
    return f"{value:.5g}"


def rows_of_tokens(tensor: Tensor, mask: Tensor) -> Tensor | None:
    """Returns the rows of tokens that are no padding, of [B, S, ...] or [B · S, ...]; None for another layout of a
    micro-batch with padding, where nobody knows which they are.
    """
    if tensor.shape[:2] == mask.shape:
        return tensor[mask]
    if tensor.dim() > 1 and tensor.shape[0] == mask.numel():
        return tensor[mask.flatten()]
    return tensor if bool(mask.all()) else None
