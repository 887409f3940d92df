"""The leader: of several candidates, the one whose layouts would have cost the micro-batches before the least.

A candidate plans after a micro-batch, on what is known then. When the micro-batch comes that its layout was for, the
layout, with late slots if there are any, is judged on that load. The seconds that it would have cost are compared with
those of the others that planned with it: what all of them cost together is what their means so far say, and each mean
moves towards its candidate's share. Newer micro-batches weigh more. Once the first plans are over, the candidate with
the least mean plans the next layout. So how much loads move, and which past load predicts the next one, is measured and
not assumed.

Two candidates search (``search``) for the cheapest layout: for the mean of the newest loads, judged by some of these,
and for their ``forecast``, around which loads are then drawn. As a search takes long, searches take turns, and between
two of its searches a candidate builds anew what its search found best. One spreads replicas for the forecast by load,
for where a layout that fits a load closely is worth little on the next one. The last candidate keeps a layout until, in
its turn, another one has one that would have cost the remembered loads 1 % less, and then tries neighbours of it on
these loads: where loads jump or are mostly noise, all remembered loads together predict the next one better than any
single load does.

With many slots, candidates take turns, and a load that stands still is not planned for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial, reduce
from hashlib import sha256
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from moesys.balance.flow.flow_split import split_costs
from moesys.balance.flow.step_cost import Prices, prices_of, with_experts
from moesys.balance.greedy.local_search import climbed
from moesys.balance.greedy.robust_cost import MILLION, NO_LIMIT
from moesys.balance.greedy.search import KINDS, LayoutSearch, Recipe, SearchOptions, trials_of
from moesys.balance.late_slots import fill_late_slots
from moesys.balance.planning_problem import PastBatch, PlanningProblem, link_domains_of, tokens_by_node
from moesys.balance.predictors import FORECAST_UNITS, forecast
from moesys.config import ClusterSpec, Fsep, ModelShape, Overlap, Sharding
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray, LoadMatrix

# A candidate's mean is that of about so many of the newest micro-batches on which it was judged, and newer ones weigh
# more: of n the last has ``NEWEST`` / (n + ``NEWEST`` - 1) of the weight.
MEMORY, NEWEST = 50, 3
# When little is known: all candidates plan in the first plans, and all search in the first ones and as many more as the
# lag.
FIRST_PLANS, FIRST_SEARCHES = 16, 5
# After the first searches there are so many plans from one to the next, and one more for each so many slots.
PLANS_BETWEEN_SEARCHES, SLOTS_PER_PLAN = 12, 16
# Candidates take turns if there are more slots; another one than the leader plans in one of slots / 96 plans only, if
# there are at least twice as many.
SLOTS_OF_TURN = 96
# This many of the remembered loads, evenly apart, judge what is searched for their mean.
JUDGED_LOADS = 4
# The golden section of 2^32: its multiples modulo that are spread evenly and have no short period.
GOLDEN = 2654435769
# A load of which a smaller share of tokens has moved than this, since it was planned for, stands still.
STILL = 0.015
# A layout is kept unless another one would have cost so many parts of a hundred; this is judged on loads for so many
# slots, at least two.
KEPT_PERCENT, KEPT_SLOTS = 99, 2048

# Searching candidates plan for these loads, and the one that spreads for the last of them.
SEARCHES = ("mean", "forecast")
# In this order, which decides at a tie: rebuilt by a search's recipe, spread, and kept.
SPREAD = len(SEARCHES)
KEPT = SPREAD + 1
NUM_CANDIDATES = KEPT + 1

# Parts of a problem that stay from plan to plan.
_LASTING = attrgetter("slots_R", "late_R", "cluster", "model", "sharding", "overlap")

Layouts = npt.NDArray[np.int32]


class _CandidateLayouts(NamedTuple):
    """These layouts, int32 [C, R, S], were planned after a micro-batch by the candidates that had their turn."""

    after: int
    candidates: tuple[int, ...]
    layouts_CRS: Layouts


@dataclass
class _Memory:
    """This is what the leader remembers from plan to plan.

    mean_C: what a micro-batch costs with each candidate, in millionths of what it costs with all of them in the mean;
    count_C: micro-batches that say so, at most ``MEMORY``. recipes: of the searches. kept: a layout. tokens_DE: the
    newest load that was planned for, by link domains. pending: plans for micro-batches that were not judged; judged:
    the newest one that was.
    """

    num_plans: int = 0
    judged: int = -1
    mean_C: IntArray = field(default_factory=lambda: np.full(NUM_CANDIDATES, MILLION))
    count_C: IntArray = field(default_factory=lambda: np.zeros(NUM_CANDIDATES, dtype=np.int64))
    recipes: list[Recipe] = field(default_factory=list)
    kept: Layouts = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))
    tokens_DE: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    pending: list[_CandidateLayouts] = field(default_factory=list)

    _HEAD = struct.Struct("<32sqqqqqqq")

    @property
    def by_rank(self) -> list[int]:
        """The candidates, the leader first."""
        return [int(candidate) for candidate in np.argsort(self.mean_C, kind="stable")]

    def to_bytes(self, of: bytes) -> bytes:
        """Returns what ``read`` reads again, for problems of the digest ``of``."""
        sizes = *self.tokens_DE.shape, *self.kept.shape, len(self.pending)
        recipes = np.array([(KINDS.index(kind), slots) for kind, slots in self.recipes])
        parts = [
            self._HEAD.pack(of, self.num_plans, self.judged, *sizes),
            *(each.tobytes() for each in (self.mean_C, self.count_C, recipes, self.tokens_DE, self.kept)),
        ]
        for after, candidates, layouts_CRS in self.pending:
            head = struct.pack(f"<{2 + len(candidates)}q", after, len(candidates), *candidates)
            parts += [head, layouts_CRS.tobytes()]
        return b"".join(parts)

    @classmethod
    def read(cls, data: bytes, of: bytes) -> Self:
        """Returns what ``data`` says; a new memory if it says nothing, or that of problems of another digest."""
        if data[: len(of)] != of:
            return cls()
        _, num_plans, judged, D, E, R, S, num_pending = cls._HEAD.unpack_from(data)
        at = cls._HEAD.size

        def take(dtype: type[np.generic], *shape: int) -> npt.NDArray[Any]:
            nonlocal at
            count = prod(shape)
            array = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += array.nbytes
            return array

        mean_C, count_C = (take(np.int64, NUM_CANDIDATES).copy() for _ in range(2))
        recipes = [Recipe(KINDS[kind], slots) for kind, slots in take(np.int64, len(SEARCHES), 2).tolist()]
        tokens_DE, kept, pending = take(np.int64, D, E), take(np.int32, R, S), []
        for _ in range(num_pending):
            after, num_planned = take(np.int64, 2).tolist()
            candidates = tuple(take(np.int64, num_planned).tolist())
            pending.append(_CandidateLayouts(after, candidates, take(np.int32, num_planned, R, S)))
        return cls(num_plans, judged, mean_C, count_C, recipes, kept, tokens_DE, pending)


def follow_leader(problem: PlanningProblem, options: SearchOptions) -> tuple[ExpertLayout, bytes]:
    """Returns the layout of the best candidate, and what is to be remembered. ``problem`` has ``recent`` micro-batches,
    a model and a sharding.
    """
    of = _digest(problem.load.num_experts, *_LASTING(problem))
    memory, newest = _Memory.read(problem.memory, of), problem.recent[-1]
    tokens_DE = _by_domain(problem, problem.load)
    if not _stands_still(problem, memory, tokens_DE):
        _judge(problem, memory)
        memory.pending.append(_CandidateLayouts(newest.micro_batch, *_layouts(problem, options, memory)))
        memory.tokens_DE = tokens_DE
        memory.num_plans += 1
        memory.judged = newest.micro_batch
    _, candidates, layouts_CRS = memory.pending[-1]
    chosen_RS = layouts_CRS[candidates.index(min(candidates, key=memory.by_rank.index))]
    return ExpertLayout(chosen_RS.astype(np.int64), problem.load.num_experts), memory.to_bytes(of)


def _stands_still(problem: PlanningProblem, memory: _Memory, tokens_DE: IntArray) -> bool:
    """Returns whether the load is as when it was last planned for, and has been for as long as loads are remembered, so
    that all candidates may keep their layouts.
    """
    if memory.num_plans < FIRST_PLANS or _moved(memory.tokens_DE, tokens_DE) >= STILL:
        return False
    return _moved(*(_by_domain(problem, problem.recent[at].load) for at in (0, -1))) < STILL


def _by_domain(problem: PlanningProblem, load: LoadMatrix) -> IntArray:
    """Returns the tokens of each link domain's ranks for each expert, int64 [D, E]."""
    return tokens_by_node(load.tokens_RE, link_domains_of(problem.cluster))[0]


def _moved(before_DE: IntArray, after_DE: IntArray) -> float:
    """Returns which share of tokens has another domain or expert, 0 to 1."""
    before, after = (tokens_DE / max(tokens_DE.sum(), 1) for tokens_DE in (before_DE, after_DE))
    return float(np.abs(before - after).sum().round(6)) / 2


@cache
def _digest(*of: object) -> bytes:
    """Returns 32 bytes that differ where a memory would not fit, or where candidates have changed."""
    return sha256(repr((_Memory._HEAD.format, KINDS, SEARCHES, NUM_CANDIDATES, of)).encode()).digest()


def _judge(problem: PlanningProblem, memory: _Memory) -> None:
    """Judges pending layouts by what they cost on the micro-batches that have come since, and forgets those that are
    no longer in use.
    """
    recent, pending = problem.recent, memory.pending
    for batch in recent:
        if batch.micro_batch <= memory.judged or not batch.load.total:
            continue
        while len(pending) > 1 and pending[1].after + problem.lag <= batch.micro_batch:
            pending.pop(0)
        # A single candidate is not compared.
        if pending and len(pending[0].candidates) > 1 and pending[0].after + problem.lag <= batch.micro_batch:
            judged = list(pending[0].candidates)
            costs = _costs(problem, batch.load, pending[0].layouts_CRS)
            # As a sum, those that are judged cost what their means say. Python's integers: the products pass 64 bits.
            mean, expected = max(sum(costs), 1), int(memory.mean_C[judged].sum())
            memory.count_C[judged] = np.minimum(memory.count_C[judged] + 1, MEMORY)
            above = np.array([cost * expected // mean for cost in costs]) - memory.mean_C[judged]
            memory.mean_C[judged] += above * NEWEST // (memory.count_C[judged] + NEWEST - 1)


def _costs(problem: PlanningProblem, load: LoadMatrix, layouts_CRS: Layouts) -> list[int]:
    """Returns what a step with each layout costs on a micro-batch's load, in units of seconds that all share."""
    known: dict[bytes, int] = {}
    for key, expert_RS in {layout_RS.tobytes(): layout_RS.astype(np.int64) for layout_RS in layouts_CRS}.items():
        if problem.late_R and problem.model and problem.sharding:
            given = problem.cluster, problem.model, problem.sharding, problem.late_R
            expert_RS = fill_late_slots(load, ExpertLayout(expert_RS, problem.load.num_experts), *given).expert_RS
        # A copy, as compiled loops are compiled anew for arrays that may not be written.
        known[key] = _cost(problem, load.tokens_RE[None], load.total, expert_RS.copy())
    return [known[layout_RS.tobytes()] for layout_RS in layouts_CRS]


def _cost(problem: PlanningProblem, tokens_KRE: IntArray, total: int, expert_RS: IntArray, most: int = NO_LIMIT) -> int:
    """Returns what steps with a layout cost on loads of ``total`` tokens in the mean; if that is ``most`` or more,
    anything from there.
    """
    beside, gradients = _prices_of(problem, expert_RS, total)
    gradients *= len(tokens_KRE)
    limit = most - gradients
    return int(split_costs(tokens_KRE, expert_RS, link_domains_of(problem.cluster), beside, limit)) + gradients


def _prices_of(problem: PlanningProblem, expert_RS: IntArray, total: int) -> tuple[Prices, int]:
    """Returns the prices of ``total`` tokens beside the layout's experts, and what their gradients cost."""
    sharding, how_RS, most = problem.sharding, expert_RS, max(problem.slots_R)
    if isinstance(sharding, Fsep) and sharding.flat:
        both = expert_RS, expert_RS[:, :most]
        how_RS = np.stack([(np.diff(np.sort(each, axis=1), axis=1, prepend=EMPTY) > 0).sum(axis=1) for each in both])
    alike = _Alike(how_RS.tobytes(), expert_RS.shape[1] - most, expert_RS)
    return _prices(alike, problem.model, problem.cluster, sharding, problem.overlap, total)


@dataclass(frozen=True)
class _Alike:
    """Layouts whose transfers of experts have the same cost: in a flat restore, all in which each rank has as many
    different experts.
    """

    key: bytes
    late_slots: int
    expert_RS: IntArray = field(compare=False)


@lru_cache(maxsize=256)
def _prices(
    alike: _Alike, model: ModelShape, cluster: ClusterSpec, sharding: Sharding, overlap: Overlap | None, total: int
) -> tuple[Prices, int]:
    layout = ExpertLayout(alike.expert_RS, model.num_experts)
    beside = prices_of(model, cluster, total, overlap)
    return with_experts(beside, layout, model, cluster, sharding, late_slots=alike.late_slots)


def _layouts(problem: PlanningProblem, options: SearchOptions, memory: _Memory) -> tuple[tuple[int, ...], Layouts]:
    """Returns the candidates whose turn it is, and their layouts, int32 [C, R, S]."""
    most, num_slots, num_plans = max(problem.slots_R), sum(problem.slots_R), memory.num_plans
    loads = [batch.load for batch in problem.recent]

    expected = cache(partial(forecast, loads, problem.lag))

    @cache
    def problem_of(load: str) -> PlanningProblem:
        one = replace(problem, layout=None, recent=(), memory=b"")
        if load == "mean":
            # One after the other, as ``np.sum`` of all at once takes fresh memory for each of them.
            total_RE = reduce(np.add, (each.tokens_RE for each in loads))
            return replace(one, load=LoadMatrix(total_RE), units_per_token=len(loads))
        if load == "forecast" and (found := expected()):
            return replace(one, load=found.load, units_per_token=FORECAST_UNITS)
        return one

    @cache
    def narrow_search(load: str, slots: int) -> LayoutSearch:
        slots_R = tuple(min(slots, each) for each in problem.slots_R)
        return LayoutSearch(replace(problem_of(load), slots_R=slots_R), options, robust=False)

    @cache
    def built(load: str, recipe: Recipe) -> Layouts | None:
        layout = narrow_search(load, recipe.slots).rebuilt(recipe)
        return None if layout is None else _padded(layout, most)

    def searched(index: int) -> Layouts:
        load, drift, later = SEARCHES[index], 0.0, []
        if load == "forecast":
            drift = found.drift if (found := expected()) else options.drift
        else:
            apart = max(1, len(loads) // JUDGED_LOADS)
            later = [load.tokens_RE * len(loads) for load in loads[::-apart][:JUDGED_LOADS]]
        one = LayoutSearch(problem_of(load), replace(options, drift=drift), later=later)
        draft, recipe = one.best_in_seconds(one.numbers.empty())
        memory.recipes[index : index + 1] = [recipe]
        return _padded(one.numbers.named(draft.expert_RS), most)

    def planned(candidate: int) -> Layouts:
        ways = [*zip(SEARCHES, memory.recipes, strict=True), ("forecast", Recipe("spread", most))]
        layout = built(*ways[candidate])
        # Replicas can always be spread.
        return searched(candidate) if layout is None else layout

    each, period = range(len(SEARCHES)), search_period(num_slots)
    all_search = num_plans < FIRST_SEARCHES + problem.lag
    turns = [index for index in each if all_search or num_plans % period == index * period // len(each)]
    fresh = {index: searched(index) for index in turns}
    best, second, *_ = memory.by_rank
    turn = turn_of(num_plans, num_slots)
    others = (turn,) if turn < NUM_CANDIDATES else (second,) if turn < 2 * NUM_CANDIDATES else ()
    in_turn = others if num_plans >= FIRST_PLANS and num_slots > SLOTS_OF_TURN else range(NUM_CANDIDATES)
    candidates = sorted({best, *turns, *in_turn})
    layouts = [fresh[one] if one in fresh else planned(one) for one in candidates if one != KEPT]
    if KEPT in in_turn:
        memory.kept = _cheapest(problem, np.stack([memory.kept, *layouts] if num_plans else layouts))
        memory.kept = _climbed(problem, memory.kept, num_plans)
    layouts += [memory.kept] * (KEPT in candidates)
    return tuple(candidates), np.stack(layouts)


def search_period(num_slots: int) -> int:
    """Returns after how many plans a search is repeated, once all have searched in the first plans."""
    return len(SEARCHES) * (PLANS_BETWEEN_SEARCHES + num_slots // SLOTS_PER_PLAN)


def turn_of(num_plans: int, num_slots: int) -> int:
    """Returns the candidate whose turn it is. As many of the larger numbers are turns of the candidate with the second
    lowest mean, and the rest are turns of the leader alone.

    Turns have no period, so that where loads have one, no candidate is judged only on some of them.
    """
    return num_plans * GOLDEN % 2**32 * 2 * NUM_CANDIDATES * max(1, num_slots // SLOTS_OF_TURN) >> 32


def _climbed(problem: PlanningProblem, kept_RS: Layouts, num_plans: int) -> Layouts:
    """Returns the layout that tried neighbours lead to from ``kept_RS``, by what all remembered loads would cost."""
    slots_R, trials = np.array(problem.slots_R), trials_of(sum(problem.slots_R)) // 2
    if not trials:
        return kept_RS
    tokens_KRE = np.stack([batch.load.tokens_RE for batch in _remembered(problem)])
    tokens_KRE.setflags(write=False)
    cost = partial(_cost, problem, tokens_KRE, max(int(tokens_KRE.sum()) // len(tokens_KRE), 1))
    draws = range(num_plans * trials, (num_plans + 1) * trials)
    return climbed(kept_RS.astype(np.int64), slots_R, problem.load.num_experts, cost, draws).astype(np.int32)


def _cheapest(problem: PlanningProblem, layouts_CRS: Layouts) -> Layouts:
    """Returns the layout that would have cost the remembered loads the least, each load as much as any other; the first
    one if none would have cost much less. Late slots are left out, which would take several times as long.
    """
    shares_C, without_late = [0] * len(layouts_CRS), replace(problem, late_R=())
    for batch in _remembered(problem):
        costs = _costs(without_late, batch.load, layouts_CRS)
        shares_C = [share + cost * MILLION // max(sum(costs), 1) for share, cost in zip(shares_C, costs, strict=True)]
    best = shares_C.index(min(shares_C))
    return layouts_CRS[best if shares_C[best] * 100 < shares_C[0] * KEPT_PERCENT else 0]


def _remembered(problem: PlanningProblem) -> Sequence[PastBatch]:
    """Returns the batches on which it is judged which layout is kept."""
    return problem.recent[-max(2, KEPT_SLOTS // sum(problem.slots_R)) :]


def _padded(layout: ExpertLayout, slots: int) -> Layouts:
    padded_RS = np.full((layout.num_ranks, slots), EMPTY, dtype=np.int32)
    padded_RS[:, : layout.num_slots] = layout.expert_RS
    return padded_RS
