"""certify_seconds: what a plan costs in a step beside what no layout and no split cost less than, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.balance.flow.step_cost import crosses_once, prices_of, row_seconds, split_cost, with_experts
from moesys.balance.flow.token_routes import list_replicas
from moesys.balance.topology import link_domains_of, nodes_of, tokens_by_node
from moesys.config import ClusterSpec, Fsep, ModelShape, Overlap, Sharding, Strategy
from moesys.cost import GRADIENT_BYTES, FloatArray, restores_per_step
from moesys.layout import TokenPlan
from moesys.load import IntArray


@dataclass(frozen=True)
class SecondsCertificate:
    """Seconds of a layer's sequential step as planners count them (``flow.step_cost``): products, rows, and experts
    that are not hidden, without latencies, tiles and memory.

    ``plan_s``: of the plan. ``products_s``, ``rows_s``, ``experts_s``: what together bounds every split over every
    layout with these slots from below: products that all ranks share; rows that no node has slots to keep, and experts
    that it keeps them with, on the mean node's NICs. A slot is worth its rows, so the parts are those of the best sum.
    Planners count whole tokens, so of a plan of few tokens ``plan_s`` may be less than that.
    """

    plan_s: float
    products_s: float
    rows_s: float
    experts_s: float

    @property
    def bound_s(self) -> float:
        return self.products_s + self.rows_s + self.experts_s

    @property
    def gap(self) -> float:
        """How far the plan can be from the best of all, as a fraction of the bound."""
        return max(self.plan_s / self.bound_s - 1, 0.0) if self.bound_s else 0.0

    @property
    def limit(self) -> str:
        """The largest part of the bound."""
        parts = {"products": self.products_s, "rows between nodes": self.rows_s, "experts": self.experts_s}
        return max(parts, key=lambda part: parts[part])

    def __str__(self) -> str:
        parts = (self.products_s, self.rows_s, self.experts_s)
        products_ms, rows_ms, experts_ms = (f"{1e3 * seconds:.3f}" for seconds in parts)
        return (
            f"{1e3 * self.plan_s:.3f} ms of a step, any layout at least {1e3 * self.bound_s:.3f} (gap {self.gap:.1%}): "
            f"products {products_ms}, rows between nodes {rows_ms}, experts {experts_ms}"
        )


def certify_seconds(plan: TokenPlan, cluster: ClusterSpec, model: ModelShape, strategy: Strategy) -> SecondsCertificate:
    """Returns the certificate of a plan among all layouts with the slots of ``strategy``, whose sharding and overlap
    say how experts and rows travel.

    Raises ValueError where plan, model and cluster are not for the same ranks and experts, or the layout has more slots
    than the strategy.
    """
    layout, load = plan.layout, plan.load
    if (layout.num_ranks, layout.num_experts) != (cluster.num_ranks, model.num_experts):
        raise ValueError(
            f"the plan is for {layout.num_ranks} ranks and {layout.num_experts} experts, cluster and model have "
            f"{cluster.num_ranks} and {model.num_experts}; certify it on its own"
        )
    slots_R = np.array(strategy.slots(model, cluster))
    if (layout.filled_R > slots_R).any():
        rank = int((layout.filled_R > slots_R).argmax())
        raise ValueError(
            f"the plan's layout fills {layout.filled_R[rank]} slots of rank {rank}, sharding={strategy.sharding!r} has "
            f"{slots_R[rank]}; certify it under the strategy that it was planned for"
        )
    supply_DE, _ = tokens_by_node(load.tokens_RE, link_domains_of(cluster))
    products_s = load.total / cluster.num_ranks * row_seconds(model, cluster)
    rows_s, experts_s = _least_outside(supply_DE, slots_R, cluster, model, strategy)
    plan_s = plan_seconds(plan, cluster, model, strategy.sharding, strategy.overlap)
    return SecondsCertificate(plan_s, products_s, rows_s, experts_s)


def plan_seconds(
    plan: TokenPlan,
    cluster: ClusterSpec,
    model: ModelShape,
    sharding: Sharding,
    overlap: Overlap | None,
    units_per_token: int = 1,
) -> float:
    """Returns what a layer's sequential step costs under ``plan``, as planners count it; a token of a micro-batch is
    ``units_per_token`` of the plan's.
    """
    layout, load, domain_R = plan.layout, plan.load, link_domains_of(cluster)
    prices = prices_of(model, cluster, load.total, overlap, units_per_token)
    prices, gradients = with_experts(prices, layout, model, cluster, sharding, units_per_token)
    supply_DE, _ = tokens_by_node(load.tokens_RE, domain_R)
    table = list_replicas(layout.expert_RS, layout.num_experts)
    tokens_P = np.ascontiguousarray(plan.tokens_RER.sum(axis=0)[table.expert_P, table.rank_P])
    cost, _ = split_cost(load.tokens_RE, supply_DE, domain_R, table, tokens_P, prices)
    return (int(cost) + gradients) * prices.unit_s / units_per_token


def _least_outside(
    supply_DE: IntArray, slots_R: IntArray, cluster: ClusterSpec, model: ModelShape, strategy: Strategy
) -> tuple[float, float]:
    """Returns the least seconds of the mean node's NICs with rows and experts.

    A domain keeps the tokens of the experts that it has slots for. An expert more keeps the more, the more its sources
    there have, and costs what it takes to bring it. So those are taken that gain most; and where an expert gains
    nowhere, as it has to be somewhere, it is where it loses the least.
    """
    domain_R, nics_R = link_domains_of(cluster), nodes_of(cluster)
    part_C = np.bincount(nics_R) / cluster.num_ranks
    # all that leaves a domain may do so by the node that counts least
    part_D = np.array([part_C[nics_R[domain_R == domain]].min() for domain in range(len(supply_DE))])
    nics = cluster.inter_node_gb_per_s * 1e9
    token_s, expert_D = model.row_bytes / nics, _expert_seconds(cluster, model, strategy)
    slots_D = np.minimum(np.bincount(domain_R, weights=slots_R).astype(np.int64), model.num_experts)
    if crosses_once(strategy.overlap, cluster):
        # each node by itself; the fewest tokens cross where all rows that leave go to one node
        demand_DE = -np.sort(-supply_DE, axis=1)
        sent_D, num_DK = supply_DE.sum(axis=1, keepdims=True), np.arange(model.num_experts + 1)
        out_DK = sent_D - np.pad(demand_DE, ((0, 0), (1, 0))).cumsum(axis=1)
        once_DK = sent_D / model.top_k * (1 - (1 - out_DK / np.maximum(sent_D, 1)) ** model.top_k)
        rows_DK, experts_DK = 4 * token_s * once_DK, num_DK * expert_D[:, None]
        best_D = np.where(num_DK <= slots_D[:, None], rows_DK + experts_DK, np.inf).argmin(axis=1)
        every_D = np.arange(len(best_D))
        return float(part_D @ rows_DK[every_D, best_D]), float(part_D @ experts_DK[every_D, best_D])
    gain_DE = part_D[:, None] * (4 * token_s * supply_DE - expert_D[:, None])
    place_DE = np.argsort(np.argsort(-supply_DE, axis=1, kind="stable"), axis=1)
    held_DE = (gain_DE > 0) & (place_DE < slots_D[:, None])
    loses_E = (gain_DE <= 0).all(axis=0)
    held_DE[gain_DE.argmax(axis=0)[loses_E], loses_E] = True
    out_D = (supply_DE * ~held_DE).sum(axis=1)
    return float(part_D @ (4 * token_s * out_D)), float(part_D @ (held_DE.sum(axis=1) * expert_D))


def _expert_seconds(cluster: ClusterSpec, model: ModelShape, strategy: Strategy) -> FloatArray:
    """Returns the seconds of a node's NIC in which one expert comes to a rank of each domain, and its gradient goes,
    where they are not hidden; owners may be in the domain.
    """
    sharding = strategy.sharding
    if not isinstance(sharding, Fsep):
        return np.zeros(len(cluster.domain_sizes))
    element_bytes = 0 if sharding.prefetch_layers else model.bytes_per_element * restores_per_step(sharding)
    element_bytes += 0 if sharding.delay_reshard else GRADIENT_BYTES
    bytes_D = element_bytes * elements_from_outside(model, cluster)
    return bytes_D.astype(np.float64) / (cluster.inter_node_gb_per_s * 1e9)


def elements_from_outside(model: ModelShape, cluster: ClusterSpec) -> IntArray:
    """Returns how many elements of a sharded expert are owned outside of each domain, int64 [D], as wire slices."""
    return (cluster.num_ranks - np.array(cluster.domain_sizes)) * -(-model.expert_parameters // cluster.num_ranks)
