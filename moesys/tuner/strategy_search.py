"""The search in the cost model: a short look at many points, longer looks at fewer, then steps to better neighbours.

Random points find the region. Steps of one field, or of sharding, balance and split at once, find its best point, and
end where no such step is faster. The search is deterministic given a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from moesys.config import Strategy
from moesys.tuner.costs import CostedStrategy, Costs
from moesys.tuner.space import PLACEMENT, Neighbour, Space
from moesys.tuner.tuned_workload import Fidelity, OutOfTimeError, ladder

# The share of points that get a longer look, and the least number of them.
_KEPT_SHARE, _KEPT = 1 / 3, 6
# Number of values of a field that get the longest look.
_LOOKED_AT_LONG = 2
# Number of members of each other kind of sharding or overlap that one step tries.
_OF_ANOTHER_KIND = 16
# Number of other placements that one step tries.
_PLACED_ELSEWHERE = 24
# Milliseconds with a smaller relative difference are equal: sums in another order differ by as much.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Alternative:
    """The best other value of a field of the pick, and a step's milliseconds with it; a bound where ``at_least``."""

    neighbour: Neighbour
    ms: float
    at_least: bool


@dataclass(frozen=True)
class SearchResult:
    """The strategies that were simulated, and why the best of them was chosen.

    ranking: the strategies that would run, fastest first. baseline: None where it cannot be simulated. alternatives: of
    the pick, by field. refused: points that would not run, or that the cost model does not support, with the reason.
    num_points: points that were looked at. of: the part of the workload that all costs are the mean of. not_seen: what
    the search was doing when its time was over; "" where it ended by itself.
    """

    ranking: tuple[CostedStrategy, ...]
    baseline: CostedStrategy | None
    alternatives: dict[str, Alternative]
    refused: tuple[tuple[Strategy, str], ...]
    num_points: int
    of: Fidelity
    not_seen: str = ""


class Search:
    """One search of ``space``. It begins with the starts of ``costs``, which always get the longest look; the first
    is the baseline.

    budget: number of points that get the first look, starts included; a space with fewer points is searched whole.
    Neighbours come in addition: as many steps as are faster, and the neighbours of the pick, which say why it was
    chosen.
    """

    def __init__(self, space: Space, costs: Costs, *, budget: int, seed: int) -> None:
        self.space, self.starts, self.costs, self.budget = space, costs.starts, costs, budget
        self.draws = random.Random(seed)
        self.rungs = ladder(costs.plans.workload)
        self._stage = "drawing points"
        # The strategy whose neighbours were looked at last, and what was found.
        self._pick: Strategy | None = None
        self._alternatives: dict[str, Alternative] = {}

    def run(self) -> SearchResult:
        """Returns the best strategies found, also where the time is over before the search has ended.

        Raises ValueError where the space has no point, where no point would run, or where nothing was simulated in
        time.
        """
        try:
            found = self._halve()
            while found:
                found = self._faster_neighbour(found)
        except OutOfTimeError:
            return self._result(self._longest_look(), self._stage)
        return self._result(self.rungs[-1])

    def around(self, pick: Strategy, found: SearchResult) -> SearchResult:
        """Returns ``found`` with the alternatives of a pick that clocks have chosen."""
        not_seen = found.not_seen
        try:
            self._begin(f"simulating {pick.name}", 1)
            for entry in self.costs.look([pick], found.of, prune=False):
                if entry.ms is not None:
                    self._look_around(CostedStrategy(pick, entry.ms), found.of)
        except OutOfTimeError:
            not_seen = not_seen or self._stage
        return self._result(found.of, not_seen, pick)

    def by_glance(self, strategy: Strategy) -> list[Strategy]:
        """Returns the neighbours, fastest first after the shortest look; refused neighbours come last."""
        neighbours = [one.strategy for of_field in self._neighbours(strategy).values() for one in of_field]
        self._begin(f"glancing at neighbours of {strategy.name}", len(neighbours))
        ms = self._glances(neighbours)
        distinct = {one.fingerprint(): one for one in neighbours}
        return sorted(distinct.values(), key=lambda one: ms[one.fingerprint()])

    # --- the first points -----------------------------------------------------------------------------------------

    def _halve(self) -> CostedStrategy | None:
        """Returns the fastest of the first points, after ever longer looks at ever fewer of them."""
        alive, started = self._candidates(), {strategy.fingerprint() for strategy in self.starts}
        ranked: list[CostedStrategy] = []
        for fidelity in self.rungs:
            self._begin(f"simulating {len(alive)} points, {fidelity}", len(alive))
            looks = [entry.fingerprint for entry in self.costs.look(alive, fidelity) if entry.stage == "simulated"]
            simulated = self.costs.simulated.get(fidelity, {})
            ranked = sorted((simulated[fingerprint] for fingerprint in looks), key=lambda one: one.ms)
            most = max(_KEPT, math.ceil(len(ranked) * _KEPT_SHARE))
            kept = [one for place, one in enumerate(ranked) if place < most or one.strategy.fingerprint() in started]
            # The baseline comes first, so that a look that is cut short has a baseline.
            alive = sorted((one.strategy for one in kept), key=lambda strategy: strategy != self.starts[0])
        return next((one for one in ranked if self.costs.fits(one.strategy)), None)

    def _candidates(self) -> list[Strategy]:
        """Returns the starts and points of the space: all of them, or a random sample."""
        setting, found = self.costs.setting, {start.fingerprint(): start for start in self.starts}
        exhausts = self.space.num_combinations <= self.budget
        points = iter(self.space.points(setting) if exhausts else self.space.drawn(setting, self.draws))
        if (first := next(points, None)) is None:
            raise ValueError(
                "space has no point: no combination of its values is a Strategy for this model and cluster; "
                "list others, such as slots_per_rank for a balance that moves experts"
            )
        new = (one for one in chain([first], points) if one.fingerprint() not in found and self.costs.fits(one))
        for point in islice(new, None if exhausts else max(0, self.budget - len(found))):
            found[point.fingerprint()] = point
        return list(found.values())

    # --- neighbours -----------------------------------------------------------------------------------------------

    def _faster_neighbour(self, pick: CostedStrategy) -> CostedStrategy | None:
        self._look_around(pick, self.rungs[-1])
        exact = [
            CostedStrategy(one.neighbour.strategy, one.ms) for one in self._alternatives.values() if not one.at_least
        ]
        best = min(exact, key=lambda one: one.ms, default=pick)
        return best if best.ms < pick.ms * (1 - _EQUAL) else None

    def _look_around(self, pick: CostedStrategy, fidelity: Fidelity) -> None:
        """Finds the best other value of each field: a look of ``fidelity`` at the fastest after a glance at all."""
        by_field = self._neighbours(pick.strategy)
        neighbours = [one for of_field in by_field.values() for one in of_field]
        self._begin(f"simulating neighbours of {pick.strategy.name}", len(neighbours))
        self._pick, self._alternatives = pick.strategy, {}
        glances = self._glances([one.strategy for one in neighbours])
        looks: list[Neighbour] = []
        for of_field in by_field.values():
            known = [one for one in of_field if glances[one.strategy.fingerprint()] < math.inf]
            looks += sorted(known, key=lambda one: glances[one.strategy.fingerprint()])[:_LOOKED_AT_LONG]
        of_strategy: dict[str, list[Neighbour]] = {}
        for one in looks:
            of_strategy.setdefault(one.strategy.fingerprint(), []).append(one)
        # A bound below a pick that is not the fastest would say nothing.
        is_best = pick.ms <= self.costs.best_ms.get(fidelity, math.inf)
        for entry in self.costs.look((one.strategy for one in looks), fidelity, prune=is_best):
            if entry.ms is None:
                continue
            for one in of_strategy[entry.fingerprint]:
                new = Alternative(one, entry.ms, at_least=entry.stage == "pruned")
                old = self._alternatives.setdefault(one.field, new)
                self._alternatives[one.field] = min(old, new, key=lambda of: (of.ms, of.at_least))

    def _glances(self, points: Sequence[Strategy]) -> dict[str, float]:
        """Returns the milliseconds or the bound of each point after the shortest look; infinity where it is refused."""
        entries = self.costs.look(points, self.rungs[0])
        return {entry.fingerprint: math.inf if entry.ms is None else entry.ms for entry in entries}

    def _neighbours(self, strategy: Strategy) -> dict[str, list[Neighbour]]:
        """Returns the neighbours that fit, by field; of another kind of sharding or overlap a random sample."""
        replaced = self.space.replaced(strategy, self.costs.setting, self.draws, _PLACED_ELSEWHERE)
        by_field = {PLACEMENT: [one for one in replaced if self.costs.fits(one.strategy)]}
        by_kind: dict[tuple[str, str], list[Neighbour]] = {}
        for one in self.space.neighbours(strategy, self.costs.setting):
            if self.costs.fits(one.strategy):
                by_kind.setdefault((one.field, getattr(one.value, "kind", "")), []).append(one)
        for (field, _), listed in by_kind.items():
            if field.endswith(".kind") and len(listed) > _OF_ANOTHER_KIND:
                listed = self.draws.sample(listed, _OF_ANOTHER_KIND)
            by_field.setdefault(field, []).extend(listed)
        return by_field

    # --- what was found -------------------------------------------------------------------------------------------

    def _begin(self, stage: str, num_points: int) -> None:
        self._stage = stage
        self.costs.session.observer.stage(stage, num_points)

    def _longest_look(self) -> Fidelity:
        """Returns the longest look at the baseline and another strategy that would run, or the shortest look."""
        baseline = self.starts[0].fingerprint()
        for fidelity in reversed(self.rungs):
            seen = self.costs.simulated.get(fidelity, {})
            others = (one.strategy for fingerprint, one in seen.items() if fingerprint != baseline)
            if baseline in seen and any(map(self.costs.fits, others)):
                return fidelity
        return self.rungs[0]

    def _result(self, fidelity: Fidelity, not_seen: str = "", pick: Strategy | None = None) -> SearchResult:
        seen, refused = self.costs.simulated.get(fidelity, {}), self.costs.refused
        found = [one for one in seen.values() if self.costs.fits(one.strategy)]
        if not found:
            reason = next((reason for _, reason in refused.values()), "none is known to the cost model")
            time = f"the time was over while {not_seen}: give more minutes, or " if not_seen else ""
            raise ValueError(f"no point of the space would run: {reason}; {time}widen space, or raise memory_gb")
        # The sort is stable: of equals the start comes first, then drawn points, then neighbours.
        ranking = sorted(found, key=lambda one: one.ms)
        is_pick = self._pick == (pick or ranking[0].strategy)
        return SearchResult(
            ranking=tuple(ranking),
            baseline=seen.get(self.starts[0].fingerprint()),
            alternatives=dict(self._alternatives) if is_pick else {},
            refused=tuple(refused.values()),
            num_points=len(self.costs.looked_at),
            of=fidelity,
            not_seen=not_seen,
        )
