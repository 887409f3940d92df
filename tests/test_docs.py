"""The docs are true: their Python runs, their errors are said, their names exist."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typer.main import get_command
from typer.testing import CliRunner

import moesys as ms
from benchmarks.__main__ import app as benchmarks
from moesys import config
from moesys.__main__ import app
from moesys.config import Declared, experiment, workload
from moesys.kinds import BALANCES, OVERLAPS, SPLITS
from moesys.lab.ranks.pool import LocalRanks

ROOT = Path(__file__).parents[1]
MAX_COLUMNS = 190
KINDS = (*BALANCES.values(), *SPLITS.values(), *OVERLAPS.values())
# A word of a path that stands for any name, such as KIND.
PLACEHOLDER = re.compile("[A-Z]{4}")
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def text_of(page: str) -> str:
    folder = ROOT if page == "README" else ROOT / "docs"
    return (folder / f"{page}.md").read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Any]:
    """The Python blocks of a page, as code."""
    blocks = re.findall(r"^```python\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    return [compile(block, f"{page}.md", "exec") for block in blocks]


def run_blocks(page: str, **given: Any) -> dict[str, Any]:
    """The names that a page's Python blocks leave, run in order. ``given``: names that the page takes for granted."""
    for block in blocks_of(page):
        exec(block, given)
    return given


def printed_beside_blocks(page: str) -> list[str]:
    """The plain blocks of a page that follow a Python block, which are what it prints."""
    return re.findall(r"^```python\n(?:.*?)^```\n\n```\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def declared_types() -> list[type[Declared]]:
    found = [
        value for module in (config, experiment, workload) for value in vars(module).values() if isinstance(value, type)
    ]
    found += [getattr(ms, name) for name, _ in KINDS]
    return sorted({t for t in found if issubclass(t, Declared) and t is not Declared}, key=lambda t: t.__name__)


@pytest.mark.parametrize("page", ["strategy", "tour", "watch"])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page)


def readme_loss() -> float:
    """Of the first steps."""
    return run_blocks("README", range=lambda steps: range(min(steps, 5)))["loss"].item()


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_the_training_of_the_readme_runs(ranks: LocalRanks, num_ranks: int) -> None:
    """The blocks run in one process, and on ranks as under torchrun."""
    losses = ranks.run(readme_loss, num_ranks=num_ranks, timeout_s=60.0) if num_ranks else [readme_loss()]
    assert all(math.isfinite(loss) for loss in losses)


SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2, dtype="float16")


def two_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(ms.MoELayer(SHAPE, ms.presets.ep(), layer_index=index) for index in range(2)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        ms.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def blocks_of_the_layer() -> list[list[int]]:
    """Returns the home ranks of experts after the page's blocks."""
    model, optimizer = two_layers()
    x, scaler = torch.randn(8, 16, requires_grad=True), torch.amp.GradScaler("cpu", init_scale=16.0)
    cluster = ms.ClusterSpec(ranks_per_node=dist.get_world_size() if dist.is_initialized() else 1)
    names: dict[str, Any] = {"ms": ms, "torch": torch, "model": model, "optimizer": optimizer, "block": model, "x": x}
    names |= {"train": train, "cluster": cluster, "scaler": scaler}
    moved, checkpointed, scaled = blocks_of("moe")
    exec(moved, names)
    exec(checkpointed, names)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    names["loss"] = names["y"].square().mean()
    exec(scaled, names)
    assert not any(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    return [homes.tolist() for homes in names["homes"]]


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_the_python_of_the_page_of_the_layer_runs(ranks: LocalRanks, num_ranks: int) -> None:
    found = ranks.run(blocks_of_the_layer, num_ranks=num_ranks) if num_ranks else [blocks_of_the_layer()]
    assert all(homes == found[0] for homes in found)


def saved_and_loaded(folder: Path) -> None:
    model, optimizer = two_layers()
    names = {"torch": torch, "DTensor": DTensor, "model": model}
    found = run_blocks("checkpoints", **names)
    optimizer = found["optimizer"] if dist.is_initialized() else optimizer
    train(model, optimizer, steps=1)
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with ms.whole_folder(folder) as new:
        found["save"](new, model, optimizer)
    train(model, optimizer, steps=1)
    found["load"](folder, model, optimizer)
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_the_python_of_the_page_of_checkpoints_runs(ranks: LocalRanks, tmp_path: Path, num_ranks: int) -> None:
    if num_ranks:
        ranks.run(saved_and_loaded, tmp_path / "checkpoint", num_ranks=num_ranks)
    else:
        saved_and_loaded(tmp_path / "checkpoint")


def test_the_space_of_the_tuning_page_is_one() -> None:
    declared = re.search(r"^```toml\n(.*?)^```", text_of("tuning"), re.MULTILINE | re.DOTALL)
    assert declared
    assert ms.Space.from_toml(declared[1]).num_combinations == 720


@pytest.mark.parametrize("page", ["balance", "simulate-a-model"])
def test_a_worked_example_prints_what_the_page_shows(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(page)
    shown = printed_beside_blocks(page)
    assert len(shown) >= 2
    assert capsys.readouterr().out == "".join(shown)


def test_the_errors_of_the_reference_are_what_is_said() -> None:
    names = run_blocks("strategy")
    section = text_of("strategy").partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|$", section, re.MULTILINE)
    assert len(rows) >= 10
    for wrong, message in rows:
        # Lists of kinds, which grow, may be cut short by an ellipsis.
        with pytest.raises(ValueError, match=".+".join(map(re.escape, message.split("…")))):
            eval(wrong, names)


def test_the_page_of_ones_own_planner_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = text_of("your-own-planner")
    python, toml, shell = (
        re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for kind in ("python", "toml", "sh")
    )
    (tmp_path / "my_planners.py").write_text(python[0])
    (tmp_path / "mine.toml").write_text(toml[0])
    (tmp_path / "load.csv").write_text("9,1,1,1\n1,9,1,1\n5,2,2,2\n1,1,1,7\n")
    small = ms.Experiment(
        name="first",
        model=ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2),
        cluster=ms.ClusterSpec(ranks_per_node=2),
        strategies=(ms.presets.fsep(3),),
        workload=ms.Generated(tokens_per_rank=64, warmup=0, steps=2),
        seeds=(0,),
    )
    (tmp_path / "experiment.toml").write_text(small.to_toml())
    run_blocks("your-own-planner")
    assert capsys.readouterr().out == printed_beside_blocks("your-own-planner")[0]
    commands = [line.split()[1:] for line in shell[0].splitlines()]
    for arguments in commands:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert shell[1] == "moesys run experiments/own_planner.py\n"


@pytest.mark.parametrize("declared", declared_types(), ids=lambda declared: declared.__name__)
def test_the_reference_names_every_field(declared: type[Declared]) -> None:
    text = text_of("strategy")
    missing = {field for field in declared.model_fields if f"`{field}`" not in text} - {"kind"}
    assert f"`{declared.__name__}" in text or f"## {declared.__name__}" in text
    assert not missing


def test_the_toml_of_the_reference_is_the_strategy_beside_it() -> None:
    toml = re.search(r"^```toml\n(.*?)^```", text_of("strategy"), re.MULTILINE | re.DOTALL)
    assert toml
    assert ms.Strategy.from_toml(toml[1]) == run_blocks("strategy")["unified"]


def test_the_reading_example_reads_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ms.Experiment(
        name="first",
        model=ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2),
        cluster=ms.ClusterSpec(ranks_per_node=4),
        strategies=(ms.presets.fsep(2), ms.presets.laer(2)),
        workload=ms.Generated(tokens_per_rank=64, warmup=0, steps=2),
        seeds=(0, 1),
    )
    ms.run(small)
    run_blocks("reading-results")
    printed = capsys.readouterr().out
    assert all(strategy.name in printed for strategy in small.strategies)


def test_the_reference_lists_public_names_where_they_are_defined() -> None:
    listed = re.findall(r"^::: (\S+)$", text_of("api"), re.MULTILINE)
    public = {ms._MODULES.get(name) or f"{ms._MODULE_OF[name]}.{name}" for name in ms.__all__}
    # The page of strategies has the planners, splits and overlaps (test_the_reference_names_every_field).
    elsewhere = {f"{module}.{name}" for name, module in KINDS}
    assert len(listed) == len(set(listed))
    assert public - elsewhere <= set(listed) <= public


def test_the_site_has_every_page() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (?:[\w ]+: )?(\S+\.md)$", settings, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md"))


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
def test_benchmarks_that_the_docs_name_are_there(page: Path) -> None:
    named = set(re.findall(r"python -m benchmarks ([a-z][\w-]*)", page.read_text(encoding="utf-8")))
    assert named <= set(get_command(benchmarks).list_commands(None))


@every_page
def test_lines_of_the_docs_fit_a_wide_window_but_for_tables(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    too_long = [line for line in prose.splitlines() if len(line) > MAX_COLUMNS and not line.startswith("|")]
    assert too_long == []
