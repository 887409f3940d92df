"""Work is launched on the device of what it is given, whichever is current.

Triton launches on the thread's current device: with tensors on another GPU a kernel would run on the wrong one. Torch's
own operators look at their tensors; its streams and events do not.

Numbers are copied between host and device so that they are waited for only when they are needed: a copy from or to
memory that is not pinned makes the host wait for all that the device was given before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def on_its_device(call: Callable[P, T]) -> Callable[P, T]:
    """Makes the device of the first tensor among the arguments of ``call``, or in their tuples, current while it runs.

    Raises LookupError where it is called without a tensor.
    """

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.cuda.device_of(_first_tensor((*args, *kwargs.values()))):
            return call(*args, **kwargs)

    return called


def kernel(function=None, **options):  # type: ignore[no-untyped-def]
    """Compiles a function that hosts launch, as ``triton.jit`` with ``options``, on the device of its first tensor; if
    that is on the meta device, it is compiled for the current one, and does not run. What only kernels call needs none
    of this.
    """
    if function is None:
        return lambda function: kernel(function, **options)
    # Here, as layers on the CPU do without Triton.
    import triton

    jitted = triton.jit(function, **options)

    def run(*args, warmup, **options):  # type: ignore[no-untyped-def]
        warmup = warmup or _first_tensor((*args, *options.values())).is_meta
        return type(jitted).run(jitted, *args, warmup=warmup, **options)

    jitted.run = on_its_device(run)
    return jitted


def _first_tensor(arguments: Iterable[object]) -> Tensor:
    found = _tensor_in(arguments)
    if found is None:
        raise LookupError("nothing says on which device to launch: no argument is a tensor; give one")
    return found


def _tensor_in(arguments: Iterable[object]) -> Tensor | None:
    for argument in arguments:
        found = _tensor_in(argument) if isinstance(argument, tuple) else argument
        if isinstance(found, Tensor):
            return found
    return None


def to_device(
    values: Sequence[int] | npt.NDArray[np.int64], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns the host's ``values`` on ``device``, contiguous, behind what the current stream has to do; the host goes
    on.
    """
    # Arrays of numpy may have any strides, and kernels read numbers that are contiguous.
    device, host = torch.device(device), torch.as_tensor(np.ascontiguousarray(values, dtype=np.int64)).to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class HostCopy:
    """A device's ``values`` on their way to the host, behind what the current stream has to do until then."""

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def ready(self) -> bool:
        """Returns whether the values have arrived on the host, without waiting."""
        return self._copied is None or self._copied.query()

    def read(self) -> npt.NDArray[np.int64]:
        """Waits until the values are on the host, and returns them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.numpy()
