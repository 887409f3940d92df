"""The ranks that a command measures on: processes of this machine, or those that torchrun or a job of Slurm started."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moesys.config import ClusterSpec
from moesys.files import number_set
from moesys.lab.ranks.pool import LocalRanks, RankError
from moesys.lab.ranks.process import Outcome, leave_groups
from moesys.lab.ranks.process_start import LOOPBACK, first_line, joins

T = TypeVar("T")

# Ranks wait this long for a rank that failed where no message reports it.
COLLECTIVE_TIMEOUT_S = 120.0
_POLL_S = 0.01


def start_ranks(num_ranks: int, device_type: str = "cpu", *, threads: int = 1) -> tuple[Ranks, ClusterSpec]:
    """Returns the ranks of torchrun, of which this process is one, or ``num_ranks`` new ones of this machine; and a
    cluster that has as many nodes and ranks per node.
    """
    if not joins():
        return LocalRanks(num_ranks, threads=threads), ClusterSpec(ranks_per_node=num_ranks)
    ranks = TorchrunRanks("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl", threads=threads)
    # A rank without a number of its host is on the same node as the ranks beside it.
    hosts = ranks.gather(os.environ.get("GROUP_RANK", "0"))
    sizes = tuple(len(list(of_host)) for _, of_host in groupby(hosts))
    return ranks, ClusterSpec(num_nodes=len(sizes), ranks_per_node=sizes if len(set(sizes)) > 1 else sizes[0])


class TorchrunRanks:
    """The calling process as one of the ranks that torchrun started, on any number of hosts; all make the same calls.

    Each run has a default group of its own, as ``LocalRanks`` gives it, so that a failure does not harm the next run.
    What ranks exchange between runs goes through torchrun's store, which no failed collective can block.
    """

    def __init__(self, backend: str = "gloo", *, threads: int = 1) -> None:
        rank, num_ranks = (number_set(name, 0) for name in ("RANK", "WORLD_SIZE"))
        if rank >= num_ranks:
            raise ValueError(f"RANK={rank} is not one of WORLD_SIZE={num_ranks} ranks; start them by torchrun")
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # On one host gloo would take the interface of the host name, which on many laptops is none that works.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        torch.set_num_threads(threads)
        store, self._rank, self._num_ranks = next(dist.rendezvous("env://"))
        store.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        # A store outlives this object, and a process may make several: each has keys of its own.
        num_joined = store.add(f"moesys/joined/{self._rank}", 1)
        self._store: Any = dist.PrefixStore(f"moesys/{num_joined}", store)
        # Otherwise the store is torchrun's, which outlives all ranks.
        self._store_is_ranks = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._backend = backend
        self._num_gathered = self._num_runs = 0
        self.writes = self._rank == 0

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float | None = None) -> list[T]:
        """Returns the results of all ranks, on each rank; ``timeout_s`` is ignored, as collectives have their own."""
        return self.gather(self.call(fn, *args))

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        self._num_runs += 1
        begin_s = time.monotonic()
        returned, reason, trace = None, "", ""
        try:
            dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"run{self._num_runs}", self._store),
                rank=self._rank,
                world_size=self._num_ranks,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            returned = fn(*args)
        except Exception as error:
            reason, trace = f"raised {first_line(error)}", traceback.format_exc()
        if reason:
            # This cuts off peers that wait for this rank. After success they may still read, so all ranks agree first.
            self._leave()
        seconds = time.monotonic() - begin_s
        outcomes = self.gather(
            Outcome(self._rank, "raised" if reason else "returned", seconds, time.time(), None, reason, trace)
        )
        self._leave()
        if any(outcome.kind == "raised" for outcome in outcomes):
            raise RankError(outcomes)
        return returned  # type: ignore[return-value]

    def share(self, value: T | None) -> T:
        shared: T = self.gather(value)[0]
        return shared

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank. It polls, because a wait inside the store would not hear Ctrl-C."""
        self._num_gathered += 1
        keys = [f"gathered{self._num_gathered}/{rank}" for rank in range(self._num_ranks)]
        self._store.set(keys[self._rank], pickle.dumps(value))
        while not self._store.check(keys):
            time.sleep(_POLL_S)
        return [pickle.loads(self._store.get(key)) for key in keys]

    def close(self) -> None:
        self._leave()
        if self._store_is_ranks:
            # The store is gone already if rank 0 is.
            with suppress(RuntimeError):
                self._leave_last()

    def _leave_last(self) -> None:
        """Lets rank 0, which has the store, wait until the others have read it."""
        num_left, until_s = self._store.add("left", 1), time.monotonic() + COLLECTIVE_TIMEOUT_S
        while self._rank == 0 and num_left < self._num_ranks and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            num_left = self._store.add("left", 0)

    def _leave(self) -> None:
        if dist.is_initialized():
            leave_groups()


# Ranks that call a function at the same time, each time in a new process group: local ones, which belong to one
# process, or torchrun's, each of which makes the same calls. ``writes`` is True for the rank that prints and writes.
Ranks = LocalRanks | TorchrunRanks
