"""The event loop by itself: what opens gates, and when."""

from __future__ import annotations

import numpy as np

from moesys.simulator.mega.events import run_all
from moesys.simulator.mega.queues import Gates, Launches, Machine, Runs, Table


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
