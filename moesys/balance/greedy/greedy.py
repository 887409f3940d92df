"""Greedy: ours. Constructs layouts, judges them by the best split of later counts, and improves the best of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from moesys.balance.flow.flow_split import least_crossing
from moesys.balance.flow.step_cost import crosses_once
from moesys.balance.greedy.builders import Builders, BuiltLayout
from moesys.balance.greedy.local_search import MoveConstraints, local_search
from moesys.balance.greedy.numbering import Numbers, num_moves, relabelled, relabelled_inside
from moesys.balance.greedy.robust_cost import (
    MILLION,
    MUCH_DRIFT,
    NO_LIMIT,
    Scenarios,
    StepJudge,
    draw_scenarios,
    robust_cost,
)
from moesys.balance.late_slots import FetchPrices, fetch_prices
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.topology import domains_of, experts_with_room
from moesys.config import Ep, Within
from moesys.config.balance import Balance, MinReplicas, ReplicasWithin, unfit_moves
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray

# Work at effort 1 by the number of slots, so that small plans, which are quick, are thorough.
SCENARIO_SLOTS, FEWEST_SCENARIOS, MOST_SCENARIOS = 1536, 6, 16
SEARCH_SLOTS, FEWEST_EVALUATIONS, MOST_EVALUATIONS = 2048, 6, 48
# Evaluations between two looks at the clock, where there is a deadline.
SLICE = 8

# A token between nodes counts as a quarter of one more on the busiest rank. On LAER-MoE's A100 nodes, 8192 bytes over
# an eighth of 89 GB/s take half as long as the 1.48 us of computing a token, and about half of that can be hidden.
INTER_NODE_SHARE = 4
# What a layout that moves every replica must gain at least, in millionths of the mean; one that moves fewer, less.
LEAST_GAIN = 40_000
# An imbalance at which layouts that keep less to nodes are not looked for, in millionths of the mean.
GOOD_ENOUGH = 200
# Of layouts that are judged by the cost of a step: how many are improved.
MOST_IMPROVED = 2
# Parts of a rank's mean that a place on a node is for, where nodes choose their experts: the smaller, the more nodes
# have an expert, and the better loads can drift.
PARTS, PARTS_OF_MUCH_DRIFT = (1, 2, 4), (2, 4, 8)
# Nodes that hold all experts between them, where a token crosses to each once: a block that splits keep rows to.
GROUPS = (2, 4, 8)
# How many times the evaluations of a search go into repair, and then into a search for the load itself: one scenario
# each.
REPAIR_EFFORT = 16


class Greedy(Balance):
    """Ours: replicas on distinct ranks, spread over nodes, improved by local search; anytime and monotone in its work.

    With ``deadline_ms`` two ranks may plan differently. Their layouts still agree, for one rank plans and broadcasts,
    but runs do not repeat bit by bit.
    """

    kind: Literal["greedy"] = "greedy"
    is_compiled: ClassVar[bool] = True
    effort: int = Field(1, ge=0, description="multiples of the default work, in iterations and never by a clock")
    min_replicas: MinReplicas = Field(1, description="least number of replicas of every expert, on distinct ranks")
    replicas_within: ReplicasWithin = Field("cluster", description="where all replicas of an expert are")
    max_moves: int | None = Field(
        None, ge=0, description="replicas that may differ from the previous layout; None: all"
    )
    move_tokens: int = Field(
        0, ge=0, description="what a moved replica costs, in tokens of the busiest rank over a plan's life"
    )
    drift: float = Field(
        0.02, ge=0, le=1, description="share of experts' popularity that is drawn anew until a plan is used"
    )
    deadline_ms: float | None = Field(
        None, gt=0, description="the search ends after so much time; then runs do not repeat bit by bit"
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

        Layouts are constructed (``construction``) over the whole cluster; where every node can hold every expert, node
        by node for what its own ranks send; and, where the model is known, over nodes that first choose their experts
        (``node_first``), and with every expert's replicas spread (``spread``). The best by its robust cost
        (``robust_cost``) and its traffic between nodes is improved by local search (``local_search``); where the model
        is known, that which costs a step the least (``step_cost``) on loads that ``drift`` as much as this one will.
        Every usable slot is filled, no expert twice on a rank; under ``replicas_within`` every slot that an expert of
        its part can use. Where it is known what it takes to bring experts to their slots, ranks use fewer as long as
        that is less.

        Near the layout in force two more are looked for: itself with the few replicas moved that the load needs
        elsewhere, and one built anew in which whole experts stay. A layout that moves replicas must earn them:
        ``move_tokens`` each, and four hundredths of the mean for all of them. A new one is relabelled so that it moves
        the fewest. One in force that has duplicates or free slots is completed first, and one that breaks
        ``min_replicas`` or ``replicas_within`` is replaced, whatever ``max_moves`` says. More ``effort`` than 1,
        without one in force and where counts decide, never gives a worse layout by this measure. Integers decide, so
        equal arguments give equal bytes, but for a deadline. Without a layout in force nothing depends on how experts,
        or ranks of a node, are numbered.
        """
        check_replicas(problem, self.min_replicas, self.replicas_within)
        planner = _Planner(problem, self)
        fresh = planner.best(planner.numbers.empty())
        return planner.numbers.named(
            (fresh if problem.layout is None else planner.earned(fresh, problem.layout)).expert_RS
        )


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


def _cost(draft: _Draft) -> int:
    return draft.cost


@dataclass(frozen=True, eq=False)
class _Draft:
    """A layout, and the parts of the cluster that its replicas keep to in search."""

    planner: _Planner
    expert_RS: IntArray
    part_R: IntArray

    @cached_property
    def imbalance(self) -> int:
        """What the best split leaves above the mean, in its millionths: of the load and the average scenario."""
        weight_K = self.planner.scenarios.weight_K
        order_K, cost_K = np.arange(len(weight_K)), np.zeros(len(weight_K), dtype=np.int64)
        robust_cost(self.planner.scenarios, self.expert_RS, order_K, NO_LIMIT, cost_K)
        return int(cost_K[0]) + int(cost_K[1:] @ weight_K[1:]) // max(int(weight_K[1:].sum()), 1)

    @cached_property
    def cost(self) -> int:
        """The imbalance, and a share of the traffic between nodes; where the model is known, what steps of later loads
        cost beside the mean rank's products. In millionths of these.
        """
        planner = self.planner
        if planner.judge is not None:
            return planner.judge.cost(self.expert_RS)
        if planner.numbers.num_nodes == 1:
            return self.imbalance
        crossing = least_crossing(planner.numbers.tokens_RE, self.expert_RS, planner.numbers.node_R)
        return self.imbalance + crossing * MILLION // max(int(planner.numbers.tokens_E.sum()), 1) // INTER_NODE_SHARE

    @cached_property
    def full_cost(self) -> int:
        """The cost, and what products add to it where seconds are asked for."""
        judge = self.planner.judge
        return self.cost if judge is None else self.cost + judge.products_beyond_rows(self.expert_RS)

    @cached_property
    def replicas_RE(self) -> IntArray:
        return ExpertLayout(self.expert_RS, len(self.planner.numbers.tokens_E)).replicas_RE


class _Planner:
    """One plan's problem in its own ``numbers``, and the steps that solve it."""

    def __init__(self, problem: PlanningProblem, config: Greedy) -> None:
        self.problem, self.config = problem, config
        self.end = None if config.deadline_ms is None else time.monotonic() + config.deadline_ms / 1e3
        self.numbers = n = Numbers(problem)
        self.part_R = np.array(domains_of(problem.cluster, config.replicas_within))[n.rank_R]
        self.judge = None if problem.model is None else StepJudge(problem, problem.model, n, config.drift)
        num_slots = int(n.slots_R.sum())
        self.evaluations = min(max(SEARCH_SLOTS // num_slots, FEWEST_EVALUATIONS), MOST_EVALUATIONS)
        scenarios = min(max(SCENARIO_SLOTS // num_slots, FEWEST_SCENARIOS), MOST_SCENARIOS)
        self.scenarios_each = scenarios // 2 if config.effort else 0
        self.scenarios = draw_scenarios(n.tokens_E, self.scenarios_each, self.scenarios_each)
        # jumps tell layouts apart, but a search that follows them finds less
        num_near = 1 + self.scenarios_each
        self.near = Scenarios(self.scenarios.tokens_KE[:num_near], self.scenarios.weight_K[:num_near])

    @property
    def constrained(self) -> bool:
        """Whether experts have their places by ``replicas_within`` or ``min_replicas``."""
        return self.config.replicas_within != "cluster" or self.config.min_replicas > 1

    # --- building

    def best(self, before_RS: IntArray) -> _Draft:
        """Returns the best of the layouts that are built in one go, near ``before_RS``, and then improved."""
        if self.judge is None or self.constrained:
            return min((self.improved(draft, NO_LIMIT) for draft in self.built(before_RS)), key=_cost)
        built = {kind: build() for kind, build in enumerate(self.kinds(before_RS))}
        drafts = {kind: _Draft(self, *found) for kind, found in built.items() if found}
        kinds = sorted(drafts, key=lambda kind: drafts[kind].cost)
        finalists = (self.improved(drafts[kind], NO_LIMIT) for kind in kinds[:MOST_IMPROVED])
        best = min(finalists, key=lambda draft: draft.full_cost)
        return best if self.problem.sharding is None else self.with_fewer_slots(best, kinds[0])

    def built(self, before_RS: IntArray) -> Iterator[_Draft]:
        """Yields layouts by the parts of the cluster that replicas keep to; none that keep to them less, after one that
        costs next to nothing.
        """
        builders = self.builders(before_RS)
        if self.constrained:
            yield _Draft(self, *builders.by_parts())
            return
        if self.numbers.num_nodes > 1 and (found := builders.each_node()):
            draft = _Draft(self, *found)
            yield draft
            if draft.imbalance <= GOOD_ENOUGH:
                return
        yield _Draft(self, *builders.whole())

    def kinds(self, before_RS: IntArray) -> Sequence[Callable[[], BuiltLayout | None]]:
        """Returns what builds layouts for the fewest seconds, one of each kind."""
        builders, num_nodes = self.builders(before_RS), self.numbers.num_nodes
        kinds: list[Callable[[], BuiltLayout | None]] = [
            partial(builders.replicas_spread, False),
            partial(builders.replicas_spread, True),
            builders.whole,
        ]
        if isinstance(self.problem.sharding, Ep):
            kinds += [builders.at_home, partial(builders.copies_that_pay, self.fetch_prices)]
        if num_nodes > 1:
            parts = PARTS if self.config.drift < MUCH_DRIFT else PARTS_OF_MUCH_DRIFT
            kinds += [partial(builders.node_first, each, num_nodes) for each in parts]
            if crosses_once(self.problem.overlap, self.problem.cluster):
                kinds += [partial(builders.node_first, parts[0], group) for group in GROUPS if group < num_nodes]
            kinds.append(builders.each_node)
        return kinds

    @property
    def fetch_prices(self) -> FetchPrices:
        """The prices of copies that owners lend, in seconds of the load's units."""
        problem = self.problem
        assert problem.model is not None
        assert problem.sharding is not None
        prices = fetch_prices(problem.model, problem.cluster, problem.sharding, late=False)
        units = problem.units_per_token / (1 << self.numbers.scale)
        return prices._replace(on_rank=prices.on_rank * units, on_node=prices.on_node * units)

    def builders(self, before_RS: IntArray) -> Builders:
        return Builders(self.numbers, self.part_R, self.config.min_replicas, self.scenarios_each, before_RS)

    def with_fewer_slots(self, best: _Draft, kind: int) -> _Draft:
        """Returns ``best``, or a layout of its kind with fewer slots a rank, as long as one less costs less."""
        n = self.numbers
        most = int(n.slots_R.max()) - 1
        while most and np.minimum(n.slots_R, most).sum() >= len(n.tokens_E):
            slots_R = tuple(min(slots, most) for slots in self.problem.slots_R)
            other = _Planner(replace(self.problem, slots_R=slots_R), self.config)
            built = other.kinds(other.numbers.empty())[kind]()
            if built is None:
                break
            draft = _Draft(self, n.numbered(other.numbers.named(built.expert_RS)), built.part_R)
            if draft.full_cost >= best.full_cost:
                break
            best, most = draft, most - 1
        return best

    # --- improving

    def improved(self, draft: _Draft, most_moves: int) -> _Draft:
        """Returns the cheapest of ``draft`` and the layouts that local search has come to after each unit of effort."""
        expert_RS, best, moves, first_draw = draft.expert_RS.copy(), draft, 0, 1
        for _ in range(self.config.effort):
            new_moves, first_draw, done = self.search(
                self.near, expert_RS, draft.part_R, self.evaluations, most_moves - moves, first_draw
            )
            moves += new_moves
            if new_moves:
                trial = _Draft(self, expert_RS.copy(), draft.part_R)
                best = trial if trial.cost < best.cost else best
            if done:
                break
        return best

    def repaired(self, draft: _Draft, most_moves: int) -> _Draft:
        """Returns the cheaper of two: searched for what the load itself needs and then for what later ones do; and the
        same after relocations. These take the fewest moves, but of few ones each does less.
        """
        evaluations = REPAIR_EFFORT * self.evaluations * self.config.effort
        itself = Scenarios(self.scenarios.tokens_KE[:1], self.scenarios.weight_K[:1])
        best = draft
        for relocates in (True, False):
            expert_RS, moves = draft.expert_RS.copy(), 0
            if relocates:
                moves = self.search(itself, expert_RS, draft.part_R, evaluations, most_moves, relocates=True)[0]
            moves += self.search(itself, expert_RS, draft.part_R, evaluations, most_moves - moves)[0]
            trial = self.improved(_Draft(self, expert_RS, draft.part_R), most_moves - moves)
            best = trial if trial.cost < best.cost else best
        return best

    def search(
        self,
        scenarios: Scenarios,
        expert_RS: IntArray,
        part_R: IntArray,
        evaluations: int,
        most_moves: int,
        first_draw: int = 1,
        relocates: bool = False,
    ) -> tuple[int, int, bool]:
        """Changes ``expert_RS`` by local search, in slices where there is a deadline; returns the moves, the draw to go
        on from, and whether there is nothing more to find, or no time.
        """
        constraints = MoveConstraints((expert_RS != EMPTY).sum(axis=1), part_R, np.array([self.config.min_replicas]))
        all_moves = 0
        while evaluations > 0:
            if self.end is not None and time.monotonic() >= self.end:
                return all_moves, first_draw, True
            most = evaluations if self.end is None else min(evaluations, SLICE)
            spent, moves, first_draw = local_search(
                scenarios, constraints, relocates, expert_RS, most, most_moves - all_moves, first_draw
            )
            all_moves += moves
            evaluations -= spent
            # relocations begin with the same trials every time, so those of a slice without a move are all there are
            if spent < most or (relocates and not moves):
                return all_moves, first_draw, True
        return all_moves, first_draw, False

    def earned(self, fresh: _Draft, previous: ExpertLayout) -> _Draft:
        """Returns the best by cost and moves of four layouts: the one in force, the same repaired, one built near it,
        and ``fresh``.
        """
        n, cluster = self.numbers, self.problem.cluster
        before_RE, before_RS = previous.replicas_RE[n.rank_R][:, n.expert_E], n.numbered(previous)
        most_moves = NO_LIMIT if self.config.max_moves is None else self.config.max_moves
        price = Fraction((self.config.move_tokens >> n.scale) * MILLION, n.mean)
        price += Fraction(LEAST_GAIN, int(n.slots_R.sum()))
        part_sizes = tuple(np.bincount(n.finest_R).tolist())
        near = self.best(before_RS)
        row_R = relabelled_inside(near.replicas_RE, before_RE, n.slots_R, part_sizes)
        drafts = [_Draft(self, near.expert_RS[row_R], near.part_R)]
        if self.meets_constraints(before_RE, self.part_R):
            kept = _Draft(self, self.completed(before_RS, self.part_R), self.part_R)
            if self.problem.sharding is not None and self.judge is not None:
                # free slots may be what makes it cheap
                kept = min(_Draft(self, before_RS, self.part_R), kept, key=_cost)
            drafts += [kept, self.repaired(kept, max(most_moves - num_moves(before_RE, kept.replicas_RE), 0))]

        def choice(draft: _Draft) -> tuple[bool, Fraction, int]:
            """Orders drafts, the best lowest: those within the budget by cost and price, and others by their moves."""
            moves = num_moves(before_RE, draft.replicas_RE)
            over = max(moves - most_moves, 0)
            return bool(over), draft.cost + price * moves if not over else Fraction(moves), moves

        # however few replicas a relabelled one moves, it costs as much as before
        if min(map(choice, drafts)) > (False, Fraction(fresh.cost), 0):
            rows = [relabelled_inside(fresh.replicas_RE, before_RE, n.slots_R, part_sizes)]
            if self.config.replicas_within != "node" or cluster.domain_sizes == cluster.node_sizes:
                rows.append(relabelled(fresh.replicas_RE, before_RE, n.slots_R, cluster))
            drafts += [_Draft(self, fresh.expert_RS[row_R], fresh.part_R) for row_R in rows]
        return min(drafts, key=choice)

    def completed(self, expert_RS: IntArray, part_R: IntArray) -> IntArray:
        """Returns a layout with an expert in every free slot: of the experts of the rank's part that the rank lacks,
        the one with the most tokens per replica.
        """
        n, expert_RS = self.numbers, expert_RS.copy()
        replicas_E = np.bincount(expert_RS[expert_RS != EMPTY], minlength=len(n.tokens_E)).tolist()
        for rank, row_S in enumerate(expert_RS):
            for slot in range(int((row_S != EMPTY).sum()), int(n.slots_R[rank])):
                candidates = range(len(n.tokens_E))
                if self.config.replicas_within != "cluster":
                    candidates = np.setdiff1d(expert_RS[part_R == part_R[rank]], EMPTY).tolist()
                others = [other for other in candidates if other not in row_S]
                if not others:
                    break
                row_S[slot] = min(others, key=lambda other: (-int(n.tokens_E[other]) // replicas_E[other], other))
                replicas_E[int(row_S[slot])] += 1
        return expert_RS

    def meets_constraints(self, before_RE: IntArray, part_R: IntArray) -> bool:
        """Returns whether a layout in force has enough replicas of every expert, all where they may be."""
        enough = ((before_RE > 0).sum(axis=0) >= self.config.min_replicas).all()
        parts_PE = np.zeros((int(part_R.max()) + 1, len(self.numbers.tokens_E)), dtype=np.int64)
        np.add.at(parts_PE, part_R, before_RE)
        in_one_part = self.config.replicas_within == "cluster" or ((parts_PE > 0).sum(axis=0) == 1).all()
        return bool(enough and in_one_part)
