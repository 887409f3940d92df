"""What blocks are made of: where pieces of work and blocks of rows meet."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moesys.simulator.mega.queues import number_in_rank
from moesys.simulator.mega.units import meetings


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_a_row_is_in_the_meeting_of_its_piece_and_its_block(rows_B, data):
    """Of pieces in any order, some of them empty, that leave rows out or not."""
    end_B = np.cumsum(rows_B)
    ends = sorted(data.draw(st.lists(st.integers(0, int(end_B[-1])), max_size=20)))
    pieces = data.draw(st.permutations(list(itertools.pairwise(ends))))
    pieces = [piece for piece in pieces if data.draw(st.booleans())]
    first, end = (np.array([piece[side] for piece in pieces], dtype=np.int64) for side in (0, 1))
    block_of_row = np.repeat(np.arange(len(rows_B)), rows_B)
    wanted = [
        (piece, block, int(rows.min()), int(rows.max()) + 1)
        for piece, (begin, until) in enumerate(pieces)
        for block in np.unique(block_of_row[begin:until])
        for rows in [begin + np.flatnonzero(block_of_row[begin:until] == block)]
    ]
    assert list(zip(*(column.tolist() for column in meetings(first, end, end_B)), strict=True)) == wanted


@given(st.lists(st.integers(0, 6), max_size=30))
def test_numbers_begin_anew_with_each_rank(ranks):
    ranks = sorted(ranks)
    numbers = [ranks[:place].count(rank) for place, rank in enumerate(ranks)]
    assert number_in_rank(np.array(ranks, dtype=np.int64)).tolist() == numbers
