"""Tensor descriptors, by which TMA reads tiles: which tensors they can describe, and where kernels put their own.

Kernels make their descriptors themselves. Where warps are specialised, Triton splits tiles between two groups of warps,
and descriptors with them; those that come from the host it leaves whole, which Triton 3.9 refuses and Triton 3.6
compiles into loads that write behind their buffers.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

TMA_BYTES = 16


def readable_by_tma(*tensors: Tensor) -> bool:
    """Whether all are of two bytes, not empty, and their addresses and all strides multiples of 16 bytes."""
    return all(
        tensor.element_size() == 2
        and tensor.numel() > 0
        and tensor.data_ptr() % TMA_BYTES == 0
        and all(2 * stride % TMA_BYTES == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def run_with_descriptors(launch: Callable[[], object], device: torch.device) -> None:
    """Calls ``launch``, whose kernels may make descriptors: they lie in memory of torch's on ``device``.

    Triton has one allocator a context for this, so a context of its own changes nobody's.
    """

    def allocate(num_bytes: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.int8, device=device)

    context = contextvars.copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(launch)


@triton.jit
def matrices_by_tma(  # type: ignore[no-untyped-def]
    ptr, E, stride: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, box_rows: tl.constexpr,
    box_width: tl.constexpr,
):  # fmt: skip
    """A descriptor of [E, rows, width], ``stride`` elements from matrix to matrix, that gives [1, box_rows, box_width],
    zeros beyond an edge.
    """
    return tl.make_tensor_descriptor(ptr, [E, rows, width], [stride, width, 1], [1, box_rows, box_width])


@triton.jit
def halves_by_tma(  # type: ignore[no-untyped-def]
    ptr, E, stride: tl.constexpr, halves: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    box_rows: tl.constexpr, box_width: tl.constexpr,
):  # fmt: skip
    """The same of [E, halves, rows, width]; it gives the same [box_rows, box_width] of all halves of a matrix."""
    return tl.make_tensor_descriptor(
        ptr, [E, halves, rows, width], [stride, rows * width, width, 1], [1, halves, box_rows, box_width]
    )


@triton.jit
def rows_by_tma(ptr, P, width: tl.constexpr, box_rows: tl.constexpr, box_width: tl.constexpr):  # type: ignore[no-untyped-def]
    """A descriptor of [P, width] that gives [box_rows, box_width], zeros beyond an edge."""
    return tl.make_tensor_descriptor(ptr, [P, width], [width, 1], [box_rows, box_width])
