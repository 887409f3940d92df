"""Windows: so many calls of a work, timed together on every rank at once.

Samples are seconds, each the mean over a window of calls, as many on every rank; ranks begin a window together. Without
a process group it is one rank alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# No window has more calls, however short one is.
MOST_CALLS = 10_000


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``repeats`` windows of about ``window_s`` seconds each, or of one call that takes longer."""

    repeats: int = 7
    window_s: float = 0.03


def timed(works: Sequence[Callable[[], object]], effort: Effort, device: torch.device) -> list[list[float]]:
    """Seconds of a call of each, by window. Works take turns, so that what disturbs the machine for a while disturbs
    all of them.
    """
    calls = [agreed_calls(warm_seconds(work, device), effort) for work in works]
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(effort.repeats):
        for work, num_calls, windows in zip(works, calls, samples, strict=True):
            if dist.is_initialized():
                dist.barrier()
            windows.append(seconds_of(work, num_calls, device) / num_calls)
    return samples


def warm_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of a call, when two have warmed up."""
    seconds_of(work, 2, device)
    return seconds_of(work, 2, device) / 2


def seconds_of(work: Callable[[], object], calls: int, device: torch.device) -> float:
    _finish(device)
    start_s = time.perf_counter()
    for _ in range(calls):
        work()
    _finish(device)
    return time.perf_counter() - start_s


def _finish(device: torch.device) -> None:
    """Waits for what was asked of the device, and not for copies that travel beside it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def agreed_calls(seconds: float, effort: Effort) -> int:
    """Calls of a window, the same number on all ranks."""
    return max(1, min(MOST_CALLS, math.ceil(effort.window_s / max(longest_of(seconds), 1e-9))))


def longest_of(seconds: float) -> float:
    """Of all ranks' times."""
    if not dist.is_initialized():
        return seconds
    on_all_1 = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(on_all_1, dist.ReduceOp.MAX)
    return on_all_1.item()
