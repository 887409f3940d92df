"""The bench of reductions: it times what gives the same results, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import moesys as ms
from benchmarks import one_layer
from benchmarks.__main__ import app
from moesys.overlap.block_sums import BlockSums

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=24, num_experts=4, top_k=2)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_layer, "CASES", (one_layer.ScaledLayer("tiny", "mixtral", 1024, SHAPE),))


def moesys(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["layer", "--reduction", "--repeats", "3", "--json", str(out), *arguments])


def test_both_reductions_are_timed_in_both_dtypes(tmp_path: Path) -> None:
    result = moesys(tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["shape"], row["dtype"], row["wrong"]) for row in rows] == [
        ("tiny", "float32", ""),
        ("tiny", "bfloat16", ""),
    ]
    for row in rows:
        assert {name: len(samples) for name, samples in row["samples_ms"].items()} == {
            "ordered": 3,
            "layout_invariant": 3,
        }
        ratios = sorted(
            ours / theirs
            for ours, theirs in zip(row["samples_ms"]["layout_invariant"], row["samples_ms"]["ordered"], strict=True)
        )
        assert row["over_ordered"]["median"] == ratios[1]


def test_wrong_sums_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockSums, "blocks", lambda sums, rows: [slice(0, rows // 4), slice(rows // 4, rows // 2)])
    result = moesys(tmp_path / "out.json", "--dtype", "float32")
    assert result.exit_code == 1
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["samples_ms"] == {}
    assert "differs from ordered by" in row["wrong"]


def test_tokens_that_are_no_blocks_are_not_timed(tmp_path: Path) -> None:
    result = moesys(tmp_path / "out.json", "--tokens", "33", "--dtype", "float32")
    assert result.exit_code == 1
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert "token_block=32 does not divide the 33 tokens of rank 0" in row["wrong"]
