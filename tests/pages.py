"""Reads pages as a reader does: saves files under the names that pages give them, and runs blocks in order."""

from __future__ import annotations

import contextlib
import glob
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
import torch.distributed as dist
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from moesys.__main__ import app
from moesys.lab.ranks.pool import LocalRanks

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=indent)```', re.M | re.S
)

# Commands that no test runs, and why. Their options are checked all the same.
NOT_RUN = {
    r"python3 -m venv|pip|make|srun|head=": "installs, or needs Slurm",
    r"(\.venv/bin/|torchrun .* -m )?pytest": "runs the tests",
    r"\.venv/bin/python": "writes goldens",
    r"moesys doctor --gpu": "needs a GPU",
    r"torchrun --nnodes": "needs several hosts",
    r"python -m verl": "needs GPUs",
    r"torchrun .* -m moesys": "the same trials as the command before it",
    r".*--slurm": "needs Slurm",
    r"(TRITON_INTERPRET=1 )?python -m (benchmarks (?!leaderboard)|experiments)": "takes minutes, or needs root",
    r"python -m benchmarks leaderboard --out board": "takes longer than a test may",
    r"moesys (run|tune) experiments/overlap_ablation": "takes longer than a test may",
}
# Commands that take more than a few seconds, and those that need what these leave behind.
SLOW = re.compile(
    r"python -m benchmarks leaderboard|moesys (run (first|compare|record|experiments/\w+)\.py|compare|tune"
    r"|calibrate|simulate )"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. ``text`` of language "text" that follows another block is what that prints."""

    language: str
    title: str
    text: str
    follows_at_once: bool


def text_of(page: str) -> str:
    folder = ROOT if page in ("README", "CHANGELOG", "CONTRIBUTING") else ROOT / "docs"
    return (folder / f"{page}.md").read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    text, found, end = text_of(page), [], 0
    for match in FENCE.finditer(text):
        at_once = not text[end : match.start()].strip()
        found.append(Block(match["language"], match["title"] or "", match["text"], at_once))
        end = match.end()
    return found


def commands_of(block: Block) -> list[str]:
    """Returns the commands of a shell block, without comments."""
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def is_run(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in NOT_RUN)


def check_options(command: str) -> None:
    """Raises if a command of moesys or a benchmark does not take these arguments; other programs are not checked."""
    if match := re.match(r"(?:.* -m )?(moesys|benchmarks) (?=\w)(.*)", command):
        group: Any = get_command(app if match[1] == "moesys" else benchmarks)
        name, found, rest = group.resolve_command(click.Context(group), shlex.split(match[2]))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(click.exceptions.Exit):
            found.make_context(name, rest)


def run_on_rank(file: str, folder: Path, *arguments: str) -> str:
    """Runs a file as torchrun does, on ranks that are there, and returns what it prints."""
    # Only ranks that train models of transformers need these.
    sys.path.insert(0, str(ROOT / "tests" / "hf"))
    from hf_models import under_torchrun

    printed = io.StringIO()
    with (
        under_torchrun(),
        reading_in(folder),
        contextlib.redirect_stdout(printed),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda *_: None)
        patch.setattr(dist, "is_torchelastic_launched", lambda: True)
        patch.setattr(sys, "argv", [file, *arguments])
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


@contextlib.contextmanager
def reading_in(folder: Path) -> Iterator[None]:
    """Makes ``folder`` the current one, from which Python imports; at the end, modules from there are forgotten."""
    before, path = set(sys.modules), list(sys.path)
    with contextlib.chdir(folder):
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]


@contextlib.contextmanager
def as_installed() -> Iterator[None]:
    """Finds modules as the installed command does: not in the current folder, nor in the clone beside the package."""
    path, own = list(sys.path), (ROOT, Path.cwd())
    sys.path[:] = [each for each in path if Path(each).resolve() not in own]
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "experiments"}
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
            del sys.modules[name]
        sys.modules.update(before)


def check_quoted(quoted: str, printed: str) -> None:
    """Raises AssertionError unless ``printed`` has the lines of ``quoted`` in order; ``…`` stands for lines left out.

    What is measured is another number in each run, and may rank otherwise: of such lines, and of what a machine or a
    commit names, only the words and the places of numbers are compared, and not their order.
    """
    lines, wanted = (list(map(_plain, text.splitlines())) for text in (printed, quoted))
    if "MEASURED" in quoted:
        known = {_without_numbers(line) for line in lines}
        assert [line for line in wanted if line not in ("", "…") and _without_numbers(line) not in known] == []
        return
    at = 0
    for place, line in enumerate(wanted):
        if line == "…":
            continue
        # Behind lines that were left out, blank ones count as left out too.
        gap = place == 0 or wanted[place - 1] == "…"
        found = next((n for n in range(at, len(lines)) if lines[n] == line), len(lines)) if gap else at
        assert lines[found : found + 1] == [line], f"not printed:\n{line}\nbut:\n{printed}"
        at = found + 1
    assert wanted[-1] == "…" or not any(lines[at:]), f"more is printed:\n{printed}"


def _plain(line: str) -> str:
    """Returns a line without the colours and the spaces at its end."""
    return re.sub("\x1b\\[[\\d;]*m", "", line).rstrip()


def _without_numbers(line: str) -> str:
    line = re.sub(r"^(Measured on .*?): .*(, moesys) [0-9a-f]+", r"\1: machine\2 commit", line)
    line = re.sub(r"\b\d[\d.,]*(e-\d+)?(?![\w])|[~?] (?=\d)", "#", line)
    return re.sub(r"#+", "#", re.sub(r"[─\s]+", " ", line))


@dataclass
class Reader:
    """Follows a page in an empty folder. ``slow``: also the commands that take long. printed: by command."""

    folder: Path
    ranks: LocalRanks
    slow: bool = False
    printed: dict[str, str] = field(default_factory=dict)

    def follow(self, page: str) -> dict[str, Any]:
        """Runs the blocks of a page in order, and returns the names that its Python blocks leave, the last of each."""
        if not (self.folder / "experiments").exists():
            (self.folder / "experiments").symlink_to(ROOT / "experiments")
        printed, names = "", {}
        for block in blocks_of(page):
            if block.title:
                (self.folder / block.title).write_text(block.text, encoding="utf-8")
                printed = ""
            elif block.language == "python":
                printed = self._run(block.text, page, names)
            elif block.language == "sh":
                printed = "".join([self.run(command) for command in commands_of(block)][-1:])
            elif block.language == "text" and block.follows_at_once and printed:
                check_quoted(block.text, printed)
        return names

    def _run(self, text: str, page: str, names: dict[str, Any]) -> str:
        """Returns what a block prints, run in a namespace of its own."""
        fresh: dict[str, Any] = {"__name__": "__main__"}
        with reading_in(self.folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, f"{page}.md", "exec"), fresh)
        names |= fresh
        return printed.getvalue()

    def run(self, command: str) -> str:
        """Runs a command, and returns what it prints, or nothing for commands that only slow tests run."""
        program, *arguments = shlex.split(command)
        if not is_run(command) or (SLOW.match(command) and not self.slow):
            return ""
        if program == "torchrun":
            _, num_ranks, file, *rest = arguments
            if not self.slow:
                # One process has taken all of its steps.
                path = self.folder / file
                text = re.sub(r"\brange\(\d{3}\)", "range(3)", path.read_text(encoding="utf-8"))
                text = re.sub(r"(\w+_steps)=(\d)0\b", lambda of: f"{of[1]}={2 * int(of[2])}", text)
                path.write_text(text, encoding="utf-8")
            printed = self.ranks.run(run_on_rank, file, self.folder, *rest, num_ranks=int(num_ranks), timeout_s=250.0)
            self.printed[command] = printed[0]
            return ""
        with reading_in(self.folder):
            if arguments[:2] == ["-m", "benchmarks"]:
                result = CliRunner().invoke(benchmarks, arguments[2:])
                assert result.exit_code == 0, f"{command}\n{result.output}{result.exception!r}"
                return result.output
            if program == "python":
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    runpy.run_path(arguments[0], run_name="__main__")
                self.printed[command] = printed.getvalue()
                return printed.getvalue()
            assert program == "moesys", command
            found = [name for each in arguments for name in (sorted(glob.glob(each)) if "*" in each else [each])]
            with as_installed():
                result = CliRunner().invoke(app, found)
        assert result.exit_code == 0, f"{command}\n{result.output}{result.exception!r}"
        self.printed[command] = result.output
        return result.output
