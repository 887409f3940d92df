"""The cost of a split in a step, compiled: products on the busiest rank, and rows on the busiest links.

A step sends every row to its expert and back, forward and backward. An all-to-all takes as long as its busiest link; a
rank computes once its own rows have arrived, so that in dispatch only its own links count. Experts that travel at the
same time share the links with these rows. Experts that are prefetched, and gradients that are delayed, have the links
alone while ranks compute, then share them with the results, and the step waits for the rest. Rows of one chunk travel
while another is computed. Products, gathers and links are those of ``moesys.cost``, without latencies, tiles and
memory. Numbers are integers; shares are doubles, which all ranks round alike.

If tokens cross to a node once and return as sums (``row_traffic``), the number that crosses is the expectation for K
independent choices, by nodes, not by ranks; rows then spread inside, and sums are made there, part by part. Rows go to
near nodes first, as a split routes them. If every row returns by itself, results must have the bits of direct rows, so
layouts must be the same too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.balance.flow.token_routes import list_replicas
from moesys.balance.planning_problem import link_domains_of, nodes_of, tokens_by_node
from moesys.compiled import borrowing, compiled
from moesys.config import ClusterSpec, Fsep, ModelShape, Overlap, Sharding
from moesys.cost import (
    GRADIENT_BYTES,
    FloatArray,
    expert_seconds,
    link_seconds,
    memory_seconds,
    reshard_bytes,
    reshard_seconds,
    restore_bytes,
    row_product_seconds,
)
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray
from moesys.row_traffic import parts_of_bytes

# The most that the dearest token may cost, and all tokens together, so that sums of several steps fit into int64.
DEAREST, ALL_TOKENS = 1 << 20, 1 << 58
# MegaKernels overlap rows with products about as well as this many chunks.
MEGA_CHUNKS = 4


class Prices(NamedTuple):
    """Seconds of a token, in a unit of ``unit_s`` seconds; int64. C nodes with NICs of their own; two passes:
    forward, backward.

    - ``row`` [1]: all computation; ``before_2`` of it before results are sent, ``after_2`` after they are back;
    - ``inside`` [1]: a row sent or received inside its domain by a rank, once;
    - ``nics`` [1]: a row sent or received by a node between domains, once; ``nics_R``: the node of each rank;
    - ``beside_22C``: experts that travel together with rows, over each node's NICs and inside domains;
    - ``behind_22C``: messages that travel during the products of a pass;
    - ``once`` [1]: choices of a token that crosses once, 0 if every row crosses; ``parts`` [1]: in how many parts;
    - ``chunks`` [1]: chunks of rows; ``copy_share``: share of computation that is lost while messages travel.
    """

    unit_s: float
    row: IntArray
    before_2: IntArray
    after_2: IntArray
    inside: IntArray
    nics: IntArray
    nics_R: IntArray
    beside_22C: IntArray
    behind_22C: IntArray
    once: IntArray
    parts: IntArray
    chunks: IntArray
    copy_share: float


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
    chunked: bool = False,
) -> Prices:
    """Returns the prices of a token of ``model`` on ``cluster``, for sums over ``num_tokens``, which are of
    ``units_per_token`` a token.

    Rows travel as ``overlap`` says; where fast links join several nodes, or a part of one, as if each went by itself.
    Only prices that are ``chunked`` depend on how many chunks it has: planners have others, so that layouts, and with
    them the order of sums, are the same under any overlap that sends rows the same way.
    """
    row_bytes, gather = model.row_bytes, memory_seconds(2.0 * model.row_bytes, cluster)
    forward, backward = (expert_seconds(1.0, model, cluster, backward) for backward in (False, True))
    before = np.array([forward + gather, backward / 2 + gather])
    row = before.sum() + backward / 2
    inside = row_bytes / (cluster.intra_node_gb_per_s * 1e9)
    nics = row_bytes / (cluster.inter_node_gb_per_s * 1e9)
    unit = max(row, inside, nics) / max(min(DEAREST, ALL_TOKENS // max(num_tokens, 1)), 1)
    before_2 = _rounded(before / unit)
    after_1, inside_1, nics_1 = _rounded(np.array([[backward / 2], [inside], [nics]]) / unit)
    no_experts_22C = np.zeros((2, 2, cluster.num_nodes), np.int64)
    once = np.array([model.top_k if crosses_once(overlap, cluster) else 0])
    # as if tokens were everywhere alike, and wanted experts everywhere alike
    leaving = num_tokens / units_per_token / cluster.num_ranks * (1 - 1 / cluster.num_nodes)
    parts = np.array([parts_of_bytes(leaving * row_bytes, overlap.chunks) if overlap and once[0] else 1])
    return Prices(
        unit_s=unit,
        row=before_2.sum(keepdims=True) + after_1,
        before_2=before_2,
        after_2=np.array([0, after_1[0]]),
        inside=inside_1,
        nics=nics_1,
        nics_R=np.asarray(cluster.node_of_rank),
        beside_22C=no_experts_22C,
        behind_22C=no_experts_22C,
        once=once,
        parts=parts,
        chunks=np.array([_chunks(overlap) if chunked else 1]),
        copy_share=cluster.copy_share,
    )


def _chunks(overlap: Overlap | None) -> int:
    """Returns in how many chunks rows travel; those of MegaKernels overlap as if in several."""
    if overlap is None:
        return 1
    return MEGA_CHUNKS if overlap.reaches_memory else overlap.chunks


def plan_seconds(
    plan: TokenPlan,
    cluster: ClusterSpec,
    model: ModelShape,
    sharding: Sharding,
    overlap: Overlap | None,
    units_per_token: int = 1,
    *,
    late_slots: int = 0,
) -> float:
    """Returns what a layer adds to a step under ``plan``, as planners count it; a token of a micro-batch is
    ``units_per_token`` of the plan's.

    ``late_slots``: of the layout's slots those that are filled when the counts are known, the last of each rank.
    """
    layout, load, domain_R = plan.layout, plan.load, link_domains_of(cluster)
    prices = prices_of(model, cluster, load.total, overlap, units_per_token, chunked=True)
    prices, gradients = with_experts(prices, layout, model, cluster, sharding, units_per_token, late_slots=late_slots)
    supply_DE, _ = tokens_by_node(load.tokens_RE, domain_R)
    table = list_replicas(layout.expert_RS, layout.num_experts)
    tokens_P = np.ascontiguousarray(plan.tokens_RER.sum(axis=0)[table.expert_P, table.rank_P])
    cost, _ = split_cost(load.tokens_RE, supply_DE, domain_R, table, tokens_P, prices)
    return (int(cost) + gradients) * prices.unit_s / units_per_token


def crosses_once(overlap: Overlap | None, cluster: ClusterSpec) -> bool:
    """Returns whether tokens cross to a node once and return as sums, and every node is one domain of fast links."""
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
    late_slots: int = 0,
) -> tuple[Prices, int]:
    """Returns ``prices`` with the transfers of the experts of ``layout``, and the cost of gradients that are sent while
    nothing is computed, for counts in ``units_per_token`` per token, shifted by ``scale`` bits.

    The last ``late_slots`` of a rank are filled when the counts are known: their experts travel together with rows,
    even if others are prefetched.
    """
    passes, waited_s = np.zeros((2, 2, 2, cluster.num_nodes)), 0.0
    beside_22C, behind_22C = passes
    all_2C = _restore_seconds(layout, model, cluster, sharding)
    (behind_22C if sharding.prefetch_layers else beside_22C)[0] = all_2C
    if sharding.prefetch_layers and late_slots:
        settled = layout.without_last(late_slots)
        behind_22C[0] = _restore_seconds(settled, model, cluster, sharding)
        beside_22C[0] = _busiest(restore_bytes(layout, model, cluster, sharding, here=settled), cluster)
    if sharding.reshard_after_forward and sharding.prefetch_layers:
        behind_22C[1] = all_2C
    elif sharding.reshard_after_forward:
        beside_22C[1] = all_2C
    if not sharding.delay_reshard:
        waited_s = reshard_seconds(layout, model, cluster, sharding)
    elif isinstance(sharding, Fsep) and sharding.reshard == "flat":
        behind_22C[1] += _sharded_seconds(layout, model, cluster, GRADIENT_BYTES)
    else:
        behind_22C[1] += _busiest(reshard_bytes(layout, model, cluster, sharding), cluster)
    beside_22C, behind_22C = _rounded(passes / prices.unit_s) * units_per_token >> scale
    with_them = prices._replace(beside_22C=beside_22C, behind_22C=behind_22C)
    return with_them, int(waited_s / prices.unit_s) * units_per_token >> scale


def _restore_seconds(layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, sharding: Sharding) -> FloatArray:
    if isinstance(sharding, Fsep) and sharding.restore == "flat":
        return _sharded_seconds(layout, model, cluster, model.bytes_per_element)
    return _busiest(restore_bytes(layout, model, cluster, sharding), cluster)


def _busiest(all_bytes: tuple[FloatArray, ...], cluster: ClusterSpec) -> FloatArray:
    """Returns the seconds of each node's NICs and of its ranks' busiest link inside domains, [2, C]."""
    seconds_2C = np.zeros((2, cluster.num_nodes))
    for bytes_RR in all_bytes:
        inside_2R, nics_2C = np.split(link_seconds(bytes_RR, cluster), [2 * cluster.num_ranks])
        inside_C = np.zeros(cluster.num_nodes)
        np.maximum.at(inside_C, np.asarray(cluster.node_of_rank), inside_2R.reshape(2, -1).max(axis=0))
        seconds_2C += np.stack([nics_2C.reshape(2, -1).max(axis=0), inside_C])
    return seconds_2C


def _sharded_seconds(layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, element_bytes: int) -> FloatArray:
    """Returns ``_busiest`` if every rank receives a slice of each of its experts from every other rank, or sends their
    gradients back the same way; without matrices of all pairs of ranks.
    """
    held_R = np.count_nonzero(layout.replicas_RE, axis=1)
    node_R, domain_R = nodes_of(cluster), link_domains_of(cluster)
    near_R, held_near_R = np.array(cluster.domain_sizes)[domain_R], np.bincount(domain_R, held_R)[domain_R]
    outside_2C = [np.bincount(node_R, each) for each in (held_R * (len(held_R) - near_R), held_R.sum() - held_near_R)]
    inside_C = np.zeros(cluster.num_nodes)
    np.maximum.at(inside_C, node_R, np.maximum(held_R * (near_R - 1), held_near_R - held_R))
    slice_bytes = element_bytes * -(-model.expert_parameters // len(held_R))
    inter, intra = cluster.inter_node_gb_per_s * 1e9, cluster.intra_node_gb_per_s * 1e9
    return slice_bytes * np.stack([np.maximum(*outside_2C) / inter, inside_C / intra])


@compiled
def split_cost(tokens_RE, supply_NE, node_R, table, tokens_P, prices):  # type: ignore[no-untyped-def]
    """Returns the cost of a split in a step, and what exceeds the busiest rank's products, in the unit of ``prices``.

    ``node_R``, ``supply_NE``: of domains; ``tokens_P``: tokens of each replica of ``table``. Tokens of an expert that
    leave a domain count for its sources there, and those that arrive for its replicas, in proportion to their tokens.
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
    num_nics = prices.beside_22C.shape[2]
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
    back = _in_parts(between_C.max(), inside_C.max(), spread_C.max(), parts)
    cost = np.int64(0)
    for way in range(2):
        if prices.before_2[way]:
            cost += _pass_cost(way, between_C, inside_C, spread_C, busiest_C, back, prices)
    return cost, cost - busiest_C.max() * prices.row[0]


@borrowing
def _pass_cost(way, between_C, inside_C, spread_C, busiest_C, back, prices):  # type: ignore[no-untyped-def]
    """Returns the cost of forward or backward; ``back``: the cost of sending results back."""
    chunks, parts, share = prices.chunks[0], prices.parts[0], prices.copy_share
    back = back // chunks
    ready = last = left_over = np.int64(0)
    for nics in range(between_C.size):
        between, inside, spread = between_C[nics] // chunks, inside_C[nics] // chunks, spread_C[nics] // chunks
        experts, experts_inside = prices.beside_22C[way, :, nics]
        behind = max(prices.behind_22C[way, 0, nics], prices.behind_22C[way, 1, nics])
        rows, with_experts = _in_parts(between, inside, spread, parts), between + min(between, experts)
        # Rows have half of a link until its experts have arrived: the rows of the first chunk, and of the next one.
        arrival = max(_in_parts(with_experts, inside, spread, parts), experts + min(experts, between * min(chunks, 2)))
        arrival = max(arrival, spread + inside + min(inside, experts_inside))
        arrival = max(arrival, spread + experts_inside + min(experts_inside, inside * min(chunks, 2)))
        products, own_back = busiest_C[nics] * prices.before_2[way] // chunks, min(rows, back)
        later = busiest_C[nics] * prices.after_2[way]
        if chunks == 1:
            products = _beside(products, behind, share)
            ready = max(ready, arrival + products)
            left = max(behind - products, 0)
            shared = min(left, own_back)
            after = _beside(later, left - shared, share)
            last = max(last, max(back, own_back + shared) + after)
            left = max(left - shared - after, 0)
        else:
            next_rows = min(max(2 * rows - max(experts, experts_inside), 0), rows)
            window = max(_beside(products, next_rows, share), next_rows) + max(_beside(products, back, share), back)
            window += (chunks - 2) * max(_beside(products, rows + back, share), rows + back)
            idle = window - next_rows - (chunks - 2) * (rows + back) - back
            ready = max(ready, arrival + window + np.int64(share * min(behind, idle)))
            left = max(behind - idle, 0)
            shared = min(left, own_back)
            # Gradients of weights are computed while the last chunk's results travel.
            after = max(_beside(later, back + left, share), back, own_back + shared)
            last = max(last, after)
            left = max(left - max(after - back, shared), 0)
        left_over = max(left_over, left)
    return ready + last + left_over


@borrowing
def _beside(computing, moving, share):  # type: ignore[no-untyped-def]
    """Returns how long ranks compute while messages move for so long."""
    return computing + np.int64(share * min(moving, computing / (1.0 - share)))


@borrowing
def _in_parts(between, inside, spread, parts):  # type: ignore[no-untyped-def]
    """Returns the cost of sending rows: those between nodes at the same time as those inside, and each part spread
    inside while the next one crosses.
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
