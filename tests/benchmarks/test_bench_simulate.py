"""The benchmark of the simulator times the steps that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import simulator_speed as bench
from benchmarks.__main__ import app
from moesys.simulator.step_program import simulation


def test_the_bench_times_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", ((1, 8), (3, 8), (1, 16)))
    arguments = ["simulate", "--most-ranks", "8", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "simulate.json").read_text())["rows"]
    assert [(of["layers"], of["ranks"]) for of in found] == [(1, 8), (3, 8)]
    plan = bench.step_plan(bench.OVERLAPS["sequential"], 3, 8)
    assert found[1]["num_spans"] == len(simulation([plan]).timeline.spans)
    assert min(found[1][name] for name in ("step_ms", "path_ms", "spans_ms")) > 0
    assert CliRunner().invoke(app, ["simulate", "--overlap", "best"]).exit_code == 2
