"""Whole models between hosts with slow links: their cases, what is simulated, and, for root, a tiny run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import typer

from benchmarks.harness.model_steps import LENGTH
from benchmarks.shaped import bench
from benchmarks.shaped.bench import report, run_cases, simulated_seconds
from benchmarks.shaped.calibration import Calibration, LinkFigures, late_ms, with_links
from benchmarks.shaped.cases import model_case, model_spec
from benchmarks.shaped.hosts import lacks_hosts
from benchmarks.shaped.processor_shares import lacks_shares
from moesys.config.model_run import ModelRun
from moesys.config.workload import Generated
from moesys.lab.calibrate.measurement import calibrate
from moesys.lab.calibrate.timings import CPU_GRID, Effort
from moesys.lab.show.sheets import to_markdown
from moesys.simulator.model.simulate_model import drawn_plans

LACKS = lacks_hosts()
CASE = model_case("qwen3-moe", 2, 200.0, 0.0)
PARTS = CASE.cluster.replace(
    expert_tflops=0.04, backward_tflops=0.03, memory_gb_per_s=6.0, elementwise_gb_per_s=3.0, launch_us=10.0
)
LINKS = LinkFigures(0.5, 8e-3 / 190, 0.1, {})


def test_a_step_is_simulated_on_the_measured_links() -> None:
    run = ModelRun(model=model_spec(CASE.name, 256), cluster=PARTS, strategy=CASE.strategies[0], seq_len=LENGTH)
    plans = list(next(drawn_plans(run.replace(micro_batch=8), Generated(skew=1.0, warmup=1), 1, seed=0)).values())
    found_s = []
    for mbit, latency_ms in ((190, 0.5), (95, 0.5), (190, 5.0)):
        links = replace(LINKS, ms_a_byte=8e-3 / mbit, latency_ms=latency_ms)
        calibrated = Calibration(with_links(PARTS, links), links)
        assert calibrated.cluster.inter_node_gb_per_s == pytest.approx(mbit / 8e3)
        assert calibrated.cluster.inter_node_us == pytest.approx(latency_ms * 1e3)
        assert calibrated.cluster.copy_share == 0.1
        found_s.append(simulated_seconds(CASE, CASE.strategies[0], plans, calibrated))
    assert found_s[0] < min(found_s[1:])


def test_a_message_is_as_late_as_products_with_one_behind_take_longer() -> None:
    class Ranks:
        def run(self, *_: object, **__: object) -> list[tuple[list[float], list[float]]]:
            # Two ranks, alone and interrupted; the slower one counts, and the median.
            return [([8.0, 9.0, 50.0], [12.0, 11.0, 13.0]), ([7.0, 8.5, 1.0], [11.0, 11.5, 90.0])]

    assert late_ms(Ranks(), CASE, 3) == 12.0 - 9.0  # type: ignore[arg-type]


def test_where_no_hosts_can_be_made_the_command_says_why(monkeypatch, capsys):
    monkeypatch.setattr(bench, "lacks_hosts", lambda: "")
    monkeypatch.setattr(bench, "lacks_shares", lambda: "no groups")
    with pytest.raises(typer.Exit):
        bench.bench_shaped()
    assert "hosts cannot have a share of the processor: no groups; or use --no-shares" in capsys.readouterr().err
    monkeypatch.setattr(bench, "lacks_hosts", lambda: "no such kernel")
    with pytest.raises(typer.Exit):
        bench.bench_shaped()
    assert "shaped links cannot be made: no such kernel" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_a_tiny_run_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(repeats=1, window_s=0.001)
    grid = replace(CPU_GRID, memory_bytes=1 << 20)
    monkeypatch.setattr(bench, "calibrate", partial(calibrate, effort=effort, grid=grid))
    case = replace(model_case("qwen3-moe", 2, 1000.0, 0.0, hidden_size=64), num_tokens=(4 * LENGTH,) * 2)
    (result,) = run_cases([case], 1, shares=not lacks_shares())
    assert result.timed == result.settings
    assert [setting.strategy for setting in result.settings] == list(case.strategies)
    ep, lent, *_ = result.settings
    assert (ep.max_over_mean or 0) > 1.1 > (lent.max_over_mean or 9)
    assert all((setting.simulated_ms or 0) > 0 for setting in result.settings)
    assert "the input of the simulator" in to_markdown(report([result]))
