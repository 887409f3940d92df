"""Finds out what points cost in the cost model: closed forms first, then steps, each simulated once and noted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from moesys.config import MegaKernel, Strategy
from moesys.cost import restores_per_step
from moesys.runnable import out_of_rows
from moesys.tuner.bounds import load_bound_ms, plan_bound_ms
from moesys.tuner.deadline import Deadline
from moesys.tuner.journal import Entry, Journal
from moesys.tuner.setting import Setting
from moesys.tuner.workload import Plans, Step, Workload, layers_of

# Steps on which all points are seen first, and how many times more each next look has.
_FIRST_STEPS, _MORE = 2, 4
_MEMORY, _REACH = "memory", "reach"


@dataclass(frozen=True)
class Fidelity:
    """How much of the workload a cost is the mean of: the first ``num_steps`` timed steps of ``seeds``."""

    seeds: tuple[int, ...]
    num_steps: int

    def __str__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        return f"{self.num_steps} steps of seed{'s' * (len(self.seeds) > 1)} {seeds}"


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
    when the ``deadline`` is over.
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
    ) -> None:
        self.plans, self.journal, self.setting, self.like, self.told = plans, journal, setting, like, told
        self.deadline = deadline or Deadline()
        self.best_ms: dict[Fidelity, float] = {}
        self._load_bounds: dict[tuple[object, ...], float] = {}
        self._plan_bounds: dict[tuple[str, int], list[float]] = {}
        self._steps_ms: dict[tuple[str, int], list[float]] = {}
        self.looked_at: set[str] = set()

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
            for seed, steps_ms in entry.steps_ms.items():
                known = self._steps_ms.setdefault((fingerprint, int(seed)), [])
                known += steps_ms[len(known) :]
        # What does not fit rules nothing out.
        if entry.stage == "simulated" and entry.ms is not None and self.fits(strategy):
            self.best_ms[fidelity] = min(self.best_ms.get(fidelity, math.inf), entry.ms)
        self.told.point(entry)
        return entry

    def _found_out(self, strategy: Strategy, fidelity: Fidelity, prune: bool) -> Entry:
        best_ms = self.best_ms.get(fidelity, math.inf) if prune else math.inf
        try:
            for bound_ms, what in self._bounds(strategy, fidelity) if prune else ():
                if bound_ms > best_ms:
                    reason = f"{what} take {bound_ms:.4g} ms at least, and the best so far {best_ms:.4g} in all"
                    return Entry.about(strategy, "pruned", str(fidelity), bound_ms, reason)
            by_seed = {
                str(seed): self._of_steps(self._steps_ms, self._step_ms, strategy, seed, fidelity)
                for seed in fidelity.seeds
            }
        except ValueError as error:
            return Entry.about(strategy, "refused", str(fidelity), None, str(error))
        ms = _mean([ms for steps_ms in by_seed.values() for ms in steps_ms])
        return replace(Entry.about(strategy, "simulated", str(fidelity), ms), steps_ms=by_seed)

    def steps_ms(self, strategy: Strategy) -> dict[int, list[float]]:
        """Milliseconds of all steps that are simulated by now, by seed."""
        of = strategy.fingerprint()
        return {seed: ms for (fingerprint, seed), ms in self._steps_ms.items() if fingerprint == of and ms}

    def _of_steps(
        self,
        known: dict[tuple[str, int], list[float]],
        find_out: Callable[[Step], float],
        strategy: Strategy,
        seed: int,
        fidelity: Fidelity,
    ) -> list[float]:
        """What ``find_out`` says of the first steps of a seed, each of which is asked for once."""
        values = known.setdefault((strategy.fingerprint(), seed), [])
        if len(values) < fidelity.num_steps:
            self.deadline.check()
            for step in self.plans.steps(strategy, seed, fidelity.num_steps)[len(values) :]:
                self.deadline.check()
                values.append(find_out(step))
        return values[: fidelity.num_steps]

    def _step_ms(self, step: Step) -> float:
        if reason := out_of_rows(step[0].strategy, self.setting.model, layers_of(step)):
            raise ValueError(reason)
        return self.plans.workload.step_ms(step)

    def _bounds(self, strategy: Strategy, fidelity: Fidelity) -> Iterator[tuple[float, str]]:
        """Before its layouts are planned, and after."""
        yield self._load_bound_ms(strategy, fidelity), "such slots"
        bounds = (self._of_steps(self._plan_bounds, plan_bound_ms, strategy, seed, fidelity) for seed in fidelity.seeds)
        yield _mean([ms for of_seed in bounds for ms in of_seed]), "its plans"

    def _load_bound_ms(self, strategy: Strategy, fidelity: Fidelity) -> float:
        """Many points share it: all that differ in what it does not know."""
        slots_R = strategy.slots(self.setting.model, self.setting.cluster)
        sharding, fused = strategy.sharding, isinstance(strategy.overlap, MegaKernel)
        key = (sharding.kind, restores_per_step(sharding), slots_R, fused, fidelity)
        if key not in self._load_bounds:
            loads = [of for seed in fidelity.seeds for of in self.plans.loads(self.like, seed, fidelity.num_steps)]
            self._load_bounds[key] = _mean([load_bound_ms(strategy, of_step, self.setting) for of_step in loads])
        return self._load_bounds[key]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
