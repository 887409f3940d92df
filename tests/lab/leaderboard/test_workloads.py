"""Workloads of the leaderboard: generated ones are what they are called, recorded ones are real and reproducible."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import record_routing as recording
from moesys.balance.predictors import measured_drift
from moesys.config import ClusterSpec, ModelShape
from moesys.lab.leaderboard import workloads
from moesys.lab.leaderboard.workloads import GENERATED, SCORED, WARM_UP, RecordedRouting, packaged_recordings
from moesys.lab.train.text import load_text
from moesys.load import LoadMatrix
from moesys.traces import Trace

MODEL = ModelShape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, dtype="bfloat16")
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("drawn", GENERATED, ids=lambda drawn: drawn.name)
def test_drawn_workloads_are_pure_and_differ_by_sample(drawn: Any) -> None:
    first, again, other = (drawn.tokens_SRE(MODEL, CLUSTER, sample) for sample in (0, 0, 1))
    assert first.shape == (WARM_UP + SCORED, 4, 8)
    assert (first == again).all()
    assert (first != other).any()
    assert (first.sum(axis=2) == 8192 * MODEL.top_k).all()


@pytest.mark.parametrize("drawn", GENERATED, ids=lambda drawn: drawn.name)
def test_a_longer_warm_up_keeps_what_is_scored_in_turn(drawn: Any) -> None:
    tokens_SRE = drawn.tokens_SRE(MODEL, CLUSTER, 0, warm_up=12)
    assert tokens_SRE.shape == (12 + SCORED, 4, 8)
    assert (tokens_SRE.sum(axis=2) == 8192 * MODEL.top_k).all()


def test_workloads_are_what_they_are_called() -> None:
    model = MODEL.replace(num_experts=64, top_k=8)
    by_name = {drawn.name: drawn.tokens_SRE(model, CLUSTER, 3) for drawn in GENERATED}
    nodes = by_name["node-local"][-1]
    assert (nodes[0] == nodes[1]).all()
    assert (nodes[0] != nodes[2]).any()
    hottest = [tokens_RE.sum(axis=0).max() / tokens_RE.sum(axis=0).mean() for tokens_RE in by_name["bursts"]]
    assert min(hottest[1], hottest[4]) > 1.3 * max(hottest[0], hottest[2], hottest[3], hottest[5])
    loads = [LoadMatrix(tokens_RE) for tokens_RE in by_name["prompts by domain"]]
    drifts = [measured_drift(*pair) for pair in pairwise(loads)]
    assert max(drifts[0::2]) < 0.2 < min(drifts[1::2])


def test_packaged_recordings_are_real_routing() -> None:
    """Uneven, changing, of models whose experts are as many as published, and small."""
    recorded = packaged_recordings()
    assert [one.trace.name for one in recorded] == ["deepseek-v3", "olmoe", "qwen3-moe"]
    assert [(one.trace.num_experts, one.trace.top_k) for one in recorded] == [(256, 8), (64, 8), (128, 8)]
    assert sum(path.stat().st_size for path in Path(workloads.__file__).parent.glob("recorded/*.npz")) < 300_000
    for one in recorded:
        assert one.tokens_SRE(MODEL, CLUSTER, 3).shape == (WARM_UP + SCORED, 4, one.trace.num_experts)
        with pytest.raises(ValueError, match="seeds=5 is more than"):
            one.tokens_SRE(MODEL, CLUSTER, 4)
        assert (one.trace.tokens_SLRE.sum(axis=3) == recording.COUNTED * recording.CONTEXT * 8).all()
        for layer in range(one.trace.num_layers):
            loads = [LoadMatrix(tokens_RE) for tokens_RE in one.trace.tokens_SLRE[:, layer]]
            assert np.median([load.tokens_E.max() / load.tokens_E.mean() for load in loads]) > 2
            assert 0.005 < np.median([measured_drift(*pair) for pair in pairwise(loads)]) < 0.95


def test_a_sample_of_a_recording_is_a_layer_then_later_micro_batches() -> None:
    counts_SLRE = np.arange(9 * 2 * 4 * 8).reshape(9, 2, 4, 8)
    given = RecordedRouting("given", "", Trace(counts_SLRE, 2))
    scaled = given.trace.scaled(8192).tokens_SLRE
    for sample, (first, layer) in enumerate(((0, 0), (0, 1), (3, 0), (3, 1))):
        assert (given.tokens_SRE(MODEL, CLUSTER, sample) == scaled[first : first + 6, layer]).all()
    with pytest.raises(ValueError, match="seeds=5 is more than given has on 4 ranks: 2 layers of 9 micro-batches"):
        given.tokens_SRE(MODEL, CLUSTER, 4)


@pytest.mark.parametrize("recipe", recording.RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_trains_and_counts(recipe: recording.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller one of each architecture: all tokens are counted, of batches that differ; biases have moved."""
    monkeypatch.setattr(recording, "NUM_RANKS", 2)
    monkeypatch.setattr(recording, "CONTEXT", 16)
    moved = []
    move = recording._move_biases

    def watched(model: Any, *arguments: Any) -> None:
        move(model, *arguments)
        biases = [bias_E for name, bias_E in model.named_buffers() if name.endswith("e_score_correction_bias")]
        moved.append([float(bias_E.abs().max()) for bias_E in biases])

    monkeypatch.setattr(recording, "_move_biases", watched)
    fewer = {"num_experts": 16, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    known = {name: value for name, value in fewer.items() if name in recipe.changes}
    trace = recording.record(replace(recipe, changes=recipe.changes | known, steps=(0, 2)), load_text())
    assert trace.tokens_SLRE.shape == (2, 2, 2, 16)
    assert (trace.tokens_SLRE.sum(axis=3) == recording.COUNTED * 16 * 4).all()
    assert (trace.tokens_SLRE[0] != trace.tokens_SLRE[1]).any()
    assert trace.iterations == (0, 2)
    balanced = [pytest.approx(3 * recording.BIAS_RATE, rel=0.7)] * 2 if recipe.name == "deepseek-v3" else []
    assert moved[-1] == balanced
    assert len(list(recording.facts(trace))) == 2
