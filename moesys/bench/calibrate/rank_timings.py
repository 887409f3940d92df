"""What one rank times so that a ``ClusterSpec`` can be fitted: products, memory, links, launches, flags, and products
beside rows that travel.

Every function is called on all ranks at once, by name through ``Ranks.run``, and times while the others do the same, as
in training. Samples are seconds, each the mean over a window of calls, as many on every rank; ranks begin a window
together. Without a process group it is one rank alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from moesys.bench.harness.bench_ranks import rank_device
from moesys.config import BYTES_PER_GB
from moesys.overlap.comm.messages import Messages, exchange

# More than a rank's caches keep: weights come from memory, as they do when layers take turns.
COLD_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
# So many random numbers are drawn, and repeated.
NUM_DRAWN = 1 << 20
# No window has more calls, however short one is.
MOST_CALLS = 10_000
# A rank sends at most so many bytes to a peer while it computes.
MOST_COPY_BYTES = 256 << 20
PING_PONGS = 1000


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``repeats`` windows of about ``window_s`` seconds each, or of one call that takes longer."""

    repeats: int = 7
    window_s: float = 0.03


@dataclass(frozen=True)
class ExpertCase:
    """Forward products of a rank's experts: ``rows`` of each, through gate and up [2I, H] and down [H, I]."""

    rows: tuple[int, ...]
    hidden_size: int
    intermediate_size: int

    @property
    def flops(self) -> int:
        return 6 * sum(self.rows) * self.hidden_size * self.intermediate_size

    @property
    def num_weights(self) -> int:
        return 3 * len(self.rows) * self.hidden_size * self.intermediate_size


def expert_products(cases: Sequence[ExpertCase], dtype: str, effort: Effort, device_type: str) -> list[list[float]]:
    """Seconds of each case by window.

    On the CPU a call of torch's GEMM for each expert and matrix, as experts are computed there; on a GPU a grouped GEMM
    for each matrix, where there are several experts.
    """
    device = rank_device(device_type)
    pool_N = _weights(cases, dtype, device)
    return _timed([_expert_call(case, pool_N) for case in cases], effort, device)


def memory_copies(num_bytes: int, effort: Effort, device_type: str) -> list[float]:
    """Seconds in which so many bytes are copied, by window: each is read once and written once."""
    device = rank_device(device_type)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return _timed([lambda: target.copy_(source)], effort, device)[0]


def launches(effort: Effort, device_type: str) -> list[float]:
    """Seconds from one product of one element to the next, by window."""
    device = rank_device(device_type)
    one = torch.ones(1, 1, device=device)
    out = torch.empty_like(one)
    return _timed([lambda: torch.mm(one, one, out=out)], effort, device)[0]


def all_to_alls(
    peer_bytes: Sequence[int], node_R: Sequence[int], between: str, longest_s: float, effort: Effort, device_type: str
) -> dict[int, list[float]]:
    """Seconds of an all-to-all by the bytes that a rank sends to each peer, and by window.

    ``between``: "ranks" of one node, or "nodes": other peers get nothing. ``longest_s``: see ``_growing``.
    """
    device, rank = rank_device(device_type), dist.get_rank()
    near_R = [node == node_R[rank] and peer != rank for peer, node in enumerate(node_R)]
    there_R = near_R if between == "ranks" else [node != node_R[rank] for node in node_R]

    def of_size(num_bytes: int) -> Callable[[], object]:
        splits = [num_bytes if there else 0 for there in there_R]
        sent, received = (torch.ones(sum(splits), dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: _begin_exchange(sent, received, splits).wait()

    return _growing(peer_bytes, of_size, longest_s, effort, device)


def round_trips(
    message_bytes: Sequence[int], pair: tuple[int, int], longest_s: float, effort: Effort, device_type: str
) -> dict[int, list[float]]:
    """Seconds in which the first rank of ``pair`` sends so many bytes to the second, and one byte comes back; by bytes
    and window. Ranks outside the pair measure nothing and give nothing.
    """
    device, rank = rank_device(device_type), dist.get_rank()
    reply_1 = torch.ones(1, dtype=torch.uint8, device=device)

    def of_size(num_bytes: int) -> Callable[[], object]:
        message = torch.ones(num_bytes, dtype=torch.uint8, device=device)

        def there_and_back() -> None:
            if rank == pair[0]:
                dist.send(message, pair[1])
                dist.recv(reply_1, pair[1])
            elif rank == pair[1]:
                dist.recv(message, pair[0])
                dist.send(reply_1, pair[0])

        return there_and_back

    samples = _growing(message_bytes, of_size, longest_s, effort, device)
    return samples if rank in pair else {}


@dataclass(frozen=True)
class BesideCopies:
    """Seconds of the same products without and with rows travelling, by window; only windows in which they travelled
    to the end.
    """

    alone_s: list[float]
    beside_s: list[float]


def products_beside_copies(
    case: ExpertCase, dtype: str, bytes_per_s: float, effort: Effort, device_type: str
) -> BesideCopies:
    """``bytes_per_s``: what a rank is expected to send to each peer; it sends three windows' worth."""
    device, here = rank_device(device_type), dist.get_rank()
    work = _expert_call(case, _weights([case], dtype, device))
    seconds = _warm_seconds(work, device)
    calls = _agreed_calls(seconds, effort)
    num_bytes = min(MOST_COPY_BYTES, max(1, int(3 * calls * _longest(seconds) * bytes_per_s)))
    splits = [num_bytes if peer != here else 0 for peer in range(dist.get_world_size())]
    sent, received = (torch.ones(sum(splits), dtype=torch.uint8, device=device) for _ in range(2))
    _begin_exchange(sent, received, splits).wait()
    alone_s, beside_s = [], []
    for _ in range(effort.repeats):
        dist.barrier()
        alone = _seconds_of(work, calls, device)
        dist.barrier()
        travelling = _begin_exchange(sent, received, splits)
        # So that somebody learns when it ends.
        travelling.get_future()
        beside = _seconds_of(work, calls, device)
        travelled = not travelling.is_completed()
        travelling.wait()
        if travelled:
            alone_s.append(alone / calls)
            beside_s.append(beside / calls)
    return BesideCopies(alone_s, beside_s)


def flag_ping_pongs(pair: tuple[int, int], effort: Effort) -> list[float]:
    """Seconds from a flag's release on one GPU to its sight on another, by window; empty on ranks that only wait."""
    # Not at the top: it imports Triton, which a CPU need not have.
    from moesys.bench.calibrate.ping_pong import PingPong

    assert dist.group.WORLD is not None
    device = rank_device("cuda")
    game = PingPong(dist.group.WORLD, pair, device)
    game.play(PING_PONGS)
    samples = []
    for _ in range(effort.repeats):
        dist.barrier()
        samples.append(_seconds_of(lambda: game.play(PING_PONGS), 1, device) / (2 * PING_PONGS))
    return samples if dist.get_rank() in pair else []


def gpu_facts() -> tuple[str, int, float]:
    """Name, multiprocessors and memory, 1e9 bytes, of this rank's GPU."""
    found = torch.cuda.get_device_properties(rank_device("cuda"))
    return found.name, found.multi_processor_count, found.total_memory / BYTES_PER_GB


# --- how --------------------------------------------------------------------------------------------------------------


def _weights(cases: Sequence[ExpertCase], dtype: str, device: torch.device) -> Tensor:
    """Random numbers for the weights of several layers of the smaller cases, and of one of the largest."""
    cold_bytes, largest = COLD_BYTES[device.type], max(case.num_weights for case in cases)
    pool_N = torch.empty(
        max(cold_bytes // getattr(torch, dtype).itemsize, largest), dtype=getattr(torch, dtype), device=device
    )
    drawn = torch.randn(NUM_DRAWN, device=device).mul_(0.02)
    for part in pool_N.split(NUM_DRAWN):
        part.copy_(drawn[: len(part)])
    return pool_N


def _expert_call(case: ExpertCase, pool_N: Tensor) -> Callable[[], object]:
    """Each call does the case once, with the next layer's weights."""
    experts, H, I, num_rows = len(case.rows), case.hidden_size, case.intermediate_size, sum(case.rows)
    num_layers = len(pool_N) // case.num_weights
    weights_LN = pool_N[: num_layers * case.num_weights].view(num_layers, case.num_weights)
    gate_up_LEUH = weights_LN[:, : experts * 2 * I * H].unflatten(1, (experts, 2 * I, H))
    down_LEHI = weights_LN[:, experts * 2 * I * H :].unflatten(1, (experts, H, I))
    x_PH = torch.randn(num_rows, H, device=pool_N.device).to(pool_N.dtype)
    a_PI = torch.randn(num_rows, I, device=pool_N.device).to(pool_N.dtype)
    layers = cycle(zip(gate_up_LEUH, down_LEHI, strict=True))
    if pool_N.is_cuda and experts > 1:
        ends_E = torch.tensor(case.rows, device=pool_N.device).cumsum(0).int()

        def grouped() -> None:
            gate_up_EUH, down_EHI = next(layers)
            torch.nn.functional.grouped_mm(x_PH, gate_up_EUH.transpose(1, 2), offs=ends_E)
            torch.nn.functional.grouped_mm(a_PI, down_EHI.transpose(1, 2), offs=ends_E)

        return grouped
    h_PU, y_PH = x_PH.new_empty(num_rows, 2 * I), torch.empty_like(x_PH)
    rows_E = [tensor.split(case.rows) for tensor in (x_PH, h_PU, a_PI, y_PH)]

    def one_by_one() -> None:
        gate_up_EUH, down_EHI = next(layers)
        for x, h, a, y, gate_up, down in zip(*rows_E, gate_up_EUH, down_EHI, strict=True):
            torch.mm(x, gate_up.t(), out=h)
            torch.mm(a, down.t(), out=y)

    return one_by_one


def _begin_exchange(sent: Tensor, received: Tensor, splits: list[int]) -> dist.Work | Messages:
    """As layers begin it."""
    assert dist.group.WORLD is not None
    return exchange(received, sent, splits, splits, dist.group.WORLD)


def _growing(
    sizes: Sequence[int],
    of_size: Callable[[int], Callable[[], object]],
    longest_s: float,
    effort: Effort,
    device: torch.device,
) -> dict[int, list[float]]:
    """Samples by size. Sizes rise, and end before the first that is expected to take longer than ``longest_s`` on any
    rank; there are three at least.
    """
    works: dict[int, Callable[[], object]] = {}
    longest, before = 0.0, 1
    for size in sizes:
        if len(works) >= 3 and longest * size / before > longest_s:
            break
        works[size] = of_size(size)
        longest, before = _longest(_warm_seconds(works[size], device)), size
    return dict(zip(works, _timed(list(works.values()), effort, device), strict=True))


def _timed(works: Sequence[Callable[[], object]], effort: Effort, device: torch.device) -> list[list[float]]:
    """Seconds of a call of each, by window. Works take turns, so that what disturbs the machine for a while disturbs
    all of them.
    """
    calls = [_agreed_calls(_warm_seconds(work, device), effort) for work in works]
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(effort.repeats):
        for work, num_calls, windows in zip(works, calls, samples, strict=True):
            if dist.is_initialized():
                dist.barrier()
            windows.append(_seconds_of(work, num_calls, device) / num_calls)
    return samples


def _warm_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of a call, when two have warmed up."""
    _seconds_of(work, 2, device)
    return _seconds_of(work, 2, device) / 2


def _seconds_of(work: Callable[[], object], calls: int, device: torch.device) -> float:
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


def _agreed_calls(seconds: float, effort: Effort) -> int:
    """Calls of a window, the same number on all ranks."""
    return max(1, min(MOST_CALLS, math.ceil(effort.window_s / max(_longest(seconds), 1e-9))))


def _longest(seconds: float) -> float:
    """Of all ranks' times."""
    if not dist.is_initialized():
        return seconds
    on_all_1 = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(on_all_1, dist.ReduceOp.MAX)
    return on_all_1.item()
