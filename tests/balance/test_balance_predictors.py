"""Exact values of predictions, by hand and by the weighted means that they stand for."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesys.balance.predictors import LoadHistory, window
from moesys.config import Adaptive, Ema, Last, WindowMean
from moesys.load import LoadMatrix

THREE = [LoadMatrix([[tokens, 0, 2 * tokens + 1]]) for tokens in (8, 4, 16)]
KINDS = [
    Last(),
    WindowMean(steps=3),
    Ema(decay=0.0),
    Ema(decay=0.9),
    Adaptive(),
    Adaptive(candidates=(Ema(decay=0.3), WindowMean(steps=2)), memory=2),
]


def history(config, loads):
    seen = LoadHistory(config)
    for load in loads:
        seen.observe(load)
    return seen


def predicted(config, loads):
    return history(config, loads).predicted()


def drawn(seed, steps, shape=(2, 5), most=10_000):
    rng = np.random.default_rng(seed)
    return [LoadMatrix(rng.integers(0, most, shape)) for _ in range(steps)]


def test_last_is_the_newest_load():
    assert predicted(Last(), THREE) == THREE[-1]


def test_window_mean_is_the_sum_of_the_newest_loads():
    assert predicted(WindowMean(steps=2), THREE).tokens_RE.tolist() == [[20, 0, 42]]
    assert predicted(WindowMean(steps=5), THREE).tokens_RE.tolist() == [[28, 0, 59]]


def test_ema_weighs_by_powers_of_decay_in_256ths_of_a_token():
    # weights 4, 2, 1 of 7 at decay 1/2: (4·16 + 2·4 + 1·8) / 7 and (4·33 + 2·9 + 1·17) / 7
    assert predicted(Ema(decay=0.5), THREE).tokens_RE.tolist() == [[round(256 * 80 / 7), 0, round(256 * 167 / 7)]]
    assert predicted(Ema(decay=0.0), THREE).tokens_RE.tolist() == [[256 * 16, 0, 256 * 33]]


@given(
    decay=st.floats(0, 0.999),
    steps=st.integers(1, 80),
    most=st.sampled_from([2, 300, 10**6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_ema_is_within_a_unit_of_the_weighted_mean(decay, steps, most, seed):
    loads = drawn(seed, steps, most=most)
    step = Fraction(round(decay * 2**24), 2**24)
    weights = [step**age for age in range(steps)]
    mean_RE = sum(weight * load.tokens_RE.astype(object) for weight, load in zip(weights, reversed(loads), strict=True))
    error_RE = predicted(Ema(decay=decay), loads).tokens_RE - 256 * mean_RE / sum(weights)
    # 24 bits of weight lose up to 2^-24 of a load's change each time, and 1/(1 - decay) times count
    assert abs(error_RE).max() <= 1 + Fraction(256 * most, 2**22) / (1 - step)


def test_an_ema_of_thousands_of_loads_is_two_arrays_of_state():
    few, many = (len(json.dumps(history(Ema(decay=0.99), drawn(1, steps)).state_dict())) for steps in (5, 2000))
    assert many < 1.2 * few


@pytest.mark.parametrize(("config", "loads"), [(Last(), 1), (WindowMean(steps=3), 3)])
def test_older_loads_than_the_window_change_nothing(config, loads):
    assert window(config) == loads
    seen = drawn(1, 50)
    assert predicted(config, seen) == predicted(config, seen[-loads:])
    changed = [*seen]
    changed[-loads] = drawn(2, 1)[0]
    assert predicted(config, seen) != predicted(config, changed)


@pytest.mark.parametrize("config", [Ema(decay=0.9), Adaptive()])
def test_some_predictors_forget_nothing_at_once(config):
    assert window(config) is None


@pytest.mark.parametrize("config", KINDS, ids=repr)
def test_predictions_are_in_the_units_that_they_say(config):
    load = LoadMatrix([[3, 5, 0], [7, 1, 2]])
    seen = LoadHistory(config)
    for _ in range(7):
        seen.observe(load)
        np.testing.assert_array_equal(seen.predicted().tokens_RE, seen.units_per_token * load.tokens_RE)


@pytest.mark.parametrize("config", KINDS, ids=repr)
@pytest.mark.parametrize("stop", [0, 1, 2, 9])
def test_a_history_that_was_stopped_goes_on_as_if_it_were_not(config, stop):
    loads = drawn(3, 14, most=50)
    straight, stopped = history(config, loads[:stop]), LoadHistory(config)
    stopped.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for load in loads[stop:]:
        straight.observe(load)
        stopped.observe(load)
        assert stopped.predicted().tokens_RE.tobytes() == straight.predicted().tokens_RE.tobytes()
    assert stopped.state_dict() == straight.state_dict()


# --- Adaptive


def errors_by_hand(config, loads):
    """Of each candidate after each load, by the definition, in fractions of a token."""
    errors = [Fraction(0)] * len(config.candidates)
    for now in range(1, len(loads)):
        actual_E = [int(tokens) for tokens in loads[now].tokens_E]
        for index, candidate in enumerate(config.candidates):
            expected_E = [int(tokens) for tokens in predicted(candidate, loads[:now]).tokens_E]
            scale = Fraction(sum(actual_E), sum(expected_E))
            apart = sum(abs(e * scale - a) for e, a in zip(expected_E, actual_E, strict=True))
            errors[index] = errors[index] * (1 - Fraction(1, config.memory)) + apart
        yield now, errors


@given(seed=st.integers(0, 2**32 - 1), drift=st.sampled_from([0.0, 0.3, 3.0]), memory=st.sampled_from([1, 4, 16]))
def test_adaptive_is_the_candidate_that_was_closest_lately(seed, drift, memory):
    config = Adaptive(memory=memory)
    rng = np.random.default_rng(seed)
    walk_SE = np.cumsum(drift * rng.standard_normal((12, 6)), axis=0)
    loads = [LoadMatrix(1 + rng.poisson(50 * np.exp(np.clip(log_E, -5, 5)), (2, 6))) for log_E in walk_SE]
    for now, errors in errors_by_hand(config, loads):
        closest = [
            config.candidates[index] for index, error in enumerate(errors) if error <= min(errors) + Fraction(1, 1000)
        ]
        assert predicted(config, loads[: now + 1]) in [predicted(candidate, loads[: now + 1]) for candidate in closest]


def test_adaptive_follows_jumps_and_averages_noise():
    candidates = (WindowMean(steps=8), Last())
    config = Adaptive(candidates=candidates, memory=8)
    jumping = [LoadMatrix([[100, 0] if step // 4 % 2 else [0, 100]]) for step in range(40)]
    noisy = [LoadMatrix([[100 + 30 * (-1) ** step, 100 - 30 * (-1) ** step]]) for step in range(40)]
    assert predicted(config, jumping) == predicted(Last(), jumping)
    assert predicted(config, noisy) == predicted(WindowMean(steps=8), noisy)
    # and forgets which it was
    assert predicted(config, jumping + noisy) == predicted(WindowMean(steps=8), noisy)
    assert predicted(config, noisy + jumping) == predicted(Last(), jumping)


def test_adaptive_begins_with_its_first_candidate_and_keeps_to_it_at_a_tie():
    config = Adaptive(candidates=(WindowMean(steps=2), Last(), Ema(decay=0.5)))
    loads = [LoadMatrix([[4, 2]])] * 5
    for steps in range(1, 6):
        assert predicted(config, loads[:steps]) == predicted(config.candidates[0], loads[:steps])


def test_adaptive_does_not_mind_loads_without_tokens():
    nothing, something = LoadMatrix([[0, 0]]), LoadMatrix([[2, 1]])
    assert predicted(Adaptive(), [nothing, something, nothing, nothing, something, something]).total > 0
