"""What a split costs in a step, compiled: products on the busiest rank, and rows on the busiest links.

A step sends every row four times, to its expert and back, forward and backward. An all-to-all takes as long as its
busiest link; a rank computes once its own rows are there, so that of two of the four only those of its own links count.
Experts that come meanwhile share the links with these two. Products, gathers and links are those of ``moesys.cost``,
without latencies, tiles and memory. Integers, so that all ranks find the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.compiled import compiled
from moesys.config import ClusterSpec, Fsep, ModelShape, Sharding
from moesys.cost import (
    FloatArray,
    expert_seconds,
    link_seconds,
    memory_seconds,
    reshard_seconds,
    restore_bytes,
    restores_per_step,
)
from moesys.layout import ExpertLayout
from moesys.load import IntArray

# What the dearest token costs at most, and all tokens together: a sum of several steps still fits.
DEAREST, ALL_TOKENS = 1 << 20, 1 << 58


class Prices(NamedTuple):
    """Seconds of a token, in a unit of their own; int64. A node here is a domain of the links.

    ``row`` [1]: computed, forward and backward; ``inside`` [1]: sent or received inside the node by a rank, once;
    ``node_N``: sent or received by each node, once; ``experts_2N``: of experts that come while rows are on their way
    there, in all, on each node's NICs and inside it; ``passes`` [1]: of two, those in which they come.
    """

    row: IntArray
    inside: IntArray
    node_N: IntArray
    experts_2N: IntArray
    passes: IntArray


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
    inside = row_bytes / (cluster.intra_node_gb_per_s * 1e9)
    share_R = np.repeat(1 / np.array(cluster.node_sizes), cluster.node_sizes)
    share_N = np.bincount(cluster.domain_of_rank, weights=share_R)
    node_N = row_bytes / (cluster.inter_node_gb_per_s * 1e9 * share_N)
    unit = max(row, inside, float(node_N.max())) / max(min(DEAREST, ALL_TOKENS // max(num_tokens, 1)), 1)
    row_1, inside_1, prices_N = (_rounded(np.atleast_1d(seconds) / unit) for seconds in (row, inside, node_N))
    return Prices(row_1, inside_1, prices_N, np.zeros((2, len(node_N)), np.int64), np.zeros(1, np.int64))


def _rounded(units: FloatArray) -> IntArray:
    return np.rint(units).astype(np.int64)


def with_experts(
    prices: Prices, layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, sharding: Sharding
) -> tuple[Prices, int]:
    """Returns ``prices`` beside the experts of ``layout`` on their way, and what gradients cost on theirs.

    What travels behind other work, prefetched or delayed, is taken to be hidden.
    """
    unit = row_seconds(model, cluster) / max(int(prices.row[0]), 1)
    R, domain_R, node_R = cluster.num_ranks, np.asarray(cluster.domain_of_rank), np.asarray(cluster.node_of_rank)
    experts_2N = np.zeros(prices.experts_2N.shape)
    prefetched, delayed = False, False
    if isinstance(sharding, Fsep):
        prefetched, delayed = sharding.prefetch_layers > 0, sharding.delay_reshard
    for bytes_RR in () if prefetched else restore_bytes(layout, model, cluster, sharding):
        inside_2R, nics_2N = np.split(link_seconds(bytes_RR, cluster), [2 * R])
        np.maximum.at(experts_2N[0], domain_R, nics_2N.reshape(2, -1).max(axis=0)[node_R])
        np.maximum.at(experts_2N[1], domain_R, inside_2R.reshape(2, R).max(axis=0))
    gradients = 0.0 if delayed else reshard_seconds(layout, model, cluster, sharding)
    passes = np.array([restores_per_step(sharding)])
    return prices._replace(experts_2N=_rounded(experts_2N / unit), passes=passes), int(gradients / unit)


@compiled
def split_cost(tokens_RE, supply_NE, node_R, table, tokens_P, prices):  # type: ignore[no-untyped-def]
    """Returns what a split costs in a step, and what of it the busiest rank does not; in the unit of ``prices``.

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
    arrival_N, cost = np.zeros(num_nodes, np.int64), np.int64(0)
    for node in range(num_nodes):
        links_N[node] = max(out_N[node], in_N[node]) * prices.node_N[node]
        arrival_N[node] = links_N[node] + prices.experts_2N[0, node]
    for rank in range(num_ranks):
        node, sent = node_R[rank], -kept_R[rank]
        for expert in range(num_experts):
            sent += tokens_RE[rank, expert]
        sent -= out_N[node] // size_N[node]
        received = load_R[rank] - kept_R[rank] - in_N[node] // size_N[node]
        inside = max(sent, received) * prices.inside[0]
        links_N[node] = max(links_N[node], inside)
        arrival_N[node] = max(arrival_N[node], inside + prices.experts_2N[1, node])
        busiest_N[node] = max(busiest_N[node], load_R[rank])
    for node in range(num_nodes):
        there = prices.passes[0] * arrival_N[node] + (2 - prices.passes[0]) * links_N[node]
        cost = max(cost, there + busiest_N[node] * prices.row[0])
    home = 2 * links_N.max()
    return cost + home, cost + home - busiest_N.max() * prices.row[0]
