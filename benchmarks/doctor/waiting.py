"""Does a step make the host wait for the device? On a GPU torch says so itself; in a rehearsal its readers refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.doctor.layers import inputs_at, layer_at, planned_on_devices, step, tokens_at
from benchmarks.doctor.place import Place, require
from moesys.config import Sequential
from moesys.config.overlap import Overlap

WARM_UPS, STEPS = 2, 2
# On the CPU, where kernels have ended when they return, moesys looks at once whether one gave up.
LOOKS_ON_CPU = ("raise_if_given_up", "_raise_if_found")
# Numbers that went to pinned memory, which on a GPU the host reads when they are there or all of backward is launched.
COPIES = "moesys.kernels.host_copies"
# Whatever of a tensor needs its numbers on the host.
READERS = (
    *("__bool__", "__int__", "__float__", "__index__", "__array__", "item", "tolist", "numpy", "cpu"),
    *("nonzero", "unique", "masked_select", "bincount"),
)


def step_waits_for_nobody(place: Place) -> str:
    """Of a layer whose experts are all here, forward and backward."""
    return _steps(place, Sequential())


def planned_step_waits_for_nobody(place: Place) -> str:
    """Of a layer over all ranks, which plan on their devices."""
    return _steps(place, planned_on_devices(place))


def _steps(place: Place, overlap: Overlap) -> str:
    layer, given = layer_at(place, overlap), inputs_at(place, tokens_at(place), 0)
    # The first ones compile, and make what lasts.
    for _ in range(1 if place.rehearsed else WARM_UPS):
        step(layer, *given)
    with waiting_refused(place.device):
        for _ in range(1 if place.rehearsed else STEPS):
            found = step(layer, *given)
    wrong = [name for name, of in found.items() if not of.isfinite().all()]
    require(not wrong, f"{', '.join(wrong)} are not finite")
    return f"{overlap.kind}: steps waited for nobody"


@contextmanager
def waiting_refused(device: torch.device) -> Iterator[None]:
    """What waits for the device inside raises RuntimeError.

    On the CPU that is what moesys calls of torch and would wait for a GPU; Triton's interpreter may read all the time.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    with ExitStack() as patches:
        for name in READERS:
            patches.enter_context(patch.object(Tensor, name, _refusing(name, getattr(Tensor, name))))
        yield


def _refusing(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        caller = frame.f_globals.get("__name__", "")
        looks = frame.f_code.co_name in LOOKS_ON_CPU or caller == COPIES
        if caller.startswith("moesys.") and not caller.startswith("benchmarks.") and not looks:
            raise RuntimeError(f"{caller} calls {name}, which waits for the device")
        return usual(*args, **kwargs)

    return refused
