"""Ranks of a benchmark that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moesys.bench.calibrate.rank import rank_device
from moesys.config import ClusterSpec
from moesys.lab.runs.launch import LOOPBACK

T = TypeVar("T")


def joins() -> bool:
    """Whether torchrun, or something like it, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class JoinedRanks:
    """The ranks that torchrun started, of which this process is one; all make the same calls, and each gets what all
    give. ``cluster``: which of them share a node. ``writes``: whether this one prints and writes files.
    """

    def __init__(self, device_type: str, threads: int) -> None:
        torch.set_num_threads(threads)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # On one host gloo would take the interface of the host name, which on many laptops is none that works.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        rank_device(device_type)
        dist.init_process_group("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")
        self.writes = dist.get_rank() == 0
        # Without a number of its host a rank is in a node with all that come before and after it.
        hosts = self.run(_host)
        sizes = tuple(len(list(ranks)) for _, ranks in groupby(hosts))
        self.cluster = ClusterSpec(num_nodes=len(sizes), ranks_per_node=sizes if len(set(sizes)) > 1 else sizes[0])

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float | None = None) -> list[T]:
        """``timeout_s`` is the group's business here."""
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, fn(*args))
        return results

    def close(self) -> None:
        dist.destroy_process_group()


def _host() -> str:
    """The number that torchrun gives to a host."""
    return os.environ.get("GROUP_RANK", "0")
