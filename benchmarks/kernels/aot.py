"""``kernels --aot``: the kernels compiled for a GPU without one, and what the machine code has.

The report gives registers, spills, shared memory, tensor-core products, the width of copies, loads and stores, and the
bytes in flight. The exit code is 1 if a kernel falls short of what it should have.

T tokens, H hidden, I expert width, E experts, K choices per token, P = T·K rows, N rows and G experts of a rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from benchmarks.kernels.ahead_of_time import HOPPER, MOST_SHARED_BYTES, MachineCode, compiling
from benchmarks.kernels.drawn_layer import Size
from benchmarks.kernels.gemm_timer import META, Operands
from moesys.config.overlap import MegaKernel
from moesys.kernels.experts.activation_gradient import SUM_COLUMNS
from moesys.kernels.experts.experts import ExpertMatrices
from moesys.kernels.experts.tile_config import NUM_REGISTERS, ShapeClass, TileConfig
from moesys.kernels.experts.tile_tuner import OPS, blocks_of, candidates, refused_ways
from moesys.kernels.experts.tiles import Tiles, groups_by_size, tile_table
from moesys.kernels.experts.token_rows import combine
from moesys.kernels.experts.weight_gradient import (
    OrderedGroups,
    RowBlocks,
    WeightGradients,
    cut_to_fit,
    weight_gradient,
)
from moesys.kernels.mega.arguments import MegaMemory, MegaRows
from moesys.kernels.mega.exchange import Exchange, Flags, Replicas, TileSequence, most_flags, regions
from moesys.kernels.mega.mega_combine import down_combine, input_gradient_combine
from moesys.kernels.mega.mega_dispatch import dispatch_activation_gradient, dispatch_up
from moesys.kernels.mega.point import FLIGHT_BYTES, blocks_at, fuses
from moesys.kernels.routing import route
from moesys.kernels.split.baselines import even_split, even_tables, proportional_split, proportional_tables
from moesys.kernels.split.chunks import OwnReplicas, arrived_rows, cut, sent_rows
from moesys.kernels.split.flow import split
from moesys.kernels.split.tables import SplitTables, tables_of
from moesys.kernels.symmetric.counts import Origin, count_regions, receive_counts, send_counts
from moesys.kernels.symmetric.heap import Heap
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import Column, CommandOutput, Report, Sheet, publish

COPY_BYTES = 16
# The system takes so many bytes of a multiprocessor's shared memory for each program.
RESERVED_BYTES = 1024
# Counts, places, weights and flags are loaded one at a time; elements of rows are not.
WORD_BYTES = 4
ACTIVATION = "swiglu"
# The numbers of steps that ``compile_size`` and ``compile_mega`` announce.
NUM_OPS, NUM_MEGA_OPS = 17, 17
# The ranks of a MegaKernel, and its points whose code differs; shares and orders of tiles are numbers. Two programs of
# ``PAIRS`` are to fit on a multiprocessor.
NUM_RANKS, PAIRS = 8, "pairs"
POINTS: Mapping[str, MegaKernel] = MappingProxyType(
    {
        "fused": MegaKernel(),
        "apart": MegaKernel(
            combine_share=0.25, reduce_share=0.25, deduplicate=True, granularity="expert", keep_x=False
        ),
        "unfused": MegaKernel(fused="none"),
        PAIRS: MegaKernel(tile_rows=128, tile_columns=128, warps=4, stages=3),
        "no wgrad": MegaKernel(overlap_weight_gradients=False),
    }
)


def _widths(widths: tuple[int, ...]) -> str:
    return f"{' '.join(map(str, widths))} B" if widths else ""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of one op at one size, compiled for a GPU.

    block: the tiles of its product, or None without one. moves_rows: whether it copies rows from or to other ranks.
    flight_bytes: the bytes that each of its threads should have in flight.
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
        block = self.block
        return f"{block.rows}x{block.columns}x{block.contraction}" if block else ""

    @property
    def wrong(self) -> Annotated[str, Column("falls short", after="op", wraps=True)]:
        """How the kernel falls short, or "" if it does not."""
        code, found = self.code, []
        if code.spills or code.stack_bytes:
            found.append(f"{code.spills} spills, {code.stack_bytes} bytes of stack")
        resident = self.block.resident if self.block else 1
        most_bytes = (MOST_SHARED_BYTES + RESERVED_BYTES) // resident - RESERVED_BYTES
        if code.shared_bytes > most_bytes:
            found.append(f"{code.shared_bytes} bytes of shared memory, {most_bytes} is the most")
        if code.registers * code.threads * resident > NUM_REGISTERS:
            found.append(f"{code.registers} registers, too many for {resident} programs")
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


def main(sizes: Sequence[Size], mega: bool, with_candidates: bool, arch: str, output: CommandOutput) -> int:
    """Compiles, writes and prints; returns 1 if a kernel falls short or a candidate does not compile. ``mega``: with
    MegaKernels; ``with_candidates``: with all tiles that the tuner tries.
    """
    rows: list[CompiledKernel] = []
    notes: list[str] = []
    num_failed = 0
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    num_ops = NUM_OPS + NUM_MEGA_OPS * mega + len(OPS) * with_candidates
    with warnings.catch_warnings(), steps_told("compiling", num_ops * len(sizes), output.quiet) as tell:
        warnings.simplefilter("ignore", UserWarning)
        for size in sizes:
            rows += compile_size(size, torch.bfloat16, tell, target=target)
            if mega:
                rows += compile_mega(size, torch.bfloat16, tell, target=target)
            if with_candidates:
                of_size, refused, failed = compile_candidates(size, torch.bfloat16, tell, target=target)
                rows += of_size
                notes += [*refused, *failed]
                num_failed += len(failed)
    short = sum(bool(row.wrong) for row in rows)
    title = f"COMPILED: kernels for {arch}, not run"
    notes[:0] = [f"bfloat16, triton {triton.__version__}; {len(rows)} kernels, {short} of them fall short"]
    sheet = Sheet(title, rows, notes, group_by="size")
    publish(Report("kernels aot", title, "compiled", [sheet], data={"rows": rows}), output)
    return int(short + num_failed > 0)


# --- kernels of one device --------------------------------------------------------------------------------------------


def tables_of_64_ranks(num_experts: int) -> SplitTables:
    """Returns the tables of 8 nodes with 3 slots per rank, or as many as the experts need."""
    node_R, num_slots = np.arange(64) // 8, max(3, -(-num_experts // 64))
    expert_RS = np.arange(64 * num_slots).reshape(64, num_slots) % num_experts
    return tables_of(expert_RS, num_experts, node_R, node_R[None], "meta")


def exchange_counts(first_E1: Tensor) -> Tensor:
    """Exchanges counts as each of 64 ranks does."""
    num_experts, dtype = len(first_E1) - 1, torch.bfloat16
    shared = {**regions(1, 1, 1, dtype, 64, 1), **count_regions(64, num_experts)}
    heap = Heap.virtual(shared, 64, first_E1.device)[0]
    exchanges_R, epoch_1 = first_E1.new_empty(64), first_E1.new_empty(1)
    send_counts(heap, exchanges_R, first_E1, Origin())
    return receive_counts(heap, epoch_1, exchanges_R, num_experts).tokens_RE


def split_by_shares(tokens_RE: Tensor, tables: SplitTables) -> object:
    """Splits evenly, and in proportion."""
    num_ranks, num_experts = tokens_RE.shape
    expert_RS = np.arange(num_ranks * 4).reshape(num_ranks, 4) % num_experts
    in_proportion = proportional_tables(tables, np.ones((num_ranks, num_experts), dtype=np.int64))
    evenly = even_tables(expert_RS, np.arange(num_ranks) // 8, "meta")
    return even_split(tokens_RE, evenly, 1), proportional_split(tokens_RE, in_proportion, 1)


def cut_into_chunks(tables: SplitTables, entry_N: Tensor, top_k: int, num_chunks: int = 2) -> object:
    """Makes the tables of chunks of one of 64 ranks."""
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
) -> list[CompiledKernel]:
    """Compiles the kernels of forward and backward with SwiGLU, at pinned blocks or those of the model (``blocks_of``).

    ``only``: the names of the ops to compile; None for all.
    """
    _, T, H, I, E, K = size
    meta = partial(torch.empty, dtype=dtype, device="meta")
    shape = ShapeClass.of(meta(T, H), meta(E, H, I), T * K, ACTIVATION)
    operands, blocks = Operands(shape, META), blocks_of(shape, META, target.arch)
    x, a, h, weight = operands.x_TH, operands.a_PI, operands.h_PU, operands.weight_TK
    routing, y = operands.routing, meta(operands.num_rows, H)
    entries, first = routing.entry_P, routing.first_G1
    groups = OrderedGroups(entries, first, operands.order_E)
    row_blocks = RowBlocks(256, meta(E, dtype=torch.float64))
    outer = blocks.weight_gradient
    tables, tokens_RE = tables_of_64_ranks(E), meta(64, E, dtype=torch.int64)
    ops: dict[str, tuple[TileConfig | None, Callable[[], object]]] = {
        "counts": (None, lambda: exchange_counts(first)),
        "split": (None, lambda: split(tokens_RE, tables)),
        "shares": (None, lambda: split_by_shares(tokens_RE, tables)),
        "chunks": (None, lambda: cut_into_chunks(tables, entries, K)),
        "route": (None, lambda: route(meta(T, K, dtype=torch.int64), E)),
        "tiles": (None, lambda: tile_table(first, len(y), blocks.up.rows)),
        "groups": (None, lambda: groups_by_size(first)),
        "combine": (None, lambda: combine(y, routing.row_TK, weight, dtype)),
        "gather_sum": (None, lambda: combine(y, routing.row_TK, None, dtype)),
        "dW2": (outer, lambda: weight_gradient(x, a, groups, K, "left", outer)),
        "dW1": (outer, lambda: weight_gradient(h, x, groups, K, "right", outer)),
        "dW2_blocks": (cut_to_fit(outer), lambda: weight_gradient(x, a, groups, K, "left", outer, blocks=row_blocks)),
        "dW1_blocks": (cut_to_fit(outer), lambda: weight_gradient(h, x, groups, K, "right", outer, blocks=row_blocks)),
    }
    for op in OPS[:-1]:
        block = getattr(blocks, op)
        ops[op] = (block, partial(operands.launch, op, block, operands.tiles(block)))
    found = []
    for op, (block, launch) in ops.items():
        if only is not None and op not in only:
            continue
        tell(f"{size.name}: {op}")
        with compiling(target) as compiled:
            launch()
        gemm = max(compiled, key=lambda code: (len(code.mma), code.shared_bytes)) if block else None
        for code in compiled:
            found.append(CompiledKernel(size.name, op, block if code is gemm else None, code))
    return found


def compile_candidates(
    size: Size, dtype: torch.dtype, tell: Callable[[str], None], target: GPUTarget = HOPPER
) -> tuple[list[CompiledKernel], list[str], list[str]]:
    """Compiles all tiles that the tuner tries. Returns the kernels, which ways of operands are refused and why, and
    which candidates do not compile. Those that spill are dropped when they are tuned, and fall short of nothing.
    """
    _, T, H, I, E, K = size
    meta = partial(torch.empty, dtype=dtype, device="meta")
    shape = ShapeClass.of(meta(T, H), meta(E, H, I), T * K, ACTIVATION)
    operands = Operands(shape, META)
    found, refused, failed = [], [], []
    for op in OPS:
        tell(f"{size.name}: candidates of {op}")
        refused += [f"{op}: {way} is refused: {reason}" for way, reason in refused_ways(op, ACTIVATION).items()]
        for block in candidates(op, shape, capability=target.arch):
            words = f"{op} {block.operands}, {block.warps} warps, {block.stages} stages"
            try:
                with compiling(target) as compiled:
                    operands.launch(op, block, operands.tiles(block))
            except Exception as error:
                # Triton raises whatever the pass that failed raises.
                failed.append(f"{words}: {block.rows}x{block.columns} does not compile: {error!r}")
                continue
            gemm = max(compiled, key=lambda code: (len(code.mma), code.shared_bytes))
            if gemm.spills or gemm.stack_bytes:
                refused.append(f"{words}: {block.rows}x{block.columns} is refused: it spills {gemm.spills} registers")
            else:
                found.append(CompiledKernel(size.name, words, block, gemm))
    return found, refused, failed


# --- MegaKernels ------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A kernel of an op: the tiles of its product or None, whether it copies rows between ranks, and the bytes that
    each thread has in flight while it copies from memory.
    """

    block: TileConfig | None
    moves_rows: bool
    flight_bytes: int = 0


class OpLaunch(NamedTuple):
    """The launch of an op, and its kernels."""

    op: str
    parts: tuple[Part, ...]
    run: Callable[[], object]


def compile_mega(
    size: Size,
    dtype: torch.dtype,
    tell: Callable[[str], None],
    points: Iterable[str] = POINTS,
    only: Container[str] | None = None,
    target: GPUTarget = HOPPER,
) -> list[CompiledKernel]:
    """Compiles both MegaKernels, forward and backward, of one of ``NUM_RANKS`` ranks with the size's tokens each.

    ``only``: the names of the ops to compile; None for all.
    """
    found = []
    for name in points:
        for op, parts, run in _launched(size, dtype, POINTS[name], target.arch):
            if only is not None and op not in only:
                continue
            tell(f"{size.name}: {name} {op}")
            with compiling(target) as compiled:
                run()
            for part, code in zip(parts, compiled, strict=True):
                block = part.block and replace(part.block, resident=1 + (name == PAIRS))
                kind = size.name, f"{name} {op}"
                found.append(CompiledKernel(*kind, block, code, part.moves_rows, part.flight_bytes))
    return found


def _launched(size: Size, dtype: torch.dtype, point: MegaKernel, capability: int) -> Iterator[OpLaunch]:
    T, H, I, E, K = size[1:]
    # A rank receives as many rows as it sends, for one replica more than its part of the experts.
    N, G = T * K, -(-E // NUM_RANKS) + 1
    blocks = blocks_at(point, ACTIVATION, dtype, torch.device("meta"), capability)
    back, into, outer = blocks.activation_gradient, blocks.input_gradient, blocks.weight_gradient
    memory, rows = _memory(size, dtype, G, blocks.down), _rows(size, N, G, blocks.down, point)

    meta = partial(torch.empty, dtype=dtype, device="meta")
    x_NH, h_NU, a_NI, gate_up, down = meta(N, H), meta(N, 2 * I), meta(N, I), meta(G, 2 * I, H), meta(G, H, I)
    weight_TK, dgate_up, ddown = (meta(*shape, dtype=torch.float32) for shape in ((T, K), gate_up.shape, down.shape))
    experts = ExpertMatrices(gate_up, down, ACTIVATION)
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
        yield OpLaunch("up", dispatching(blocks.up), lambda: dispatch_up(memory, rows, experts, blocks.up, point))
        yield OpLaunch(
            "activation_gradient",
            dispatching(back),
            lambda: dispatch_activation_gradient(memory, rows, experts, h_NU, back, point, not point.keep_x),
        )
        yield OpLaunch(
            "down",
            combining(blocks.down, None),
            lambda: down_combine(memory, rows, a_NI, experts, weight_TK, blocks.down, point),
        )
    # Without weight gradients, only this op has different code.
    yield OpLaunch(
        "input_gradient",
        combining(into, outer if gradients else None),
        lambda: input_gradient_combine(memory, rows, h_NU, experts, partial_NS, gradients, blocks, point),
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
    tiles = TileSequence(Tiles(meta(M), meta(M), meta(1), block.rows), number_G, meta(M), number_M)
    first_N = meta(N) if point.deduplicate else None
    return MegaRows(table, tiles, Flags(meta(B), meta(T, K)), meta(N), first_N, first_N, K)
