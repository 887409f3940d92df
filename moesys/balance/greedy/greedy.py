"""Greedy: ours. Constructs layouts, judges them by the best split of later counts, and improves the best of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial

import numpy as np

from moesys.balance.flow.flow_split import least_crossing, rows_at_least_load, split_costs
from moesys.balance.flow.step_cost import Prices, prices_of, row_seconds, with_experts
from moesys.balance.greedy.construction import ConstructionProblem, build_best, build_each_node
from moesys.balance.greedy.local_search import MoveConstraints, local_search
from moesys.balance.greedy.node_first import deal_to_nodes
from moesys.balance.greedy.pinned import pin_homes
from moesys.balance.greedy.relabelling import num_moves, relabelled, relabelled_inside
from moesys.balance.greedy.replica_constraints import check_replicas, part_of_experts, spread_replicas
from moesys.balance.greedy.robust_cost import (
    MILLION,
    NO_LIMIT,
    Scenarios,
    draw_drifted,
    draw_scenarios,
    robust_cost,
)
from moesys.balance.greedy.spread import spread
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.replicas import usable_slots
from moesys.balance.topology import domains_of, levels_of, link_domains_of, nodes_of, tokens_by_node
from moesys.config import Ep, Fsep, Greedy
from moesys.cost import ExpertPass, pass_seconds, row_product_seconds
from moesys.layout import EMPTY, ExpertLayout, owner_of_experts
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
# Of layouts that are judged by the cost of a step: how many are improved, and of how many slots two loads must do.
MOST_IMPROVED, MANY_SLOTS = 2, 512
# Parts of a rank's mean that a place on a node is for, where nodes choose their experts: the smaller, the more nodes
# have an expert, and the better loads can drift.
PARTS, PARTS_OF_MUCH_DRIFT, MUCH_DRIFT = (1, 2, 4), (2, 4, 8), 0.1
# Below that a load is judged by itself.
LEAST_DRIFT = 0.005
# How many times the evaluations of a search go into repair, and then into a search for the load itself: one scenario
# each.
REPAIR_EFFORT = 16

# Compiled loops multiply twice what a scenario's experts have, up to 2.55 times as much each, by a million.
MOST_TOKENS = 2**39


def greedy_layout(problem: PlanningProblem, config: Greedy) -> ExpertLayout:
    """Returns a layout on which ``FlowSplit`` reaches the mean, on this load and as nearly as can be on later ones, and
    few tokens leave their node.

    Layouts are constructed (``construction``) over the whole cluster; where every node can hold every expert, node by
    node for what its own ranks send; and, where the model is known, over nodes that first choose their experts
    (``node_first``), and with every expert's replicas spread (``spread``). The best by its robust cost
    (``robust_cost``) and its traffic between nodes is improved by local search (``local_search``); where the model is
    known, that which costs a step the least (``step_cost``) on loads that ``drift`` as much as this one will. Every
    usable slot is filled, no expert twice on a rank; under ``replicas_within`` every slot that an expert of its part
    can use. Where it is known what it takes to bring experts to their slots, ranks use fewer as long as that is less.

    Near the layout in force two more are looked for: itself with the few replicas moved that the load needs elsewhere,
    and one built anew in which whole experts stay. A layout that moves replicas must earn them: ``move_tokens`` each,
    and four hundredths of the mean for all of them. A new one is relabelled so that it moves the fewest. One in force
    that has duplicates or free slots is completed first, and one that breaks ``min_replicas`` or ``replicas_within`` is
    replaced, whatever ``max_moves`` says. More ``effort`` than 1, without one in force and where counts decide, never
    gives a worse layout by this measure. Integers decide, so equal arguments give equal bytes, but for a deadline.
    Without a layout in force nothing depends on how experts, or ranks of a node, are numbered.
    """
    check_replicas(problem, config)
    planner = _Planner(problem, config)
    fresh = planner.best(planner.empty())
    return planner.layout(fresh if problem.layout is None else planner.earned(fresh, problem.layout))


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
        if planner.prices is not None:
            prices, gradients = planner.prices_with_experts(self)
            cost = split_costs(planner.later_KRE, self.expert_RS, planner.node_R, prices, NO_LIMIT)
            num_loads = len(planner.later_KRE)
            computed = int(prices.row[0]) * planner.mean * num_loads
            return (int(cost) + gradients * num_loads) * MILLION // max(computed, 1)
        if planner.num_nodes == 1:
            return self.imbalance
        crossing = least_crossing(planner.tokens_RE, self.expert_RS, planner.node_R)
        return self.imbalance + crossing * MILLION // max(int(planner.tokens_E.sum()), 1) // INTER_NODE_SHARE

    @cached_property
    def full_cost(self) -> int:
        """The cost, and what tiles, waves and memory add to the products of the busiest rank on the first of the loads:
        it depends on how many experts a rank has. Only where seconds are asked for.
        """
        return self.cost + self.planner.products_beyond_rows(self)

    @cached_property
    def replicas_RE(self) -> IntArray:
        return ExpertLayout(self.expert_RS, len(self.planner.tokens_E)).replicas_RE


class _Planner:
    """One plan's problem, and the steps that solve it.

    Inside, experts are numbered from the heaviest on, and the ranks of a node, or of a domain where it has several,
    from the one with the most slots on. Everywhere else a *node* is what rows are dear to leave: a domain of the links.
    """

    def __init__(self, problem: PlanningProblem, config: Greedy) -> None:
        self.problem = problem
        load, cluster, slots_R = problem.load, problem.cluster, problem.slots_R
        self.load, self.cluster, self.config, self.width = load, cluster, config, max(slots_R)
        self.end = None if config.deadline_ms is None else time.monotonic() + config.deadline_ms / 1e3
        self.node_R = link_domains_of(cluster)
        self.num_nodes = int(self.node_R[-1]) + 1
        # ranks of one of these may stand for one another
        self.finest_R = levels_of(cluster, nodes_of(cluster))[0]
        usable_R = np.array(usable_slots(slots_R, load.num_experts))
        self.rank_R = np.lexsort((-usable_R, self.finest_R))
        self.slots_R = usable_R[self.rank_R]
        self.part_R = np.array(domains_of(cluster, config.replicas_within))[self.rank_R]
        supply_NE, tokens_E = tokens_by_node(load.tokens_RE, self.node_R)
        self.scale = max(0, int(tokens_E.sum()).bit_length() - MOST_TOKENS.bit_length())
        self.expert_E = np.lexsort((*-supply_NE, -tokens_E))
        # rows of it are read, and compiled loops are compiled anew for another order of memory
        self.supply_NE = np.ascontiguousarray(supply_NE[:, self.expert_E]) >> self.scale
        self.tokens_E = self.supply_NE.sum(axis=0)

        # of a domain of several nodes round these, too
        nics_R = nodes_of(cluster)
        index_in_node_R = np.arange(len(slots_R)) - np.searchsorted(nics_R, nics_R)
        rank_A = np.lexsort((nics_R, index_in_node_R))
        self.rank_A = rank_A[self.slots_R[rank_A] > 0]
        self.prices: Prices | None = None
        self.known_prices: dict[bytes, tuple[Prices, int]] = {}
        if problem.model is not None:
            self.prices = prices_of(problem.model, cluster, int(self.tokens_E.sum()))
        self.mean = max(int(self.tokens_E.sum()) // len(self.rank_A), 1)
        num_slots = int(self.slots_R.sum())
        self.evaluations = min(max(SEARCH_SLOTS // num_slots, FEWEST_EVALUATIONS), MOST_EVALUATIONS)
        scenarios = min(max(SCENARIO_SLOTS // num_slots, FEWEST_SCENARIOS), MOST_SCENARIOS)
        self.scenarios_each = scenarios // 2 if config.effort else 0
        self.scenarios = draw_scenarios(self.tokens_E, self.scenarios_each, self.scenarios_each)
        # jumps tell layouts apart, but a search that follows them finds less
        num_near = 1 + self.scenarios_each
        self.near = Scenarios(self.scenarios.tokens_KE[:num_near], self.scenarios.weight_K[:num_near])

    @cached_property
    def tokens_RE(self) -> IntArray:
        tokens_RE = np.ascontiguousarray(self.load.tokens_RE[self.rank_R][:, self.expert_E]) >> self.scale
        # as a split's arrays are: for others it would be compiled anew
        tokens_RE.setflags(write=False)
        return tokens_RE

    def layout(self, draft: _Draft) -> ExpertLayout:
        """Returns a draft as a layout: the caller's numbers, experts in order on every rank, S of the widest rank."""
        last = len(self.expert_E)
        named_RS = np.append(self.expert_E, last)[draft.expert_RS]  # EMPTY is -1: the last
        named_RS.sort(axis=1)
        named_RS[named_RS == last] = EMPTY
        expert_RS = np.full((len(self.slots_R), self.width), EMPTY)
        expert_RS[self.rank_R, : named_RS.shape[1]] = named_RS
        return ExpertLayout(expert_RS, len(self.tokens_E))

    @cached_property
    def later_KRE(self) -> IntArray:
        """Loads to judge layouts by."""
        drift = self.config.drift
        num_loads = 1 if drift < LEAST_DRIFT else 2 if drift < MUCH_DRIFT or self.slots_R.sum() > MANY_SLOTS else 4
        tokens_KRE: IntArray = draw_drifted(self.tokens_RE, self.config.drift, num_loads)
        tokens_KRE.setflags(write=False)
        return tokens_KRE

    # --- building

    def best(self, before_RS: IntArray) -> _Draft:
        """Returns the best of the layouts that are built in one go, near ``before_RS``, and then improved."""
        if self.prices is None or self.config.replicas_within != "cluster" or self.config.min_replicas > 1:
            return min((self.improved(draft, NO_LIMIT) for draft in self.built(before_RS)), key=_cost)
        drafts = {kind: draft for kind, build in enumerate(self.builders(before_RS)) if (draft := build())}
        kinds = sorted(drafts, key=lambda kind: drafts[kind].cost)
        finalists = (self.improved(drafts[kind], NO_LIMIT) for kind in kinds[:MOST_IMPROVED])
        best = min(finalists, key=lambda draft: draft.full_cost)
        return best if self.problem.sharding is None else self.with_fewer_slots(best, kinds[0])

    def with_fewer_slots(self, best: _Draft, kind: int) -> _Draft:
        """Returns ``best``, or a layout of its kind with fewer slots a rank, as long as one less costs less."""
        most = int(self.slots_R.max()) - 1
        while most and np.minimum(self.slots_R, most).sum() >= len(self.tokens_E):
            slots_R = tuple(min(slots, most) for slots in self.problem.slots_R)
            other = _Planner(replace(self.problem, slots_R=slots_R), self.config)
            built = other.builders(other.empty())[kind]()
            if built is None:
                break
            draft = _Draft(self, self.numbered(other.layout(built)), built.part_R)
            if draft.full_cost >= best.full_cost:
                break
            best, most = draft, most - 1
        return best

    def builders(self, before_RS: IntArray) -> Sequence[Callable[[], _Draft | None]]:
        """What builds layouts for the fewest seconds, one of each kind."""
        whole = [partial(self.built_spread, evenly) for evenly in (False, True)]
        whole.append(partial(self.built_whole, before_RS))
        if isinstance(self.problem.sharding, Ep):
            whole.append(self.built_pinned)
        if self.num_nodes == 1:
            return whole
        parts = PARTS if self.config.drift < MUCH_DRIFT else PARTS_OF_MUCH_DRIFT
        by_node = [partial(self.built_node_first, before_RS, each) for each in parts]
        return [*whole, *by_node, partial(self.built_each_node, before_RS)]

    def built_spread(self, evenly: bool) -> _Draft:
        expert_RS = self.empty()
        spread(self.tokens_E, self.slots_R, self.node_R, self.rank_A, evenly, expert_RS)
        return _Draft(self, expert_RS, self.part_R)

    def built_pinned(self) -> _Draft | None:
        """None where owners have no slots for what they own."""
        num_experts, num_ranks = len(self.expert_E), len(self.rank_R)
        owner_E = np.argsort(self.rank_R)[owner_of_experts(num_experts, num_ranks)[self.expert_E]]
        expert_RS = self.empty()
        if not pin_homes(self.supply_NE, owner_E, self.slots_R, self.node_R, expert_RS):
            return None
        return _Draft(self, expert_RS, self.part_R)

    def built_whole(self, before_RS: IntArray) -> _Draft:
        expert_RS = self.empty()
        self.build(expert_RS, self.rank_A, self.tokens_E, np.arange(len(self.tokens_E)), before_RS)
        return _Draft(self, expert_RS, self.part_R)

    def built_each_node(self, before_RS: IntArray) -> _Draft | None:
        """None where some node cannot hold every expert."""
        expert_RS = self.empty()
        if (np.bincount(self.node_R, self.slots_R) < len(self.tokens_E)).any():
            return None
        if not build_each_node(
            self.slots_R, self.node_R, self.rank_A, self.supply_NE, self.scenarios_each, before_RS, expert_RS
        ):
            return None
        return _Draft(self, expert_RS, self.node_R)

    def prices_with_experts(self, draft: _Draft) -> tuple[Prices, int]:
        """Prices of tokens beside the draft's experts on their way, and what their gradients cost; in the load's unit,
        of which a micro-batch's tokens are ``units_per_token``.
        """
        problem, prices = self.problem, self.prices
        assert prices is not None
        assert problem.model is not None
        if problem.sharding is None:
            return prices, 0
        # a flat restore of different experts depends on their number alone
        flat = isinstance(problem.sharding, Fsep) and problem.sharding.flat
        key = ((draft.expert_RS != EMPTY).sum(axis=1) if flat else draft.expert_RS).tobytes()
        if key not in self.known_prices:
            prices, gradients = with_experts(
                prices, self.layout(draft), problem.model, problem.cluster, problem.sharding
            )
            experts_2C = prices.experts_2C * problem.units_per_token >> self.scale
            gradients = gradients * problem.units_per_token >> self.scale
            self.known_prices[key] = prices._replace(experts_2C=experts_2C), gradients
        return self.known_prices[key]

    def products_beyond_rows(self, draft: _Draft) -> int:
        """What products of the busiest rank take beyond its rows' flops, in millionths of the mean rank's rows."""
        problem = self.problem
        assert problem.model is not None
        rows_RE = rows_at_least_load(self.later_KRE[0], draft.expert_RS, self.node_R)
        rows_RE = (rows_RE << self.scale) / problem.units_per_token
        passes: tuple[ExpertPass, ...] = ("forward", "input_gradients", "weight_gradients")
        seconds_R = sum(pass_seconds(rows_RE, problem.model, problem.cluster, of) for of in passes)
        of_flops = row_product_seconds(problem.model, problem.cluster)
        beyond = np.max(seconds_R) - of_flops * rows_RE.sum(axis=1).max()
        mean = (self.mean << self.scale) / problem.units_per_token
        return int(beyond / (row_seconds(problem.model, problem.cluster) * mean) * MILLION)

    def built(self, before_RS: IntArray) -> Iterator[_Draft]:
        """Yields layouts by the parts of the cluster that replicas keep to; none that keep to them less, after one that
        costs next to nothing.
        """
        if self.config.replicas_within != "cluster" or self.config.min_replicas > 1:
            yield self.built_by_parts(before_RS)
            return
        if self.num_nodes > 1 and (draft := self.built_each_node(before_RS)):
            yield draft
            if draft.imbalance <= GOOD_ENOUGH:
                return
        yield self.built_whole(before_RS)

    def built_node_first(self, before_RS: IntArray, parts: int) -> _Draft:
        """Returns a layout whose nodes have the experts that their own ranks want most."""
        node_A = self.node_R[self.rank_A]
        ranks_N = np.bincount(node_A, minlength=self.num_nodes)
        slots_N = np.zeros_like(ranks_N)
        np.add.at(slots_N, node_A, self.slots_R[self.rank_A])
        places_NE, tokens_NE = deal_to_nodes(self.supply_NE, slots_N, ranks_N, parts)
        expert_RS = self.empty()
        for node in range(self.num_nodes):
            rank_A, expert_D = self.rank_A[node_A == node], np.flatnonzero(places_NE[node])
            if len(rank_A):
                heaviest_first_D = expert_D[np.argsort(-tokens_NE[node, expert_D], kind="stable")]
                self.build(expert_RS, rank_A, tokens_NE[node], heaviest_first_D, before_RS)
        return _Draft(self, expert_RS, self.node_R)

    def built_by_parts(self, before_RS: IntArray) -> _Draft:
        """Returns a layout with every expert in one part of the cluster, with the replicas that it needs."""
        least, part_R = self.config.min_replicas, self.part_R
        part_E = part_of_experts(self.tokens_E, self.slots_R, part_R, least)
        expert_RS = self.empty()
        for part in range(int(part_R.max()) + 1):
            rank_A, expert_D = self.rank_A[part_R[self.rank_A] == part], np.flatnonzero(part_E == part)
            if not len(expert_D):
                continue
            tokens_E = np.where(part_E == part, self.tokens_E, 0)
            if least == 1:
                self.build(expert_RS, rank_A, tokens_E, expert_D, before_RS)
            else:
                self.spread(expert_RS, rank_A, expert_D)
        return _Draft(self, expert_RS, part_R)

    def empty(self) -> IntArray:
        return np.full((len(self.slots_R), int(self.slots_R.max())), EMPTY)

    def build(
        self, expert_RS: IntArray, rank_A: IntArray, tokens_E: IntArray, expert_D: IntArray, before_RS: IntArray
    ) -> None:
        """Fills the rows of ``rank_A`` with the experts ``expert_D``, balanced for ``tokens_E``."""
        slots_R = np.zeros_like(self.slots_R)
        slots_R[rank_A] = np.minimum(self.slots_R[rank_A], len(expert_D))
        problem = ConstructionProblem(slots_R, self.node_R, rank_A, tokens_E, self.supply_NE, expert_D, before_RS)
        found_RS = self.empty()
        scenarios = draw_scenarios(tokens_E, self.scenarios_each, self.scenarios_each)
        if build_best(problem, scenarios, found_RS):
            expert_RS[rank_A] = found_RS[rank_A]
        else:
            self.spread(expert_RS, rank_A, expert_D)

    def spread(self, expert_RS: IntArray, rank_A: IntArray, expert_D: IntArray) -> None:
        rows = spread_replicas(
            self.tokens_E, self.slots_R, self.config.min_replicas, expert_D.tolist(), rank_A.tolist()
        )
        for rank, experts in zip(rank_A.tolist(), rows, strict=True):
            expert_RS[rank, : len(experts)] = experts

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
        """Of the layout in force, itself repaired, one built near it and the new one, the one whose cost and moves are
        worth the least.
        """
        before_RE, before_RS = previous.replicas_RE[self.rank_R][:, self.expert_E], self.numbered(previous)
        most_moves = NO_LIMIT if self.config.max_moves is None else self.config.max_moves
        price = Fraction((self.config.move_tokens >> self.scale) * MILLION, self.mean) + Fraction(
            LEAST_GAIN, int(self.slots_R.sum())
        )
        part_sizes = tuple(np.bincount(self.finest_R).tolist())
        near = self.best(before_RS)
        row_R = relabelled_inside(near.replicas_RE, before_RE, self.slots_R, part_sizes)
        drafts = [_Draft(self, near.expert_RS[row_R], near.part_R)]
        if self.meets_constraints(before_RE, self.part_R):
            kept = _Draft(self, self.completed(before_RS, self.part_R), self.part_R)
            if self.problem.sharding is not None and self.prices is not None:
                # free slots may be what makes it cheap
                kept = min(_Draft(self, before_RS, self.part_R), kept, key=_cost)
            drafts += [kept, self.repaired(kept, max(most_moves - num_moves(before_RE, kept.replicas_RE), 0))]

        def choice(draft: _Draft) -> tuple[bool, Fraction, int]:
            """The least is the best: within the budget, then cost and price; where nothing is, the fewest moves."""
            moves = num_moves(before_RE, draft.replicas_RE)
            over = max(moves - most_moves, 0)
            return bool(over), draft.cost + price * moves if not over else Fraction(moves), moves

        # however few replicas a relabelled one moves, it costs as much as before
        if min(map(choice, drafts)) > (False, Fraction(fresh.cost), 0):
            rows = [relabelled_inside(fresh.replicas_RE, before_RE, self.slots_R, part_sizes)]
            if self.config.replicas_within != "node" or self.cluster.domain_sizes == self.cluster.node_sizes:
                rows.append(relabelled(fresh.replicas_RE, before_RE, self.slots_R, self.cluster))
            drafts += [_Draft(self, fresh.expert_RS[row_R], fresh.part_R) for row_R in rows]
        return min(drafts, key=choice)

    def numbered(self, layout: ExpertLayout) -> IntArray:
        """A layout's rows in the planner's numbers, every expert once a rank."""
        new_E = np.empty_like(self.expert_E)
        new_E[self.expert_E] = np.arange(len(new_E))
        expert_RS = self.empty()
        for row_S, rank in zip(expert_RS, self.rank_R.tolist(), strict=True):
            experts = sorted(set(new_E[list(layout.experts_of(rank))].tolist()))
            row_S[: len(experts)] = experts
        return expert_RS

    def completed(self, expert_RS: IntArray, part_R: IntArray) -> IntArray:
        """With an expert in every free slot: of those of the rank's part that it lacks, the one with the most tokens a
        replica.
        """
        expert_RS = expert_RS.copy()
        replicas_E = np.bincount(expert_RS[expert_RS != EMPTY], minlength=len(self.tokens_E)).tolist()
        for rank, row_S in enumerate(expert_RS):
            for slot in range(int((row_S != EMPTY).sum()), int(self.slots_R[rank])):
                candidates = range(len(self.tokens_E))
                if self.config.replicas_within != "cluster":
                    candidates = np.setdiff1d(expert_RS[part_R == part_R[rank]], EMPTY).tolist()
                others = [other for other in candidates if other not in row_S]
                if not others:
                    break
                row_S[slot] = min(others, key=lambda other: (-int(self.tokens_E[other]) // replicas_E[other], other))
                replicas_E[int(row_S[slot])] += 1
        return expert_RS

    def meets_constraints(self, before_RE: IntArray, part_R: IntArray) -> bool:
        """Whether a layout in force has enough replicas of every expert, all where they may be."""
        enough = ((before_RE > 0).sum(axis=0) >= self.config.min_replicas).all()
        parts_PE = np.zeros((int(part_R.max()) + 1, len(self.tokens_E)), dtype=np.int64)
        np.add.at(parts_PE, part_R, before_RE)
        in_one_part = self.config.replicas_within == "cluster" or ((parts_PE > 0).sum(axis=0) == 1).all()
        return bool(enough and in_one_part)
