"""Plans in whole blocks: every token once and with a holder, every block with one rank, and about as many as before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.balance.row_blocks import by_blocks
from moesys.layout import TokenPlan
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder
from moesys.overlap.exact_sum import BlockSums


def drawn_plan(seed: int) -> TokenPlan:
    """Any tokens over any holders."""
    rng = np.random.default_rng(seed)
    R, E = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    tokens_RE = rng.integers(0, 400, (R, E)) * (rng.random((R, E)) < 0.8)
    held_RE = rng.random((R, E)) < 0.4
    held_RE[rng.integers(R, size=E), np.arange(E)] = True
    S = held_RE.sum(axis=1).max()
    expert_RS = [[*np.flatnonzero(held_E), *[-1] * (S - held_E.sum())] for held_E in held_RE]
    load, layout = ms.planning.LoadMatrix(tokens_RE), ms.planning.ExpertLayout(np.array(expert_RS), E)
    tokens_RER = np.zeros((R, E, R), dtype=np.int64)
    for source, expert in np.argwhere(tokens_RE):
        holders = np.flatnonzero(held_RE[:, expert])
        cuts = np.sort(rng.integers(0, tokens_RE[source, expert] + 1, len(holders) - 1))
        tokens_RER[source, expert, holders] = np.diff([0, *cuts, tokens_RE[source, expert]])
    return TokenPlan.from_dense(tokens_RER, load, layout)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 16, 50, 256]))
def test_every_block_has_one_rank(seed: int, block_rows: int) -> None:
    plan = drawn_plan(seed)
    found = by_blocks(plan, block_rows)
    # All that a plan must be is checked again here.
    TokenPlan(found.entries, found.load, found.layout)
    for expert in range(plan.load.num_experts):
        of_row = [
            np.repeat(destination, tokens) for _, of, destination, tokens in found.entries.tolist() if of == expert
        ]
        line = np.concatenate([*of_row, np.zeros(0, dtype=np.int64)])
        blocks = cut(len(line), block_rows)
        assert all(len(set(line[block])) == 1 for block in blocks)
        # What a rank has of an expert is cut as the whole line is.
        for rank in set(line.tolist()):
            mine = [block for block in blocks if line[block.start] == rank]
            assert [size(block) for block in cut((line == rank).sum(), block_rows)] == [size(block) for block in mine]


@given(st.integers(0, 2000), st.sampled_from([1, 16, 50, 256]))
def test_all_rows_are_in_blocks_none_of_which_is_small(num_rows: int, block_rows: int) -> None:
    sizes = [size(block) for block in cut(num_rows, block_rows)]
    assert sum(sizes) == num_rows
    assert all(of == block_rows for of in sizes[:-1])
    assert all(2 * of < 3 * block_rows and (2 * of >= block_rows or len(sizes) == 1) for of in sizes[-1:])


def cut(num_rows: int, block_rows: int) -> list[slice]:
    """As products of the CPU cut rows."""
    alone = Channel(None, (0,), Recorder(0), Meter())
    return BlockSums(block_rows, (), torch.zeros(0), alone, pytest.fail).blocks(int(num_rows))


def size(block: slice) -> int:
    return block.stop - block.start


@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 50, 256]))
def test_a_rank_gets_about_as_much_as_before(seed: int, block_rows: int) -> None:
    """An expert's cut moves by less than a block; and cuts of all experts do not add up on a rank."""
    plan = drawn_plan(seed)
    moved_R = by_blocks(plan, block_rows).tokens_R - plan.tokens_R
    assert np.abs(moved_R).max() <= 2 * block_rows


@pytest.mark.parametrize("block_rows", [1, 16])
def test_one_holder_keeps_its_tokens(block_rows: int) -> None:
    load = ms.planning.LoadMatrix([[5, 20], [7, 3]])
    plan = ms.planning.split_tokens(
        load, ms.planning.ExpertLayout(np.array([[0], [1]]), 2), ms.ClusterSpec(ranks_per_node=2), ms.EvenSplit()
    )
    assert by_blocks(plan, block_rows) == plan
