"""Experts whole, forward and backward: against float32, against themselves, far away, and in a graph.

What is checked is what ``bench kernels`` checks before it times.
"""

from __future__ import annotations

import torch

from benchmarks.doctor.place import LeftOutError, Place, require
from benchmarks.kernels.checks import (
    Verdict,
    far_offsets,
    graph_replayed,
    ours_on,
    same_bits,
    same_bits_in_other_blocks,
    wrong_errors,
)
from benchmarks.kernels.drawn_layer import SIZES, draw_layer, relative_errors
from benchmarks.kernels.kernels_contest import IN_INTERPRETER, ON_GPU

DTYPE = torch.bfloat16
ROUTING, BIT_RUNS = "zipf", 5
# Of 16 bits, with what the reference and gradients take besides.
FAR_BYTES = 70e9


def experts_agree(place: Place) -> str:
    """At the size of Qwen3-30B-A3B's layer."""
    device = place.device
    size = IN_INTERPRETER.small if place.rehearsed else SIZES[0]
    layer = draw_layer(size, ROUTING, DTYPE, device)
    errors = relative_errors(layer, ours_on(layer).results())
    wrong = wrong_errors(errors, DTYPE)
    require(not wrong, f"{size.name}: {wrong}")
    again = same_bits(layer, IN_INTERPRETER.bit_runs if place.rehearsed else BIT_RUNS)
    return "; ".join(
        [
            f"{size.name}: errors to {max(errors.values()):.1e}",
            _said(again),
            _said(same_bits_in_other_blocks(layer)),
        ]
    )


def far_offsets_hold(place: Place) -> str:
    if place.rehearsed:
        return _said(far_offsets(IN_INTERPRETER.far, DTYPE, place.device))
    total = torch.cuda.get_device_properties(place.device).total_memory
    if total < FAR_BYTES:
        raise LeftOutError(f"it takes {FAR_BYTES / 1e9:.0f} GB of a GPU's memory, and this one has {total / 1e9:.0f}")
    return _said(far_offsets(ON_GPU.far, DTYPE, place.device))


def graph_is_replayed(place: Place) -> str:
    place.require_gpu("CUDA graphs are a GPU's")
    layers = [draw_layer(ON_GPU.small, "uniform", DTYPE, place.device, seed) for seed in range(2)]
    return _said(graph_replayed(*layers))


def _said(verdict: Verdict) -> str:
    require(verdict.holds, verdict.says)
    return verdict.says
