"""How long each grouped GEMM of a layer takes on this GPU: alone, on random data, under an even and a skewed routing.

T tokens, K choices of each, P = T·K rows, E experts, H hidden, I expert width, U = 2·I where gated, else I.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from statistics import median

import torch
import triton
from torch import Tensor

from benchmarks.kernels.ahead_of_time import compiling
from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig
from moesys.kernels.experts.tiles import RowGroups, Tiles, groups_by_size, tile_table
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient
from moesys.kernels.routing import SortedRouting, route

REPEATS = 9
# More than the L2 cache of any GPU so far, written before every run.
FLUSH_BYTES = 256 << 20
# The share of choices of expert e falls as 1 / (e + 1): Zipf's law.
SKEW = 1.0
META = torch.device("meta")


class Operands:
    """All that the five GEMMs take, random, or without values on the meta device; experts are alike at first."""

    def __init__(self, shape: ShapeClass, device: torch.device) -> None:
        H, I, E, K = shape.hidden, shape.width, shape.experts, shape.top_k
        T = max(1, shape.rows_of_expert * E // K)
        U = 2 * I if GATED[shape.activation] else I
        self.shape, self.device, self.num_rows = shape, device, T * K
        dtype = getattr(torch, shape.dtype)

        def normal(*sizes: int, std: float = 1.0) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device).normal_(std=std)

        self.x_TH, self.a_PI, self.h_PU = normal(T, H), normal(T * K, I), normal(T * K, U)
        self.gate_up_EUH, self.down_EHI = normal(E, U, H, std=H**-0.5), normal(E, H, I, std=I**-0.5)
        self.weight_TK = torch.ones(T, K, device=device)
        if device == META:
            sizes = ((T * K,), (T, K), (E + 1,))
            self.routing = SortedRouting(*(torch.empty(size, dtype=torch.int32, device=META) for size in sizes))
            self.order_E = torch.empty(E, dtype=torch.int32, device=META)
        else:
            self._route(0.0)

    def skewed(self) -> Operands:
        """Returns the same tensors, which may fill a third of a GPU's memory, under a routing of large and small
        experts.
        """
        other = copy(self)
        other._route(SKEW)
        return other

    def _route(self, skew: float) -> None:
        E, (T, K) = self.shape.experts, self.weight_TK.shape
        share_E = 1 / torch.arange(1, E + 1, device=self.device) ** skew
        self.routing = route(torch.multinomial(share_E.expand(T, E), min(K, E)), E)
        self.order_E = groups_by_size(self.routing.first_G1)

    def tiles(self, block: TileConfig) -> Tiles:
        """Returns the tiles of the routing; tables without values on the meta device."""
        if self.device != META:
            return tile_table(self.routing.first_G1, self.num_rows, block.rows)
        most = triton.cdiv(self.num_rows, block.rows) + self.shape.experts
        group_M, row_M, count_1 = (torch.empty(n, dtype=torch.int32, device=META) for n in (most, most, 1))
        return Tiles(group_M, row_M, count_1, block.rows)

    def launch(self, op: str, block: TileConfig, tiles: Tiles) -> None:
        """Launches ``op`` once; "weight_gradient" computes the gradients of both matrices."""
        routing = self.routing
        first, K, activation = routing.first_G1, self.shape.top_k, self.shape.activation
        groups = OrderedGroups(routing.entry_P, first, self.order_E)
        match op:
            case "up":
                up(self.x_TH, self.gate_up_EUH, routing, tiles, K, activation, block)
            case "down":
                grouped_gemm(self.a_PI, self.down_EHI, first, tiles, block, transposed=True)
            case "activation_gradient":
                given = (self.x_TH, self.down_EHI, self.h_PU, self.weight_TK, routing)
                activation_gradient(*given, RowGroups(first, tiles), activation, block)
            case "input_gradient":
                grouped_gemm(self.h_PU, self.gate_up_EUH, first, tiles, block, transposed=False)
            case "weight_gradient":
                weight_gradient(self.x_TH, self.a_PI, groups, K, "left", block)
                weight_gradient(self.h_PU, self.x_TH, groups, K, "right", block)


class GemmTimer:
    """``tile_tuning.Timer`` by events of a CUDA device: the sum of medians of both routings.

    Candidates are interleaved, the L2 cache is flushed before each run, and what spills or does not compile is dropped
    before it is run.
    """

    def __init__(self, shape: ShapeClass, device: torch.device, tell: Callable[[str], None] = lambda _: None) -> None:
        even = Operands(shape, device)
        self._routings = [even, even.skewed()]
        self._meta = Operands(shape, META)
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._tell = tell

    def __call__(self, op: str, blocks: Sequence[TileConfig]) -> list[float | None]:
        self._tell(op)
        taken_ms: list[float | None] = [0.0 if self._compiles(op, block) else None for block in blocks]
        for operands in self._routings:
            running = [place for place, ms in enumerate(taken_ms) if ms is not None]
            samples_ms = self._time(operands, op, [blocks[place] for place in running])
            for place, samples in zip(running, samples_ms, strict=True):
                before = taken_ms[place]
                assert before is not None
                taken_ms[place] = before + median(samples) if samples else None
        return taken_ms

    def _compiles(self, op: str, block: TileConfig) -> bool:
        """Returns whether all kernels of ``op`` compile and none spills."""
        try:
            with warnings.catch_warnings(), compiling(triton.runtime.driver.active.get_current_target()) as found:
                warnings.simplefilter("ignore", UserWarning)
                self._meta.launch(op, block, self._meta.tiles(block))
        except Exception as error:
            # Triton raises whatever the pass that failed raises.
            logging.getLogger(__name__).warning("%s: %s is dropped, as it does not compile: %r", op, block, error)
            return False
        return not any(code.spills or code.stack_bytes for code in found)

    def _time(self, operands: Operands, op: str, blocks: Sequence[TileConfig]) -> list[list[float]]:
        """Returns the milliseconds of each block in each repetition after the first; none for a block that does not
        run.
        """
        samples_ms: list[list[float]] = [[] for _ in blocks]
        tiles = [operands.tiles(block) for block in blocks]
        failed: set[int] = set()
        for repetition in range(REPEATS + 1):
            for place, block in enumerate(blocks):
                if place in failed:
                    continue
                self._flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                try:
                    start.record()
                    operands.launch(op, block, tiles[place])
                    end.record()
                    end.synchronize()
                except (RuntimeError, triton.runtime.errors.TritonError):
                    failed.add(place)
                    samples_ms[place].clear()
                    continue
                if repetition:
                    samples_ms[place].append(start.elapsed_time(end))
        return samples_ms
