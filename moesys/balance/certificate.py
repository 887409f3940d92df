"""Certificates: how good a plan is, and what proves it.

``certify`` compares a plan's busiest rank with bounds in tokens, ``certify_seconds`` what the plan costs in a step with
bounds in seconds. No split, or no layout at all, can go below the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from moesys.balance.flow.max_load import TightSet, tight_set
from moesys.balance.flow.step_cost import crosses_once, prices_of, row_seconds, split_cost, with_experts
from moesys.balance.flow.token_routes import list_replicas
from moesys.balance.topology import domains_of, link_domains_of, nodes_of, tokens_by_node
from moesys.config import ClusterSpec, Fsep, ModelShape, Overlap, Sharding, Strategy, Within
from moesys.config.sharding import one_per_rank
from moesys.cost import GRADIENT_BYTES, FloatArray, restores_per_step
from moesys.display import Columns, Display, by_column, listed
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray, LoadMatrix

BoundKind = Literal["mean", "hottest expert", "slots", "whole experts", "domain"]


@dataclass(frozen=True, repr=False)
class Certificate(Display):
    """The busiest rank of a plan, in tokens, beside what bounds it from below.

    ``tight`` proves ``layout_bound``, the least busiest rank of any split over this layout: the ranks of the set alone
    hold its experts. ``bound`` holds for every split over every layout with these slots; ``bound_kind`` says why:

    - mean: tokens over the ranks that have slots;
    - hottest expert: its replicas are at most the ranks of a domain and the spare slots, and its ranks hold others too;
    - slots: an expert of l tokens is on at least l / busiest ranks, and each of them costs a slot;
    - whole experts: slots beyond the experts are few, so most experts have one replica, and some share a rank;
    - domain: an expert's tokens stay inside one domain, and too few domains have to share the heavy ones.
    """

    max_tokens: int
    total: int
    num_ranks: int
    tight: TightSet
    bound: int
    bound_kind: BoundKind

    @property
    def mean(self) -> Fraction:
        """Tokens per rank, exactly."""
        return Fraction(self.total, self.num_ranks)

    @property
    def max_over_mean(self) -> float:
        """The busiest rank over the mean; 1.0 without tokens, as ``TokenPlan.max_over_mean``."""
        return float(self.max_tokens / self.mean) if self.total else 1.0

    @property
    def layout_bound(self) -> int:
        """The least busiest rank of any split over this layout, in tokens: ``min_max_load``."""
        return self.tight.bound

    @property
    def gap(self) -> float:
        """How far the plan can be from the best of all layouts, as a fraction of the bound."""
        return _gap(self.max_tokens, self.bound)

    @property
    def layout_gap(self) -> float:
        """How far the plan is from the best split over its layout, as a fraction of it."""
        return _gap(self.max_tokens, self.layout_bound)

    def check(self, load: LoadMatrix, layout: ExpertLayout) -> None:
        """Proves ``layout_bound`` anew by counting; ValueError says what does not hold."""
        tokens_E, inside = load.tokens_E.tolist(), set(self.tight.ranks)
        for expert in self.tight.experts:
            outside = [
                rank for rank in range(layout.num_ranks) if rank not in inside and layout.replicas_RE[rank, expert]
            ]
            if outside:
                raise ValueError(
                    f"tight.experts={self.tight.experts} has expert {expert}, which rank {outside[0]} holds too; "
                    "the certificate is not of this layout"
                )
        tokens = sum(tokens_E[expert] for expert in set(self.tight.experts))
        if tokens != self.tight.tokens:
            raise ValueError(
                f"tight.tokens={self.tight.tokens} but its experts have {tokens} tokens; "
                "the certificate is not of this load"
            )
        if load.total != self.total:
            raise ValueError(f"total={self.total} but the load has {load.total} tokens; the certificate is not of it")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers, strings and lists, for JSON."""
        return {
            "max_tokens": self.max_tokens,
            "total": self.total,
            "num_ranks": self.num_ranks,
            "max_over_mean": self.max_over_mean,
            "layout_bound": self.layout_bound,
            "layout_gap": self.layout_gap,
            "tight_ranks": list(self.tight.ranks),
            "tight_experts": list(self.tight.experts),
            "tight_tokens": self.tight.tokens,
            "bound": self.bound,
            "bound_kind": self.bound_kind,
            "gap": self.gap,
        }

    def _facts(self) -> str:
        return (
            f"busiest rank {self.max_tokens:,} tokens, this layout at least {self.layout_bound:,} (gap "
            f"{self.layout_gap:.2%}), any layout at least {self.bound:,} (gap {self.gap:.2%})"
        )

    def _columns(self) -> Columns:
        return {name: [value] for name, value in self.to_dict().items()}

    def _shown(self) -> Columns:
        return by_column(("", "value"), self.to_dict().items())

    def __str__(self) -> str:
        experts, ranks = listed("expert", self.tight.experts), listed("rank", self.tight.ranks)
        lines = (
            f"busiest rank: {self.max_tokens:,} tokens, {self.max_over_mean:.4f} × the mean of {float(self.mean):,.1f}",
            f"this layout:  at least {self.layout_bound:,} (gap {self.layout_gap:.2%}), for {self.tight.tokens:,} "
            f"tokens live only on {ranks}: {experts}",
            f"any layout:   at least {self.bound:,} (gap {self.gap:.2%}), by {self.bound_kind}",
        )
        return "\n".join(lines)


def certify(
    plan: TokenPlan,
    cluster: ClusterSpec,
    *,
    slots_per_rank: int | Sequence[int] | None = None,
    min_replicas: int = 1,
    replicas_within: Within = "cluster",
) -> Certificate:
    """Returns the certificate of a plan among all layouts with these slots, replicas and domains.

    ``slots_per_rank`` is one number for all ranks or one a rank; None: the slots that the plan's layout fills.
    Raises ValueError when cluster and plan do not belong together, or the plan's layout breaks the limits itself.
    """
    load, layout = plan.load, plan.layout
    if cluster.num_ranks != layout.num_ranks:
        raise ValueError(
            f"the plan is for {layout.num_ranks} ranks but the cluster has {cluster.num_ranks}; give the cluster "
            "that it was planned for"
        )
    slots_R = _slots(layout, slots_per_rank)
    domain_R = domains_of(cluster, replicas_within)
    _check_limits(layout, domain_R, min_replicas, replicas_within)
    bound, kind = greatest_bound(load.tokens_E.tolist(), slots_R, domain_R, min_replicas)
    return Certificate(
        max_tokens=int(plan.tokens_R.max()),
        total=load.total,
        num_ranks=layout.num_ranks,
        tight=tight_set(load, layout),
        bound=bound,
        bound_kind=kind,
    )


def greatest_bound(
    tokens_E: Sequence[int], slots_R: Sequence[int], domain_R: Sequence[int], min_replicas: int = 1
) -> tuple[int, BoundKind]:
    """Returns the tokens that the busiest rank has at least, over all splits over all layouts, and the reason for them.

    A layout holds every expert on at least ``min_replicas`` ranks of one domain, on rank r at most ``slots_R[r]``.
    Slots must suffice for that.
    """
    heaviest_E = sorted(tokens_E, reverse=True)
    total, num_experts = sum(heaviest_E), len(heaviest_E)
    usable_R = [min(slots, num_experts) for slots in slots_R]
    ranks_D, slots_D = _by_domain(usable_R, domain_R)
    num_slots, num_ranks = sum(slots_D), sum(ranks_D)
    bounds: dict[BoundKind, int] = {
        "mean": -(-total // num_ranks),
        "hottest expert": _hottest(heaviest_E, sorted(usable for usable in usable_R if usable), max(ranks_D)),
        "slots": _least(
            lambda most: sum(max(min_replicas, -(-tokens // most)) for tokens in heaviest_E) <= num_slots, heaviest_E[0]
        ),
    }
    # with two replicas and more of every expert, none need be whole
    if min_replicas == 1:
        bounds["whole experts"] = _shared(heaviest_E, num_slots - num_experts, num_ranks)
    if len(ranks_D) > 1:
        room_D = [sum(heaviest_E[: slots // min_replicas]) for slots in slots_D]
        bounds["domain"] = max(
            -(-_shared(heaviest_E, 0, len(ranks_D)) // max(ranks_D)),
            _least(
                lambda most: sum(map(min, room_D, [ranks * most for ranks in ranks_D])) >= total,
                total,
            ),
        )
    kind = max(bounds, key=lambda kind: bounds[kind])
    return bounds[kind], kind


def _by_domain(usable_R: Sequence[int], domain_R: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the number of ranks with slots, and of slots, of every domain that has any."""
    ranks: dict[int, int] = {}
    slots: dict[int, int] = {}
    for domain, usable in zip(domain_R, usable_R, strict=True):
        if usable:
            ranks[domain] = ranks.get(domain, 0) + 1
            slots[domain] = slots.get(domain, 0) + usable
    return list(ranks.values()), list(slots.values())


def _hottest(heaviest_E: Sequence[int], narrowest_R: Sequence[int], most_replicas: int) -> int:
    """Returns what the ranks of the hottest expert hold at least, over its best number of replicas.

    ``narrowest_R``: slots of each rank, ascending. With k slots more than experts, n ranks of s slots together hold at
    least s - k experts that no other rank has room for.
    """
    spare = sum(narrowest_R) - len(heaviest_E)
    lightest_first = heaviest_E[:0:-1]
    bounds, slots = [], 0
    for replicas in range(1, min(most_replicas, spare + 1) + 1):
        slots += narrowest_R[replicas - 1]
        tokens = heaviest_E[0] + sum(lightest_first[: max(0, slots - spare - 1)])
        bounds.append(-(-tokens // replicas))
    return min(bounds)


def _shared(heaviest_E: Sequence[int], num_split: int, num_places: int) -> int:
    """Returns what some place holds at least when at most ``num_split`` experts are divided over several places.

    Of the j · places + split + 1 heaviest, more than j · places are whole; so j + 1 of them share a place, and these
    weigh at least as much as the lightest j + 1.
    """
    sizes = range(num_places + num_split + 1, len(heaviest_E) + 1, num_places)
    return max((sum(heaviest_E[size - 1 - j : size]) for j, size in enumerate(sizes, start=1)), default=0)


def _least(enough: Callable[[int], bool], most: int) -> int:
    """Returns the least positive integer for which ``enough`` holds, as it does for ``most`` and above; 0 without
    tokens.
    """
    low, high = min(1, most), most
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _slots(layout: ExpertLayout, slots_per_rank: int | Sequence[int] | None) -> list[int]:
    filled_R = [int(filled) for filled in layout.filled_R]
    if slots_per_rank is None:
        return filled_R
    slots_R = list(map(int, one_per_rank("slots_per_rank", slots_per_rank, layout.num_ranks, "the plan")))
    for rank, (filled, slots) in enumerate(zip(filled_R, slots_R, strict=True)):
        if filled > slots:
            raise ValueError(
                f"the plan's layout fills {filled} slots of rank {rank} but slots_per_rank gives it {slots}; "
                "give the slots it was planned for, or slots_per_rank=None"
            )
    return slots_R


def _check_limits(layout: ExpertLayout, domain_R: Sequence[int], min_replicas: int, replicas_within: Within) -> None:
    for expert in range(layout.num_experts):
        holders = layout.replicas_RE[:, expert].nonzero()[0].tolist()
        if len(holders) < min_replicas:
            raise ValueError(
                f"min_replicas={min_replicas} but the plan's layout holds expert {expert} on {len(holders)} ranks; "
                "certify it with the limits it was planned for"
            )
        if len({domain_R[rank] for rank in holders}) > 1:
            raise ValueError(
                f"replicas_within={replicas_within!r} but the plan's layout holds expert {expert} on ranks {holders}; "
                "certify it with the limits it was planned for"
            )


def _gap(tokens: int, bound: int) -> float:
    return tokens / bound - 1 if bound else 0.0


# --- seconds ------------------------------------------------------------------------------------------------


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
            f"{cluster.num_ranks} and {model.num_experts}; give those that it was planned for"
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
    mean_tokens = load.total / units_per_token / max(1, int((layout.filled_R > 0).sum()))
    prices, gradients = with_experts(prices, layout, model, cluster, sharding, units_per_token, mean_tokens=mean_tokens)
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
