"""A wheel that is built from this tree works in an environment that has nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_wheel_installs_into_an_empty_environment_and_runs_the_demo(tmp_path: Path) -> None:
    def run(*command: str | Path) -> str:
        # Elsewhere than in the tree, whose package would be imported.
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    commands = tmp_path / "empty" / "bin"
    # The version of this environment, as the newest one may be a build for CUDA of several gigabytes.
    run(commands / "pip", "install", f"torch=={version('torch').partition('+')[0]}")
    run(commands / "pip", "install", f"{wheel}[hf]")
    assert run(commands / "moesys", "--version").strip().endswith(version("moesys"))
    printed = run(commands / "moesys", "demo")
    assert "MEASURED: demo" in printed
    assert "SIMULATED: demo-cluster" in printed
    [trained, replayed] = (tmp_path / "runs").glob("demo-*/report.html")
    assert trained.stat().st_size > 10_000 < replayed.stat().st_size
