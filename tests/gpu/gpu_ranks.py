"""The ranks that a GPU check runs on: new processes of this host, or one process for each of torchrun's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.ranks.process import Outcome, gpu_backend
from moesys.lab.ranks.process_start import LOOPBACK

# alone: each GPU by itself. first: one process on the first rank. together: one rank per GPU, or two ranks on one GPU.
Ranks = Literal["alone", "first", "together", "two on one GPU"]

ROOT = Path(__file__).parents[2]
# Triton must not interpret on a GPU, and several ranks on one GPU may map each other's memory.
ON_GPU = {"TRITON_INTERPRET": "0", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
ON_CPU = {"TRITON_INTERPRET": "1"}
# Loaded once, before all processes; none of these touches a GPU.
PRELOAD = ("pytest", "triton", "moesys.moe.layer", "moesys.overlap.mega_executor", "benchmarks.kernels.kernels_contest")
INTERFACE = "GLOO_SOCKET_IFNAME"
# The ranks of a check that needs several, where there is at most one GPU.
PAIR = 2
# The time that other ranks have to fail too, after the first rank of a check has failed.
GRACE_S = 10.0


@dataclass(frozen=True)
class GpuRank:
    """The rank that a check runs on.

    folder: where a check writes files. num_gpus: the GPUs that the ranks of this host use, 0 in a rehearsal. num_ranks:
    the ranks of the check's process group, 1 if each rank runs by itself.
    """

    folder: Path
    num_gpus: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def rehearsed(self) -> bool:
        return not self.num_gpus

    @property
    def device(self) -> torch.device:
        """This rank's device. Makes it the current one."""
        if self.rehearsed:
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)) % self.num_gpus)
        torch.cuda.set_device(device)
        return device

    @property
    def ranks_per_gpu(self) -> int:
        """The number of ranks that share a GPU. Their kernels take turns there, as the driver slices its time."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        return -(-local // max(1, self.num_gpus))

    def require_gpu(self, why: str) -> None:
        """Skips the check in a rehearsal."""
        if self.rehearsed:
            pytest.skip(f"no GPU found; {why}")


@dataclass(frozen=True)
class Check:
    """A test with the marker ``gpu``.

    limit_s: the seconds after which it fails. after: names of the checks that it depends on. dies: the last rank is
    killed, on purpose.
    """

    function: Callable[[GpuRank], str]
    layer: str
    limit_s: float
    ranks: Ranks = "alone"
    after: tuple[str, ...] = ()
    dies: bool = False

    @classmethod
    def of(cls, item: pytest.Function) -> Check:
        """Reads the markers of a test and of its module."""
        fields: dict[str, Any] = {}
        for marker in item.iter_markers("gpu"):
            fields = {**marker.kwargs, **fields}
        return cls(item.function, **fields)

    @property
    def name(self) -> str:
        return self.function.__name__.removeprefix("test_").replace("_", " ")


def outcomes_here(check: Check, gpu: GpuRank, limit_s: float) -> list[Outcome]:
    """Runs a check on processes of this host: one per GPU, or two on one GPU or none."""
    if check.ranks == "two on one GPU":
        gpu = replace(gpu, num_gpus=min(1, gpu.num_gpus))
    num_ranks = {"first": 1, "alone": max(1, gpu.num_gpus)}.get(check.ranks, max(PAIR, gpu.num_gpus))
    backend = gpu_backend(num_ranks) if check.ranks == "together" and not gpu.rehearsed else "gloo"
    with _pool(num_ranks, limit_s, gpu, backend) as pool:
        dead = [num_ranks - 1] if check.dies else []
        return pool.outcomes(run_on_rank, check, gpu, grace_s=GRACE_S, expect_dead=dead)


def outcome_of_torchrun(check: Check, gpu: GpuRank, limit_s: float, port: int) -> Outcome:
    """Runs a check in one process for this rank of torchrun's; the group of all of them meets at ``port``."""
    with _pool(1, limit_s, gpu) as pool:
        return replace(pool.outcomes(run_on_rank, check, gpu, port)[0], rank=int(os.environ["RANK"]))


def run_on_rank(check: Check, gpu: GpuRank, port: int = 0) -> tuple[str, str]:
    """Runs a check in this process, which serves it alone. Returns why it was skipped, or "", and what it observed.

    ``port`` is given where the process serves a rank of torchrun's. What a check prints goes into a file.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if port:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if port or check.ranks in ("alone", "first"):
        dist.destroy_process_group()
        os.environ.setdefault("LOCAL_RANK", str(rank))
    if port and check.ranks == "together":
        _join_torchrun(gpu, port)
    gpu = replace(gpu, rank=rank, num_ranks=num_ranks if dist.is_initialized() else 1)
    log = gpu.folder / "logs" / f"{check.name.replace(' ', '_')}.rank{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        says = check.function(gpu)
    except pytest.skip.Exception as skipped:
        return str(skipped), ""
    if not gpu.rehearsed:
        # An error of a kernel belongs to the check that launched it.
        torch.cuda.synchronize()
    return "", says


def _pool(num_ranks: int, limit_s: float, gpu: GpuRank, backend: str = "gloo") -> LocalRanks:
    timeouts = RankTimeouts(run_s=limit_s, collective_s=limit_s)
    # Modules are preloaded from this checkout, before a process knows the paths of pytest.
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**(ON_CPU if gpu.rehearsed else ON_GPU), "PYTHONPATH": paths}
    return LocalRanks(num_ranks, timeouts=timeouts, environment=environment, preload=PRELOAD, backend=backend)


def _join_torchrun(gpu: GpuRank, port: int) -> None:
    # The group meets at a port of this check, not at torchrun's own store.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    # Ranks of several hosts do not meet on the loopback interface, which the pool takes where none is named.
    several_hosts = os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
    if several_hosts and os.environ.get(INTERFACE) == LOOPBACK:
        del os.environ[INTERFACE]
    dist.init_process_group("gloo" if gpu.rehearsed else gpu_backend(int(os.environ["LOCAL_WORLD_SIZE"])))
