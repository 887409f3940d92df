"""What numbers were measured with is written down, and two environments can be told apart."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesys.lab.ranks.process_start import LOOPBACK
from moesys.lab.runs.environment import (
    _core_limits,
    _git_state,
    available_cores,
    collect_environment,
    differences,
    load_environments,
    save_environment,
    source_digest,
)
from moesys.lab.runs.places import num_workers


@pytest.fixture(scope="module")
def environment():
    return collect_environment(torch_threads=1)


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def package(tmp_path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return package


def test_it_says_what_runs_here_and_the_same_state_has_the_same_id(environment):
    assert torch.__version__.startswith(environment.packages["torch"])
    assert (environment.torch_threads, environment.cores >= 1, environment.cpu != "") == (1, True, True)
    line = f"{environment.cpu}, {environment.cores} cores, 1 thread per rank, Python "
    assert environment.machine_line.startswith(line)
    assert collect_environment(torch_threads=1).id == environment.id
    assert replace(environment, torch_threads=2).id != environment.id


def test_variables_that_steer_are_kept_and_homes_and_what_starts_ranks_are_not(environment, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    assert collect_environment(torch_threads=1).variables == environment.variables
    for name, value in (("GLOO_SOCKET_IFNAME", "eth0"), ("TORCH_HOME", str(Path.home() / "models")), ("SOME", "1")):
        monkeypatch.setenv(name, value)
    kept = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_HOME": "~/models"}
    assert collect_environment().variables == environment.variables | kept


def test_a_changed_source_is_told_apart(package, tmp_path):
    commit = _git_state(package)
    (tmp_path / "notes.txt").touch()
    assert (len(commit), _git_state(package)) == (40, commit)
    (package / "new.py").touch()
    assert _git_state(package) == f"{commit}+{source_digest()}"
    # Git does not know this one.
    (installed := tmp_path / "site-packages" / "package").mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert _git_state(installed) == _git_state(tmp_path / "nowhere") == ""


def test_an_environment_is_saved_once(environment, tmp_path):
    changed = replace(environment, git_commit="a" * 40 + "+0123abcd4567")
    assert save_environment(changed, tmp_path) == changed.id
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    save_environment(changed, tmp_path)
    assert file.stat().st_mtime_ns == before
    assert load_environments(tmp_path) == {changed.id: changed}
    assert changed.machine_line.endswith("moesys aaaaaaaa with uncommitted changes")


def test_differences_name_the_fields_with_both_values(environment):
    a = replace(environment, variables={"OMP_NUM_THREADS": "1"}, gpus=["H100", "H100"])
    b = replace(environment, variables={}, gpus=[], torch_threads=2)
    assert differences(a, b) == {
        "torch_threads": ("1", "2"),
        "gpus": ("H100, H100", ""),
        "variables.OMP_NUM_THREADS": ("1", ""),
    }
    assert differences(a, a) == {}


def test_another_source_has_another_digest_whether_committed_or_not(package, monkeypatch):
    (package / "lab").mkdir()
    monkeypatch.setattr("moesys.lab.runs.environment.__file__", str(package / "lab" / "runs" / "environment.py"))
    first = source_digest()
    git(package.parent, "commit", "--allow-empty", "-qm", "second")
    (package / "notes.md").write_text("nothing")
    assert source_digest() == first
    (package / "lab" / "new.py").write_text("b = 2\n")
    second = source_digest()
    (package / "__init__.py").write_text("a = 2\n")
    assert len({first, second, source_digest()}) == 3
    assert len(first) == 12


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/", {}, []),
        ("0::/pod/box", {"pod/cpu.max": "150000 100000", "pod/box/cpu.max": "max 100000"}, [1.5]),
        ("0::/pod/box", {"pod/cpu.max": "400000 100000", "pod/box/cpu.max": "250000 50000"}, [5.0, 4.0]),
        # The path of the host, in a container that sees its own group only.
        ("0::/docker/4f", {"cpu.max": "50000 100000"}, [0.5]),
        ("0::/../other", {"cpu.max": "torn"}, []),
        ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, []),
        ("4:cpuacct,cpu:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, [2.0]),
        ("3:cpuset:/a\n4:cpu:/b:c", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, [2.0]),
    ],
    ids=str,
)
def test_limits_of_control_groups_are_read(tmp_path, groups, files, limits):
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert list(_core_limits(tmp_path)) == limits


@pytest.mark.parametrize(("limits", "cores"), [([], 8), ([16.0], 8), ([2.5, 3.0], 3), ([0.1], 1)], ids=str)
def test_cores_are_those_of_the_affinity_or_fewer_by_a_limit_of_time(monkeypatch, limits, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("moesys.lab.runs.environment._core_limits", lambda: iter(limits))
    assert available_cores() == cores
    assert num_workers(None) == cores
