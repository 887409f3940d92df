"""The leader: of several candidates, the one whose layouts would have cost the micro-batches before the least.

Each candidate plans after every micro-batch, on what was known then, and when the micro-batch comes that its layout was
for, the layout is judged on that load. The seconds that it would have cost, over the mean of all candidates, are added
to the candidate's sum, from which older micro-batches fade. The candidate with the least sum plans the next layout. So
how much loads move, and which past load predicts the next one, is measured and not assumed.

Candidates spread replicas, evenly or by load, or search (``greedy``) for the cheapest layout, as if loads stood still
or drifted as they did lately; each on the load that the predictor expects, and on the mean of the newest ones. As a
search takes long, searches take turns: between two of its searches a candidate builds anew what its search found best,
and another one keeps the layout that the search found.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from moesys.balance.flow.flow_split import split_costs
from moesys.balance.flow.step_cost import prices_of, with_experts
from moesys.balance.greedy.robust_cost import MILLION, NO_LIMIT
from moesys.balance.greedy.search import KINDS, LayoutSearch, Recipe, SearchOptions
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.predictors import measured_drift
from moesys.balance.topology import link_domains_of
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray, LoadMatrix

# After a micro-batch, sums lose one of so many parts; and the share that remains of what is known of the drift.
FADING, KEPT_DRIFT = 50, 0.9
# All search in the first plans, when little is known; then there are so many plans from one search to the next, and one
# more for each so many slots.
FIRST_PLANS, PLANS_BETWEEN_SEARCHES, SLOTS_PER_PLAN = 4, 4, 32

# Searching candidates: whether loads are taken to drift, and whether the mean of the newest loads is planned for.
SEARCHES = tuple((drifts, on_mean) for drifts in (True, False) for on_mean in (False, True))
# Spreading candidates differ in how they spread replicas, and in the same loads.
SPREADS = tuple((kind, on_mean) for kind in ("spread", "spread evenly") for on_mean in (False, True))
# In this order, which decides at a tie: rebuilt by the recipe of a search, spread, and as a search has found it.
NUM_CANDIDATES = 2 * len(SEARCHES) + len(SPREADS)

Layouts = npt.NDArray[np.int32]


@dataclass
class _Memory:
    """This is what the leader remembers from plan to plan.

    cost_C: what the candidates would have cost so far, in millionths of their mean, [C]. drift: of loads as far apart
    as a plan and its use. recipes: of the searches. found: their layouts. pending: the candidates' layouts that were
    planned after a micro-batch, int32 [C, R, S], for micro-batches that were not judged; judged: the newest one that
    was.
    """

    num_plans: int = 0
    judged: int = -1
    drift: float = 0.0
    num_drifts: float = 0.0
    cost_C: IntArray = field(default_factory=lambda: np.zeros(NUM_CANDIDATES, dtype=np.int64))
    recipes: list[Recipe] = field(default_factory=list)
    found: list[Layouts] = field(default_factory=list)
    pending: list[tuple[int, Layouts]] = field(default_factory=list)

    _HEAD = struct.Struct("<32sqqddqqq")

    def to_bytes(self, of: bytes) -> bytes:
        """Returns what ``read`` reads again, for problems of the digest ``of``."""
        R, S = self.found[0].shape
        head = self._HEAD.pack(of, self.num_plans, self.judged, self.drift, self.num_drifts, R, S, len(self.pending))
        parts = [
            head,
            self.cost_C.tobytes(),
            np.array([(KINDS.index(kind), slots) for kind, slots in self.recipes]).tobytes(),
        ]
        parts += [layout.tobytes() for layout in self.found]
        for after, layouts_CRS in self.pending:
            parts += [struct.pack("<q", after), layouts_CRS.tobytes()]
        return b"".join(parts)

    @classmethod
    def read(cls, data: bytes, of: bytes) -> Self:
        """Returns what ``data`` says; a new memory if it says nothing, or that of problems of another digest."""
        if data[: len(of)] != of:
            return cls()
        _, num_plans, judged, drift, num_drifts, R, S, num_pending = cls._HEAD.unpack_from(data)
        at = cls._HEAD.size

        def take(dtype: type[np.generic], *shape: int) -> npt.NDArray[Any]:
            nonlocal at
            count = int(np.prod(shape))
            array = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += array.nbytes
            return array

        cost_C = take(np.int64, NUM_CANDIDATES).copy()
        recipes = [Recipe(KINDS[kind], slots) for kind, slots in take(np.int64, len(SEARCHES), 2).tolist()]
        found = [take(np.int32, R, S) for _ in SEARCHES]
        pending = [(int(take(np.int64, 1)[0]), take(np.int32, NUM_CANDIDATES, R, S)) for _ in range(num_pending)]
        return cls(num_plans, judged, drift, num_drifts, cost_C, recipes, found, pending)


def follow_leader(problem: PlanningProblem, options: SearchOptions) -> tuple[ExpertLayout, bytes]:
    """Returns the layout of the best candidate, and what is to be remembered. ``problem`` has ``recent`` micro-batches,
    a model and a sharding.
    """
    of = _digest(
        problem.load.num_experts, problem.slots_R, problem.cluster, problem.model, problem.sharding, problem.overlap
    )
    memory = _Memory.read(problem.memory, of)
    _judge(problem, memory)
    layouts_CRS = _layouts(problem, options, memory)
    newest = problem.recent[-1].micro_batch
    memory.pending.append((newest, layouts_CRS))
    memory.num_plans += 1
    chosen = int(np.argmin(memory.cost_C))
    return ExpertLayout(layouts_CRS[chosen].astype(np.int64), problem.load.num_experts), memory.to_bytes(of)


@cache
def _digest(*of: object) -> bytes:
    """Returns 32 bytes that differ where a memory would not fit, or where candidates have changed."""
    return sha256(repr((KINDS, SEARCHES, SPREADS, of)).encode()).digest()


def _judge(problem: PlanningProblem, memory: _Memory) -> None:
    """Adds what pending layouts cost on the micro-batches that have come since, and forgets those that are over."""
    recent, pending = problem.recent, memory.pending
    for index, batch in enumerate(recent):
        if batch.micro_batch <= memory.judged:
            continue
        while len(pending) > 1 and pending[1][0] + problem.lag <= batch.micro_batch:
            pending.pop(0)
        if pending and pending[0][0] + problem.lag <= batch.micro_batch:
            cost_C = _costs(problem, batch.load, pending[0][1])
            mean = max(sum(cost_C) // len(cost_C), 1)
            # Python's integers: the products pass 64 bits.
            memory.cost_C = memory.cost_C - memory.cost_C // FADING + np.array([c * MILLION // mean for c in cost_C])
        if index >= problem.lag:
            # Rounded, so that the last bit of a logarithm does not choose a layout.
            drift = round(measured_drift(recent[index - problem.lag].load, batch.load), 6)
            memory.num_drifts = memory.num_drifts * KEPT_DRIFT + 1
            memory.drift += (drift - memory.drift) / memory.num_drifts
        memory.judged = batch.micro_batch


def _costs(problem: PlanningProblem, load: LoadMatrix, layouts_CRS: Layouts) -> list[int]:
    """Returns what a step with each layout costs, on a load of one micro-batch; in units of seconds that are
    the same for all.
    """
    model, cluster, sharding = problem.model, problem.cluster, problem.sharding
    assert model is not None
    assert sharding is not None
    node_R = link_domains_of(cluster)
    prices = prices_of(model, cluster, load.total, problem.overlap)
    known: dict[bytes, int] = {}
    for layout_RS in layouts_CRS:
        key = layout_RS.tobytes()
        if key not in known:
            layout = ExpertLayout(layout_RS.astype(np.int64), load.num_experts)
            beside, gradients = with_experts(prices, layout, model, cluster, sharding)
            rows = split_costs(load.tokens_RE[None], layout.expert_RS, node_R, beside, NO_LIMIT)
            known[key] = int(rows) + gradients
    return [known[layout_RS.tobytes()] for layout_RS in layouts_CRS]


def _layouts(problem: PlanningProblem, options: SearchOptions, memory: _Memory) -> Layouts:
    """Returns the layouts of all candidates, int32 [C, R, S]; searches in turn, and all at first."""
    loads = [batch.load.tokens_RE for batch in problem.recent]
    mean = replace(problem, load=LoadMatrix(np.sum(loads, axis=0)), units_per_token=len(loads))
    problems = [replace(each, layout=None, recent=(), memory=b"") for each in (problem, mean)]
    most = max(problem.slots_R)
    searches: dict[tuple[bool, int], LayoutSearch] = {}
    known: dict[tuple[bool, Recipe], Layouts | None] = {}

    def built(on_mean: bool, recipe: Recipe) -> Layouts | None:
        if (on_mean, recipe) not in known:
            if (on_mean, recipe.slots) not in searches:
                slots_R = tuple(min(recipe.slots, each) for each in problem.slots_R)
                narrow = replace(problems[on_mean], slots_R=slots_R)
                searches[on_mean, recipe.slots] = LayoutSearch(narrow, options, robust=False)
            layout = searches[on_mean, recipe.slots].rebuilt(recipe)
            known[on_mean, recipe] = None if layout is None else _padded(layout, most)
        return known[on_mean, recipe]

    first = memory.num_plans < FIRST_PLANS
    period = len(SEARCHES) * (PLANS_BETWEEN_SEARCHES + sum(problem.slots_R) // SLOTS_PER_PLAN)
    drift = memory.drift if memory.num_drifts else options.drift
    rebuilt: list[Layouts] = []
    for index, (drifts, on_mean) in enumerate(SEARCHES):
        turn = memory.num_plans % period == index * period // len(SEARCHES)
        again = None if first or turn else built(on_mean, memory.recipes[index])
        if again is None:
            one = LayoutSearch(problems[on_mean], replace(options, drift=drift if drifts else 0.0))
            draft, recipe = one.best_in_seconds(one.numbers.empty())
            again = _padded(one.numbers.named(draft.expert_RS), most)
            memory.recipes[index : index + 1] = [recipe]
            memory.found[index : index + 1] = [again]
        rebuilt.append(again)
    spread = [built(on_mean, Recipe(kind, most)) for kind, on_mean in SPREADS]
    return np.stack([*rebuilt, *(each for each in spread if each is not None), *memory.found])


def _padded(layout: ExpertLayout, slots: int) -> Layouts:
    padded_RS = np.full((layout.num_ranks, slots), EMPTY, dtype=np.int32)
    padded_RS[:, : layout.num_slots] = layout.expert_RS
    return padded_RS
