"""A certificate in seconds: what a plan costs in a step, and bounds that no split over any layout can go below."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog, minimize_scalar
from scipy.sparse import bmat, csr_matrix, diags, identity, kron

from moesys.balance.certificate import greatest_bound
from moesys.balance.flow.step_cost import crosses_once, plan_seconds, row_seconds
from moesys.balance.planning_problem import link_domains_of, nodes_of, tokens_by_node
from moesys.config import ClusterSpec, Ep, Fsep, ModelShape, Sharding, Strategy
from moesys.config.overlap import Sequential
from moesys.cost import GRADIENT_BYTES, FloatArray, restores_per_step
from moesys.layout import TokenPlan, owner_of_experts
from moesys.load import IntArray, LoadMatrix


@dataclass(frozen=True)
class SecondsCertificate:
    """Seconds of a layer's sequential step as planners count them (``flow.step_cost``): products, rows, and experts
    that are not hidden, without latencies, tiles and memory.

    ``plan_s``: of the plan. ``products_s``, ``rows_s``, ``experts_s``: what together bounds every split over every
    layout with these slots from below: products that all ranks share, and what their balance costs at least; rows that
    no node has slots to keep, and experts that it keeps them with, on the mean node's NICs. A slot is worth its rows,
    so the parts are those of the best sum. Planners count whole tokens, so of a plan of few tokens ``plan_s`` may be
    less than that.
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
            f"{cluster.num_ranks} and {model.num_experts}; give those that it was planned for"
        )
    slots_R = np.array(strategy.slots(model, cluster))
    if (layout.filled_R > slots_R).any():
        rank = int((layout.filled_R > slots_R).argmax())
        raise ValueError(
            f"the plan's layout fills {layout.filled_R[rank]} slots of rank {rank}, sharding={strategy.sharding!r} has "
            f"{slots_R[rank]}; certify it under the strategy that it was planned for"
        )
    overlap = strategy.overlap
    sequential = Sequential() if overlap.chunks > 1 or overlap.reaches_memory else overlap
    plan_s = plan_seconds(plan, cluster, model, strategy.sharding, sequential, late_slots=strategy.late_slots)
    return SecondsCertificate(plan_s, *_least_seconds(load, slots_R, cluster, model, strategy, plan_s))


# A bound below so much of what a plan costs is worth a second look, up to how exactly it is found, in so many steps.
WIDE_GAP, TOLERANCE, MOST_STEPS = 0.9, 0.01, 8


def _least_seconds(
    load: LoadMatrix, slots_R: IntArray, cluster: ClusterSpec, model: ModelShape, strategy: Strategy, plan_s: float
) -> tuple[float, float, float]:
    """Returns the least seconds with products, rows and experts, of all plans that cost no more than ``plan_s``."""
    domains = _Domains.of(load, slots_R, cluster, model, strategy)
    if len(domains.ranks_D) == 1:
        return _least_inside(load, slots_R, cluster, model, strategy)
    found = domains.least(plan_s / domains.row_s).parts
    if crosses_once(strategy.overlap, cluster):
        found = max(found, (found[0], *domains.least_once(model.top_k)), key=sum)
    if sum(found) < WIDE_GAP * plan_s and domains.by_slot and cluster.domain_sizes == cluster.node_sizes:
        found = (found[0] + max(domains.least_in_whole_slots(plan_s) - sum(found), 0.0), *found[1:])
    return found


def _least_inside(
    load: LoadMatrix, slots_R: IntArray, cluster: ClusterSpec, model: ModelShape, strategy: Strategy
) -> tuple[float, float, float]:
    """Returns the least seconds inside one domain: with at most m slots on a rank the busiest rank has at least the
    bound of ``greatest_bound``, and a rank with m slots receives as many experts, for the best m; rows that a rank has
    no slots to keep come on top. Of several nodes in a domain the busiest rank's may be the one with the fewest slots.
    """
    R, E, sharding = cluster.num_ranks, model.num_experts, strategy.sharding
    row_s, intra = row_seconds(model, cluster), cluster.intra_node_gb_per_s * 1e9
    of_ranks = zip(np.sort(load.tokens_RE)[:, ::-1], slots_R, strict=True)
    away_R = [int(tokens_E[slots:].sum()) for tokens_E, slots in of_ranks]
    rows_s = 4 * model.row_bytes / intra * sum(away_R) / R
    if cluster.num_nodes > 1:
        return load.total / R * row_s, rows_s, 0.0
    slot_s = 0.0
    if isinstance(sharding, Fsep):
        slot_s = _travelling_bytes(model, sharding) * (R - 1) * -(-model.expert_parameters // R) / intra
    bounds = []
    for most in range(1, min(int(slots_R.max()), E) + 1):
        limited_R = np.minimum(slots_R, most).tolist()
        if sum(limited_R) >= E:
            bounds.append((row_s * greatest_bound(load.tokens_E.tolist(), limited_R, [0] * R)[0], most * slot_s))
    products_s, experts_s = min(bounds, key=sum)
    return products_s, rows_s, experts_s


def _travelling_bytes(model: ModelShape, sharding: Sharding) -> int:
    """Returns the bytes of an element of an expert, and of its gradient, that do not travel behind other work."""
    restored = 0 if sharding.prefetch_layers else model.bytes_per_element * restores_per_step(sharding)
    return restored + (0 if sharding.delay_reshard else GRADIENT_BYTES)


class _Linear(NamedTuple):
    """The least of a linear program by products, rows and experts, and what a token more of each expert costs, [E]."""

    parts: tuple[float, float, float]
    price_E: FloatArray


@dataclass(frozen=True, eq=False)
class _Domains:
    """Link domains, and what their tokens, rows and experts cost.

    A step costs at least the mean of what nodes need for their busiest rank's products, for rows that leave them, four
    times, and for experts that come (``flow.step_cost``). So no layout and no split costs less than the least of

        Σ_d ranks_D[d] / R · row_s · b_d + nics_D[d] · (4 · token_s · Σ_e max(s_de - x_de, 0) + Σ_e slot_s[d, e] · k_de)

    over tokens x_de that domain d computes of e, Σ_d x_de = t_e, in k_de slots, Σ_e k_de <= slots_D[d], on ranks that
    have at most b_d tokens: x_de <= b_d · k_de, Σ_e x_de <= ranks_D[d] · b_d, with k_de whole. s_de: tokens of e from
    sources in d.

    ``token_s``: of a row once, 0 where tokens cross once, whose rows are counted apart (``least_once``); ``nics_D``: of
    a node's NICs the weight, where a domain has several nodes that of the smallest; ``by_slot``: whether each slot
    costs ``slot_DE``, or each expert of a domain, where experts travel node by node.
    """

    supply_DE: FloatArray
    tokens_E: FloatArray
    ranks_D: FloatArray
    slots_D: FloatArray
    nics_D: FloatArray
    row_s: float
    token_s: float
    once_s: float
    slot_DE: FloatArray
    by_slot: bool

    @classmethod
    def of(
        cls, load: LoadMatrix, slots_R: IntArray, cluster: ClusterSpec, model: ModelShape, strategy: Strategy
    ) -> _Domains:
        domain_R, nics_R, sharding = link_domains_of(cluster), nodes_of(cluster), strategy.sharding
        supply_DE, tokens_E = tokens_by_node(load.tokens_RE, domain_R)
        part_C = np.bincount(nics_R) / cluster.num_ranks
        nics = cluster.inter_node_gb_per_s * 1e9
        element_s = _travelling_bytes(model, sharding) / nics
        if isinstance(sharding, Ep):
            owner_E = owner_of_experts(model.num_experts, cluster.num_ranks)
            slot_DE, by_slot = np.full(supply_DE.shape, element_s * model.expert_parameters), sharding.lend == "flat"
            # Owners have what they own, and need not keep it in a slot.
            slot_DE[domain_R[owner_E], np.arange(model.num_experts)] = 0
        else:
            slot_DE = np.ones(supply_DE.shape) * element_s * elements_from_outside(model, cluster)[:, None]
            by_slot = sharding.flat
        once, token_s = crosses_once(strategy.overlap, cluster), model.row_bytes / nics
        return cls(
            supply_DE=supply_DE.astype(np.float64),
            tokens_E=tokens_E.astype(np.float64),
            ranks_D=np.bincount(domain_R).astype(np.float64),
            slots_D=np.bincount(domain_R, np.minimum(slots_R, model.num_experts)).astype(np.float64),
            nics_D=np.array([part_C[nics_R[domain_R == domain]].min() for domain in range(len(supply_DE))]),
            row_s=row_seconds(model, cluster),
            token_s=0.0 if once else token_s,
            once_s=token_s,
            slot_DE=slot_DE,
            by_slot=by_slot,
        )

    def least(self, most_tokens: float) -> _Linear:
        """Returns the least with divisible slots, where no rank has more than ``most_tokens``, as is so in every plan
        whose products do not cost more than that. Of tokens that are kept and that come, kept <= min(s_de, b) · k_de
        and kept + come <= min(t_e, b) · k_de, b = ``most_tokens``: of whole slots both hold.
        """
        (D, E), per_token = self.supply_DE.shape, 1 / max(float(self.tokens_E.mean()), 1.0)
        each, by_domain = identity(D * E), kron(identity(D), np.ones((1, E)))
        by_expert = kron(np.ones((1, D)), identity(E))
        # The solver's tolerances are absolute: tokens are in means of an expert here, and costs in the dearest one.
        tokens_E, supply = self.tokens_E * per_token, self.supply_DE.ravel() * per_token
        most = most_tokens * per_token if self.by_slot else np.inf
        at_most = bmat(
            [
                [each, None, -diags(np.minimum(supply, most))],
                [each, each, -diags(np.minimum(np.tile(tokens_E, D), most))],
                [None, None, by_domain],
            ]
        )
        row_s, row_cost = self.row_s / self.ranks_D.sum(), 4 * self.token_s * self.nics_D.repeat(E) / per_token
        slot_cost = self.nics_D.repeat(E) * self.slot_DE.ravel()
        dearest = float(max(row_cost.max(), slot_cost.max())) or 1.0
        most_of_each = np.concatenate([supply, np.full(D * E, np.inf), self.ranks_D.repeat(E)])
        solved = linprog(
            np.concatenate([-row_cost, np.zeros(D * E), slot_cost]) / dearest,
            A_ub=at_most,
            b_ub=np.concatenate([np.zeros(2 * D * E), self.slots_D]),
            A_eq=bmat([[by_expert, by_expert, csr_matrix((E, D * E))]]),
            b_eq=tokens_E,
            bounds=np.stack([np.zeros(3 * D * E), most_of_each], axis=1),
        )
        products_s = row_s * self.tokens_E.sum()
        if solved.status:
            return _Linear((products_s, 0.0, 0.0), np.full(E, row_s))
        kept, _, slots = np.split(solved.x, 3)
        parts = (products_s, float(row_cost @ (supply - kept)), float(slot_cost @ slots))
        return _Linear(parts, row_s + solved.eqlin.marginals * dearest * per_token)

    def least_once(self, top_k: int) -> tuple[float, float]:
        """Returns the least seconds with tokens that cross to a node once, and with experts.

        Each node by itself: K independent choices reach the fewest nodes where the choices of one node are as unequally
        divided as can be, for the chance of being reached is concave in a node's share. So with n experts the node
        keeps no more than the tokens of the n that it wants most, they cost no less than the n cheapest, and other
        nodes have as many of the next ones as they have slots.
        """
        E, most = self.supply_DE.shape[1], int(self.slots_D.max())
        rows_s = experts_s = 0.0
        for domain, nics in enumerate(self.nics_D):
            supply_E = np.sort(self.supply_DE[domain])[::-1]
            sent, wanted_E = max(supply_E.sum(), 1.0), np.concatenate([[0.0], supply_E.cumsum()])
            come_E = np.concatenate([[0.0], np.sort(self.slot_DE[domain]).cumsum()])
            best = (np.inf, 0.0)
            for own in range(min(int(self.slots_D[domain]), E) + 1):
                ends = np.minimum(np.arange(own, E + most, most), E)
                crossing = sent / top_k * (1 - (1 - np.diff(wanted_E[ends]) / sent) ** top_k).sum()
                best = min(best, (4 * self.once_s * crossing, float(come_E[own])), key=sum)
            rows_s, experts_s = rows_s + nics * best[0], experts_s + nics * best[1]
        return rows_s, experts_s

    def least_in_whole_slots(self, plan_s: float) -> float:
        """Returns a bound that counts whole slots, on plans that cost no more than ``plan_s``.

        With any price of each expert's tokens in the place of Σ_d x_de = t_e, domains are independent, and the sum of
        their least is a bound (Lagrange). The prices are those of the linear program near balance. A plan that costs
        less than some target has no rank whose products take longer, nor a node whose products and experts do; with
        these limits a bound at or above the target proves the target, and one below it itself.
        """
        prices = [self.least(each * self.tokens_E.sum() / self.ranks_D.sum()).price_E for each in (1.05, 1.25)]
        low, high, target = 0.0, plan_s, plan_s
        for _ in range(MOST_STEPS):
            bound = max(self._dual(price_E, target) for price_E in prices)
            low, high = max(low, min(bound, target)), high if bound >= target else target
            if high - low <= TOLERANCE * high:
                break
            target = (low + high) / 2
        return low

    def _dual(self, price_E: FloatArray, most_s: float) -> float:
        """Returns the sum of what domains cost at least, of which none takes longer than ``most_s``. Between two loads
        of the busiest rank a domain costs no less than the products of the lesser, and gains no more than with slots as
        large as the greater; the interval of the least cost is halved as long as it is wide.
        """
        total, most = float(price_E @ self.tokens_E), most_s / self.row_s
        for domain, nics in enumerate(self.nics_D):
            row_s = self.row_s * self.ranks_D[domain] / self.ranks_D.sum()
            away_s = nics * 4 * self.token_s * self.supply_DE[domain].sum()

            def cost(low: float, high: float, domain: int = domain, row_s: float = row_s) -> tuple[float, float, float]:
                left_s = most_s - self.row_s * low
                return row_s * low - self._gain(domain, price_E, high, row_s, left_s), low, high

            edges = np.linspace(0.0, most, 9)
            intervals = [cost(*edge) for edge in pairwise(edges.tolist())]
            while True:
                heapify(intervals)
                _, low, high = intervals[0]
                if high - low <= TOLERANCE / 2 * most:
                    break
                middle = (low + high) / 2
                intervals = [*intervals[1:], cost(low, middle), cost(middle, high)]
            total += away_s + intervals[0][0]
        return total

    def _gain(self, domain: int, price_E: FloatArray, size: float, row_s: float, left_s: float) -> float:
        """Returns the most that a domain gains by computing tokens in slots of ``size``, whose experts may take
        ``left_s`` on its NICs: at a price of its ranks' capacity as well, which again any serves, the best slots are
        taken. They are full of tokens from here, or have the rest of these and some from elsewhere, or only such.
        """
        supply_E, cost_E = self.supply_DE[domain], self.nics_D[domain] * self.slot_DE[domain]
        ranks, slots, dearest = self.ranks_D[domain], self.slots_D[domain], self.slot_DE[domain].min()
        if dearest > 0:
            slots = min(slots, left_s / dearest)
        full_E = np.floor(supply_E / size)
        rest_E = supply_E - full_E * size
        come_E = np.minimum(size - rest_E, self.tokens_E - supply_E)
        number_3E = np.stack([full_E, np.ones_like(full_E), (self.tokens_E - supply_E - come_E) / size])
        row_cost = self.nics_D[domain] * 4 * self.token_s

        highest = max(float(price_E.max()) + row_cost, row_s / ranks)

        def at(share: float) -> float:
            capacity_s = share * highest
            from_elsewhere_E = price_E - capacity_s
            kept_E = from_elsewhere_E + row_cost
            mixed_E = kept_E * rest_E + np.maximum(from_elsewhere_E, 0) * come_E
            gain_3E = np.stack([kept_E * size, mixed_E, from_elsewhere_E * size]) - cost_E
            best = np.argsort(-gain_3E, axis=None)
            taken = np.diff(np.minimum(number_3E.ravel()[best].cumsum(), slots), prepend=0.0)
            return capacity_s * ranks * size + float(np.maximum(gain_3E.ravel()[best], 0) @ taken)

        return float(minimize_scalar(at, bounds=(0.0, 1.0), method="bounded", options={"maxiter": 12}).fun)


def elements_from_outside(model: ModelShape, cluster: ClusterSpec) -> IntArray:
    """Returns how many elements of a sharded expert are owned outside of each domain, int64 [D], as wire slices."""
    return (cluster.num_ranks - np.array(cluster.domain_sizes)) * -(-model.expert_parameters // cluster.num_ranks)
