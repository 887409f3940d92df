"""One calibration under way: its ranks, what it asks of them, and what they have answered so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from benchmarks.calibrate.grids import Grid
from benchmarks.calibrate.windows import Effort
from moesys.config import ClusterSpec
from moesys.lab.ranks.torchrun_ranks import Ranks

T = TypeVar("T")

PART_TIMEOUT_S = 600.0


@dataclass
class Session:
    """One calibration, and the samples that it has so far."""

    ranks: Ranks
    cluster: ClusterSpec
    device_type: str
    grid: Grid
    effort: Effort
    tell: Callable[[str], None]
    keep: Callable[[dict[str, Any]], None]
    samples: dict[str, Any] = field(default_factory=dict)

    def run(self, what: str, fn: Callable[..., T], *args: Any) -> list[T]:
        by_rank = self.ranks.run(fn, *args, timeout_s=PART_TIMEOUT_S)
        self.samples[what] = by_rank
        self.keep(self.samples)
        return by_rank

    @property
    def neighbours(self) -> tuple[int, int] | None:
        """The first two ranks that share a node."""
        first_N = np.cumsum((0, *self.cluster.node_sizes))
        found = [first for first, size in zip(first_N, self.cluster.node_sizes, strict=False) if size > 1]
        return (int(found[0]), int(found[0]) + 1) if found else None


def pooled(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns all ranks' samples together."""
    return [sample for samples in by_rank for sample in samples]
