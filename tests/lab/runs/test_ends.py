"""Runs end well: exit code 0, and no process, thread or shared memory is left. tests/faults stops and kills them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from left_behind import MARKER, SHARED, alive, gone, unmapped

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


# tests/faults has what runs, trainings and tunings leave.
KINDS = ("simulated on workers", "MegaKernels", "local ranks")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_runs_leave_nothing(environment: dict[str, str], tmp_path: Path, kind: str) -> None:
    assert printed(environment, "one_end.py", kind, "50", str(tmp_path / "all")) == [0] * 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_trainings_with_plans_under_way_end_well(environment: dict[str, str]) -> None:
    assert printed(environment, "forked_ranks.py", "open", "50") == [[0, 0]] * 50
