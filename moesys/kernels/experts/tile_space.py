"""How a grouped GEMM may be cut on a Hopper GPU, likely fast ways first: what fits, ranked by a small model.

Contraction is fixed by the dtype, and no tile is narrower than a partial sum of the routing weight's gradient, so that
no choice changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.tile_config import (
    OPERAND_BYTES,
    SPECIALISED_WARPS,
    Operands,
    ShapeClass,
    TileConfig,
    TileConfigs,
)

OPS = ("up", "down", "activation_gradient", "input_gradient", "weight_gradient")
# Of each way that operands come, which the model tells apart least; so at most twelve.
MOST_OF_A_WAY = 4
# float32 has no tensor-core product here, and its operands take twice the shared memory.
SINGLE = TileConfig(rows=64, columns=64, contraction=32, warps=8, stages=3)

CONTRACTION = 64
MOST_SHARED_BYTES = 232_448
# An epilogue and barriers take these bytes beside the stages (``python -m benchmarks kernels --aot``).
EPILOGUE_BYTES = 33 << 10
# Of a thread's 255 registers, as many sums leave room for addresses and the epilogue; two groups of warps multiply.
MOST_SUMS = 128
THREADS_THAT_MULTIPLY = 256

# Compute capability, times ten, of the GPUs whose machine code was read for that. Later ones hold sums elsewhere, and
# what Triton makes of a weight gradient's spills with as many.
HOPPER = 90

# An H100's, as a tuner's model needs them: a multiprocessor's products and what it reads through the L2 cache.
MULTIPROCESSORS = 132
FLOPS_PER_US = 6.0e6
L2_BYTES_PER_US = 8.0e4
# All of memory, for a copy in expert order.
MEMORY_BYTES_PER_US = 3.0e6
START_US = 1.0


class Gemm(NamedTuple):
    """One product of every expert: [rows, contraction] by [contraction, columns]; ``halves``: the matrices that a tile
    of columns has parts of; ``by_rows``: whether rows, and not the contraction, are the expert's tokens.
    """

    rows: int
    columns: int
    contraction: int
    halves: int = 1
    by_rows: bool = True


def gemm_of(op: str, shape: ShapeClass) -> Gemm:
    """Of ``op``, one of ``OPS``; the larger of both weight gradients."""
    halves = 2 if GATED[shape.activation] else 1
    H, I, n = shape.hidden, shape.width, shape.rows_of_expert
    match op:
        case "up":
            return Gemm(n, I, H, halves)
        case "down":
            return Gemm(n, H, I)
        case "activation_gradient":
            return Gemm(n, I, H)
        case "input_gradient":
            return Gemm(n, H, halves * I)
        case "weight_gradient":
            return Gemm(halves * I, H, n, by_rows=False)
    raise ValueError(f"op={op!r} is not known; use one of {', '.join(OPS)}")


def candidates(
    op: str, shape: ShapeClass, multiprocessors: int = MULTIPROCESSORS, capability: int = HOPPER
) -> list[TileConfig]:
    """Returns configurations that fit, at most ``MOST_OF_A_WAY`` of each way, ordered by ``model_us``; of equal ones
    pointers first.
    """
    if shape.dtype == "float32":
        return [SINGLE]
    gemm = gemm_of(op, shape)
    found: list[TileConfig] = []
    for block in sorted(
        (block for block in _all_blocks(op) if _fits(block, op, shape.activation, gemm, capability)),
        key=lambda block: model_us(block, gemm, shape, multiprocessors),
    ):
        if sum(other.operands == block.operands for other in found) < MOST_OF_A_WAY:
            found.append(block)
    return found


# Every forward and backward of an untuned layer asks for its blocks.
@lru_cache(maxsize=1024)
def blocks_for(shape: ShapeClass, multiprocessors: int = MULTIPROCESSORS, capability: int = HOPPER) -> TileConfigs:
    """The first candidate of each op: what is used where nothing was tuned."""
    return TileConfigs(**{op: candidates(op, shape, multiprocessors, capability)[0] for op in OPS})


def _all_blocks(op: str) -> Sequence[TileConfig]:
    ways: tuple[Operands, ...] = ("pointers", "tma", "specialised") if op != "weight_gradient" else ("pointers",)
    found = []
    for operands in ways:
        for rows, columns in ((128, 256), (128, 128), (256, 128), (128, 64), (64, 256), (64, 128)):
            if operands == "specialised" and rows < 128:
                # Each of the two groups of warps needs 64 rows.
                continue
            warps = SPECIALISED_WARPS if operands == "specialised" else 8
            for stages in (4, 3):
                found.append(TileConfig(rows, columns, CONTRACTION, warps, stages, operands=operands))
    return found


def _fits(block: TileConfig, op: str, activation: str, gemm: Gemm, capability: int) -> bool:
    """Shared memory, registers with what the epilogue needs, and no tile wider than the padded matrix."""
    columns = gemm.halves * block.columns
    shared_bytes = block.stages * (block.rows + columns) * CONTRACTION * OPERAND_BYTES + EPILOGUE_BYTES
    sums = block.rows * columns // THREADS_THAT_MULTIPLY
    too_wide = block.columns > 2 * max(gemm.columns, 64) or block.rows > 2 * max(gemm.rows, 64)
    return shared_bytes <= MOST_SHARED_BYTES and sums <= _most_sums(block, op, activation, capability) and not too_wide


def _most_sums(block: TileConfig, op: str, activation: str, capability: int) -> int:
    """Sums of a thread beside which the epilogue fits, as read off compiled kernels."""
    if op == "weight_gradient" and capability > HOPPER:
        return MOST_SUMS // 2
    fused = op in ("up", "activation_gradient")
    if fused and activation == "gelu":
        return MOST_SUMS // 2
    if fused and (block.rows == 256 or (op == "activation_gradient" and block.operands == "specialised")):
        return MOST_SUMS // 2
    return MOST_SUMS


def model_us(block: TileConfig, gemm: Gemm, shape: ShapeClass, multiprocessors: int) -> float:
    """Microseconds of one GEMM over all experts: waves of tiles, each as long as its products or its reads.

    Experts' rows are taken as even but for where they end: a group of n rows has n / rows + ½ tiles.
    """
    row_tiles = gemm.rows / block.rows + 0.5 if gemm.by_rows else math.ceil(gemm.rows / block.rows)
    tiles = shape.experts * max(1.0, row_tiles) * math.ceil(gemm.columns / block.columns)
    steps = math.ceil(gemm.contraction / CONTRACTION)
    columns = gemm.halves * block.columns
    step_flops = 2 * block.rows * columns * CONTRACTION
    step_bytes = (block.rows + columns) * CONTRACTION * OPERAND_BYTES
    # A deeper pipeline hides what is left of the latency; the first fill is not hidden.
    step_us = max(step_flops / FLOPS_PER_US, step_bytes / L2_BYTES_PER_US)
    store_us = block.rows * columns * OPERAND_BYTES / L2_BYTES_PER_US
    fill_us = (1 + 1 / block.stages) * START_US
    copy_us = 0.0
    if block.operands == "specialised" and gemm.by_rows and gemm.contraction == shape.hidden:
        copy_us = 2 * shape.experts * gemm.rows * shape.hidden * OPERAND_BYTES / MEMORY_BYTES_PER_US
    return math.ceil(tiles / multiprocessors) * (steps * step_us + store_us + fill_us) + copy_us
