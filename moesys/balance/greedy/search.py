"""The search for a layout: builds several, judges them by the best split of later loads, and takes the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from moesys.balance.flow.flow_split import least_crossing
from moesys.balance.flow.step_cost import crosses_once
from moesys.balance.greedy.builders import Builders, BuiltLayout
from moesys.balance.greedy.local_search import MoveConstraints, climbed, local_search
from moesys.balance.greedy.numbering import Numbers, num_moves, relabelled, relabelled_inside
from moesys.balance.greedy.robust_cost import MILLION, NO_LIMIT, Scenarios, StepJudge, draw_scenarios, robust_cost
from moesys.balance.late_slots import FetchPrices, fetch_prices
from moesys.balance.planning_problem import PlanningProblem, domains_of
from moesys.config import Ep, Within
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray

# Work at effort 1 by the number of slots, so that small plans, which are quick, are thorough.
SCENARIO_SLOTS, FEWEST_SCENARIOS, MOST_SCENARIOS = 1536, 6, 16
# Measurements of a repair at effort 1, by the number of slots.
REPAIR_SLOTS, FEWEST_EVALUATIONS, MOST_EVALUATIONS = 32_768, 96, 768
# Neighbours of the cheapest layout that are tried at effort 1, by the square of the number of slots: in a small layout
# each takes less time and changes more.
TRIAL_SLOTS, FEWEST_TRIALS, MOST_TRIALS = 200_000, 4, 64

# A token between nodes counts as a quarter of one more on the busiest rank. On LAER-MoE's A100 nodes, 8192 bytes over
# an eighth of 89 GB/s take half as long as the 1.48 us of computing a token, and about half of that can be hidden.
INTER_NODE_SHARE = 4
# A layout that moves every replica must gain at least so many millionths of the mean; one that moves fewer needs less.
LEAST_GAIN = 40_000
# An imbalance at which layouts that keep less to nodes are not looked for, in millionths of the mean.
GOOD_ENOUGH = 200
# Fewer slots are tried with the best layout of those whose kinds begin so; the first is the best of all.
NARROWED = ("", "at home", "node first")
# Parts of a rank's mean that a place on a node is for, where nodes choose their experts: the smaller, the more nodes
# have an expert, and the better loads can drift.
PARTS = (1, 2)
# Nodes that hold all experts between them, where a token crosses to each once: a block that splits keep rows to.
GROUPS = (2, 4, 8)
# These builders make layouts for the fewest seconds (``Builders``).
KINDS = (
    *("spread", "whole", "at home", "copies that pay"),
    *(f"node first, {parts}" for parts in PARTS),
    *(f"{group} nodes" for group in GROUPS),
)


@dataclass(frozen=True)
class SearchOptions:
    """The fields of ``Greedy``, as the search reads them. ``drift``: that of the loads to be ready for."""

    effort: int
    min_replicas: int
    replicas_within: Within
    max_moves: int | None
    move_tokens: int
    drift: float
    deadline_ms: float | None

    @property
    def is_constrained(self) -> bool:
        """This is true if experts have their places by ``replicas_within`` or ``min_replicas``."""
        return self.replicas_within != "cluster" or self.min_replicas > 1


def trials_of(num_slots: int) -> int:
    """Returns how many neighbours of a layout are tried: 64 of up to 55 slots, 12 of 128, none of 224 or more."""
    trials = min(TRIAL_SLOTS // num_slots**2, MOST_TRIALS)
    return trials if trials >= FEWEST_TRIALS else 0


class Recipe(NamedTuple):
    """How a layout was built: by which of ``KINDS``, and the most slots of a rank."""

    kind: str
    slots: int


@dataclass(frozen=True, eq=False)
class Draft:
    """A layout, and the parts of the cluster that its replicas keep to in search."""

    search: LayoutSearch
    expert_RS: IntArray
    part_R: IntArray

    @cached_property
    def imbalance(self) -> int:
        """This is what the best split leaves above the mean on the load and on the average scenario, in millionths."""
        weight_K = self.search.scenarios.weight_K
        cost_K = np.zeros(len(weight_K), dtype=np.int64)
        robust_cost(self.search.scenarios, self.expert_RS, NO_LIMIT, cost_K)
        return int(cost_K[0]) + int(cost_K[1:] @ weight_K[1:]) // max(int(weight_K[1:].sum()), 1)

    @cached_property
    def cost(self) -> int:
        """The imbalance, and a share of the traffic between nodes; where the model is known, what steps of later loads
        cost beside the mean rank's products. In millionths of these.
        """
        search = self.search
        if search.judge is not None:
            return search.judge.cost(self.expert_RS)
        if search.numbers.num_nodes == 1:
            return self.imbalance
        crossing = least_crossing(search.numbers.tokens_RE, self.expert_RS, search.numbers.node_R)
        return self.imbalance + crossing * MILLION // max(int(search.numbers.tokens_E.sum()), 1) // INTER_NODE_SHARE

    @cached_property
    def full_cost(self) -> int:
        """The cost, and what products add to it where seconds are asked for."""
        judge = self.search.judge
        return self.cost if judge is None else self.cost + judge.products_beyond_rows(self.expert_RS)

    @cached_property
    def replicas_RE(self) -> IntArray:
        return ExpertLayout(self.expert_RS, len(self.search.numbers.tokens_E)).replicas_RE


class LayoutSearch:
    """One plan's problem in its own ``numbers``, and the steps that solve it. ``robust``: builders choose what does
    well on loads around the problem's, too, which takes longer. ``later``: loads to judge by, in the problem's units,
    instead of loads that drift.
    """

    def __init__(
        self, problem: PlanningProblem, options: SearchOptions, robust: bool = True, later: Sequence[IntArray] = ()
    ) -> None:
        self.problem, self.options, self.later = problem, options, later
        self.end = None if options.deadline_ms is None else time.monotonic() + options.deadline_ms / 1e3
        self.numbers = n = Numbers(problem)
        self.part_R = np.array(domains_of(problem.cluster, options.replicas_within))[n.rank_R]
        num_slots = int(n.slots_R.sum())
        scenarios = min(max(SCENARIO_SLOTS // num_slots, FEWEST_SCENARIOS), MOST_SCENARIOS)
        self.scenarios_each = scenarios // 2 if options.effort and robust else 0

    # Made where they are used: a search that only builds has no need of them.

    @cached_property
    def judge(self) -> StepJudge | None:
        problem = self.problem
        if problem.model is None:
            return None
        return StepJudge(problem, problem.model, self.numbers, self.options.drift, self.later)

    @cached_property
    def scenarios(self) -> Scenarios:
        tokens_E, each = self.numbers.tokens_E, self.scenarios_each
        return draw_scenarios(tokens_E, np.arange(len(tokens_E)), each, each)

    # --- building

    def best(self, before_RS: IntArray) -> Draft:
        """Returns the best of the layouts that are built in one go, near ``before_RS``. Where the model is not known,
        they are repaired, too.
        """
        if self.judge is None or self.options.is_constrained:
            return min((self.repaired(draft, NO_LIMIT) for draft in self.built(before_RS)), key=lambda one: one.cost)
        return self.best_in_seconds(before_RS)[0]

    def best_in_seconds(self, before_RS: IntArray) -> tuple[Draft, Recipe]:
        """Returns the same for the fewest seconds, and how to build one like it."""
        built = {kind: build() for kind, build in self.kinds(before_RS).items()}
        drafts = {
            kind: Draft(self, self.filled(found.expert_RS), found.part_R) for kind, found in built.items() if found
        }
        kinds = sorted(drafts, key=lambda kind: drafts[kind].cost)
        best, recipe = drafts[kinds[0]], Recipe(kinds[0], int(self.numbers.slots_R.max()))
        if self.problem.sharding is not None:
            firsts = (next((kind for kind in kinds if kind.startswith(start)), kinds[0]) for start in NARROWED)
            for kind in dict.fromkeys(firsts):
                best, recipe = min((best, recipe), self.narrowed(drafts[kind], kind), key=lambda one: one[0].full_cost)
        return self.climbed(best), recipe

    def built(self, before_RS: IntArray) -> Iterator[Draft]:
        """Yields layouts by the parts of the cluster that replicas keep to; none that keep to them less, after one that
        costs next to nothing.
        """
        builders = self.builders(before_RS)
        if self.options.is_constrained:
            yield Draft(self, *builders.by_parts())
            return
        if self.numbers.num_nodes > 1 and (found := builders.each_node()):
            draft = Draft(self, *found)
            yield draft
            if draft.imbalance <= GOOD_ENOUGH:
                return
        yield Draft(self, *builders.whole())

    def kinds(self, before_RS: IntArray) -> dict[str, Callable[[], BuiltLayout | None]]:
        """Returns what builds layouts for the fewest seconds, by names of ``KINDS``."""
        builders, num_nodes = self.builders(before_RS), self.numbers.num_nodes
        kinds: dict[str, Callable[[], BuiltLayout | None]] = {"spread": builders.replicas_spread}
        if isinstance(self.problem.sharding, Ep):
            kinds |= {
                "at home": builders.at_home,
                "copies that pay": partial(builders.copies_that_pay, self.fetch_prices),
            }
        if num_nodes == 1:
            kinds["whole"] = builders.whole
        else:
            kinds |= {f"node first, {parts}": partial(builders.node_first, parts, num_nodes) for parts in PARTS}
            if crosses_once(self.problem.overlap, self.problem.cluster):
                kinds |= {f"{n} nodes": partial(builders.node_first, 1, n) for n in GROUPS if n < num_nodes}
        return kinds

    def rebuilt(self, recipe: Recipe) -> ExpertLayout | None:
        """Returns the layout that the builder of ``recipe`` makes of the problem's load, as wide as the problem's
        slots; None where it makes none.
        """
        built = self.kinds(self.numbers.empty())[recipe.kind]()
        return None if built is None else self.numbers.named(built.expert_RS)

    @property
    def fetch_prices(self) -> FetchPrices:
        """The prices of copies that owners lend, in seconds of the load's units."""
        problem = self.problem
        assert problem.model is not None
        assert problem.sharding is not None
        prices = fetch_prices(problem.model, problem.cluster, problem.sharding)
        units = problem.units_per_token / (1 << self.numbers.scale)
        return prices._replace(on_rank=prices.on_rank * units, on_node=prices.on_node * units)

    def builders(self, before_RS: IntArray) -> Builders:
        return Builders(self.numbers, self.part_R, self.options.min_replicas, self.scenarios_each, before_RS)

    def narrowed(self, best: Draft, kind: str) -> tuple[Draft, Recipe]:
        """Returns ``best``, of ``kind``, or a layout with fewer slots a rank, as long as one less costs less."""
        n = self.numbers
        most = int(n.slots_R.max())
        while most > 1 and np.minimum(n.slots_R, most - 1).sum() >= len(n.tokens_E):
            slots_R = tuple(min(slots, most - 1) for slots in self.problem.slots_R)
            other = LayoutSearch(replace(self.problem, slots_R=slots_R), self.options)
            built = other.kinds(other.numbers.empty())[kind]()
            if built is None:
                break
            draft = Draft(self, n.numbered(other.numbers.named(built.expert_RS)), built.part_R)
            if draft.full_cost >= best.full_cost:
                break
            best, most = draft, most - 1
        return best, Recipe(kind, most)

    # --- improving

    def climbed(self, draft: Draft) -> Draft:
        """Returns the cheapest layout of those that some tried neighbours lead to from ``draft``."""
        judge, n = self.judge, self.numbers
        assert judge is not None
        trials = 0 if self.end is not None else trials_of(int(n.slots_R.sum())) * self.options.effort
        # Where experts cost nothing to bring, every slot stays filled.
        empties = self.problem.sharding is not None
        expert_RS = climbed(draft.expert_RS, n.slots_R, len(n.tokens_E), judge.cost, range(trials), empties)
        return min(draft, Draft(self, expert_RS, draft.part_R), key=lambda one: one.full_cost)

    def repaired(self, draft: Draft, most_moves: int) -> Draft:
        """Returns the cheapest of ``draft`` and two that local search makes of it for the load itself, with at most
        ``most_moves``: with relocations first, which take the fewest moves, and without, as each lowers less of the
        cost where few moves are left.
        """
        best = draft
        for relocates in (True, False):
            expert_RS, moves = draft.expert_RS.copy(), 0
            if relocates:
                moves = self.search(True, expert_RS, draft.part_R, most_moves)
            moves += self.search(False, expert_RS, draft.part_R, most_moves - moves)
            if moves:
                best = min(best, Draft(self, expert_RS, draft.part_R), key=lambda one: one.cost)
        return best

    def search(self, relocates: bool, expert_RS: IntArray, part_R: IntArray, most_moves: int) -> int:
        """Changes ``expert_RS`` by local search until nothing more is found, the time is over, or the effort is spent.
        Returns the moves.
        """
        n, moves = self.numbers, 0
        evaluations = min(max(REPAIR_SLOTS // int(n.slots_R.sum()), FEWEST_EVALUATIONS), MOST_EVALUATIONS)
        constraints = MoveConstraints((expert_RS != EMPTY).sum(axis=1), part_R, self.options.min_replicas)
        for unit in range(self.options.effort):
            if self.end is not None and time.monotonic() >= self.end:
                break
            found = local_search(n.tokens_E, constraints, relocates, expert_RS, evaluations, most_moves - moves, unit)
            moves += found
            if not found:
                break
        return moves

    def earned(self, fresh: Draft, previous: ExpertLayout) -> Draft:
        """Returns the best by cost and moves of four layouts: the one in force, the same repaired, one built near it,
        and ``fresh``.
        """
        n, cluster = self.numbers, self.problem.cluster
        before_RE, before_RS = previous.replicas_RE[n.rank_R][:, n.expert_E], n.numbered(previous)
        most_moves = NO_LIMIT if self.options.max_moves is None else self.options.max_moves
        price = Fraction((self.options.move_tokens >> n.scale) * MILLION, n.mean)
        price += Fraction(LEAST_GAIN, int(n.slots_R.sum()))
        part_sizes = tuple(np.bincount(n.finest_R).tolist())
        near = self.best(before_RS)
        row_R = relabelled_inside(near.replicas_RE, before_RE, n.slots_R, part_sizes)
        drafts = [Draft(self, near.expert_RS[row_R], near.part_R)]
        if self.meets_constraints(before_RE, self.part_R):
            kept = Draft(self, self.completed(before_RS, self.part_R), self.part_R)
            if self.problem.sharding is not None and self.judge is not None:
                # free slots may be what makes it cheap
                kept = min(Draft(self, before_RS, self.part_R), kept, key=lambda one: one.cost)
            drafts += [kept, self.repaired(kept, max(most_moves - num_moves(before_RE, kept.replicas_RE), 0))]

        def choice(draft: Draft) -> tuple[bool, Fraction, int]:
            """Orders drafts, the best lowest: those within the budget by cost and price, and others by their moves."""
            moves = num_moves(before_RE, draft.replicas_RE)
            over = max(moves - most_moves, 0)
            return bool(over), draft.cost + price * moves if not over else Fraction(moves), moves

        # however few replicas a relabelled one moves, it costs as much as before
        if min(map(choice, drafts)) > (False, Fraction(fresh.cost), 0):
            rows = [relabelled_inside(fresh.replicas_RE, before_RE, n.slots_R, part_sizes)]
            if self.options.replicas_within != "node" or cluster.domain_sizes == cluster.node_sizes:
                rows.append(relabelled(fresh.replicas_RE, before_RE, n.slots_R, cluster))
            drafts += [Draft(self, fresh.expert_RS[row_R], fresh.part_R) for row_R in rows]
        return min(drafts, key=choice)

    def filled(self, expert_RS: IntArray) -> IntArray:
        """Returns a layout with an expert in every usable slot where experts cost nothing to bring: built node by node,
        a rank has no more than its node has.
        """
        usable_R = np.minimum(self.numbers.slots_R, len(self.numbers.tokens_E))
        if self.problem.sharding is None and ((expert_RS != EMPTY).sum(axis=1) < usable_R).any():
            return self.completed(expert_RS, self.part_R)
        return expert_RS

    def completed(self, expert_RS: IntArray, part_R: IntArray) -> IntArray:
        """Returns a layout with an expert in every free slot: of the experts of the rank's part that the rank lacks,
        the one with the most tokens per replica.
        """
        n, expert_RS = self.numbers, expert_RS.copy()
        replicas_E = np.bincount(expert_RS[expert_RS != EMPTY], minlength=len(n.tokens_E)).tolist()
        for rank, row_S in enumerate(expert_RS):
            for slot in range(int((row_S != EMPTY).sum()), int(n.slots_R[rank])):
                candidates = range(len(n.tokens_E))
                if self.options.replicas_within != "cluster":
                    candidates = np.setdiff1d(expert_RS[part_R == part_R[rank]], EMPTY).tolist()
                others = [other for other in candidates if other not in row_S]
                if not others:
                    break
                row_S[slot] = min(others, key=lambda other: (-int(n.tokens_E[other]) // replicas_E[other], other))
                replicas_E[int(row_S[slot])] += 1
        return expert_RS

    def meets_constraints(self, before_RE: IntArray, part_R: IntArray) -> bool:
        """Returns whether a layout in force has enough replicas of every expert, all where they may be."""
        enough = ((before_RE > 0).sum(axis=0) >= self.options.min_replicas).all()
        parts_PE = np.zeros((int(part_R.max()) + 1, len(self.numbers.tokens_E)), dtype=np.int64)
        np.add.at(parts_PE, part_R, before_RE)
        in_one_part = self.options.replicas_within == "cluster" or ((parts_PE > 0).sum(axis=0) == 1).all()
        return bool(enough and in_one_part)
