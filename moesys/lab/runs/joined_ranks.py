"""JoinedRanks: trials on ranks that somebody else has started, as torchrun or a job of Slurm."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from moesys.config import Strategy
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Measured
from moesys.lab.ranks.process_start import LOOPBACK
from moesys.lab.runs.place import OneByOne, first_line
from moesys.lab.runs.rank_settings import (
    COLLECTIVE_TIMEOUT_S,
    arguments_of,
    backend_of,
    environment_of,
    of_ranks,
)
from moesys.lab.runs.trials import Measurement, run_measured

T = TypeVar("T")

_POLL_S = 0.01


class JoinedRanks(OneByOne):
    """One of the ranks that torchrun started, on any number of hosts. All run the trials in lock-step.

    Each trial has a default group of its own, as ``LocalRanks`` gives it, so that a failure leaves the next one clean.
    What ranks tell each other between trials goes through torchrun's store, which no failed collective can block.
    """

    def __init__(self, num_ranks: int, threads: int, workload: Measured) -> None:
        os.environ.update(environment_of(workload))
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != num_ranks:
            raise ValueError(
                f"torchrun started {world_size} ranks but the experiment's cluster has {num_ranks}; "
                f"start {num_ranks} in all (--nproc-per-node times --nnodes), or leave torchrun out"
            )
        import torch
        import torch.distributed as dist

        self._backend = backend_of(workload, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # On one host gloo would take the interface of the host name, which on many laptops is none that works.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        torch.set_num_threads(threads)
        self._dist = dist
        store, self._rank, self._num_ranks = next(dist.rendezvous("env://"))
        store.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        # A store outlives a run, and a process may run several experiments: each has keys of its own.
        num_joined = store.add(f"moesys/joined/{self._rank}", 1)
        self._store: Any = dist.PrefixStore(f"moesys/{num_joined}", store)
        # Else it is torchrun's, which outlives all ranks.
        self._store_is_ranks = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._num_told = 0
        self._num_runs = 0
        self.writes = self._rank == 0

    def on_writer(self, make: Callable[[], T]) -> T | None:
        made, refusal = None, ""
        if self.writes:
            try:
                made = make()
            except ValueError as error:
                refusal = str(error)
        if refusal := self.share(refusal):
            raise ValueError(refusal)
        return made

    def share(self, value: T | None) -> T:
        shared: T = self._told(value)[0]
        return shared

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        return self.call((trial.strategy,), run_measured, *arguments_of(trial, experiment), tick)

    def call(self, _strategies: Sequence[Strategy], function: Callable[..., T], *arguments: Any) -> T:
        from moesys.lab.ranks.outcomes import Outcome, RankError

        self._num_runs += 1
        begin_s = time.monotonic()
        returned, reason, trace = None, "", ""
        try:
            self._dist.init_process_group(
                self._backend,
                store=self._dist.PrefixStore(f"run{self._num_runs}", self._store),
                rank=self._rank,
                world_size=self._num_ranks,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            returned = function(*arguments)
        except Exception as error:
            reason, trace = f"raised {first_line(error)}", traceback.format_exc()
        if reason:
            # Cuts off peers that wait for this rank. Where all went well they may still read: then only once all agree.
            self._leave()
        outcome = Outcome(
            self._rank, "raised" if reason else "returned", time.monotonic() - begin_s, time.time(), None, reason, trace
        )
        outcomes = self._told(outcome)
        self._leave()
        if any(outcome.kind == "raised" for outcome in outcomes):
            raise of_ranks(RankError(outcomes))
        return returned  # type: ignore[return-value]

    def close(self) -> None:
        self._leave()
        if self._store_is_ranks:
            # Gone already where rank 0 is.
            with suppress(RuntimeError):
                self._leave_last()

    def _leave_last(self) -> None:
        """Rank 0 has the store that others may still read."""
        num_left, until_s = self._store.add("left", 1), time.monotonic() + COLLECTIVE_TIMEOUT_S
        while self._rank == 0 and num_left < self._num_ranks and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            num_left = self._store.add("left", 0)

    def _leave(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _told(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Polls, for a wait inside the store would not hear Ctrl-C."""
        self._num_told += 1
        keys = [f"told{self._num_told}/{rank}" for rank in range(self._num_ranks)]
        self._store.set(keys[self._rank], pickle.dumps(value))
        while not self._store.check(keys):
            time.sleep(_POLL_S)
        return [pickle.loads(self._store.get(key)) for key in keys]
