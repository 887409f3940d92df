"""Late slots: a few experts per rank that are chosen on the current counts and fetched on the critical path, if that
is predicted to be faster.

With a layout from history, some ranks have more tokens than the mean of experts that no other rank holds. The minimum
cut finds these ranks (``min_max_flow``); only a copy of one of their experts on another rank lowers their load. Copies
are added one after another, each where it saves most, and the first of them are kept whose sum of seconds is least.

R ranks, E experts, S slots, L late ones of them, N nodes, which are the domains of the fastest links.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.balance.flow.max_load import min_max_flow, new_flow
from moesys.balance.flow.token_routes import list_replicas
from moesys.balance.planning_problem import PlanningProblem, link_domains_of, nodes_of, tokens_by_node
from moesys.compiled import borrowing, compiled
from moesys.config import ClusterSpec, Ep, ModelShape, Sharding
from moesys.cost import GRADIENT_BYTES, FloatArray, row_product_seconds
from moesys.layout import EMPTY, ExpertLayout, owner_of_experts
from moesys.load import LoadMatrix

# The owner of an expert of which each rank sends a slice.
FROM_ALL = -1


def fill_late_slots(
    load: LoadMatrix,
    layout: ExpertLayout,
    cluster: ClusterSpec,
    model: ModelShape,
    sharding: Sharding,
    late_R: tuple[int, ...],
) -> ExpertLayout:
    """Returns ``layout`` with ``late_R`` more slots on each rank, [R], which hold what ``load`` is worth fetching for,
    if anything.

    The sum of seconds has three terms: the rank that computes longest, forward and backward, after an exact split; a
    node's link, for tokens that a copy moves to another node or from there; and the busiest link of experts, now, in
    backward if they are sent again, and as gradients. If experts travel node by node, a second late copy in a node is
    sent inside it. The function is pure: equal arguments give equal layouts, on every rank. Copies that would only
    save tokens between nodes are not considered; the layout from history has them.

    Raises ValueError when load, model, layout and cluster do not belong together.
    """
    problem = PlanningProblem.of_split(load, layout, cluster, model=model)
    expert_RS = np.full((layout.num_ranks, layout.num_slots + max(late_R)), EMPTY)
    expert_RS[:, : layout.num_slots] = layout.expert_RS
    prices, owner_E = fetch_prices(model, cluster, sharding), np.full(model.num_experts, FROM_ALL)
    if isinstance(sharding, Ep):
        owner_E = owner_of_experts(model.num_experts, layout.num_ranks)
    parts = link_domains_of(cluster), nodes_of(cluster)
    late_RL = late_experts(problem.load.tokens_RE, expert_RS, np.array(late_R), owner_E, parts, prices)
    expert_RS[:, layout.num_slots :] = late_RL
    return ExpertLayout(expert_RS, layout.num_experts)


class FetchPrices(NamedTuple):
    """Seconds of a token more on the busiest rank, of a token more that crosses on the mean node's link, and of one
    whole expert on the link of a rank inside its domain and on that of a node; and whether experts travel node by node.
    """

    token: float
    crossing: float
    on_rank: float
    on_node: float
    by_node: bool


def fetch_prices(model: ModelShape, cluster: ClusterSpec, sharding: Sharding) -> FetchPrices:
    """Returns what late copies are weighed by."""
    b = model.bytes_per_element
    again = sharding.reshard_after_forward and not sharding.prefetch_layers
    # Gradients count even if they travel during another layer, because its rows share the links with them.
    element_bytes = b + b * again + GRADIENT_BYTES
    num_bytes, intra = model.expert_parameters * element_bytes, cluster.intra_node_gb_per_s * 1e9
    inter = cluster.inter_node_gb_per_s * 1e9
    # A row, its result, and the gradients of both.
    crossing = 4 * b * model.hidden_size / inter / cluster.num_nodes
    by_node = (sharding.lend if isinstance(sharding, Ep) else sharding.restore) == "hierarchical"
    return FetchPrices(row_product_seconds(model, cluster), crossing, num_bytes / intra, num_bytes / inter, by_node)


@compiled
def late_experts(tokens_RE, expert_RS, late_R, owner_E, parts_2R, prices):  # type: ignore[no-untyped-def]
    """Returns the experts of late slots, int64 [R, L], -1 for those that stay empty; ``expert_RS`` int64 [R, S] has
    room for them at the end of each row, ``late_R`` int64 [R] says how many a rank may have. ``parts_2R``: each rank's
    domain, which is a node to all that follows, and the node whose NICs it has.
    """
    node_R, nics_R = parts_2R
    supply_NE, tokens_E = tokens_by_node(tokens_RE, node_R)
    num_ranks, num_experts = tokens_RE.shape
    most_late = late_R.max()
    first_late, free_R, open_R = expert_RS.shape[1] - most_late, late_R.copy(), late_R.copy()
    kept_RL, trial_RS = np.full((num_ranks, most_late), EMPTY), expert_RS.copy()
    links = FetchLinks(np.zeros((2, num_ranks)), np.zeros((2, nics_R[-1] + 1)))
    table = list_replicas(trial_RS, num_experts)
    flow = new_flow(table)
    limit = min_max_flow(tokens_E, table, flow)
    mean = tokens_E.sum() / max(1, (table.holds_R | (late_R > 0)).sum())
    fetched = crossing = 0.0
    best = prices.token * limit
    while limit > mean and prices.token * mean + fetched + crossing < best:
        expert, rank, crossed = _find_copy(tokens_E, supply_NE, table, flow, free_R, open_R, node_R, limit, prices)
        if expert < 0:
            break
        near = _late_copy_near(trial_RS[:, first_late:], expert, rank, nics_R) if prices.by_node else -1
        trial_RS[rank, first_late + late_R[rank] - free_R[rank]] = expert
        free_R[rank] -= 1
        _fetch(links, owner_E[expert], rank, near, prices.by_node, node_R, nics_R)
        fetched = max(links.rank_2R.max() * prices.on_rank, links.node_2N.max() * prices.on_node)
        crossing += crossed * prices.crossing
        table = list_replicas(trial_RS, num_experts)
        flow = new_flow(table)
        limit = min_max_flow(tokens_E, table, flow)
        if prices.token * limit + fetched + crossing < best:
            best = prices.token * limit + fetched + crossing
            kept_RL[:] = trial_RS[:, first_late:]
    return kept_RL


@borrowing
def _find_copy(tokens_E, supply_NE, table, flow, free_R, open_R, node_R, limit, prices):  # type: ignore[no-untyped-def]
    """Returns the expert and the rank, outside of the tight set, whose copy promises most, and how many tokens more
    would cross; expert -1 where there is none. ``open_R``: scratch.
    """
    found_expert, found_rank, found_crossed, most = -1, -1, 0, 0.0
    tight_tokens = num_tight = 0
    for rank in range(free_R.size):
        if flow.tight_R[rank]:
            tight_tokens += flow.load_R[rank]
            num_tight += 1
    for expert in range(tokens_E.size):
        first, end = table.first_E[expert], table.first_E[expert + 1]
        heavy, tokens = first, 0
        for rank in range(free_R.size):
            open_R[rank] = 0 if flow.tight_R[rank] else free_R[rank]
        for replica in range(first, end):
            open_R[table.rank_P[replica]] = 0
            if flow.tight_R[table.rank_P[replica]]:
                tokens += flow.tokens_P[replica]
                if flow.tokens_P[replica] > flow.tokens_P[heavy]:
                    heavy = replica
        if not tokens:
            continue
        for rank in range(free_R.size):
            if not open_R[rank]:
                continue
            # The copy adds the rank to the set, whose busiest rank has at least the mean of the set.
            with_copy = max((tight_tokens - tokens) / num_tight, (tight_tokens + flow.load_R[rank]) / (num_tight + 1))
            moved = np.int64(min(tokens, max(with_copy - flow.load_R[rank], 0.0)))
            crossed = _crossed(supply_NE, table, flow, node_R, expert, node_R[table.rank_P[heavy]], node_R[rank], moved)
            gain = (limit - with_copy) * prices.token - crossed * prices.crossing
            if gain > most:
                found_expert, found_rank, found_crossed, most = expert, rank, crossed, gain
    return found_expert, found_rank, found_crossed


@borrowing
def _crossed(supply_NE, table, flow, node_R, expert, from_node, to_node, moved):  # type: ignore[no-untyped-def]
    """Returns how many more tokens of an expert would cross if some moved from one node to another; less than 0 if
    they return to their node. Those tokens cross that a node has and does not compute.
    """
    if from_node == to_node:
        return np.int64(0)
    more_from, more_to = supply_NE[from_node, expert], supply_NE[to_node, expert]
    for replica in range(table.first_E[expert], table.first_E[expert + 1]):
        node = node_R[table.rank_P[replica]]
        more_from -= flow.tokens_P[replica] if node == from_node else 0
        more_to -= flow.tokens_P[replica] if node == to_node else 0
    before = max(more_from, 0) + max(more_to, 0)
    return max(more_from + moved, 0) + max(more_to - moved, 0) - before


class FetchLinks(NamedTuple):
    """Whole experts that late copies send and receive: ``rank_2R``, ``node_2N`` float64, ways out and in."""

    rank_2R: FloatArray
    node_2N: FloatArray


@borrowing
def _late_copy_near(late_RL, expert, rank, nics_R):  # type: ignore[no-untyped-def]
    """Returns the first rank of the node that has a late copy of the expert, -1 if none has."""
    for other in range(nics_R.size):
        for slot in range(late_RL.shape[1]):
            if nics_R[other] == nics_R[rank] and late_RL[other, slot] == expert:
                return other
    return -1


@borrowing
def _fetch(links, owner, rank, near, by_node, node_R, nics_R):  # type: ignore[no-untyped-def]
    """Adds a copy on ``rank`` that comes from its owner, or a slice from every rank; ``by_node`` from ``near``, which
    has one, or a slice from the ranks of other nodes, where none has, and all of it in shares from those of its own.
    """
    num_ranks, in_node = node_R.size, 0
    for other in range(num_ranks):
        in_node += nics_R[other] == nics_R[rank]
    for source in range(num_ranks):
        part = 1.0 / num_ranks
        if owner != FROM_ALL:
            part = 1.0 if source == (near if near >= 0 else owner) else 0.0
        elif by_node and nics_R[source] == nics_R[rank]:
            part = 1.0 / in_node
        elif near >= 0:
            part = 0.0
        if source == rank or part == 0.0:
            continue
        if node_R[source] == node_R[rank]:
            links.rank_2R[0, source] += part
            links.rank_2R[1, rank] += part
        else:
            links.node_2N[0, nics_R[source]] += part
            links.node_2N[1, nics_R[rank]] += part
