"""The leader: of several candidates, the one whose layouts would have cost the micro-batches before the least.

A candidate plans after a micro-batch, on what is known then. When the micro-batch comes that its layout was for, the
layout is judged on that load. The seconds that it would have cost are compared with those of the others that planned
with it: what all of them cost together is what their means so far say, and each mean moves towards its candidate's
share. The candidate with the least mean plans the next layout. So how much loads move, and which past load predicts the
next one, is measured and not assumed.

Candidates spread replicas, evenly or by load, or search (``greedy``) for the cheapest layout, as if loads stood still
or drifted as they did lately; each on the load that the predictor expects, and on the mean of the newest ones. As a
search takes long, searches take turns: between two of its searches a candidate builds anew what its search found best,
and another one keeps the layout that the search found.

Planning takes little time because of what is not done at every micro-batch:

- After the first plans the leader plans every time, and of all twelve candidates two in turn. So what is known of a
  candidate is at most six micro-batches old, but no candidate is judged on an older layout than the leader.
- A search is repeated after 4 · (12 + slots / 16) plans: 88 plans for 160 slots, 144 for 384.
- Where the load has not moved since the newest plan, nothing is planned and nothing is judged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from moesys.balance.flow.flow_split import split_costs
from moesys.balance.flow.step_cost import Prices, prices_of, with_experts
from moesys.balance.greedy.robust_cost import MILLION, NO_LIMIT
from moesys.balance.greedy.search import KINDS, LayoutSearch, Recipe, SearchOptions
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.predictors import drift_of
from moesys.balance.topology import link_domains_of
from moesys.config import ClusterSpec, Fsep, ModelShape, Overlap, Sharding
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray, LoadMatrix

# A candidate's mean is that of the newest micro-batches: about so many of those on which it was judged.
MEMORY = 50
# The share that remains, after a micro-batch, of what is known of the drift.
KEPT_DRIFT = 0.9
# All candidates plan in the first plans, when little is known, and then, besides the leader, so many in turn.
FIRST_PLANS, OTHERS = 10, 2
# After the first searches there are so many plans from one to the next, and one more for each so many slots.
PLANS_BETWEEN_SEARCHES, SLOTS_PER_PLAN = 12, 16
# A load that has drifted less than this from the one that was planned for has not moved.
STILL = 0.003

# Searching candidates: whether loads are taken to drift, and whether the mean of the newest loads is planned for.
SEARCHES = tuple((drifts, on_mean) for drifts in (True, False) for on_mean in (False, True))
# Spreading candidates differ in how they spread replicas, and in the same loads.
SPREADS = tuple((kind, on_mean) for kind in ("spread", "spread evenly") for on_mean in (False, True))
# In this order, which decides at a tie: rebuilt by the recipe of a search, spread, and as a search has found it.
NUM_CANDIDATES = 2 * len(SEARCHES) + len(SPREADS)

Layouts = npt.NDArray[np.int32]


class _Planned(NamedTuple):
    """What the candidates that had their turn planned after a micro-batch, int32 [C, R, S]."""

    after: int
    candidates: tuple[int, ...]
    layouts_CRS: Layouts


@dataclass
class _Memory:
    """This is what the leader remembers from plan to plan.

    mean_C: what a micro-batch costs with each candidate, in millionths of what it costs with all of them in the mean;
    count_C: micro-batches that say so, at most ``MEMORY``. drift: of loads as far apart as a plan and its use. recipes:
    of the searches. found: their layouts. tokens_E: the newest load that was planned for. pending: plans for
    micro-batches that were not judged; judged: the newest one that was.
    """

    num_plans: int = 0
    judged: int = -1
    drift: float = 0.0
    num_drifts: float = 0.0
    mean_C: IntArray = field(default_factory=lambda: np.full(NUM_CANDIDATES, MILLION))
    count_C: IntArray = field(default_factory=lambda: np.zeros(NUM_CANDIDATES, dtype=np.int64))
    recipes: list[Recipe] = field(default_factory=list)
    found: list[Layouts] = field(default_factory=list)
    tokens_E: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pending: list[_Planned] = field(default_factory=list)

    _HEAD = struct.Struct("<32sqqddqqqq")

    @property
    def leader(self) -> int:
        return int(np.argmin(self.mean_C))

    def note_drift(self, drift: float) -> None:
        self.num_drifts = self.num_drifts * KEPT_DRIFT + 1
        self.drift += (drift - self.drift) / self.num_drifts

    def to_bytes(self, of: bytes) -> bytes:
        """Returns what ``read`` reads again, for problems of the digest ``of``."""
        R, S = self.found[0].shape
        sizes = len(self.tokens_E), R, S, len(self.pending)
        recipes = np.array([(KINDS.index(kind), slots) for kind, slots in self.recipes])
        parts = [
            self._HEAD.pack(of, self.num_plans, self.judged, self.drift, self.num_drifts, *sizes),
            *(array.tobytes() for array in (self.mean_C, self.count_C, recipes, self.tokens_E, *self.found)),
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
        _, num_plans, judged, drift, num_drifts, E, R, S, num_pending = cls._HEAD.unpack_from(data)
        at = cls._HEAD.size

        def take(dtype: type[np.generic], *shape: int) -> npt.NDArray[Any]:
            nonlocal at
            count = prod(shape)
            array = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += array.nbytes
            return array

        mean_C, count_C = (take(np.int64, NUM_CANDIDATES).copy() for _ in range(2))
        recipes = [Recipe(KINDS[kind], slots) for kind, slots in take(np.int64, len(SEARCHES), 2).tolist()]
        tokens_E, found, pending = take(np.int64, E), [take(np.int32, R, S) for _ in SEARCHES], []
        for _ in range(num_pending):
            after, num_planned = take(np.int64, 2).tolist()
            candidates = tuple(take(np.int64, num_planned).tolist())
            pending.append(_Planned(after, candidates, take(np.int32, num_planned, R, S)))
        return cls(num_plans, judged, drift, num_drifts, mean_C, count_C, recipes, found, tokens_E, pending)


def follow_leader(problem: PlanningProblem, options: SearchOptions) -> tuple[ExpertLayout, bytes]:
    """Returns the layout of the best candidate, and what is to be remembered. ``problem`` has ``recent`` micro-batches,
    a model and a sharding.
    """
    of = _digest(
        problem.load.num_experts, problem.slots_R, problem.cluster, problem.model, problem.sharding, problem.overlap
    )
    memory, newest = _Memory.read(problem.memory, of), problem.recent[-1]
    if not _stands_still(problem, memory):
        _judge(problem, memory)
        memory.pending.append(_Planned(newest.micro_batch, *_layouts(problem, options, memory)))
        memory.tokens_E = problem.load.tokens_E
        memory.num_plans += 1
    memory.judged = newest.micro_batch
    _, candidates, layouts_CRS = memory.pending[-1]
    chosen_RS = layouts_CRS[candidates.index(memory.leader)]
    return ExpertLayout(chosen_RS.astype(np.int64), problem.load.num_experts), memory.to_bytes(of)


def _stands_still(problem: PlanningProblem, memory: _Memory) -> bool:
    """Returns whether the load is as it was when it was last planned for, so that all candidates may keep their
    layouts, and nothing is to be learnt.
    """
    recent, planned_E = problem.recent, memory.tokens_E
    if memory.num_plans < FIRST_PLANS or drift_of(planned_E, problem.load.tokens_E) >= STILL:
        return False
    drift = round(drift_of(recent[-1 - problem.lag :][0].load.tokens_E, recent[-1].load.tokens_E), 6)
    if drift < STILL:
        memory.note_drift(drift)
    return drift < STILL


@cache
def _digest(*of: object) -> bytes:
    """Returns 32 bytes that differ where a memory would not fit, or where candidates have changed."""
    return sha256(repr((KINDS, SEARCHES, SPREADS, of)).encode()).digest()


def _judge(problem: PlanningProblem, memory: _Memory) -> None:
    """Judges pending layouts by what they cost on the micro-batches that have come since, and forgets those that are
    over.
    """
    recent, pending = problem.recent, memory.pending
    for index, batch in enumerate(recent):
        if batch.micro_batch <= memory.judged:
            continue
        while len(pending) > 1 and pending[1].after + problem.lag <= batch.micro_batch:
            pending.pop(0)
        if pending and pending[0].after + problem.lag <= batch.micro_batch:
            judged = list(pending[0].candidates)
            costs = _costs(problem, batch.load, pending[0].layouts_CRS)
            # As a sum, those that are judged cost what their means say. Python's integers: the products pass 64 bits.
            mean, expected = max(sum(costs), 1), int(memory.mean_C[judged].sum())
            memory.count_C[judged] = np.minimum(memory.count_C[judged] + 1, MEMORY)
            above = np.array([cost * expected // mean for cost in costs]) - memory.mean_C[judged]
            memory.mean_C[judged] += above // memory.count_C[judged]
        if index >= problem.lag:
            # Rounded, so that the last bit of a logarithm does not choose a layout.
            before = recent[index - problem.lag].load
            memory.note_drift(round(drift_of(before.tokens_E, batch.load.tokens_E), 6))


def _costs(problem: PlanningProblem, load: LoadMatrix, layouts_CRS: Layouts) -> list[int]:
    """Returns what a step with each layout costs, on a load of one micro-batch; in units of seconds that are
    the same for all.
    """
    sharding, node_R = problem.sharding, link_domains_of(problem.cluster)
    flat = isinstance(sharding, Fsep) and sharding.flat
    known: dict[bytes, int] = {}
    for layout_RS in layouts_CRS:
        key = layout_RS.tobytes()
        if key not in known:
            expert_RS = layout_RS.astype(np.int64)
            alike = _Alike((expert_RS != EMPTY).sum(axis=1).tobytes() if flat else key, expert_RS)
            beside, gradients = _prices(alike, problem.model, problem.cluster, sharding, problem.overlap, load.total)
            known[key] = int(split_costs(load.tokens_RE[None], expert_RS, node_R, beside, NO_LIMIT)) + gradients
    return [known[layout_RS.tobytes()] for layout_RS in layouts_CRS]


@dataclass(frozen=True)
class _Alike:
    """Layouts whose experts are as dear to bring: of a flat restore, all with as many experts on each rank."""

    key: bytes
    expert_RS: IntArray = field(compare=False)


@lru_cache(maxsize=256)
def _prices(
    alike: _Alike, model: ModelShape, cluster: ClusterSpec, sharding: Sharding, overlap: Overlap | None, total: int
) -> tuple[Prices, int]:
    layout = ExpertLayout(alike.expert_RS, model.num_experts)
    prices, mean_tokens = prices_of(model, cluster, total, overlap), total / int((layout.filled_R > 0).sum())
    return with_experts(prices, layout, model, cluster, sharding, mean_tokens=mean_tokens)


def _layouts(problem: PlanningProblem, options: SearchOptions, memory: _Memory) -> tuple[tuple[int, ...], Layouts]:
    """Returns the candidates whose turn it is, and their layouts, int32 [C, R, S]."""
    most, num_plans = max(problem.slots_R), memory.num_plans
    problems: dict[bool, PlanningProblem] = {}
    searches: dict[tuple[bool, int], LayoutSearch] = {}
    known: dict[tuple[bool, Recipe], Layouts | None] = {}

    def problem_of(on_mean: bool) -> PlanningProblem:
        if on_mean not in problems:
            one, loads = replace(problem, layout=None, recent=(), memory=b""), problem.recent
            if on_mean:
                mean = LoadMatrix(np.sum([batch.load.tokens_RE for batch in loads], axis=0))
                one = replace(one, load=mean, units_per_token=len(loads))
            problems[on_mean] = one
        return problems[on_mean]

    def built(on_mean: bool, recipe: Recipe) -> Layouts | None:
        if (on_mean, recipe) not in known:
            if (on_mean, recipe.slots) not in searches:
                slots_R = tuple(min(recipe.slots, each) for each in problem.slots_R)
                narrow = replace(problem_of(on_mean), slots_R=slots_R)
                searches[on_mean, recipe.slots] = LayoutSearch(narrow, options, robust=False)
            layout = searches[on_mean, recipe.slots].rebuilt(recipe)
            known[on_mean, recipe] = None if layout is None else _padded(layout, most)
        return known[on_mean, recipe]

    @cache
    def found(drift: float, on_mean: bool) -> tuple[Recipe, Layouts]:
        one = LayoutSearch(problem_of(on_mean), replace(options, drift=drift))
        draft, recipe = one.best_in_seconds(one.numbers.empty())
        return recipe, _padded(one.numbers.named(draft.expert_RS), most)

    def searched(index: int) -> Layouts:
        drifts, on_mean = SEARCHES[index]
        drift = memory.drift if memory.num_drifts else options.drift
        recipe, layout = found(drift if drifts else 0.0, on_mean and len(problem.recent) > 1)
        memory.recipes[index : index + 1], memory.found[index : index + 1] = [recipe], [layout]
        return layout

    def planned(candidate: int) -> Layouts:
        if candidate in fresh:
            return fresh[candidate]
        if candidate >= NUM_CANDIDATES - len(SEARCHES):
            return memory.found[candidate - NUM_CANDIDATES]
        if candidate < len(SEARCHES):
            on_mean, recipe = SEARCHES[candidate][1], memory.recipes[candidate]
        else:
            kind, on_mean = SPREADS[candidate - len(SEARCHES)]
            recipe = Recipe(kind, most)
        layout = built(on_mean, recipe)
        return searched(candidate) if layout is None else layout

    period = len(SEARCHES) * (PLANS_BETWEEN_SEARCHES + sum(problem.slots_R) // SLOTS_PER_PLAN)
    each, others = range(len(SEARCHES)), NUM_CANDIDATES if num_plans < FIRST_PLANS else OTHERS
    turns = [
        index for index in each if num_plans in (0, index + 1) or num_plans % period == index * period // len(each)
    ]
    fresh = {index: searched(index) for index in turns}
    turns += [(num_plans * OTHERS + other) % NUM_CANDIDATES for other in range(others)]
    candidates = tuple(sorted({memory.leader, *turns}))
    return candidates, np.stack([planned(candidate) for candidate in candidates])


def _padded(layout: ExpertLayout, slots: int) -> Layouts:
    padded_RS = np.full((layout.num_ranks, slots), EMPTY, dtype=np.int32)
    padded_RS[:, : layout.num_slots] = layout.expert_RS
    return padded_RS
