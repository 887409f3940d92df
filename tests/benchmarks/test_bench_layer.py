"""The benchmark of one layer: it times what matches, refuses what does not, and writes all samples as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks import one_layer as layer
from benchmarks.__main__ import app
from benchmarks.harness.stopwatch import interleave
from moesys import ModelShape, MoELayer
from moesys.overlap.exact_sum import BlockSums

SOFTMAX = ModelShape(hidden_size=64, intermediate_size=48, num_experts=8, top_k=2)
TINY = (
    layer.ScaledLayer("tiny", "mixtral", 24, SOFTMAX),
    layer.ScaledLayer(
        "tiny-groups",
        "deepseek_v3",
        24,
        SOFTMAX.replace(scoring_func="sigmoid", n_group=4, topk_group=2, n_shared_experts=1),
    ),
)


@pytest.fixture(autouse=True)
def _tiny_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "CASES", TINY)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["layer", *arguments])
    return result.exit_code, result.output


def test_measures_every_case_and_writes_every_sample(tmp_path: Path) -> None:
    code, output = run("--repeats", "2", "--threads", "1", "--out", str(tmp_path))
    assert code == 0, output
    assert "MEASURED" in output
    assert "differs" not in output
    written = json.loads((tmp_path / "layer.json").read_text())
    assert written["source"] == "measured"
    assert "1 thread," in written["machine"]
    found = {(row["shape"], row["model"]["dtype"], row["direction"]) for row in written["rows"]}
    assert found == {
        (case.name, dtype, direction)
        for case in TINY
        for dtype in ("float32", "bfloat16")
        for direction in ("forward", "forward + backward")
    }
    for row in written["rows"]:
        assert row["wrong"] == ""
        assert row["num_tokens"] == 24
        mastered = layer.MASTERED.values() if row["model"]["dtype"] == "bfloat16" else ()
        assert row["samples_ms"].keys() == {"moesys", "eager", "grouped_mm", *mastered}
        assert row["ratios"].keys() == row["samples_ms"].keys() - {"moesys"}
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["samples_ms"].values())
        ratio = row["ratios"]["eager"]
        assert ratio["p20"] <= ratio["median"] <= ratio["p80"]


def test_tokens_and_dtype_can_be_chosen() -> None:
    assert [(case.num_tokens, case.shape.dtype) for case in layer.select("tiny", "bfloat16", 5)] == [(5, "bfloat16")]


def test_a_wrong_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = MoELayer.forward

    def wrong(self: MoELayer, x: Tensor) -> Tensor:
        return right(self, x) * 1.001

    monkeypatch.setattr(MoELayer, "forward", wrong)
    path = tmp_path / "layer.json"
    code, output = run("--shape", "tiny", "--dtype", "float32", "--repeats", "2", "--out", str(tmp_path))
    assert code == 1
    # Output and gradients of x differ by the same factor: which of the two is worst is decided by rounding.
    assert re.search(r"moesys: (output|dx) differs from eager by 1\.0e-03", output)
    for row in json.loads(path.read_text())["rows"]:
        assert row["wrong"]
        assert row["samples_ms"] == row["ratios"] == {}


def test_a_wrong_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return gradients[0] * 1.001

    right = MoELayer.forward
    monkeypatch.setattr(MoELayer, "forward", lambda self, x: right(self, Wrong.apply(x)))
    rows = layer.measure(layer.select("tiny", "float32"), repeats=1, threads=1)
    assert all("moesys: dx differs from eager" in row.wrong and not row.samples_ms for row in rows)


def test_both_reductions_are_timed_in_both_dtypes(tmp_path: Path) -> None:
    code, output = run("--reduction", "--shape", "tiny", "--tokens", "1024", "--repeats", "3", "--out", str(tmp_path))
    assert code == 0, output
    rows = json.loads((tmp_path / "reductions.json").read_text())["rows"]
    assert [(row["dtype"], row["direction"], row["wrong"]) for row in rows] == [
        (dtype, direction, "") for dtype in ("float32", "bfloat16") for direction in layer.DIRECTIONS
    ]
    for samples_ms, ratios in ((row["samples_ms"], row["shown_ratios"]) for row in rows):
        assert {name: len(samples) for name, samples in samples_ms.items()} == {"ordered": 3, "layout_invariant": 3}
        of_each = [over / under for over, under in zip(*reversed(samples_ms.values()), strict=True)]
        assert ratios["layout_invariant / ordered"]["median"] == sorted(of_each)[1]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [("1024", "layout_invariant: .* differs from ordered by"), ("33", "token_block=32 does not divide the 33 tokens")],
)
def test_wrong_sums_and_tokens_that_are_no_whole_blocks_are_not_timed(tmp_path, monkeypatch, tokens, words):
    if tokens == "1024":
        monkeypatch.setattr(BlockSums, "blocks", lambda sums, rows: [slice(0, rows // 4), slice(rows // 4, rows // 2)])
    only = ("--shape", "tiny", "--dtype", "float32", "--tokens", tokens)
    assert run("--reduction", *only, "--out", str(tmp_path))[0] == 1
    for row in json.loads((tmp_path / "reductions.json").read_text())["rows"]:
        assert row["samples_ms"] == {}
        assert re.search(words, row["wrong"])


def test_contestants_take_turns_and_warm_up() -> None:
    ran: list[str] = []
    contestants = {name: (lambda name=name: ran.append(name) or 1.0) for name in "abc"}
    samples_ms = interleave(contestants, 5, before=lambda: ran.append("|"), seed=1)
    assert [len(samples) for samples in samples_ms.values()] == [5, 5, 5]
    turns = ["".join(ran[i : i + 6]).replace("|", "") for i in range(0, len(ran), 6)]
    assert len(turns) == 6
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1
