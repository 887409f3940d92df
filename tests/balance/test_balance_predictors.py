"""Exact values of predictions."""

import numpy as np
import pytest

from moesys.balance import predict, window
from moesys.config import Ema, Last, WindowMean
from moesys.load import LoadMatrix

HISTORY = [LoadMatrix([[tokens, 0, 2 * tokens + 1]]) for tokens in (8, 4, 16)]


def test_last_is_the_newest_load():
    assert predict(HISTORY, Last()) is HISTORY[-1]


def test_window_mean_is_the_sum_of_the_newest_loads():
    assert predict(HISTORY, WindowMean(steps=2)).tokens_RE.tolist() == [[20, 0, 42]]
    assert predict(HISTORY, WindowMean(steps=5)).tokens_RE.tolist() == [[28, 0, 59]]


def test_ema_weighs_by_powers_of_decay_in_256ths_of_a_token():
    # weights 4, 2, 1 of 7 at decay 1/2: (4·16 + 2·4 + 1·8) / 7 and (4·33 + 2·9 + 1·17) / 7
    assert predict(HISTORY, Ema(decay=0.5)).tokens_RE.tolist() == [[round(256 * 80 / 7), 0, round(256 * 167 / 7)]]
    assert predict(HISTORY, Ema(decay=0.0)).tokens_RE.tolist() == [[256 * 16, 0, 256 * 33]]


def test_ema_of_a_constant_load_is_that_load():
    load = LoadMatrix([[3, 0], [1, 2**20]])
    np.testing.assert_array_equal(predict([load] * 60, Ema(decay=0.9)).tokens_RE, 256 * load.tokens_RE)


def test_ema_is_within_a_unit_of_the_real_weighted_mean():
    rng = np.random.default_rng(0)
    history = [LoadMatrix(rng.integers(0, 10_000, (3, 5))) for _ in range(30)]
    weights = 0.7 ** np.arange(29, -1, -1)
    mean = np.tensordot(weights / weights.sum(), [load.tokens_RE for load in history], axes=1)
    assert abs(predict(history, Ema(decay=0.7)).tokens_RE - 256 * mean).max() < 2


@pytest.mark.parametrize(
    ("config", "loads"),
    [(Last(), 1), (WindowMean(steps=3), 3), (Ema(decay=0.0), 1), (Ema(decay=0.5), 20), (Ema(decay=0.7), 39)],
)
def test_older_loads_than_the_window_change_nothing(config, loads):
    assert window(config) == loads
    rng = np.random.default_rng(1)
    history = [LoadMatrix(rng.integers(0, 100, (2, 3))) for _ in range(50)]
    assert predict(history, config) == predict(history[-loads:], config)


def test_ema_window_ends_where_weights_fall_below_a_millionth():
    assert 0.7 ** window(Ema(decay=0.7)) < 1e-6 <= 0.7 ** (window(Ema(decay=0.7)) - 1)
    assert window(Ema(decay=0.99)) == 1375


@pytest.mark.parametrize(
    ("history", "config", "message"),
    [
        ([], Last(), "history is empty"),
        ([LoadMatrix([[1]]), LoadMatrix([[1, 2]])], Last(), r"shapes \[\(1, 1\), \(1, 2\)\]"),
        ([LoadMatrix([[2**61]])] * 2, WindowMean(steps=2), "use a smaller decay or fewer steps"),
        ([LoadMatrix([[2**40]])], Ema(decay=0.5), "may pass 2"),
    ],
)
def test_what_cannot_be_predicted_is_refused(history, config, message):
    with pytest.raises(ValueError, match=message):
        predict(history, config)
