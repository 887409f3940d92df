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


def codes_of(environment: dict[str, str], mode: str, count: int) -> list[list[int]]:
    command = [sys.executable, str(HERE / "forked_ranks.py"), mode, str(count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_trainings_end_with_plans_under_way_and_a_rank_that_raises_waits_for_none(environment: dict[str, str]) -> None:
    """The other one ends well when it has gone. Slow tests have trainings that end together."""
    assert codes_of(environment, "rank 1 raises", 1) == [[0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["open", "gone before", "gone, then closed", "collected", "vanished", "rank 0 raises", "rank 1 raises"]
)
def test_a_training_ends_well_whatever_is_gone(environment: dict[str, str], mode: str) -> None:
    wanted = [int(mode == f"rank {rank} raises") for rank in range(2)]
    assert codes_of(environment, mode, 2) == [wanted] * 2


# tests/faults has what runs, trainings and tunings leave.
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("mode", "codes"), [("simulated on workers", [0]), ("MegaKernels", [0]), ("local ranks", [0]), ("open", [0, 0])]
)
def test_fifty_runs_end_well_and_leave_nothing(environment: dict[str, str], mode: str, codes: list[int]) -> None:
    assert codes_of(environment, mode, 50) == [codes] * 50
