"""Matrix products whose rows do not depend on how many rows share the call.

Chunks of one computation may only change its bits if a GEMM treats a row differently in small company. BLAS libraries
do so below a handful of rows (they switch to other kernels, or cut the rows between threads), and not above: so the
least safe number of rows is measured, and shorter calls are padded to it by their callers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LARGEST_MINIMUM = 32
TILE_ROWS = 64
_PROBED_COUNTS = (*range(1, LARGEST_MINIMUM + 1), 40, 63, 64, 65, 127, 128, 192)


def min_invariant_rows(contraction: int, columns: int, dtype: torch.dtype, transposed: bool) -> int | None:
    """The least m such that rows of x [m, contraction] @ w have the same bits in calls of m or more rows.

    ``transposed``: w is the transpose of a contiguous [columns, contraction]. Probed on the CPU with torch's current
    number of threads, which is part of the numerics class; ``None`` where calls of up to ``LARGEST_MINIMUM`` rows
    still differ: callers then compute in tiles of exactly ``TILE_ROWS`` rows.
    """
    return _probe(contraction, columns, dtype, transposed, torch.get_num_threads())


@cache
def _probe(contraction: int, columns: int, dtype: torch.dtype, transposed: bool, _threads: int) -> int | None:
    # Five rows of offset, so that rows are also seen at another alignment and another place in the call.
    x_MK, weight_KN = _cancelling(max(_PROBED_COUNTS) + 5, contraction, columns)
    x_MK, weight = x_MK.to(dtype), weight_KN.to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    expected_MN = x_MK @ weight
    minimum = 1
    for count in _PROBED_COUNTS:
        same = all(torch.equal(x_MK[at : at + count] @ weight, expected_MN[at : at + count]) for at in (0, 5))
        if not same:
            minimum = count + 1
    return minimum if minimum <= LARGEST_MINIMUM else None


def _cancelling(rows: int, contraction: int, columns: int) -> tuple[Tensor, Tensor]:
    """x [rows, contraction] and w [contraction, columns] whose products cancel in pairs, far apart in the sum.

    What remains of x @ w is rounding error alone, so that any other order of summation shows. Ordinary numbers would
    hide it from 16-bit outputs, whose rounding is coarser than the difference.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randperm(contraction // 2 * 2, generator=generator).view(2, -1)
    x_MK, weight_KN = torch.zeros(rows, contraction), torch.zeros(contraction, columns)
    x_MK[:, first] = torch.randn(rows, len(first), generator=generator)
    x_MK[:, second] = -x_MK[:, first]
    weight_KN[first] = torch.randn(len(first), columns, generator=generator)
    weight_KN[second] = weight_KN[first]
    return x_MK, weight_KN


def matmul_rows(x_MK: Tensor, weight_KN: Tensor, out_MN: Tensor, *, tiled: bool) -> None:
    """``out_MN = x_MK @ weight_KN``, row bits independent of M where M is at least the probed minimum.

    ``tiled``: no minimum was found, so rows go through in tiles of exactly ``TILE_ROWS``, the last one padded.
    """
    if not tiled:
        torch.mm(x_MK, weight_KN, out=out_MN)
        return
    tile_K = x_MK.new_zeros(TILE_ROWS, x_MK.shape[1])
    for start in range(0, x_MK.shape[0], TILE_ROWS):
        rows = min(TILE_ROWS, x_MK.shape[0] - start)
        tile_K[:rows] = x_MK[start : start + rows]
        out_MN[start : start + rows] = (tile_K @ weight_KN)[:rows]
