"""What a split costs in a step, compiled: products on the busiest rank, and rows on the busiest links.

A step sends every row four times, to its expert and back, forward and backward. An all-to-all takes as long as its
busiest link; a rank computes once its own rows are there, so that of two of the four only those of its own links count.
Experts that come meanwhile share the links with these two. Products, gathers and links are those of ``moesys.cost``,
without latencies, tiles and memory. Integers, but for shares, which doubles cut alike on all ranks.

Where tokens cross to a node once and sums come home (``row_traffic``), as many cross as are expected of K independent
choices, by nodes, not by ranks; rows then spread inside, and sums are collected there, part by part. Rows go to near
nodes first, as a split routes them. Where every row comes home, bits are those of direct rows, and so have to be
layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.compiled import borrowing, compiled
from moesys.config import ClusterSpec, Ep, ModelShape, Overlap, Sharding
from moesys.cost import (
    FloatArray,
    expert_seconds,
    link_seconds,
    memory_seconds,
    reshard_seconds,
    restore_bytes,
    restores_per_step,
    row_product_seconds,
    transfer_seconds,
)
from moesys.layout import ExpertLayout
from moesys.load import IntArray
from moesys.row_traffic import parts_of_bytes

# What the dearest token costs at most, and all tokens together: a sum of several steps still fits.
DEAREST, ALL_TOKENS = 1 << 20, 1 << 58


class Prices(NamedTuple):
    """Seconds of a token, in a unit of ``unit_s`` seconds; int64. C nodes with NICs of their own.

    ``row`` [1]: computed, forward and backward; ``inside`` [1]: sent or received inside its domain by a rank, once;
    ``nics`` [1]: sent or received by a node between domains, once; ``nics_R``: the node of each rank; ``experts_2C``:
    of experts that come while rows are on their way there, in all, over each node's NICs and inside domains;
    ``passes`` [1]: of two, those in which they come; ``once`` [1]: choices of a token that crosses once, 0 where every
    row does; ``parts`` [1]: in how many it does.
    """

    unit_s: float
    row: IntArray
    inside: IntArray
    nics: IntArray
    nics_R: IntArray
    experts_2C: IntArray
    passes: IntArray
    once: IntArray
    parts: IntArray


def row_seconds(model: ModelShape, cluster: ClusterSpec) -> float:
    """Returns the seconds in which a rank computes a row, forward and backward, and gathers it for combine and for its
    gradient.
    """
    return row_product_seconds(model, cluster) + memory_seconds(2.0 * 2 * model.row_bytes, cluster)


def prices_of(
    model: ModelShape,
    cluster: ClusterSpec,
    num_tokens: int,
    overlap: Overlap | None = None,
    units_per_token: float = 1,
) -> Prices:
    """Returns the prices of a token of ``model`` on ``cluster``, for sums over ``num_tokens``, which are of
    ``units_per_token`` a token.

    Rows travel as ``overlap`` says; where fast links join several nodes, or a part of one, as if each went by itself.
    """
    row_bytes, row = model.row_bytes, row_seconds(model, cluster)
    inside = row_bytes / (cluster.intra_node_gb_per_s * 1e9)
    nics = row_bytes / (cluster.inter_node_gb_per_s * 1e9)
    unit = max(row, inside, nics) / max(min(DEAREST, ALL_TOKENS // max(num_tokens, 1)), 1)
    row_1, inside_1, nics_1 = _rounded(np.array([[row], [inside], [nics]]) / unit)
    no_experts_2C = np.zeros((2, cluster.num_nodes), np.int64)
    nics_R = np.asarray(cluster.node_of_rank)
    once = np.array([model.top_k if crosses_once(overlap, cluster) else 0])
    # as if tokens were everywhere alike, and wanted experts everywhere alike
    leaving = num_tokens / units_per_token / cluster.num_ranks * (1 - 1 / cluster.num_nodes)
    parts = np.array([parts_of_bytes(leaving * row_bytes, overlap.chunks) if overlap and once[0] else 1])
    return Prices(unit, row_1, inside_1, nics_1, nics_R, no_experts_2C, np.zeros(1, np.int64), once, parts)


def crosses_once(overlap: Overlap | None, cluster: ClusterSpec) -> bool:
    """Returns whether tokens cross to a node once and their sums come home, and nodes are what fast links join."""
    if overlap is None or not overlap.sums_by_node(cluster.num_nodes):
        return False
    return cluster.domain_sizes == cluster.node_sizes


def _rounded(units: FloatArray) -> IntArray:
    return np.rint(units).astype(np.int64)


def with_experts(
    prices: Prices,
    layout: ExpertLayout,
    model: ModelShape,
    cluster: ClusterSpec,
    sharding: Sharding,
    units_per_token: int = 1,
    scale: int = 0,
    mean_tokens: float = 0.0,
) -> tuple[Prices, int]:
    """Returns ``prices`` beside the experts of ``layout`` on their way, and what else they and their gradients cost,
    where counts are of ``units_per_token`` a token, shifted by ``scale`` bits. ``mean_tokens``: of the mean rank.

    What travels behind other work, prefetched or delayed, is taken to be hidden, but for copies that owners lend, which
    load few links with much: what exceeds the products of a layer's mean rank is waited for, and these are slower
    meanwhile (``copy_share``).
    """
    R, experts_2C = cluster.num_ranks, np.zeros(prices.experts_2C.shape)
    restores, waited_s = restore_bytes(layout, model, cluster, sharding), 0.0
    if sharding.prefetch_layers:
        behind_s = expert_seconds(mean_tokens, model, cluster, backward=False)
        restore_s = sum(transfer_seconds(bytes_RR, cluster) for bytes_RR in restores)
        waited_s += _exposed(restore_s, behind_s, cluster, sharding)
        restores = ()
    for bytes_RR in restores:
        inside_2R, nics_2C = np.split(link_seconds(bytes_RR, cluster), [2 * R])
        inside_C = np.zeros(cluster.num_nodes)
        np.maximum.at(inside_C, prices.nics_R, inside_2R.reshape(2, R).max(axis=0))
        experts_2C += np.stack([nics_2C.reshape(2, -1).max(axis=0), inside_C])
    reshard_s = reshard_seconds(layout, model, cluster, sharding)
    if sharding.delay_reshard:
        behind_s = expert_seconds(mean_tokens, model, cluster, backward=True)
        reshard_s = _exposed(reshard_s, behind_s, cluster, sharding)
    waited_s += reshard_s
    passes = np.array([restores_per_step(sharding)])
    in_units_2C = _rounded(experts_2C / prices.unit_s) * units_per_token >> scale
    with_them = prices._replace(experts_2C=in_units_2C, passes=passes)
    return with_them, int(waited_s / prices.unit_s) * units_per_token >> scale


def _exposed(travel_s: float, behind_s: float, cluster: ClusterSpec, sharding: Sharding) -> float:
    """Returns the seconds more that products of ``behind_s`` take with messages of ``travel_s`` beside them."""
    if not isinstance(sharding, Ep):
        return 0.0
    return max(travel_s - behind_s, cluster.copy_share * min(travel_s, behind_s))


@compiled
def split_cost(tokens_RE, supply_NE, node_R, table, tokens_P, prices):  # type: ignore[no-untyped-def]
    """Returns what a split costs in a step, and what of it the busiest rank does not; in the unit of ``prices``.

    ``node_R``, ``supply_NE``: of domains; ``tokens_P``: of each replica of ``table``. What of an expert leaves a domain
    is taken from its sources there, and what comes is given to its replicas, in proportion to their tokens.
    """
    num_ranks, num_experts = tokens_RE.shape
    load_R, kept_R = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    out_R, in_R = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    here_NE = np.zeros(supply_NE.shape, np.int64)
    for replica in range(tokens_P.size):
        rank, expert = table.rank_P[replica], table.expert_P[replica]
        load_R[rank] += tokens_P[replica]
        kept_R[rank] += min(tokens_P[replica], tokens_RE[rank, expert])
        here_NE[node_R[rank], expert] += tokens_P[replica]
    for replica in range(tokens_P.size):
        rank, expert = table.rank_P[replica], table.expert_P[replica]
        here = here_NE[node_R[rank], expert]
        more = here - supply_NE[node_R[rank], expert]
        if more > 0:
            in_R[rank] += np.int64(more / here * tokens_P[replica])
    first_N = np.zeros(supply_NE.shape[0] + 1, np.int64)
    for rank in range(num_ranks):
        first_N[node_R[rank] + 1] = rank + 1
        for expert in range(num_experts):
            out_R[rank] += tokens_RE[rank, expert]
    sent_R = out_R - kept_R
    # All tokens of an expert leave a node that has none of its tokens; so only others are looked at, once a node.
    last_N = np.full(supply_NE.shape[0], -1)
    for replica in range(tokens_P.size):
        node, expert = node_R[table.rank_P[replica]], np.int64(table.expert_P[replica])
        here, supply = here_NE[node, expert], supply_NE[node, expert]
        if here == 0 or last_N[node] == expert:
            continue
        last_N[node] = expert
        for rank in range(first_N[node], first_N[node + 1]):
            tokens = tokens_RE[rank, expert]
            leaving = np.int64((supply - here) / supply * tokens) if here < supply else np.int64(0)
            out_R[rank] -= tokens - leaving
    num_nics = prices.experts_2C.shape[1]
    out_C, in_C = np.zeros(num_nics, np.int64), np.zeros(num_nics, np.int64)
    inside_C, busiest_C = np.zeros(num_nics, np.int64), np.zeros(num_nics, np.int64)
    for rank in range(num_ranks):
        nics = prices.nics_R[rank]
        out_C[nics] += out_R[rank]
        in_C[nics] += in_R[rank]
        inside = max(sent_R[rank] - out_R[rank], load_R[rank] - kept_R[rank] - in_R[rank]) * prices.inside[0]
        inside_C[nics] = max(inside_C[nics], inside)
        busiest_C[nics] = max(busiest_C[nics], load_R[rank])
    spread_C, parts = np.zeros(num_nics, np.int64), prices.parts[0]
    if prices.once[0]:
        _cross_once(supply_NE, here_NE, in_R, prices, out_C, in_C, spread_C)
    between_C = np.maximum(out_C, in_C) * prices.nics[0]
    cost = np.int64(0)
    for nics in range(num_nics):
        between, inside, spread = between_C[nics], inside_C[nics], spread_C[nics]
        experts, experts_inside = prices.experts_2C[:, nics]
        # Rows have half of links that experts want too.
        rows_with_experts = _in_parts(between + min(between, experts), inside, spread, parts)
        arrival = max(rows_with_experts, between + experts, inside + spread + experts_inside)
        there = prices.passes[0] * arrival
        there += (2 - prices.passes[0]) * _in_parts(between, inside, spread, parts)
        cost = max(cost, there + busiest_C[nics] * prices.row[0])
    cost += 2 * _in_parts(between_C.max(), inside_C.max(), spread_C.max(), parts)
    return cost, cost - busiest_C.max() * prices.row[0]


@borrowing
def _in_parts(between, inside, spread, parts):  # type: ignore[no-untyped-def]
    """Returns what rows cost on their way: those between nodes beside those inside, and, of each part, spread inside
    while the next one crosses.
    """
    return (max(between, inside) + (parts - 1) * max(between, inside + spread) + spread) // parts


@compiled
def _cross_once(supply_NE, here_NE, in_R, prices, out_C, in_C, spread_C):  # type: ignore[no-untyped-def]
    """Puts tokens that cross in the place of rows, ``out_C`` and ``in_C`` [C], and what their rows cost inside into
    ``spread_C`` [C]: each gate passes on its part of a node's rows, but for what is its own.
    """
    rows_NN, choices = _rows_between(supply_NE, here_NE), prices.once[0]
    num_nodes = rows_NN.shape[0]
    out_C[:], in_C[:] = 0, 0
    ranks_N, most_N = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    for rank in range(in_R.size):
        ranks_N[prices.nics_R[rank]] += 1
        most_N[prices.nics_R[rank]] = max(most_N[prices.nics_R[rank]], in_R[rank])
    for node in range(num_nodes):
        chosen, arrived = supply_NE[node].sum(), 0.0
        for other in range(num_nodes):
            arrived += rows_NN[other, node]
            if rows_NN[node, other] > 0:
                not_there, none_there = 1 - rows_NN[node, other] / chosen, 1.0
                for _ in range(choices):
                    none_there *= not_there
                crossing = np.int64(chosen / choices * (1 - none_there))
                out_C[node] += crossing
                in_C[other] += crossing
        passed_on = max(most_N[node], np.int64(arrived / ranks_N[node])) * (ranks_N[node] - 1) // ranks_N[node]
        spread_C[node] = passed_on * prices.inside[0]


@compiled
def _rows_between(supply_NE, here_NE):  # type: ignore[no-untyped-def]
    """Returns rows from each node to each, float64 [N, N]: what an expert has too much of in one goes to the nearest
    that have too little, in the smallest block of 2, 4, 8, ... nodes first (``blocks_of_nodes``), in proportion.
    """
    num_nodes, num_experts = supply_NE.shape
    rows_NN, out_N, in_N = np.zeros((num_nodes, num_nodes)), np.empty(num_nodes), np.empty(num_nodes)
    for expert in range(num_experts):
        for node in range(num_nodes):
            more = supply_NE[node, expert] - here_NE[node, expert]
            out_N[node], in_N[node] = max(more, 0), max(-more, 0)
        size = 2
        while size < 2 * num_nodes:
            for first in range(0, num_nodes, size):
                end = min(first + size, num_nodes)
                out, into = out_N[first:end].sum(), in_N[first:end].sum()
                if out == 0 or into == 0:
                    continue
                given, taken = min(into / out, 1.0), min(out / into, 1.0)
                for node in range(first, end):
                    if out_N[node] > 0:
                        for other in range(first, end):
                            rows_NN[node, other] += out_N[node] * given * in_N[other] / into
                for node in range(first, end):
                    out_N[node] -= given * out_N[node]
                    in_N[node] -= taken * in_N[node]
            size *= 2
    return rows_NN
