"""What tests ask of torchtitan's trainer, without importing it: ``train`` runs on the ranks.

``make hosts`` installs torchtitan into a folder of the environment; a process that imports this file finds it there.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import moesys as ms

sys.path.append(str(Path(sys.prefix) / "hosts"))

PLANNED: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
STRATEGIES = {
    "ep": ms.Strategy(name="ep"),
    "lent": ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=5), **PLANNED),
    "fsep": ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5, prefetch_layers=1), **PLANNED),
}


def ours(strategy: ms.Strategy) -> tuple[str, ...]:
    """Returns the override of the command line that runs experts under ``strategy``."""
    fields = {"strategy": strategy.model_dump(mode="json"), "dtype": "float32"}
    return (f"moesys.torchtitan.experts={json.dumps(fields)}",)


@dataclass(frozen=True)
class Run:
    """What to train, in torchtitan's own loop.

    overrides: as on the command line; none are torchtitan's own experts. model: the name of its folder in
    ``torchtitan.models``. sizes: of its layers, where they differ from the small ones. settings: of torchtitan's
    configuration, by path. dtype: of products. eps: of Adam. folder: where checkpoints are, or None without. forced:
    other runs by rank, whose choices of experts take the place of the router's. command: torchtitan's, instead of a
    configuration of ours.
    """

    overrides: tuple[str, ...] = ()
    model: str = "qwen3"
    steps: int = 6
    accumulate: int = 1
    sequences: int = 2
    dtype: str = "float32"
    eps: float = 1e-8
    folder: str | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    forced: list[Trained] | None = None
    command: tuple[str, ...] = ()


@dataclass
class Trained:
    """What a run did: by step its loss, its norm before clipping, and the expert choices [T, K] of each layer and
    micro-batch on this rank; the gradients of the first step before clipping, and the parameters at the end, both
    whole; by step and layer the experts that this rank held.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    choices: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    held: list[list[Any]] = field(default_factory=list)


def train(run: Run) -> Trained:
    """Trains on all ranks of the process group."""
    return call("train", run)


def call(name: str, *args: Any) -> Any:
    """Returns what a function of ``cpu_trainer`` returns on this rank."""
    return getattr(importlib.import_module("cpu_trainer"), name)(*args)
