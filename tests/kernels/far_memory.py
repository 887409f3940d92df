"""Tensors of more elements than int32 can number, in little memory; and launches of which two programs run."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

FROM_ELEMENTS = 1 << 24


def sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros of which only what is touched becomes memory."""
    # Not counted against the memory that the machine has; Python has no name for it before 3.13.
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def give_sparse_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large results of ``torch.empty`` and ``torch.empty_like`` are ``sparse``: born as zeros, not as NaN."""
    usual = torch.empty

    def empty(*size: Any, dtype: torch.dtype, device: object = None) -> Tensor:
        shape = size[0] if isinstance(size[0], tuple) else size
        return sparse(*shape, dtype=dtype) if math.prod(shape) >= FROM_ELEMENTS else usual(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: empty(tuple(tensor.shape), dtype=tensor.dtype))


@contextmanager
def only_outer_programs() -> Iterator[None]:
    """Of every launch the first and the last program run, and know how many others there would be."""
    usual, builder = interpreter.InterpretedFunction.__getitem__, interpreter.interpreter_builder

    def launch(kernel: Any, grid: tuple[int]) -> Callable[..., None]:
        last = grid[0] - 1
        run = usual(kernel, (min(grid[0], 2),))

        def outer(*args: Any, **kwargs: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(builder, "set_grid_dim", lambda *_: _set(builder, "grid_dim", (last + 1, 1, 1)))
                patch.setattr(builder, "set_grid_idx", lambda x, y, z: _set(builder, "grid_idx", (x * last, 0, 0)))
                run(*args, **kwargs)

        return outer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__getitem__", launch)
        yield


def _set(builder: Any, name: str, place: tuple[int, int, int]) -> None:
    setattr(builder, name, place)
