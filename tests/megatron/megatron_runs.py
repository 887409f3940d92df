"""What tests ask of Megatron-Core, without importing it: ``train`` runs on the ranks.

``make hosts`` installs it into a folder of the environment; a process that imports this file finds it there.
"""

from __future__ import annotations

import importlib
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
    "fsep": ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5), **PLANNED),
}


@dataclass(frozen=True)
class Run:
    """What to train, in a loop of Megatron's own parts.

    strategy: None for Megatron's own experts. first: the number of the first step, by which its data differ.
    accumulate: micro-batches of a step. padding: whether the ends of sequences are padding. uneven: whether ranks have
    other numbers of tokens. config, ddp: fields of ``TransformerConfig`` and ``DistributedDataParallelConfig``, where
    they differ from the small model's. parallel: arguments of ``initialize_model_parallel``. half: whether parameters
    are bfloat16. by_triton: whether Triton's kernels compute experts under any overlap. load, save: folders of
    distributed checkpoints, before and after the training.
    """

    strategy: ms.Strategy | None = None
    steps: int = 6
    first: int = 0
    accumulate: int = 1
    padding: bool = False
    uneven: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, int] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    half: bool = False
    by_triton: bool = False
    load: str | None = None
    save: str | None = None


@dataclass
class Trained:
    """What a run did: by step its loss and its norm before clipping; the gradients of the first step and the parameters
    at the end, whole, by name; biases of routers at the end; the layouts that this rank held by step and layer; by
    layer whether it was linked, and the bytes of experts that this rank received.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    biases: list[Tensor] = field(default_factory=list)
    held: list[list[Any]] = field(default_factory=list)
    linked: list[bool] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)


def train(*runs: Run) -> list[Trained]:
    """Trains on all ranks of the process group, one run after the other."""
    return call("train", *runs)


def call(name: str, *args: Any) -> Any:
    """Returns what a function of ``megatron_loop`` returns on this rank."""
    return getattr(importlib.import_module("megatron_loop"), name)(*args)
