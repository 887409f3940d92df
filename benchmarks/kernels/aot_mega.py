"""MegaKernels as a Hopper GPU would run them, compiled here: every point of their search space that is other code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.kernels.aot import Compiled, Size
from moesys.config import MegaKernel
from moesys.kernels.experts.activation_gradient import SUM_COLUMNS
from moesys.kernels.experts.ahead_of_time import HOPPER, compiling
from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.tiles import Tiles
from moesys.kernels.mega.arguments import MegaMemory, MegaRows
from moesys.kernels.mega.exchange import Exchange, Flags, OrderedTiles, Replicas, most_flags, regions
from moesys.kernels.mega.mega_combine import WeightGradients, down_combine, input_gradient_combine
from moesys.kernels.mega.mega_dispatch import dispatch_activation_gradient, dispatch_up
from moesys.kernels.mega.point import FLIGHT_BYTES, blocks_at, fuses
from moesys.kernels.symmetric.heap import Heap

NUM_RANKS = 8
ACTIVATION = "swiglu"
# Points that differ in code; shares and orders of tiles are numbers.
POINTS: Mapping[str, MegaKernel] = MappingProxyType(
    {
        "fused": MegaKernel(),
        "apart": MegaKernel(
            combine_share=0.25, reduce_share=0.25, deduplicate=True, granularity="expert", keep_x=False
        ),
        "unfused": MegaKernel(fused="none"),
        "no wgrad": MegaKernel(overlap_weight_gradients=False),
    }
)
NUM_MEGA_OPS = 13


class Part(NamedTuple):
    """A kernel that an op launches: the block of its product or None, whether it copies rows between ranks, and bytes
    of a thread that are on their way while it copies from memory.
    """

    block: TileConfig | None
    moves_rows: bool
    flight_bytes: int = 0


class Launched(NamedTuple):
    """An op at a point."""

    op: str
    parts: tuple[Part, ...]
    run: Callable[[], object]


def compile_mega(
    size: Size,
    dtype: torch.dtype,
    tell: Callable[[str], None],
    points: Iterable[str] = POINTS,
    target: GPUTarget = HOPPER,
) -> list[Compiled]:
    """Both MegaKernels, forward and backward, on one of ``NUM_RANKS`` ranks, each of which has the size's tokens."""
    found = []
    for name in points:
        for op, parts, run in _launched(size, dtype, POINTS[name], target.arch):
            tell(f"{size.name}: {name} {op}")
            with compiling(target) as compiled:
                run()
            for part, code in zip(parts, compiled, strict=True):
                found.append(Compiled(size.name, f"{name} {op}", part.block, code, part.moves_rows, part.flight_bytes))
    return found


def _launched(size: Size, dtype: torch.dtype, point: MegaKernel, capability: int) -> Iterator[Launched]:
    T, H, I, E, K = size[1:]
    # As many rows come as go, to one replica more than this rank's part of the experts.
    N, G = T * K, -(-E // NUM_RANKS) + 1
    blocks = blocks_at(point, ACTIVATION, dtype, torch.device("meta"), capability)
    back, into, outer = blocks.activation_gradient, blocks.input_gradient, blocks.weight_gradient
    memory, rows = _memory(size, dtype, G, blocks.down), _rows(size, N, G, blocks.down, point)

    meta = partial(torch.empty, dtype=dtype, device="meta")
    x_NH, h_NU, a_NI, gate_up, down = meta(N, H), meta(N, 2 * I), meta(N, I), meta(G, 2 * I, H), meta(G, H, I)
    weight_TK, dgate_up, ddown = (meta(*shape, dtype=torch.float32) for shape in ((T, K), gate_up.shape, down.shape))
    partial_NS = meta(N, triton.cdiv(I, min(SUM_COLUMNS, back.columns)), dtype=torch.float32)
    gradients = WeightGradients(h_NU, x_NH, dgate_up, x_NH, a_NI, ddown) if point.overlap_weight_gradients else None

    def dispatching(block: TileConfig) -> tuple[Part, ...]:
        if fuses(point, "dispatch"):
            return (Part(block, True, FLIGHT_BYTES),)
        return Part(None, True, FLIGHT_BYTES), Part(block, False)

    def combining(block: TileConfig, beside_sums: TileConfig | None) -> tuple[Part, ...]:
        if fuses(point, "combine"):
            return (Part(block, True, FLIGHT_BYTES if point.combine_share else 0),)
        return Part(block, False), Part(None, True, FLIGHT_BYTES), Part(beside_sums, True)

    if point.overlap_weight_gradients:
        yield Launched(
            "up",
            dispatching(blocks.up),
            lambda: dispatch_up(memory, rows, gate_up, ACTIVATION, blocks.up, point),
        )
        yield Launched(
            "activation_gradient",
            dispatching(back),
            lambda: dispatch_activation_gradient(memory, rows, down, h_NU, ACTIVATION, back, point, not point.keep_x),
        )
        yield Launched(
            "down",
            combining(blocks.down, None),
            lambda: down_combine(memory, rows, a_NI, down, weight_TK, blocks.down, point),
        )
    # Without weight gradients this alone is other code.
    yield Launched(
        "input_gradient",
        combining(into, outer if gradients else None),
        lambda: input_gradient_combine(memory, rows, h_NU, gate_up, partial_NS, gradients, blocks, point),
    )


def _memory(size: Size, dtype: torch.dtype, num_groups: int, block: TileConfig) -> MegaMemory:
    column_tiles = triton.cdiv(size.H, block.columns)
    flags = most_flags(size.T, size.K, num_groups * NUM_RANKS, block.rows, column_tiles)
    return MegaMemory(Heap.virtual(regions(size.T, size.K, size.H, dtype, NUM_RANKS, flags), NUM_RANKS, "meta")[0])


def _rows(size: Size, num_rows: int, num_groups: int, block: TileConfig, point: MegaKernel) -> MegaRows:
    meta = partial(torch.empty, dtype=torch.int32, device="meta")
    T, K, N, G, R = size.T, size.K, num_rows, num_groups, NUM_RANKS
    M, P, B = triton.cdiv(N, block.rows) + G, G * R, G * R + 1
    replicas = Replicas(*(meta(n, dtype=torch.int64) for n in (P, P, G)))
    plan, lists = meta(R, P, dtype=torch.int64), meta(R, P, dtype=torch.int64)
    table = Exchange(replicas, plan, lists, meta(G + 1), meta(B), meta(B), meta(N), meta(N), meta(T, K), meta(T, K))
    number_G, number_M = meta(G, dtype=torch.int64), meta(M, dtype=torch.int64)
    tiles = OrderedTiles(Tiles(meta(M), meta(M), meta(1), block.rows), number_G, meta(M), number_M)
    first_N = meta(N) if point.deduplicate else None
    return MegaRows(table, tiles, Flags(meta(B), meta(T, K)), meta(N), first_N, first_N, meta(G), K)
