"""moesys simulate --model: its figures are ``simulate_model``'s, files can be read, what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app
from moesys.lab.commands.whole_model import named_strategy, parallelism_of

ARGUMENTS = ["simulate", "--model", "qwen3-moe-small", "--cluster", "h100:1", "--tokens", "512"]


def test_it_says_and_writes_what_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(ms.Strategy(name="mine", overlap=ms.Pipelined(chunks=2)).to_toml())
    options = ["--strategy", "ep", "--strategy", str(tmp_path / "mine.toml"), "--parallel", "ep=4,recompute=selective"]
    found = CliRunner().invoke(app, [*ARGUMENTS, *options, "--global-batch", "16", "--out", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    steps = json.loads((tmp_path / "out" / "model.json").read_text())
    assert [step["run"]["strategy"]["name"] for step in steps] == ["ep", "mine"]
    for step in steps:
        again = ms.models.simulate_model(ms.models.ModelRun.model_validate(step["run"]))
        assert step["seconds"] == again.seconds
        assert sum(step["seconds_by_part"].values()) == pytest.approx(again.seconds)
        assert f"{again.tokens_per_second:,.0f}" in found.output
        assert again.run.num_micro_batches == 2
    assert found.output.count(" fits") == 2


def test_short_names_and_long_ones_and_skewed_routing_has_an_interval() -> None:
    found = CliRunner().invoke(app, [*ARGUMENTS, "--skew", "1"])
    assert found.exit_code == 0, found.output
    (row,) = [line for line in found.output.splitlines() if line.strip().startswith("ep ")]
    assert " to " in row
    assert parallelism_of("tp=2, pp=4,vp=2") == ms.models.Parallelism(tp=2, pp=4, vp=2)
    assert parallelism_of("") == ms.models.Parallelism()
    assert named_strategy("laer:3") == ms.presets.laer(3)
    assert named_strategy("fsep:2").slots(ms.presets.MIXTRAL_8X7B, ms.presets.h100()) == (2,) * 8
