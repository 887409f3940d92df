"""Simulated trials and tunings side by side: what one core gives, whichever ends first and however it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import worker_planners
from lab_cases import moesys
from left_behind import MARKER, alive, gone
from runner_cases import EP, FAILING, FSEP, simulation
from test_tuning import SPACE, written
from worker_planners import Dying, Noting, Waiting

from moesys import Experiment, SearchBounds, run, tune
from moesys.lab.ranks.pool import WorkerDiedError, Workers
from moesys.lab.ranks.process import ChildProcess
from moesys.lab.runs.places import SimulatedTrials
from moesys.lab.runs.records import RunFolder
from moesys.lab.runs.runner import QuietProgress

WAITING = FSEP.replace(name="waiting", balance=Waiting(seconds=0.2))
DYING = FSEP.replace(name="dying", balance=Dying())


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Workers begin with the first step, however little there is to do."""
    monkeypatch.setattr("moesys.lab.ranks.pool.ALONE_S", 0.0)


def lines(path: Path) -> list[dict]:
    """Of a run folder, less what a clock says."""
    found = [json.loads(line) for line in (path / "records.jsonl").read_bytes().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("started", "seconds")} for line in found]


def first_in_line(strategy, *others, **changes) -> Experiment:
    """One whose first trial is that of ``strategy``."""
    experiments = (simulation(strategies=(strategy, *others), seeds=(seed,), **changes) for seed in range(100))
    return next(one for one in experiments if one.trials()[0].strategy == strategy)


def test_workers_and_jobs_have_the_planners_that_the_command_imported(tmp_path, monkeypatch):
    (tmp_path / "own_ones.py").write_text(Path(worker_planners.__file__).read_text())
    waiting = FSEP.model_dump(mode="json") | {"name": "own", "balance": {"kind": "own_ones:Waiting", "seconds": 0.0}}
    experiment = simulation(strategies=(EP,), seeds=(0,)).model_dump(mode="json") | {"strategies": [waiting]}
    (tmp_path / "experiment.json").write_text(json.dumps(experiment))
    monkeypatch.chdir(tmp_path)
    for out, options in (("workers", ("--jobs", 2)), ("jobs", ("--slurm", "cluster=local"))):
        assert moesys("run", "experiment.json", "--out", out, "--import", "own_ones", *options) == 0
        (folder,) = filter(Path.is_dir, Path(out).iterdir())
        assert {record.strategy: record.status for record in RunFolder(folder).records()} == {"own": "ok"}


class Finished(QuietProgress):
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def finish(self, record) -> None:
        self.told.append((record.strategy, record.seed))


def test_records_and_their_order_are_those_of_one_core(tmp_path):
    experiment = first_in_line(WAITING, EP, FSEP, FAILING)
    told = [Finished(), Finished()]
    alone, several = (run(experiment, tmp_path / str(jobs), jobs=jobs, progress=told[jobs - 1]) for jobs in (1, 2))
    assert lines(alone.path) == lines(several.path)
    assert told[0].told == told[1].told == [(trial.strategy.name, trial.seed) for trial in experiment.trials()]
    # The first one was the last to end, and the others did not wait for it.
    assert several.records[0].strategy == "waiting"
    assert several.records[0].seconds > 1


def test_a_worker_that_dies_fails_its_trial_and_no_other(tmp_path):
    result = run(simulation(strategies=(EP, DYING, FSEP)), tmp_path, jobs=2)
    assert sorted((record.strategy, record.seed) for record in result.failed) == [("dying", 0), ("dying", 1)]
    for record in result.failed:
        assert record.error.startswith(f"dying, seed {record.seed}: its worker process died, by a crash or killed")
        assert "use fewer jobs, or jobs=1" in record.error
    assert len(result.records) == 6


def test_a_short_experiment_needs_no_worker_and_a_place_that_ran_nothing_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("moesys.lab.ranks.pool.ALONE_S", 1e9)
    assert not run(simulation(strategies=(EP, DYING)), tmp_path, jobs=2).failed
    SimulatedTrials(2).close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "stop", [*(pytest.param(stop, marks=pytest.mark.slow) for stop in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL]
)
def test_what_is_stopped_keeps_what_is_finished_and_leaves_nobody(tmp_path, stop):
    workload = simulation().workload.replace(steps=6)
    slow = WAITING.replace(balance=Waiting(seconds=0.5))
    notes = [tmp_path / "a", tmp_path / "b"]
    quick = [FSEP.replace(name=note.name, balance=Noting(file=str(note))) for note in notes]
    experiment = first_in_line(slow, *quick, workload=workload)
    file, _ = written(tmp_path, experiment)
    out, marker = tmp_path / "runs", uuid.uuid4().hex
    paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), MARKER: marker}
    # Background jobs of a shell ignore SIGINT, and what they start inherits that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "moesys", "run", str(file), "--out", str(out)]
    command += ["--jobs", "2", "--import", "worker_planners"]
    runner = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    others = [trial.identity for trial in experiment.trials()[1:]]
    # The first micro-batch has the layout before any plan.
    num_plans, until_s = workload.warmup + workload.steps - 1, time.monotonic() + 60
    while time.monotonic() < until_s and runner.poll() is None:
        if all(note.exists() and note.stat().st_size >= num_plans for note in notes):
            break
        time.sleep(0.05)
    # Answers are on their way.
    time.sleep(1.0)
    assert runner.poll() is None, runner.stderr.read()
    assert len(alive(marker)) >= 3
    # As a terminal does, and a batch system: to all of them.
    runner.kill() if stop == signal.SIGKILL else os.killpg(runner.pid, stop)
    told = runner.communicate(timeout=30)[1]
    assert gone(marker, within_s=10)
    (folder,) = filter(Path.is_dir, out.iterdir())
    if stop != signal.SIGKILL:
        assert runner.returncode == 128 + stop
        assert told == f"stopped: 2 of 3 trials are recorded in {folder}; the same command goes on from there\n"
        assert [record.identity for record in RunFolder(folder).records()] == others


# --- workers ----------------------------------------------------------------------------------------------------------


def variable(name: str) -> str:
    return os.environ[name]


def exit_with(code: int) -> None:
    os._exit(code)


class Unreadable:
    """An answer that cannot be unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def unreadable(_: int) -> Unreadable:
    return Unreadable()


@pytest.mark.timeout(60)
def test_workers_have_a_thread_each_and_one_that_dies_or_whose_answer_cannot_be_read_is_replaced(monkeypatch):
    workers = Workers(1)
    assert workers.submit(variable, "OMP_NUM_THREADS").result() == "1"
    for work in (exit_with, unreadable):
        with pytest.raises(WorkerDiedError):
            workers.submit(work, 3).result()
        # A pool's thread that is left closes a pipe that Python's exit writes to.
        assert not [thread for thread in threading.enumerate() if "Executor" in type(thread).__name__]
        assert workers.submit(variable, "OPENBLAS_NUM_THREADS").result() == "1"
    running, waiting = workers.submit(time.sleep, 1000), workers.submit(time.sleep, 1000)
    time.sleep(0.2)
    workers.close()
    assert waiting.cancelled()
    with pytest.raises(WorkerDiedError):
        running.result()
    # As in a script without a guard, which test_runner.py has.
    workers = Workers(1)
    monkeypatch.setattr(ChildProcess, "_received", lambda _: None)
    with pytest.raises(ValueError, match=r'a script needs `if __name__ == "__main__":` around what it runs, and to'):
        workers.submit(variable, "OMP_NUM_THREADS").result()
    workers.close()


# --- tunings ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_of_a_point_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"strategy 'dying', .* steps? of seeds 0, 1: its worker process died"):
        tune(simulation(strategies=(EP, DYING)), SPACE, SearchBounds(4, jobs=2), out=tmp_path)
    # What was found out before is kept.
    assert tune(simulation(strategies=(EP,)), SPACE, SearchBounds(4, jobs=1), out=tmp_path).tuned.search.ranking
