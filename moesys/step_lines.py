"""The steps of a watched training: a journal for each rank in the folder of a run, with one line per step.

A training that is resumed appends lines; where it repeats steps, the newest lines count.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from moesys.journal import Journal

# The fields of a ``LayerLine`` that are drawn over steps.
SCALARS = ("load_p50", "load_p95", "experts_without_tokens", "exposed_ms", "plan_ms", "restored_mib")
# A count is bounded, so that sums of counts fit into int64.
Count = Annotated[int, Field(ge=-(2**53), le=2**53)]
# JSON has no nan: null stands for it.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
_AS_JSON = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class NumberLog:
    """Calls ``log(numbers, step=step)``, such as ``wandb.log``. Its errors must not end what is logged: the first one
    becomes a warning, and later ones are not shown.
    """

    def __init__(self, log: Callable[..., object]) -> None:
        self._log, self._failed = log, False

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        try:
            self._log(numbers, step=step)
        except Exception as error:
            if not self._failed:
                what = f"log raised {type(error).__name__} in step {step}: {error}"
                warnings.warn(f"{what}; the run goes on, and later errors are not shown", stacklevel=4)
            self._failed = True


@dataclass(frozen=True)
class LayerLine:
    """One layer in one step.

    micro_batches: how many it trained on.
    load_p50, load_p95, load_max: quantiles over the micro-batches of the busiest rank's tokens over the mean.
    experts_without_tokens: in none of the micro-batches, on no rank.
    exposed_ms, plan_ms, restored_mib: of this rank, as in ``LayerMetrics``.
    tokens_E: over ranks and micro-batches; () but for the first of the ranks that share the experts, which all have
        the same.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _AS_JSON

    layer: Count
    micro_batches: Count
    load_p50: float
    load_p95: float
    load_max: float
    experts_without_tokens: Count
    exposed_ms: float
    plan_ms: float
    restored_mib: float
    tokens_E: tuple[Count, ...] = ()


@dataclass(frozen=True)
class EventLine:
    """A departure from the plan, or the first value of a layer that is not finite."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_JSON

    layer: Count
    micro_batch: Count
    what: str


@dataclass(frozen=True)
class StepLine:
    """One step on one rank.

    num_ranks: the ranks that trained it. time_s: its end, in seconds since 1970. step_ms: its duration.
    numbers: what the training adds, such as its loss; nan is written for what is not finite.
    layers: the layers that ran. events: those since the line before.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _AS_JSON

    step: Count
    num_ranks: Count
    time_s: float
    step_ms: float
    numbers: dict[str, Number]
    layers: tuple[LayerLine, ...]
    events: tuple[EventLine, ...] = ()


def step_journal(path: Path) -> Journal[StepLine]:
    """Returns the journal of one rank."""
    return Journal(path, StepLine, "a step of a training")


def step_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.jsonl"


def step_files(folder: Path) -> dict[int, Path]:
    """Returns the files of steps in ``folder`` by rank, in their order."""
    matches = ((re.fullmatch(r"rank-(\d+)\.jsonl", path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))
