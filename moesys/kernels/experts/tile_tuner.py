"""Which tile configurations a grouped GEMM may have, and which one a layer uses.

``candidates`` lists what fits a Hopper GPU, likely fast ones first, ranked by a small model. A layer uses the first
that there is of: blocks that its caller gives; the file that ``MOESYS_BLOCKS`` names; what ``python -m benchmarks
kernels --tune`` has found for the shape class on such a GPU with these versions, and kept on disk; the model's choice.
Nothing is tuned in a step of training.

Contraction is fixed by the dtype, and no tile is narrower than a partial sum of the routing weight's gradient, so that
no choice changes a bit.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, get_args

import pydantic_core
import torch
import triton

from moesys.kernels.cpu.row_invariant_gemm import CACHE, cache_folder
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
# Candidates for each way that operands come, and for pairs of programs, which the model distinguishes least; at most
# sixteen in all.
MOST_OF_A_WAY = 4
# float32 has no tensor-core product here, and its operands take twice the shared memory.
SINGLE = TileConfig(rows=64, columns=64, contraction=32, warps=8, stages=3)

CONTRACTION = 64
MOST_SHARED_BYTES = 232_448
# An epilogue and barriers take these bytes of a multiprocessor (``python -m benchmarks kernels --aot``).
EPILOGUE_BYTES = 33 << 10
# This many sums leave room for addresses and the epilogue in a thread's 255 registers; two groups of warps multiply.
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
PINNED = "MOESYS_BLOCKS"
OLD_TRITON = triton.__version__.startswith("3.6.")
# The interpreter's time goes by elements; small tiles waste few.
INTERPRETED = TileConfig(rows=32, columns=32, contraction=32)


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
    """Returns the GEMM of ``op``, one of ``OPS``; the larger one of both weight gradients."""
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
    """Returns configurations that fit, at most ``MOST_OF_A_WAY`` of each way, ordered by ``model_us``, of equal ones
    pointers first; and then those of which two programs share a multiprocessor, about which the model knows least.
    """
    if shape.dtype == "float32":
        return [SINGLE]
    gemm = gemm_of(op, shape)
    found: list[TileConfig] = []
    for block in sorted(
        (block for block in _all_blocks(op, shape.activation) if _fits(block, op, shape.activation, gemm, capability)),
        key=lambda block: (block.resident, model_us(block, gemm, shape, multiprocessors)),
    ):
        if sum((other.operands, other.resident) == (block.operands, block.resident) for other in found) < MOST_OF_A_WAY:
            found.append(block)
    return found


# Every forward and backward of an untuned layer asks for its blocks.
@lru_cache(maxsize=1024)
def blocks_for(shape: ShapeClass, multiprocessors: int = MULTIPROCESSORS, capability: int = HOPPER) -> TileConfigs:
    """Returns the first candidate of each op, which is used if nothing was tuned."""
    return TileConfigs(**{op: candidates(op, shape, multiprocessors, capability)[0] for op in OPS})


def refused_ways(op: str, activation: str) -> dict[Operands, str]:
    """Returns the ways of operands that no candidate of ``op`` has, and why."""
    if op == "weight_gradient":
        gathers = "it gathers one side, and descriptors do not gather rows"
        return {"tma": gathers, "specialised": gathers}
    splits_tile = op == "activation_gradient" or (op == "up" and GATED[activation])
    if OLD_TRITON and splits_tile:
        return {"specialised": "Triton 3.6 does not specialise warps around an epilogue that splits a tile"}
    return {}


def _all_blocks(op: str, activation: str) -> Sequence[TileConfig]:
    found: list[TileConfig] = []
    for operands in get_args(Operands):
        if operands in refused_ways(op, activation):
            continue
        for rows, columns in ((128, 256), (128, 128), (256, 128), (128, 64), (64, 256), (64, 128)):
            if operands == "specialised" and rows < 128:
                # Each of the two groups of warps needs 64 rows.
                continue
            warps = SPECIALISED_WARPS if operands == "specialised" else 8
            for stages in (4, 3):
                found.append(TileConfig(rows, columns, CONTRACTION, warps, stages, operands=operands))
    pairs = ((128, 128), (128, 64), (64, 128))
    return found + [TileConfig(*pair, CONTRACTION, warps=4, stages=3, resident=2) for pair in pairs]


def _fits(block: TileConfig, op: str, activation: str, gemm: Gemm, capability: int) -> bool:
    """Returns whether shared memory and registers suffice, and no tile is wider than the padded matrix."""
    columns = gemm.halves * block.columns
    stage_bytes = block.resident * (block.rows + columns) * CONTRACTION * OPERAND_BYTES
    shared_bytes = block.stages * stage_bytes + EPILOGUE_BYTES
    sums = block.rows * columns * block.resident // THREADS_THAT_MULTIPLY
    # In a flat loop with that epilogue, addresses of a fourth stage do not fit in registers beside so many sums.
    too_deep = op == "activation_gradient" and sums == MOST_SUMS and block.stages > 3
    too_wide = block.columns > 2 * max(gemm.columns, 64) or block.rows > 2 * max(gemm.rows, 64)
    fits = shared_bytes <= MOST_SHARED_BYTES and sums <= _most_sums(block, op, activation, capability)
    return fits and not (too_deep or too_wide)


def _most_sums(block: TileConfig, op: str, activation: str, capability: int) -> int:
    """Returns how many sums a thread may hold so that the epilogue still fits, as read off compiled kernels."""
    if op == "weight_gradient" and capability > HOPPER:
        return MOST_SUMS // 2
    fused = op in ("up", "activation_gradient")
    if fused and activation == "gelu":
        return MOST_SUMS // 2
    splits = op == "activation_gradient" and (block.operands == "specialised" or block.resident > 1)
    if fused and (block.rows == 256 or splits):
        return MOST_SUMS // 2
    return MOST_SUMS


def model_us(block: TileConfig, gemm: Gemm, shape: ShapeClass, multiprocessors: int) -> float:
    """Returns the microseconds of one GEMM over all experts: waves of tiles, each as long as its products or its reads.

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
    waves = math.ceil(tiles / (multiprocessors * block.resident))
    return waves * (block.resident * steps * step_us + store_us + fill_us) + copy_us


@dataclass(frozen=True)
class Gpu:
    """The kind of GPU for which a tuned choice holds, besides versions. ``capability``: as in ``sm_90``."""

    name: str = "H100"
    multiprocessors: int = MULTIPROCESSORS
    capability: int = HOPPER

    @staticmethod
    def of(device: torch.device) -> Gpu:
        """Returns the GPU of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return Gpu(properties.name, properties.multi_processor_count, capability_of(device))


def capability_of(device: torch.device) -> int:
    """Returns the compute capability, 90 for ``sm_90``; that of a Hopper GPU if there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def blocks_of(shape: ShapeClass, device: torch.device, capability: int = HOPPER) -> TileConfigs:
    """Returns the blocks of a layer whose caller gives none. ``capability``: of the GPU that ``device`` stands for, if
    it is none.

    Raises ValueError where ``MOESYS_BLOCKS`` names a file without blocks, or with some that would change bits.
    """
    if pinned := os.environ.get(PINNED):
        blocks = read_blocks(Path(pinned))
        blocks.require_warpgroups(getattr(torch, shape.dtype), device)
        return blocks
    if device.type == "cpu":
        return TileConfigs.all_of(INTERPRETED)
    if device.type != "cuda":
        return blocks_for(shape, capability=capability)
    return blocks_on_gpu(shape, device, os.environ.get(CACHE))


# The host asks in every forward and backward, before it launches anything, and files take longer than a launch.
@lru_cache(maxsize=1024)
def blocks_on_gpu(shape: ShapeClass, device: torch.device, folder: str | None) -> TileConfigs:
    """Returns what was tuned, and is kept in ``folder`` if one is named, else the model's choice."""
    gpu = Gpu.of(device)
    return _cached(gpu).get(shape.key) or blocks_for(shape, gpu.multiprocessors, gpu.capability)


def read_blocks(path: Path) -> TileConfigs:
    """Returns configurations from a JSON file. Raises a ValueError that names it."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file; name a JSON file")
        return TileConfigs.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{PINNED}={path}: {error}") from None


# --- on disk ----------------------------------------------------------------------------------------------------


def cache_file(gpu: Gpu) -> Path:
    """Returns a file in the folder that ``MOESYS_CACHE`` names, else in the user's cache: one file for a GPU, its
    number of multiprocessors and the versions of torch, Triton and moesys. Raises OSError if neither folder is known.
    """
    name = f"blocks-{gpu.name}-{gpu.multiprocessors}-{_versions()}"
    return cache_folder() / (re.sub(r"[^\w.+-]", "_", name) + ".json")


@cache
def _versions() -> str:
    """Returns the versions, read from disk once, because every forward and backward asks for blocks."""
    try:
        moesys = version("moesys")
    except PackageNotFoundError:
        moesys = "-not-installed"
    return f"torch{torch.__version__}-triton{triton.__version__}-moesys{moesys}"


def _cached(gpu: Gpu) -> Mapping[str, TileConfigs]:
    try:
        path = cache_file(gpu)
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int) -> Mapping[str, TileConfigs]:
    return kept_blocks(path)


def kept_blocks(path: Path) -> Mapping[str, TileConfigs]:
    """Returns configurations by shape class; none if the file is damaged, which the next tuning replaces."""
    try:
        found = pydantic_core.from_json(path.read_bytes())
        return {key: TileConfigs.from_json(json.dumps(blocks)) for key, blocks in found.items()}
    except (AttributeError, OSError, ValueError):
        return {}
