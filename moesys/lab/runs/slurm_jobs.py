"""SlurmJobs: the place of trials that run as jobs of a Slurm cluster, submitted by submitit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Measured
from moesys.lab.ranks.process_start import threads_of, variables_set
from moesys.lab.runs.cost_model import simulated
from moesys.lab.runs.environment import collect_environment
from moesys.lab.runs.joined_ranks import JoinedRanks
from moesys.lab.runs.place import InOrder, OneProcess, Onlooker, Ran, TrialError, no_tick, ran
from moesys.lab.runs.slurm import Slurm

if TYPE_CHECKING:
    import submitit

_POLL_S = 0.2
# How long jobs of this machine get to end when they are cancelled.
_CANCEL_S = 5.0


class SlurmJobs(OneProcess):
    """All trials are submitted at once, as one array, and handed out in their order.

    Raises ValueError where submitit or Slurm is not there, and for what cannot run as such a job.
    """

    def __init__(self, slurm: Slurm, threads: int, experiment: Experiment) -> None:
        if find_spec("submitit") is None:
            raise ValueError("jobs=Slurm(...) submits by submitit: pip install 'moesys[slurm]'")
        _check(slurm, experiment)
        self._slurm, self._threads = slurm, threads
        self._in_order = InOrder()
        self._jobs: list[submitit.Job[Ran | None]] = []

    def run_all(self, trials: Sequence[Trial], experiment: Experiment, onlooker: Onlooker) -> Iterator[Ran]:
        folder = onlooker.folder / "jobs"
        executor = self._executor(experiment, folder)
        with variables_set(threads_of(self._threads)), executor.batch():
            jobs = [executor.submit(_ran_in_job, trial, experiment, self._threads) for trial in trials]
        self._jobs = jobs
        for trial, job in zip(trials, self._jobs, strict=True):
            self._in_order.add(trial, _Submitted(trial, job))
        yield from self._in_order.handed_out(onlooker)

    def finished(self) -> Iterator[Ran]:
        return self._in_order.finished()

    def close(self) -> None:
        """Cancels what still runs or waits."""
        running = [job for job in self._jobs if not job.done()]
        for job in running:
            job.cancel(check=False)
        until_s = time.monotonic() + _CANCEL_S * (self._slurm.cluster == "local")
        while time.monotonic() < until_s and not all(job.done() for job in running):
            time.sleep(_POLL_S)

    def _executor(self, experiment: Experiment, folder: Path) -> submitit.AutoExecutor:
        # Not at the top: it is an extra.
        import submitit

        slurm, cluster, workload = self._slurm, experiment.cluster, experiment.workload
        local, measured = slurm.cluster == "local", isinstance(workload, Measured)
        nodes = cluster.num_nodes if measured and not local else 1
        tasks = cluster.num_ranks // nodes if measured else 1
        gpus = tasks if isinstance(workload, Measured) and workload.device == "cuda" else 0
        executor = submitit.AutoExecutor(folder, cluster=slurm.cluster)
        further = {name: value if value != "" else True for name, value in slurm.further.items()}
        of_slurm: dict[str, Any] = {
            **{f"slurm_{name}": getattr(slurm, name) for name in ("partition", "account", "qos", "constraint")},
            "slurm_array_parallelism": slurm.at_once,
            "slurm_additional_parameters": further or None,
            # Ranks wait for one that is gone.
            "slurm_srun_args": ["--kill-on-bad-exit=1"],
        }
        executor.update_parameters(
            name=experiment.name,
            timeout_min=slurm.minutes,
            mem_gb=slurm.mem_gb,
            nodes=nodes,
            tasks_per_node=tasks,
            cpus_per_task=slurm.cpus_per_task or self._threads,
            gpus_per_node=(gpus if slurm.gpus_per_node is None else slurm.gpus_per_node) or None,
            **{f"{slurm.cluster}_setup": list(slurm.setup) or None},
            **{} if local else of_slurm,
        )
        return executor


def _check(slurm: Slurm, experiment: Experiment) -> None:
    workload, sizes = experiment.workload, experiment.cluster.node_sizes
    if slurm.cluster == "slurm":
        import submitit

        if submitit.SlurmExecutor.affinity() <= 0:
            raise ValueError("jobs=Slurm(...): srun is not found here; call this where it is, or use cluster='local'")
    if isinstance(workload, Measured) and len(set(sizes)) > 1 and slurm.cluster == "slurm":
        raise ValueError(
            f"ranks_per_node={experiment.cluster.ranks_per_node}: jobs of jobs=Slurm(...) have as many ranks on "
            "every node; start ranks by torchrun instead"
        )


@dataclass(frozen=True)
class _Submitted:
    """A trial that is a job."""

    trial: Trial
    job: submitit.Job[Ran | None]

    def done(self) -> bool:
        return self.job.done()

    def result(self) -> Ran:
        from submitit.core.utils import UncompletedJobError

        begun = datetime.now(UTC)
        while not self.job.done():
            time.sleep(_POLL_S)
        try:
            result = self.job.results()[0]
            assert result is not None
            return result
        except UncompletedJobError as error:
            log = self.job.task(0).paths.stderr
            line = (
                f"{self.trial.strategy.name}, seed {self.trial.seed}: its job {self.job.job_id} ended without a "
                f"result, by a crash, cancelled, or out of time or memory; see {log}"
            )
            return Ran(self.trial, TrialError(line, str(error)), begun, (datetime.now(UTC) - begun).total_seconds())


def _ran_in_job(trial: Trial, experiment: Experiment, threads: int) -> Ran | None:
    """Called in each task of a job; None on those that do not write."""
    if not isinstance(experiment.workload, Measured):
        result = ran(trial, partial(simulated, trial, experiment, no_tick))
    else:
        from submitit.helpers import TorchDistributedEnvironment

        # Ranks choose their GPUs by LOCAL_RANK, as under torchrun.
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
            # On many machines the name of the host is none that works.
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        with closing(JoinedRanks(experiment.cluster.num_ranks, threads, experiment.workload)) as place:
            result = ran(trial, partial(place.run, trial, experiment, no_tick))
            if not place.writes:
                return None
    return replace(result, environment=collect_environment(threads))
