"""What one rank times so that a ``ClusterSpec`` can be fitted: experts, memory, links, launches, flags, and experts
beside rows that travel.

Every function is called on all ranks at once, by name through ``Ranks.run``, and times while the others do the same, as
in training. Samples are of windows (``windows``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.calibrate.expert_passes import PASSES, ExpertCase, ExpertPasses, Pass, numbers_of
from benchmarks.calibrate.windows import Effort, agreed_calls, longest_of, seconds_of, timed, warm_seconds
from moesys.config import BYTES_PER_GB, DType
from moesys.lab.ranks.torchrun_ranks import rank_device
from moesys.overlap.comm.messages import Messages, exchange

if TYPE_CHECKING:
    from benchmarks.calibrate.fused_tiles import FusedTiles

# A rank sends at most so many bytes to a peer while it computes.
MOST_COPY_BYTES = 256 << 20
PING_PONGS = 1000


def expert_passes(
    cases: Sequence[ExpertCase], dtype: DType, effort: Effort, device_type: str
) -> list[dict[Pass, list[float]]]:
    """Seconds of each pass of each case, by window."""
    device = rank_device(device_type)
    numbers = numbers_of(cases, dtype, device)
    passes = [ExpertPasses(case, dtype, numbers) for case in cases]
    windows = timed([each.call(of) for each in passes for of in PASSES], effort, device)
    return [dict(zip(PASSES, windows[first:], strict=False)) for first in range(0, len(windows), len(PASSES))]


def memory_copies(num_bytes: int, effort: Effort, device_type: str) -> list[float]:
    """Seconds in which so many bytes are copied, by window: each is read once and written once."""
    device = rank_device(device_type)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return timed([lambda: target.copy_(source)], effort, device)[0]


def launches(effort: Effort, device_type: str) -> list[float]:
    """Seconds from one product of one element to the next, by window."""
    device = rank_device(device_type)
    one = torch.ones(1, 1, device=device)
    out = torch.empty_like(one)
    return timed([lambda: torch.mm(one, one, out=out)], effort, device)[0]


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
    case: ExpertCase, dtype: DType, bytes_per_s: float, effort: Effort, device_type: str
) -> BesideCopies:
    """``bytes_per_s``: what a rank is expected to send to each peer; it sends three windows' worth."""
    device, here = rank_device(device_type), dist.get_rank()
    work = ExpertPasses(case, dtype, numbers_of([case], dtype, device)).forward
    seconds = warm_seconds(work, device)
    calls = agreed_calls(seconds, effort)
    num_bytes = min(MOST_COPY_BYTES, max(1, int(3 * calls * longest_of(seconds) * bytes_per_s)))
    splits = [num_bytes if peer != here else 0 for peer in range(dist.get_world_size())]
    sent, received = (torch.ones(sum(splits), dtype=torch.uint8, device=device) for _ in range(2))
    _begin_exchange(sent, received, splits).wait()
    alone_s, beside_s = [], []
    for _ in range(effort.repeats):
        dist.barrier()
        alone = seconds_of(work, calls, device)
        dist.barrier()
        travelling = _begin_exchange(sent, received, splits)
        # So that somebody learns when it ends.
        travelling.get_future()
        beside = seconds_of(work, calls, device)
        travelled = not travelling.is_completed()
        travelling.wait()
        if travelled:
            alone_s.append(alone / calls)
            beside_s.append(beside / calls)
    return BesideCopies(alone_s, beside_s)


def flag_ping_pongs(pair: tuple[int, int], effort: Effort) -> list[float]:
    """Seconds from a flag's release on one GPU to its sight on another, by window; empty on ranks that only wait."""
    # Not at the top: it imports Triton, which a CPU need not have.
    from benchmarks.calibrate.ping_pong import PingPong

    assert dist.group.WORLD is not None
    device = rank_device("cuda")
    game = PingPong(dist.group.WORLD, pair, device)
    game.play(PING_PONGS)
    samples = []
    for _ in range(effort.repeats):
        dist.barrier()
        samples.append(seconds_of(lambda: game.play(PING_PONGS), 1, device) / (2 * PING_PONGS))
    return samples if dist.get_rank() in pair else []


def fused_tiles(size: tuple[int, int, int, int, int], dtype: DType, effort: Effort) -> FusedTiles:
    """Of a layer on each rank alone: ``size`` tokens, H, I, experts and choices of a token."""
    # Not at the top: it imports Triton.
    from benchmarks.calibrate import fused_tiles as on_one_rank
    from benchmarks.kernels.drawn_layer import Size

    return on_one_rank.fused_tiles(Size("calibrate", *size), dtype, effort, "cuda")


def gpu_facts() -> tuple[str, int, float]:
    """Name, multiprocessors and memory, 1e9 bytes, of this rank's GPU."""
    found = torch.cuda.get_device_properties(rank_device("cuda"))
    return found.name, found.multi_processor_count, found.total_memory / BYTES_PER_GB


# --- how --------------------------------------------------------------------------------------------------------------


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
        longest, before = longest_of(warm_seconds(works[size], device)), size
    return dict(zip(works, timed(list(works.values()), effort, device), strict=True))
