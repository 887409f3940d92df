"""The command explain: whom it explains, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
import typer
from test_explanation import FSEP, declared
from typer.testing import CliRunner

from moesys.config import Strategy
from moesys.lab.commands.explain import StepExplanation, explain, explain_command

app = typer.Typer(rich_markup_mode=None)


@app.command()
def command(
    file: Path,
    strategy: str | None = None,
    layer: int | None = None,
    micro_batch: int | None = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    explain_command(file, strategy, layer, micro_batch, as_json)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.json"
    path.write_text(declared(Strategy(name="ep"), FSEP).to_json())
    return path


def test_the_command_explains_the_last_strategy_or_the_one_that_is_named(file):
    last, named = (CliRunner().invoke(app, [str(file), *options]) for options in ([], ["--strategy", "ep"]))
    assert (last.exit_code, named.exit_code) == (0, 0)
    assert last.stdout.startswith("SIMULATED: fsep of tiny, micro-batch 6 of 0 to 6, seed 0\n")
    assert named.stdout.startswith("SIMULATED: ep of tiny")


def test_json_has_all_that_the_explanation_has(file):
    done = CliRunner().invoke(app, [str(file), "--micro-batch", "4", "--json"])
    data = json.loads(done.stdout)
    step = explain(FSEP, declared(FSEP), micro_batch=4)
    assert data == json.loads(step.to_json())
    assert (data["source"], data["step_ms"], data["strategy"]["name"]) == ("simulated", step.step_ms, "fsep")
    assert [layer["tokens_R"] for layer in data["layers"]] == [layer.tokens_R for layer in step.layers]
    assert set(data) - {"source"} == set(StepExplanation.__dataclass_fields__)


def test_in_a_pipe_no_line_is_cut(file, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = CliRunner().invoke(app, [str(file)]).stdout
    (header,) = (line for line in text.splitlines() if "experts max/mean   replicas moved" in line)
    assert header.endswith("wait ms (mean)")
    assert len(header) > 130
    assert "…" not in text
