"""Chooses where trials run: in the cost model, on ranks that this process spawns, or among those of torchrun."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Measured, ModelTraining, Training
from moesys.lab.runs.trials import Measurement, run_measured, run_simulated
from moesys.lab.slow_links.namespaces import lacks
from moesys.lab.slow_links.processor_shares import lacks_shares
from moesys.lab.slow_links.shaped_links import ShapedLinks, shaped_links

if TYPE_CHECKING:
    from moesys.lab.ranks.pool import LocalRanks

T = TypeVar("T")

# How long ranks wait for one that failed in a place where nothing tells them.
_COLLECTIVE_TIMEOUT_S = 120.0
# Collectives notice lost ranks long before; this only ends what would hang for ever.
_TRIAL_TIMEOUT_S = 24 * 3600.0
_POLL_S = 0.01
# Read when Triton is loaded.
_INTERPRETING = {"TRITON_INTERPRET": "1"}
# Read when torch first maps peers' memory: more ranks than GPUs may use it.
_SHARING_GPUS = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class TrialError(Exception):
    """A trial failed. The message is one line; ``trace`` the whole traceback, of every rank that has one."""

    def __init__(self, line: str, trace: str) -> None:
        super().__init__(line)
        self.trace = trace


class Place(Protocol):
    """Where trials run. All its processes make the same calls; only one of them ``writes`` records and speaks."""

    writes: bool

    def on_writer(self, make: Callable[[], T]) -> T | None:
        """What ``make`` gives on the process that writes, None on the others. Its ValueError is raised on all."""

    def share(self, value: T | None) -> T:
        """The writer's ``value``, on all processes."""

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        """A measurement on the process that writes, None on the others. Raises TrialError on all."""

    def close(self) -> None: ...


def place_for(experiment: Experiment, threads: int) -> Place:
    """The cost model for a simulated experiment; else the ranks that torchrun started, or our own.

    Raises ValueError where what torchrun started does not suit the experiment.
    """
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if experiment.source == "simulated":
        if joins:
            raise ValueError("this experiment runs in the cost model, which needs no ranks; leave torchrun out")
        return CostModel()
    workload = experiment.workload
    assert isinstance(workload, Measured)
    if isinstance(workload, ModelTraining) and find_spec("transformers") is None:
        raise ValueError("workload=ModelTraining(...) trains models of transformers: pip install 'moesys[hf]'")
    if workload.shaped_links:
        if joins:
            raise ValueError("shaped_links=True puts ranks into hosts of its own making; leave torchrun out")
        if reason := lacks():
            raise ValueError(f"shaped_links=True cannot be had: {reason}; or use shaped_links=False")
        if workload.cpus_per_host is not None and (reason := lacks_shares()):
            raise ValueError(f"cpus_per_host={workload.cpus_per_host:g} cannot be had: {reason}")
        return SpawnedRanks(experiment.cluster.num_ranks, threads, workload, experiment.cluster)
    return (JoinedRanks if joins else SpawnedRanks)(experiment.cluster.num_ranks, threads, workload)


def shaped_cluster(cluster: ClusterSpec, cpus_per_host: float | None) -> AbstractContextManager[ShapedLinks]:
    """A host for each node of ``cluster``, behind links as fast and as far as it declares."""
    mbit_per_s = cluster.inter_node_gb_per_s * 8e3
    return shaped_links(cluster.num_nodes, mbit_per_s, cluster.inter_node_us, cpus_per_host=cpus_per_host)


class _OneProcess:
    """A place whose only process writes."""

    writes = True

    def on_writer(self, make: Callable[[], T]) -> T | None:
        return make()

    def share(self, value: T | None) -> T:
        assert value is not None
        return value

    def close(self) -> None: ...


class CostModel(_OneProcess):
    """Simulated trials, in this process."""

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        assert not isinstance(experiment.workload, Measured)
        try:
            return run_simulated(
                trial.strategy, experiment.model, experiment.cluster, experiment.workload, trial.seed, tick
            )
        except Exception as error:
            raise TrialError(_first_line(error), traceback.format_exc()) from None


class SpawnedRanks(_OneProcess):
    """Processes of this machine, started with the first trial and kept for all; after a failure they start anew.

    ``hosts``: a cluster whose nodes are hosts with shaped links.
    """

    def __init__(self, num_ranks: int, threads: int, workload: Measured, hosts: ClusterSpec | None = None) -> None:
        self._num_ranks, self._threads, self._workload, self._hosts = num_ranks, threads, workload, hosts
        self._backend = _backend_of(workload, num_ranks)
        self._ranks: LocalRanks | None = None
        self._opened = ExitStack()

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        # Not at the top: whoever has nothing left to run need not wait for torch.
        from moesys.balance import warm_up
        from moesys.lab.ranks.outcomes import RankError
        from moesys.lab.ranks.pool import LocalRanks, RankTimeouts

        # here, and not on all ranks at once
        warm_up(trial.strategy.balance, trial.strategy.split, late_slots=bool(trial.strategy.late_slots))
        if self._ranks is None:
            network = None
            if self._hosts is not None:
                links = self._opened.enter_context(shaped_cluster(self._hosts, self._workload.cpus_per_host))
                network = links.plan.network(self._hosts.node_sizes)
            self._ranks = LocalRanks(
                self._num_ranks,
                threads=self._threads,
                timeouts=RankTimeouts(run_s=_TRIAL_TIMEOUT_S, collective_s=_COLLECTIVE_TIMEOUT_S),
                environment=_environment_of(self._workload),
                preload=("moesys.lab.runs.trials", _learner_of(self._workload)),
                network=network,
                backend=self._backend,
            )
            self._opened.callback(self._ranks.close)
        try:
            return self._ranks.run(run_measured, *_arguments(trial, experiment), tick)[0]
        except RankError as error:
            raise _of_ranks(error) from None

    def close(self) -> None:
        self._opened.close()


class JoinedRanks:
    """One of the ranks that torchrun started, on any number of hosts. All run the trials in lock-step.

    Each trial has a default group of its own, as ``LocalRanks`` gives it, so that a failure leaves the next one clean.
    What ranks tell each other between trials goes through torchrun's store, which no failed collective can block.
    """

    def __init__(self, num_ranks: int, threads: int, workload: Measured) -> None:
        os.environ.update(_environment_of(workload))
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != num_ranks:
            raise ValueError(
                f"torchrun started {world_size} ranks but the experiment's cluster has {num_ranks}; "
                f"start {num_ranks} in all (--nproc-per-node times --nnodes), or leave torchrun out"
            )
        import torch
        import torch.distributed as dist

        self._backend = _backend_of(workload, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # On one host gloo would take the interface of the host name, which on many laptops is none that works.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        torch.set_num_threads(threads)
        self._dist = dist
        store, self._rank, self._num_ranks = next(dist.rendezvous("env://"))
        store.set_timeout(timedelta(seconds=_COLLECTIVE_TIMEOUT_S))
        # A store outlives a run, and a process may run several experiments: each has keys of its own.
        num_joined = store.add(f"moesys/joined/{self._rank}", 1)
        self._store: Any = dist.PrefixStore(f"moesys/{num_joined}", store)
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
        from moesys.lab.ranks.outcomes import Outcome, RankError

        self._num_runs += 1
        begin_s = time.monotonic()
        measurement, reason, trace = None, "", ""
        try:
            self._dist.init_process_group(
                self._backend,
                store=self._dist.PrefixStore(f"run{self._num_runs}", self._store),
                rank=self._rank,
                world_size=self._num_ranks,
                timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
            )
            measurement = run_measured(*_arguments(trial, experiment), tick)
        except Exception as error:
            reason, trace = f"raised {_first_line(error)}", traceback.format_exc()
        if reason:
            # Cuts off peers that wait for this rank. Where all went well they may still read: then only once all agree.
            self._leave()
        outcome = Outcome(
            self._rank, "raised" if reason else "returned", time.monotonic() - begin_s, time.time(), None, reason, trace
        )
        outcomes = self._told(outcome)
        self._leave()
        if any(outcome.kind == "raised" for outcome in outcomes):
            raise _of_ranks(RankError(outcomes))
        return measurement

    def close(self) -> None:
        self._leave()

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


def _learner_of(workload: Measured) -> str:
    """Returns the module that ranks load once, together."""
    return f"moesys.train.{'model' if isinstance(workload, ModelTraining) else 'byte'}_learner"


def _environment_of(workload: Measured) -> dict[str, str]:
    """What ranks must have before they load anything."""
    if workload.device == "cuda":
        return _SHARING_GPUS
    return _INTERPRETING if isinstance(workload, Training) and workload.interpret else {}


def _backend_of(workload: Measured, ranks_of_host: int) -> str:
    """Raises ValueError for GPUs where there are none."""
    if workload.device == "cpu":
        return "gloo"
    # Not at the top: whoever has nothing left to run need not wait for torch.
    from moesys.train.device import gpu_backend

    return gpu_backend(ranks_of_host)


def _arguments(
    trial: Trial, experiment: Experiment
) -> tuple[Strategy, ModelShape, ClusterSpec, Training | ModelTraining, int]:
    assert isinstance(experiment.workload, Measured)
    return trial.strategy, experiment.model, experiment.cluster, experiment.workload, trial.seed


def _of_ranks(error: Exception) -> TrialError:
    return TrialError(str(error).partition("\n")[0], str(error))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
