"""A MODEL of how long a compiled kernel takes on an H100, from its machine code and its launch. Never measured.

So that a GPU's first run has something to be compared with. It knows five things, each named with its source:

- products: a multiprocessor multiplies at a part of cuBLAS's rate on random data (``tile_space.FLOPS_PER_US``), or
  waits for operands through the L2 cache (``L2_BYTES_PER_US``), whichever takes longer in a step of the contraction;
- pipelines: loads of ``stages`` - 1 steps are on their way, so that no step takes less than that part of a latency;
- waves: persistent programs take tiles in turn, so that the last wave may be nearly empty. A group of n rows has
  n / rows + ½ row tiles;
- memory, by Little's law: bytes a second are bytes in flight over the latency. In flight are the loads that the machine
  code issues before it stores (``MachineCode.flight_bytes``), of as many programs as registers, threads and shared
  memory let reside on a multiprocessor;
- links, likewise: programs that pull rows of peers wait for them, and multiply nothing meanwhile.

What it leaves out: atomics, waits for peers that are behind, bank conflicts, clocks under a power limit other than
cuBLAS's, and that experts are not equally popular.

T tokens, H hidden, I expert width, U = 2·I, E experts, K choices, P = T·K rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moesys.kernels.experts.ahead_of_time import MOST_SHARED_BYTES, MachineCode
from moesys.kernels.experts.tile_config import NUM_REGISTERS, TileConfig
from moesys.kernels.experts.tile_space import (
    FLOPS_PER_US,
    L2_BYTES_PER_US,
    MULTIPROCESSORS,
    OPERAND_BYTES,
    START_US,
)

# Data sheet of the H100 SXM5: bfloat16 without sparsity, HBM3, NVLink 4 in one direction.
PEAK_FLOPS_PER_US, PEAK_BYTES_PER_US, LINK_BYTES_PER_US = 989.4e6, 3.35e6, 450e3
# Streams reach about nine tenths of a data sheet's memory: 4.3 of 4.8 TB/s were measured on an H200.
STREAMED = 0.9
# Of cuBLAS's rate. ASSUMED for loops whose warps fetch and multiply in turn: a review of this machine code says 65 to
# 75 %; MoMoE, whose loops are alike, reaches 55 to 60 % in whole layers (SonicMoE's figure 14). Where a warp of its own
# fetches, 564 of 584 TFLOP/s (facebookexperimental/triton, issue 1038).
OF_CUBLAS = {"pointers": 0.7, "tma": 0.7, "specialised": 0.96}
# Idle, a load takes 479 cycles (arXiv 2402.13499, at 1,755 MHz). ASSUMED: twice as long where memory is busy.
LATENCY_US = 2 * 479 / 1755
# ASSUMED, as nobody has published it of loads: ``bench calibrate`` plays ping-pong to find it.
LINK_LATENCY_US = 1.5
MOST_THREADS, MOST_PROGRAMS = 2048, 32
# Registers are given to warps in steps (CUDA's occupancy rules).
REGISTER_STEP, SYSTEM_SHARED_BYTES = 8, 1024


class Work(NamedTuple):
    """What an op must do, however: products, bytes of this GPU's memory, each operand once but for gathered rows, and
    bytes of peers.
    """

    flops: float
    memory_bytes: float
    link_bytes: float = 0.0

    @property
    def roofline_us(self) -> float:
        """By data sheets alone."""
        return max(
            self.flops / PEAK_FLOPS_PER_US,
            self.memory_bytes / PEAK_BYTES_PER_US,
            self.link_bytes / LINK_BYTES_PER_US,
        )


class Product(NamedTuple):
    """A grouped product as tiles see it: [rows, contraction] by [contraction, columns] in each of ``groups``.

    ``halves``: matrices that a tile has columns of; ``by_rows``: whether tiles' rows are tokens.
    """

    groups: int
    rows: float
    columns: int
    contraction: float
    halves: int = 1
    by_rows: bool = True
    out_bytes: int = 2


@dataclass(frozen=True)
class Expected:
    """Microseconds, by the model; ``fraction`` of what the data sheets allow."""

    us: float
    roofline_us: float

    @property
    def fraction(self) -> float:
        return self.roofline_us / self.us


def expected(
    work: Work, code: MachineCode, products: Sequence[Product], block: TileConfig | None, pulls: bool = False
) -> Expected:
    """Of one launch. What has no products streams. ``pulls``: rows of peers are waited for, by the programs that
    multiply; what is pushed is waited for by nobody.
    """
    if block is None:
        us = START_US + work.memory_bytes / memory_bytes_per_us(code)
    else:
        us = START_US + sum(product_us(product, block) for product in products)
        us += pulling_us(work.link_bytes, code) if pulls else 0.0
    us = max(us, work.link_bytes / LINK_BYTES_PER_US, work.memory_bytes / (STREAMED * PEAK_BYTES_PER_US))
    return Expected(us, work.roofline_us)


def resident_programs(code: MachineCode) -> int:
    """Of a multiprocessor, by registers, threads and shared memory."""
    registers = math.ceil(code.registers / REGISTER_STEP) * REGISTER_STEP * code.threads
    shared = code.shared_bytes + SYSTEM_SHARED_BYTES
    return max(
        1,
        min(
            NUM_REGISTERS // registers,
            MOST_THREADS // code.threads,
            (MOST_SHARED_BYTES + SYSTEM_SHARED_BYTES) // shared,
            MOST_PROGRAMS,
        ),
    )


def memory_bytes_per_us(code: MachineCode) -> float:
    """By Little's law, at most what streams reach."""
    in_flight = resident_programs(code) * code.threads * _flight_bytes(code)
    return min(MULTIPROCESSORS * in_flight / LATENCY_US, STREAMED * PEAK_BYTES_PER_US)


def pulling_us(link_bytes: float, code: MachineCode) -> float:
    """That all multiprocessors spend with rows of peers on their way, one program each."""
    if not link_bytes:
        return 0.0
    return link_bytes * LINK_LATENCY_US / (MULTIPROCESSORS * code.threads * _flight_bytes(code))


def product_us(product: Product, block: TileConfig) -> float:
    """Waves of tiles by persistent programs, one a multiprocessor."""
    rows = product.rows / block.rows + 0.5 if product.by_rows else math.ceil(product.rows / block.rows)
    tiles = product.groups * max(1.0, rows) * math.ceil(product.columns / block.columns)
    columns = product.halves * block.columns
    step_us = max(
        2 * block.rows * columns * block.contraction / (OF_CUBLAS[block.operands] * FLOPS_PER_US),
        (block.rows + columns) * block.contraction * OPERAND_BYTES / L2_BYTES_PER_US,
        LATENCY_US / max(1, block.stages - 1),
    )
    steps = math.ceil(product.contraction / block.contraction)
    store_us = block.rows * columns * product.out_bytes / L2_BYTES_PER_US
    return math.ceil(tiles / MULTIPROCESSORS) * (steps * step_us + store_us + LATENCY_US)


def _flight_bytes(code: MachineCode) -> int:
    """Of a thread: at least one load of what it loads widest."""
    return max(code.flight_bytes, *code.load_bytes, 1)
