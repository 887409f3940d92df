"""LoadHistory: the loads that were, as much of them as a predictor needs, and the load that it expects next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, assert_never

import numpy as np

from moesys.compiled import compiled
from moesys.config import Adaptive, Ema, Last, Oracle, Predictor, WindowMean
from moesys.load import IntArray, LoadMatrix, frozen_int64

# An Ema keeps 2^-20 tokens and predicts 1/256 tokens, so that experts with few tokens keep their differences.
EMA_KEPT_BITS = 20
EMA_PREDICTED_BITS = 8
EMA_WEIGHT_BITS = 24
ERROR_BITS = 16
LARGEST_SUM = 2**62


def measured_drift(before: LoadMatrix, after: LoadMatrix) -> float:
    """Returns which share of experts' popularity was drawn anew from one load to another, 0 to 1, for ``Greedy.drift``:
    what the logarithms of their tokens lack of full correlation. 0 where all experts were alike.
    """
    before_E, after_E = before.log_popularity_E, after.log_popularity_E
    deviations = math.sqrt(before_E @ before_E) * math.sqrt(after_E @ after_E)
    return float(np.clip(1 - before_E @ after_E / deviations, 0, 1)) if deviations else 0.0


class Forecast(NamedTuple):
    """A load to expect, in 1/``FORECAST_UNITS`` tokens; ``drift`` is the share of experts' popularity that the noise of
    earlier forecasts draws anew, 0 to 1.
    """

    load: LoadMatrix
    drift: float


FORECAST_UNITS = 16
# Added to the squares of the regression for each of its points, so that it has a solution where experts are alike.
RIDGE = 1e-3


def forecast(loads: Sequence[LoadMatrix], lag: int) -> Forecast | None:
    """Returns what to expect ``lag`` micro-batches after the newest of ``loads``; None where these are fewer than
    lag + 3.

    The logarithm of an expert's tokens, less the mean of all experts', is taken for a·n + b·m: n is the same of the
    newest load before it, m the mean of all that were known then. a and b are fitted to the loads by least squares, so
    that loads that stand still, drift towards a mean, or jump around one have a forecast. An expert's tokens come from
    ranks as they did in the newest load and in all loads, weighted by the sizes of a and b.
    """
    if len(loads) < lag + 3:
        return None
    log_SE = np.array([load.log_popularity_E for load in loads])
    mean_SE = log_SE.cumsum(axis=0) / np.arange(1, len(loads) + 1)[:, None]
    known_P2 = np.stack([log_SE[1:-lag], mean_SE[1:-lag]], axis=-1).reshape(-1, 2)
    came_P = log_SE[1 + lag :].ravel()
    squares_22 = known_P2.T @ known_P2 + RIDGE * len(came_P) * np.eye(2)
    # Rounded, so that the last bit of a logarithm does not choose a layout.
    weights_2 = np.linalg.solve(squares_22, known_P2.T @ came_P).round(6)
    noise = round(float((came_P - known_P2 @ weights_2).std()), 6)
    share_E = np.exp(weights_2[0] * log_SE[-1] + weights_2[1] * mean_SE[-1])
    all_RE = reduce(np.add, (load.tokens_RE for load in loads))
    of_newest, of_all = np.abs(weights_2) if weights_2.any() else (1.0, 0.0)
    newest_E, all_E = loads[-1].tokens_E, all_RE.sum(axis=0)
    of_newest_E, of_all_E = of_newest * share_E / np.maximum(newest_E, 1), of_all * share_E / np.maximum(all_E, 1)
    scale = newest_E.sum() * FORECAST_UNITS / max(newest_E @ of_newest_E + all_E @ of_all_E, 1e-9)
    tokens_RE = _weighted(loads[-1].tokens_RE, all_RE, of_newest_E * scale, of_all_E * scale)
    spread = float(log_SE[-1].std())
    drift = round(1 - math.sqrt(max(1 - (noise / spread) ** 2, 0)), 6) if spread else 0.0
    return Forecast(LoadMatrix(tokens_RE), drift)


@compiled
def _weighted(newest_RE, all_RE, of_newest_E, of_all_E):  # type: ignore[no-untyped-def]
    """Returns the sum of two loads, each times a weight for each expert, int64 [R, E]."""
    tokens_RE = np.empty_like(all_RE)
    for rank in range(all_RE.shape[0]):
        for expert in range(all_RE.shape[1]):
            tokens = newest_RE[rank, expert] * of_newest_E[expert] + all_RE[rank, expert] * of_all_E[expert]
            # Rounded twice, so that the last bit does not decide.
            tokens_RE[rank, expert] = np.rint(np.rint(tokens * 1e6) / 1e6)
    return tokens_RE


class LoadHistory:
    """The memory of a predictor. Call ``observe`` with every micro-batch's load; ``predicted`` is the load to plan for.

    - ``Last``: the newest load.
    - ``WindowMean``: the sum of the newest ``steps`` loads, fewer at the start: their mean without its rounding.
    - ``Ema``: in 1/256 tokens, the mean of all loads with weights decay^k for that of k micro-batches ago. Weights are
      divided by the sum of those that there are, so that a short history is not drawn towards its first load.
    - ``Adaptive``: the prediction of the candidate with the least error (``_Contest``).

    Counts of all but ``Last`` and a candidate like it are in fractions of a token: ``units_per_token``. Integers in
    fixed point throughout: the same loads give the same bytes on every rank. Raises ValueError for ``Oracle``, which
    has no history, for loads of different shapes, and for counts whose sums might pass 2**62.
    """

    def __init__(self, config: Predictor) -> None:
        self.config = config
        self._memory = _memory_of(config)
        self._shape_RE: tuple[int, ...] | None = None

    def observe(self, load: LoadMatrix) -> None:
        shape_RE = load.tokens_RE.shape
        if self._shape_RE not in (None, shape_RE):
            raise ValueError(
                f"the load has shape {shape_RE} and those before it {self._shape_RE}; give loads of one cluster and "
                "model, and begin a new history when either changes"
            )
        self._memory.add(load.tokens_RE)
        self._shape_RE = shape_RE

    @property
    def has_loads(self) -> bool:
        """Whether any load was observed."""
        return self._shape_RE is not None

    def predicted(self) -> LoadMatrix:
        """Returns the load to plan for, in 1/``units_per_token`` tokens. Raises ValueError if no load was observed."""
        if not self.has_loads:
            raise ValueError("no load was observed yet; observe one first, or plan on a uniform load")
        return LoadMatrix(self._memory.estimate_RE())

    @property
    def units_per_token(self) -> int:
        """How many counts of ``predicted`` are one token of a micro-batch."""
        return self._memory.units_per_token

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state as values that JSON has."""
        return {
            "predictor": self.config.model_dump(mode="json"),
            "shape": None if self._shape_RE is None else list(self._shape_RE),
            "memory": self._memory.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where another history stopped. Raises ValueError for the state of another predictor, and for
        anything else than a state.
        """
        if state["predictor"] != self.config.model_dump(mode="json"):
            raise ValueError(
                f"the state is of predictor {state['predictor']}, this history of {self.config!r}; "
                "resume with the same predictor, or begin a new history"
            )
        try:
            shape_RE = None if state["shape"] is None else tuple(state["shape"])
            self._memory.restore(state["memory"], shape_RE)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the state of a load history is damaged: {error!r}; load another checkpoint") from None
        self._shape_RE = shape_RE


def window(config: Predictor) -> int | None:
    """Returns how many of the newest loads a prediction depends on; None: on all."""
    match config:
        case Last():
            return 1
        case WindowMean():
            return config.steps
        case Ema() | Adaptive():
            return None
        case Oracle():
            return 0
        case _:
            assert_never(config)


def _memory_of(config: Predictor) -> _Memory:
    match config:
        case Last():
            return _Window(1)
        case WindowMean():
            return _Window(config.steps)
        case Ema():
            return _MovingAverage(config.decay)
        case Adaptive():
            return _Contest(config)
        case Oracle():
            raise ValueError(
                "predictor=Oracle() plans for loads that are still to come, which only a replay knows; "
                "use workload=Replay(...) or Generated(...), or predictor=Adaptive()"
            )
        case _:
            assert_never(config)


class _Window:
    """The newest ``steps`` loads."""

    def __init__(self, steps: int) -> None:
        self._tokens_KRE: deque[IntArray] = deque(maxlen=steps)
        self._steps = steps

    @property
    def units_per_token(self) -> int:
        return len(self._tokens_KRE)

    def add(self, tokens_RE: IntArray) -> None:
        _check_count(tokens_RE, LARGEST_SUM // self._steps, "fewer steps, or predictor=Last()")
        self._tokens_KRE.append(tokens_RE)

    def estimate_RE(self) -> IntArray:
        return reduce(np.add, self._tokens_KRE)

    def state(self) -> Any:
        return [tokens_RE.tolist() for tokens_RE in self._tokens_KRE]

    def restore(self, state: Any, shape_RE: tuple[int, ...] | None) -> None:
        found = [_kept_counts(tokens_RE, shape_RE) for tokens_RE in state]
        if len(found) > self._steps or bool(found) != (shape_RE is not None):
            raise ValueError(f"it has {len(found)} loads of shape {shape_RE}")
        self._tokens_KRE = deque(found, maxlen=self._steps)


class _MovingAverage:
    """mean += (load - mean) / weight, where weight = 1 + decay · weight is the sum of the weights so far."""

    units_per_token = 1 << EMA_PREDICTED_BITS

    def __init__(self, decay: float) -> None:
        one = 1 << EMA_WEIGHT_BITS
        # a decay that rounds to 1 would never forget
        self._decay = min(round(decay * one), one - 1)
        self._weight = 0
        self._mean_RE: IntArray | None = None

    def add(self, tokens_RE: IntArray) -> None:
        _check_count(tokens_RE, LARGEST_SUM >> EMA_KEPT_BITS, "loads of fewer micro-batches, or predictor=Last()")
        one = 1 << EMA_WEIGHT_BITS
        self._weight = one + (self._weight * self._decay >> EMA_WEIGHT_BITS)
        load_RE = tokens_RE << EMA_KEPT_BITS
        mean_RE = load_RE if self._mean_RE is None else self._mean_RE
        self._mean_RE = mean_RE + _scaled(load_RE - mean_RE, one * one // self._weight)

    def estimate_RE(self) -> IntArray:
        assert self._mean_RE is not None, "an average was asked for before any load"
        drop = EMA_KEPT_BITS - EMA_PREDICTED_BITS
        return (self._mean_RE + (1 << (drop - 1))) >> drop

    def state(self) -> Any:
        return {"weight": self._weight, "mean": None if self._mean_RE is None else self._mean_RE.tolist()}

    def restore(self, state: Any, shape_RE: tuple[int, ...] | None) -> None:
        weight, one = state["weight"], 1 << EMA_WEIGHT_BITS
        least, most = (0, 0) if shape_RE is None else (one, one * one // (one - self._decay))
        if type(weight) is not int or not least <= weight <= most or (state["mean"] is None) != (shape_RE is None):
            raise ValueError(f"weight={weight!r} of loads of shape {shape_RE}")
        self._mean_RE = None if shape_RE is None else _kept_counts(state["mean"], shape_RE)
        self._weight = weight


class _Contest:
    """Several histories and the error of each: what it predicted, scaled to the load that came, against that load.

    An error counts Σ_e |predicted - actual| in 2^-16 tokens; the sum of earlier errors first loses 1/``memory`` of
    itself. The candidate with the least sum predicts, the first one at a tie and before there are errors.
    """

    def __init__(self, config: Adaptive) -> None:
        self._histories = [LoadHistory(candidate) for candidate in config.candidates]
        self._errors = [0] * len(self._histories)
        self._memory = config.memory

    @property
    def _best(self) -> LoadHistory:
        return self._histories[self._errors.index(min(self._errors))]

    @property
    def units_per_token(self) -> int:
        return self._best.units_per_token

    def add(self, tokens_RE: IntArray) -> None:
        load = LoadMatrix(tokens_RE)
        if self._histories[0].has_loads:
            actual_E = load.tokens_E.tolist()
            self._errors = [
                error - error // self._memory + _error(history.predicted().tokens_E.tolist(), actual_E)
                for error, history in zip(self._errors, self._histories, strict=True)
            ]
        for history in self._histories:
            history.observe(load)

    def estimate_RE(self) -> IntArray:
        return self._best.predicted().tokens_RE

    def state(self) -> Any:
        return {
            "begun": self._histories[0].has_loads,
            "errors": list(self._errors),
            "histories": [history.state_dict() for history in self._histories],
        }

    def restore(self, state: Any, shape_RE: tuple[int, ...] | None) -> None:
        begun, errors = state["begun"], list(state["errors"])
        if (
            begun is not (shape_RE is not None)
            or len(errors) != len(self._histories)
            or not all(type(error) is int and error >= 0 for error in errors)
        ):
            raise ValueError(f"begun is {begun!r}, and errors are {errors}")
        for history, kept in zip(self._histories, state["histories"], strict=True):
            history.load_state_dict(kept)
            if history._shape_RE != shape_RE:
                raise ValueError(f"a candidate has loads of shape {history._shape_RE}, and not {shape_RE}")
        self._errors = errors


def _kept_counts(values: Any, shape_RE: tuple[int, ...] | None) -> IntArray:
    """Returns counts of a state. Raises ValueError for those that are no counts of that shape."""
    counts_RE = frozen_int64("a load", values, num_dims=2)
    if counts_RE.shape != shape_RE or counts_RE.min(initial=0) < 0 or counts_RE.max(initial=0) >= LARGEST_SUM:
        raise ValueError(f"it has counts of shape {counts_RE.shape}, where {shape_RE} of 0 and above are meant")
    return counts_RE


def _error(predicted_E: list[int], actual_E: list[int]) -> int:
    """Returns Σ_e |p_e · Σa / Σp - a_e| in 2^-16 tokens, rounded down; all of Σa where nothing was predicted."""
    predicted, actual = sum(predicted_E), sum(actual_E)
    if not predicted:
        return actual << ERROR_BITS
    # Python's integers: the products pass 64 bits
    apart = sum(abs(p * actual - a * predicted) for p, a in zip(predicted_E, actual_E, strict=True))
    return (apart << ERROR_BITS) // predicted


def _scaled(values_RE: IntArray, weight: int) -> IntArray:
    """Computes values · weight / 2^24, rounded half up, for weights up to 2^24, in halves that do not overflow."""
    high_RE, low_RE = values_RE >> EMA_WEIGHT_BITS, values_RE & ((1 << EMA_WEIGHT_BITS) - 1)
    return high_RE * weight + ((low_RE * weight + (1 << (EMA_WEIGHT_BITS - 1))) >> EMA_WEIGHT_BITS)


def _check_count(tokens_RE: IntArray, bound: int, way_out: str) -> None:
    largest = int(tokens_RE.max())
    if largest >= bound:
        raise ValueError(
            f"the load has a count of {largest} tokens, and this predictor's sums are below 2**62 only for counts "
            f"below {bound}; use {way_out}"
        )


# The memory of one kind of predictor. A new one is empty; ``estimate_RE`` needs at least one load. ``restore`` raises
# KeyError, TypeError or ValueError for anything else than a state; its shape is that of the loads, None without any.
_Memory = _Window | _MovingAverage | _Contest
