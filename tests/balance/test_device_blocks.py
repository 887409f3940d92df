"""Splits in whole blocks for counts on a device: the host's plans, stretch by stretch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_blocks import drawn_plan

import moesys as ms
from moesys.balance.blocks import by_blocks
from moesys.kernels.split.blocks import split_by_blocks
from moesys.layout import TokenPlan
from moesys.overlap.device_split import split_tables
from moesys.overlap.mega_executor import tokens_by_replica


def assert_is_the_hosts(plan: TokenPlan, block_rows: int) -> None:
    cluster = ms.ClusterSpec(ranks_per_node=plan.layout.num_ranks)
    tables = split_tables(plan.layout, cluster, "cpu")
    tokens_RE = torch.tensor(plan.load.tokens_RE)
    found = split_by_blocks(tokens_RE, tokens_by_replica(plan, torch.device("cpu")), tables, block_rows)
    wanted = by_blocks(plan, block_rows)
    assert torch.equal(found.tokens_RP, tokens_by_replica(wanted, torch.device("cpu")))
    # An entry of the host's begins where those before it of its source and expert end.
    first_RP, ends = torch.zeros_like(found.first_RP), {}
    for source, expert, destination, tokens in wanted.entries.tolist():
        first_RP[source, tables.replica_ER[expert, destination]] = ends.get((source, expert), 0)
        ends[source, expert] = ends.get((source, expert), 0) + tokens
    assert torch.equal(found.first_RP, first_RP)


# A program of the interpreter that goes step by step.
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 16, 50, 256]))
def test_any_plans_stretches_are_the_hosts(seed: int, block_rows: int) -> None:
    plan = drawn_plan(seed)
    # Blocks of a row are one step each where plans change hands at every other.
    assert_is_the_hosts(plan, max(block_rows, plan.load.total // 400))


# Each case says which edge it is: (tokens_RE, expert_RS, entries, rows of a block).
EDGES = {
    "no tokens": ([[0], [0]], [[0], [0]], [], 16),
    "one rank": ([[3, 0, 40]], [[2, 0, 1]], [[0, 0, 0, 3], [0, 2, 0, 40]], 16),
    "a block of all sources": ([[3], [0], [4]], [[0], [0], [0]], [[0, 0, 0, 3], [2, 0, 2, 4]], 16),
    "one source, many blocks each": ([[1000], [0]], [[0], [0]], [[0, 0, 0, 300], [0, 0, 1, 700]], 16),
    "half a block decides": ([[64], [0]], [[0], [0]], [[0, 0, 0, 24], [0, 0, 1, 40]], 16),
    "less than half a block": ([[64], [0]], [[0], [0]], [[0, 0, 0, 23], [0, 0, 1, 41]], 16),
}


@pytest.mark.parametrize(("tokens_RE", "expert_RS", "entries", "block_rows"), EDGES.values(), ids=EDGES)
def test_edges_are_the_hosts(
    tokens_RE: list[list[int]], expert_RS: list[list[int]], entries: list[list[int]], block_rows: int
) -> None:
    load = ms.LoadMatrix(tokens_RE)
    plan = TokenPlan(
        np.array(entries, dtype=np.int64).reshape(-1, 4), load, ms.ExpertLayout(np.array(expert_RS), load.num_experts)
    )
    assert_is_the_hosts(plan, block_rows)


@pytest.mark.parametrize("split", [ms.EvenSplit(), ms.FlowSplit()], ids=lambda split: split.kind)
def test_planned_splits_of_sixteen_ranks_are_the_hosts(split: ms.EvenSplit | ms.FlowSplit) -> None:
    rng, cluster = np.random.default_rng(0), ms.ClusterSpec(num_nodes=2, ranks_per_node=8)
    load = ms.LoadMatrix(rng.poisson(60 * rng.lognormal(0, 1, (16, 24))))
    layout = ms.plan_layout(load, cluster, ms.Greedy(), 3)
    assert_is_the_hosts(ms.split_tokens(load, layout, cluster, split), 256)
