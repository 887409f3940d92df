"""Times side by side: interleaved repetitions, what they come to, and what they were measured on."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Literal, TypeVar

import numpy as np

from moesys.display import counted
from moesys.lab.runs.environment import available_cores, cpu_name

Name = TypeVar("Name", bound=Hashable)
Work = Callable[[], object]


@dataclass(frozen=True)
class Quantiles:
    """``n`` samples: their median, and their 20th and 80th percentile."""

    median: float
    p20: float
    p80: float
    n: int

    @staticmethod
    def of(samples: Sequence[float], method: Literal["linear", "nearest"] = "linear") -> Quantiles:
        """Returns the spread of samples; ``method``: how a percentile between two samples is found."""
        low, high = (float(value) for value in np.percentile(samples, (20, 80), method=method))
        return Quantiles(float(np.median(samples)), low, high, len(samples))

    @staticmethod
    def of_ratios(longer_ms: Sequence[float], shorter_ms: Sequence[float]) -> Quantiles:
        """Returns the spread of ``longer / shorter`` in each repetition, so that what slows a whole repetition cancels.

        ``Quantiles.of_ratios([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])`` has the median 2.0.
        """
        return Quantiles.of(np.asarray(longer_ms) / np.asarray(shorter_ms))

    def times(self, factor: float) -> Quantiles:
        return Quantiles(self.median * factor, self.p20 * factor, self.p80 * factor, self.n)

    def __format__(self, form: str) -> str:
        """Returns ``1.23 [1.10, 1.38]``; ``form`` is the format of each number, by default with two digits."""
        return "{0:{3}} [{1:{3}}, {2:{3}}]".format(self.median, self.p20, self.p80, form or ".2f")

    def __str__(self) -> str:
        return format(self)


def wall_ms(work: Work, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns milliseconds by the host's clock, or by another one."""
    start_s = clock()
    work()
    return (clock() - start_s) * 1e3


# Processor time of this process, all threads: neither what others do nor waiting counts.
processor_ms = partial(wall_ms, clock=time.process_time)


def interleave(
    contestants: Mapping[Name, Callable[[], float]],
    repeats: int,
    *,
    before: Callable[[], object] = lambda: None,
    seed: int = 0,
) -> dict[Name, list[float]]:
    """Returns what each contestant returns in each of ``repeats`` repetitions, such as the ``wall_ms`` of a work.

    A repetition runs every contestant once, in an order shuffled by ``seed``; one repetition of warm-up is left out.
    ``before`` runs before every run and is not timed.
    """
    order, shuffle = list(contestants), random.Random(seed).shuffle
    samples_ms: dict[Name, list[float]] = {name: [] for name in contestants}
    for repetition in range(repeats + 1):
        shuffle(order)
        for name in order:
            before()
            elapsed_ms = contestants[name]()
            if repetition:
                samples_ms[name].append(elapsed_ms)
    return samples_ms


def repeated_ms(work: Work, repeats: int, before: Callable[[], object] = lambda: None) -> list[float]:
    """Returns milliseconds of one work alone, by repetition, after one of warm-up. ``before``: see ``interleave``."""
    return interleave({"": partial(wall_ms, work)}, repeats, before=before)[""]


def machine_line(threads: int, packages: Sequence[str] = ("torch",)) -> str:
    """Returns the processor, cores, threads and versions that numbers were measured with, in one line."""
    versions = [f"{package} {version(package)}" for package in packages]
    python = f"Python {platform.python_version()}"
    return ", ".join([cpu_name(), counted(available_cores(), "core"), counted(threads, "thread"), python, *versions])
