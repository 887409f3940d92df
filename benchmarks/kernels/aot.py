"""Kernels as a Hopper GPU would run them, compiled here: registers, spills, shared memory, tensor-core products."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from benchmarks.harness.names import chosen
from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.ahead_of_time import HOPPER, MOST_SHARED_BYTES, MachineCode, compiling
from moesys.kernels.experts.block_gradient import RowBlocks, block_gradient, cut_to_fit
from moesys.kernels.experts.combine import combine
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.experts.tiles import RowGroups, Tiles, groups_by_size, tile_table
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, weight_gradient
from moesys.kernels.mega.exchange import regions
from moesys.kernels.routing.routing import Routing, route
from moesys.kernels.split.blocks import split_by_blocks
from moesys.kernels.split.chunks import OwnReplicas, arrived_rows, cut, sent_rows
from moesys.kernels.split.even import even_split, even_tables
from moesys.kernels.split.flow import split
from moesys.kernels.split.proportional import proportional_split, proportional_tables
from moesys.kernels.split.tables import SplitTables, tables_of
from moesys.kernels.symmetric.counts import Origin, count_regions, receive_counts, send_counts
from moesys.kernels.symmetric.heap import Heap
from moesys.lab.show.sheets import Column

COPY_BYTES = 16
# Counts, places, weights and flags are loaded one at a time; no element of a row is.
WORD_BYTES = 4


class Size(NamedTuple):
    """A layer: T tokens, H hidden, I expert width, E experts, K choices."""

    name: str
    T: int
    H: int
    I: int
    E: int
    K: int


SIZES = (
    Size("qwen3-30b", 32768, 2048, 768, 128, 8),
    Size("olmoe", 32768, 2048, 1024, 64, 8),
    Size("mixtral", 16384, 4096, 14336, 8, 2),
    Size("deepseek-v3", 16384, 7168, 2048, 256, 8),
    Size("fine", 40960, 768, 256, 128, 8),
    Size("30b", 32768, 4096, 512, 128, 8),
)
NUM_OPS = 18


def _widths(widths: tuple[int, ...]) -> str:
    return f"{' '.join(map(str, widths))} B" if widths else ""


@dataclass(frozen=True)
class Compiled:
    """One kernel of one op at one size, as compiled for a GPU; ``wrong``: where it falls short, "" for nowhere.

    ``block``: of its product, None where it has none. ``moves_rows``: whether it copies rows from or to other ranks;
    ``flight_bytes``: that each of its threads should have on their way.
    """

    size: Annotated[str, Column("size")]
    op: Annotated[str, Column("op")]
    block: TileConfig | None
    code: Annotated[
        MachineCode,
        Column("kernel", lambda code: code.name),
        Column("products", lambda code: " ".join(code.mma)),
        Column("threads", lambda code: str(code.threads)),
        Column("registers", lambda code: str(code.registers)),
        Column("spills", lambda code: str(code.spills)),
        Column("shared KB", lambda code: f"{code.shared_bytes / 1000:.0f}"),
        Column("copies", lambda code: _widths(code.copy_bytes)),
        Column("loads", lambda code: _widths(code.load_bytes)),
        Column("stores", lambda code: _widths(code.store_bytes)),
        Column("in flight", lambda code: f"{code.flight_bytes} B"),
        Column("TMA", lambda code: str(code.tma_loads)),
    ]
    moves_rows: bool = False
    flight_bytes: int = 0

    @property
    def tile(self) -> Annotated[str, Column("tile", after="op")]:
        return tile_words(self.block) if self.block else ""

    @property
    def wrong(self) -> Annotated[str, Column("falls short", after="op")]:
        code, found = self.code, []
        if code.spills or code.stack_bytes:
            found.append(f"{code.spills} spills, {code.stack_bytes} bytes of stack")
        if code.shared_bytes > MOST_SHARED_BYTES:
            found.append(f"{code.shared_bytes} bytes of shared memory, {MOST_SHARED_BYTES} is the most")
        if self.tile and not code.mma:
            found.append("no product of tensor cores")
        if self.tile and any(width < COPY_BYTES for width in code.copy_bytes):
            found.append(f"copies of {min(code.copy_bytes)} bytes")
        for what, widths in (("loads", code.load_bytes), ("stores", code.store_bytes)):
            if self.moves_rows and (min(widths) < WORD_BYTES or max(widths) < COPY_BYTES):
                found.append(f"{what} of {min(widths)} to {max(widths)} bytes")
        if code.flight_bytes < self.flight_bytes:
            found.append(f"{code.flight_bytes} bytes of a thread in flight, not {self.flight_bytes}")
        return "; ".join(found)


def tile_words(block: TileConfig) -> str:
    return f"{block.rows}x{block.columns}x{block.contraction}"


def tables_of_64_ranks(num_experts: int) -> SplitTables:
    """Of 8 nodes and 3 slots a rank, or as many as experts need."""
    node_R, num_slots = np.arange(64) // 8, max(3, -(-num_experts // 64))
    expert_RS = np.arange(64 * num_slots).reshape(64, num_slots) % num_experts
    return tables_of(expert_RS, num_experts, node_R, node_R[None], "meta")


def exchange_counts(first_E1: Tensor) -> Tensor:
    """As each of 64 ranks does."""
    num_experts, dtype = len(first_E1) - 1, torch.bfloat16
    shared = {**regions(1, 1, 1, dtype, 64, 1), **count_regions(64, num_experts)}
    heap = Heap.virtual(shared, 64, first_E1.device)[0]
    exchanges_R, epoch_1 = first_E1.new_empty(64), first_E1.new_empty(1)
    send_counts(heap, exchanges_R, first_E1, Origin())
    return receive_counts(heap, epoch_1, exchanges_R, num_experts).tokens_RE


def split_by_shares(tokens_RE: Tensor, tables: SplitTables) -> object:
    """The even split, and the proportional one."""
    num_ranks, num_experts = tokens_RE.shape
    expert_RS = np.arange(num_ranks * 4).reshape(num_ranks, 4) % num_experts
    in_proportion = proportional_tables(tables, np.ones((num_ranks, num_experts), dtype=np.int64))
    evenly = even_tables(expert_RS, np.arange(num_ranks) // 8, "meta")
    return even_split(tokens_RE, evenly, 1), proportional_split(tokens_RE, in_proportion, 1)


def cut_into_chunks(tables: SplitTables, entry_N: Tensor, top_k: int, num_chunks: int = 2) -> object:
    """Tables of one of 64 ranks."""
    num_ranks, num_replicas = 64, len(tables.rank_P)
    tokens_RP = entry_N.new_empty(num_ranks, num_replicas, dtype=torch.int64)
    here = num_replicas // num_ranks
    first_RL = entry_N.new_empty(num_ranks, num_chunks * tables.replica_ER.shape[0] + 1)
    sizes_2CR = tokens_RP.new_empty(2, num_chunks, num_ranks)
    found = cut(first_RL, tokens_RP, tables, OwnReplicas(0, 0, here, here, 2), num_chunks, sizes_2CR)
    return sent_rows(entry_N, found, tables, top_k), arrived_rows(found.arriving_CRG, len(entry_N))


def compile_size(
    size: Size,
    dtype: torch.dtype,
    tell: Callable[[str], None],
    only: Container[str] | None = None,
    target: GPUTarget = HOPPER,
) -> list[Compiled]:
    """Every kernel of forward and backward, gated by SiLU, at pinned blocks or the model's choice (``blocks_of``).

    ``only``: names of the ops that are asked for; None for all.
    """
    T, H, I, E, K = size[1:]
    P = T * K

    meta = partial(torch.empty, dtype=dtype, device="meta")
    routing = Routing(*(meta(*shape, dtype=torch.int32) for shape in ((P,), (T, K), (E + 1,))))
    matrix_G = meta(E, dtype=torch.int32)
    gate_up, down_proj, x, a = meta(E, 2 * I, H), meta(E, H, I), meta(T, H), meta(P, I)
    blocks = blocks_of(ShapeClass.of(x, down_proj, P, "swiglu"), x.device, target.arch)
    h, weight = meta(P, 2 * I), meta(T, K, dtype=torch.float32)

    def tiles(block: TileConfig) -> Tiles:
        most = -(-P // block.rows) + E
        group_M, row_M, count_1 = (meta(n, dtype=torch.int32) for n in (most, most, 1))
        return Tiles(group_M, row_M, count_1, block.rows)

    entries, first = routing.entry_P, routing.first_G1
    groups = OrderedGroups(entries, first, meta(E, dtype=torch.int32))
    row_blocks = RowBlocks(256, meta(E, dtype=torch.float64))
    up_, down_, back, into, outer = (
        blocks.up,
        blocks.down,
        blocks.activation_gradient,
        blocks.input_gradient,
        blocks.weight_gradient,
    )
    tables, tokens_RE = tables_of_64_ranks(E), meta(64, E, dtype=torch.int64)
    tokens_RP = meta(64, len(tables.expert_P), dtype=torch.int64)
    ops: dict[str, tuple[TileConfig | None, Callable[[], object]]] = {
        "counts": (None, lambda: exchange_counts(first)),
        "split": (None, lambda: split(tokens_RE, tables)),
        "split_by_blocks": (None, lambda: split_by_blocks(tokens_RE, tokens_RP, tables, 256)),
        "shares": (None, lambda: split_by_shares(tokens_RE, tables)),
        "chunks": (None, lambda: cut_into_chunks(tables, entries, K)),
        "route": (None, lambda: route(meta(T, K, dtype=torch.int64), E)),
        "tiles": (None, lambda: tile_table(first, P, up_.rows)),
        "groups": (None, lambda: groups_by_size(first)),
        "up": (up_, lambda: up(x, gate_up, routing, tiles(up_), matrix_G, K, "swiglu", up_)),
        "down": (down_, lambda: grouped_gemm(a, down_proj, first, tiles(down_), matrix_G, down_, transposed=True)),
        "combine": (None, lambda: combine(meta(P, H), routing.row_TK, weight, dtype)),
        "activation_gradient": (
            back,
            lambda: activation_gradient(
                x, down_proj, h, weight, routing, RowGroups(first, tiles(back), matrix_G), "swiglu", back
            ),
        ),
        "input_gradient": (
            into,
            lambda: grouped_gemm(h, gate_up, first, tiles(into), matrix_G, into, transposed=False),
        ),
        "gather_sum": (None, lambda: combine(meta(P, H), routing.row_TK, None, dtype)),
        "dW2": (outer, lambda: weight_gradient(x, a, groups, K, "left", outer, torch.float32)),
        "dW1": (outer, lambda: weight_gradient(h, x, groups, K, "right", outer, torch.float32)),
        "dW2_blocks": (cut_to_fit(outer), lambda: block_gradient(x, a, groups, K, "left", row_blocks, outer)),
        "dW1_blocks": (cut_to_fit(outer), lambda: block_gradient(h, x, groups, K, "right", row_blocks, outer)),
    }
    found = []
    for op, (block, launch) in ops.items():
        if only is not None and op not in only:
            continue
        tell(f"{size.name}: {op}")
        with compiling(target) as compiled:
            launch()
        gemm = max(compiled, key=lambda code: (len(code.mma), code.shared_bytes)) if block else None
        for code in compiled:
            found.append(Compiled(size.name, op, block if code is gemm else None, code))
    return found


def select(names: str) -> list[Size]:
    """Sizes by name, or all. Raises ValueError for a name that is not known."""
    by_name = {size.name: size for size in SIZES}
    return [by_name[name] for name in chosen("size", names, by_name)]
