"""What cannot be checked ends with a message that says why, in exit code 2, and leaves nothing running."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from broken_checks import broken, impure

from moesys import verify
from moesys.verify.__main__ import main

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def processes() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        # The other rank fails too if it still was connecting.
        ("build raises", "of 2 ranks failed: rank 1 raised RuntimeError: no such mesh"),
        ("returns a model", "returned Linear; return a moesys.verify.Setup"),
        ("hangs", "gave no answer within 6 s"),
        ("dies", "rank 1 exited with code 3"),
        ("draws", r"draws random numbers, first in noise (Dropout); switch dropout and noise off"),
        ("does not train", "every gradient is zero"),
        ("no parameters", "optimizer got an empty parameter list"),
        ("no loss", "step returned dict, which has no 'loss'"),
        ("other numbers", "step returns ['loss', 'rank 1'] on rank 1 and ['loss'] in one process"),
        ("other parts", "ranks have parts [0, 1] of [2, 3]"),
        ("missing part", "ranks have parts [0, 0] of [2]"),
        ("renamed", "rank 0 has no embed.weight, but inner.embed.weight"),
    ],
)
def test_a_training_that_cannot_be_checked_says_why(how: str, words: str) -> None:
    before = processes()
    report = verify.run(partial(broken, how=how), situations=["plain"], timeout_s=6.0 if how == "hangs" else 60.0)
    assert (report.exit_code, report.findings) == (2, [])
    assert words in report.error
    if how == "hangs":
        assert "time.sleep" in report.error or "in step" in report.error
    with pytest.raises(AssertionError, match="could not be checked"):
        report.require_right()
    until = time.monotonic() + 10
    while len(processes() - before) > 2 and time.monotonic() < until:
        time.sleep(0.1)
    # The server that ranks are forked from, and the tracker of their resources, serve later checks.
    assert len(processes() - before) <= 2


def test_a_training_that_refuses_float64_is_told_of_float32() -> None:
    build = partial(broken, how="refuses float64")
    assert "If it refuses float64, give float32 (--dtype float32)" in verify.run(build, situations=["plain"]).error
    assert verify.run(build, situations=["plain"], dtype=torch.float32).error == ""


def test_batches_that_change_are_refused() -> None:
    build = verify.check(batches=impure)(partial(broken, how=""))
    build.func.check_options = build.check_options  # type: ignore[attr-defined]
    try:
        assert "returns another batch when it is called again" in verify.run(build, situations=["plain"]).error
    finally:
        broken.check_options = verify.check()  # type: ignore[attr-defined]


def test_ranks_that_do_not_talk_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, whose JSON says the same as the report."""
    file = str(Path(__file__).with_name("broken_checks.py"))
    assert main([f"{file}:broken", "--situations", "plain", "--json", "--quiet"]) == 1
    [found] = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["exit_code"], found["check"]) == (1, 1, "broken")
    [situation] = found["situations"]
    assert {finding["stage"] for finding in situation["findings"]} >= {"logged", "gradient"}
    assert any("only this rank's own tokens" in finding["cause"] for finding in situation["findings"])
    assert "torch" in found["environment"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of a file, such as check.py, and --model, such as qwen3_moe"),
        (["nowhere.py"], "nowhere.py is no Python file"),
        (["{file}:brokn"], "has no check 'brokn'; it has broken; did you mean 'broken'?"),
        (
            ["{file}", "--situations", "padings"],
            "situations has 'padings', which is no situation; did you mean 'padding'?",
        ),
        (["{file}", "--dtype", "float16"], "dtype=torch.float16 must be torch.float64 or torch.float32"),
        (["{file}", "--ranks", "1"], "ranks=1 must be at least 2"),
        (["--model", "qwen3_moe", "--implementation", "all_to_al"], "implementation=all_to_al must be one of"),
        (["--model", "qwen3_moe", "--parallel", "pp=2"], "parallel has 'pp=2'; give sizes of fsdp, tp and ep"),
        (["--model", "qwen3_moe", "--parallel", "fsdp=2,ep=3"], "which must be 2 or more, and divisible by ep"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(Path(__file__).with_name("broken_checks.py"))
    assert main([argument.format(file=file) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_without_a_check_is_refused(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    # The command leaves the folder on the path, where later tests would import its json.py.
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "without_check.py").write_text("x = 1\n")
    assert main([str(tmp_path / "without_check.py")]) == 2
    assert "has no check; mark a function" in capsys.readouterr().err
    (tmp_path / "json.py").write_text("x = 1\n")
    assert main([str(tmp_path / "json.py")]) == 2
    assert "has the name of another module" in capsys.readouterr().err
