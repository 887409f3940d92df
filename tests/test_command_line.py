"""The command line: every bad input has its message and exit code 2, and what runs says what it did."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from runner_cases import EP, FAILING, FSEP, simulation
from typer.main import get_command
from typer.testing import CliRunner, Result

from benchmarks.__main__ import PAGES
from benchmarks.__main__ import app as benchmarks
from moesys import ClusterSpec, CpSat, Eplb, Experiment, plan_layout
from moesys.__main__ import COMMANDS, app, main
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.runs.declarations import changed
from moesys.load import LoadMatrix

HEAD = "import moesys as ms\nfrom moesys.config.experiment import Experiment\n"


def experiment(**changes) -> Experiment:
    return simulation(**{"name": "small", "strategies": (EP, FSEP)} | changes)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def moesys(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], prog_name="moesys")


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


# Their errors have several lines; tests/ways_out.txt has those of one.
FAILING_FILES = {
    "def _shape():\n    return ms.ModelShape(hidden_size=8)\n\ndef experiment():\n    return _shape()\n": (
        "a.py: experiment() failed\n"
        '  File "a.py", line 7, in experiment\n    return _shape()\n'
        '  File "a.py", line 4, in _shape\n    return ms.ModelShape(hidden_size=8)\n'
        "ValueError: ModelShape needs intermediate_size, num_experts, top_k; write ms.ModelShape(hidden_size=..., "
        "intermediate_size=..., num_experts=..., top_k=...)"
    ),
    "import moesyss\n": (
        'a.py cannot be run\n  File "a.py", line 3, in <module>\n    import moesyss\n'
        "ModuleNotFoundError: No module named 'moesyss'"
    ),
    "def experiment(:\n": (
        'a.py cannot be run\n  File "a.py", line 3\n    def experiment(:\nSyntaxError: invalid syntax'
    ),
}


@pytest.mark.parametrize("text", FAILING_FILES)
def test_a_file_that_fails_is_refused_in_words(text):
    write("a.py", HEAD + text)
    result = moesys("run", "a.py")
    # Which part of a line Python underlines differs from release to release.
    told = [line for line in result.stderr.splitlines() if line.strip(" ^~")]
    assert told == f"Error: {FAILING_FILES[text]}".splitlines()
    assert (result.stdout, result.exit_code, Path("runs").exists()) == ("", 2, False)


def test_run_prints_a_line_a_trial_and_the_table_and_then_has_nothing_to_do():
    write(
        "small.py",
        HEAD + f"def experiment() -> Experiment:\n    return Experiment.from_json({experiment().to_json()!r})\n",
    )
    first = moesys("run", "small.py")
    assert first.exit_code == 0
    lines = first.stdout.splitlines()
    assert lines[0] == "small: 4 trials to run in the cost model"
    assert [line[:6] for line in lines[1:5]] == ["[1/4] ", "[2/4] ", "[3/4] ", "[4/4] "]
    assert lines[5] == "4 run: 4 of 4 trials are recorded"
    assert lines[6].startswith("SIMULATED: small")
    second = moesys("run", "small.py")
    assert second.stdout.splitlines()[0] == "nothing to do: 4 of 4 trials are recorded"
    assert second.stdout.splitlines()[1:] == lines[6:]
    (folder,) = Path("runs").glob("small-*")
    assert lines[-3:] == ["", f"Results: {folder}/report.html", "All runs: runs/index.html"]
    assert (folder / "table.txt").read_text().splitlines() == lines[6:-3]
    shown = moesys("compare", str(folder), "--metric", "inter_node_share", "--metric", "step_ms")
    assert all(shown.stdout.count(name) == 1 for name in ("inter_node_share", "step_ms"))
    assert (
        moesys("run", "small.py", "--seeds", "3")
        .stdout.splitlines()[0]
        .endswith("2 trials to run in the cost model, 4 recorded already")
    )


def a_sweep(skews=(0.0, 1.0), **changes) -> str:
    one = experiment(**changes).to_json()
    return f"""{HEAD}
def experiments() -> list[Experiment]:
    one = Experiment.from_json({one!r})
    return [
        one.replace(name=f"skew-{{skew:g}}", workload=one.workload.replace(skew=skew)) for skew in {skews}
    ]
"""


def test_experiments_of_one_file_run_one_after_another_and_one_is_explained():
    write("sweep.py", a_sweep())
    assert " of skew-0, " in moesys("explain", "sweep.py").stdout
    result = moesys("run", "sweep.py")
    assert result.exit_code == 0
    for name in ("skew-0", "skew-1"):
        assert f"{name}: 4 trials to run in the cost model\n" in result.stdout
        assert f"SIMULATED: {name}" in result.stdout
        assert (next(Path("runs").glob(f"{name}-*")) / "table.txt").exists()
    assert result.stdout.splitlines()[-1] == "All runs: runs/index.html"
    assert moesys("compare", *sorted(map(str, Path("runs").iterdir()))).stdout.count("SIMULATED: ") == 2
    write("sweep.py", a_sweep() + "\ndef experiment():\n    return experiments()[1]\n")
    assert " of skew-1, " in moesys("explain", "sweep.py").stdout


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["workload.skew=0,1.5"], {"small-skew-0": 0, "small-skew-1.5": 1.5}),
        (["strategies.fsep.sharding.slots_per_rank=4,5"], {"small-slots_per_rank-4": 4, "small-slots_per_rank-5": 5}),
        (["strategies.1.balance=eplb"], {"small-balance-eplb": Eplb()}),
        (["seeds=4,5"], {"small": (4, 5)}),
        (["cluster.ranks_per_node=4", "workload.skew=1"], {"small-ranks_per_node-4-skew-1": 1}),
    ],
)
def test_settings_change_fields_and_several_values_make_several_experiments(settings, expected):
    path = settings[-1].partition("=")[0].replace("strategies.fsep", "strategies[1]").replace(".1.", "[1].")
    assert {one.name: eval(f"one.{path}", {"one": one}) for one in changed([experiment()], settings)} == expected


def test_a_failed_trial_gives_exit_code_1_and_a_format_for_machines_has_stdout_for_itself():
    write("partly.json", experiment(strategies=(EP, FAILING), seeds=(0,)).to_json())
    result = moesys("run", "partly.json")
    assert result.exit_code == 1
    assert "failing seed 0: FAILED after" in result.stdout
    again = moesys("run", "partly.json", "--json")
    told = "nothing to do: 2 of 2 trials are recorded, 1 of them failed (--retry-failed runs those again)"
    assert told in again.stderr
    assert json.loads(again.stdout)["source"] == "simulated"


def test_differing_environments_are_named(monkeypatch):
    write("small.json", experiment().to_json())
    assert moesys("run", "small.json", "--seeds", "1").exit_code == 0
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert "MKL_CBWR" in moesys("run", "small.json").stderr
    folder = str(next(Path("runs").glob("small-*")))
    warning = moesys("compare", folder).stderr.splitlines()
    assert warning[0] == "Warning: these records come from 2 environments, which differ in"
    assert any(line.startswith("  variables.MKL_CBWR: ") and line.endswith(" / AVX2") for line in warning)


# --- conventions of all commands --------------------------------------------------------------------------------------

ALL = {f"moesys {name}": page for name, page in COMMANDS.items()} | {
    f"python -m benchmarks {name}": page for name, page in PAGES.items()
}
every_command = pytest.mark.parametrize("command", ALL)
# The commands that have no such option: those that print no table, show no progress, or write no file.
WITHOUT = {
    "--json": {"report", "convert", "record-routing"},
    "--quiet": {"compare", "bisect", "explain", "plan", "report", "calibration-check"},
    "--out": {"compare", "bisect", "explain", "convert", "doctor", "record-routing", "verify"},
}


@every_command
def test_options_of_one_name_mean_the_same(command):
    name = command.rpartition(" ")[2]
    options = {opt: option for option in ALL[command].load(name).params for opt in option.opts}
    assert [option for option, without in WITHOUT.items() if (option in options) == (name in without)] == []
    for long, short in (("--out", "-o"), ("--quiet", "-q")):
        assert options.get(long) is options.get(short)
    assert all(options[flag].is_flag for flag in ("--json", "--quiet", "--wide") if flag in options)


@every_command
def test_help_is_whole_in_80_columns_and_its_examples_parse(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    program, name = command.rsplit(" ", 1)
    page, own = ALL[command], app if program == "moesys" else benchmarks
    text = CliRunner().invoke(own, [name, "--help"]).output
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = " ".join(text.replace("│", " ").split())
    for paragraph in (page.summary, *page.details.split("\n\n")):
        assert " ".join(paragraph.split()) in words
    listed = CliRunner().invoke(own, ["--help"]).output
    assert f" {page.summary} " in listed
    for opt in (opt for option in page.load(name).params for opt in option.opts if opt.startswith("-")):
        assert opt in words
    Path("here").mkdir()
    Path("here/cluster.toml").touch()
    for example in page.examples:
        assert example in text.replace(" \n", "\n").replace("\n ", "\n")
        _, _, arguments = example.partition("moesys " if "moesys " in example else "benchmarks ")
        group = get_command(app if "moesys " in example else benchmarks)
        first, *rest = shlex.split(arguments)
        _, parsed, rest = group.resolve_command(group.make_context("", [first]), [first, *rest])
        parsed.make_context(first, rest)


def test_the_version_is_that_of_the_installed_package():
    assert moesys("--version").stdout == f"moesys {version('moesys')}\n"


@pytest.mark.ranks
def test_what_is_not_there_is_refused_before_heavy_libraries_are_imported():
    write("small.json", experiment().to_json())
    lines = """compare nowhere | report nowhere | convert nowhere new | bisect nowhere a b | run nowhere.py
        | run small.json --strategy nowhere.toml | explain nowhere.py | tune small.json --space nowhere.toml
        | simulate nowhere.py | simulate --model nowhere/config.json --cluster h100:1
        | simulate small.json --out small.json | plan --load nowhere.csv --cluster 2x2
        | calibrate --out small.json"""
    lines = [*" ".join(lines.split()).split(" | "), f"simulate small.json --out {300 * 'x'}"]
    code = f"""
import sys
from typer.testing import CliRunner
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from benchmarks.__main__ import app as benchmarks
from moesys.__main__ import app
for line in ("--help", "run --help", "run nowhere.py"):
    CliRunner().invoke(app, line.split())
    assert "layer" in CliRunner().invoke(benchmarks, ["--help"]).output
    assert not {{"torch", "scipy", "matplotlib"}} & set(sys.modules), line
for line in {lines!r}:
    done = CliRunner().invoke(app, line.split())
    heavy = [name for name in ("torch", "transformers", "triton", "ortools", "numba") if name in sys.modules]
    print(done.exit_code, heavy, " ".join(done.stderr.split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line, said in zip(lines, done.stdout.splitlines(), strict=True):
        named = re.findall(r"nowhere[.\w]*|x{300}|small.json", line)[-1]
        assert said.startswith("2 [] "), (line, said)
        assert (named in said) or "File name too long" in said, (line, said)


def define(struck: Callable[..., None]) -> None:
    """Defines a class, which calls back."""
    type("Imported", (), {"field": type("Field", (), {"__set_name__": struck})()})


def drop(struck: Callable[..., None]) -> None:
    """Drops an object that calls back, as imports drop their locks."""
    dropped = set()
    _watched = weakref.ref(dropped, struck)
    del dropped
    for _ in range(200):
        time.sleep(0.01)


@pytest.mark.parametrize("at", [define, drop])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_an_import_ends_a_command_without_a_traceback(at, number, code, monkeypatch, capfd):
    monkeypatch.setattr("moesys.__main__.app", lambda: at(lambda *_: signal.raise_signal(number)))
    # Python has none where it was started in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as end:
        main()
    signal.signal(signal.SIGINT, before)
    assert (end.value.code, end.value.__suppress_context__) == (code, True)
    assert capfd.readouterr() == ("", "")


def interrupted_behind_a_plan() -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    load = LoadMatrix(np.random.default_rng(0).integers(1, 99, (4, 8)))
    plan_layout(load, ClusterSpec(num_nodes=2, ranks_per_node=2), CpSat(), 3)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def test_ctrl_c_is_an_interruption_after_a_plan_of_cp_sat(ranks: LocalRanks) -> None:
    """Not: the end of the process, to which OR-Tools leaves the signal."""
    assert ranks.run(interrupted_behind_a_plan, num_ranks=1) == ["interrupted"]
