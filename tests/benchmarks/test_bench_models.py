"""The benchmark of whole models: it times what computes as transformers does, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import whole_models
from benchmarks.__main__ import app
from benchmarks.harness import model_steps
from benchmarks.harness.contest import Near


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *arguments])
    return result.exit_code, result.output


# tests/hf/test_expert_parallel.py always compares what strategies compute, and test_bench_layer.py times.
@pytest.mark.slow
@pytest.mark.parametrize("options", [("--hidden", "64"), ("--memory",)])
def test_every_strategy_trains_a_model_as_transformers_does_and_is_timed(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "models.json"
    only = ("--model", "qwen3-moe", "--routing", "skewed", "--sequences", "1")
    code, output = run(*only, "--repeats", "1", "--out", str(tmp_path), *options)
    assert code == 0, output
    assert ("peak MiB" in output) == ("--memory" in options)
    assert "MEASURED" in output
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [whole_models.THEIRS, *(strategy.name for strategy in model_steps.strategies(2))]
    assert all(len(row["samples_ms"]) == 1 and not row["wrong"] for row in rows.values())
    assert rows["ep"]["max_over_mean"] > 1.2
    assert rows["lent ep"]["max_over_mean"] < 1.1


def test_names_that_are_not_known_are_refused() -> None:
    code, output = run("--model", "gpt")
    assert code == 2
    assert "model='gpt' is not known; use all or some of olmoe, qwen3-moe, deepseek-v3" in output


def test_another_gradient_is_not_timed() -> None:
    agrees = Near(model_steps.TOLERANCE, whole_models.THEIRS)
    wanted = {"loss": torch.ones(()), "weight": torch.ones(3)}
    assert agrees("all_to_all", wanted) == ""
    assert agrees("same", dict(wanted)) == ""
    assert agrees("lost", wanted | {"weight": torch.full((3,), torch.nan)}) == "weight differs from all_to_all by inf"
    assert agrees("other", wanted | {"weight": torch.tensor([1.0, 1.0, 1.001])}) == (
        "weight differs from all_to_all by 5.8e-04"
    )


def test_balanced_routing_is_even_and_skewed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    even, skewed = (
        model_steps.routing_of(routing, 2, 1024)[0].flatten().bincount() for routing in model_steps.ROUTINGS
    )
    assert even.max() == even.min()
    assert skewed.max() > 3 * skewed.min()
