"""The ranks that a bench measures on: processes of this machine, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from moesys.config import ClusterSpec
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.ranks.process_start import LOOPBACK

T = TypeVar("T")


class Ranks(Protocol):
    """What runs a function on every rank at once, as ``LocalRanks`` does."""

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float | None = None) -> list[T]:
        """``fn(*args)`` of each rank, in rank order. ``fn`` is a module's."""


def joins() -> bool:
    """Whether torchrun, or something like it, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def writes() -> bool:
    """Whether this process prints and writes files, as the first of torchrun's ranks alone does."""
    return os.environ.get("RANK", "0") == "0"


def start_ranks(
    num_ranks: int, device_type: str = "cpu", *, threads: int = 1
) -> tuple[LocalRanks | TorchrunRanks, ClusterSpec]:
    """The ranks of torchrun, of which this process is one, or ``num_ranks`` new ones of this machine; and which of them
    share a node.
    """
    if joins():
        joined = TorchrunRanks(device_type, threads)
        return joined, joined.cluster
    return LocalRanks(num_ranks, threads=threads), ClusterSpec(ranks_per_node=num_ranks)


class TorchrunRanks:
    """The ranks that torchrun started; all make the same calls, and each gets what all give.

    ``cluster``: which of them share a node.
    """

    def __init__(self, device_type: str, threads: int) -> None:
        torch.set_num_threads(threads)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # On one host gloo would take the interface of the host name, which on many laptops is none that works.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        rank_device(device_type)
        dist.init_process_group("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")
        # Without a number of its host a rank is in a node with all that come before and after it.
        sizes = tuple(len(list(ranks)) for _, ranks in groupby(self.run(_host)))
        self.cluster = ClusterSpec(num_nodes=len(sizes), ranks_per_node=sizes if len(set(sizes)) > 1 else sizes[0])

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float | None = None) -> list[T]:
        """``timeout_s`` is the group's business here."""
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, fn(*args))
        return results

    def close(self) -> None:
        dist.destroy_process_group()


def rank_device(device_type: str) -> torch.device:
    """The CPU, or the GPU that is this rank's among its host's."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _host() -> str:
    """The number that torchrun gives to a host."""
    return os.environ.get("GROUP_RANK", "0")
