"""The command explain: whom it explains, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_explanation import FSEP, declared
from typer.testing import CliRunner

from moesys.__main__ import app
from moesys.config import Strategy
from moesys.lab.commands.explain import StepExplanation, explain


def explained(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.json"
    path.write_text(declared(Strategy(name="ep"), FSEP).to_json())
    return path


def test_the_command_explains_the_last_strategy_or_the_one_that_is_named_and_cuts_no_line_in_a_pipe(file):
    last, named = explained(file), explained(file, "--strategy", "ep")
    assert (last.exit_code, named.exit_code) == (0, 0)
    assert last.stdout.startswith("SIMULATED: fsep of tiny, micro-batch 6 of 0 to 6, seed 0\n")
    assert named.stdout.startswith("SIMULATED: ep of tiny")
    (header,) = (line for line in last.stdout.splitlines() if "experts max/mean   replicas moved" in line)
    assert header.endswith("wait ms (mean)")
    assert len(header) > 130
    assert "…" not in last.stdout


def test_json_has_all_that_the_explanation_has(file):
    data = json.loads(explained(file, "--micro-batch", 4, "--json").stdout)
    step = explain(FSEP, declared(FSEP), micro_batch=4)
    assert data == json.loads(step.to_json())
    assert (data["source"], data["step_ms"], data["strategy"]["name"]) == ("simulated", step.step_ms, "fsep")
    assert [layer["tokens_R"] for layer in data["layers"]] == [layer.tokens_R for layer in step.layers]
    assert set(data) - {"source"} == set(StepExplanation.__dataclass_fields__)
