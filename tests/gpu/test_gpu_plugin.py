"""The plug-in of the GPU checks: however a check ends, there is its result, a report, and all independent checks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# All endings are one run of pytest, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
CHECKS = (
    *("device", "compile", "ops", "experts", "offsets", "other device", "no waiting", "graph"),
    *("collectives", "shared memory", "copies", "rounds on one gpu", "rounds with the host", "rounds"),
    *("one gpu for two", "mega points"),
    *("layer", "planned without waiting", "growth", "killed rank", "late ranks"),
    *("bench kernels", "bench overlap", "bench calibrate", "bench model"),
)
ENDINGS = {
    "passes": ("passed", "rank 0 of 1"),
    "raises": ("failed", "1 of 1 ranks failed: rank 0 raised RuntimeError: planted: a wrong kernel"),
    "segfaults": ("failed", "1 of 1 ranks failed: rank 0 was killed by signal 11"),
    "hangs": ("failed", "1 of 1 ranks failed: rank 0 gave no answer within 2 s"),
    "cannot": ("skipped", "planted: nothing to see"),
    "second fails": ("failed", "1 of 2 ranks failed: rank 1 raised RuntimeError: planted: the second rank"),
    "last is killed": ("passed", "the first goes on"),
    "reads page": ("passed", None),
    "after raises": ("skipped", "depends on 'raises', which failed"),
    "after after": ("skipped", "depends on 'raises', which failed"),
    # Nothing was wrong there.
    "after cannot": ("passed", "rank 0 of 1"),
}


def run_pytest(folder: Path, *words: str, torchrun: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, *torchrun, "-m", "pytest", "-p", "no:cacheprovider"]
    command = [*start, "-m", "gpu", f"--gpu-report={folder}", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)


def results_in(folder: Path) -> dict[str, dict[str, Any]]:
    return {of["name"]: of for of in json.loads((folder / "doctor.json").read_text())["checks"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with every ending."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "bench.md").write_text("# Found by a benchmark\n")
    done = run_pytest(folder, "endings.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"Report to send back: {folder / 'doctor.md'}" in done.stdout
    return folder


def test_every_ending_has_its_result(folder: Path) -> None:
    found = results_in(folder)
    assert list(found) == list(ENDINGS)
    for name, (state, says) in ENDINGS.items():
        assert found[name]["state"] == state, name
        assert says in (None, found[name]["says"]), name


def test_the_report_is_there_while_checks_run(folder: Path) -> None:
    """Checks that ran have their results, and all others have not run yet."""
    states = results_in(folder)["reads page"]["says"].split("; ")[2:]
    before = [state.replace("failed", "FAILED") for state, _ in list(ENDINGS.values())[:7]]
    assert states == before + ["not run yet"] * (len(ENDINGS) - len(before))


def test_the_report_names_the_first_failure_and_holds_tracebacks_and_pages(folder: Path) -> None:
    page = (folder / "doctor.md").read_text()
    assert "First failure: 'raises', in the layer 'layer of raises'." in page
    assert "REHEARSED without a GPU" in page
    assert "## raises, rank 0" in page
    assert "in test_raises\n    raise RuntimeError" in page
    # The place where the check hangs.
    assert '/endings.py", line ' in page.partition("## hangs, rank 0")[2]
    assert "## Found by a benchmark" in page
    assert "printed by a check" in (folder / "logs" / "passes.rank0.log").read_text()


@pytest.mark.slow
def test_a_check_that_has_no_time_left_is_skipped(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "endings.py::test_passes", "--gpu-minutes=0")
    assert done.returncode == 0, done.stdout + done.stderr
    found = results_in(tmp_path)["passes"]
    assert (found["state"], found["seconds"]) == ("skipped", None)
    alone = "pytest -m gpu tests/gpu/endings.py::test_passes"
    assert found["says"] == f"no time was left; run it by itself, {alone}, or increase --gpu-minutes"


def test_a_check_depends_only_on_checks_before_it() -> None:
    """Files are in the order of the layers, and pytest runs them in the order of their names."""
    modules = [importlib.import_module(path.stem) for path in sorted(HERE.glob("test_[0-9]_*.py"))]
    names: list[str] = []
    for module in modules:
        shared = getattr(module, "pytestmark", None)
        for function in (of for name, of in vars(module).items() if name.startswith("test_")):
            markers = [*function.pytestmark, *([shared] if shared else [])]
            after = {name for marker in markers if marker.name == "gpu" for name in marker.kwargs.get("after", ())}
            assert after <= set(names), function
            names.append(function.__name__.removeprefix("test_").replace("_", " "))
    assert tuple(names) == CHECKS


@pytest.mark.slow
def test_ranks_of_torchrun_run_the_checks_together(tmp_path: Path) -> None:
    """There is one report of both ranks; the second is killed on purpose, and the next check has it again."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    wanted = "collectives or killed_rank or late_ranks or one_gpu_for_two"
    done = run_pytest(tmp_path, "-k", wanted, torchrun=torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Report to send back: ") == 1
    assert done.stdout.count(" deselected in ") == 1
    found = {name: of["says"] for name, of in results_in(tmp_path).items()}
    assert found["collectives"] == "gloo: 2 ranks"
    assert found["killed rank"].startswith("rank 1 was killed; others said so within ")
    assert found["late ranks"] == "a rank was 0.5 and 1 s late: equal bits"
    assert found["one gpu for two"].startswith("no GPU found; ")


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results_in(tmp_path)
    assert tuple(found) == CHECKS
    assert {of["state"] for of in found.values()} == {"passed", "skipped"}
    assert sum(of["state"] == "passed" for of in found.values()) >= 15
    assert all(of["says"].startswith("no GPU found; ") for of in found.values() if of["state"] == "skipped")
