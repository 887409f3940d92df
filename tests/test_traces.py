"""Traces: what is always true of them, how they are folded, scaled and drawn, and that files say what is wrong."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moesys.config.workload import Generated
from moesys.traces import Trace, generate, load_trace, save_trace

TRACE = Trace(100 + np.arange(4 * 2 * 2 * 3).reshape(4, 2, 2, 3), top_k=2, name="counted", meta={"from": "a test"})

counts = hnp.arrays(np.int64, hnp.array_shapes(min_dims=4, max_dims=4, max_side=4), elements=st.integers(0, 10**6))


# --- Trace ---


def test_a_trace_keeps_its_own_counts():
    assert (TRACE.num_micro_batches, TRACE.num_layers, TRACE.num_ranks, TRACE.num_experts) == (4, 2, 2, 3)
    assert TRACE.tokens_SLRE.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        TRACE.tokens_SLRE[0, 0, 0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRACE.name = "other"


# --- fold ---


def test_folding_makes_consecutive_micro_batches_source_ranks_and_drops_what_does_not_fill_one():
    folded = TRACE.fold(4)
    assert folded.tokens_SLRE.shape == (2, 2, 4, 3)
    for step, batch, rank in np.ndindex(2, 2, 2):
        expected_LE = TRACE.tokens_SLRE[2 * step + batch, :, rank]
        assert np.array_equal(folded.tokens_SLRE[step, :, 2 * batch + rank], expected_LE)
    assert (folded.top_k, folded.name, folded.meta) == (TRACE.top_k, TRACE.name, TRACE.meta)
    assert np.array_equal(TRACE.fold(6).tokens_SLRE, Trace(TRACE.tokens_SLRE[:3], 2).fold(6).tokens_SLRE)
    assert np.array_equal(TRACE.fold(2).tokens_SLRE, TRACE.tokens_SLRE)


# --- scaled ---


@given(tokens_SLRE=counts, tokens_per_rank=st.integers(1, 10**5), data=st.data())
def test_scaling_is_exact_and_keeps_proportions(tokens_SLRE, tokens_per_rank, data):
    # Experts that each token could choose once.
    most = (tokens_SLRE.sum(axis=-1) // np.maximum(tokens_SLRE.max(axis=-1), 1))[tokens_SLRE.any(axis=-1)]
    top_k = data.draw(st.integers(1, int(most.min(initial=tokens_SLRE.shape[3]))))
    target = tokens_per_rank * top_k
    scaled_SLRE = Trace(tokens_SLRE, top_k).scaled(tokens_per_rank).tokens_SLRE
    total_SLR1 = tokens_SLRE.sum(axis=-1, keepdims=True)
    assert np.array_equal(scaled_SLRE.sum(axis=-1, keepdims=True), np.where(total_SLR1 > 0, target, 0))
    assert (scaled_SLRE[tokens_SLRE == 0] == 0).all()
    exact_SLRE = tokens_SLRE * target / np.maximum(total_SLR1, 1)
    assert (np.abs(scaled_SLRE - exact_SLRE) < 1 + 1e-9).all()


@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 1000), st.integers(0, 99))
def test_scaling_leaves_a_tokens_experts_distinct(num_tokens, top_k, tokens_per_rank, seed):
    trace = generate(Generated(skew=3, tokens_per_rank=num_tokens, steps=2, warmup=0), 2, 4, top_k, seed)
    assert trace.scaled(tokens_per_rank).tokens_SLRE.max() <= tokens_per_rank


def test_scaling_gives_the_lower_expert_an_equal_remainder():
    assert Trace([[[[1, 1, 1]]]], top_k=1).scaled(4).tokens_SLRE.tolist() == [[[[2, 1, 1]]]]


# --- files ---


def test_a_file_gives_back_the_trace(tmp_path):
    path = tmp_path / "new folder" / "a.trace"
    save_trace(Trace(TRACE.tokens_SLRE[:1], 1), path)
    save_trace(TRACE, path)
    loaded = load_trace(path)
    assert np.array_equal(loaded.tokens_SLRE, TRACE.tokens_SLRE)
    assert (loaded.top_k, loaded.name, loaded.meta) == (2, "counted", {"from": "a test"})
    assert [file.name for file in path.parent.iterdir()] == ["a.trace"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    save_trace(TRACE, path)

    def full_disk(file: object, **arrays: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match="disk full"):
        save_trace(Trace(TRACE.tokens_SLRE[:1], 1), path)
    assert load_trace(path).num_micro_batches == 4
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_a_damaged_file_says_so(tmp_path):
    path = tmp_path / "a.npz"
    save_trace(TRACE, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 - 40 : len(content) // 2 + 40] = bytes(80)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no trace"):
        load_trace(path)


# --- generate ---

workloads = st.builds(
    Generated,
    distribution=st.sampled_from(["uniform", "log_normal", "zipf"]),
    skew=st.floats(0, 100),
    drift=st.floats(0, 1),
    spread=st.floats(0, 10),
    concentration=st.none() | st.floats(1e-3, 1e3),
    num_layers=st.integers(1, 2),
    tokens_per_rank=st.integers(1, 300),
    warmup=st.integers(0, 1),
    steps=st.integers(1, 2),
)


@given(workloads, st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32 - 1), st.data())
def test_every_rank_routes_its_tokens_to_distinct_experts(workload, num_ranks, num_experts, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    trace = generate(workload, num_ranks, num_experts, top_k, seed)
    S = workload.warmup + workload.steps
    assert trace.tokens_SLRE.shape == (S, workload.num_layers, num_ranks, num_experts)
    assert (trace.tokens_SLRE.sum(axis=-1) == workload.tokens_per_rank * top_k).all()
    assert trace.tokens_SLRE.max() <= workload.tokens_per_rank
    assert np.array_equal(generate(workload, num_ranks, num_experts, top_k, seed).tokens_SLRE, trace.tokens_SLRE)


def test_seeds_layers_and_steps_differ_and_more_steps_change_no_earlier_one():
    short, long, other = (
        generate(Generated(steps=steps, drift=1.0), 2, 16, 2, seed).tokens_SLRE
        for steps, seed in ((4, 0), (9, 0), (4, 1))
    )
    assert np.array_equal(long[: len(short)], short)
    for one, another in ((short, other), (short[:, 0], short[:, 1]), (short[0], short[1])):
        assert not np.array_equal(one, another)


def shares(workload: Generated, num_ranks: int = 2, num_experts: int = 16, seed: int = 0) -> np.ndarray:
    """Each expert's share of a rank's tokens, [S, L, R, E]."""
    trace = generate(workload, num_ranks, num_experts, 1, seed)
    return trace.tokens_SLRE / workload.tokens_per_rank


@pytest.mark.parametrize(("distribution", "exponent"), [("uniform", 0.0), ("zipf", 1.2)])
def test_uniform_is_uniform_whatever_the_skew_and_zipf_has_its_exponent(distribution, exponent):
    workload = Generated(distribution=distribution, skew=exponent or 5.0, spread=0.0, tokens_per_rank=10**6)
    expected_E = np.arange(1, 17) ** -exponent
    assert np.abs(np.sort(shares(workload))[..., ::-1] - expected_E / expected_E.sum()).max() < 0.003


def test_log_normal_has_its_standard_deviation():
    workload = Generated(skew=1.5, spread=0.0, steps=60, drift=1.0, tokens_per_rank=10**6)
    log_share_SLRE = np.log(np.maximum(shares(workload), 1e-6))
    assert log_share_SLRE.std(axis=-1, ddof=1).mean() == pytest.approx(1.5, rel=0.05)


def test_without_drift_popularity_stays_and_with_full_drift_nothing_does():
    def correlation(drift: float) -> float:
        workload = Generated(drift=drift, spread=0.0, tokens_per_rank=10**5, steps=100, num_layers=1)
        log_SE = np.log(np.maximum(shares(workload, num_ranks=1), 1e-5))[:, 0, 0]
        return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairwise(log_SE)]))

    assert correlation(0.0) > 0.999
    assert correlation(0.2) == pytest.approx(0.8, abs=0.06)
    assert abs(correlation(1.0)) < 0.1


def test_spread_sets_ranks_apart():
    together, apart = (shares(Generated(spread=spread, tokens_per_rank=10**5)) for spread in (0.0, 1.0))
    assert np.abs(together[:, :, 0] - together[:, :, 1]).max() < 0.02
    assert np.abs(apart[:, :, 0] - apart[:, :, 1]).max() > 0.1


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array, torch.tensor])
def test_numbers_of_numpy_and_torch_are_written_as_those_of_python(number, tmp_path):
    trace = Trace(np.full((2, 1, 2, 4), 8), top_k=number(2))
    save_trace(trace, tmp_path / "trace.npz")
    assert load_trace(tmp_path / "trace.npz").top_k == 2
    # 400 routed tokens, which are more than a byte counts
    assert (trace.scaled(number(200)).tokens_SLRE.sum(axis=-1) == 400).all()


def test_what_would_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("moesys.traces.MOST_COUNTS", TRACE.tokens_SLRE.size - 1)
    with pytest.raises(ValueError, match="the trace has 48 counts, and a file at most 47; save fewer micro-batches"):
        save_trace(TRACE, tmp_path / "large.npz")
    assert list(tmp_path.iterdir()) == []


# --- concentration ---


def test_concentration_has_the_variance_of_its_dirichlet_distribution():
    drawn = {"distribution": "uniform", "spread": 0.0, "tokens_per_rank": 10**6, "steps": 200, "num_layers": 1}
    share_SRE = generate(Generated(concentration=20.0, **drawn), 4, 8, 1, seed=0).tokens_SLRE[:, 0] / 10**6
    assert share_SRE.mean() == pytest.approx(1 / 8)
    # every rank strays on its own, anew in each micro-batch
    assert share_SRE.var() == pytest.approx(1 / 8 * 7 / 8 / 21, rel=0.06)
    assert abs(np.corrcoef(share_SRE[1:, :, 0].ravel(), share_SRE[:-1, :, 0].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(share_SRE[:, 0, 0], share_SRE[:, 1, 0])[0, 1]) < 0.2


def test_a_large_concentration_does_not_stray():
    plain, large = (Generated(steps=2, concentration=concentration) for concentration in (None, 1e9))
    near, exact = (generate(workload, 2, 8, 2, seed=1).tokens_SLRE for workload in (large, plain))
    assert np.abs(near[0] - exact[0]).max() < 0.05 * plain.tokens_per_rank


@pytest.mark.parametrize("concentration", [1e-6, 0.1])
def test_a_tiny_concentration_still_gives_distinct_experts(concentration):
    workload = Generated(concentration=concentration, tokens_per_rank=50, steps=3)
    tokens_SLRE = generate(workload, 2, 6, 3, seed=0).tokens_SLRE
    assert (tokens_SLRE.sum(axis=-1) == 150).all()
    assert tokens_SLRE.max() <= 50
