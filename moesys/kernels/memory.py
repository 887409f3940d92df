"""Memory for large tensors on the CPU: fresh pages are dear, so they are huge, and used again where they can be.

A large allocation is new to the process every time, and its first touch is a page fault every 4 KiB: on a virtual
machine that is slower than the arithmetic that fills it. Huge pages fault once every 2 MiB.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

# Below this malloc mostly hands out pages that the process has touched before.
HUGE_FROM_BYTES = 1 << 22


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised like ``torch.empty``; on the CPU of a Linux machine large tensors lie on huge pages, if it has any."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class Scratch:
    """Buffers that are overwritten again and again, each grown to the largest size that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised; it replaces what ``name`` gave before."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = empty((size + size // 4,), dtype, self._device)
        return buffer[:size].view(shape)
