"""Memory for large tensors on the CPU, on huge pages that are reused, because fresh pages are expensive.

A large allocation is new to the process every time, and its first touch is a page fault every 4 KiB: on a virtual
machine that takes longer than the arithmetic that fills it. Reused pages do not fault, and huge pages fault once
every 2 MiB.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from threading import Lock

import numpy as np
import torch
from torch import Tensor

# Below this, malloc mostly hands out pages that the process has touched before.
FROM_BYTES = 1 << 18
HUGE_PAGE_BYTES = 1 << 21
GRAIN_BYTES = 1 << 16


class PagePool:
    """Uninitialised CPU tensors on pages that are reused as soon as no tensor is on them.

    Idle and used pages together are at most twice the pages that were used at one time. Storages cannot be resized.
    Tensors on other devices come from torch's allocators.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[mmap.mmap] = []
        # Tensors die on any thread and at any time, so that what they leave behind is put here without a lock.
        self._returned: deque[mmap.mmap] = deque()
        self._mapped_bytes = self._idle_bytes = self._peak_lent_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised tensor, like ``torch.empty``."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or num_bytes < FROM_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock:
            pages = self._take(num_bytes)
        # Only the tensor's storage refers to this array: when the array is freed, no view is left.
        array = np.frombuffer(pages, dtype=np.uint8, count=num_bytes)
        weakref.finalize(array, self._returned.append, pages).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def new(self, like: Tensor, *shape: int) -> Tensor:
        """Returns an uninitialised tensor with the dtype and device of ``like``."""
        return self.empty(shape, like.dtype, like.device)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Returns an uninitialised contiguous tensor with the shape, dtype and device of ``tensor``."""
        return self.empty(tuple(tensor.shape), tensor.dtype, tensor.device)

    def _take(self, num_bytes: int) -> mmap.mmap:
        while self._returned:
            self._idle.append(self._returned.popleft())
            self._idle_bytes += len(self._idle[-1])
        # The best fit, so that sizes that vary from step to step find each other's pages.
        fits = [
            (len(pages), place) for place, pages in enumerate(self._idle) if num_bytes <= len(pages) <= 2 * num_bytes
        ]
        if fits:
            pages = self._idle.pop(min(fits)[1])
            self._idle_bytes -= len(pages)
        else:
            if self._idle_bytes > self._peak_lent_bytes:
                self._mapped_bytes -= self._idle_bytes
                self._idle_bytes = 0
                self._idle.clear()
            pages = _map(num_bytes)
            self._mapped_bytes += len(pages)
        self._peak_lent_bytes = max(self._peak_lent_bytes, self._mapped_bytes - self._idle_bytes)
        return pages

    def __reduce__(self) -> tuple[type[PagePool], tuple[()]]:
        return PagePool, ()


class Scratch:
    """Buffers that are overwritten in each use, each as large as the largest request. ``memory`` is the pool of these
    buffers, and of tensors of the same pass that stay.
    """

    def __init__(self, memory: PagePool, device: torch.device) -> None:
        self.memory, self._device = memory, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised tensor, in the memory of the last one of that ``name``."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            # Release the old buffer first, so that its pages can be reused.
            self._buffers.pop(name, None)
            self._buffers[name] = self.memory.empty((size,), dtype, self._device)
        return self._buffers[name][:size].view(shape)

    def clear(self) -> None:
        """Gives the memory of all buffers back; later ones get it anew."""
        self._buffers.clear()

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns ``tensor`` in ``dtype``; a cast one lasts until the next of that name."""
        return tensor if tensor.dtype == dtype else self(name, tuple(tensor.shape), dtype).copy_(tensor)


def _map(num_bytes: int) -> mmap.mmap:
    """Returns zeroed private pages, huge ones where Linux has them."""
    grain = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else GRAIN_BYTES
    pages = mmap.mmap(-1, -(-num_bytes // grain) * grain, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
