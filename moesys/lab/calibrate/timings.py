"""Timings on one rank: launches, memory, the optimizer, cases, messages, and products while messages travel.

Each function of ``Ranks.run`` is called on all ranks at once and times its rank while the others do the same, as in
training. Samples are seconds per call, each the mean of a window of calls. All ranks time the same number of calls and
start each window together. Without a process group, one rank times alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moesys.config import BYTES_PER_GB, DType
from moesys.lab.calibrate.cases import Case, ExpertCase, ExpertPasses, Pass, Pool
from moesys.lab.ranks.devices import rank_device
from moesys.overlap.comm.channel import Messages, exchange

# The most calls of a window, however short it is.
MOST_CALLS = 10_000
# The most bytes that a rank sends to a peer while it computes.
MOST_COPY_BYTES = 256 << 20
# A line through messages needs at least this many sizes.
FEWEST_SIZES = 3


@dataclass(frozen=True)
class Effort:
    """The number of windows, and seconds per window. A call that takes longer is a window of its own."""

    repeats: int = 7
    window_s: float = 0.03


def timed(works: Sequence[Callable[[], object]], effort: Effort, device: torch.device) -> list[list[float]]:
    """Returns seconds per call of each work, by window. Works take turns, so that a temporary disturbance of the
    machine affects all of them.
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
    """Returns seconds per call after two calls of warm-up."""
    seconds_of(work, 2, device)
    return seconds_of(work, 2, device) / 2


def seconds_of(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Returns the seconds that the device takes for all calls; copies on other streams are not waited for."""
    synchronize = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start_s = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return time.perf_counter() - start_s


def agreed_calls(seconds: float, effort: Effort) -> int:
    """Returns the number of calls of a window, which is the same on all ranks."""
    return max(1, min(MOST_CALLS, math.ceil(effort.window_s / max(longest_of(seconds), 1e-9))))


def longest_of(seconds: float) -> float:
    """Returns the longest time of any rank."""
    if not dist.is_initialized():
        return seconds
    longest_1 = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest_1, dist.ReduceOp.MAX)
    return longest_1.item()


# --- computing --------------------------------------------------------------------------------------------------------


def gpu_facts() -> tuple[str, int, float]:
    """Returns the name, multiprocessors and memory (1e9 bytes) of this rank's GPU."""
    found = torch.cuda.get_device_properties(rank_device("cuda"))
    return found.name, found.multi_processor_count, found.total_memory / BYTES_PER_GB


def basics(
    copied_bytes: int, parameters: Sequence[tuple[int, int]], effort: Effort, device_type: str
) -> dict[str, list[float]]:
    """Times a product of one element, a memory copy, and an AdamW update of float32 parameters of these shapes."""
    device = rank_device(device_type)
    one_11 = torch.ones(1, 1, device=device)
    out_11 = torch.empty_like(one_11)
    source, target = (torch.ones(copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    updated = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in parameters]
    for parameter in updated:
        parameter.grad = torch.randn_like(parameter)
    works = {
        "launch": lambda: torch.mm(one_11, one_11, out=out_11),
        "memory copy": lambda: target.copy_(source),
        "update": torch.optim.AdamW(updated, lr=1e-4).step,
    }
    return dict(zip(works, timed(list(works.values()), effort, device), strict=True))


def passes(cases: Sequence[Case], dtype: DType, effort: Effort, device_type: str) -> list[dict[Pass, list[float]]]:
    """Times each pass of each case."""
    device = rank_device(device_type)
    pool = Pool(cases, dtype, device)
    calls = [case.calls(pool) for case in cases]
    windows = iter(timed([call for of_case in calls for call in of_case.values()], effort, device))
    return [{of: next(windows) for of in of_case} for of_case in calls]


# --- messages ---------------------------------------------------------------------------------------------------------


def all_to_alls(
    sizes: Sequence[int], peers_RR: npt.NDArray[np.bool_], longest_s: float, effort: Effort, device_type: str
) -> dict[int, list[float]]:
    """Times all-to-alls in which each rank sends one of ``sizes`` bytes to each of its peers, a row of ``peers_RR``.

    Sizes rise; the first that is expected to take longer than ``longest_s`` on any rank, and all larger ones, are left
    out, but never the first ``FEWEST_SIZES``.
    """
    device, peers_R = rank_device(device_type), peers_RR[dist.get_rank()].tolist()

    def all_to_all(size: int) -> Callable[[], object]:
        begin = _exchange(size, peers_R, device)
        return lambda: begin().wait()

    works: dict[int, Callable[[], object]] = {}
    longest, before = 0.0, 1
    for size in sizes:
        if len(works) >= FEWEST_SIZES and longest * size / before > longest_s:
            break
        works[size] = all_to_all(size)
        longest, before = longest_of(warm_seconds(works[size], device)), size
    return dict(zip(works, timed(list(works.values()), effort, device), strict=True))


def products_beside_copies(
    case: ExpertCase, dtype: DType, bytes_per_s: float, effort: Effort, device_type: str
) -> list[tuple[float, float]]:
    """Times forward of a case alone and while an all-to-all is under way, by window. Windows in which the all-to-all
    ended first are left out. ``bytes_per_s``: the rate at which a rank is expected to send to each peer; it sends three
    windows' worth.
    """
    device, here = rank_device(device_type), dist.get_rank()
    work = ExpertPasses(case, Pool([case], dtype, device)).forward
    seconds = warm_seconds(work, device)
    calls = agreed_calls(seconds, effort)
    num_bytes = min(MOST_COPY_BYTES, max(1, int(3 * calls * longest_of(seconds) * bytes_per_s)))
    begin = _exchange(num_bytes, [peer != here for peer in range(dist.get_world_size())], device)
    begin().wait()
    samples = []
    for _ in range(effort.repeats):
        dist.barrier()
        alone = seconds_of(work, calls, device)
        dist.barrier()
        travelling = begin()
        # ``Messages`` notice their end only after they were asked for a future.
        travelling.get_future()
        beside = seconds_of(work, calls, device)
        if not travelling.is_completed():
            samples.append((alone / calls, beside / calls))
        travelling.wait()
    return samples


def _exchange(num_bytes: int, peers_R: Sequence[bool], device: torch.device) -> Callable[[], dist.Work | Messages]:
    """Returns a function that starts an all-to-all with these peers in the same way as layers do."""
    group, splits = dist.group.WORLD, [num_bytes if is_peer else 0 for is_peer in peers_R]
    assert group is not None
    sent, received = (torch.ones(sum(splits), dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: exchange(received, sent, splits, splits, group)
