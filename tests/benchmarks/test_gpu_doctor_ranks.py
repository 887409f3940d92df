"""benchmarks doctor between ranks: each check fails when what it proves does not hold on one of two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_gpu_doctor_faults import Fault, late_payloads, off_by_one, waits

from benchmarks.doctor import collectives, mega_ranks, rounds, trained, waiting
from benchmarks.doctor.layers import tokens_at
from benchmarks.doctor.place import Place
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap import mega_executor


def silent_reduce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dist, "all_reduce", lambda tensor: None)


def foreign_copies(patch: pytest.MonkeyPatch) -> None:
    """What is read of any rank is what lies 16 bytes behind it."""
    usual = collectives.start_copies
    patch.setattr(
        collectives,
        "start_copies",
        lambda copies, device: usual([of._replace(source=of.source + 16) for of in copies], device),
    )


def few_rounds_of_late_payloads(patch: pytest.MonkeyPatch) -> None:
    late_payloads(patch)
    patch.setattr(rounds, "REHEARSED_ROUNDS", 3)


def wrong_combine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mega_executor, "down_combine", off_by_one(mega_executor.down_combine))


def wrong_when_grown(patch: pytest.MonkeyPatch) -> None:
    """More tokens than usual are computed wrong."""
    usual = mega_executor.down_combine

    def combine(memory: Any, rows: Any, a_NI: Any, down: Any, weight_TK: Any, *rest: Any) -> Any:
        grown = len(weight_TK) > tokens_at(_place())
        return (off_by_one(usual) if grown else usual)(memory, rows, a_NI, down, weight_TK, *rest)

    patch.setattr(mega_executor, "down_combine", combine)


def waiting_combine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mega_executor, "down_combine", waits(mega_executor.down_combine))


def immortal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "kill", lambda process, signal: None)


def impatient(patch: pytest.MonkeyPatch) -> None:
    planned = trained.planned_on_devices
    patch.setattr(trained, "planned_on_devices", lambda place: planned(place).replace(timeout_s=0.3))
    patch.setattr(trained, "REHEARSED_LATE_S", (2.0,))


def on_a_fake_gpu(place: Place) -> str:
    """Two processes on one GPU, which is the CPU, with a toy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.doctor.place.device_of", lambda device_type, rank: torch.device("cpu"))
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(mega_ranks, "Size", lambda *sizes: mega_ranks.TOY)
        patch.setattr(mega_ranks, "_share", lambda place: mega_ranks.PROGRAMS)
        return mega_ranks.one_point_agrees(replace(place, device_type="cuda", most_gpus=1))


CHECKS: dict[str, Callable[[Place], str]] = {
    "collectives": collectives.collectives_add_up,
    "shared memory": collectives.memory_is_shared,
    "rounds": rounds.rounds_between_ranks_hold,
    "one GPU for two": on_a_fake_gpu,
    "mega points": mega_ranks.points_agree,
    "layer": trained.layer_agrees,
    "planned without waiting": waiting.planned_step_waits_for_nobody,
    "growth": trained.arenas_grow,
    "killed rank": trained.dead_rank_is_named,
    "late ranks": trained.late_ranks_are_waited_for,
}
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "collectives": (silent_reduce, 1, "all_reduce gave ["),
    "shared memory": (foreign_copies, 1, "words of rank 0 are not what it wrote"),
    "rounds": (few_rounds_of_late_payloads, 1, "words were not there when their flag was"),
    "one GPU for two": (wrong_combine, 1, "fused: y differs"),
    "mega points": (wrong_combine, 1, "fused: y differs"),
    "layer": (wrong_combine, 1, "y of micro-batch 0 differs from Sequential"),
    "planned without waiting": (waiting_combine, 0, "moesys.planted calls item, which waits for the device"),
    "growth": (wrong_when_grown, 1, "y of micro-batch 1 differs from Sequential"),
    "killed rank": (immortal, 1, "rank 1 was killed, and the step ended as if it had not been"),
    "late ranks": (impatient, 0, "PeerTimeoutError: rank 0 waited 0.3 s for rank 1"),
}


def _place() -> Place:
    return Place("cpu", Path("/nowhere"), 0, dist.get_rank(), dist.get_world_size())


def said(name: str) -> str:
    """What the check says on this rank with a fault planted on both."""
    fault, _, _ = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        try:
            return CHECKS[name](_place())
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, ranks: LocalRanks) -> None:
    _, rank, says = FAULTS[name]
    assert says in ranks.run(said, name, num_ranks=2, timeout_s=200)[rank]
