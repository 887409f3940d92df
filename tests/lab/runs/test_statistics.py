"""Paired ratios and their interval, against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from moesys.lab.runs.statistics import PairedRatio, paired_ratio

Times = dict[int, list[float]]
MILLISECONDS = st.floats(0.01, 1e5)


@st.composite
def times(draw: st.DrawFn) -> tuple[Times, Times]:
    """Samples of two contestants over the same seeds."""
    n = draw(st.integers(1, 9))
    samples = st.lists(MILLISECONDS, min_size=1, max_size=4)
    return ({seed: draw(samples) for seed in range(n)}, {seed: draw(samples) for seed in range(n)})


def ratio(baseline: Times, contestant: Times) -> PairedRatio:
    found = paired_ratio(baseline, contestant)
    assert found is not None
    return found


def one_each(*values: float) -> Times:
    return {seed: [value] for seed, value in enumerate(values)}


def test_the_estimate_is_the_geometric_mean_and_the_interval_is_students():
    rng = np.random.default_rng(0)
    logs = rng.normal(0.2, 0.1, 8)
    found = ratio(one_each(*np.exp(logs)), one_each(*[1.0] * 8))
    low, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert (found.estimate, found.low, found.high) == pytest.approx(tuple(map(math.exp, (logs.mean(), low, high))))


def test_seeds_that_both_have_are_paired_by_the_medians_of_their_samples():
    assert ratio({0: [2.0, 100.0, 1.0]}, {0: [1.0]}).estimate == 2.0
    assert ratio({0: [2.0], 1: [2.0], 5: [9.0]}, {0: [1.0], 1: [1.0], 7: [9.0]}).n == 2
    assert paired_ratio({0: [1.0]}, {1: [1.0]}) is None
    assert ratio(one_each(2, 20, 200), one_each(1, 10, 100)) == ratio(one_each(2, 2, 2), one_each(1, 1, 1))


def test_one_seed_has_no_interval():
    found = ratio(one_each(3), one_each(2))
    assert found.estimate == pytest.approx(1.5)
    assert (found.low, found.high, found.verdict) == (None, None, "too few seeds to tell")


@pytest.mark.parametrize(
    ("n", "baseline", "own", "verdict"),
    [(5, 2.0, 1.0, "too few seeds to tell"), (6, 2.0, 1.0, "faster"), (6, 1.0, 2.0, "slower"), (6, 1.0, 1.0, "~")],
)
def test_identical_samples_have_a_verdict(n, baseline, own, verdict):
    found = ratio(one_each(*[baseline] * n), one_each(*[own] * n))
    assert found.verdict == verdict
    assert (found.low, found.high) == pytest.approx((baseline / own, baseline / own))


def test_an_interval_that_holds_one_tells_nothing_apart():
    assert ratio(one_each(1.1, 0.9, 1.2, 0.8, 1.0, 1.05), one_each(*[1.0] * 6)).verdict == "~"


@given(times(), st.floats(1e-3, 1e3))
def test_scaling_all_samples_of_both_changes_nothing(pair, scale):
    scaled = [{seed: [value * scale for value in values] for seed, values in side.items()} for side in pair]
    before, after = ratio(*pair), ratio(*scaled)
    assert after.estimate == pytest.approx(before.estimate, rel=1e-9)
    if before.low is not None:
        assert (after.low, after.high) == pytest.approx((before.low, before.high), rel=1e-6, abs=1e-300)


@given(times())
def test_swapping_gives_the_reciprocal(pair):
    one, other = ratio(*pair), ratio(*reversed(pair))
    assert one.estimate == pytest.approx(1 / other.estimate, rel=1e-9)
    assert one.holds_one == other.holds_one
    opposite = {"faster": "slower", "slower": "faster"}
    assert one.verdict == opposite.get(other.verdict, other.verdict)
