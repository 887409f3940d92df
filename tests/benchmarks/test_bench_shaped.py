"""bench shaped: its cases, what calibration makes of timings, its report, and, for root, a tiny run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from benchmarks.shaped import cases, shaped_report
from benchmarks.shaped.calibration import Calibration, LinkFigures, away_bytes, calibration
from benchmarks.shaped.cases import (
    Asked,
    CaseResult,
    Setting,
    bench_shaped,
    half_mbit_per_s,
    links_of,
    node_case,
    overlap_case,
    split_case,
)
from benchmarks.shaped.host_steps import CHUNKS, MOST_TOKENS, SOME_TOKENS, ShapedCase, chosen_experts, even_case
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.presets import LAER_E8K2
from moesys.lab.calibrate.measurement import fit_line
from moesys.lab.runs import launch
from moesys.lab.show.reports import to_json, to_markdown
from moesys.lab.show.sheets import Sheet, written_columns
from moesys.lab.slow_links import namespaces
from moesys.lab.slow_links.processor_shares import lacks_shares

LACKS = namespaces.lacks()


@given(st.floats(0, 10), st.floats(1e-6, 10), st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(intercept: float, slope: float, x: list[int]) -> None:
    found = fit_line(x, [intercept + slope * value for value in x])
    assert found == pytest.approx((intercept, slope), rel=1e-3, abs=1e-6 * max(1, slope) * max(x))


def test_a_line_never_promises_less_than_nothing() -> None:
    assert fit_line([1, 2], [1.0, 3.0])[0] == 0
    intercept, slope = fit_line([1, 2], [3.0, 1.0])
    assert intercept > 0
    assert slope == 0


def test_the_cases_of_the_full_run() -> None:
    plans = cases.asked_for()
    assert {plan.case.num_hosts for plan in plans} == {2, 4}
    assert sum(plan.half for plan in plans) == 4
    assert sum(len(plan.case.strategies) for plan in plans) >= 12
    assert {plan.case.name for plan in plans} == {"overlap", "split", "nodes", "planners"}
    asked = cases.asked_for((2,), (100.0, 500.0), 250.0, ("overlap",))
    assert [(p.case.mbit_per_s, p.case.latency_us, p.half) for p in asked] == [(100, 250, False), (500, 250, False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3,),), "hosts=3 is not measured here; use 2 or 4"),
        (((2,), (5.0,)), "mbit=5 must be between 10 and 10000"),
        (((2,), (), -1.0), "latency_us=-1 must be between"),
        (((2,), (), 0.0, ("node",)), "case='node' is none of them; use overlap, split, nodes, planners, or models"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases.asked_for(*arguments)


@pytest.mark.parametrize("case", [overlap_case(2, 100, 0), overlap_case(4, 100, 0), split_case(4, 100, 0)])
def test_tokens_choose_as_declared(case: ShapedCase) -> None:
    num_tokens, E = case.num_tokens[0], case.shape.num_experts
    chosen_TK = torch.stack(chosen_experts(case, num_tokens, torch.Generator().manual_seed(3)), dim=1)
    assert chosen_TK.shape == (num_tokens, case.shape.top_k)
    assert (chosen_TK.sort(dim=1).values.diff(dim=1) > 0).all()
    shares = chosen_TK.flatten().bincount(minlength=E) / chosen_TK.numel()
    assert shares.tolist() == pytest.approx(case.popularity or [1 / E] * E, abs=E / num_tokens)


def test_calibration_looks_at_even_tokens() -> None:
    case = replace(split_case(2, 500, 0), num_tokens=(48, 80))
    even = even_case(case)
    assert (even.num_tokens, even.popularity, even.shape) == ((64, 64), (), case.shape)
    chosen_T = chosen_experts(even, 64, torch.Generator().manual_seed(3))[0]
    assert chosen_T.bincount().tolist() == [16] * 4


def calibrated(case: ShapedCase, gflops: float, goodput: float) -> Calibration:
    """Of ranks that compute so fast, spend 6 ms a layer and 20 ms a further chunk besides, and lose a tenth beside
    messages.
    """
    shape = case.shape
    ms_a_row = 18 * shape.hidden_size * shape.intermediate_size / gflops * 1e-6
    rows = sum(case.num_tokens) // case.num_hosts * shape.top_k
    most_ms, some_ms = (6 + 24 + share * rows * ms_a_row for share in (MOST_TOKENS, SOME_TOKENS))
    links = LinkFigures(0.5, 8e-3 / (goodput * case.mbit_per_s), 0.1, {})
    whole_ms = most_ms + (CHUNKS - 1) * 20
    moved_ms = 4 * (0.5 + MOST_TOKENS * away_bytes(case) * links.ms_a_byte)
    chunks_ms = whole_ms / 0.9 if moved_ms > whole_ms / 0.9 else whole_ms + 0.1 * moved_ms
    return calibration(case, links, {"most": most_ms, "some": some_ms, "chunks": chunks_ms})


@pytest.mark.parametrize("mbit", [20.0, 500.0])
def test_calibration_tells_a_rate_from_what_chunks_and_layers_cost(mbit: float) -> None:
    case = split_case(2, mbit, 0)
    found = calibrated(case, 50.0, 0.5)
    assert found.cluster.expert_tflops == pytest.approx(0.05, rel=1e-6)
    assert found.cluster.launch_us == pytest.approx(2000)
    assert found.rest.other_seconds == pytest.approx(0.006 / 3)
    assert found.cluster.inter_node_gb_per_s == pytest.approx(0.5 * mbit / 8e3)
    assert found.cluster.inter_node_us == pytest.approx(500)
    assert found.cluster.copy_share == 0.1


def test_the_bandwidth_of_half_moves_its_bytes_while_all_is_computed() -> None:
    # Computing takes 10 ms, and 400 ms more for all tokens; four times 30 ms of messages are to take as long.
    computed_ms = {"most": 10 + 400 * MOST_TOKENS, "some": 10 + 400 * SOME_TOKENS}
    assert half_mbit_per_s(1400, {1000: 1.0, 10**6: 30.0}, computed_ms) == pytest.approx(1400 * 120 / 410, rel=0.05)
    assert half_mbit_per_s(200, {10**6: 1.0}, computed_ms) == 100
    assert half_mbit_per_s(200, {10**6: 1e4}, computed_ms) == 2000


def test_the_report_says_what_was_found() -> None:
    case = overlap_case(2, 400, 1000)
    times = ([100.0, 120.0, 110.0], [80.0, 90.0, 70.0])
    links = links_of(case, half=True)
    settings = [
        Setting(links, strategy, samples, times[0], 55.0, 1.0, 0.5, simulated)
        for strategy, samples, simulated in zip(case.strategies, times, (99.0, 100.0), strict=False)
    ]
    settings.append(Setting(links, case.strategies[2]))
    result = CaseResult(links, case, True, "relay", 0.45, calibrated(case, 50.0, 0.5), settings)
    assert written_columns(Sheet("", result.settings))[-2].cells == ("-10%", "+25%", "")
    page = to_markdown(shaped_report.report([result]))
    assert "| 2 x 400 Mbit/s, 1000 us (half) | pipelined 2 | 80 [70, 90] | 1.33 [1.28, 1.48] |" in page
    assert "Simulated within 15% of measured: 1 of 2 settings; median of errors 17.5%, worst 25.0%." in page
    assert "latency by a delaying relay" in page
    assert "each of 2 has 0.45 of a processor" in page
    assert "2 of them compete for its cores" in to_markdown(shaped_report.report([replace(result, cpus_per_host=None)]))
    assert "differs by a bit" in page
    assert "50% of the step of 'sequential' is blocked; 'pipelined 2' is 1.33 [1.28, 1.48] times as fast." in page
    data = json.loads(to_json(shaped_report.report([result])))
    assert data["cases"][0]["settings"][0]["samples_ms"] == times[0]


def test_pairs_that_differ_are_ranked() -> None:
    """Of three pairs one does not differ, and of the others one is simulated the wrong way round."""
    case = cases.planner_case(2, 200, 0)
    first_ms = [100.0 + repetition for repetition in range(8)]
    samples = (first_ms, [ms + 10 for ms in first_ms], [ms + (-1) ** i for i, ms in enumerate(first_ms)])
    settings = [
        Setting("", strategy, of_one, first_ms, 1.0, 1.0, 0.5, simulated)
        for strategy, of_one, simulated in zip(case.strategies, samples, (100.0, 105.0, 110.0), strict=False)
    ]
    result = CaseResult("", case, False, "none", 0.45, calibrated(case, 50.0, 0.5), settings)
    assert shaped_report.ranked_pairs([result]) == (1, 2)
    assert "simulated in their order: 1 of 2" in to_markdown(shaped_report.report([result]))


def test_tokens_of_several_choices_choose_popular_experts_more_often_and_none_twice() -> None:
    case = node_case(2, 200, 0)
    chosen_TK = torch.stack(chosen_experts(case, 4000, torch.Generator().manual_seed(3)), dim=1)
    assert (chosen_TK.sort(dim=1).values.diff(dim=1) > 0).all()
    counts_E = chosen_TK.flatten().bincount(minlength=case.shape.num_experts)
    in_order = torch.tensor(case.popularity).argsort()
    assert (counts_E[in_order].diff() > -150).all()
    assert counts_E.max() > 5 * counts_E.min()


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_hosts_of_two_ranks() -> None:
    case = replace(node_case(2, 500, 0), num_tokens=(40, 8, 24, 33))
    shape = case.shape.replace(intermediate_size=16, hidden_size=48)
    (result,) = bench_shaped([Asked(replace(case, shape=shape))], repeats=1, shares=not lacks_shares())
    assert result.timed == result.settings
    assert [setting.strategy for setting in result.settings] == list(case.strategies)
    assert result.calibration.links.inside_ms is not None
    assert all(setting.simulated_ms > 0 for setting in result.settings)


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_a_tiny_run() -> None:
    shape = ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=1)
    case = replace(split_case(2, 500, 0), shape=shape, num_tokens=(48, 80))
    (result,) = bench_shaped([Asked(case)], repeats=1, shares=not lacks_shares())
    assert result.timed == result.settings
    assert [setting.strategy for setting in result.settings] == list(case.strategies)
    even, capped, _ = result.settings
    # Each rank's own split is exact; of both together tokens are rounded.
    assert capped.inter_node_share <= 0.45 + 2 / 128
    assert capped.max_over_mean < even.max_over_mean
    for setting in result.settings:
        assert setting.simulated_ms > 0
        assert len(setting.samples_ms) == 1
    cluster = result.calibration.cluster
    assert cluster.inter_node_us >= 0
    assert 0 <= cluster.copy_share < 1


# --- experiments on shaped links ----------------------------------------------------------------------------


def experiment(**changes: object) -> ms.Experiment:
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=1, inter_node_gb_per_s=0.05)
    fields = {"name": "x", "model": LAER_E8K2, "cluster": cluster, "strategies": (Strategy(name="a"),)}
    return ms.Experiment(**(fields | {"workload": ms.Training(shaped_links=True)} | changes))  # type: ignore[arg-type]


def test_an_experiment_says_what_shaped_links_need() -> None:
    with pytest.raises(ValueError, match="num_nodes=1; use ClusterSpec"):
        experiment(cluster=ClusterSpec(ranks_per_node=2))
    with pytest.raises(
        ValueError, match=r"inter_node_gb_per_s=88\.9539, which no machine fills; declare at most 12\.5"
    ):
        experiment(cluster=ClusterSpec(num_nodes=2, ranks_per_node=1))


def test_shares_of_the_processor_are_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cpus_per_host=0\.5 is of hosts with shaped links"):
        ms.Training(cpus_per_host=0.5)
    monkeypatch.setattr(launch, "lacks", lambda: "")
    monkeypatch.setattr(launch, "lacks_shares", lambda: "no groups; use another machine")
    with pytest.raises(ValueError, match=r"cpus_per_host=0\.5 cannot be had: no groups; use another machine"):
        launch.place_for(experiment(workload=ms.Training(shaped_links=True, cpus_per_host=0.5)), threads=1)


def test_a_place_with_shaped_links_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "lacks", lambda: "no such kernel")
    with pytest.raises(ValueError, match="shaped_links=True cannot be had: no such kernel; or use shaped_links=False"):
        launch.place_for(experiment(), threads=1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="leave torchrun out"):
        launch.place_for(experiment(), threads=1)
