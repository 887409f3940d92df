"""Timings of MegaKernels and flags on GPUs, and in Triton's interpreter in tests. Importing this module imports Triton.

T tokens, H hidden, I expert width, E experts, K choices per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import triton.language as tl

from moesys.config import DType, ModelShape
from moesys.config.overlap import MegaKernel
from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import RANK, TIMEOUT_S, Heap, Region, at
from moesys.kernels.symmetric.signals import PUBLISH, raise_flag, raise_if_given_up, wait
from moesys.lab.calibrate.timings import Effort, ExpertCase, Pool, layers_of, one_rank_plan, seconds_of, timed
from moesys.lab.ranks.process import rank_device
from moesys.overlap.executor import ExpertGradients
from moesys.overlap.mega_executor import MegaHeaps, plan_mega

POINTS = {"apart": MegaKernel(fused="none", overlap_weight_gradients=False), "fused": MegaKernel()}
PING_PONGS = 1000


def fused_tiles(
    size: tuple[int, int, int, int, int], dtype: DType, effort: Effort, device_type: str
) -> dict[str, list[float]]:
    """Measures forward and backward of one layer on each rank alone, by a MegaKernel ("fused") and by the same kernels
    one after another ("apart"). No rows travel, so the two differ by the rate of their tiles.

    ``size``: T, H, I, E and K. Raises ``PeerTimeoutError`` if a kernel waits in vain.
    """
    T, H, I, E, K = size
    device = rank_device(device_type)
    model = ModelShape(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K, dtype=dtype)
    case = ExpertCase((T * K // E,) * E, H, I)
    pool = Pool([case], dtype, device)
    held, *_ = layers_of(case, pool.weights_N)
    (written,) = layers_of(case, pool.gradients_N)
    gradients = ExpertGradients(*written.stacked()[:2])
    x_TH, dy_TH = (of.detach() for of in pool.draw(2, T, H))
    weight_TK, expert_TK = torch.rand(T, K, device=device), torch.rand(T, E, device=device).topk(K).indices
    plan = one_rank_plan(expert_TK.flatten().bincount(minlength=E).tolist())
    shared = [MegaHeaps(None, device, TIMEOUT_S) for _ in POINTS]

    def step(point: MegaKernel, heaps: MegaHeaps) -> Callable[[], object]:
        executor = plan_mega(point, model, heaps, expert_TK, plan, 0, T)

        def both_ways() -> None:
            _, saved = executor.forward(x_TH, weight_TK, lambda: held)
            executor.backward(dy_TH, saved, lambda: held, gradients)

        return both_ways

    windows = timed([step(*of) for of in zip(POINTS.values(), shared, strict=True)], effort, device)
    for heaps in shared:
        heaps.check()
    return dict(zip(POINTS, windows, strict=True))


def flag_ping_pongs(pair: tuple[int, int], effort: Effort, device_type: str) -> list[float]:
    """Measures the seconds from the release of a flag on one rank of the pair until the other one sees it. Returns an
    empty list on other ranks.
    """
    device = rank_device(device_type)
    heap = Heap.of_group({"flag": Region((1,), torch.int32)}, dist.group.WORLD, device)
    samples = []
    for window in range(effort.repeats + 1):
        play = partial(ping_pong, heap, pair, 1 + window * PING_PONGS, PING_PONGS)
        dist.barrier()
        samples.append(seconds_of(play, 1, device) / (2 * PING_PONGS))
    # The first window is warm-up.
    return samples[1:] if heap.rank in pair else []


def ping_pong(heap: Heap, pair: tuple[int, int], epoch: int, rounds: int) -> None:
    """Raises flags in turn on the ranks of the pair, each in one program. A round is two flags, there and back; their
    epochs start at ``epoch``. Returns at once on other ranks.

    Raises ``PeerTimeoutError`` if the peer does not play.
    """
    if heap.rank in pair:
        begins = heap.rank == pair[0]
        _ping_pong[(1,)](heap.world, heap.offset("flag"), pair[begins], int(begins), epoch, rounds, num_warps=1)
        raise_if_given_up(heap)


@kernel(do_not_specialize=["peer", "begins", "epoch", "rounds"])
def _ping_pong(world, flag, peer, begins, epoch, rounds):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, 1)
    mine = at(world, tl.load(world + RANK), flag, tl.int32) + lane
    theirs = at(world, peer, flag, tl.int32) + lane
    for turn in range(rounds):
        if begins != 0:
            raise_flag(theirs, epoch + turn)
        wait(mine, lane < 1, epoch + turn, peer + lane, lane - 1, lane, PUBLISH, world)
        if begins == 0:
            raise_flag(theirs, epoch + turn)
