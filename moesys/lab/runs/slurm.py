"""Jobs of a Slurm cluster, one for each trial, submitted by submitit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from moesys.config import Declaration
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import RealTraining
from moesys.lab.ranks.process_start import joins, threads_of, variables_set
from moesys.lab.runs.declarations import declared_in
from moesys.lab.runs.environment import collect_environment
from moesys.lab.runs.places import PendingTrial, Place, RankTrials, TrialError, TrialResult, result_of, simulated

if TYPE_CHECKING:
    import submitit

_POLL_S = 0.2
# Cancelled jobs of this machine have this time to end.
_CANCEL_S = 5.0


class Slurm(Declaration):
    """Options of the jobs, in the words of ``sbatch``. Each trial is a job of one array, with one task if it is
    simulated, and with one task per rank if it is measured.

    Fields that are None are left to the cluster. The run folder must be on a file system that its hosts share.
    """

    cluster: Annotated[
        Literal["slurm", "local"],
        Field(description="local: processes of this machine, all at once, to try out what would be submitted"),
    ] = "slurm"
    partition: Annotated[str | None, Field(description="--partition")] = None
    account: Annotated[str | None, Field(description="--account")] = None
    qos: Annotated[str | None, Field(description="--qos")] = None
    constraint: Annotated[str | None, Field(description="--constraint")] = None
    time: Annotated[PositiveInt, Field(description="minutes of a job")] = 60
    mem_gb: Annotated[float | None, Field(gt=0, description="--mem, of a node, in GB")] = None
    cpus_per_task: Annotated[PositiveInt | None, Field(description="None: the threads of a rank, or 1")] = None
    gpus_per_node: Annotated[
        int | None, Field(ge=0, description="None: one a rank where a training runs on GPUs, else none")
    ] = None
    at_once: Annotated[PositiveInt, Field(description="jobs of the array that may run at once")] = 256
    setup: Annotated[tuple[str, ...], Field(description="lines of shell before the trial, such as module load")] = ()
    further: Annotated[
        dict[str, str],
        Field(default_factory=dict, description='other options of sbatch, {"reservation": "ours"}; "" for a switch'),
    ]


def slurm_of(text: str) -> Slurm:
    """Reads ``partition=gpu,time=120``, fields of ``Slurm``; or a file of them in JSON or TOML.

    Raises ValueError for others.
    """
    if Path(text).suffix in (".json", ".toml") and "=" not in text:
        return declared_in(Path(text), Slurm)
    named = [part.partition("=") for part in text.split(",")]
    if odd := next(("".join(part) for part in named if not all(part)), None):
        raise ValueError(f"slurm={text!r}: {odd!r} is no field with a value, as partition=gpu; separate them by commas")
    try:
        return Slurm.model_validate({name.strip(): value.strip() for name, _, value in named})
    except ValueError as error:
        raise ValueError(f"slurm={text!r}: {error}") from None


class SlurmTrials(Place):
    """Trials as jobs: all are submitted at once, as one array.

    Raises ValueError if submitit or Slurm is not installed, and for an experiment that cannot run as such jobs.
    """

    def __init__(self, slurm: Slurm, experiment: Experiment, threads: int) -> None:
        super().__init__()
        if joins():
            raise ValueError("jobs=Slurm(...) starts ranks by itself; leave torchrun out")
        if find_spec("submitit") is None:
            raise ValueError("jobs=Slurm(...) submits by submitit: pip install 'moesys[slurm]'")
        _check(slurm, experiment)
        self._slurm, self._threads = slurm, threads
        self._jobs: list[submitit.Job[TrialResult | None]] = []

    def run_all(
        self, trials: Sequence[Trial], experiment: Experiment, started: Callable[[Trial], None], folder: Path
    ) -> Iterator[TrialResult]:
        executor = self._executor(experiment, folder / "jobs")
        with variables_set(threads_of(self._threads)), executor.batch():
            jobs = [executor.submit(_result_in_job, trial, experiment, self._threads) for trial in trials]
        self._jobs = jobs
        for trial, job in zip(trials, jobs, strict=True):
            self._pending.append(PendingTrial(trial, job.done, partial(_answered, trial, job)))
        yield from self._in_order(started)

    def close(self) -> None:
        """Cancels what still runs or waits."""
        running = [job for job in self._jobs if not job.done()]
        for job in running:
            job.cancel(check=False)
        until_s = time.monotonic() + _CANCEL_S * (self._slurm.cluster == "local")
        while time.monotonic() < until_s and not all(job.done() for job in running):
            time.sleep(_POLL_S)

    def _executor(self, experiment: Experiment, folder: Path) -> submitit.AutoExecutor:
        # This import is here because submitit is an extra.
        import submitit

        slurm, cluster, workload = self._slurm, experiment.cluster, experiment.workload
        local, measured = slurm.cluster == "local", isinstance(workload, RealTraining)
        nodes = cluster.num_nodes if measured and not local else 1
        tasks = cluster.num_ranks // nodes if measured else 1
        gpus = tasks if isinstance(workload, RealTraining) and workload.device == "cuda" else 0
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
            timeout_min=slurm.time,
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
    if isinstance(workload, RealTraining) and len(set(sizes)) > 1 and slurm.cluster == "slurm":
        raise ValueError(
            f"ranks_per_node={experiment.cluster.ranks_per_node}: jobs of jobs=Slurm(...) have as many ranks on "
            "every node; start ranks by torchrun instead"
        )


def _answered(trial: Trial, job: submitit.Job[TrialResult | None]) -> TrialResult:
    """Waits for the result of a job."""
    from submitit.core.utils import UncompletedJobError

    begun = datetime.now(UTC)
    while not job.done():
        time.sleep(_POLL_S)
    try:
        result = job.results()[0]
        assert result is not None
        return result
    except UncompletedJobError as error:
        line = (
            f"{trial.strategy.name}, seed {trial.seed}: its job {job.job_id} ended without a result, by a crash, "
            f"cancelled, or out of time or memory; see {job.task(0).paths.stderr}"
        )
        return TrialResult(trial, TrialError(line, str(error)), begun, (datetime.now(UTC) - begun).total_seconds())


def _result_in_job(trial: Trial, experiment: Experiment, threads: int) -> TrialResult | None:
    """Runs a trial in each task of a job; returns None in those that do not write."""
    if not isinstance(experiment.workload, RealTraining):
        result = result_of(trial, partial(simulated, trial, experiment))
    else:
        from submitit.helpers import TorchDistributedEnvironment

        # Ranks choose their GPUs by LOCAL_RANK, as under torchrun.
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
            # On many machines the name of the host is none that works.
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        with closing(RankTrials(experiment, threads)) as place:
            result = result_of(trial, partial(place.run, trial, experiment))
            if not place.writes:
                return None
    return replace(result, environment=collect_environment(threads))
