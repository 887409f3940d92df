"""Each GPU check of several ranks fails when what it proves does not hold on one of two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_layers
import pytest
import test_4_between_ranks as between_ranks
import test_5_flags as flags
import test_6_mega_kernels as mega_kernels
import test_7_layer as layer
import torch
import torch.distributed as dist
from gpu_ranks import GpuRank
from test_planted_faults import Fault, late_payloads, off_by_one, waits

from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap import mega_executor


def silent_reduce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dist, "all_reduce", lambda tensor: None)


def foreign_copies(patch: pytest.MonkeyPatch) -> None:
    """Reads 16 bytes behind the address that was asked for."""
    usual = between_ranks.start_copies
    patch.setattr(
        between_ranks,
        "start_copies",
        lambda copies, device: usual([of._replace(source=of.source + 16) for of in copies], device),
    )


def few_rounds_of_late_payloads(patch: pytest.MonkeyPatch) -> None:
    late_payloads(patch)
    patch.setattr(flags, "REHEARSED_ROUNDS", 3)


def wrong_combine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mega_executor, "down_combine", off_by_one(mega_executor.down_combine))


def wrong_when_grown(patch: pytest.MonkeyPatch) -> None:
    """Computes larger micro-batches than usual wrong."""
    usual = mega_executor.down_combine

    def combine(memory: Any, rows: Any, a_NI: Any, down: Any, weight_TK: Any, *rest: Any) -> Any:
        grown = len(weight_TK) > gpu_layers.tokens_of(_gpu())
        return (off_by_one(usual) if grown else usual)(memory, rows, a_NI, down, weight_TK, *rest)

    patch.setattr(mega_executor, "down_combine", combine)


def waiting_combine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mega_executor, "down_combine", waits(mega_executor.down_combine))


def immortal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "kill", lambda process, signal: None)


def impatient(patch: pytest.MonkeyPatch) -> None:
    planned = layer.planned_on_devices
    patch.setattr(layer, "planned_on_devices", lambda gpu: planned(gpu).replace(timeout_s=0.3))
    patch.setattr(layer, "REHEARSED_LATE_S", (2.0,))


def on_a_fake_gpu(gpu: GpuRank) -> str:
    """Runs the check in two processes on one GPU, which is the CPU, on a small layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuRank, "device", torch.device("cpu"))
        patch.setattr(mega_kernels, "Size", lambda *sizes: mega_kernels.TOY)
        patch.setattr(mega_kernels, "_programs", lambda gpu: mega_kernels.REHEARSED_PROGRAMS)
        return mega_kernels.test_one_gpu_for_two(replace(gpu, num_gpus=1))


CHECKS: dict[str, Callable[[GpuRank], str]] = {
    "collectives": between_ranks.test_collectives,
    "shared memory": between_ranks.test_shared_memory,
    "rounds": flags.test_rounds,
    "one GPU for two": on_a_fake_gpu,
    "mega points": mega_kernels.test_mega_points,
    "layer": layer.test_layer,
    "planned without waiting": layer.test_planned_without_waiting,
    "growth": layer.test_growth,
    "killed rank": layer.test_killed_rank,
    "late ranks": layer.test_late_ranks,
}
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "collectives": (silent_reduce, 1, "all_reduce gave ["),
    "shared memory": (foreign_copies, 1, "words of rank 0 are not what it wrote"),
    "rounds": (few_rounds_of_late_payloads, 1, "words were not there when their flag was"),
    "one GPU for two": (wrong_combine, 1, "fused: y differs"),
    "mega points": (wrong_combine, 1, "fused: y differs"),
    "layer": (wrong_combine, 1, "y of micro-batch 0 differs from Sequential"),
    "planned without waiting": (waiting_combine, 0, "moesys.planted, line 1, calls item, which waits for the device"),
    "growth": (wrong_when_grown, 1, "y of micro-batch 1 differs from Sequential"),
    "killed rank": (immortal, 1, "rank 1 was killed, and the step ended as if it had not been"),
    "late ranks": (impatient, 0, "PeerTimeoutError: rank 0 waited 0.3 s for rank 1"),
}


def _gpu() -> GpuRank:
    return GpuRank(Path("/nowhere"), 0, dist.get_rank(), dist.get_world_size())


def said(name: str) -> str:
    """Returns what the check says on this rank, with a fault planted on both ranks."""
    fault, _, _ = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        try:
            return CHECKS[name](_gpu())
        except Exception as error:
            return f"{type(error).__name__}: {error}"


# They have the fault of "layer", or look at the same micro-batch.
SLOW = ("one GPU for two", "mega points", "planned without waiting", "growth", "late ranks")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FAULTS]
)
def test_a_planted_fault_is_found(name: str, ranks: LocalRanks) -> None:
    _, rank, says = FAULTS[name]
    assert says in ranks.run(said, name, num_ranks=2, timeout_s=200)[rank]
