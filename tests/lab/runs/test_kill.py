"""``kill -9`` of the runner at random moments: no finished trial is lost or run again, and no process stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from left_behind import MARKER, alive, gone
from runner_cases import EP, FSEP, PIPELINED, training

from moesys.lab.runs.records import RunFolder

NUM_KILLS = 10 if os.environ.get("MOESYS_SWEEP") == "1" else 2


def recorded(out: Path) -> list[str]:
    return [
        record.identity
        for folder in out.glob("trained-*/records.jsonl")
        for record in RunFolder(folder.parent).records()
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
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
