"""Searches in the cost model: a glance at many points, ever longer looks at fewer, then steps to better neighbours.

Points that are drawn by chance find the region; steps of one field, or of sharding, balance and split at once, find its
best point, and end where no change of one field is faster. Deterministic given a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice

from moesys.config import Strategy
from moesys.tuner.costs import Costs, ladder
from moesys.tuner.deadline import OutOfTimeError
from moesys.tuner.journal import Entry
from moesys.tuner.space import PLACEMENT, Neighbour, Space
from moesys.tuner.step_costs import Fidelity

# Of each look, the part that gets a longer one, and how many do at least.
_KEPT_SHARE, _KEPT = 1 / 3, 6
# Of a field's values, how many are looked at as long as the point that they would replace.
_LOOKED_AT_LONG = 2
# Members of each other kind of sharding or overlap that one step tries.
_OF_ANOTHER_KIND = 16
# Other placements that one step tries.
_PLACED_ELSEWHERE = 24
# Milliseconds that differ by less than that are one: sums in another order.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Ranked:
    """A strategy and what it costs on all of the workload, simulated."""

    strategy: Strategy
    ms: float


@dataclass(frozen=True)
class Alternative:
    """The best other value of a field of the pick, and a step's milliseconds with it; a bound where ``at_least``."""

    neighbour: Neighbour
    ms: float
    at_least: bool


@dataclass(frozen=True)
class SearchResult:
    """``ranking``: best first, of what fits. ``baseline``: None where it cannot be simulated. ``alternatives``: of the
    best, by field. ``refused``: points that would not run, or that the cost model does not know, with the reason.
    ``num_points``: points that were simulated, pruned or refused. ``of``: what all costs are the mean of. ``not_seen``:
    what the time did not suffice for, in words; "" where it did.
    """

    ranking: tuple[Ranked, ...]
    baseline: Ranked | None
    alternatives: dict[str, Alternative]
    refused: tuple[tuple[Strategy, str], ...]
    num_points: int
    of: Fidelity
    not_seen: str = ""


class Search:
    """One search of ``space``, from ``starts``: strategies that somebody wrote, which get the longest look in any case.

    ``budget``: points to look at, starts included; all of a space that has no more. Neighbours come on top: as many
    steps as are faster, and those of the pick, which say why it was chosen.
    """

    def __init__(self, space: Space, starts: Sequence[Strategy], costs: Costs, *, budget: int, seed: int) -> None:
        self.space, self.starts, self.costs, self.budget = space, tuple(starts), costs, budget
        self.draws = random.Random(seed)
        self.rungs = ladder(costs.plans.workload)
        self.refused: dict[str, tuple[Strategy, str]] = {}
        self.simulated: dict[Fidelity, dict[str, Ranked]] = {rung: {} for rung in self.rungs}
        self._pick: Ranked | None = None
        self._alternatives_of_pick: dict[str, Alternative] = {}
        self._stage = "drawing points"

    def run(self) -> SearchResult:
        """The best of what there is, or of what there was time for.

        Raises ValueError where the space has no point, where none is known to run, or time was not enough for any.
        """
        try:
            self._climb()
        except OutOfTimeError:
            return self._result(self._longest_look(), not_seen=self._stage)
        return self._result(self.rungs[-1])

    def _climb(self) -> None:
        """Ever longer looks at fewer points, then steps from the best."""
        alive = self._candidates()
        started = {strategy.fingerprint() for strategy in self.starts}
        for rung, fidelity in enumerate(self.rungs):
            self._begin(f"simulating {len(alive)} points, {fidelity}", len(alive))
            ranked = self._ranked(alive, fidelity, keep=started)
            kept = max(_KEPT, math.ceil(len(ranked) * _KEPT_SHARE))
            if rung + 1 < len(self.rungs):
                best = {one.strategy.fingerprint() for one in ranked[:kept]} | started
                alive = [one.strategy for one in ranked if one.strategy.fingerprint() in best]
                # First, so that a look that time cuts short has something to be compared with.
                alive.sort(key=lambda strategy: strategy != self.starts[0])
        found = [one for one in ranked if self._would_run(one.strategy)]
        if found:
            self._step_on(found[0])

    def _longest_look(self) -> Fidelity:
        """At which the baseline and something that would run were simulated; the shortest where there is none."""
        baseline = self.starts[0].fingerprint()
        for fidelity in reversed(self.rungs):
            seen = self.simulated[fidelity]
            others = (one.strategy for fingerprint, one in seen.items() if fingerprint != baseline)
            if baseline in seen and any(map(self.costs.fits, others)):
                return fidelity
        return self.rungs[0]

    def _result(self, fidelity: Fidelity, not_seen: str = "") -> SearchResult:
        seen = self.simulated[fidelity]
        found = [one for one in seen.values() if self._would_run(one.strategy)]
        if not found:
            reason = next((reason for _, reason in self.refused.values()), "none is known to the cost model")
            time = f"the time was over while {not_seen}: give more minutes, or " if not_seen else ""
            raise ValueError(f"no point of the space would run: {reason}; {time}widen space, or raise memory_gb")
        # Stable, so that of equals the start comes first, then what was drawn, then neighbours.
        ranking = sorted(found, key=lambda one: one.ms)
        is_pick = self._pick is not None and ranking[0].strategy == self._pick.strategy
        return SearchResult(
            tuple(ranking),
            seen.get(self.starts[0].fingerprint()),
            self._alternatives_of_pick if is_pick else {},
            tuple(self.refused.values()),
            len(self.costs.looked_at),
            fidelity,
            not_seen,
        )

    def _begin(self, stage: str, num_points: int) -> None:
        self._stage = stage
        self.costs.told.stage(stage, num_points)

    def by_glance(self, strategy: Strategy) -> list[Strategy]:
        """Neighbours, those first that are fastest at a glance; those that the cost model does not know are last."""
        neighbours = [one.strategy for of_field in self._neighbours(strategy).values() for one in of_field]
        self._begin(f"glancing at neighbours of {strategy.name}", len(neighbours))
        seen: list[tuple[float, int, Strategy]] = []
        self.costs.expect(neighbours, self.rungs[0])
        for neighbour in neighbours:
            ms = self._cost(neighbour, self.rungs[0]).ms
            seen.append((math.inf if ms is None else ms, len(seen), neighbour))
        return [point for _, _, point in sorted(seen, key=lambda one: one[:2])]

    def around(self, pick: Strategy, found: SearchResult) -> SearchResult:
        """``found`` with the alternatives of a pick that something else than the cost model chose."""
        self._begin(f"simulating {pick.name}", 1)
        entry = self._cost(pick, self.rungs[-1], prune=False)
        if entry.ms is None:
            return replace(found, alternatives={}, refused=tuple(self.refused.values()))
        ranked = {one.strategy.fingerprint(): one for one in found.ranking}
        ranked.setdefault(pick.fingerprint(), Ranked(pick, entry.ms))
        return SearchResult(
            tuple(sorted(ranked.values(), key=lambda one: one.ms)),
            found.baseline,
            self._alternatives(Ranked(pick, entry.ms)),
            tuple(self.refused.values()),
            len(self.costs.looked_at),
            self.rungs[-1],
            found.not_seen,
        )

    def _candidates(self) -> list[Strategy]:
        """The starts, and points of the space: all, or some by chance."""
        setting, by_fingerprint = self.costs.setting, {start.fingerprint(): start for start in self.starts}
        exhausts = self.space.num_combinations <= self.budget
        points = self.space.points(setting) if exhausts else self.space.drawn(setting, self.draws)
        points = iter(points)
        if (first := next(points, None)) is None:
            raise ValueError(
                "space has no point: no combination of its values is a Strategy for this model and cluster; "
                "list others, such as slots_per_rank for a balance that moves experts"
            )
        new = (
            point
            for point in chain([first], points)
            if point.fingerprint() not in by_fingerprint and self._would_run(point)
        )
        for point in islice(new, None if exhausts else max(0, self.budget - len(by_fingerprint))):
            by_fingerprint[point.fingerprint()] = point
        return list(by_fingerprint.values())

    def _would_run(self, point: Strategy) -> bool:
        if reason := self.costs.why_not(point):
            self.refused.setdefault(point.fingerprint(), (point, reason))
        return not reason

    def _ranked(self, points: Sequence[Strategy], fidelity: Fidelity, keep: set[str]) -> list[Ranked]:
        """Those that were simulated, fastest first; equals in the order they came in. Nothing in ``keep`` is pruned."""
        found = []
        self.costs.expect(points, fidelity, never_pruned=keep)
        for point in points:
            entry = self._cost(point, fidelity, prune=point.fingerprint() not in keep)
            if entry.stage == "simulated" and entry.ms is not None:
                found.append(Ranked(point, entry.ms))
        return sorted(found, key=lambda one: one.ms)

    def _cost(self, point: Strategy, fidelity: Fidelity, prune: bool = True) -> Entry:
        entry = self.costs.of(point, fidelity, prune=prune)
        if entry.stage == "refused":
            self.refused.setdefault(entry.fingerprint, (point, entry.reason))
        elif entry.stage == "simulated" and entry.ms is not None and fidelity in self.simulated:
            self.simulated[fidelity].setdefault(entry.fingerprint, Ranked(point, entry.ms))
        return entry

    # --- neighbours ---------------------------------------------------------------------------------------------

    def _step_on(self, pick: Ranked) -> None:
        """Go to the fastest neighbour until none is faster."""
        while True:
            alternatives = self._alternatives(pick)
            exact = [Ranked(one.neighbour.strategy, one.ms) for one in alternatives.values() if not one.at_least]
            best = min(exact, key=lambda one: one.ms, default=pick)
            if best.ms >= pick.ms * (1 - _EQUAL):
                return
            pick = best

    def _alternatives(self, pick: Ranked) -> dict[str, Alternative]:
        """The best other value of each field, after a glance at all of them."""
        by_field = self._neighbours(pick.strategy)
        glance, whole = self.rungs[0], self.rungs[-1]
        self._begin(
            f"simulating neighbours of {pick.strategy.name}", sum(len(neighbours) for neighbours in by_field.values())
        )
        found: dict[str, Alternative] = {}
        self._pick, self._alternatives_of_pick = pick, found
        looks: dict[str, list[Neighbour]] = {}
        self.costs.expect((one.strategy for neighbours in by_field.values() for one in neighbours), glance)
        for field, neighbours in by_field.items():
            glances = [self._cost(one.strategy, glance).ms for one in neighbours]
            seen = sorted((ms, place) for place, ms in enumerate(glances) if ms is not None)
            looks[field] = [neighbours[place] for _, place in seen[:_LOOKED_AT_LONG]]
        self.costs.expect((one.strategy for neighbours in looks.values() for one in neighbours), whole)
        for field, neighbours in looks.items():
            alternatives = [self._alternative(one, pick) for one in neighbours]
            known = [one for one in alternatives if one is not None]
            if known:
                found[field] = min(known, key=lambda one: (one.ms, one.at_least))
        return found

    def _alternative(self, neighbour: Neighbour, pick: Ranked) -> Alternative | None:
        """After a look at all of the workload; None for what is refused."""
        entry = self._cost(neighbour.strategy, self.rungs[-1])
        if entry.ms is not None and entry.stage == "pruned" and entry.ms <= pick.ms:
            # Of a pick that is not the fastest: a bound below it says nothing.
            entry = self._cost(neighbour.strategy, self.rungs[-1], prune=False)
        return None if entry.ms is None else Alternative(neighbour, entry.ms, at_least=entry.stage == "pruned")

    def _neighbours(self, strategy: Strategy) -> dict[str, list[Neighbour]]:
        """Those that fit, by field."""
        fitting = [one for one in self.space.neighbours(strategy, self.costs.setting) if self.costs.fits(one.strategy)]
        replaced = self.space.replaced(strategy, self.costs.setting, self.draws, _PLACED_ELSEWHERE)
        by_field: dict[str, list[Neighbour]] = {PLACEMENT: [one for one in replaced if self.costs.fits(one.strategy)]}
        for field, of_field in groupby(fitting, key=lambda one: one.field):
            by_kind = groupby(of_field, key=lambda one: getattr(one.value, "kind", ""))
            for _, neighbours in by_kind:
                listed = list(neighbours)
                if field.endswith(".kind") and len(listed) > _OF_ANOTHER_KIND:
                    listed = self.draws.sample(listed, _OF_ANOTHER_KIND)
                by_field.setdefault(field, []).extend(listed)
        return by_field
