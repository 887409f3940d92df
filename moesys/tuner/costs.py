"""Finds out what points cost in the cost model: closed forms first, then steps, each simulated once and noted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from moesys.config import Strategy
from moesys.cost import restores_per_step
from moesys.tuner.bounds import load_bound_ms
from moesys.tuner.deadline import Deadline
from moesys.tuner.journal import Entry, Journal
from moesys.tuner.lookahead import Look, Lookahead
from moesys.tuner.setting import Setting
from moesys.tuner.step_costs import Fidelity, Seen, StepCosts, mean
from moesys.tuner.workload import Plans, Workload

# Steps on which all points are seen first, and how many times more each next look has.
_FIRST_STEPS, _MORE = 2, 4
_MEMORY, _REACH = "memory", "reach"


def ladder(workload: Workload) -> tuple[Fidelity, ...]:
    """From a glance to all timed steps of all seeds."""
    first = workload.seeds[:1]
    steps = [_FIRST_STEPS]
    while steps[-1] * _MORE < workload.num_steps:
        steps.append(steps[-1] * _MORE)
    rungs = [Fidelity(first, num_steps) for num_steps in steps if num_steps < workload.num_steps]
    rungs.append(Fidelity(first, workload.num_steps))
    if len(workload.seeds) > 1:
        rungs.append(Fidelity(workload.seeds, workload.num_steps))
    return tuple(rungs)


class Told(Protocol):
    """Who is told how a tuning goes."""

    def stage(self, words: str, num_points: int) -> None:
        """``num_points`` are about to be looked at."""

    def point(self, entry: Entry) -> None:
        """One of them is through."""


class Costs:
    """Costs of points in the cost model, in the journal or found out now. ``like``: plans as well as any.

    A step is simulated once, whatever is the mean of it. Raises OutOfTimeError from everything that would find out more
    when the ``deadline`` is over. ``lookahead``: who finds out what is expected, with the same results.
    """

    def __init__(
        self,
        plans: Plans,
        journal: Journal,
        setting: Setting,
        *,
        like: Strategy,
        told: Told,
        deadline: Deadline | None = None,
        lookahead: Lookahead | None = None,
    ) -> None:
        self.lookahead = lookahead
        self.plans, self.journal, self.setting, self.like, self.told = plans, journal, setting, like, told
        self.deadline = deadline or Deadline()
        self.best_ms: dict[Fidelity, float] = {}
        self._load_bounds: dict[tuple[object, ...], float] = {}
        self.steps = StepCosts(plans, lambda: self.deadline.check())
        self.looked_at: set[str] = set()
        self._never_pruned: Collection[str] = ()

    def fits(self, strategy: Strategy) -> bool:
        """Whether ``why_not`` knows nothing against it."""
        return not self.why_not(strategy)

    def why_not(self, strategy: Strategy) -> str:
        """Why it would not run, whatever is planned, and that is in the journal then: a MegaKernel does not reach its
        peers, or a rank cannot hold what it is to hold.
        """
        reason, of = self.setting.out_of_reach(strategy), _REACH
        if not reason and (memory_gb := self.setting.cluster.memory_gb) is not None:
            reason, of = self.setting.out_of_memory(strategy, self._tokens_per_rank), f"{_MEMORY} {memory_gb:g} GB"
        if reason and self.journal.find(strategy.fingerprint(), of, pruned=True) is None:
            self.journal.add(Entry.about(strategy, "pruned", of, None, reason))
        return reason

    @cached_property
    def _tokens_per_rank(self) -> int:
        load = self.plans.loads(self.like, self.plans.workload.seeds[0], 1)[0][0]
        return load.total // (self.setting.model.top_k * self.setting.cluster.num_ranks)

    def of(self, strategy: Strategy, fidelity: Fidelity, *, prune: bool = True) -> Entry:
        """``simulated``; ``pruned`` where a bound is above the best of this fidelity; or ``refused``."""
        self.looked_at.add(strategy.fingerprint())
        fingerprint, of = strategy.fingerprint(), str(fidelity)
        # First, and by this search's best: a search that goes on, or another one, then does what it would have done.
        bound = self.journal.find(fingerprint, of, pruned=True) if prune else None
        if bound is not None and bound.ms is not None and bound.ms > self.best_ms.get(fidelity, math.inf):
            entry = bound
        else:
            entry = self.journal.find(fingerprint, of) or self.journal.add(self._found_out(strategy, fidelity, prune))
            self.steps.know(strategy, Seen({}, {int(seed): steps_ms for seed, steps_ms in entry.steps_ms.items()}))
        # What does not fit rules nothing out.
        if entry.stage == "simulated" and entry.ms is not None and self.fits(strategy):
            self.best_ms[fidelity] = min(self.best_ms.get(fidelity, math.inf), entry.ms)
        self.told.point(entry)
        return entry

    def expect(self, points: Iterable[Strategy], fidelity: Fidelity, never_pruned: Collection[str] = ()) -> None:
        """``of`` is asked for these next, in this order, and prunes all but the fingerprints of ``never_pruned``."""
        if self.lookahead:
            self._never_pruned = never_pruned
            self.lookahead.expect(points, fidelity)

    def _look(self, strategy: Strategy, fidelity: Fidelity) -> Look | None:
        """What to have found out of a point that ``of`` will be asked for, as far as is known now."""
        fingerprint, best_ms = strategy.fingerprint(), self.best_ms.get(fidelity, math.inf)
        prunes = fingerprint not in self._never_pruned
        if self.journal.find(fingerprint, str(fidelity)) is not None:
            return None
        if prunes:
            bound = self.journal.find(fingerprint, str(fidelity), pruned=True)
            if bound is not None and bound.ms is not None and bound.ms > best_ms:
                return None
            with suppress(ValueError):
                if self._load_bound_ms(strategy, fidelity) > best_ms:
                    return None
        return Look(strategy, fidelity, best_ms if prunes else None, self.steps.seen(strategy, fidelity.seeds))

    def _found_out(self, strategy: Strategy, fidelity: Fidelity, prune: bool) -> Entry:
        best_ms = self.best_ms.get(fidelity, math.inf) if prune else math.inf
        if self.lookahead and (seen := self.lookahead.take(strategy, fidelity, self._look, self.deadline.check)):
            self.steps.know(strategy, seen)
        try:
            for bound_ms, what in self._bounds(strategy, fidelity) if prune else ():
                if bound_ms > best_ms:
                    reason = f"{what} take {bound_ms:.4g} ms at least, and the best so far {best_ms:.4g} in all"
                    return Entry.about(strategy, "pruned", str(fidelity), bound_ms, reason)
            by_seed = {str(seed): ms for seed, ms in self.steps.steps_ms(strategy, fidelity).items()}
        except ValueError as error:
            return Entry.about(strategy, "refused", str(fidelity), None, str(error))
        ms = mean([ms for steps_ms in by_seed.values() for ms in steps_ms])
        return replace(Entry.about(strategy, "simulated", str(fidelity), ms), steps_ms=by_seed)

    def _bounds(self, strategy: Strategy, fidelity: Fidelity) -> Iterator[tuple[float, str]]:
        """Before its layouts are planned, and after."""
        yield self._load_bound_ms(strategy, fidelity), "such slots"
        yield self.steps.bound_ms(strategy, fidelity), "its plans"

    def _load_bound_ms(self, strategy: Strategy, fidelity: Fidelity) -> float:
        """Many points share it: all that differ in what it does not know."""
        slots_R = strategy.slots(self.setting.model, self.setting.cluster)
        sharding, fused = strategy.sharding, strategy.overlap.reaches_memory
        key = (sharding.kind, restores_per_step(sharding), slots_R, fused, fidelity)
        if key not in self._load_bounds:
            loads = [of for seed in fidelity.seeds for of in self.plans.loads(self.like, seed, fidelity.num_steps)]
            self._load_bounds[key] = mean([load_bound_ms(strategy, of_step, self.setting) for of_step in loads])
        return self._load_bounds[key]
