"""Routing metadata: which row of which expert every choice of a token is, and back.

A counting sort with one digit (Satish, Harris, Garland, "Designing efficient sorting algorithms for manycore GPUs",
2009): blocks of consecutive choices count their groups, prefix sums over (group, block) say where each block's share
of a group begins, and a choice goes there plus as many rows as its block has earlier choices of the same group. Every
row is a pure function of the choices: nothing takes a slot from a counter.

T tokens, K choices of each, G groups: an expert's slot, P = T·K rows, B blocks of choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel

# Choices that a program compares with each other: its work grows with them, the table of counts shrinks.
BLOCK_CHOICES = 128
# Numbers that one step of a prefix sum takes.
SCANNED = 1024


class SortedRouting(NamedTuple):
    """Rows in order of (group, token, choice); all int32, on the device of the choices.

    ``entry_P`` [T·K]: the choice t·K + k of each row, -1 behind the last group's rows. ``row_TK``: the row of each
    choice, -1 where it is dropped. ``first_G1`` [G + 1]: group g's rows are ``first_G1[g]`` up to ``first_G1[g + 1]``.
    """

    entry_P: Tensor
    row_TK: Tensor
    first_G1: Tensor


def route(group_TK: Tensor, num_groups: int) -> SortedRouting:
    """Returns the rows of the choices ``group_TK``, int32 or int64 [T, K]; what is not in 0..G-1 is dropped.

    One fill and four kernels, none of which waits for the host; no count makes Triton compile anew. The choices are
    read twice. In int32: 3·P written and P read, as ``row_TK`` holds ranks before it holds rows; G + 1 written twice
    and read once; a table of G·B counts zeroed, then read and written by the prefix sum; at most P of its places
    written by blocks before that, and read for choices after it.

    Raises:
        ValueError: another dtype or shape, no group, or more choices than int32 can number.
    """
    if group_TK.dtype not in (torch.int32, torch.int64) or group_TK.dim() != 2:
        raise ValueError(f"choices are {group_TK.dtype} of {group_TK.dim()} dimensions; give int32 or int64 [T, K]")
    if num_groups < 1:
        raise ValueError(f"num_groups={num_groups}; use at least 1")
    num_choices, device = group_TK.numel(), group_TK.device
    # The last block is numbered to its end.
    if num_choices > 2**31 - BLOCK_CHOICES:
        raise ValueError(f"{num_choices} choices; rows are numbered by int32, so use at most {2**31 - BLOCK_CHOICES}")
    # If there are no choices, one empty block still writes the first row of every group.
    num_blocks = max(1, triton.cdiv(num_choices, BLOCK_CHOICES))
    group_TK = group_TK.contiguous()
    entry_P = torch.empty(num_choices, dtype=torch.int32, device=device)
    row_TK = torch.empty(group_TK.shape, dtype=torch.int32, device=device)
    first_G1 = torch.empty(num_groups + 1, dtype=torch.int32, device=device)
    # Blocks write the groups that they have; all others have none.
    before_GB = torch.zeros(num_groups, num_blocks, dtype=torch.int32, device=device)
    routing, sizes = SortedRouting(entry_P, row_TK, first_G1), (num_choices, num_groups, num_blocks)
    _rank_in_blocks[(num_blocks,)](group_TK, row_TK, before_GB, *sizes, BLOCK_CHOICES)
    _scan_blocks[(num_groups,)](before_GB, first_G1, num_blocks, SCANNED)
    _scan_groups[(1,)](first_G1, num_groups, SCANNED)
    _place[(num_blocks,)](group_TK, routing, before_GB, *sizes, BLOCK_CHOICES)
    return routing


@triton.jit
def _groups_of(group_P, choice, num_choices, num_groups):  # type: ignore[no-untyped-def]
    """Returns each choice's group, int32; -1 where it is dropped or behind the last."""
    group = tl.load(group_P + choice, mask=choice < num_choices, other=-1)
    # Compared before it is narrowed: an int64 may be in 0..G-1 by its lower half alone.
    return tl.where((group >= 0) & (group < num_groups), group, -1).to(tl.int32)


@kernel(do_not_specialize=["num_choices", "num_groups", "num_blocks"])
def _rank_in_blocks(  # type: ignore[no-untyped-def]
    group_P, rank_P, count_GB, num_choices, num_groups, num_blocks, BLOCK: tl.constexpr
):
    """Finds, one block per program, how many earlier choices have a choice's group, and the choices of each group."""
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    choice = block * BLOCK + place
    group = _groups_of(group_P, choice, num_choices, num_groups)
    # A thread has a column and adds it up as it compares: the square is nowhere in registers at once.
    same = group[:, None] == group[None, :]
    rank = tl.sum((same & (place[:, None] < place[None, :])).to(tl.int32), 0)
    count = tl.sum(same.to(tl.int32), 0)
    kept = group >= 0
    tl.store(rank_P + choice, rank, mask=kept)
    # The last choice of each group writes the group's count.
    tl.store(count_GB + group.to(tl.int64) * num_blocks + block, count, mask=kept & (rank + 1 == count))


@kernel(do_not_specialize=["num_blocks"])
def _scan_blocks(count_GB, first_G1, num_blocks, SCANNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replaces, one group per program, counts by the number of rows of all blocks before; stores the group's rows in
    ``first_G1[group + 1]``.
    """
    group = tl.program_id(0)
    count_B = count_GB + group.to(tl.int64) * num_blocks
    total = 0
    for start in range(0, num_blocks, SCANNED):
        block = start + tl.arange(0, SCANNED)
        count = tl.load(count_B + block, mask=block < num_blocks, other=0)
        tl.store(count_B + block, total + tl.cumsum(count, 0) - count, mask=block < num_blocks)
        total += tl.sum(count, 0)
    tl.store(first_G1 + group + 1, total)


@kernel(do_not_specialize=["num_groups"])
def _scan_groups(first_G1, num_groups, SCANNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replaces, in one program, counts of rows behind the first element by first rows."""
    tl.store(first_G1, 0)
    total = 0
    for start in range(0, num_groups, SCANNED):
        group = start + tl.arange(0, SCANNED)
        count = tl.load(first_G1 + 1 + group, mask=group < num_groups, other=0)
        tl.store(first_G1 + 1 + group, total + tl.cumsum(count, 0), mask=group < num_groups)
        total += tl.sum(count, 0)


@kernel(do_not_specialize=["num_choices", "num_groups", "num_blocks"])
def _place(  # type: ignore[no-untyped-def]
    group_P, routing, before_GB, num_choices, num_groups, num_blocks, BLOCK: tl.constexpr
):
    """Replaces, one block per program, ranks in ``row_TK`` by rows, and stores the choice of each row."""
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    group = _groups_of(group_P, choice, num_choices, num_groups)
    kept = group >= 0
    rank = tl.load(routing.row_TK + choice, mask=kept, other=0)
    before = tl.load(before_GB + group.to(tl.int64) * num_blocks + block, mask=kept, other=0)
    row = tl.load(routing.first_G1 + group, mask=kept, other=0) + before + rank
    tl.store(routing.row_TK + choice, tl.where(kept, row, -1), mask=choice < num_choices)
    tl.store(routing.entry_P + row, choice, mask=kept)
    # Each place of entry_P is written once: as some choice's row, or here.
    num_rows = tl.load(routing.first_G1 + num_groups)
    tl.store(routing.entry_P + choice, -1, mask=(choice >= num_rows) & (choice < num_choices))
