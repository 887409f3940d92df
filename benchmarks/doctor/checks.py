"""The GPU checks, in the order in which one layer stands on another: the first failure names the layer to mend."""

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


_OWN = "benchmarks.doctor"

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
        "rounds on one GPU",
        "flags in memory",
        "a million rounds of publish and wait between virtual ranks: every payload is there when its flag is",
        f"{_OWN}.rounds:virtual_rounds_hold",
        60,
        after=("device",),
    ),
    Check(
        "collectives",
        "between ranks",
        "NCCL adds, gathers and swaps integers right",
        f"{_OWN}.collectives:collectives_add_up",
        60,
        "together",
        after=("device",),
    ),
    Check(
        "shared memory",
        "between ranks",
        "torch's symmetric memory maps every rank's arena into all others, where its addresses say",
        f"{_OWN}.collectives:memory_is_shared",
        60,
        "together",
        after=("device",),
    ),
    Check(
        "copies",
        "between ranks",
        "copies by address arrive as they were, by copy engines where the driver has them",
        f"{_OWN}.collectives:copies_arrive",
        30,
        after=("device",),
    ),
    Check(
        "rounds",
        "flags in memory",
        "a million rounds of publish and wait for every pair of ranks: every payload is there when its flag is",
        f"{_OWN}.rounds:rounds_between_ranks_hold",
        90,
        "together",
        after=("shared memory", "rounds on one GPU"),
    ),
    Check(
        "one GPU for two",
        "MegaKernels",
        "two processes run a MegaKernel on one GPU",
        f"{_OWN}.mega_ranks:one_point_agrees",
        60,
        "two on one GPU",
        after=("experts", "rounds on one GPU"),
    ),
    Check(
        "mega points",
        "MegaKernels",
        "every point of the MegaKernels' space has the bits of kernels that stand alone",
        f"{_OWN}.mega_ranks:points_agree",
        90,
        "together",
        after=("experts", "rounds"),
    ),
    Check(
        "layer",
        "layer",
        "a layer has Sequential's bits under every overlap, planned by hosts and by devices",
        f"{_OWN}.trained:layer_agrees",
        60,
        "together",
        after=("mega points", "collectives"),
    ),
    Check(
        "planned without waiting",
        "layer",
        "a step over all ranks, planned on devices, never makes the host wait for the device",
        f"{_OWN}.waiting:planned_step_waits_for_nobody",
        45,
        "together",
        after=("no waiting", "mega points"),
    ),
    Check(
        "growth",
        "layer",
        "arenas grow between micro-batches, and no bit differs",
        f"{_OWN}.trained:arenas_grow",
        60,
        "together",
        after=("layer",),
    ),
    Check(
        "killed rank",
        "layer",
        "when a rank is killed, all others end, and say whom they miss",
        f"{_OWN}.trained:dead_rank_is_named",
        60,
        "together",
        after=("mega points",),
        dies=True,
    ),
    Check(
        "late ranks",
        "layer",
        "ranks that are 40 s and 120 s late are waited for",
        f"{_OWN}.trained:late_ranks_are_waited_for",
        260,
        "together",
        after=("mega points",),
    ),
    Check(
        "bench kernels",
        "measured",
        "how fast experts are on this GPU, beside grouped_mm and the peers that are installed",
        f"{_OWN}.benches:kernels_are_timed",
        120,
        "first",
        after=("experts",),
    ),
    Check(
        "bench overlap",
        "measured",
        "what MegaKernels hide, on virtual ranks of one GPU over paced links",
        f"{_OWN}.benches:overlap_is_timed",
        120,
        "first",
        after=("experts", "rounds on one GPU"),
    ),
    Check(
        "bench calibrate",
        "measured",
        "the speeds of GPUs and links that simulations of this machine need",
        f"{_OWN}.benches:links_are_calibrated",
        180,
        "together",
        after=("device",),
    ),
    Check(
        "bench models",
        "measured",
        "what a step of small models takes, on CPU ranks of this machine",
        f"{_OWN}.benches:models_are_timed",
        90,
        "first",
    ),
)
