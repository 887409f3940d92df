"""Who makes the checks: processes of this machine, new ones for each check, for this machine's GPUs or for the one of a
rank that torchrun started.

A fault on a GPU poisons the process that made it, and a kernel that hangs takes its process along: so this process
touches no GPU, and those that do end with their check.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from benchmarks.doctor.checks import Check
from benchmarks.doctor.place import LeftOutError, Place
from moesys.lab.ranks.outcomes import Outcome
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.ranks.process_start import LOOPBACK
from moesys.train.device import gpu_backend

# Of a check that needs several ranks, where there is one GPU or none.
PAIR = 2
# What others get to fail too, after the first rank of a check has.
GRACE_S = 10.0
# Loaded once, ahead of all processes; none of these touches a GPU.
PRELOAD = ("triton", "moesys.moe.layer", "moesys.overlap.mega_executor", "benchmarks.kernels.kernels_contest")
INTERFACE = "GLOO_SOCKET_IFNAME"


class Said(NamedTuple):
    """What a check returned: whether it could be made, and a line."""

    made: bool
    line: str


class Joining(NamedTuple):
    """How a process joins others of torchrun's: as which rank of how many, where they meet, and by which interface."""

    rank: int
    num_ranks: int
    meeting: str
    interface: str


class Crew(Protocol):
    """``rank``: of this process among those that examine together; the first decides and writes."""

    rank: int

    def run(self, check: Check, place: Place, timeout_s: float) -> list[Outcome]:
        """What became of each rank of a check. The result of one that returned is what it ``Said``."""

    def agreed(self, own: float) -> float:
        """The first rank's number, on all."""


class LocalCrew:
    """Ranks that this process starts: one for each GPU of the machine, or a pair on one or none.

    ``environment``: variables of all processes, before they load anything.
    """

    rank = 0

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def run(self, check: Check, place: Place, timeout_s: float) -> list[Outcome]:
        if check.ranks == "two on one GPU":
            place = replace(place, most_gpus=min(1, place.most_gpus))
        num_ranks = {"first": 1, "alone": max(1, place.most_gpus)}.get(check.ranks, max(PAIR, place.most_gpus))
        together = check.ranks == "together" and not place.rehearsed
        backend = gpu_backend(num_ranks) if together else "gloo"
        with _pool(num_ranks, timeout_s, self._environment, backend) as pool:
            dead = [num_ranks - 1] if check.dies else []
            return pool.outcomes(made, check, place, grace_s=GRACE_S, expect_dead=dead)

    def agreed(self, own: float) -> float:
        return own


class TorchrunCrew:
    """One of torchrun's ranks, which starts a process for itself; all make the same checks in the same order.

    ``limit_s``: the longest that any check takes.
    """

    def __init__(self, environment: Mapping[str, str], limit_s: float) -> None:
        self._environment, self._local = environment, LocalCrew(environment)
        self._interface = os.environ.get(INTERFACE, LOOPBACK if _is_one_host() else "")
        if self._interface:
            os.environ[INTERFACE] = self._interface
        dist.init_process_group("gloo", timeout=timedelta(seconds=2 * limit_s))
        self.rank = dist.get_rank()

    def run(self, check: Check, place: Place, timeout_s: float) -> list[Outcome]:
        own: list[Outcome] = []
        meeting = self._meeting()
        if check.ranks in ("alone", "together"):
            join = Joining(self.rank, dist.get_world_size(), meeting, self._interface)
            with _pool(1, timeout_s, self._environment, "gloo") as pool:
                (outcome,) = pool.outcomes(made, check, place, join)
            own = [replace(outcome, rank=self.rank)]
        elif self.rank == 0:
            own = self._local.run(check, replace(place, most_gpus=min(1, place.most_gpus)), timeout_s)
        everyones: list[list[Outcome]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyones, own)
        return [outcome for outcomes in everyones for outcome in outcomes]

    def agreed(self, own: float) -> float:
        number_1 = torch.tensor([own], dtype=torch.float64)
        dist.broadcast(number_1, 0)
        return float(number_1)

    def _meeting(self) -> str:
        """Where the processes of a check meet: a free port of the first rank's host."""
        found = [f"tcp://{os.environ['MASTER_ADDR']}:{_free_port()}" if self.rank == 0 else ""]
        dist.broadcast_object_list(found, 0)
        return found[0]


def made(check: Check, place: Place, join: Joining | None = None) -> Said:
    """Makes a check in this process, which is there for it alone: what it prints goes into a file of the folder.

    Ranks that make it each alone have no group. Without ``join`` those that make it together have that of their pool.
    """
    own = Joining(dist.get_rank(), dist.get_world_size(), "", "") if join is None else join
    if join is not None or check.ranks in ("alone", "first"):
        dist.destroy_process_group()
        os.environ.setdefault("LOCAL_RANK", str(own.rank))
    if join is not None and check.ranks == "together":
        _join(join, place)
    place = replace(place, rank=own.rank, num_ranks=own.num_ranks if dist.is_initialized() else 1)
    log = place.folder / "logs" / f"{check.name.replace(' ', '_').replace(',', '')}.rank{own.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        for told in (1, 2):
            os.dup2(file.fileno(), told)
    module, _, function = check.run.partition(":")
    try:
        line = getattr(import_module(module), function)(place)
        if not place.rehearsed:
            # What a kernel did wrong is this check's.
            torch.cuda.synchronize()
    except LeftOutError as why:
        return Said(False, str(why))
    return Said(True, line)


def _join(join: Joining, place: Place) -> None:
    # The group meets where this doctor says, and not at torchrun's own store.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if join.interface:
        os.environ[INTERFACE] = join.interface
    else:
        os.environ.pop(INTERFACE, None)
    backend = "gloo" if place.rehearsed else gpu_backend(int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(backend, init_method=join.meeting, rank=join.rank, world_size=join.num_ranks)


def _pool(num_ranks: int, timeout_s: float, environment: Mapping[str, str], backend: str) -> LocalRanks:
    timeouts = RankTimeouts(run_s=timeout_s, collective_s=timeout_s)
    return LocalRanks(num_ranks, timeouts=timeouts, environment=environment, preload=PRELOAD, backend=backend)


def _is_one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
