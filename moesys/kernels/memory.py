"""Memory for large tensors on the CPU: fresh pages are dear, so they are huge, and used again where they can be.

A large allocation is new to the process every time, and its first touch is a page fault every 4 KiB: on a virtual
machine that takes longer than the arithmetic that fills it. Huge pages fault once every 2 MiB; pages that are used
again do not fault at all.
"""

from __future__ import annotations

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

# Below this malloc mostly hands out pages that the process has touched before.
HUGE_FROM_BYTES = 1 << 22


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised, like ``torch.empty``; large tensors of a Linux CPU lie on huge pages, where there are any."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not _huge_pages_help(num_bytes, device):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_map(num_bytes), dtype=dtype).view(shape)


class Recycled:
    """A large buffer whose pages are used again once no tensor lies on them; until then others come from ``empty``."""

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None
        self._lent: weakref.ref[np.ndarray] | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised. One tensor at a time lies on the pages that are kept."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not _huge_pages_help(num_bytes, device):
            return torch.empty(shape, dtype=dtype, device=device)
        if self._lent is not None and self._lent() is not None:
            return empty(shape, dtype, device)
        if self._pages is None or len(self._pages) != num_bytes:
            self._pages = _map(num_bytes)
        # The tensor's storage holds on to this array, and nobody else does: when it is gone, so are all views.
        array = np.frombuffer(self._pages, dtype=np.uint8)
        self._lent = weakref.ref(array)
        return torch.from_numpy(array).view(dtype).view(shape)

    def __reduce__(self) -> tuple[type[Recycled], tuple[()]]:
        return Recycled, ()


class Scratch:
    """Buffers that are overwritten again and again, each grown to the largest size that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised; it takes the place of what ``name`` gave before."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # A quarter more, so that sizes that creep up do not allocate every time.
            buffer = self._buffers[name] = empty((size + size // 4,), dtype, self._device)
        return buffer[:size].view(shape)


def _huge_pages_help(num_bytes: int, device: torch.device) -> bool:
    return device.type == "cpu" and num_bytes >= HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE")


def _map(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
