"""The benchmark of optimizers shows a time only of what computes the same, and less work than the repeated one."""

from __future__ import annotations

import pytest

from benchmarks import optimizers as bench
from moesys.lab.ranks.pool import LocalRanks

SMALL = bench.Size(layers=2, experts=4, hidden=48, width=40)


def test_muon_on_ranks_is_that_of_each_rank_alone(ranks: LocalRanks) -> None:
    rows = {row.name: row for row in bench.of_slowest(ranks.run(bench.measure_on_rank, SMALL, 2, num_ranks=2))}
    assert [*rows] == [bench.REPEATED, "muon, ep", "muon, fsep", "adamw, ep", "adamw, fsep"]
    assert not any(row.wrong for row in rows.values())
    # Each rank has half of the experts' float32 elements. It gathers the other half, or gets slices of the update of
    # experts that the other rank owns.
    half = 2 * 4 * 3 * 48 * 40 * 4 / 2
    received = [row.received_mb * 1e6 for row in rows.values()]
    assert received == pytest.approx([half, 0, half / 2, 0, 0])
    # One float32 of each, or two with AdamW.
    held = [row.state_mb * 1e6 / half for row in rows.values()]
    assert held == pytest.approx([1, 1, 1, 2, 2], rel=0.05)
    # Parameters, gradients and state are three and four of them.
    assert all(row.peak_mb * 1e6 >= (2 + of_state) * half for row, of_state in zip(rows.values(), held, strict=True))
    assert all(row.step_ms > 0 for row in rows.values())


def test_a_wrong_result_shows_no_time() -> None:
    rows = [[bench.Row("muon, ep", [1.0, 3.0], [1.0, 1.0], 0.0, 1.0, 1.0, error)] for error in (0.0, 1e-3)]
    (row,) = bench.of_slowest(rows)
    assert row.wrong == "differs by 1.0e-03"
    assert row.step_ms is None
