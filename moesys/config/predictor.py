"""Predictor: the load that a layout is planned for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moesys.config.base import Declared


class Last(Declared):
    """The newest load."""

    kind: Literal["last"] = "last"


class WindowMean(Declared):
    """The mean of the newest ``steps`` loads (LAER-MoE: 5)."""

    kind: Literal["window_mean"] = "window_mean"
    steps: int = Field(5, ge=1)


class Ema(Declared):
    """Exponential moving average: ``decay`` of the old, the rest of the newest."""

    kind: Literal["ema"] = "ema"
    decay: float = Field(0.7, ge=0, lt=1)


class Adaptive(Declared):
    """Of several predictors the one that was closest lately: each is tested on every load before it sees it."""

    kind: Literal["adaptive"] = "adaptive"
    candidates: tuple[Annotated[Last | WindowMean | Ema, Field(discriminator="kind")], ...] = Field(
        (Last(), WindowMean(steps=5), Ema(decay=0.5), Ema(decay=0.9)), min_length=1
    )
    memory: int = Field(16, ge=1, description="loads over which an error is forgotten to 1/e")


class Oracle(Declared):
    """The load of the micro-batch that the plan will serve: what no predictor can beat.

    In simulations, and in training where routing is replayed.
    """

    kind: Literal["oracle"] = "oracle"


Predictor = Annotated[Last | WindowMean | Ema | Adaptive | Oracle, Field(discriminator="kind")]
