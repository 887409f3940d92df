"""benchmarks doctor: whatever a check does, there is a verdict, a page, and the checks that do not depend on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_cases import case
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.doctor.checks import CHECKS, Check
from benchmarks.doctor.crews import LocalCrew
from benchmarks.doctor.examination import Examination, examine
from benchmarks.doctor.place import Place
from benchmarks.doctor.verdicts import Verdict

# All endings are one examination, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(900)

ENDINGS = (
    case("passes"),
    case("raises", "passes"),
    case("segfaults"),
    case("hangs", budget_s=0.5),
    case("cannot", "passes"),
    case("second_fails", "passes", ranks="together"),
    case("last_is_killed", ranks="together", dies=True),
)
BEHIND = (
    case("reads_page", "passes"),
    *(Check(f"after {of.name}", "", "", of.run, 9, after=(of.name,)) for of in ENDINGS[1:4]),
    Check("after after", "", "", "", 9, after=("after raises",)),
    Check("after cannot", "", "", ENDINGS[0].run, 9, after=("cannot",)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Verdict]:
    """Every ending, and what comes behind them."""
    (folder / "bench.md").write_text("# Found by a bench\n")
    asked = Examination([*ENDINGS, *BEHIND], 10.0, folder)
    return {of.name: of for of in examine(asked, LocalCrew({}), Place("cpu", folder, 0))}


@pytest.mark.parametrize(
    ("name", "state", "says"),
    [
        ("passes", "passed", "rank 0 of 1"),
        ("raises", "failed", "raised RuntimeError: planted: a wrong kernel"),
        ("segfaults", "failed", "was killed by signal 11"),
        ("hangs", "failed", "gave no answer within 2 s"),
        ("cannot", "left out", "planted: nothing to see"),
        ("second_fails", "failed", "rank 1 raised RuntimeError: planted: the second rank"),
        ("last_is_killed", "passed", "the first goes on"),
        ("after raises", "left out", "needs what 'raises' proves, which failed"),
        ("after segfaults", "left out", "needs what 'segfaults' proves, which failed"),
        ("after hangs", "left out", "needs what 'hangs' proves, which failed"),
        (
            "after after",
            "left out",
            "needs what 'after raises' proves, which was left out: needs what 'raises' proves, which failed",
        ),
        # Nothing was wrong there.
        ("after cannot", "passed", "rank 0 of 1"),
    ],
)
def test_every_ending_has_its_verdict(found: dict[str, Verdict], name: str, state: str, says: str) -> None:
    assert (found[name].state, found[name].says) == (state, says)


def test_the_page_is_there_while_checks_run(found: dict[str, Verdict]) -> None:
    """Those before have their verdicts, this and those behind are to come."""
    states = found["reads_page"].says.split("; ")[2:]
    assert states == [*("FAILED" if found[of.name].state == "failed" else found[of.name].state for of in ENDINGS)] + [
        "to come"
    ] * len(BEHIND)


def test_the_page_names_the_first_to_mend_and_holds_tracebacks_and_pages(
    found: dict[str, Verdict], folder: Path
) -> None:
    page = (folder / "doctor.md").read_text()
    assert "First to mend: 'raises', layer of raises." in page
    assert "REHEARSED without a GPU" in page
    assert "## raises, rank 0" in page
    assert "in raises\n    raise RuntimeError" in page
    # Where a hanging one was.
    assert '/doctor_cases.py", line ' in page.partition("## hangs, rank 0")[2]
    assert "## Found by a bench" in page
    data = json.loads((folder / "doctor.json").read_text())
    assert [of["name"] for of in data["verdicts"]] == list(found)
    assert "printed by a check" in (folder / "logs" / "passes.rank0.log").read_text()


def test_what_is_not_begun_in_time_is_left_out(tmp_path: Path) -> None:
    (verdict,) = examine(Examination([case("passes")], 0.0, tmp_path), LocalCrew({}), Place("cpu", tmp_path, 0))
    assert (verdict.state, verdict.seconds) == ("left out", None)
    assert verdict.says == "its time was up; ask for --only 'passes', or for more --minutes"


def test_each_check_needs_only_what_comes_before_it() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for place, check in enumerate(CHECKS):
        assert set(check.after) <= set(names[:place]), check.name


def test_an_unknown_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    done = CliRunner().invoke(app, ["doctor", "--only", "nothing"])
    assert done.exit_code == 2
    assert "only='nothing' is not known; use all or some of device, compile, ops" in done.output


def rehearsed(folder: Path, only: str) -> tuple[int, dict[str, tuple[str, str]]]:
    done = CliRunner().invoke(app, ["doctor", "--only", only, "--out", str(folder)])
    data = json.loads((folder / "doctor.json").read_text())
    return done.exit_code, {of["name"]: (of["state"], of["says"]) for of in data["verdicts"]}


def test_a_rehearsal_passes_what_needs_no_gpu_and_says_what_does(tmp_path: Path) -> None:
    code, found = rehearsed(
        tmp_path, "device,ops,graph,rounds on one GPU,collectives,shared memory,copies,bench kernels"
    )
    assert code == 0
    without = ("device", "graph", "bench kernels")
    assert {name for name, (state, _) in found.items() if state == "left out"} == set(without)
    assert all(found[name][1].startswith("no GPU here; ") for name in without)
    assert {state for name, (state, _) in found.items() if name not in without} == {"passed"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_torchrun_examine_together(tmp_path: Path) -> None:
    """One page, of both; the second is killed on purpose, and the next check has it again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks", "doctor"]
    options = ["--only", "collectives,killed rank,late ranks,one GPU for two", "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("to send back: ") == 1
    found = {of["name"]: of["says"] for of in json.loads((tmp_path / "doctor.json").read_text())["verdicts"]}
    assert found["collectives"] == "gloo: 2 ranks"
    assert found["killed rank"].startswith("rank 1 was killed; others said so within ")
    assert found["late ranks"] == "a rank was 0.5 and 1 s late: equal bits"
    assert found["one GPU for two"].startswith("no GPU here; ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    code, found = rehearsed(tmp_path, "all")
    assert code == 0
    assert {state for state, _ in found.values()} == {"passed", "left out"}
    assert sum(state == "passed" for state, _ in found.values()) >= 15
    assert all(says.startswith("no GPU here; ") for state, says in found.values() if state == "left out")
