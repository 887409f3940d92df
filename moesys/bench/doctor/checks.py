"""What ``doctor --gpu`` checks, in the order in which one layer stands on another: the first that fails names the layer
that is to be mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# alone: every GPU for itself. first: one process on the first rank. together: a rank for each GPU, or two on one GPU.
Ranks = Literal["alone", "first", "together", "two on one GPU"]


@dataclass(frozen=True)
class Check:
    """run: ``module:function`` that takes a ``Place`` and says in a line what it saw; what it raises is why it failed.

    budget_s: after which it is given up. after: the checks without which it would say nothing. dies: the last rank
    does, on purpose.
    """

    name: str
    layer: str
    proves: str
    run: str
    budget_s: float
    ranks: Ranks = "alone"
    after: tuple[str, ...] = ()
    dies: bool = False


_OWN = "moesys.bench.doctor"

CHECKS = (
    Check(
        "device",
        "driver and torch",
        "torch finds the GPU, allocates on it, and multiplies right",
        f"{_OWN}.seen:sees_gpu",
        30,
    ),
    Check(
        "compile",
        "compiler",
        "kernels compile for this GPU without spills, with tensor cores",
        f"{_OWN}.compiled:compiles",
        90,
        "first",
    ),
    Check(
        "ops",
        "kernels of one device",
        "each op agrees with its reference in plain torch, twice with the same bits",
        f"{_OWN}.ops:ops_agree",
        60,
        after=("device",),
    ),
    Check(
        "experts",
        "kernels of one device",
        "experts forward and backward at real sizes agree with float32; the same bits again, and in other tiles",
        f"{_OWN}.oracle:experts_agree",
        90,
        after=("ops",),
    ),
    Check(
        "offsets",
        "kernels of one device",
        "rows, matrices and gradients beyond 2³¹ elements are where they belong",
        f"{_OWN}.oracle:far_offsets_hold",
        90,
        "first",
        after=("experts",),
    ),
    Check(
        "other device",
        "launch",
        "tensors on a GPU that is not the current one are computed there, with the same bits",
        f"{_OWN}.guards:other_device_is_used",
        30,
        "first",
        after=("experts",),
    ),
    Check(
        "no waiting",
        "launch",
        "a step of a layer never makes the host wait for the device",
        f"{_OWN}.waiting:step_waits_for_nobody",
        45,
        after=("experts",),
    ),
    Check(
        "graph",
        "launch",
        "forward and backward are captured in a CUDA graph and replayed on new data with the same bits",
        f"{_OWN}.oracle:graph_is_replayed",
        45,
        after=("experts",),
    ),
    Check(
        "rounds, one GPU",
        "flags in memory",
        "a million rounds of publish and wait between virtual ranks: every payload is there when its flag is",
        f"{_OWN}.rounds:virtual_rounds_hold",
        60,
        after=("device",),
    ),
)
