"""Chooses where trials run: in the cost model, on ranks that this process spawns, or among those of torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from moesys.config import Strategy
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Measured, ModelTraining
from moesys.lab.runs.cost_model import CostModel
from moesys.lab.runs.joined_ranks import JoinedRanks
from moesys.lab.runs.place import OneProcess, Place, Ranks
from moesys.lab.runs.rank_settings import COLLECTIVE_TIMEOUT_S, arguments_of, backend_of, environment_of, of_ranks
from moesys.lab.runs.slurm import Slurm
from moesys.lab.runs.slurm_jobs import SlurmJobs
from moesys.lab.runs.trials import Measurement, run_measured
from moesys.lab.runs.workers import num_workers

if TYPE_CHECKING:
    from moesys.lab.ranks.pool import LocalRanks

T = TypeVar("T")

# Collectives notice lost ranks long before; this only ends what would hang for ever.
_TRIAL_TIMEOUT_S = 24 * 3600.0


def place_for(experiment: Experiment, threads: int, jobs: int | Slurm | None = None) -> Place:
    """The cost model for a simulated experiment, on so many workers; else the ranks that torchrun started, or our own.
    With ``Slurm`` jobs of a cluster, of either kind.

    Raises ValueError where what torchrun started, or ``jobs``, does not suit the experiment.
    """
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if isinstance(jobs, Slurm):
        if joins:
            raise ValueError("jobs=Slurm(...) starts ranks by itself; leave torchrun out")
        return SlurmJobs(jobs, threads, experiment)
    if experiment.source == "simulated":
        if joins:
            raise ValueError("this experiment runs in the cost model, which needs no ranks; leave torchrun out")
        return CostModel(num_workers(jobs))
    if num_workers(jobs) > 1 and jobs is not None:
        raise ValueError(
            f"jobs={jobs}: workload={type(experiment.workload).__name__} is timed, and trials side by side would slow "
            "each other down; leave jobs out, or use Slurm(...) for hosts of their own"
        )
    return ranks_for(experiment, threads)


def ranks_for(experiment: Experiment, threads: int) -> Ranks:
    """The ranks that torchrun started, or our own, of a measured experiment. Raises ValueError where they cannot be."""
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    workload = experiment.workload
    assert isinstance(workload, Measured)
    if isinstance(workload, ModelTraining) and find_spec("transformers") is None:
        raise ValueError("workload=ModelTraining(...) trains models of transformers: pip install 'moesys[hf]'")
    return (JoinedRanks if joins else SpawnedRanks)(experiment.cluster.num_ranks, threads, workload)


class SpawnedRanks(OneProcess):
    """Processes of this machine, started with the first trial and kept for all; after a failure they start anew."""

    def __init__(self, num_ranks: int, threads: int, workload: Measured) -> None:
        self._num_ranks, self._threads, self._workload = num_ranks, threads, workload
        self._backend = backend_of(workload, num_ranks)
        self._ranks: LocalRanks | None = None

    def run(self, trial: Trial, experiment: Experiment, tick: Callable[[], None]) -> Measurement | None:
        return self.call((trial.strategy,), run_measured, *arguments_of(trial, experiment), tick)

    def call(self, strategies: Sequence[Strategy], function: Callable[..., T], *arguments: Any) -> T:
        # Not at the top: whoever has nothing left to run need not wait for torch.
        from moesys.balance.planners import warm_up
        from moesys.lab.ranks.outcomes import RankError
        from moesys.lab.ranks.pool import LocalRanks, RankTimeouts

        for strategy in strategies:
            # here, and not on all ranks at once
            warm_up(strategy.balance, strategy.split, late_slots=bool(strategy.late_slots))
        if self._ranks is None:
            self._ranks = LocalRanks(
                self._num_ranks,
                threads=self._threads,
                timeouts=RankTimeouts(run_s=_TRIAL_TIMEOUT_S, collective_s=COLLECTIVE_TIMEOUT_S),
                environment=environment_of(self._workload),
                preload=("moesys.lab.runs.trials", learner_of(self._workload)),
                backend=self._backend,
            )
        try:
            return self._ranks.run(function, *arguments)[0]
        except RankError as error:
            raise of_ranks(error) from None

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


def learner_of(workload: Measured) -> str:
    """Returns the module that ranks load once, together."""
    return f"moesys.train.{'model' if isinstance(workload, ModelTraining) else 'byte'}_learner"
