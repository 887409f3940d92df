"""Runs end well: exit code 0, and no process, thread or shared memory is left; those that are stopped say so, and those
that are killed lose no finished trial.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from left_behind import MARKER, SHARED, alive, gone, unmapped
from runner_cases import EP, FSEP, PIPELINED, training

from moesys.lab.runs.records import RunFolder

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


NUM_KILLS = 10 if os.environ.get("MOESYS_SWEEP") == "1" else 2


def recorded(out: Path) -> list[str]:
    return [
        record.identity
        for folder in out.glob("trained-*/records.jsonl")
        for record in RunFolder(folder.parent).records()
    ]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Variables of programs that must leave nothing behind."""
    marker, before = uuid.uuid4().hex, set(os.listdir(SHARED))
    paths = [str(HERE), *(path for path in sys.path if path)]
    yield {**os.environ, "PYTHONPATH": os.pathsep.join(paths), MARKER: marker}
    assert gone(marker, within_s=30), f"processes are left: {alive(marker)}"
    until_s = time.monotonic() + 10
    while (left := unmapped(before)) and time.monotonic() < until_s:
        time.sleep(0.2)
    assert not left, f"shared memory is left: {left}"


def printed(environment: dict[str, str], script: str, *arguments: str) -> list:
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_trainings_end_with_plans_under_way_and_a_rank_that_raises_waits_for_none(environment: dict[str, str]) -> None:
    """The other one ends well when it has gone. Slow tests have trainings that end together."""
    assert printed(environment, "forked_ranks.py", "rank 1 raises", "1") == [[0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["open", "gone before", "gone, then closed", "collected", "vanished", "rank 0 raises", "rank 1 raises"]
)
def test_a_training_ends_well_whatever_is_gone(environment: dict[str, str], mode: str) -> None:
    wanted = [int(mode == f"rank {rank} raises") for rank in range(2)]
    assert printed(environment, "forked_ranks.py", mode, "2") == [wanted] * 2


KINDS = ("simulated", "simulated on workers", "trained", "tuned", "MegaKernels", "local ranks")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tuned"])
def test_a_run_leaves_nothing(environment: dict[str, str], tmp_path: Path, kind: str) -> None:
    assert printed(environment, "one_end.py", kind, "1", str(tmp_path / "all")) == [0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_runs_leave_nothing(environment: dict[str, str], tmp_path: Path, kind: str) -> None:
    assert printed(environment, "one_end.py", kind, "50", str(tmp_path / "all")) == [0] * 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_trainings_with_plans_under_way_end_well(environment: dict[str, str]) -> None:
    assert printed(environment, "forked_ranks.py", "open", "50") == [[0, 0]] * 50


# --- SIGTERM ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import moesys as ms

if __name__ == "__main__":
    try:
        ms.run(ms.Experiment.from_json(open(sys.argv[1]).read()), sys.argv[2])
    except KeyboardInterrupt as stop:
        print(stop, file=sys.stderr)
        sys.exit(3)
"""


# A command ends so always: tests/faults, and a training whose rank raises, above.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["command", "script"])
def test_sigterm_ends_a_training_as_ctrl_c_does(environment: dict[str, str], tmp_path: Path, by: str) -> None:
    """Sent to all processes of the job, as batch systems do, when a trial is recorded or a little later."""
    # More trials than anybody waits for.
    experiment = training(strategies=(EP, FSEP, PIPELINED), seeds=tuple(range(100)))
    (tmp_path / "experiment.json").write_text(experiment.to_json())
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "runs"
    file = str(tmp_path / "experiment.json")
    command = ["-m", "moesys", "run", file, "--out", str(out)]
    command = command if by == "command" else [str(tmp_path / "script.py"), file, str(out)]
    # A group of its own.
    runner = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while runner.poll() is None and not recorded(out):
        time.sleep(0.05)
    time.sleep(0.3 * (by == "script"))
    os.killpg(runner.pid, signal.SIGTERM)
    told = runner.communicate(timeout=60)[1]
    (folder,) = out.glob("*/")
    finished = recorded(out)
    assert finished == [trial.identity for trial in experiment.trials()[: len(finished)]]
    assert f"stopped: {len(finished)} of 300 trials are recorded in {folder}; the same command goes on" in told
    assert runner.returncode == (128 + signal.SIGTERM if by == "command" else 3)
    assert all(record.status == "ok" for record in RunFolder(folder).records())


# --- SIGKILL, at random moments ---------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_killed_runner_loses_nothing_and_leaves_nobody(tmp_path: Path) -> None:
    experiment = training(
        strategies=(EP, FSEP, PIPELINED), seeds=tuple(range(-(-NUM_KILLS // 3))), workload=training().workload
    )
    (tmp_path / "experiment.json").write_text(experiment.to_json())
    out, marker = tmp_path / "runs", uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), MARKER: marker}
    command = [sys.executable, "-m", "moesys", "run", str(tmp_path / "experiment.json"), "--out", str(out)]
    moments = random.Random(0)
    finished: list[str] = []
    for kill in range(NUM_KILLS):
        runner = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # Every other time as soon as a further trial is recorded, else anywhere from the start on.
        deadline_s = time.monotonic() + (moments.uniform(0, 6) if kill % 2 else 60)
        while time.monotonic() < deadline_s and runner.poll() is None and len(recorded(out)) == len(finished):
            time.sleep(0.01)
        if kill == 0:
            # The runner, its ranks, and who forks them: those that the kill must not leave behind.
            assert len(alive(marker)) > 1 + experiment.cluster.num_ranks
        runner.kill()
        assert runner.wait() in (-signal.SIGKILL, 0)
        assert gone(marker, within_s=30)
        now = recorded(out)
        assert now[: len(finished)] == finished
        finished = now
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(experiment.trials())} of {len(experiment.trials())} trials are recorded" in done.stdout
    assert recorded(out)[: len(finished)] == finished
    assert recorded(out) == [trial.identity for trial in experiment.trials()]
    assert gone(marker, within_s=30)
