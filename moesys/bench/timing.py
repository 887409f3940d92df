"""Timing contestants side by side: interleaved repetitions, and ratios paired by repetition."""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """How many times longer one contestant takes than another: the median over repetitions, and its 20th to 80th
    percentile.
    """

    median: float
    p20: float
    p80: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.p20:.2f}, {self.p80:.2f}]"


def paired_ratio(longer_ms: Sequence[float], shorter_ms: Sequence[float]) -> Ratio:
    """Of ``longer / shorter``, repetition by repetition, so that what slows a whole repetition cancels.

    ``paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])`` has the median 2.0.
    """
    ratios = np.asarray(longer_ms) / np.asarray(shorter_ms)
    return Ratio(float(np.median(ratios)), *(float(p) for p in np.percentile(ratios, (20, 80))))


def wall_ms(work: Callable[[], object]) -> float:
    """Milliseconds by the host's clock."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    before: Callable[[], object] = lambda: None,
    stopwatch: Callable[[Callable[[], object]], float] = wall_ms,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Milliseconds of each contestant in each of ``repeats`` repetitions, by ``stopwatch``.

    A repetition runs every contestant once, in an order shuffled by ``seed``; one repetition of warm-up is left out.
    ``before`` runs before every run and is not timed.
    """
    order, shuffle = list(contestants), random.Random(seed).shuffle
    samples_ms: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repeats + 1):
        shuffle(order)
        for name in order:
            before()
            elapsed_ms = stopwatch(contestants[name])
            if repetition:
                samples_ms[name].append(elapsed_ms)
    return samples_ms


def machine_line(threads: int, packages: Sequence[str] = ("torch",)) -> str:
    """What the numbers were measured on: processor, cores, threads, versions."""
    versions = [f"{package} {version(package)}" for package in packages]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ", ".join(
        [_processor(), f"{cores} cores", f"{threads} threads", f"Python {platform.python_version()}", *versions]
    )


def _processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
