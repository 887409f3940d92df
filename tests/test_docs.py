"""The docs are true: their blocks and commands run in order, their errors are raised, their names exist."""

from __future__ import annotations

import os
import pydoc
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from lab_cases import EP, FSEP, record
from lab_cases import experiment as made_up
from pages import (
    NOT_RUN,
    ROOT,
    Block,
    Reader,
    as_installed,
    blocks_of,
    check_options,
    commands_of,
    is_run,
    reading_in,
    text_of,
)
from typer.main import get_command
from typer.testing import CliRunner

import moesys as ms
from benchmarks.__main__ import app as benchmarks
from docs.hooks import FIELDS, described_fields, site_text, with_fields, with_names
from moesys import config, verify
from moesys.__main__ import app
from moesys.config import Declaration, experiment, workload
from moesys.frames import BACKWARD, EXPERT_GRADIENTS, LEARNING, Identity, Position, header, position_mismatch
from moesys.kinds import BALANCES, OVERLAPS, SPLITS
from moesys.lab.commands.bisect import _words as bisected
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.runs.declarations import load_experiments
from moesys.lab.runs.records import RunFolder
from moesys.lab.train.first_difference import FirstDifference

MAX_COLUMNS = 190
KINDS = (*BALANCES.values(), *SPLITS.values(), *OVERLAPS.values())
# A word of a path that stands for any name, such as KIND.
PLACEHOLDER = re.compile("[A-Z]{4}")
# Files of which other tests know what they say.
READ_BY_TESTS = ("space.toml", "unified.toml")
MADE_BY_HOOKS = ("index", "changelog", "contributing")
PAGES = [
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in MADE_BY_HOOKS),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
]
WITH_BLOCKS = [page.stem for page in PAGES if any(block.language in ("python", "sh") for block in blocks_of(page.stem))]

# The other pages have tests of their own: in tests/hf/test_train_your_model.py, tests/torchtitan/ and tests/megatron/.
FOLLOWED = [page for page in WITH_BLOCKS if page not in ("strategy", "transformers", "rl", "torchtitan", "megatron")]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def declared_types() -> list[type[Declaration]]:
    found = [
        value for module in (config, experiment, workload) for value in vars(module).values() if isinstance(value, type)
    ]
    found += [getattr(ms, name) for name, _ in KINDS]
    return sorted({t for t in found if issubclass(t, Declaration) and t is not Declaration}, key=lambda t: t.__name__)


@pytest.mark.parametrize("page", FOLLOWED)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_a_page_can_be_followed(ranks: LocalRanks, tmp_path: Path, page: str, slow: bool) -> None:
    Reader(tmp_path, ranks, slow).follow(page)
    if page == "watch":
        # The training that it shows learns.
        text = (tmp_path / "runs" / "fsep" / "rank-0000.jsonl").read_text()
        losses = [float(loss) for loss in re.findall(r'"loss": ?([\d.]+)', text)]
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_commands_of_a_page_have_their_options(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    of_table = commands_of_the_readme() if page == "README" else []
    assert len(of_table) > 12 or page != "README"
    for command in (*of_table, *commands_on(page)):
        check_options(command)


def commands_on(page: str) -> list[str]:
    return [each for block in blocks_of(page) if block.language == "sh" for each in commands_of(block)]


def commands_of_the_readme() -> list[str]:
    """Returns the commands of its table, one of each row."""
    return re.findall(r"^\| .*? \| `(.+?)`", text_of("README").partition("## Commands")[2], re.MULTILINE)


@pytest.mark.slow
def test_commands_of_the_readme_that_name_an_experiment_run(ranks: LocalRanks, tmp_path: Path) -> None:
    reader = Reader(tmp_path, ranks, slow=True)
    reader.follow("README")
    for command in commands_of_the_readme():
        if "experiments/" in command:
            reader.run(command)


def test_experiments_that_commands_name_are_read_by_the_installed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of these commands take too long to be run always."""
    monkeypatch.chdir(ROOT)
    named = {file for page in WITH_BLOCKS for file in re.findall(r"moesys \w+ (experiments/\w+\.py)", text_of(page))}
    assert len(named) >= 5
    with as_installed():
        for file in sorted(named):
            assert load_experiments(Path(file)), file


@pytest.mark.ranks
@pytest.mark.parametrize("file", [pytest.param("rebalance_ablation", marks=pytest.mark.slow), "own_planner"])
def test_the_installed_command_finds_what_an_experiment_imports(file: str) -> None:
    """As ``python -m`` does, which has the current folder on its path."""
    # The package is this checkout's, of which Python finds nothing else.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import moesys; sys.path.remove({str(ROOT)!r}); import runpy"
    script = Path(sys.executable).with_name("moesys")
    command = [sys.executable, "-P", "-c", f"{code}; runpy.run_path({str(script)!r}, run_name='__main__')"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # The command refuses a strategy only after it has read the file, and it ends sooner than with a plan.
    arguments = ("explain", f"experiments/{file}.py", "--strategy", "nobody's")
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"is not in {file.replace('_', '-')}; choose one of" in " ".join(done.stderr.split())


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_file_that_a_page_names_is_used(page: str) -> None:
    blocks = blocks_of(page)
    for number, block in enumerate(blocks):
        used = [b.text for b in blocks[number + 1 :] if b.language in ("python", "sh")]
        name = block.title.removesuffix(".py")
        assert name in ("", *READ_BY_TESTS) or any(re.search(rf"\b{re.escape(name)}\b", text) for text in used), (
            block.title
        )


def test_what_is_not_run_is_on_a_page_and_a_reader_runs_the_others() -> None:
    commands = [command for page in WITH_BLOCKS for command in commands_on(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in commands)] == []
    assert sum(map(is_run, commands)) > 30


def told_at(command: list[str], folder: Path) -> str:
    """Returns what a command that cannot be run says, with names of folders as pages have them."""
    with reading_in(folder), as_installed():
        result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    return re.sub(r"-[0-9a-f]{8}\b", "-1234abcd", result.stderr)


def a_wrong_field(folder: Path) -> str:
    first = (folder / "first.py").read_text()
    (folder / "wrong.py").write_text(first.replace("slots_per_rank=3", "slots_per_rank=1"))
    return told_at(["run", "wrong.py"], folder)


def another_experiment(folder: Path) -> str:
    with reading_in(folder):
        (experiment,) = load_experiments(Path("first.py"))
        RunFolder.open(experiment, Path("runs")).close()
    (folder / "first.py").write_text((folder / "first.py").read_text().replace("chunks=2", "chunks=4"))
    return told_at(["run", "first.py"], folder)


def other_bits(folder: Path) -> str:
    """Returns what ``moesys compare`` says of a run whose losses differ from one step on."""
    exact = [each.replace(reduction=ms.LayoutInvariant()) for each in (EP, FSEP)]
    of = made_up(name="real-olmoe-small", strategies=tuple(exact), seeds=(0,), workload=ms.Training(steps=20))
    with reading_in(folder), closing(RunFolder.open(of, Path("runs"))) as run:
        for trial in of.trials():
            losses = [5.0] * 12 + [5.0 + (trial.strategy.name == "fsep")] * 11
            run.append(record(trial, losses=losses))
        path = str(run.path)
    return told_at(["compare", path], folder)


def a_difference(_: Path) -> str:
    found = FirstDifference(0, "gradient of blocks.1.moe.experts.masters", (0, 1), 2, (1,), 1.5e-11, 542, 12288)
    return f"ep and fsep, seed 0: {bisected(found)}"


def different_calls(_: Path) -> str:
    at = Position("forward", 3, LEARNING + BACKWARD + EXPERT_GRADIENTS)
    return str(position_mismatch(np.stack([header(Identity(layer), at, 0, 0) for layer in (5, 7)]), (0, 1)))


# The messages that pages quote, in their order, and what makes each.
MESSAGES = {
    "quick-start": (a_wrong_field, another_experiment),
    "results": (other_bits, a_difference),
    "moe": (different_calls,),
}


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_what_a_page_quotes_is_what_is_printed(page: str, tmp_path: Path) -> None:
    """A block of text follows what prints it, and is compared there (``pages.Reader``), or is a message."""
    blocks = blocks_of(page)
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    quoted = [
        block
        for before, block in zip([None, *blocks], blocks, strict=False)
        if block.language == "text" and not (before and block.follows_at_once and is_compared(before))
    ]
    for block, make in zip(quoted, MESSAGES.get(page, ()), strict=True):
        assert " ".join(block.text.split()) in " ".join(make(tmp_path).split())


def is_compared(before: Block) -> bool:
    return before.language == "python" or (before.language == "sh" and is_run(commands_of(before)[-1]))


def test_the_space_of_the_tuning_page_is_one() -> None:
    (declared,) = [block.text for block in blocks_of("simulate") if block.title == "space.toml"]
    assert ms.Space.from_toml(declared).num_combinations == 936


def test_the_page_of_declarations_holds(ranks: LocalRanks, tmp_path: Path) -> None:
    """Its blocks run, and its TOML is the strategy beside it."""
    Reader(tmp_path, ranks).follow("strategy")
    blocks, names = {block.title: block.text for block in blocks_of("strategy")}, {}
    exec(blocks["strategies.py"], names)
    assert ms.Strategy.from_toml(blocks["unified.toml"]) == names["unified"]


def test_the_reference_has_the_fields_of_every_class() -> None:
    text, classes = text_of("strategy"), {declared.__name__: declared for declared in declared_types()}
    tables = [name for found in FIELDS.finditer(text) for name in found[2].split(", ")]
    # The search space of MegaKernels is a table of its own page.
    assert {name for name in ms.MegaKernel.model_fields if f"`{name}`" not in text_of("kernels")} == {"kind"}
    with_own = {name for name, declared in classes.items() if described_fields(declared)} - {"MegaKernel"}
    assert sorted(tables) == sorted(with_own)
    assert [name for name in classes if f"`{name}`" not in text and f"## {name}" not in text] == []
    assert with_fields(text, classes) == text, "fields differ from docs/strategy.md: run `python -m docs.hooks`"


def test_the_reading_example_reads_a_run_folder(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    workload = ms.Generated(tokens_per_rank=64, warmup=0, steps=2)
    small = made_up(name="first", strategies=(ms.presets.fsep(2), ms.presets.laer(2)), workload=workload)
    ms.run(small)
    (block,) = [each.text for each in blocks_of("results") if each.language == "python" and not each.title]
    exec(block, {})
    printed = capsys.readouterr().out
    assert all(strategy.name in printed for strategy in small.strategies)


# The classes of results, and the base of declarations.
BESIDE_PUBLIC_NAMES = (
    "Comparison Declaration LayerMetrics MoERuntime PathPart RestOfStep RunResult Simulation Span Timeline TuneResult "
    "align_routing"
)


def test_the_reference_lists_public_names_where_they_are_defined() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    listed = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    parts = (ms.models, ms.planning, ms.traces)
    public = [value for name in ms.__all__ if (value := getattr(ms, name)) not in (*parts, verify)]
    public += [getattr(part, name) for part in parts for name in part.__all__]
    public += [value for value in vars(verify).values() if getattr(value, "__module__", "").startswith(verify.__name__)]
    assert len(listed) == len(set(listed))
    found = {pydoc.locate(name): name.rpartition(".")[2] for name in listed}
    assert set(public) <= found.keys()
    assert sorted(name for value, name in found.items() if value not in public) == BESIDE_PUBLIC_NAMES.split()
    assert with_names(text_of("api")) == text_of("api"), "names differ from docs/api: run `python -m docs.hooks`"
    tables = text_of("api") + text_of("strategy")
    assert [name for name in found.values() if not re.search(rf"[`.]{name}`", tables)] == []


def test_every_field_has_a_description() -> None:
    """The API reference and ``strategy.md`` show it."""
    fields = {declared.__name__: described_fields(declared) for declared in declared_types()}
    assert [f"{name}.{field}" for name, found in fields.items() for field, about in found.items() if not about] == []


def test_the_site_has_every_page() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (?:[\w ]+: )?(\S+\.md)$", settings, re.MULTILINE)
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(listed) == sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in pages if page.parent.name != "measured"
    )


def test_every_measured_page_is_in_the_table_of_benchmarks() -> None:
    pages = sorted((ROOT / "docs" / "measured").glob("*.md"))
    titles = [page.read_text(encoding="utf-8").splitlines()[0] for page in pages]
    assert len(set(titles)) == len(titles)
    assert [page.name for page in pages if f"measured/{page.name}" not in text_of("benchmarks")] == []


def anchors_of(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)\s]*)\)", text)
    assert links or page.stem in ("glossary", "CHANGELOG", "results")
    for link in links:
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path)
        if target.parent == ROOT / "docs" and target.stem in MADE_BY_HOOKS:
            target = ROOT / {"index": "README", "changelog": "CHANGELOG", "contributing": "CONTRIBUTING"}[target.stem]
            target = target.with_suffix(".md")
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target.read_text(encoding="utf-8")), link


def test_links_of_the_start_page_lead_to_pages_of_the_site() -> None:
    text = site_text(
        "[a](docs/b.md#c) ![d](docs/e.svg) [f](CHANGELOG.md) [g](experiments/) [h](https://i.org/) [j](#k)"
    )
    assert text == "[a](b.md#c) ![d](e.svg) [f](changelog.md) g [h](https://i.org/) [j](#k)"


def test_what_runs_before_a_commit_is_what_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe
    commands = [line.split("$(BIN)/")[1] for line in recipe[1].splitlines()]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entry: \.venv/bin/(.+)$", hooks, re.MULTILINE) == commands


@every_page
def test_files_that_the_docs_name_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:docs|benchmarks|experiments|tests|moesys)/[\w./-]*)`", text)
    assert [name for name in named if not PLACEHOLDER.search(name) and not (ROOT / name).exists()] == []
    # A file may be named by the end of its path.
    rooms = (ROOT / room for room in ("moesys", "benchmarks", "tests", "experiments"))
    files = [f"/{path.relative_to(ROOT).as_posix()}" for room in rooms for path in room.rglob("*.py")]
    ends = [name for name in re.findall(r"`([\w/]+\.py)`", text) if "/" in name and not PLACEHOLDER.search(name)]
    assert [end for end in ends if not any(file.endswith(f"/{end}") for file in files)] == []


@every_page
def test_benchmarks_that_the_docs_name_are_there_and_lines_fit_a_wide_window_but_for_tables(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"python -m benchmarks ([a-z][\w-]*)", text))
    assert named <= set(get_command(benchmarks).list_commands(None))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > MAX_COLUMNS and not line.startswith("|")] == []
