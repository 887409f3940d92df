"""The command line: every bad input has its message and exit code 2, and what runs says what it did."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from benchmarks.__main__ import PAGES
from benchmarks.__main__ import app as benchmarks
from moesys.__main__ import COMMANDS, app
from moesys.balance.cp_sat import CpSat
from moesys.config import ClusterSpec, Fsep, ModelShape, Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import Generated
from moesys.lab.runs.declarations import changed

HEAD = "import moesys as ms\nfrom moesys.config.experiment import Experiment\n"


def experiment(**changes) -> Experiment:
    fields = {
        "name": "small",
        "model": ModelShape(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2),
        "cluster": ClusterSpec(ranks_per_node=2),
        "strategies": (Strategy(name="ep"), Strategy(name="fsep", sharding=Fsep(slots_per_rank=3))),
        "workload": Generated(warmup=1, steps=2, tokens_per_rank=32),
        "seeds": (0, 1),
    }
    return Experiment(**fields | changes)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def moesys(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], prog_name="moesys")


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


BAD_FILES = [
    pytest.param(
        "nowhere.py",
        None,
        "nowhere.py is not a file; give the path of an experiment file, such as experiments/skew_sweep.py",
        id="missing",
    ),
    pytest.param("a.yaml", "", "a.yaml is no experiment file; give a .py, .json or .toml file", id="suffix"),
    pytest.param(
        "a.py",
        HEAD,
        "a.py has no function that returns an Experiment; write one: def experiment() -> Experiment: ...",
        id="no function",
    ),
    pytest.param(
        "a.py",
        HEAD + "def one() -> Experiment: ...\ndef two() -> Experiment: ...\n",
        "a.py has 2 functions that return an Experiment (one, two); "
        "keep one, and begin the names of its helpers with an underscore; or return them all from experiments()",
        id="two functions",
    ),
    pytest.param(
        "a.py",
        HEAD + "def experiment(steps, *, seeds=8) -> Experiment: ...\n",
        "a.py: experiment() needs steps; it is called without arguments, so give defaults",
        id="parameters",
    ),
    pytest.param(
        "a.py",
        "def experiment():\n    return {}\n",
        "a.py: experiment() returned dict; let it return an Experiment",
        id="returns something else",
    ),
    pytest.param(
        "a.py",
        "def experiments():\n    return [1]\n",
        "a.py: experiments() returned something else; let it return a list of Experiments",
        id="list of something else",
    ),
    pytest.param(
        "a.py",
        "def experiments():\n    return []\n",
        "a.py: experiments() returned an empty list; let it return one Experiment or more",
        id="empty list",
    ),
    pytest.param(
        "a.py",
        HEAD + f"def experiments():\n    return [Experiment.from_json({experiment().to_json()!r})] * 2\n",
        "a.py: experiments() returned several Experiments of the name 'small', after which their run folders are "
        "named; give each another name",
        id="two of a name",
    ),
    pytest.param(
        "a.py",
        HEAD + "def _shape():\n    return ms.ModelShape(hidden_size=8)\n\ndef experiment():\n    return _shape()\n",
        "a.py: experiment() failed\n"
        '  File "a.py", line 7, in experiment\n    return _shape()\n'
        '  File "a.py", line 4, in _shape\n    return ms.ModelShape(hidden_size=8)\n'
        "ValueError: ModelShape needs intermediate_size, num_experts, top_k; write ms.ModelShape(hidden_size=..., "
        "intermediate_size=..., num_experts=..., top_k=...)",
        id="raises",
    ),
    pytest.param(
        "a.py",
        "import moesyss\n",
        'a.py cannot be run\n  File "a.py", line 1, in <module>\n    import moesyss\n'
        "ModuleNotFoundError: No module named 'moesyss'",
        id="import",
    ),
    pytest.param(
        "a.py",
        "def experiment(:\n",
        'a.py cannot be run\n  File "a.py", line 1\n    def experiment(:\nSyntaxError: invalid syntax',
        id="syntax",
    ),
    pytest.param(
        "a.json",
        experiment().to_json().replace('"seeds": [', '"seeds": [1,'),
        "a.json declares no experiment: seeds=[1, 0, 1] repeats a seed, which would add nothing; give each once",
        id="seeds",
    ),
    pytest.param(
        "a.toml",
        experiment().to_toml().replace("name =", "nam =", 1),
        "a.toml declares no experiment: Experiment has no field 'nam'; its fields are name, description, model, "
        "cluster, strategies, workload, seeds, repeat_baseline; did you mean 'name'?",
        id="field",
    ),
    pytest.param(
        "a.toml",
        "name = \n",
        "a.toml is not TOML: Invalid value (at line 1, column 8)",
        id="toml",
    ),
    pytest.param(
        "a.json",
        experiment(workload={"kind": "replay", "trace": "gone.npz"}, seeds=(0,)).to_json(),
        "trace gone.npz does not exist; give a file that moesys.traces.save_trace wrote",
        id="trace",
    ),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_a_bad_file_is_refused_in_words(name, text, message):
    if text is not None:
        write(name, text)
    result = moesys("run", name)
    # Which part of a line Python underlines differs from release to release.
    told = [line for line in result.stderr.splitlines() if line.strip(" ^~")]
    assert told == f"Error: {message}".splitlines()
    assert (result.stdout, result.exit_code) == ("", 2)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "Missing argument 'FILE'."),
        (("run", "a.json", "--seeds", "0"), "Invalid value for '--seeds': Input should be greater than or equal to 1"),
        (("run", "a.json", "--thread", "1"), "No such option: --thread (Possible options: --threads)"),
        (("rum", "a.json"), "No such command 'rum'. Did you mean 'run'?"),
    ],
    ids=["no file", "seeds", "option", "command"],
)
def test_a_bad_option_is_refused_in_a_line(arguments, message):
    result = moesys(*arguments)
    assert result.stderr.splitlines()[-1] == f"Error: {message}"
    assert result.exit_code == 2


def test_a_bad_comparison_is_refused_in_words():
    write("small.json", experiment(seeds=(0,)).to_json())
    write("other.json", experiment(name="other", seeds=(0,), workload=Generated(steps=1)).to_json())
    for name in ("small.json", "other.json"):
        assert moesys("run", name).exit_code == 0
    small, other = (str(next(Path("runs").glob(f"{name}-*"))) for name in ("small", "other"))
    for arguments, message in (
        (("nowhere",), "nowhere is not a run folder: it has no experiment.json; give one that a run made"),
        (
            (small, "--metric", "speed"),
            "--metric=speed is not recorded; choose one of "
            "exposed_ms, inter_node_share, load_max_over_mean, restored_mib, step_ms",
        ),
        (
            (small, "--metric", "step_ms", "--format", "csv"),
            "--metric prints a table, and --format=csv has all metrics; leave out one of them",
        ),
        (
            (small, other, "--format", "json"),
            "--format=json holds one comparison, and these folders make 2; give them one at a time",
        ),
        ((small, "--json", "--format", "csv"), "--json and --format=csv are two formats; leave out one of them"),
    ):
        result = moesys("compare", *arguments)
        assert (result.stderr, result.exit_code) == (f"Error: {message}\n", 2)


def test_what_computes_nothing_is_not_interpreted():
    write("small.json", experiment(seeds=(0,)).to_json())
    result = moesys("run", "small.json", "--interpret")
    assert result.stderr == (
        "Error: --interpret has the kernels of workload=Training(...) interpreted, and that of small is Generated; "
        "leave it out\n"
    )
    assert result.exit_code == 2


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
    assert lines[-4:] == [
        "",
        f"Results: {folder}",
        "  report.html: table, speed-up, load of ranks and experts, timelines",
        "All runs: runs/index.html",
    ]
    assert (folder / "table.txt").read_text().splitlines() == lines[6:-4]
    shown = moesys("compare", str(folder), "--metric", "load_max_over_mean", "--metric", "step_ms").stdout
    assert re.findall("SIMULATED: small, (.*)", shown) == ["load_max_over_mean", "step_ms (ms)"]
    assert shown.count("Lowest and highest: of all steps and seeds.") == 2
    assert (
        moesys("run", "small.py", "--seeds", "3")
        .stdout.splitlines()[0]
        .endswith("2 trials to run in the cost model, 4 recorded already")
    )


def a_sweep(skews=(0.0, 1.0), **changes) -> str:
    one = experiment(workload=Generated(warmup=1, steps=2, tokens_per_rank=32), **changes).to_json()
    return f"""{HEAD}
def experiments() -> list[Experiment]:
    one = Experiment.from_json({one!r})
    return [
        one.replace(name=f"skew-{{skew:g}}", workload=one.workload.replace(skew=skew)) for skew in {skews}
    ]
"""


def test_experiments_of_one_file_run_one_after_another_and_a_sweep_is_drawn():
    write("sweep.py", a_sweep())
    result = moesys("run", "sweep.py")
    assert result.exit_code == 0
    for name in ("skew-0", "skew-1"):
        assert f"{name}: 4 trials to run in the cost model\n" in result.stdout
        assert f"SIMULATED: {name}" in result.stdout
        assert (next(Path("runs").glob(f"{name}-*")) / "table.txt").exists()
    assert "\nspeed-up along the sweep: runs/sweep.svg, runs/sweep.png\n" in result.stdout
    assert result.stdout.splitlines()[-1] == "All runs: runs/index.html"
    assert '<a href="sweep.svg">' in Path("runs/index.html").read_text()
    assert Path("runs/sweep.svg").exists()
    assert Path("runs/sweep.png").exists()
    assert moesys("compare", *sorted(map(str, Path("runs").iterdir()))).stdout.count("SIMULATED: ") == 2


@pytest.mark.slow
def test_experiments_that_are_no_sweep_have_their_tables_and_no_chart():
    wide = "] + [one.replace(name='wide', model=one.model.replace(hidden_size=16))]"
    write("a.py", a_sweep(skews=(0.5,)).replace("    ]", f"    {wide}"))
    result = moesys("run", "a.py", "--seeds", "1", "--format", "markdown")
    assert result.exit_code == 0
    assert not list(Path("runs").glob("*.svg"))


def test_of_several_experiments_one_is_explained_and_named():
    write("sweep.py", a_sweep())
    assert " of skew-0, " in moesys("explain", "sweep.py").stdout
    write("sweep.py", a_sweep() + "\ndef experiment():\n    return experiments()[1]\n")
    assert " of skew-1, " in moesys("explain", "sweep.py").stdout


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["workload.skew=0,1.5"], {"small-skew-0": 0, "small-skew-1.5": 1.5}),
        (["strategies.fsep.sharding.slots_per_rank=3,4"], {"small-slots_per_rank-3": 3, "small-slots_per_rank-4": 4}),
        (["strategies.1.balance=greedy"], {"small-balance-greedy": "greedy"}),
        (["seeds=4,5"], {"small": (4, 5)}),
        (["cluster.ranks_per_node=4", "workload.skew=1"], {"small-ranks_per_node-4-skew-1": 1}),
    ],
)
def test_settings_change_fields_and_several_values_make_several_experiments(settings, expected):
    found = {}
    for one in changed([experiment()], settings):
        field = settings[-1].partition("=")[0].split(".")[-1]
        strategy = one.strategies[1]
        values = {
            "skew": one.workload.skew,
            "slots_per_rank": strategy.sharding.slots_per_rank,
            "balance": strategy.balance.kind,
            "seeds": one.seeds,
        }
        found[one.name] = values[field]
    assert found == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("workload.skw=1", "--set workload.skw=1: 'skw' is not in Generated; use one of "),
        ("workload.skw=1", "did you mean 'skew'?"),
        ("strategies.fsp.lag=1", "'fsp' is not in the list; use one of 0, 1, ep, fsep; did you mean 'fsep'?"),
        ("workload.skew.x=1", "'x' is not in float; end the path before it"),
        ("workload.skew=-1", "--set workload.skew=-1: "),
        ("seeds=" + "[" * 60_000, "[[: seeds[0]='[["),
        ("seeds", "--set seeds gives no value; write it as in strategies.1.overlap.chunks=2,4"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_words(setting, message):
    write("small.json", experiment().to_json())
    result = moesys("run", "small.json", "--set", setting)
    assert result.exit_code == 2
    assert message in result.stderr


def test_tables_for_machines_are_printed_one_at_a_time():
    write("sweep.py", a_sweep())
    result = moesys("run", "sweep.py", "--format", "csv")
    assert (result.stderr, result.exit_code) == (
        "Error: --format=csv holds one comparison, and sweep.py has 2 experiments; "
        "leave it out here, and give their run folders to moesys compare one at a time\n",
        2,
    )
    assert not Path("runs").exists()


def test_fail_fast_leaves_out_the_experiments_that_follow():
    failing = Strategy(name="failing", sharding=Fsep(slots_per_rank=4), balance=CpSat(min_replicas=3))
    write("sweep.py", a_sweep(strategies=(failing,), seeds=(0,)))
    result = moesys("run", "sweep.py", "--fail-fast")
    assert result.exit_code == 1
    assert "skew-1" not in result.stdout
    assert moesys("run", "sweep.py", "--fail-fast", "--retry-failed").exit_code == 1
    assert moesys("run", "sweep.py", "--fail-fast").stdout.count("trials are recorded") == 2


def test_a_format_for_machines_has_stdout_for_itself():
    write("small.toml", experiment().to_toml())
    result = moesys("run", "small.toml", "--format", "json")
    assert json.loads(result.stdout)["source"] == "simulated"
    assert "4 run: 4 of 4 trials are recorded" in result.stderr


def test_a_failed_trial_gives_exit_code_1():
    failing = Strategy(name="failing", sharding=Fsep(slots_per_rank=4), balance=CpSat(min_replicas=3))
    write("partly.json", experiment(strategies=(Strategy(name="ep"), failing), seeds=(0,)).to_json())
    result = moesys("run", "partly.json")
    assert result.exit_code == 1
    assert "failing seed 0: FAILED after" in result.stdout
    assert moesys("run", "partly.json").stdout.splitlines()[0] == (
        "nothing to do: 2 of 2 trials are recorded, 1 of them failed (--retry-failed runs those again)"
    )


def test_folders_of_one_setting_share_a_table_and_a_rerun_gets_its_own():
    ep, fsep = experiment().strategies
    wide = fsep.replace(name="fsep", sharding=Fsep(slots_per_rank=4))
    write("a.json", experiment(name="a").to_json())
    write("b.json", experiment(name="b", strategies=(ep.replace(name="baseline"), wide)).to_json())
    for name in ("a.json", "b.json"):
        assert moesys("run", name).exit_code == 0
    a, b = (str(next(Path("runs").glob(f"{name}-*"))) for name in "ab")
    together = json.loads(moesys("compare", a, b, "--format", "json").stdout)
    assert {row["name"]: row["n"] for row in together["rows"]} == {"ep": 2, "fsep": 2, f"fsep ({Path(b).name})": 2}
    apart = moesys("compare", a, a).stdout
    assert apart.count("SIMULATED: a") == 2


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
    "--json": {"demo", "report", "convert", "record-routing"},
    "--quiet": {"compare", "bisect", "explain", "plan", "report", "calibration-check"},
    "--out": {"compare", "bisect", "explain", "convert", "doctor", "record-routing"},
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
    lines = {
        "compare nowhere": "nowhere is not a run folder",
        "report nowhere": "nowhere is not",
        "convert nowhere new": "nowhere does not exist; give the folder of a checkpoint",
        "bisect nowhere a b": "nowhere is not a run folder",
        "run nowhere.py": "nowhere.py is not a file",
        "run small.json --strategy nowhere.toml": "nowhere.toml",
        "explain nowhere.py": "nowhere.py is not a file",
        "tune small.json --space nowhere.toml": "nowhere.toml",
        "simulate nowhere.py": "nowhere.py is not a file",
        "simulate --model nowhere/config.json --cluster h100:1": "nowhere/config.json",
        "simulate small.json --out small.json": "small.json is a file; give the path of a folder",
        "plan --load nowhere.csv --cluster 2x2": "load nowhere.csv is not a file",
        "calibrate --out small.json": "small.json is a file; give the path of a folder",
        f"simulate small.json --out {300 * 'x'}": "File name too long",
    }
    code = f"""
import sys
from typer.testing import CliRunner
from moesys.__main__ import app
for line in ("--help", "run --help", "run nowhere.py"):
    CliRunner().invoke(app, line.split())
    assert not {{"torch", "scipy", "matplotlib"}} & set(sys.modules), line
for line in {list(lines)!r}:
    done = CliRunner().invoke(app, line.split())
    heavy = [name for name in ("torch", "transformers", "triton", "ortools", "numba") if name in sys.modules]
    print(done.exit_code, heavy, " ".join(done.stderr.split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for (line, message), said in zip(lines.items(), done.stdout.splitlines(), strict=True):
        assert said.startswith("2 [] "), (line, said)
        assert message in said, (line, said)
