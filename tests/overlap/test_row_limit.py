"""More rows than a rank has room for: devices that plan run nothing then, and every rank says what would be enough."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mega_case import Case, Drawn, MegaRun, new_heaps

import moesys as ms
from moesys.collectives import RankMismatchError
from moesys.kernels.split.tables import keep_within
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.device_routes import RowLimit, room_for_rows, split_tables

# The experts of four ranks, of which the first holds one more; each source sends so many tokens to each replica.
LAYOUT = ms.planning.ExpertLayout(np.array([[0, 1], [1, 2], [3, -1], [4, -1]]), 5)
TOKENS_RP = torch.tensor([[3, 1, 0, 2, 0, 1], [0, 4, 0, 0, 0, 0], [0, 0, 0, 0, 5, 0], [1, 0, 1, 0, 0, 0]])
ROWS_R = [3 + 1 + 1 + 4, 1 + 2, 5, 1]
# The ranks of their group.
MEMBERS = [8, 10, 12, 14]


def test_a_plan_is_kept_if_it_fits_and_else_none_is():
    tables = split_tables(LAYOUT, ms.ClusterSpec(ranks_per_node=4), "cpu")
    limit = RowLimit(torch.device("cpu"), MEMBERS)
    counted = torch.tensor([[5, 7], [5, 4], [5, 5], [5, 2]]), 5
    assert torch.equal(keep_within(TOKENS_RP, tables, max(ROWS_R), 7, *counted, limit.found_9), TOKENS_RP)
    limit.wait()
    assert not keep_within(TOKENS_RP, tables, max(ROWS_R) - 1, 7, *counted, limit.found_9).any()
    # A later plan that fits takes nothing back.
    keep_within(TOKENS_RP, tables, max(ROWS_R), 7, *counted, limit.found_9)
    words = r"rank 8 would get 9 rows, more than the 8 that rows_cap allows for 7 .* use MegaKernel\(rows_cap=1.29\)"
    with pytest.raises(ValueError, match=words):
        limit.note()
    # An error that was raised is over.
    limit.note()
    limit.wait()


@pytest.mark.parametrize(
    ("origin", "error", "words"),
    [
        (
            (2, 4),
            RankMismatchError,
            "different calls: rank 10: .*evaluation .*declaration 02.*; this rank: .*declaration 05",
        ),
        ((5, 6), ValueError, r"expert_TK of rank 10 has choices that name no expert \(2\)"),
        # A rank that was given up is another error's.
        ((0, -1), None, ""),
    ],
    ids=["another call", "no expert", "given up"],
)
def test_no_token_travels_where_counts_do_not_belong_together(
    origin: tuple[int, int], error: type[Exception] | None, words: str
) -> None:
    tables = split_tables(LAYOUT, ms.ClusterSpec(ranks_per_node=4), "cpu")
    limit = RowLimit(torch.device("cpu"), MEMBERS)
    origin_R2 = torch.tensor([[5, 7], origin, [5, 5], [5, 2]])
    kept_RP = keep_within(TOKENS_RP, tables, max(ROWS_R), 7, origin_R2, 5, limit.found_9)
    if error is None:
        limit.wait()
        assert torch.equal(kept_RP, TOKENS_RP)
        return
    assert not kept_RP.any()
    # Another layer's plan, behind it: the error is still that of the first.
    other_R2 = torch.tensor([[6, 7], [6, 4], [6, 5], [6, 2]])
    keep_within(TOKENS_RP, tables, max(ROWS_R), 7, other_R2, 6, limit.found_9)
    with pytest.raises(error, match=words):
        limit.wait()
    limit.wait()


def test_room_is_what_the_cap_says_and_never_more_than_all_choices():
    assert room_for_rows(ms.MegaKernel(rows_cap=1.5), 10, 3, num_ranks=4) == 45
    assert room_for_rows(ms.MegaKernel(rows_cap=9.0), 10, 3, num_ranks=4) == 120


# All experts have one holder, whom every token of four ranks wants.
SKEWED = Case(2, 2, 20, 8, "float32", (9, 9, 9, 9), 1, (), split=ms.EvenSplit())
POINT = ms.MegaKernel(most_tokens=9, rows_cap=1.0)


def refused(case: Case) -> list[str]:
    """A micro-batch with too many rows for a rank, again, and one of more tokens than were declared."""
    rank, heaps = dist.get_rank(), new_heaps(4)
    run = MegaRun(Drawn(case), rank, heaps)
    said = []
    for point in (POINT, POINT, POINT.replace(most_tokens=8)):
        with pytest.raises(ValueError, match="use MegaKernel") as error:
            run.forward(point)
        said.append(str(error.value))
    return said


def test_every_rank_refuses_alike_and_none_waits(ranks: LocalRanks) -> None:
    rows_R = Drawn(SKEWED).plan.tokens_R
    assert rows_R.max() == 36
    said = ranks.run(refused, SKEWED, timeout_s=100)
    assert len({tuple(words) for words in said}) == 1
    first, second, third = said[0]
    assert first == second
    assert first in {
        f"rank {rank} would get 36 rows, more than the 18 that rows_cap allows for 18 choices of a rank; use "
        "MegaKernel(rows_cap=2), or a balance or split that loads ranks more evenly"
        for rank in np.flatnonzero(rows_R == 36)
    }
    assert third.startswith("9 tokens of a rank, but most_tokens=8, for which all ranks have memory")
