"""Products and rounding of kernels: the same on a GPU and in Triton's interpreter, which cannot compute in bfloat16.

The interpreter multiplies the bit patterns of bfloat16 as if they were integers, and cuts float32 off where bfloat16
should round. So there operands are converted to float32 first, which changes no product, and results are rounded by
hand. It multiplies tiles by numpy's BLAS, whose sums depend on how large the tile is on some processors (OpenBLAS on
those without AVX-512). So there products are summed element by element. On a GPU all is what Triton does by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, total):  # type: ignore[no-untyped-def]
    """Returns ``total`` + ``left`` [M, K] @ ``right`` [K, N] in float32. M and N change no element's bits."""
    if INTERPRETED:
        return total + tl.sum(left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :], axis=1)
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns float32 ``x`` in ``dtype``, to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        # NaN has no neighbour to be rounded to
        kept = tl.where(x == x, even, bits)
        return (kept & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(dtype)
