"""Trials as jobs: submitit's own executor for this machine runs them, from end to end."""

from __future__ import annotations

import pytest
from runner_cases import EP, FAILING, FSEP, simulation, training
from test_workers import Finished, first_in_line, lines
from worker_planners import Dying, Waiting

from moesys.config import ClusterSpec
from moesys.lab.runs import slurm
from moesys.lab.runs.records import RunFolder
from moesys.lab.runs.runner import RunInterruption, run, trace_path
from moesys.lab.runs.slurm import Slurm, slurm_of

NODES = ClusterSpec(num_nodes=2, ranks_per_node=1, inter_node_gb_per_s=0.0625)
LOCAL = Slurm(cluster="local", time=5)


@pytest.mark.slow
def test_simulated_trials_are_those_of_this_process(tmp_path):
    experiment, told = simulation(strategies=(FSEP, FAILING), seeds=(0,)), Finished()
    here = run(experiment, tmp_path / "here", jobs=1)
    jobs = run(experiment, tmp_path / "jobs", jobs=LOCAL, progress=told)
    # An executor sets variables, and a traceback has its frames.
    said = [[line | {"trace": "", "environment": ""} for line in lines(result.path)] for result in (here, jobs)]
    assert said[0] == said[1]
    assert told.told == [(trial.strategy.name, trial.seed) for trial in experiment.trials()]
    assert len(list((jobs.path / "jobs").glob("*_log.out"))) == 2


# Jobs are submitted and cancelled always; torchrun, whose variables they have, trains in test_runner.py.
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_training_has_a_task_a_rank_and_the_losses_of_local_ranks(tmp_path):
    experiment = training(strategies=(FSEP,))
    here = run(experiment, tmp_path / "here")
    jobs = run(experiment, tmp_path / "jobs", jobs=LOCAL)
    assert not jobs.failed, jobs.records[0].trace
    assert jobs.records[0].losses == here.records[0].losses
    assert jobs.records[0].tokens_LE == here.records[0].tokens_LE
    assert trace_path(jobs.path, experiment.trials()[0]).exists()
    assert (jobs.path / f"environment-{jobs.records[0].environment}.json").exists()
    assert len(list((jobs.path / "jobs").glob("*_log.out"))) == 2


class Stopping(Finished):
    def finish(self, record) -> None:
        super().finish(record)
        if len(self.told) == 1:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_job_that_dies_is_named_with_its_log(tmp_path):
    dying = FSEP.replace(name="dying", balance=Dying())
    experiment = simulation(strategies=(dying, EP), seeds=(0,))
    result = run(experiment, tmp_path, jobs=LOCAL)
    (failed,) = result.failed
    assert failed.error.startswith("dying, seed 0: its job ")
    assert "ended without a result, by a crash, cancelled, or out of time or memory; see " in failed.error
    assert str(result.path / "jobs") in failed.error


# submitit does not wait for local jobs that it has cancelled.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_ctrl_c_keeps_what_is_finished_and_cancels_the_rest(tmp_path):
    waiting = FSEP.replace(name="waiting", balance=Waiting(seconds=100.0))
    experiment = first_in_line(EP, waiting)
    with pytest.raises(RunInterruption, match=r"1 of 2 trials are recorded in .*; the same command goes on from there"):
        run(experiment, tmp_path, jobs=LOCAL, progress=Stopping())
    (folder,) = tmp_path.iterdir()
    assert [record.strategy for record in RunFolder(folder).records()] == ["ep"]


def test_options_come_in_a_file_too(tmp_path):
    declared = Slurm(partition="gpu", setup=("module load cuda",), further={"reservation": "ours"})
    (tmp_path / "slurm.toml").write_text(declared.to_toml())
    assert slurm_of(str(tmp_path / "slurm.toml")) == declared
    assert slurm_of("time=90,partition=gpu") == Slurm(time=90, partition="gpu")


def test_what_cannot_be_submitted_is_refused(tmp_path, monkeypatch):
    words = r"jobs=Slurm\(...\): srun is not found here; call this where it is, or use cluster="
    with pytest.raises(ValueError, match=words):
        run(simulation(), tmp_path, jobs=Slurm())
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=r"jobs=Slurm\(...\) starts ranks by itself; leave torchrun out"):
            run(training(), tmp_path, jobs=LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"submits by submitit: pip install 'moesys\[slurm\]'"):
            run(simulation(), tmp_path, jobs=LOCAL)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", lambda: 2)
    uneven = training(cluster=ClusterSpec(num_nodes=2, ranks_per_node=(1, 2)))
    with pytest.raises(ValueError, match=r"ranks_per_node=\(1, 2\): jobs of jobs=Slurm.* start ranks by torchrun"):
        run(uneven, tmp_path, jobs=Slurm())
