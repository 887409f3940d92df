"""The benchmark of slow links: its cases, what calibration makes of timings, its report, and, for root, tiny runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shaped import cases
from benchmarks.shaped.bench import CaseResult, Setting, against_fixed, ranked_pairs, report, run_cases
from benchmarks.shaped.calibration import Calibration, LinkFigures, away_bytes, calibration
from benchmarks.shaped.cases import ShapedCase, node_case, overlap_case, split_case
from benchmarks.shaped.hosts import lacks_hosts
from benchmarks.shaped.layers import CHUNKS, MOST_TOKENS, SOME_TOKENS, chosen_experts, even_case, layer_steps
from benchmarks.shaped.processor_shares import lacks_shares
from moesys.config import ModelShape
from moesys.lab.calibrate.measurement import fit_line
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.show.sheets import Sheet, to_json, to_markdown, written_columns
from moesys.load import LoadMatrix

LACKS = lacks_hosts()


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
    asked = cases.asked_for()
    assert {case.num_hosts for case in asked} == {2, 4}
    assert {case.latency_us for case in asked} == {0, 1000}
    assert sum(len(case.strategies) for case in asked) >= 12
    moving = {f"planners, {routing}" for routing in ("drifting", "bursts", "prompts by domain")}
    assert {case.name for case in asked} == {"overlap", "split", "nodes"} | moving
    assert {case.name for case in cases.asked_for(kinds=("planners",))} == moving
    models = cases.asked_for(kinds=("models",))
    assert ({case.name for case in models}, {case.num_hosts for case in models}) == (
        {"olmoe", "qwen3-moe", "deepseek-v3"},
        {2, 4},
    )
    given_links = cases.asked_for((2,), (100.0, 500.0), 250.0, ("overlap",))
    assert [(case.mbit_per_s, case.latency_us) for case in given_links] == [(100, 250), (500, 250)]


@pytest.mark.parametrize(
    "case", [overlap_case(2, 100, 0), overlap_case(4, 100, 0), split_case(4, 100, 0), node_case(2, 200, 0)]
)
def test_tokens_choose_as_declared(case: ShapedCase) -> None:
    """Of several choices, popular experts are chosen more often, and none twice."""
    num_tokens, E, K = case.num_tokens[0], case.shape.num_experts, case.shape.top_k
    num_tokens = 4000 if K > 1 else num_tokens
    chosen_TK = torch.stack(chosen_experts(case, num_tokens, torch.Generator().manual_seed(3)), dim=1)
    assert chosen_TK.shape == (num_tokens, K)
    assert (chosen_TK.sort(dim=1).values.diff(dim=1) > 0).all()
    counts_E = chosen_TK.flatten().bincount(minlength=E)
    if K == 1 or not case.popularity:
        expected = case.popularity or [1 / E] * E
        assert (counts_E / (K * num_tokens)).tolist() == pytest.approx(expected, abs=E / num_tokens)
    else:
        assert (counts_E[torch.tensor(case.popularity).argsort()].diff() > -150).all()
        assert counts_E.max() > 5 * counts_E.min()
    # Calibration looks at even tokens.
    even = even_case(replace(split_case(2, 500, 0), num_tokens=(48, 80)))
    assert (even.num_tokens, even.popularity) == ((64, 64), ())
    assert chosen_experts(even, 64, torch.Generator().manual_seed(3))[0].bincount().tolist() == [16] * 4


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


def test_the_report_says_what_was_found() -> None:
    case = overlap_case(2, 400, 1000)
    times = ([100.0, 120.0, 110.0], [80.0, 90.0, 70.0])
    settings = [
        Setting(case.links, case.name, strategy, samples, times[0], 55.0, 1.0, 0.5, (simulated,))
        for strategy, samples, simulated in zip(case.strategies, times, (99.0, 100.0), strict=False)
    ]
    settings.append(Setting(case.links, case.name, case.strategies[2], wrong="output differs"))
    result = CaseResult(case.links, case, 0.45, calibrated(case, 50.0, 0.5), settings)
    assert written_columns(Sheet("", result.settings))[-2].cells == ("-10%", "+25%", "")
    page = to_markdown(report([result]))
    assert "| 2 x 400 Mbit/s, 1000 us | overlap | pipelined 2 | 80 [70, 90] | 1.33 [1.28, 1.48] |" in page
    assert "Simulated within 15% of measured: 1 of 2 settings; median error 17.5%, worst 25.0%." in page
    assert "a relay adds the latency" in page
    assert "0.45 of a processor for each of 2 hosts" in page
    assert "they compete for its cores" in to_markdown(report([replace(result, cpus_per_host=None)]))
    assert "output differs" in page
    data = json.loads(to_json(report([result])))
    assert data["cases"][0]["settings"][0]["samples_ms"] == times[0]


def ranked(*samples_ms: list[float], **of_each: list) -> CaseResult:
    """A case of planners whose strategies took so long; ``of_each``: further fields of their settings."""
    case = cases.planner_case("bursts", 2, 200, 0)
    settings = [
        Setting("", case.name, strategy, samples, **{name: each[place] for name, each in of_each.items()})
        for place, (strategy, samples) in enumerate(zip(case.strategies, samples_ms, strict=False))
    ]
    return CaseResult("", case, 0.45, calibrated(case, 50.0, 0.5), settings)


def test_pairs_that_differ_are_ranked() -> None:
    """Of three pairs one does not differ, and of the others one is simulated the wrong way round."""
    first_ms = [100.0 + repetition for repetition in range(8)]
    samples = (first_ms, [ms + 10 for ms in first_ms], [ms + (-1) ** i for i, ms in enumerate(first_ms)])
    result = ranked(*samples, simulated_samples_ms=[(100.0,), (105.0,), (110.0,)])
    assert ranked_pairs([result]) == (1, 2)
    assert "are simulated in their order: 1 of 2" in to_markdown(report([result]))
    assert against_fixed(result) == ", planners, bursts: 1.000 of static (not significant)"
    for last, first, verdict in ((1, 0, "1.097 of static (slower)"), (0, 1, "0.912 of laer, last (faster)")):
        pair = replace(result, settings=[result.settings[first], result.settings[last]])
        assert against_fixed(pair) == f", planners, bursts: {verdict}"
        assert verdict in to_markdown(report([pair]))
    # In most repetitions the one is simulated to be faster, though its median is not.
    one_ms, other_ms = [10.0, 10.0, 10.0, 10.0, 50.0, 50.0, 50.0], [11.0, 11.0, 11.0, 9.0, 51.0, 51.0, 51.0]
    result = ranked(one_ms, [ms + 9 for ms in one_ms], simulated_samples_ms=[one_ms, other_ms])
    assert [setting.simulated_ms for setting in result.settings] == [10.0, 11.0]
    assert ranked_pairs([result]) == (1, 1)


MOVING = cases.planner_case("prompts by domain", 2, 200, 0)


def moving_steps(case: ShapedCase) -> tuple[list[LoadMatrix], torch.Tensor, list[float]]:
    """(loads of the plans of each step, choices of the last step's tokens, blocked time) of steps on moving loads."""
    steps = layer_steps(case, case.strategies[0])
    for _ in case.tokens_SRE:
        steps.prepare()
        steps.step()
    steps.close()
    chosen_TK = steps.x_TH.detach()[:, : case.shape.num_experts].topk(case.shape.top_k, dim=1).indices
    return [plan.load for plan in steps.plans], chosen_TK, steps.blocked_ms(99)


def test_moving_loads_are_those_of_the_workload_in_turn(ranks: LocalRanks) -> None:
    case = replace(MOVING, num_tokens=(24,) * 4)
    tokens_SRE = case.tokens_SRE
    assert tokens_SRE.shape == (31, 4, 32)
    assert (tokens_SRE.sum(axis=2) == 24 * 6).all()
    for rank, (loads, chosen_TK, blocked_ms) in enumerate(ranks.run(moving_steps, case)):
        assert len(blocked_ms) == len(loads) == 31
        for load, tokens_RE in zip(loads, tokens_SRE, strict=True):
            assert (load.tokens_RE == tokens_RE).all()
        assert (chosen_TK.sort(dim=1).values.diff(dim=1) > 0).all()
        assert chosen_TK.flatten().bincount(minlength=32).tolist() == tokens_SRE[-1, rank].tolist()


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
@pytest.mark.slow
def test_a_tiny_run() -> None:
    shape = ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=1)
    case = replace(split_case(2, 500, 0), shape=shape, num_tokens=(48, 80))
    (result,) = run_cases([case], repeats=1, shares=not lacks_shares())
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
