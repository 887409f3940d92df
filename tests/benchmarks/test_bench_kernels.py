"""The benchmark of the kernels, rehearsed on a toy: it checks, times what is right, and survives its contestants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.meters import Bytes, CpuMeter
from benchmarks.kernels import checks, contestants
from benchmarks.kernels import kernels_contest as contest
from benchmarks.kernels.checks import wrong_errors
from benchmarks.kernels.contestants import OURS, grouped_mm_experts
from benchmarks.kernels.drawn_layer import (
    Implementation,
    Layer,
    Results,
    Run,
    Size,
    draw_layer,
    draw_routing,
    relative_errors,
)
from benchmarks.kernels.kernels_contest import FLOPS, WHOLE, KernelResult, LayerResult, measure_layer
from moesys.kernels.experts.tile_tuner import OPS
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.sheets import CommandOutput

# Rows of a multiple of 16 bytes, as torch's grouped GEMM wants them.
TINY = Size("tiny", 10, 16, 8, 3, 2)
FAR = Size("far tiny", 8, 16, 8, 3, 1)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tiny_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "IN_INTERPRETER", contest.Scale((TINY,), TINY, FAR, bit_runs=2))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["kernels", *arguments])
    return result.exit_code, result.output


def rehearse(*arguments: str) -> tuple[int, str]:
    return run("--device", "cpu", "--dtype", "float32", *arguments)


def layer(dtype: torch.dtype = torch.float32, routing: str = "uniform", seed: int = 0) -> Layer:
    return draw_layer(TINY, routing, dtype, CPU, seed)


def grouped_on(layer: Layer) -> Run:
    return Run(Implementation(grouped_mm_experts), layer)


# --- the whole -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal_checks_and_times_everything(tmp_path: Path) -> None:
    names = (OURS, "grouped_mm", "transformers")
    code, output = rehearse(
        *("--contestants", ",".join(names), "--routing", "zipf,router", "--repeats", "1"),
        *("--peer", f"sonicmoe={tmp_path}", "--out", str(tmp_path / "found")),
    )
    assert code == 0, output
    assert "REHEARSED: times" in output
    assert "MEASURED" not in output
    found = json.loads((tmp_path / "found" / "kernels.json").read_text())
    assert (found["source"], found["dtype"], found["repeats"]) == ("rehearsed", "float32", 1)
    rows = {(row["routing"], row["contestant"]): row for row in found["measured"]}
    assert rows.keys() == {(routing, name) for routing in ("zipf", "router") for name in names}
    for row in rows.values():
        assert row["wrong"] == ""
        assert row["errors"].keys() == set(Results._fields)
        assert max(row["errors"].values()) < 1e-5
        assert row["samples_ms"].keys() == FLOPS.keys()
        assert all(len(samples) == 1 and min(samples) > 0 for samples in row["samples_ms"].values())
    assert all(finding["holds"] for finding in found["findings"])
    assert {finding["what"] for finding in found["findings"]} == {
        *("torch.compile(fullgraph=True)", "activation checkpointing", "offsets"),
        *("equal bits", "equal bits in other tiles"),
    }
    assert f"{tmp_path} has no folder sonicmoe" in found["absent"]["sonicmoe"]
    assert [(row["op"], row["size"]) for row in found["kernels"]] == [(op, [*TINY]) for op in OPS]
    page = (tmp_path / "found" / "kernels.md").read_text()
    assert page.startswith("# Kernels of one device, ")
    assert "Worst: " in page
    assert "| tiny | zipf | transformers |" in page
    assert "absent: sonicmoe, ImportError" in page


def test_the_first_line_says_what_is_worst() -> None:
    row = LayerResult(TINY, "zipf", "grouped_mm", {WHOLE: [1.0]}, to_ours=Quantiles.of([0.89]))
    kernels = [KernelResult(TINY, op, "", Quantiles.of([1.0]), 10.0 * len(op), 100.0, None) for op in OPS]
    others = [LayerResult(TINY, "uniform", name, to_ours=Quantiles.of([1.2])) for name in ("transformers", OURS)]
    found = contest.ContestResults("rehearsed", "", "float32", 1, measured=[*others, row], kernels=kernels)
    assert found.report().introduction == [
        "Worst: grouped_mm takes 0.89 of the time of moesys for tiny, zipf; up of tiny has the least share of the "
        "ceiling, 0.20."
    ]


def test_what_is_wrong_of_ours_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "moe_experts", lambda *inputs: grouped_mm_experts(*inputs) * 1.001)
    code, output = rehearse(
        *("--contestants", f"{OURS},grouped_mm", "--routing", "uniform", "--repeats", "1"),
        *("--no-extras", "--out", str(tmp_path)),
    )
    assert code == 1
    assert "y is off by 1.0e-03, 1.0e-06 is the most" in output
    rows = {row["contestant"]: row for row in json.loads((tmp_path / "kernels.json").read_text())["measured"]}
    assert rows[OURS]["samples_ms"] == {}
    assert rows["grouped_mm"]["samples_ms"] != {}


def test_kernels_are_not_interpreted_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="unset TRITON_INTERPRET"):
        contest.asked_for()


# --- contestants that fail -----------------------------------------------------------------------------------


def failing(calls: int) -> Implementation:
    """Computes so many times, and then raises as a full GPU does."""
    left = iter(range(calls))

    def experts(*inputs: Tensor) -> Tensor:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.\nMore lines")
        return grouped_mm_experts(*inputs)

    return Implementation(experts)


@pytest.mark.parametrize(
    "calls",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 6],
    ids=["checked", "counted", "forward", "backward"],
)
def test_a_contestant_that_raises_is_a_line_and_the_rest_goes_on(calls: int) -> None:
    here = {"fails": failing(calls), "grouped_mm": Implementation(grouped_mm_experts)}
    asked = contest.asked_for(names="grouped_mm", dtype="float32", repeats=2, device="cpu")
    rows, _ = measure_layer(asked, TINY, "uniform", here, _CountingMeter(), lambda _: None)
    failed, whole = rows
    assert failed.wrong == "OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB."
    assert failed.samples_ms == {}
    assert whole.wrong == ""
    assert {name: len(samples) for name, samples in whole.samples_ms.items()} == dict.fromkeys(FLOPS, 2)


class _CountingMeter(CpuMeter):
    """Runs what is counted, as a GPU's does."""

    def bytes_of(self, forward: Callable[[], Tensor], backward_of: Callable[[Tensor], object]) -> Bytes | None:
        backward_of(forward())
        return Bytes(1, 2)


@pytest.mark.parametrize(
    ("module", "options", "count"),
    [(contest, ("--no-extras",), 2), (checks, ("--repeats", "0"), 3)],
    ids=["the layer", "extras"],
)
def test_a_layer_that_does_not_fit_is_a_line_and_the_rest_goes_on(monkeypatch, module, options, count):
    def full(*_: Any) -> Layer:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(module, "draw_layer", full)
    monkeypatch.setattr(contestants, "moe_experts", grouped_mm_experts)
    code, output = rehearse("--contestants", f"{OURS},grouped_mm", "--routing", "uniform", *options)
    assert code == 1
    assert output.count("OutOfMemoryError: no room") == count
    assert ("tiles of 64x64" in output) == (module is checks)


def test_a_folder_that_cannot_be_written_to_is_known_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "measure_layer", lambda *_: pytest.fail("measured already"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        contest.main(
            contest.asked_for(device="cpu", dtype="float32", extras=False), CommandOutput(tmp_path / "file" / "found")
        )


# --- what is compared ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["uniform", "k-experts"], ids=["uniform", "experts without tokens"])
def test_the_reference_is_autograd_in_float64(routing: str) -> None:
    drawn = layer(routing=routing)
    leaves = [
        tensor.double().requires_grad_() for tensor in (drawn.x_TH, drawn.weight_TK, drawn.gate_up_EUH, drawn.down_EHI)
    ]
    x, weight, gate_up, down = leaves
    y_TH = torch.zeros_like(x)
    for k in range(TINY.K):
        expert_T = drawn.expert_TK[:, k]
        gate, up = torch.einsum("tuh,th->tu", gate_up[expert_T], x).chunk(2, dim=1)
        a_TI = torch.nn.functional.silu(gate) * up
        y_TH = y_TH + weight[:, k, None] * torch.einsum("thi,ti->th", down[expert_T], a_TI)
    dx, dweight, dgate_up, ddown = torch.autograd.grad(y_TH, leaves, drawn.dy_TH.double())
    errors = relative_errors(drawn, Results(y_TH.detach(), dx, dweight, dgate_up, ddown))
    assert max(errors.values()) < 1e-6


def test_an_error_shows_where_it_is() -> None:
    drawn = layer()
    found = grouped_on(drawn).results()
    for name in Results._fields:
        errors = relative_errors(drawn, found._replace(**{name: getattr(found, name) * 1.01}))
        assert errors.pop(name) == pytest.approx(0.01, rel=1e-3)
        assert max(errors.values()) < 1e-6
        with_nan = getattr(found, name).clone()
        with_nan.view(-1)[-1] = torch.nan
        assert relative_errors(drawn, found._replace(**{name: with_nan}))[name] == torch.inf
    assert set(relative_errors(drawn, found._replace(dx=found.dx[:1])).values()) == {torch.inf}


def test_errors_are_bounded_by_the_least_of_torch() -> None:
    grouped = [{"y": 2e-3}, {"y": 1e-3}]
    assert wrong_errors({"y": 1.4e-3}, torch.bfloat16, grouped) == ""
    assert wrong_errors({"y": 1.6e-3}, torch.bfloat16, grouped) == "y is off by 1.6e-03, 1.5e-03 is the most"
    assert wrong_errors({"y": 1.9e-2}, torch.bfloat16) == ""
    assert wrong_errors({"y": torch.nan}, torch.bfloat16) == "y is off by nan, 2.0e-02 is the most"


def test_bits_that_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, runs = layer(), iter(range(9))

    def drifting(*inputs: Tensor) -> Tensor:
        return grouped_mm_experts(*inputs) + (1e-6 if next(runs) == 2 else 0.0)

    monkeypatch.setattr(checks, "moe_experts", drifting)
    finding = checks.same_bits(drawn, 3)
    assert (finding.holds, finding.says) == (False, "y differ from run to run")
    assert not checks.same_bits_in_other_blocks(drawn).holds


def test_a_wrong_far_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetting(*inputs: Tensor) -> Tensor:
        y_TH = grouped_mm_experts(*inputs)
        return torch.cat([y_TH[:-1], torch.zeros_like(y_TH[:1])])

    monkeypatch.setattr(checks, "moe_experts", forgetting)
    finding = checks.far_offsets(FAR, torch.float32, CPU)
    assert not finding.holds
    assert "y is off by" in finding.says


# --- choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uniform", "balanced", "zipf", "k-experts"])
def test_choices_are_distinct_and_drawn_again_alike(name: str) -> None:
    T, E, K = 64, 16, 4
    first, again = (draw_routing(name, T, E, K, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert (first.shape, first.dtype) == ((T, K), torch.int64)
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in first.tolist())
    count_E = torch.bincount(first.flatten(), minlength=E)
    match name:
        case "balanced":
            assert (count_E == T * K // E).all()
        case "k-experts":
            assert sorted(count_E.tolist()) == [0] * (E - K) + [T] * K
        case "zipf":
            assert count_E.max() > 2.5 * count_E.float().mean()
        case "uniform":
            assert count_E.max() < 2 * count_E.float().mean()


def test_the_routers_choices_are_what_the_layer_is_checked_on() -> None:
    drawn = layer(routing="router")
    grouped = grouped_on(drawn)
    torch.testing.assert_close(grouped.forward().detach(), grouped.results().y)
    dx, drouter, *_ = grouped.forward_backward()
    assert drouter.shape == (TINY.E, TINY.H)
    assert not torch.equal(dx, grouped.results().dx)


# --- peers ---------------------------------------------------------------------------------------------------


# --- what needs a GPU, beside a stand-in for it ----------------------------------------------------------------


def test_rates_are_of_operations_without_padding_and_a_dtype_is_kept() -> None:
    """Weights that some want in 16 bits are exact there."""
    row = LayerResult(Size("", T=10, H=20, I=30, E=4, K=2), "", "", samples_ms={"forward": [3.0, 1.0, 2.0]})
    assert row.ms["forward"].median == 2.0
    assert row.tflops["forward"] == pytest.approx(6 * 10 * 2 * 20 * 30 / 2e-3 / 1e12)
    drawn = layer(torch.bfloat16)
    assert torch.equal(drawn.weight_TK.bfloat16().float(), drawn.weight_TK)
    assert {drawn.x_TH.dtype, drawn.gate_up_EUH.dtype, drawn.down_EHI.dtype} == {torch.bfloat16}
