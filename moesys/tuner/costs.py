"""Finds out what points cost in the cost model: closed forms first, then steps, each simulated once and noted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moesys.config import MegaKernel, Strategy
from moesys.cost import restores_per_step
from moesys.tuner.bounds import load_bound_ms, plan_bound_ms
from moesys.tuner.journal import Entry, Journal
from moesys.tuner.memory import rank_memory
from moesys.tuner.setting import Setting
from moesys.tuner.workload import Plans, Step, Workload

# Steps on which all points are seen first, and how many times more each next look has.
_FIRST_STEPS, _MORE = 2, 4
_MEMORY = "memory"


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
    """Costs of points in the cost model, in the journal or found out now.

    ``memory_gb``: what a rank has, 1e9 bytes; None: enough. ``recompute``: only one layer's rows are kept for backward.
    """

    def __init__(
        self,
        plans: Plans,
        journal: Journal,
        setting: Setting,
        *,
        memory_gb: float | None,
        recompute: bool,
        like: Strategy,
        told: Told,
    ) -> None:
        self.plans, self.journal, self.setting, self.told = plans, journal, setting, told
        self.memory_gb, self.recompute, self.like = memory_gb, recompute, like
        self.best_ms: dict[Fidelity, float] = {}
        self._load_bounds: dict[tuple[object, ...], float] = {}
        self.looked_at: set[str] = set()

    def fits(self, strategy: Strategy) -> bool:
        """Whether a rank can hold what the strategy has it hold; if not, that is in the journal."""
        if self.memory_gb is None:
            return True
        load = self.plans.loads(self.like, self.plans.workload.seeds[0], 1)[0][0]
        tokens = load.total // (self.setting.model.top_k * self.setting.cluster.num_ranks)
        needed_gb = rank_memory(strategy, self.setting, tokens, recompute=self.recompute).gb
        if needed_gb <= self.memory_gb:
            return True
        fingerprint = strategy.fingerprint()
        of = f"{_MEMORY} {self.memory_gb:g} GB"
        if self.journal.find(fingerprint, of, pruned=True) is None:
            reason = f"a rank holds {needed_gb:.2f} GB at least, and has {self.memory_gb:g}"
            self.journal.add(Entry.about(strategy, "pruned", of, None, reason))
        return False

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
            ms = _mean([self.plans.workload.step_ms(step) for step in self._steps(strategy, fidelity)])
        except ValueError as error:
            return Entry.about(strategy, "refused", str(fidelity), None, str(error))
        return Entry.about(strategy, "simulated", str(fidelity), ms)

    def _bounds(self, strategy: Strategy, fidelity: Fidelity) -> Iterator[tuple[float, str]]:
        """Before its layouts are planned, and after."""
        yield self._load_bound_ms(strategy, fidelity), "such slots"
        yield _mean([plan_bound_ms(step) for step in self._steps(strategy, fidelity)]), "its plans"

    def _load_bound_ms(self, strategy: Strategy, fidelity: Fidelity) -> float:
        """Many points share it: all that differ in what it does not know."""
        slots_R = strategy.slots(self.setting.model, self.setting.cluster)
        sharding, fused = strategy.sharding, isinstance(strategy.overlap, MegaKernel)
        key = (sharding.kind, restores_per_step(sharding), slots_R, fused, fidelity)
        if key not in self._load_bounds:
            loads = [of for seed in fidelity.seeds for of in self.plans.loads(self.like, seed, fidelity.num_steps)]
            self._load_bounds[key] = _mean([load_bound_ms(strategy, of_step, self.setting) for of_step in loads])
        return self._load_bounds[key]

    def _steps(self, strategy: Strategy, fidelity: Fidelity) -> list[Step]:
        return [step for seed in fidelity.seeds for step in self.plans.steps(strategy, seed, fidelity.num_steps)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
