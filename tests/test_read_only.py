"""Where nothing may be written: the package of another user, a read-only home, temporary and current folder."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runner_cases import simulation

import moesys as ms

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2
OTHER_USER = 4321

COMPILED = """
import numpy as np
from moesys.balance.planning_problem import tokens_by_node
print(tokens_by_node(np.ones((2, 3), dtype=np.int64), (0, 0))[1].tolist())
"""


def bound_by_modes() -> None:
    """Lets the modes of files hold for root too, in the program that runs next."""
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def python(*arguments: str | Path, cwd: Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with the user's caches where ``variables`` say."""
    caches = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in caches}
    environment |= {"PYTHONPATH": str(Path(ms.__file__).parents[1])} | {k: str(v) for k, v in variables.items()}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, preexec_fn=bound_by_modes, capture_output=True, text=True, timeout=120
    )


def locked(folder: Path) -> Path:
    """Returns the folder, which with all that is in it can be read only from here on."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


@pytest.fixture
def unlocked(tmp_path: Path) -> Path:
    """A folder whose parts can be removed after the test. Skips where modes hold for nobody."""
    (probe := tmp_path / "probe").mkdir(mode=0o555)
    if python("-c", "import os; raise SystemExit(os.access('probe', os.W_OK))", cwd=tmp_path).returncode:
        pytest.skip("this user may write into read-only folders")
    probe.rmdir()
    yield tmp_path
    for path in [tmp_path, *tmp_path.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


@pytest.mark.parametrize(
    "kept_in", ["home", *(pytest.param(place, marks=pytest.mark.slow) for place in ("tmp", "nowhere"))]
)
def test_machine_code_of_another_users_package_is_kept_by_who_runs_it(unlocked: Path, kept_in: str) -> None:
    site, home, tmp, cwd = (unlocked / name for name in ("site", "home", "tmp", "cwd"))
    for folder in (site, home, tmp, cwd):
        folder.mkdir()
    shutil.copytree(Path(ms.__file__).parent, site / "moesys", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (site, cwd, *((home,) if kept_in != "home" else ()), *((tmp,) if kept_in == "nowhere" else ())):
        locked(folder)
    if os.getuid() == 0:
        for path in [site, *site.rglob("*")]:
            os.chown(path, OTHER_USER, OTHER_USER)
    done = python("-c", COMPILED, cwd=cwd, PYTHONPATH=site, HOME=home, TMPDIR=tmp)
    assert (done.returncode, done.stdout) == (0, "[2, 2, 2]\n"), done.stderr
    assert "Traceback" not in done.stderr
    machine_code = {path.relative_to(unlocked).parts[0] for path in unlocked.rglob("*.nbc")}
    assert machine_code == ({kept_in} if kept_in != "nowhere" else set())
    assert not list(cwd.iterdir())


COMMANDS = """
import sys
from typer.testing import CliRunner
from moesys.__main__ import app
for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(app, line.split())
    print(done.exit_code, "Traceback" in done.output, " ".join(done.stderr.split()))
"""


def test_commands_that_write_say_where_they_cannot_and_others_run(unlocked: Path) -> None:
    experiment = simulation(strategies=(ms.presets.ep(),), seeds=(0,))
    cwd, home, free = (unlocked / name for name in ("cwd", "home", "free"))
    for folder in (cwd, home, free):
        folder.mkdir()
    (cwd / "small.toml").write_text(experiment.to_toml())
    (cwd / "space.toml").write_text(ms.Space({"sharding": ("ep",)}).to_toml())
    (cwd / "load.csv").write_text("1,2\n2,1\n")
    ms.run(experiment, cwd / "theirs", jobs=1).path.rename(cwd / "run_folder")
    layer = ms.MoELayer(experiment.model, ms.presets.ep())
    watch = ms.Watch(layer, cwd / "watched")
    layer(torch.ones(2, 16)).sum().backward()
    watch.step()
    watch.close()
    locked(cwd)
    locked(home)
    plan = "plan --load load.csv --cluster 1x2 --balance static --split even"
    refused = [
        ("run small.toml --jobs 1", f"--out {free}/runs"),
        ("tune small.toml --space space.toml --budget 1 --jobs 1", f"--out {free}/runs"),
        ("simulate small.toml --draws 1 --out steps", f"--out {free}/steps"),
        (f"{plan} --out plan.json", f"--out {free}/plan.json"),
        ("report watched", f"--out {free}/report.html"),
        ("run small.toml --jobs 1 --out run_folder/..", f"--out {free}/runs"),
    ]
    reading = ["compare run_folder", "explain small.toml", "simulate small.toml --draws 1", plan]
    lines = [*reading, *(line for line, _ in refused), *(f"{line} {way_out}" for line, way_out in refused)]
    program = unlocked / "commands.py"
    program.write_text(COMMANDS)
    before = sorted(cwd.rglob("*"))
    done = subprocess.run(
        [sys.executable, program],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(ms.__file__).parents[1]), "HOME": str(home), "COLUMNS": "200"},
        input="\n".join(lines),
        preexec_fn=bound_by_modes,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout.splitlines()
    assert len(said) == len(lines), done.stderr
    for line, result in zip(lines, said, strict=True):
        code, traceback, error = result.split(" ", 2)
        is_refused = line in [wrong for wrong, _ in refused]
        assert (code, traceback) == ("2" if is_refused else "0", "False"), (line, result)
        if is_refused:
            assert "give another path, or get access to this one" in error, (line, result)
    assert sorted(cwd.rglob("*")) == before
