"""doctor: what is there, what is missing, what is broken; and it says so whatever fails."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import torch
import typer
from typer.testing import CliRunner

from moesys.lab.commands import doctor
from moesys.lab.commands.doctor import Check, doctor_command, gpu_command

app = typer.Typer(rich_markup_mode=None)


@app.command()
def command(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    raise typer.Exit(doctor_command(as_json=as_json))


def only(monkeypatch: pytest.MonkeyPatch, **looks) -> None:
    """Makes these the only checks."""
    monkeypatch.setattr(doctor, "_CHECKS", looks)


def test_this_machine_has_what_the_default_install_needs():
    done = CliRunner().invoke(app, ["--json"])
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.exit_code == 0
    assert not [check for check in checks.values() if check["state"] == "broken"]
    assert {"Python", "packages", "torch", "CPU", "memory", "bfloat16"} <= set(checks)
    assert checks["local ranks"]["found"].startswith("2 started and added a tensor in ")
    assert "moesys calibrate" in checks["local ranks"]["hint"]
    assert torch.__version__ in checks["torch"]["found"]


def test_without_a_gpu_it_says_what_one_would_enable(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    hint = "to train on GPUs: an NVIDIA GPU, and a CUDA build of torch"
    assert list(doctor._gpus()) == [Check("GPU", "none (torch is built for the CPU only)", "missing", hint)]


def test_gpus_are_counted_by_kind(monkeypatch):
    gpu = SimpleNamespace(name="A100", total_memory=80 * 2**30)
    for name, value in (("is_available", True), ("device_count", 2), ("get_device_properties", gpu)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert list(doctor._gpus()) == [Check("GPU", "2 × A100, 80 GiB", "ok")]


def test_a_package_that_is_missing_is_named_and_breaks_unless_it_is_optional(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy>=1.26", "absent-one>=2,<3", 'absent; extra == "test"'])
    (check,) = doctor._packages()
    assert (check.found, check.state) == ("no absent-one", "broken")
    monkeypatch.setattr(doctor, "version_of", lambda package: "")
    assert {check.name: check.state for check in doctor._optional()} == dict.fromkeys(("Triton", "CuPy"), "missing")


def test_an_old_torch_is_broken_and_the_exit_code_says_so(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    only(monkeypatch, python=doctor._python, torch=doctor._torch)
    done = CliRunner().invoke(app)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == "moesys does not work here: torch must be repaired first."


def test_it_says_first_what_works_and_then_what_is_missing_and_cuts_no_cell(monkeypatch):
    lacks = Check("GPU [like these]", "f" * 90, "missing", "h" * 90)
    only(monkeypatch, gpu=lambda: [Check("CPU", "2 cores", "ok"), lacks])
    done = CliRunner().invoke(app)
    assert done.exit_code == 0
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[:2] == [
        "moesys works here: training on CPU ranks, simulation and planning.",
        "Optional and missing: GPU [like these].",
    ]
    missing, found = lines.index("Missing, or slower than it could be"), lines.index("Found")
    assert any(re.match(rf"GPU \[like these\]  .*{lacks.found}  .*{lacks.hint}", line) for line in lines[missing:found])
    assert any(line.startswith("CPU ") for line in lines[found:])


def test_a_check_that_fails_is_a_row_and_not_the_end(monkeypatch):
    def fails():
        raise ImportError("libmkl.so: cannot open\nmore")

    only(monkeypatch, torch=fails, Python=doctor._python)
    done = CliRunner().invoke(app, ["--json"])
    broken, python = json.loads(done.stdout)
    assert (done.exit_code, python["state"]) == (1, "ok")
    found = ["torch", "ImportError: libmkl.so: cannot open", "broken", "install moesys again: pip install -e ."]
    assert broken == dict(zip(("name", "found", "state", "hint"), found, strict=True))


def test_gpu_checks_of_a_checkout_run_in_pytest(monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_command() == 1
    checks = Path(__file__).parents[3] / "tests" / "gpu"
    assert commands == [[sys.executable, "-m", "pytest", "-vv", "-m", "gpu", str(checks)]]


def test_a_wheel_and_python_without_pytest_print_the_commands_that_run_the_gpu_checks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in (
        ("__file__", str(tmp_path / "moesys" / "lab" / "commands" / "doctor.py")),
        ("find_spec", lambda name: None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(doctor, name, value)
            assert gpu_command() == 2
        assert capsys.readouterr().out.splitlines() == [
            "The GPU checks run in a checkout of moesys, with pytest. To run them:",
            "  git clone REPOSITORY moesys && cd moesys",
            "  pip install -e '.[test]'",
            "  python -m moesys doctor --gpu",
        ]


def test_without_a_gpu_there_is_nothing_to_test(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: pytest.fail("checks were started"))
    assert gpu_command() == 0
    assert capsys.readouterr().out.splitlines() == [
        "No GPU found, so there is nothing to test. To rehearse the checks on the CPU: pytest -m gpu tests/gpu",
    ]
