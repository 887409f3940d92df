"""Splits in whole blocks of an expert's rows, of counts that are on a device: one launch after any other split.

It is ``balance.blocks.by_blocks`` (docs/moe.md), to the byte: the rows of an expert are one line, by source, cut every
``block_rows``, and a block goes to the holder that should have had most of it; what is left at the end, if less than
half a block, belongs to the last. What a rank gets less of one expert it is to get more of the next, so experts follow
each other, in one program with a lane a rank; blocks that lie in one source and go on to the same rank are one step. No
program reads memory that it has written.

R ranks, E experts, P replicas, as in ``tables``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from moesys.kernels.launch import kernel
from moesys.kernels.split.sources import lanes_of
from moesys.kernels.split.tables import SplitTables


class Stretches(NamedTuple):
    """A plan whose replicas need not follow each other by rank. Both int64 [R, P]: how many of a source's tokens go to
    a replica, and where among those for its expert they begin; 0 for none.
    """

    tokens_RP: Tensor
    first_RP: Tensor


def split_by_blocks(tokens_RE: Tensor, tokens_RP: Tensor, tables: SplitTables, block_rows: int) -> Stretches:
    """The plan nearest to ``tokens_RP`` in which every block of ``block_rows`` is computed by one rank.

    ``tokens_RE`` int64 [R, E]: all ranks' counts; ``tokens_RP`` int64 [R, P]: any plan of them. Takes about two steps
    for each source and replica that has some of its tokens, one after another; the host waits for none.
    """
    num_ranks, num_experts = tokens_RE.shape
    found = Stretches(torch.zeros_like(tokens_RP), torch.zeros_like(tokens_RP))
    _split_by_blocks[(1,)](
        tokens_RE.contiguous(),
        # The source behind the last one sends nothing.
        functional.pad(tokens_RP, (0, 0, 0, 1)),
        tables.replica_ER,
        found,
        num_ranks,
        num_experts,
        tokens_RP.shape[1],
        block_rows,
        **lanes_of(num_ranks),
    )
    return found


@kernel(do_not_specialize=["num_ranks", "num_experts", "num_replicas", "block_rows"])
def _split_by_blocks(  # type: ignore[no-untyped-def]
    tokens_RE, tokens_RP, replica_ER, found, num_ranks, num_experts, num_replicas, block_rows, LANES: tl.constexpr
):
    lane = tl.arange(0, LANES)
    nothing = tl.zeros([LANES], tl.int64)
    block_rows = tl.cast(block_rows, tl.int64)
    # What each rank got less than planned so far.
    left = nothing
    for expert in range(num_experts):
        counts = tl.load(tokens_RE + lane * num_experts + expert, mask=lane < num_ranks, other=0)
        replica = tl.load(replica_ER + tl.cast(expert, tl.int64) * num_ranks + lane, mask=lane < num_ranks, other=-1)
        rows = tl.sum(counts, 0)
        # Of the source: rows that are in no block yet; what the plan still gives each rank; what each has, from where.
        source = tl.full([], 0, tl.int32)
        rest = tl.sum(tl.where(lane == source, counts, 0), 0)
        want = _planned(tokens_RP, replica, source, num_replicas)
        taken, first = nothing, nothing
        # Who has the last block, if it ends in this source, else -1; and who had one before, and may have no second.
        current = tl.full([], -1, tl.int32)
        while rows > 0:
            while rest == 0:
                left += want
                _store(found, replica, source, num_replicas, taken, first)
                source, current = source + 1, -1
                rest = tl.sum(tl.where(lane == source, counts, 0), 0)
                want = _planned(tokens_RP, replica, source, num_replicas)
                taken, first = nothing, nothing
            room = tl.where(2 * rows < 3 * block_rows, rows, block_rows)
            inside = tl.minimum(room, rest)
            value = tl.minimum(want + left, inside)
            after, more = source + 1, room - inside
            while more > 0:
                there = tl.minimum(more, tl.sum(tl.where(lane == after, counts, 0), 0))
                value += tl.minimum(_planned(tokens_RP, replica, after, num_replicas), there)
                after, more = after + 1, more - there
            is_current = lane == current
            if tl.sum(tl.where(is_current & (2 * value >= room), 1, 0), 0) > 0:
                # Who has begun goes on, as it may not come again: with all blocks of this source that it is to have.
                if room == inside:
                    due = tl.sum(tl.where(is_current, want + left, 0), 0) - (block_rows + 1) // 2
                    blocks = tl.minimum(rest // block_rows, due // block_rows + 1)
                    # The last one may have other rows.
                    blocks = tl.minimum(blocks, (2 * rows - 3 * block_rows) // (2 * block_rows) + 1)
                    room = tl.maximum(blocks, 1) * room
            else:
                # In quarters of a row. Whom the next source wants too had better come last.
                later = tl.minimum(_planned(tokens_RP, replica, after, num_replicas), room)
                score = 4 * value - tl.where(room == inside, later, 0)
                may = (replica >= 0) & ((taken == 0) | is_current)
                best = tl.max(tl.where(may, score, -(1 << 62)), 0)
                current = tl.min(tl.where(may & (score == best), lane, LANES), 0)
            rows -= room
            while room > 0:
                while rest == 0:
                    left += want
                    _store(found, replica, source, num_replicas, taken, first)
                    source += 1
                    rest = tl.sum(tl.where(lane == source, counts, 0), 0)
                    want = _planned(tokens_RP, replica, source, num_replicas)
                    taken, first = nothing, nothing
                here = tl.minimum(room, rest)
                place = tl.sum(tl.where(lane == source, counts, 0), 0) - rest
                first = tl.where((lane == current) & (taken == 0), place, first)
                taken += tl.where(lane == current, here, 0)
                want -= tl.where(lane == current, here, 0)
                room, rest = room - here, rest - here
        _store(found, replica, source, num_replicas, taken, first)
        # Nobody sends what is left, but the plan may have given it to others.
        left += want


@triton.jit
def _planned(tokens_RP, replica, source, num_replicas):  # type: ignore[no-untyped-def]
    """What a source was to send each rank of an expert."""
    of_source = tokens_RP + tl.cast(source, tl.int64) * num_replicas
    return tl.load(of_source + replica, mask=replica >= 0, other=0)


@triton.jit
def _store(found, replica, source, num_replicas, taken, first):  # type: ignore[no-untyped-def]
    place = tl.cast(source, tl.int64) * num_replicas + replica
    tl.store(found.tokens_RP + place, taken, mask=replica >= 0)
    tl.store(found.first_RP + place, first, mask=replica >= 0)
