"""Workloads of the leaderboard: generated ones are what they are called, recorded ones are real and reproducible."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import record_routing as recording
from benchmarks.leaderboard import workloads
from benchmarks.leaderboard.workloads import FURTHER, GENERATED, SCORED, WARM_UP, RecordedRouting, packaged_recordings
from moesys.balance.predictors import measured_drift
from moesys.config import ClusterSpec, ModelShape
from moesys.lab.train.text import load_text
from moesys.load import LoadMatrix
from moesys.traces import Trace

MODEL = ModelShape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, dtype="bfloat16")
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)
NUM_STEPS = WARM_UP + SCORED


def test_workloads_are_what_they_are_called() -> None:
    model = MODEL.replace(num_experts=64, top_k=8)
    by_name = {drawn.name: drawn.tokens_SRE(model, CLUSTER, 3) for drawn in GENERATED}
    nodes = by_name["node-local"][-1]
    assert (nodes[0] == nodes[1]).all()
    assert (nodes[0] != nodes[2]).any()
    hottest_S = np.array([tokens_E.max() / tokens_E.mean() for tokens_E in by_name["bursts"].sum(axis=1)])
    assert ((hottest_S < 3.5) | (hottest_S > 5)).all()
    assert 1 / 6 < (hottest_S > 5).mean() < 1 / 2
    loads = [LoadMatrix(tokens_RE) for tokens_RE in by_name["prompts by domain"]]
    drifts = [measured_drift(*pair) for pair in pairwise(loads)]
    assert max(drifts[0::2]) < 0.25 < min(drifts[1::2])


def test_published_workloads_of_token_imbalance_are_what_they_are_called() -> None:
    """On 4 ranks, for which figures are published: hot experts 3.25 of the mean, those of a burst 2.5."""
    model = MODEL.replace(num_experts=64, top_k=8)
    by_number = {drawn.name[:2]: drawn.tokens_SRE(model, CLUSTER, 3) for drawn in FURTHER if drawn.name[0] == "W"}
    assert list(by_number) == [f"W{number}" for number in range(8)]
    for number, tokens_SRE in by_number.items():
        assert (tokens_SRE.sum(axis=(1, 2)) == 4 * 8192 * 8).all()
        assert (tokens_SRE.sum(axis=2) == 8192 * 8).all() == (number != "W4")
        assert (8 * tokens_SRE.max(axis=2) <= tokens_SRE.sum(axis=2)).all()
    mean = 4 * 8192 * 8 / 64
    heat_SE = {number: tokens_SRE.sum(axis=1) / mean for number, tokens_SRE in by_number.items()}
    # Experts 0 to 15 live on the first rank, and so on.
    heat_SR = {number: of.reshape(-1, 4, 16).mean(axis=2) for number, of in heat_SE.items()}
    hot = {number: [set(np.flatnonzero(heat_E > 1.5).tolist()) for heat_E in of] for number, of in heat_SE.items()}
    assert (by_number["W0"] == 1024).all()
    assert hot["W1"] == [hot["W1"][0]] * NUM_STEPS
    assert len(hot["W1"][0]) == 16
    assert heat_SR["W1"].max() < 2.5
    assert hot["W2"] == [set(range(16))] * NUM_STEPS
    assert heat_SR["W2"][:, 0] == pytest.approx(3.25, abs=0.05)
    assert hot["W3"] == [set(range(0, 64, 4))] * NUM_STEPS
    assert heat_SR["W3"] == pytest.approx(1, abs=0.05)
    for number in ("W1", "W2", "W3", "W6"):
        assert np.sort(heat_SE[number])[:, 48:] == pytest.approx(3.25, abs=0.2)
    tokens_SR = by_number["W4"].sum(axis=2) / 8
    assert np.ptp(tokens_SR, axis=1).min() > 0.2 * 8192
    assert heat_SE["W4"] == pytest.approx(1, abs=0.1)
    assert (by_number["W5"][:, :, :32] == 0).all()
    assert heat_SR["W5"] == pytest.approx(np.array([[0, 0, 2, 2]] * NUM_STEPS), abs=0.05)
    assert hot["W6"] == [set(range(16 * (step // 3 % 4), 16 * (step // 3 % 4 + 1))) for step in range(NUM_STEPS)]
    assert [heat_E.max() > 1.5 for heat_E in heat_SE["W7"]] == [False, False, False, True] * (NUM_STEPS // 4)
    assert heat_SE["W7"][3::4, :16] == pytest.approx(2.5, abs=0.2)


@pytest.mark.parametrize("drawn", [*GENERATED, *FURTHER], ids=lambda drawn: drawn.name)
def test_drawn_workloads_are_pure_differ_by_sample_and_keep_what_is_scored_in_turn(drawn: Any) -> None:
    first, again, other = (drawn.tokens_SRE(MODEL, CLUSTER, sample) for sample in (0, 0, 1))
    assert first.shape == (WARM_UP + SCORED, 4, 8)
    assert (first == again).all()
    assert (first != other).any() == (drawn.name != "W0 balanced")
    longer = drawn.tokens_SRE(MODEL, CLUSTER, 0, warm_up=12)
    assert longer.shape == (12 + SCORED, 4, 8)
    if drawn in GENERATED:
        assert (first.sum(axis=2) == 8192 * MODEL.top_k).all()
        assert (longer.sum(axis=2) == 8192 * MODEL.top_k).all()
    if drawn.name[:2] in ("W5", "W6", "W7"):
        assert longer[12:].sum(axis=1) == pytest.approx(first[WARM_UP:].sum(axis=1), rel=0.15)


def test_a_prompt_has_samples_on_a_block_of_ranks_and_other_experts_in_the_next_micro_batch() -> None:
    model, cluster = MODEL.replace(num_experts=64, top_k=8), ClusterSpec(num_nodes=4, ranks_per_node=8)
    tokens_SRE = FURTHER[-1].tokens_SRE(model, cluster, 0)
    assert (tokens_SRE.sum(axis=2) == 8192 * 8).all()

    def alike(one_E: Any, other_E: Any) -> float:
        return float(np.corrcoef(one_E, other_E)[0, 1])

    same = [alike(of[2 * prompt], of[2 * prompt + 1]) for of in tokens_SRE for prompt in range(16)]
    others = [alike(of[2 * prompt + 1], of[2 * prompt + 2]) for of in tokens_SRE for prompt in range(15)]
    later = [alike(of[rank], then[rank]) for of, then in pairwise(tokens_SRE) for rank in range(32)]
    assert np.median(same) > 0.8
    # One of 8 domains follows itself.
    assert np.mean(np.array(others) < 0.6) > 0.7
    assert np.mean(np.array(later) < 0.6) > 0.7


def test_packaged_recordings_are_real_routing() -> None:
    """Uneven, changing, of models whose experts are as many as published, and small."""
    recorded = packaged_recordings()
    shapes = {one.trace.name: (one.trace.num_experts, one.trace.top_k) for one in recorded}
    own = {"deepseek-v3": (256, 8), "olmoe": (64, 8), "qwen3-moe": (128, 8)}
    assert shapes == own | {"olmoe-fine-tuned": (64, 8), "quantile-balanced": (128, 8)}
    assert sum(path.stat().st_size for path in Path(workloads.__file__).parent.glob("recorded/*.npz")) < 1_300_000
    for one in recorded:
        # Two layers of 8 groups of 4 ranks.
        assert one.tokens_SRE(MODEL, CLUSTER, 15).shape == (WARM_UP + SCORED, 4, one.trace.num_experts)
        with pytest.raises(ValueError, match="seeds=17 is more than the 16 that"):
            one.tokens_SRE(MODEL, CLUSTER, 16)
        assert (one.trace.tokens_SLRE.sum(axis=3) == recording.COUNTED * recording.CONTEXT * 8).all()
        for layer in range(one.trace.num_layers):
            loads = [LoadMatrix(tokens_RE) for tokens_RE in one.trace.tokens_SLRE[:, layer]]
            hottest = np.median([load.tokens_E.max() / load.tokens_E.mean() for load in loads])
            assert (1.5 < hottest < 2.5) if one.trace.name == "quantile-balanced" else hottest > 2
            assert 0.005 < np.median([measured_drift(*pair) for pair in pairwise(loads)]) < 0.95


def test_a_sample_of_a_recording_is_a_layer_of_some_ranks_then_later_micro_batches() -> None:
    num_steps = WARM_UP + 2 * SCORED + 1
    counts_SLRE = np.random.default_rng(0).integers(1, 99, (num_steps, 2, 9, 8))
    given = RecordedRouting("given", "", Trace(counts_SLRE, 2))
    scaled = given.trace.scaled(8192).tokens_SLRE
    parts = [(first, group, layer) for first in (0, SCORED) for group in (0, 4) for layer in (0, 1)]
    for sample, (first, group, layer) in enumerate(parts):
        expected_SRE = scaled[first : first + NUM_STEPS, layer, group : group + 4]
        assert (given.tokens_SRE(MODEL, CLUSTER, sample) == expected_SRE).all()
    with pytest.raises(
        ValueError, match="seeds=9 is more than the 8 that given has on 4 ranks: 2 layers of 61 micro-batches and 8"
    ):
        given.tokens_SRE(MODEL, CLUSTER, 8)
    short = replace(given, trace=Trace(counts_SLRE[: WARM_UP + 2], 2))
    assert (short.tokens_SRE(MODEL, CLUSTER, 3) == short.trace.scaled(8192).tokens_SLRE[:, 1, 4:8]).all()
    none = replace(given, trace=Trace(counts_SLRE[:WARM_UP], 2))
    with pytest.raises(ValueError, match=r"seeds=1 is more than the 0 that given has.*, or record more micro-batches"):
        none.tokens_SRE(MODEL, CLUSTER, 0)


@pytest.mark.parametrize("recipe", recording.RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_trains_and_counts(recipe: recording.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller one of each architecture: all tokens are counted, of batches that differ; biases have moved."""
    monkeypatch.setattr(recording, "NUM_RANKS", 2)
    monkeypatch.setattr(recording, "CONTEXT", 16)
    moved = []
    move = recording._move_bias

    def watched(bias_E: Any, ids_TK: Any) -> None:
        move(bias_E, ids_TK)
        moved.append(float(bias_E.abs().max()))

    monkeypatch.setattr(recording, "_move_bias", watched)
    fewer = {"num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4}
    fewer |= {} if recipe.quantiles else {"n_group": 4, "topk_group": 2}
    known = {name: value for name, value in fewer.items() if name in recipe.changes}
    trace = recording.record(replace(recipe, changes=recipe.changes | known, steps=(0, 2)), load_text())
    assert trace.tokens_SLRE.shape == (2, 2, 2, 16)
    assert (trace.tokens_SLRE.sum(axis=3) == recording.COUNTED * 16 * 4).all()
    assert (trace.tokens_SLRE[0] != trace.tokens_SLRE[1]).any()
    balanced = [pytest.approx(3 * recording.BIAS_RATE, rel=0.7)] * 2 if recipe.name == "deepseek-v3" else []
    assert moved[-2:] == balanced
    assert len(list(recording.facts(trace))) == 2
