"""Greedy: ours. Constructs layouts, and judges them by the best split of later counts."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar, Literal

from pydantic import Field

from moesys.balance.greedy.leader import follow_leader
from moesys.balance.greedy.search import LayoutSearch, SearchOptions
from moesys.balance.planning_problem import PlanningProblem, domains_of, experts_with_room
from moesys.config import Within
from moesys.config.member import Balance, MinReplicas, ReplicasWithin, unfit_moves
from moesys.layout import ExpertLayout


class Greedy(Balance):
    """Ours: replicas on distinct ranks, cut so that a surplus of any hot expert can reach every rank.

    With ``deadline_ms`` two ranks may plan differently. Their layouts still agree, for one rank plans and broadcasts,
    but runs do not repeat bit by bit.
    """

    kind: Literal["greedy"] = "greedy"
    is_compiled: ClassVar[bool] = True
    recent_batches: ClassVar[int] = 16
    effort: int = Field(1, ge=0, description="factor of the search, which is counted in layouts that are tried")
    min_replicas: MinReplicas = Field(1, description="least number of replicas of every expert, on distinct ranks")
    replicas_within: ReplicasWithin = Field("cluster", description="part of the cluster with all replicas of an expert")
    max_moves: int | None = Field(
        None, ge=0, description="replicas that may differ from the previous layout; None: all"
    )
    move_tokens: int = Field(
        0, ge=0, description="cost of a moved replica, in tokens of the busiest rank over the life of a plan"
    )
    drift: float = Field(
        0.02,
        ge=0,
        le=1,
        description="share of experts' popularity that is drawn anew until a plan is used; measured "
        "where there is a history",
    )

    deadline_ms: float | None = Field(
        None, gt=0, description="time limit of the search; runs then do not repeat bit by bit"
    )

    def unfit_for_lag_0(self) -> str:
        if self.deadline_ms is not None:
            return (
                f"deadline_ms={self.deadline_ms} ends the search by a clock, but with lag=0 every rank plans "
                "for itself and all must plan the same; use deadline_ms=None and effort, or lag=1"
            )
        if self.max_moves is not None:
            return unfit_moves(self, self.max_moves)
        if self.move_tokens:
            return (
                f"balance=Greedy(move_tokens={self.move_tokens}) is what a move from the layout before has to "
                "earn, but with lag=0 every layout is planned on its own counts alone; use move_tokens=0, or lag=1"
            )
        return ""

    def without_clock(self) -> Greedy:
        return self if self.deadline_ms is None else self.replace(deadline_ms=None)

    def with_moves_priced(self, units_per_token: int, replan_every: int) -> Greedy:
        """Returns the planner with ``move_tokens`` in units of the load, of which a plan serves ``replan_every``."""
        if not self.move_tokens:
            return self
        return self.replace(move_tokens=-(-self.move_tokens * units_per_token // replan_every))

    def layout(self, problem: PlanningProblem) -> ExpertLayout:
        """Returns a layout on which ``FlowSplit`` reaches the mean, on this load and as nearly as can be on later ones,
        and few tokens leave their node.

        Layouts are constructed (``construction``) over the whole cluster, unless it has several nodes and the model is
        known; where every node can hold every expert, node by node for what its own ranks send; and, with the model,
        over nodes that first choose their experts (``node_first``), and with every expert's replicas spread
        (``spread``). The best by its robust cost (``robust_cost``) and its traffic between nodes is taken; where the
        model is known, that which costs a step the least (``step_cost``) on loads that ``drift`` as much as this one
        will, and of small layouts neighbours are tried as well (``climbed``).
        Every usable slot is filled, no expert twice on a rank; under ``replicas_within`` every slot that an expert of
        its part can use. If the cost of transfers of experts is known, ranks leave slots empty as long as that
        lowers the cost.

        Beside a new layout there are three candidates: that in force, the same with the few replicas moved that the
        load needs elsewhere, and one built anew in which whole experts stay. A layout that moves replicas must earn
        them: ``move_tokens`` each, and four hundredths of the mean for all of them. A new one is relabelled so that it
        moves the fewest. One in force that has duplicates or free slots is completed first, and one that breaks
        ``min_replicas`` or ``replicas_within`` is replaced, whatever ``max_moves`` says. Integers decide, so equal
        arguments give equal bytes, but for a deadline. Without a layout in force nothing depends on how experts, or
        ranks of a node, are numbered.
        """
        check_replicas(problem, self.min_replicas, self.replicas_within)
        search = LayoutSearch(problem, self._options)
        fresh = search.best(search.numbers.empty())
        best = fresh if problem.layout is None else search.earned(fresh, problem.layout)
        return search.numbers.named(best.expert_RS)

    def plan(self, problem: PlanningProblem) -> tuple[ExpertLayout, bytes]:
        """Returns the layout that did best lately, of those that several candidates would have had on the micro-batches
        before (``leader``). Without a history, and where moves are counted or a clock ends the search, ``layout``
        decides.
        """
        follows = self.max_moves is None and not self.move_tokens and self.deadline_ms is None and self.effort > 0
        if not (follows and problem.recent and problem.model and problem.sharding) or self._options.is_constrained:
            return self.layout(problem), b""
        return follow_leader(problem, self._options)

    @property
    def _options(self) -> SearchOptions:
        return SearchOptions(**{field.name: getattr(self, field.name) for field in fields(SearchOptions)})


def check_replicas(problem: PlanningProblem, wanted: int, within: Within) -> None:
    """Raises ValueError where not all experts at once can have ``wanted`` replicas, each expert on distinct ranks of
    one place ``within`` the cluster.
    """
    cluster, slots_R, num_experts = problem.cluster, problem.slots_R, problem.load.num_experts
    if wanted == 1 and within == "cluster":
        return  # slots are enough
    slots_by_place: dict[int, list[int]] = {}
    for slots, place in zip(slots_R, domains_of(cluster, within), strict=True):
        slots_by_place.setdefault(place, []).append(slots)
    most = max(sum(slots > 0 for slots in place) for place in slots_by_place.values())
    if wanted > most:
        if within == "cluster":
            raise ValueError(
                f"min_replicas={wanted} needs as many ranks with slots, and there are {most}; "
                f"use min_replicas <= {most} or give more ranks slots"
            )
        raise ValueError(
            f"min_replicas={wanted} with replicas_within={within!r} needs as many ranks with slots in one {within}, "
            f"and the most are {most}; use min_replicas <= {most} or replicas_within='cluster'"
        )
    room = [experts_with_room(wanted, place, num_experts) for place in slots_by_place.values()]
    if sum(room) >= num_experts:
        return
    if within == "cluster":
        usable = sum(min(slots, num_experts) for slots in slots_R)
        raise ValueError(
            f"min_replicas={wanted} for {num_experts} experts takes {wanted * num_experts} slots, at most "
            f"{num_experts} of them on a rank, and there are {usable}; add at least {wanted * num_experts - usable} or "
            "use a smaller min_replicas"
        )
    raise ValueError(
        f"replicas_within={within!r} with min_replicas={wanted} has room for {room} experts by {within}, in all "
        f"{sum(room)} of {num_experts}; add slots, use a smaller min_replicas or replicas_within='cluster'"
    )
