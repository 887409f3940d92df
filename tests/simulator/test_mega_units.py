"""What simulated MegaKernels are made of: where pieces of work and blocks of rows meet, and when events open gates."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moesys.simulator.mega.events import run_all
from moesys.simulator.mega.queues import Gates, Launches, Machine, Runs, Table, number_in_rank
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


def test_ranks_see_the_flag_of_another_rank_a_flags_time_later():
    """Rank 0's one task opens a gate of its own, and that a gate of each rank, which its task waits for."""
    R, flag_seconds, none = 4, 5.0, np.zeros(0, dtype=np.int64)
    # Run and launch r + 1 are rank r's second; gate 0 is the task's, gate r + 1 is rank r's.
    rank = np.array([0, 0, 1, 2, 3])
    runs = Runs(
        tasks=np.ones(R + 1, dtype=np.int64),
        compute=np.ones(R + 1),
        memory=np.zeros(R + 1),
        latency=np.zeros(R + 1),
        gate=np.arange(R + 1) - (np.arange(R + 1) == 0),
        needs=(none, none),
        opens=Table.of(np.array([0]), np.array([0]), R + 1),
        links=Table.of(none, none, R + 1),
        link_bytes=np.zeros(0),
    )
    gates = Gates(
        np.ones(R + 1, dtype=np.int64), rank, Table.of(np.zeros(R, dtype=np.int64), np.arange(1, R + 1), R + 1)
    )
    launches = Launches(rank, np.arange(R + 1), np.ones(R + 1, dtype=np.int64))
    machine = Machine(1, 0.0, flag_seconds, np.ones(2 * R + 2))
    times = run_all(runs, gates, launches, machine, np.zeros(R), np.zeros(R))
    assert times.ready.tolist() == [0.0, 1.0, 6.0, 6.0, 6.0]
    assert times.end_L.tolist() == [1.0, 2.0, 7.0, 7.0, 7.0]
