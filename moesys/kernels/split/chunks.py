"""Tables on a device that say where each row goes in messages that are cut into chunks: one rank's part of a plan.

A source lists its choices in order of (expert, chunk, token, choice), which is that of (expert, token, choice), because
chunks are consecutive tokens. The plan cuts an expert's part of the list into one piece per replica, and chunks cut
pieces into *blocks*. Messages and products need rows in different orders of blocks, and in the same order inside a
block: a kernel copies the blocks, one program each, which computes the offset of its block itself.

R ranks, E experts, P replicas as in ``tables``, in order of (rank, expert) where they are called Q; C chunks, K choices
of a token, N choices of this rank, G replicas of this rank, M rows that arrive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.split.tables import SplitTables

# Blocks that a program sums at once, and rows that it copies at once.
SUMMED = 1024
COPIED = 512


class ChunkBlocks(NamedTuple):
    """The blocks that this rank sends and receives, in rows, int64.

    - ``sent_CQ``: rows of each chunk to each replica; ``list_CQ``: where they begin in this rank's list;
    - ``arriving_CRG``: rows of each chunk from each rank to each replica of this rank;
    - ``sizes_2CR``: rows of each chunk to each rank, and from each.
    """

    sent_CQ: Tensor
    list_CQ: Tensor
    arriving_CRG: Tensor
    sizes_2CR: Tensor


class OwnReplicas(NamedTuple):
    """The replicas of ``rank`` in a layout, on the host: ``first`` up to ``first + number`` by rank. ``most``: the
    replicas of the rank with most; ``copies``: those of the expert with most.
    """

    rank: int
    first: int
    number: int
    most: int
    copies: int


def cut(
    first_RL: Tensor, tokens_RP: Tensor, tables: SplitTables, own: OwnReplicas, num_chunks: int, sizes_2CR: Tensor
) -> ChunkBlocks:
    """Cuts the plan ``tokens_RP`` int64. ``first_RL`` int32 [R, E·C + 1]: where each (expert, chunk) begins in each
    source's list. ``sizes_2CR``: where those are written. One launch, for which nothing waits.
    """
    num_ranks, num_replicas = tokens_RP.shape
    sent_CQ, list_CQ = (tokens_RP.new_empty(num_chunks, num_replicas) for _ in range(2))
    arriving_CRG = tokens_RP.new_empty(num_chunks, num_ranks, own.number)
    found = ChunkBlocks(sent_CQ, list_CQ, arriving_CRG, sizes_2CR)
    numbers = (num_ranks, num_replicas, num_chunks, first_RL.shape[1], own.rank, own.first, own.number, own.copies)
    _cut[(num_ranks,)](first_RL, tokens_RP, tables, found, *numbers, LANES=triton.next_power_of_2(max(own.most, 1)))
    return found


@triton.jit
def _piece(first_RL, tokens_RP, tables, source, replica, inside, num_replicas, width, copies, num_chunks):  # type: ignore[no-untyped-def]
    """Returns where these replicas' pieces in the list of ``source`` begin and end in their experts' parts, and the
    place in ``first_RL`` of their experts' first chunk.
    """
    source = tl.cast(source, tl.int64)
    expert = tl.load(tables.expert_P + replica, mask=inside, other=0)
    first_replica = tl.load(tables.first_E1 + expert, mask=inside, other=0)
    begin = tl.zeros_like(replica).to(tl.int64)
    for copy in range(copies):
        before = first_replica + copy
        begin += tl.load(tokens_RP + source * num_replicas + before, mask=inside & (before < replica), other=0)
    end = begin + tl.load(tokens_RP + source * num_replicas + replica, mask=inside, other=0)
    return begin, end, first_RL + source * width + expert * num_chunks


@triton.jit
def _block(begin, end, first, chunk, inside):  # type: ignore[no-untyped-def]
    """Returns the rows of pieces in a chunk, and where these begin in the list."""
    part = tl.load(first, mask=inside, other=0).to(tl.int64)
    from_row = tl.load(first + chunk, mask=inside, other=0).to(tl.int64)
    to_row = tl.load(first + chunk + 1, mask=inside, other=0).to(tl.int64)
    from_row = tl.maximum(from_row, part + begin)
    return tl.maximum(tl.minimum(to_row, part + end) - from_row, 0), from_row


@kernel(
    do_not_specialize=["num_ranks", "num_replicas", "num_chunks", "width", "own", "own_first", "own_number", "copies"]
)
def _cut(  # type: ignore[no-untyped-def]
    first_RL, tokens_RP, tables, found, num_ranks, num_replicas, num_chunks, width, own, own_first, own_number, copies,
    LANES: tl.constexpr,
):  # fmt: skip
    """Cuts, one peer per program, what goes there and what comes from there."""
    peer = tl.program_id(0)
    lane = tl.arange(0, LANES)
    peer_first = tl.load(tables.first_R1 + peer)
    there = lane < tl.load(tables.first_R1 + peer + 1) - peer_first
    replica = tl.load(tables.by_rank_P + peer_first + lane, mask=there, other=0)
    begin, end, first = _piece(
        first_RL, tokens_RP, tables, own, replica, there, num_replicas, width, copies, num_chunks
    )
    for chunk in range(num_chunks):
        rows, from_row = _block(begin, end, first, chunk, there)
        place = chunk * num_replicas + peer_first + lane
        tl.store(found.sent_CQ + place, rows, mask=there)
        tl.store(found.list_CQ + place, from_row, mask=there)
        tl.store(found.sizes_2CR + chunk * num_ranks + peer, tl.sum(rows, 0))
    here = lane < own_number
    replica = tl.load(tables.by_rank_P + own_first + lane, mask=here, other=0)
    begin, end, first = _piece(
        first_RL, tokens_RP, tables, peer, replica, here, num_replicas, width, copies, num_chunks
    )
    for chunk in range(num_chunks):
        rows, _ = _block(begin, end, first, chunk, here)
        block = chunk * num_ranks + peer
        tl.store(found.arriving_CRG + block * own_number + lane, rows, mask=here)
        tl.store(found.sizes_2CR + num_chunks * num_ranks + block, tl.sum(rows, 0))


class SentRows(NamedTuple):
    """The rows that a source sends, int64. *Wire order* is that of (chunk, rank, expert, token, choice).

    ``row_N``, ``token_N``: each row's choice t·K + k, and its token; ``wire_place_TK``: each choice's place in the wire
    order of its chunk; ``by_destination_N``: rows in wire order, sorted by the rank that they go to.
    """

    row_N: Tensor
    token_N: Tensor
    wire_place_TK: Tensor
    by_destination_N: Tensor


def sent_rows(entry_N: Tensor, found: ChunkBlocks, tables: SplitTables, top_k: int) -> SentRows:
    """Returns tables of what this rank sends. ``entry_N`` int32: its list. One launch."""
    row_N, token_N, place_N, by_destination_N = (entry_N.new_empty(len(entry_N), dtype=torch.int64) for _ in range(4))
    rows = SentRows(row_N, token_N, place_N.view(-1, top_k), by_destination_N)
    num_chunks, num_replicas = found.sent_CQ.shape
    _sent[(num_chunks * num_replicas,)](
        entry_N, found, tables, rows, num_chunks * num_replicas, num_replicas, K=top_k, SUMMED=SUMMED, COPIED=COPIED
    )
    return rows


@kernel(do_not_specialize=["num_blocks", "num_replicas"])
def _sent(  # type: ignore[no-untyped-def]
    entry_N, found, tables, rows, num_blocks, num_replicas, K: tl.constexpr, SUMMED: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """Fills the tables of one block of this source per program."""
    own = tl.program_id(0)
    own_chunk = own // num_replicas
    own_rank = tl.load(tables.rank_P + tl.load(tables.by_rank_P + own % num_replicas))
    zero = tl.full([], 0, tl.int64)
    on_wire, of_chunks, by_rank = zero, zero, zero
    for start in range(0, num_blocks, SUMMED):
        block = start + tl.arange(0, SUMMED)
        inside = block < num_blocks
        number = tl.load(found.sent_CQ + block, mask=inside, other=0)
        rank = tl.load(tables.rank_P + tl.load(tables.by_rank_P + block % num_replicas, mask=inside, other=0))
        on_wire += tl.sum(tl.where(block < own, number, 0), 0)
        of_chunks += tl.sum(tl.where(block < own_chunk * num_replicas, number, 0), 0)
        by_rank += tl.sum(tl.where((rank < own_rank) | ((rank == own_rank) & (block < own)), number, 0), 0)
    number, from_row = tl.load(found.sent_CQ + own), tl.load(found.list_CQ + own)
    for start in range(0, number, COPIED):
        row = start + tl.arange(0, COPIED)
        inside = row < number
        entry = tl.load(entry_N + from_row + row, mask=inside, other=0).to(tl.int64)
        tl.store(rows.row_N + on_wire + row, entry, mask=inside)
        tl.store(rows.token_N + on_wire + row, entry // K, mask=inside)
        tl.store(rows.wire_place_TK + entry, on_wire - of_chunks + row, mask=inside)
        tl.store(rows.by_destination_N + by_rank + row, on_wire + row, mask=inside)


class ArrivedRows(NamedTuple):
    """The rows that arrive at a destination; int64 where no dtype is given. *Arrivals* are numbered by (chunk, source,
    expert, token, choice), *expert rows* by (chunk, expert, source, token, choice).

    ``gather_M``: the arrival that each expert row is; ``return_M``: each arrival's expert row, from its chunk's first
    on; ``by_source_M``: arrivals sorted by source. ``order_row_M``, ``order_arrival_M``: expert rows and arrivals by
    (expert, source, chunk). ``first_CG1`` int32: an expert's first row in a chunk, from the chunk's first on;
    ``first_G1`` int32: in ``order_row_M``.
    """

    gather_M: Tensor
    return_M: Tensor
    by_source_M: Tensor
    order_row_M: Tensor
    order_arrival_M: Tensor
    first_CG1: Tensor
    first_G1: Tensor


def arrived_rows(arriving_CRG: Tensor, num_rows: int) -> ArrivedRows:
    """Returns tables of what comes here, ``num_rows`` = M rows. One launch."""
    C, R, G = arriving_CRG.shape
    gather_M, return_M, by_source_M, order_row_M, order_arrival_M = (arriving_CRG.new_empty(num_rows) for _ in range(5))
    first_CG1, first_G1 = (arriving_CRG.new_empty(*size, G + 1, dtype=torch.int32) for size in ((C,), ()))
    rows = ArrivedRows(gather_M, return_M, by_source_M, order_row_M, order_arrival_M, first_CG1, first_G1)
    if not G:
        return rows._replace(first_CG1=first_CG1.zero_(), first_G1=rows.first_G1.zero_())
    _arrived[(C * R * G,)](arriving_CRG, rows, C, R, G, SUMMED=SUMMED, COPIED=COPIED)
    return rows


@kernel(do_not_specialize=["num_chunks", "num_ranks", "num_groups"])
def _arrived(  # type: ignore[no-untyped-def]
    arriving_CRG, rows, num_chunks, num_ranks, num_groups, SUMMED: tl.constexpr, COPIED: tl.constexpr
):
    """Fills the tables of one arriving block per program."""
    own, num_blocks = tl.program_id(0), num_chunks * num_ranks * num_groups
    c, r, g = own // (num_ranks * num_groups), own // num_groups % num_ranks, own % num_groups
    zero = tl.full([], 0, tl.int64)
    of_chunks, arrival, expert_row, by_source, by_expert = zero, zero, zero, zero, zero
    for start in range(0, num_blocks, SUMMED):
        block = start + tl.arange(0, SUMMED)
        number = tl.load(arriving_CRG + block, mask=block < num_blocks, other=0)
        chunk, source = block // (num_ranks * num_groups), block // num_groups % num_ranks
        group = block % num_groups
        before = (group < g) | ((group == g) & (source < r))
        of_chunks += tl.sum(tl.where(chunk < c, number, 0), 0)
        arrival += tl.sum(tl.where(block < own, number, 0), 0)
        expert_row += tl.sum(tl.where((chunk < c) | ((chunk == c) & before), number, 0), 0)
        by_source += tl.sum(tl.where((source < r) | ((source == r) & (block < own)), number, 0), 0)
        same = (group == g) & (source == r) & (chunk < c)
        by_expert += tl.sum(tl.where(before | same, number, 0), 0)
    number = tl.load(arriving_CRG + own)
    for start in range(0, number, COPIED):
        row = start + tl.arange(0, COPIED)
        inside = row < number
        tl.store(rows.gather_M + expert_row + row, arrival + row, mask=inside)
        tl.store(rows.return_M + arrival + row, expert_row - of_chunks + row, mask=inside)
        tl.store(rows.by_source_M + by_source + row, arrival + row, mask=inside)
        tl.store(rows.order_row_M + by_expert + row, expert_row + row, mask=inside)
        tl.store(rows.order_arrival_M + by_expert + row, arrival + row, mask=inside)
    # A program that begins an expert writes where it begins, and the last program writes where the last expert ends.
    at = rows.first_CG1 + c * (num_groups + 1) + g
    if r == 0:
        tl.store(at, (expert_row - of_chunks).to(tl.int32))
        if c == 0:
            tl.store(rows.first_G1 + g, by_expert.to(tl.int32))
    if (r == num_ranks - 1) & (g == num_groups - 1):
        tl.store(at + 1, (expert_row - of_chunks + number).to(tl.int32))
        if c == num_chunks - 1:
            tl.store(rows.first_G1 + g + 1, (by_expert + number).to(tl.int32))
