"""The split in three launches: what the reference has, without waiting for a count. The host's bytes: tests/balance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_equal
from flow_reference import split_reference
from host_waits import host_waits_refused
from torch import Tensor

from moesys.kernels.split import tables as split_module
from moesys.kernels.split.flow import split
from moesys.kernels.split.tables import SplitTables, entries_of, tables_of

FOUR = [[0, 1], [0, 2], [1, 3], [3, 0]]


def tables(expert_RS: list[list[int]], num_experts: int, nodes: list[int]) -> SplitTables:
    """For nodes of so many ranks; domains are nodes."""
    node_R = np.repeat(np.arange(len(nodes)), nodes)
    return tables_of(np.array(expert_RS), num_experts, node_R, node_R[None], "cpu")


def skewed(seed: int, num_ranks: int, num_experts: int) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.poisson(40 * rng.lognormal(0, 1.5, (num_ranks, num_experts))))


def test_tables_by_hand() -> None:
    """Ranks 0, 1 | 2, 3 in nodes; rank 0 has expert 1 twice, rank 1 nothing."""
    found = tables([[1, 1, 0], [-1, -1, -1], [0, -1, 1], [1, 2, 0]], 3, [2, 2])
    assert {name: table.tolist() for name, table in found._asdict().items()} == {
        "expert_P": [0, 0, 0, 1, 1, 1, 2],
        "rank_P": [0, 2, 3, 0, 2, 3, 3],
        "replica_ER": [[0, -1, 1, 2], [3, -1, 4, 5], [-1, -1, -1, 6]],
        "first_E1": [0, 3, 6, 7],
        "group_first_P": [0, 1, 1, 3, 4, 4, 6],
        "group_last_P": [0, 2, 2, 3, 5, 5, 6],
        "by_rank_P": [0, 3, 1, 4, 2, 5, 6],
        "first_R1": [0, 2, 2, 4, 7],
        "node_first_R": [0, 0, 2, 2],
        "node_last_R": [1, 1, 3, 3],
        "part_first_LR": [[0, 1, 2, 3], [0, 0, 2, 2], [0, 0, 0, 0]],
        "part_last_LR": [[0, 1, 2, 3], [1, 1, 3, 3], [3, 3, 3, 3]],
    }
    assert {table.dtype for table in found} == {torch.int32}


@pytest.mark.parametrize("split", [split, split_reference])
def test_by_hand(split) -> None:  # type: ignore[no-untyped-def]
    """Rank 0 wants 8 of expert 0, which both hold, and keeps the 5 that the limit leaves it."""
    found = tables([[0], [0]], 1, [2])
    plan = split(torch.tensor([[8], [2]]), found)
    assert plan.tokens_RP.tolist() == [[5, 3], [0, 2]]
    assert entries_of(plan.tokens_RP, found).tolist() == [[0, 0, 0, 5], [0, 0, 1, 3], [1, 0, 1, 2]]
    assert (int(plan.limit_tokens), bool(plan.converged)) == (5, True)


CHAIN = [[max(rank - 1, 0), min(rank, 8)] for rank in range(10)]


@pytest.mark.parametrize(("phases", "converged"), [(1, False), (8, False), (9, True)])
def test_too_few_phases_leave_what_the_reference_leaves(phases: int, converged: bool) -> None:
    """Each rank shares an expert with the next one: paths of many hops. It takes 9 phases."""
    found, tokens_RE = tables(CHAIN, 9, [3, 3, 4]), skewed(4, 10, 9)
    plan = split(tokens_RE, found, 1, phases)
    assert_equal(plan, split_reference(tokens_RE, found, 1, phases))
    assert plan.converged == converged
    sent_RE = torch.zeros_like(tokens_RE).index_add(1, found.expert_P.long(), plan.tokens_RP)
    assert torch.equal(sent_RE, tokens_RE)


def test_more_lanes_than_one_warp_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """41 replicas, 9 ranks: lanes behind the last, and a power of two of them that is not the least."""
    rng = np.random.default_rng(7)
    found = tables(np.argsort(rng.random((9, 6)), axis=1).tolist(), 6, [4, 5])
    tokens_RE = skewed(2, 9, 6)
    plan = split(tokens_RE, found)
    assert_equal(plan, split_reference(tokens_RE, found))
    monkeypatch.setattr(split_module, "FEWEST_LANES", 128)
    assert_equal(split(tokens_RE, found), plan)


def test_counts_in_another_order_of_memory_have_the_same_split_and_stay_as_they_are() -> None:
    found, tokens_RE = tables(FOUR, 4, [2, 2]), skewed(1, 4, 4)
    before = tokens_RE.clone()
    assert_equal(split(tokens_RE.t().contiguous().t(), found), split(tokens_RE, found))
    assert torch.equal(tokens_RE, before)


def test_the_turn_rotates_remainders_and_may_be_a_tensor() -> None:
    """Three tokens for expert 1 come from the other node: two for the one rank, one for the other, in turn."""
    found, tokens_RE = tables([[0], [0], [1], [1]], 2, [2, 2]), torch.tensor([[9, 3], [0, 0], [0, 0], [0, 0]])
    for turn, expected_P in enumerate([[5, 4, 2, 1], [5, 4, 1, 2], [5, 4, 2, 1]]):
        plan = split(tokens_RE, found, turn)
        assert plan.tokens_RP.sum(0).tolist() == expected_P
        assert_equal(split(tokens_RE, found, torch.tensor(turn)), plan)


def test_nothing_waits_for_a_count() -> None:
    found, tokens_RE, turn = tables(FOUR, 4, [2, 2]), skewed(1, 4, 4), torch.tensor(3)
    with host_waits_refused():
        split(tokens_RE, found, turn)


@pytest.mark.parametrize(
    ("tokens_RE", "phases", "message"),
    [
        (torch.ones(4, 3).long(), 9, "tokens_RE is torch.int64 [4, 3], the layout needs int64 [4, 4]; count tokens by"),
        (torch.ones(4, 4), 9, "tokens_RE is torch.float32 [4, 4], the layout needs int64 [4, 4]; count tokens by"),
        (torch.ones(4, 4, device="meta").long(), 9, "tokens_RE is on meta, the tables on cpu; use one device"),
        (torch.ones(4, 4).long(), 0, "phases=0 leaves no push; use at least 1"),
    ],
    ids=["another layout's", "floats", "on another device", "no phases"],
)
def test_what_is_refused(tokens_RE: Tensor, phases: int, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        split(tokens_RE, tables(FOUR, 4, [2, 2]), phases=phases)
    assert str(error.value).startswith(message)
