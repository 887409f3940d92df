"""Runs end well: exit code 0, and no process, thread or shared memory is left; those that are stopped say so."""

from __future__ import annotations

import json
import os
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
from test_kill import recorded

from moesys.lab.runs.records import RunFolder

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


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


def test_a_training_with_plans_under_way_ends_well_and_a_rank_that_raises_waits_for_none(
    environment: dict[str, str],
) -> None:
    """In one process, whose start takes most of the time. The rank that is freed slowly is the first; the other one:
    fifty trainings.
    """
    assert printed(environment, "forked_ranks.py", "open", "1", "rank 1 raises", "1") == [[0, 0], [0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gone before", "gone, then closed", "collected", "vanished", "rank 0 raises"])
def test_a_training_ends_well_whatever_is_gone(environment: dict[str, str], mode: str) -> None:
    assert printed(environment, "forked_ranks.py", mode, "2") == [[int(mode == "rank 0 raises"), 0]] * 2


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["command", pytest.param("script", marks=pytest.mark.slow)])
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
