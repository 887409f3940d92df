"""What a split costs in a step, compiled: products on the busiest rank, and rows on the busiest links.

A step sends every row four times, to its expert and back, forward and backward. An all-to-all takes as long as its
busiest link; a rank computes once its own rows are there, so that of two of the four only those of its own links count.
Products, gathers and links are those of ``moesys.cost``, without latencies, tiles and memory; what does not depend on a
split, such as experts' own way, is left out. Integers, so that all ranks find the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.compiled import compiled
from moesys.config import ClusterSpec, ModelShape
from moesys.cost import expert_seconds, memory_seconds
from moesys.load import IntArray

# What the dearest token costs at most, and all tokens together: a sum of several steps still fits.
DEAREST, ALL_TOKENS = 1 << 20, 1 << 58


class Prices(NamedTuple):
    """Seconds of a token, in a unit of their own; int64. A node here is a domain of the links.

    ``row`` [1]: computed, forward and backward; ``inside`` [1]: sent or received inside the node by a rank, four times;
    ``node_N``: sent or received by each node, four times.
    """

    row: IntArray
    inside: IntArray
    node_N: IntArray


def row_seconds(model: ModelShape, cluster: ClusterSpec) -> float:
    """Seconds in which a rank computes a row, forward and backward, and gathers it for combine and its gradient."""
    products = sum(expert_seconds(1.0, model, cluster, backward) for backward in (False, True))
    return products + memory_seconds(2.0 * 2 * model.hidden_size * model.bytes_per_element, cluster)


def prices_of(model: ModelShape, cluster: ClusterSpec, num_tokens: int) -> Prices:
    """Returns the prices of a token of ``model`` on ``cluster``, for sums over ``num_tokens``. A domain has its ranks'
    shares of their nodes' NICs.
    """
    row_bytes = model.hidden_size * model.bytes_per_element
    row = row_seconds(model, cluster)
    inside = 4 * row_bytes / (cluster.intra_node_gb_per_s * 1e9)
    share_R = np.repeat(1 / np.array(cluster.node_sizes), cluster.node_sizes)
    share_N = np.bincount(cluster.domain_of_rank, weights=share_R)
    node_N = 4 * row_bytes / (cluster.inter_node_gb_per_s * 1e9 * share_N)
    unit = max(row, inside, float(node_N.max())) / max(min(DEAREST, ALL_TOKENS // max(num_tokens, 1)), 1)
    return Prices(*(np.rint(np.atleast_1d(seconds) / unit).astype(np.int64) for seconds in (row, inside, node_N)))


@compiled
def split_cost(tokens_RE, supply_NE, node_R, table, tokens_P, prices):  # type: ignore[no-untyped-def]
    """Returns what a split costs in a step, and what of it links cost; in the unit of ``prices``.

    ``tokens_P``: of each replica of ``table``. What of a node's traffic with others is whose is not known: each of its
    ranks counts an equal part.
    """
    num_ranks, num_experts = tokens_RE.shape
    num_nodes = supply_NE.shape[0]
    load_R, kept_R, size_N = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_nodes, np.int64)
    out_N, in_N = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    for node in range(num_nodes):
        for expert in range(num_experts):
            out_N[node] += supply_NE[node, expert]
    for expert in range(num_experts):
        # replicas are by rank, so those of a node follow one another
        node, here = -1, np.int64(0)
        for replica in range(table.first_E[expert], table.first_E[expert + 1]):
            rank, tokens = table.rank_P[replica], tokens_P[replica]
            load_R[rank] += tokens
            kept_R[rank] += min(tokens, tokens_RE[rank, expert])
            if node_R[rank] != node:
                if node >= 0:
                    at_home = min(here, supply_NE[node, expert])
                    out_N[node] -= at_home
                    in_N[node] += here - at_home
                node, here = node_R[rank], np.int64(0)
            here += tokens
        if node >= 0:
            at_home = min(here, supply_NE[node, expert])
            out_N[node] -= at_home
            in_N[node] += here - at_home
    for rank in range(num_ranks):
        size_N[node_R[rank]] += 1
    busiest_N, links_N = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    for node in range(num_nodes):
        links_N[node] = max(out_N[node], in_N[node]) * prices.node_N[node]
    for rank in range(num_ranks):
        node, sent = node_R[rank], -kept_R[rank]
        for expert in range(num_experts):
            sent += tokens_RE[rank, expert]
        sent -= out_N[node] // size_N[node]
        received = load_R[rank] - kept_R[rank] - in_N[node] // size_N[node]
        links_N[node] = max(links_N[node], max(sent, received) * prices.inside[0])
        busiest_N[node] = max(busiest_N[node], load_R[rank])
    links = links_N.max()
    return (links_N // 2 + busiest_N * prices.row[0]).max() + links // 2, links
