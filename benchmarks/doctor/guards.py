"""Tensors on a GPU that is not the current one: are they computed where they are?"""

from __future__ import annotations

import torch

from benchmarks.doctor.oracle import DTYPE
from benchmarks.doctor.place import LeftOutError, Place, require
from benchmarks.kernels.checks import different, ours_on
from benchmarks.kernels.drawn_layer import draw_layer
from benchmarks.kernels.kernels_contest import ON_GPU


def other_device_is_used(place: Place) -> str:
    """The op of a layer's experts, forward and backward, with the last GPU's tensors while the first is current."""
    place.require_gpu("the CPU is one device")
    last = torch.cuda.device_count() - 1
    if last < 1:
        raise LeftOutError("one GPU here; it takes two")
    layer = draw_layer(ON_GPU.small, "uniform", DTYPE, torch.device("cuda", last))
    with torch.cuda.device(last):
        expected = ours_on(layer).results()
        torch.cuda.synchronize()
    with torch.cuda.device(0):
        found = ours_on(layer).results()
        torch.cuda.synchronize()
    differs = different(found, expected)
    require(not differs, f"{differs} differ where cuda:0 is current and tensors are on cuda:{last}")
    return f"tensors of cuda:{last} while cuda:0 is current: equal bits"
