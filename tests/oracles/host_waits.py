"""A guard on the CPU against calls that would make the host wait for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

# These methods need the numbers of a tensor on the host.
READS = (
    *("__bool__", "__int__", "__float__", "__index__", "__array__"),
    *("item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "bincount"),
)
# These functions return a size that only the device knows, or copy from memory that the host must wait to reuse.
WAITS = ("bincount", "nonzero", "unique", "masked_select", "tensor", "as_tensor", "from_numpy")


@contextmanager
def host_waits_refused(allowed: Callable[[Any], bool] = lambda frame: False) -> Iterator[None]:
    """Makes code of moesys that would wait raise RuntimeError, in frames that are not ``allowed`` to. Triton's
    interpreter, which reads all the time, may wait.
    """

    def refusing(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and _package(frame) == "torch":
                frame = frame.f_back
            if _package(frame) == "moesys" and not allowed(frame):
                place = f"{frame.f_globals['__name__']}, line {frame.f_lineno},"
                raise RuntimeError(f"{place} calls {name}, which waits for the device")
            return usual(*args, **options)

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((Tensor, READS), (torch, WAITS), (torch.cuda, ("synchronize",))):
            for name in names:
                patch.setattr(owner, name, refusing(name, getattr(owner, name)))
        yield


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
