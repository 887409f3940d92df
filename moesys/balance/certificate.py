"""A certificate in tokens: how good a plan is, and what proves it.

``certify`` compares a plan's busiest rank with bounds that no split, or no layout at all, can go below.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from moesys.balance.flow.max_load import TightSet, tight_set
from moesys.balance.planning_problem import domains_of
from moesys.config import ClusterSpec, Within
from moesys.config.sharding import one_per_rank
from moesys.display import Columns, Display, by_column, listed
from moesys.layout import ExpertLayout, TokenPlan

BoundKind = Literal["mean", "hottest expert", "slots", "whole experts", "domain"]


@dataclass(frozen=True, repr=False)
class Certificate(Display):
    """The tokens of the busiest rank of a plan, and lower bounds on them.

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
        held = f"for {self.tight.tokens:,} tokens live only on {ranks}: {experts}"
        why = "by mean" if len(self.tight.ranks) == self.num_ranks else held
        mean = f"{self.max_over_mean:.4f} × the mean of {float(self.mean):,.1f}"
        return (
            f"busiest rank: {self.max_tokens:,} tokens, {mean}\n"
            f"this layout:  at least {self.layout_bound:,} (gap {self.layout_gap:.2%}), {why}\n"
            f"any layout:   at least {self.bound:,} (gap {self.gap:.2%}), by {self.bound_kind}"
        )


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
            _least(lambda most: sum(map(min, room_D, [ranks * most for ranks in ranks_D])) >= total, total),
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
    least = min(1, most)
    return least + bisect_left(range(least, most), True, key=enough)


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
