"""Times of works: once, repeated, and interleaved with those of others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Work = Callable[[], object]


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
