"""Tables on terminals of 80, 100 and 120 columns: words are whole, no row is missing, columns left out are named.

Commands run in this process, with a pseudo-terminal as stdout; two run as programs.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import pytest
from lab_cases import EP, FSEP, experiment, moesys, records
from rich.cells import cell_len
from rich.text import Text
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks_app
from benchmarks.certificates import CertificateRow, Distance
from benchmarks.leaderboard.ranking import LostSetting, RankedPlanner, WorkloadRegret
from benchmarks.planner_scale import SizeRow, TrainingRow
from benchmarks.shaped.bench import Setting
from benchmarks.simulator_speed import Timing as SimulatorTiming
from moesys.__main__ import COMMANDS, app
from moesys.lab.calibrate.measurement import Figure, Timing
from moesys.lab.commands import doctor
from moesys.lab.commands.bisect import _words as bisect_words
from moesys.lab.runs.comparison import compare_records
from moesys.lab.runs.statistics import PairedRatio, Quantiles
from moesys.lab.show.comparisons import comparison_sheet
from moesys.lab.show.sheets import Column, Report, Sheet, print_full, print_sheet, publish
from moesys.lab.train.first_difference import FirstDifference

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
WIDTHS = (80, 100, 120)
STYLE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
LEFT_OUT = re.compile(r"\+(\d+) columns? \(")
ROOT = Path(__file__).parents[3]


# --- terminals --------------------------------------------------------------------------------------------------------


def on_terminal(width: int, show: Callable[[int, TextIO], Any]) -> str:
    """Returns what ``show`` prints on a terminal, without its styles; it takes its descriptor and its file."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        # Linux raises when all that wrote have closed.
        try:
            while some := os.read(master, 65536):
                found.append(some)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as file:
        show(slave, file)
    reader.join()
    os.close(master)
    return STYLE.sub("", b"".join(found).decode()).replace("\r\n", "\n")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command on a terminal of this width, or calls a function that prints, and returns the tables."""
    monkeypatch.setenv("TERM", "xterm-256color")

    def run(width: int, *command: Any) -> str:
        monkeypatch.setenv("COLUMNS", str(width))

        def show(_: int, file: TextIO) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", file)
                if callable(command[0]):
                    command[0]()
                else:
                    moesys(*command)

        return on_terminal(width, show)

    return run


def tables_of(text: str) -> str:
    """Returns the text from the first table or tree on, without progress before it and paths below."""
    found = re.search(
        r"(SIMULATED|MEASURED|Missing, or slower|Found|load\.csv)(.|\n)*?(?=\n(?:Decided by|pages:|Written)|\Z)", text
    )
    assert found, text
    return found[0]


def words_of(text: str) -> set[str]:
    return {word.strip(",():;") for word in re.split(r"[\s│├└─]+", text)} - {""}


def assert_whole(narrow: str, wide: str, width: int, row: str) -> None:
    """Asserts that no word was cut. ``row`` matches once in each row."""
    assert "…" not in narrow
    new = words_of(narrow) - words_of(wide) - {"column", "columns", "--wide"}
    assert {word for word in new if not re.fullmatch(r"\+\d+", word)} == set()
    assert max(cell_len(line.rstrip()) for line in narrow.splitlines()) <= width
    assert len(re.findall(row, narrow)) == len(re.findall(row, wide)) > 0
    assert not LEFT_OUT.search(wide)


# --- commands ---------------------------------------------------------------------------------------------------------

INTERVAL = r"\[\d+\.\d\d, \d+\.\d\d\]"
NAMES = r"(?m)^ +(ep|ep\+pipelined|fsep) "
# Each command with what matches once in each row; {run} is a run folder.
CASES = {
    "run": ("run small.py --jobs 1 --out runs", INTERVAL),
    "compare": ("compare {run}", INTERVAL),
    "compare --metric": ("compare {run} --metric step_ms", NAMES),
    "simulate": ("simulate small.py --draws 3", NAMES),
    "simulate --model": ("simulate --model qwen3-moe-small --cluster h100:1 --strategy ep --strategy fsep:16", "fits"),
    "explain": ("explain small.py", "computes experts|waits for restore"),
    "plan": ("plan --load load.csv --cluster 2x4", "rank [0-9]: "),
    "tune": ("tune small.py --jobs 1 --budget 2 --seeds 1 --timed 0 --out tuned", r"\d\.\d\de-0\d +(\d|baseline)"),
    "doctor": ("doctor", r"(?m)^  (GPU|CuPy|NCCL|Python|torch|gloo) "),
}
EXPERIMENT = "from runner_cases import simulation\n\ndef experiment():\n    return simulation(seeds=tuple(range(6)))\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, its run and a load."""
    folder = tmp_path_factory.mktemp("narrow")
    (folder / "small.py").write_text(EXPERIMENT)
    np.savetxt(folder / "load.csv", np.arange(8 * 16).reshape(8, 16) ** 2, delimiter=",", fmt="%d")
    done = CliRunner().invoke(app, ["run", str(folder / "small.py"), "--jobs", "1", "--out", str(folder / "runs")])
    assert done.exit_code == 0, done.output
    return folder


def words_to_run(command: str, folder: Path) -> list[str]:
    [run] = (folder / "runs").glob("simulated-*")
    return command.format(run=run).split()


@pytest.mark.parametrize("name", CASES)
def test_no_command_cuts_a_word(name, folder, printed, monkeypatch):
    monkeypatch.chdir(folder)
    quick = {about: look for about, look in doctor._CHECKS.items() if about not in ("local ranks", "memory")}
    monkeypatch.setattr(doctor, "_CHECKS", quick)
    command, row = CASES[name]
    words = words_to_run(command, folder)
    # Only a plan is a tree without tables.
    wide = tables_of(printed(80, *words, *(["--wide"] if name != "plan" else [])))
    # The other widths have the same tables, which are shown at all of them below.
    for width in WIDTHS if SWEEP else WIDTHS[:1]:
        assert_whole(tables_of(printed(width, *words)), wide, width, row)


def test_a_comparison_at_80_columns_has_what_matters(folder, printed):
    text = printed(80, *words_to_run("compare {run}", folder))
    assert re.search(r"\n +strategy +ms +\[95 %\] .* n *\n", text)
    assert re.search(r"\+\d columns \(.*\): --wide\n", text)
    assert "agreement" not in text


def as_program(width: int, *command: str, cwd: Path) -> str:
    """Returns what a program prints whose terminal alone says how wide it is."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "lab")])
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {
        "PYTHONPATH": path,
        "TERM": "xterm",
    }

    def show(slave: int, _: TextIO) -> None:
        subprocess.run([sys.executable, "-m", *command], stdin=slave, stdout=slave, cwd=cwd, env=env, check=True)

    return on_terminal(width, show)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("command", "row"),
    [
        pytest.param(CASES["compare"][0], INTERVAL, id="compare"),
        pytest.param(CASES["simulate --model"][0], "fits", id="model", marks=pytest.mark.slow),
    ],
)
def test_a_program_on_a_terminal_cuts_no_word(command, row, folder, printed):
    words = words_to_run(command, folder)
    narrow = as_program(80, "moesys", *words, cwd=folder)
    assert_whole(narrow, printed(80, *words, "--wide"), 80, row)


def test_every_command_that_prints_a_table_has_the_option():
    # verify prints tables without rich, which have one width.
    printing = COMMANDS.keys() - {"bisect", "plan", "report", "convert", "verify"}
    for program, names in (
        (app, printing),
        (
            benchmarks_app,
            {"layer", "kernels", "models", "simulate", "overlap", "planner-scale", "certificates", "shaped"},
        ),
    ):
        for name in names:
            assert "--wide" in CliRunner().invoke(program, [name, "--help"]).output, name


# --- tables -----------------------------------------------------------------------------------------------------------

SPREAD = Quantiles.of([11234.5, 12234.5, 13234.5])
RATIO = PairedRatio(8, 1.234, 1.1, 1.38)
PLANNER = "greedy(effort=4, min_replicas=2) + flow(max_inter_node=seconds)"
FED = {
    "planner-scale": [SizeRow("1,024 ranks, 256 experts", PLANNER, 1234.567, 12.345, 1.2345, 2.3456, 0.0123)] * 2,
    "planner-scale, history": [
        TrainingRow("1,024 ranks, 48 layers on 2 threads", "greedy", SPREAD, 1234.56, 2345.67, 1.23, 0.123)
    ],
    "certificates": [CertificateRow("QWEN3_30B_A3B, hot nodes", 128, 10, 0.123, 0.123, *[Distance(1.234, 1.345)] * 5)],
    "shaped": [
        Setting(
            *("2 hosts, 100 Mbit/s", "nodes and planners", FSEP),
            *([123.4, 125.0], [150.0, 149.0], 45.6, 1.23, 0.5, 130.0),
            wrong=wrong,
        )
        for wrong in ("", "the gradient of the router's weight differs on rank 3 from the first strategy's")
    ],
    "simulate": [SimulatorTiming("mega_kernel", 32, 1024, 123456.7, 1234.5, 123.4, 1234567, 3)],
    "calibrate, figures": [
        Figure("inter_node_gb_per_s", 1.2345, "there is no such link, so the default is kept", SPREAD, (0.1,), (0.2,))
    ],
    "calibrate, passes": [Timing("experts, backward", "4 x 1024 rows, 2048 to 4096", True, SPREAD, 12.3, 10**12)],
    "leaderboard": [
        RankedPlanner(place, PLANNER, RATIO, {f"workload {n}": 1.23 for n in range(6)}, *[1.23] * 10, cannot)
        for place, cannot in ((1, None), (None, "2 of 9 settings: the planner takes no more than 64 experts"))
    ],
    "by workload": [WorkloadRegret("W6 rotating hot spot", PLANNER, 0.943, {PLANNER: 0.0123})],
    "lost": [LostSetting("recorded", "qwen3-30b-a3b", "h100:4", 3, PLANNER, 1.23, 2.34, RATIO)],
}


@pytest.mark.parametrize("name", FED)
def test_no_table_cuts_a_word(name, printed):
    sheet = Sheet(f"MEASURED: {name}", FED[name], ["A note about what was measured."])
    wide = printed(80, lambda: print_sheet(sheet, wide=True))
    for width in WIDTHS:
        report = Report(
            name, "", "measured", [sheet], ["A note below all tables, that is longer than " + "words " * 30]
        )
        narrow = printed(width, lambda report=report: publish(report))
        assert_whole(narrow, wide + report.notes[0], width, "A note about")


@dataclass(frozen=True)
class Kept:
    name: Annotated[str, Column("name")]
    first: Annotated[str, Column("first")]
    kept: Annotated[str, Column("kept", kept=True)]
    last: Annotated[str, Column("the last", wraps=True)]


@pytest.mark.parametrize(
    ("width", "headers", "line"),
    [
        (80, ["name", "first", "kept", "the", "last"], ""),
        (60, ["name", "first", "kept"], "+1 column (the last): --wide"),
        (30, ["name", "kept"], "+2 columns (first, the last): --wide"),
        # Even what is kept does not fit, and the terminal breaks the lines.
        (20, ["name", "kept"], "+2 columns (first, the last): --wide"),
    ],
)
def test_columns_are_left_out_from_the_right(printed, width, headers, line):
    row = Kept("n" * 10, "f" * 20, "k" * 8, "words " * 20)
    text = printed(width, lambda: print_sheet(Sheet("a title", [row], ("A note.",))))
    title, *_ = text.splitlines()
    head = text[: text.index("─")].split()[2:]
    assert (title, sorted(head)) == ("a title", sorted(headers))
    assert [field.name for field in fields(Kept) if f" {getattr(row, field.name)} " in text] == [
        name for name in ("name", "first", "kept") if name in headers
    ]
    assert (" ".join(text.split()).count(line) == 1) if line else ("--wide" not in text)
    assert "A note." in text


def test_a_name_that_no_terminal_holds_is_whole(printed):
    name = "a-strategy-with-a-name-as-long-as-" + "x" * 60
    of = experiment(strategies=(EP, FSEP.replace(name=name)), seeds=tuple(range(6)))
    sheet = comparison_sheet(compare_records(of, records(of, {"ep": 10.0, name: 8.0})))
    text = printed(80, lambda: print_sheet(sheet))
    [row] = [line for line in text.splitlines() if name in line]
    assert re.search(r" 1\.25 \[1\.25, 1\.25\] +6 +bit-equal *$", row)


def test_a_sentence_of_bisect_breaks_between_words(printed):
    found = FirstDifference(3, "output of blocks.0.moe", (1,), 4, (2,), 2e-8, 328436, 786432)
    words = bisect_words(found)
    assert words.endswith("on rank 1 of 4: 328,436 of 786,432 numbers, by 2e-08 at most")
    assert_whole(printed(80, lambda: print_full(Text(words))), words, 80, "328,436")


def imports_of_tables(files: Sequence[Path]) -> set[str]:
    return {path.name for path in files if "rich.table" in path.read_text(encoding="utf-8")}


def test_all_tables_are_printed_by_one_module():
    files = [path for folder in ("moesys", "benchmarks", "experiments") for path in (ROOT / folder).rglob("*.py")]
    assert imports_of_tables(files) == {"sheets.py"}
