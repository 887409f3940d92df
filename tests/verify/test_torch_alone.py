"""``python -m moesys.verify`` runs with torch and NumPy alone, from the checkout and from a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Makes every process believe that nothing else that moesys depends on is installed; torch's DTensor needs NumPy.
REFUSAL = """
import sys

missing = "matplotlib numba ortools psutil pydantic pydantic_core rich scipy tomli_w transformers triton typer"
sys.modules.update(dict.fromkeys(missing.split()))
"""


def wheel_in(folder: Path) -> Path:
    """Installs moesys' wheel without dependencies, and returns the folder of its packages."""
    tree = folder / "tree"
    shutil.copytree(ROOT / "moesys", tree / "moesys", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, tree], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", folder / "packages", wheel], check=True, capture_output=True
    )
    return folder / "packages"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wheel", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["checkout", "wheel"])
def test_a_training_is_checked_with_torch_alone(tmp_path: Path, wheel: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSAL)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    [packages] = environment.glob("lib/python*/site-packages")
    # A path alone: what a .pth file there would add, such as this tree, is not added.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    found = wheel_in(tmp_path) if wheel else ROOT
    paths = os.pathsep.join(map(str, (tmp_path, found)))
    file = ROOT / "tests" / "verify" / "small_moe.py"
    python, options = environment / "bin" / "python", {"env": {**os.environ, "PYTHONPATH": paths}, "cwd": tmp_path}
    command = [python, "-W", "ignore", "-m", "moesys.verify", file, "--situations", "plain", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("small_moe, 2 ranks, float64: right in 1 situation")
    refused = subprocess.run([python, "-c", "import pydantic"], capture_output=True, text=True, check=False, **options)
    assert "ModuleNotFoundError: import of pydantic halted" in refused.stderr
