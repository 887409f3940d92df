"""Rows cross to a node once: bits as of direct where every row comes home, bytes on the wire as the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Case, run_cases
from test_bits import assert_same_bits

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

CLUSTERS = {
    "2 nodes x 2 ranks": ms.ClusterSpec(num_nodes=2, ranks_per_node=2),
    "nodes of 3 and 1": ms.ClusterSpec(num_nodes=2, ranks_per_node=(3, 1)),
    "nodes of 1, 2 and 1": ms.ClusterSpec(num_nodes=3, ranks_per_node=(1, 2, 1)),
    "4 nodes of a rank": ms.ClusterSpec(num_nodes=4, ranks_per_node=1),
    "one node": ms.ClusterSpec(num_nodes=1, ranks_per_node=4),
}
FSEP = ms.Strategy(
    name="fsep", sharding=ms.Fsep(slots_per_rank=(5, 3, 0, 4)), balance=ms.Greedy(), split=ms.FlowSplit()
)
STRATEGIES = [ms.Strategy(name="ep"), FSEP]
TOKENS = [[37, 5, 0, 18], [0, 23, 41, 9]]


def shape(dtype: str = "float32", K: int = 4) -> ms.ModelShape:
    return ms.ModelShape(hidden_size=24, intermediate_size=16, num_experts=7, top_k=K, dtype=dtype)


def of(strategy: ms.Strategy, **changes: Any) -> list[ms.Strategy]:
    """Sequential twice, and in chunks."""
    overlaps = [ms.Sequential(**changes), ms.Sequential(**changes)]
    overlaps += [ms.Pipelined(chunks=chunks, **changes) for chunks in (3, 8)]
    return [strategy.replace(overlap=overlap) for overlap in overlaps]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_rows_once_a_node_change_no_bit_and_sums_a_node_have_bits_of_their_own(
    ranks: LocalRanks, name: str, dtype: str
) -> None:
    cases = []
    for strategy in STRATEGIES:
        variants = [strategy, *of(strategy, node_dispatch="once")]
        variants += of(strategy, node_dispatch="once", combine="per_node")
        cases += [Case(shape(dtype), each, TOKENS, cluster=CLUSTERS[name], shuffle_layouts=True) for each in variants]
    for rank, results in enumerate(ranks.run(run_cases, cases, timeout_s=240)):
        for strategy, first in zip(STRATEGIES, (0, 9), strict=True):
            what = f"rank {rank}, {strategy.name}"
            direct, once, sums = results[first], results[first + 1 : first + 5], results[first + 5 : first + 9]
            assert_same_bits([direct, *once], what)
            assert_same_bits(sums, what)
            tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
            for part in ("outputs", "dx"):
                for a, b in zip(direct[part], sums[0][part], strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            for a, b in zip(direct["gradients"].values(), sums[0]["gradients"].values(), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=10 * tolerance)
