"""Rows cross to a node once: the order of a node's sum, parts of large rows, bytes on the wire as the formula says.

tests/moe/test_matrix.py compares the results with those of rows that travel directly.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from harness import gradients_of
from test_node_gradients import CLUSTERS

import moesys as ms
from moesys.config import Overlap
from moesys.lab.ranks.pool import LocalRanks
from moesys.row_traffic import row_traffic

SHARDING = ms.Fsep(slots_per_rank=(5, 3, 0, 4))
FSEP = ms.Strategy(name="fsep", sharding=SHARDING, balance=ms.Greedy(), split=ms.FlowSplit())
H = 24


def shape(dtype: str = "float32", K: int = 4) -> ms.ModelShape:
    return ms.ModelShape(hidden_size=H, intermediate_size=16, num_experts=7, top_k=K, dtype=dtype)


def summed_by_node(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, the same by hand): rows of each choice by themselves, then a node's sum in the order of k."""
    cluster, rank, K = CLUSTERS["nodes of 1, 2 and 1"], dist.get_rank(), 4
    x_TH = torch.randn(30, H, generator=torch.Generator().manual_seed(rank)).to(getattr(torch, dtype))
    expert_TK = chosen(rank, 30, K)
    weight_TK = torch.rand(30, K, generator=torch.Generator().manual_seed(rank))

    def output(overlap: Overlap, weight_TK: torch.Tensor) -> torch.Tensor:
        strategy = ms.Strategy(name="ep", overlap=overlap)
        return ms.Experts(shape(dtype), strategy, cluster=cluster)(x_TH, expert_TK, weight_TK).detach()

    row_KTH = [output(ms.Sequential(), torch.eye(K)[k].expand(30, K)) for k in range(K)]
    # Owners of 2, 2, 2 and 1 of the experts.
    node_TK = torch.tensor(cluster.node_of_rank)[expert_TK // 2]
    expected_TH = torch.empty_like(x_TH)
    for token in range(30):
        summands, sums = [], {node: [] for node in range(3) if node != cluster.node_of_rank[rank]}
        for k in range(K):
            row = weight_TK[token, k] * row_KTH[k][token].float()
            sums.get(int(node_TK[token, k]), summands).append(row)
        summands += [sum(rows[1:], rows[0]).to(x_TH.dtype).float() for rows in sums.values() if rows]
        expected_TH[token] = sum(summands[1:], summands[0]).to(x_TH.dtype)
    return output(ms.Sequential(node_dispatch="once", combine="per_node"), weight_TK), expected_TH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nodes_sum_is_in_the_order_of_k_and_home_adds_own_rows_first(ranks: LocalRanks, dtype: str) -> None:
    for found, expected in ranks.run(summed_by_node, dtype):
        assert torch.equal(found, expected)


def large_rows(overlap: Overlap) -> tuple[list[torch.Tensor], int, dict]:
    """(output and gradients, parts in which rows cross, bytes this rank received) of one micro-batch.

    Parts may be so small that few rows are several.
    """
    cluster, rank, K = CLUSTERS["nodes of 1, 2 and 1"], dist.get_rank(), 4
    large = shape(K=K).replace(hidden_size=206)
    experts = ms.Experts(large, ms.Strategy(name="ep", overlap=overlap), cluster=cluster)
    generator = torch.Generator().manual_seed(rank)
    x_TH = torch.randn(100, 206, generator=generator, requires_grad=True)
    weight_TK = torch.rand(100, K, generator=generator, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesys.row_traffic.LEAST_PART_BYTES", 5e4)
        y_TH = experts(x_TH, chosen(rank, 100, K), weight_TK)
        y_TH.square().sum().backward()
        parts = row_traffic(experts.last_plan.tokens, large, cluster, overlap).parts
    received = {key: num for key, num in experts.meter.wire_bytes.items() if key[0] in ("dispatch", "combine")}
    return [y_TH.detach(), x_TH.grad, weight_TK.grad, *gradients_of(experts).values()], parts, received


@pytest.mark.parametrize("combine", ["per_node", pytest.param("ordered", marks=pytest.mark.slow)])
def test_large_rows_cross_in_parts_and_change_neither_bits_nor_bytes(ranks: LocalRanks, combine: str) -> None:
    """Columns of a row that are no multiple of the parts; chunks, which cross whole, are the measure."""
    once = ms.Pipelined(chunks=2, node_dispatch="once", combine=combine)
    whole = ranks.run(large_rows, once, timeout_s=240)
    parts = ranks.run(large_rows, ms.Sequential(node_dispatch="once", combine=combine), timeout_s=240)
    for (expected, one, expected_bytes), (found, several, found_bytes) in zip(whole, parts, strict=True):
        assert (one, several) == (1, 4)
        assert_equal(found, expected)
        assert found_bytes == expected_bytes


BYTES_OF_NUMBER = 4


def chosen(rank: int, num_tokens: int, K: int) -> torch.Tensor:
    """Experts of each token of a rank, [T, K]."""
    return torch.rand(num_tokens, 7, generator=torch.Generator().manual_seed(rank)).argsort(dim=1)[:, :K].contiguous()


def counted_bytes(cluster: ms.ClusterSpec, overlap: Overlap, tokens: list[int]) -> tuple[list, dict]:
    """(entries of the plan, bytes this rank received) of one micro-batch there and back."""
    rank, K = dist.get_rank(), 4
    experts = ms.Experts(shape(), FSEP.replace(overlap=overlap), cluster=cluster)
    x_TH = torch.randn(tokens[rank], H, requires_grad=True)
    weight_TK = torch.rand(tokens[rank], K, requires_grad=True)
    y_TH = experts(x_TH, chosen(rank, tokens[rank], K), weight_TK)
    y_TH.sum().backward()
    received = dict(experts.meter.wire_bytes)
    return experts.last_plan.tokens.entries.tolist(), {
        key: num for key, num in received.items() if key[0] in ("dispatch", "combine", "counts")
    }


def expected_bytes(
    entries: list[list[int]], cluster: ms.ClusterSpec, tokens: list[int], sums: bool
) -> list[dict[tuple[str, str], int]]:
    """What each rank receives, row by row: an expert's rows of a source go to its destinations in (token, k) order."""
    node, R = cluster.node_of_rank, cluster.num_ranks
    first = [node.index(of) for of in node]
    sizes = cluster.node_sizes

    def gate(source: int, of: int) -> int:
        return node.index(of) + (source - first[source]) % sizes[of]

    received: list[dict[tuple[str, str], int]] = [{} for _ in range(R)]

    def send(lane: str, source: int, destination: int, num_bytes: int) -> None:
        if source != destination and num_bytes:
            key = lane, "intra_node" if node[source] == node[destination] else "inter_node"
            received[destination][key] = received[destination].get(key, 0) + num_bytes

    for source in range(R):
        where: dict[int, list[int]] = {}
        for _, expert, destination, count in (entry for entry in entries if entry[0] == source):
            where.setdefault(expert, []).extend([destination] * count)
        for row in chosen(source, tokens[source], 4).tolist():
            destinations = [where[expert].pop(0) for expert in row]
            visited = {node[destination] for destination in destinations} - {node[source]}
            for of in visited:
                send("dispatch", source, gate(source, of), 2 * H * 4)
                if sums:
                    send("combine", gate(source, of), source, 2 * H * 4)
            for destination in destinations:
                at = source if node[source] == node[destination] else gate(source, node[destination])
                send("dispatch", at, destination, 2 * H * 4)
                send("combine", destination, at if sums else source, 2 * H * 4)
                # Routing weights to experts and their gradients home; what a gate is told, and weights for its sums.
                send("dispatch", source, destination, BYTES_OF_NUMBER)
                send("combine", destination, source, BYTES_OF_NUMBER)
                if at != source:
                    send("counts", source, at, BYTES_OF_NUMBER)
                    send("dispatch", source, at, BYTES_OF_NUMBER * sums)
        assert not any(where.values())
    return received


def all_counted(cases: list[tuple[ms.ClusterSpec, Overlap, list[int]]]) -> list[tuple[list, dict]]:
    return [counted_bytes(*case) for case in cases]


def test_bytes_on_the_wire_are_those_of_the_formula(ranks: LocalRanks) -> None:
    """Every cluster of several nodes, whole with every row home, and in chunks with sums home."""
    tokens = [37, 0, 41, 9]
    cases = [
        (cluster, ms.Pipelined(chunks=chunks, node_dispatch="once", combine=combine), tokens)
        for cluster in CLUSTERS.values()
        if cluster.num_nodes > 1
        for chunks, combine in ((1, "ordered"), (3, "per_node"))
    ]
    for (cluster, overlap, _), *found in zip(cases, *ranks.run(all_counted, cases), strict=True):
        entries, node = found[0][0], cluster.node_of_rank
        expected = expected_bytes(entries, cluster, tokens, overlap.combine == "per_node")
        assert sum(count for source, _, to, count in entries if node[source] != node[to]) > 50, "no rows cross"
        assert [received for _, received in found] == expected, (cluster, overlap)
