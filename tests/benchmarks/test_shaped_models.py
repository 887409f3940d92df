"""bench shaped --case models: its cases, what is fitted, what a run leaves behind, and, for root, a tiny run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moesys as ms
from benchmarks.__main__ import app
from benchmarks.harness.model_steps import LENGTH
from benchmarks.shaped import model_cases, models_report
from benchmarks.shaped.calibration import LinkFigures
from benchmarks.shaped.host_models import PIECES, ModelCase
from benchmarks.shaped.model_cases import MeasuredCase, kept, measure_cases
from benchmarks.shaped.model_results import plans_of, result_of, scaled, simulated_ms, told_of
from moesys.config.model_run import ModelRun
from moesys.config.workload import Generated
from moesys.lab.calibrate.cases import CPU_GRID
from moesys.lab.calibrate.measurement import calibrate
from moesys.lab.calibrate.timings import Effort
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.reports import to_json, to_markdown
from moesys.lab.slow_links import namespaces
from moesys.lab.slow_links.processor_shares import lacks_shares
from moesys.whole_model.drawn_plans import drawn_plans

LACKS = namespaces.lacks()
CASE = ModelCase("qwen3-moe", "skewed", 2, 200.0, 4)
PARTS = CASE.links.cluster.replace(
    expert_tflops=0.04, backward_tflops=0.03, memory_gb_per_s=6.0, elementwise_gb_per_s=3.0, launch_us=10.0
)
LINKS = LinkFigures(0.5, 8e-3 / 190, 0.1, {})


def measured_as(factor: float, latency_ms: float, case: ModelCase = CASE) -> MeasuredCase:
    """What hosts would show on which a model is ``factor`` times as fast as its parts."""
    found = MeasuredCase(case, 3, "none", 0.9, LINKS, PARTS, {}, {}, {})
    cluster = scaled(told_links(), factor, latency_ms)
    wanted = {each.name: (each, case.sequences) for each in case.strategies} | case.pieces
    for name, (strategy, sequences) in wanted.items():
        run = ModelRun(model=case.spec, cluster=PARTS, strategy=strategy, seq_len=LENGTH, micro_batch=sequences)
        routing = None if name in PIECES else Generated(skew=1.0, warmup=1)
        plans = list(next(drawn_plans(run, routing, 1, seed=0)).values())
        found.plans[name] = [plan.to_json() for plan in plans]
        step_ms = simulated_ms(case, strategy, sequences, plans, cluster)
        found.samples_ms[name] = [step_ms * (1 + jitter) for jitter in (-0.01, 0.0, 0.01)]
    return found


def told_links() -> ms.ClusterSpec:
    return PARTS.replace(inter_node_gb_per_s=0.19 / 8, inter_node_us=500.0, copy_share=0.1)


def test_the_cases_of_the_full_run() -> None:
    asked = model_cases.asked_for()
    assert sum(len(case.strategies) for case in asked) >= 24
    assert {case.hosts for case in asked} == {2, 4}
    assert {case.model for case in asked} == {"olmoe", "qwen3-moe", "deepseek-v3"}
    for case in asked:
        assert 0 < case.pieces["some"][1] < case.pieces["most"][1] < case.sequences
        assert {strategy.name for strategy, _ in case.pieces.values()} == {"ep", "chunks"}
    assert {case.mbit_per_s for case in model_cases.asked_for((2,), (300.0,), 100.0)} == {300.0}


@pytest.mark.parametrize(("factor", "latency_ms"), [(0.5, 3.0), (1.0, 0.5), (1.7, 1.0)])
def test_even_steps_of_fewer_sequences_tell_how_fast_a_model_is(factor: float, latency_ms: float) -> None:
    measured = measured_as(factor, latency_ms)
    told = told_of(measured)
    assert (told.factor, told.latency_ms) == pytest.approx((factor, latency_ms), rel=0.01)
    assert told.fitted.backward_tflops == pytest.approx(0.03 * factor, rel=0.01)
    assert told.fitted.attention_tflops is None
    for setting in result_of(measured).settings:
        assert setting.fitted_error == pytest.approx(0.0, abs=0.005)
        assert setting.error is not None
        assert (abs(setting.error) < 0.005) == (factor == 1.0)


def test_a_step_that_is_predicted_is_not_looked_at() -> None:
    """Nor its rivals': only their plans."""
    measured = measured_as(0.8, 2.0)
    slower = {name: ms if name in PIECES else [3 * each for each in ms] for name, ms in measured.samples_ms.items()}
    found, other = result_of(measured), result_of(replace(measured, samples_ms=slower))
    assert found.told == other.told
    for one, three_times in zip(found.settings, other.settings, strict=True):
        assert (one.simulated_ms, one.fitted_ms, one.closed_ms) == (
            three_times.simulated_ms,
            three_times.fitted_ms,
            three_times.closed_ms,
        )
        assert three_times.error == pytest.approx((1 + (one.error or 0)) / 3 - 1)


def test_a_message_is_as_late_as_products_with_one_behind_take_longer() -> None:
    class Ranks:
        def run(self, *_: object, **__: object) -> list[tuple[list[float], list[float]]]:
            # Of two ranks, alone and interrupted; what counts is the slower one, and the median.
            return [([8.0, 9.0, 50.0], [12.0, 11.0, 13.0]), ([7.0, 8.5, 1.0], [11.0, 11.5, 90.0])]

    assert model_cases._late_ms(Ranks(), CASE, 3) == 12.0 - 9.0  # type: ignore[arg-type]


def test_the_closed_form_is_the_line_at_the_busiest_ranks_tokens() -> None:
    measured = measured_as(1.0, 0.5)
    measured.samples_ms.update(some=[30.0], most=[70.0])
    ep, lent, *_ = result_of(measured).settings
    # 10 ms, and 20 a sequence.
    assert ep.closed_ms == pytest.approx(10 + 20 * 4 * (ep.max_over_mean or 0))
    assert lent.closed_ms is not None
    assert lent.closed_ms > 10 + 20 * 4 * (lent.max_over_mean or 0)


def test_the_report_counts_what_is_near_and_what_is_in_order() -> None:
    measured = measured_as(0.8, 2.0)
    # Of 8 repetitions, so that pairs differ; ep as slow as 1.3 times what is simulated.
    for name, samples_ms in measured.samples_ms.items():
        measured.samples_ms[name] = [samples_ms[1] * (1.3 if name == "ep" else 1) + step / 100 for step in range(8)]
    result = result_of(measured)
    page = to_markdown(models_report.report([result]))
    assert "Fitted: 3 of 4 settings within 15% of measured" in page
    assert "2 x 200 Mbit/s | qwen3-moe | lent ep, pipelined |" in page
    assert "each of 2 has 0.9 of a processor" in page
    assert "| fitted | closed form |" in page
    ways = {
        "measured": lambda setting: setting.measured_ms.median,
        "turned": lambda setting: -setting.measured_ms.median,
    }
    right, differ = models_report.ranked_pairs([result], ways["measured"])
    assert right == differ == 6
    assert models_report.ranked_pairs([result], ways["turned"]) == (0, 6)
    wrong = replace(measured, samples_ms={k: v for k, v in measured.samples_ms.items() if k != "fsep"})
    wrong = replace(wrong, wrong={"fsep": "loss differs from transformers by 1.0e-01"})
    result = result_of(wrong)
    assert [setting.strategy for setting in result.timed] == ["ep", "lent ep", "lent ep, pipelined"]
    assert "loss differs from transformers by 1.0e-01" in to_markdown(models_report.report([result]))


def test_what_a_run_leaves_behind_is_measured_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cases, "shaped_links", None)
    path, measured = tmp_path / "models.json", measured_as(0.8, 2.0)
    path.write_text(to_json(models_report.report([result_of(measured)])))
    assert kept(path) == [measured]
    assert measure_cases([CASE], 3, shares=True, known=kept(path)) == [measured]
    assert plans_of(measured, "ep")[0].load.num_ranks == 2
    # Of other repetitions, or without shares, it is another measurement.
    for repeats, shares in ((4, True), (3, False)):
        with pytest.raises(TypeError):
            measure_cases([CASE], repeats, shares=shares, known=kept(path))
    assert kept(None) == kept(tmp_path / "not there") == []


def test_what_is_no_run_of_models_here_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"machine": "another", "measured": []}))
    here = machine_line(1, model_cases.PACKAGES)
    with pytest.raises(ValueError, match=r"other\.json was measured on another, and this is") as refused:
        kept(path)
    assert here in str(refused.value)
    path.write_text(json.dumps({"cases": []}))
    with pytest.raises(ValueError, match="has no measured models; give another file, or remove it"):
        kept(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "3"), "hosts=3 is not measured here; use 2 or 4"),
        (("--mbit", "5"), "mbit=5 must be between 10 and 10000"),
        (("--case", "split"), "case='split' and case='models' are pages of their own; ask for one, then the other"),
    ],
)
def test_the_command_says_what_it_cannot_do(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["shaped", "--case", "models", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_a_tiny_run(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(repeats=1, window_s=0.001)
    grid = replace(CPU_GRID, memory_bytes=1 << 20)
    monkeypatch.setattr(model_cases, "calibrate", partial(calibrate, effort=effort, grid=grid))
    case = ModelCase("qwen3-moe", "skewed", 2, 1000.0, 4, hidden_size=64)
    so_far: list[int] = []
    (measured,) = measure_cases([case], 1, shares=not lacks_shares(), keep=lambda found: so_far.append(len(found)))
    assert so_far == [1]
    assert not measured.wrong
    assert set(measured.samples_ms) == {*PIECES, *(strategy.name for strategy in case.strategies)}
    result = result_of(measured)
    assert result.timed == result.settings
    ep, lent, *_ = result.settings
    assert (ep.max_over_mean or 0) > 1.1 > (lent.max_over_mean or 9)
    assert all((setting.simulated_ms or 0) > 0 for setting in result.settings)
    assert "what the simulator was told" in to_markdown(models_report.report([result]))
