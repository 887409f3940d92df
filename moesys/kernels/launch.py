"""Work is launched on the device of what it is given, whichever is current.

Triton launches on the thread's current device: with tensors on another GPU a kernel would run on the wrong one. Torch's
own operators look at their tensors; its streams and events do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

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
