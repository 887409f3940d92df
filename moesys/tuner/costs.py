"""Costs of points in the cost model: closed forms first, then steps, each simulated once and written to the journal.

Points are looked at in batches. What a batch rules out depends on the best cost before it, and never on the processes
that work on it, so results and journal are equal at any number of workers. A point is ruled out by a lower bound on the
time of its step's busiest lane, whatever the strategy overlaps.

R ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np

from moesys.balance.plan import LayerPlan, StepPlan, out_of_rows
from moesys.config import Strategy
from moesys.cost import (
    ExpertPass,
    FloatArray,
    link_seconds,
    pass_seconds,
    reshard_bytes,
    restore_bytes,
    restores_per_step,
    row_product_seconds,
    rows_of,
)
from moesys.row_traffic import row_traffic
from moesys.tuner.findings import Entry, TuneJournal
from moesys.tuner.tuned_workload import (
    MOST_BYTES,
    Deadline,
    Fidelity,
    OutOfTimeError,
    Plans,
    Setting,
    Workload,
    layers_of,
)

# Points of the first batch and of the largest. Each batch has twice as many points as the batch before it, so that the
# first points already rule others out.
_FIRST_BATCH, _LARGEST_BATCH = 2, 16
# Seconds between two checks of the time limit.
_POLL_S = 0.1


class Observer(Protocol):
    """An object that shows the progress of a tuning."""

    def stage(self, words: str, num_points: int) -> None:
        """Begins a stage, in which ``num_points`` points will be looked at."""

    def point(self, entry: Entry) -> None:
        """Reports a point of the stage."""


class Helpers(Protocol):
    """Processes that call module-level functions."""

    num_workers: int

    @property
    def are_due(self) -> bool:
        """Whether to use them by now."""

    def submit(self, function: Callable[..., Entry], /, *args: Any) -> Future[Entry]: ...


@dataclass
class Session:
    """The means of a tuning: its journal, its observer, its time and its worker processes."""

    journal: TuneJournal
    observer: Observer
    deadline: Deadline = field(default_factory=Deadline)
    helpers: Helpers | None = None


@dataclass(frozen=True)
class CostedStrategy:
    """A strategy and the mean milliseconds of its simulated steps."""

    strategy: Strategy
    ms: float


@dataclass(frozen=True)
class _Look:
    """A point to look at. It is not simulated if a bound is above ``limit_ms``. ``known_ms``: milliseconds of its first
    steps, by seed, which are not simulated again.
    """

    strategy: Strategy
    fidelity: Fidelity
    limit_ms: float
    known_ms: dict[int, list[float]]


class Costs:
    """Costs of points, from the journal or found now. ``starts``: strategies that are never pruned, the baseline first.

    simulated: the strategies that were simulated, by fidelity and fingerprint. refused: the strategies that would not
    run or that the cost model does not support, with the reason. best_ms: of the strategies that would run.

    Everything that finds something out raises OutOfTimeError when the deadline of ``plans`` is over.
    """

    def __init__(self, plans: Plans, setting: Setting, session: Session, starts: Sequence[Strategy]) -> None:
        self.plans, self.setting, self.session = plans, setting, session
        self.simulated: dict[Fidelity, dict[str, CostedStrategy]] = {}
        self.refused: dict[str, tuple[Strategy, str]] = {}
        self.best_ms: dict[Fidelity, float] = {}
        self.looked_at: set[str] = set()
        self.steps_ms: dict[str, dict[int, list[float]]] = {}
        self.starts, self._never_pruned = tuple(starts), {strategy.fingerprint() for strategy in starts}
        self._running: set[Future[Entry]] = set()

    def fits(self, strategy: Strategy) -> bool:
        """Returns whether no reason is known why it would not run. Writes a reason to the journal."""
        reason, of = strategy.overlap.out_of_reach(self.setting.cluster), "reach"
        if not reason and (memory_gb := self.setting.cluster.memory_gb) is not None:
            reason, of = self.setting.out_of_memory(strategy, self.tokens_per_rank), f"memory {memory_gb:g} GB"
        if reason:
            self.refused.setdefault(strategy.fingerprint(), (strategy, reason))
            if self.session.journal.find(strategy.fingerprint(), of, pruned=True) is None:
                self.session.journal.add(Entry.about(strategy, "pruned", of, None, reason))
        return not reason

    @cached_property
    def tokens_per_rank(self) -> int:
        """The mean number of tokens of a rank in a micro-batch."""
        load = self.plans.first_layers(self.starts[0])[0].load
        return load.total // (self.setting.model.top_k * self.setting.cluster.num_ranks)

    def look(self, points: Iterable[Strategy], fidelity: Fidelity, *, prune: bool = True) -> Iterator[Entry]:
        """Yields an entry for each distinct point, in order: ``simulated``, ``refused``, or ``pruned`` where a bound is
        above the best cost of this fidelity.
        """
        left = list({point.fingerprint(): point for point in points}.values())
        size = _FIRST_BATCH
        while left:
            batch, left, size = left[:size], left[size:], min(2 * size, _LARGEST_BATCH)
            limit_ms = self.best_ms.get(fidelity, math.inf) if prune else math.inf
            answers = [self._answer(point, fidelity, limit_ms) for point in batch]
            for point, answer in zip(batch, answers, strict=True):
                yield self._note(point, fidelity, answer())

    def _note(self, point: Strategy, fidelity: Fidelity, entry: Entry) -> Entry:
        self.looked_at.add(entry.fingerprint)
        self.session.journal.add(entry)
        if entry.stage == "refused":
            self.refused.setdefault(entry.fingerprint, (point, entry.reason))
        elif entry.stage == "simulated" and entry.ms is not None:
            self.simulated.setdefault(fidelity, {}).setdefault(entry.fingerprint, CostedStrategy(point, entry.ms))
            known = self.steps_ms.setdefault(entry.fingerprint, {})
            known |= {int(seed): max(known.get(int(seed), []), ms, key=len) for seed, ms in entry.steps_ms.items()}
            # The time of a strategy that would not run excludes no other strategy.
            if self.fits(point):
                self.best_ms[fidelity] = min(self.best_ms.get(fidelity, math.inf), entry.ms)
        self.session.observer.point(entry)
        return entry

    def _answer(self, point: Strategy, fidelity: Fidelity, limit_ms: float) -> Callable[[], Entry]:
        """Returns a function that returns the entry. A worker process, if there is one, begins at once."""
        fingerprint, of, find = point.fingerprint(), str(fidelity), self.session.journal.find
        if fingerprint in self._never_pruned:
            limit_ms = math.inf
        # The bound comes first, and is compared with this search's best, so that a search that resumes, or another
        # search, does what it would have done without the journal.
        bound = find(fingerprint, of, pruned=True)
        entry = bound if bound is not None and bound.ms is not None and bound.ms > limit_ms else find(fingerprint, of)
        if entry is not None:
            return lambda: entry
        look = _Look(point, fidelity, limit_ms, self.steps_ms.get(fingerprint, {}))
        helpers = self.session.helpers
        if helpers is None or not helpers.are_due:
            return partial(_look_at, self.plans, look)
        answer = helpers.submit(_look_in_helper, self.plans.workload, MOST_BYTES // helpers.num_workers, look)
        self._running = {other for other in self._running if not other.done()} | {answer}
        return partial(self._wait_for, answer, look)

    def _wait_for(self, answer: Future[Entry], look: _Look) -> Entry:
        try:
            while not answer.done():
                self.plans.deadline.check()
                wait([answer], _POLL_S)
            return answer.result()
        except OutOfTimeError:
            self._running = {other for other in self._running if not other.cancel()}
            raise
        except BrokenExecutor as error:
            raise ValueError(
                f"strategy {look.strategy.name!r}, {look.fidelity}: {error}; the same call goes on from here"
            ) from None

    def rest(self) -> None:
        """Waits until no worker process computes, or the session's time is over, because clocks are to run."""
        while wait(self._running, _POLL_S).not_done and not self.session.deadline.is_over:
            pass


def _look_in_helper(workload: Workload, most_bytes: int, look: _Look) -> Entry:
    return _look_at(_plans_of(workload, most_bytes), look)


@lru_cache(maxsize=1)
def _plans_of(workload: Workload, most_bytes: int) -> Plans:
    """Returns the plans of a worker process, which it keeps for the points to come."""
    return Plans(workload, Deadline(), most_bytes)


def _look_at(plans: Plans, look: _Look) -> Entry:
    """Looks at a point: plans its steps, and simulates them unless a bound rules it out."""
    strategy, fidelity, workload = look.strategy, look.fidelity, plans.workload
    steps_ms = {seed: list(look.known_ms.get(seed, ())[: fidelity.num_steps]) for seed in fidelity.seeds}
    try:
        left = {seed: plans.steps(strategy, seed, fidelity.num_steps)[len(known) :] for seed, known in steps_ms.items()}
        if look.limit_ms < math.inf:
            bounds_ms = [ms for known in steps_ms.values() for ms in known]
            for step in [step for steps in left.values() for step in steps]:
                plans.deadline.check()
                bounds_ms.append(plan_bound_ms(step))
            if (bound_ms := statistics.fmean(bounds_ms)) > look.limit_ms:
                reason = f"its plans take {bound_ms:.4g} ms at least, and the best so far {look.limit_ms:.4g} in all"
                return Entry.about(strategy, "pruned", str(fidelity), bound_ms, reason)
        for seed, steps in left.items():
            for step in steps:
                plans.deadline.check()
                if reason := out_of_rows(strategy, workload.model, layers_of(step)):
                    raise ValueError(reason)
                steps_ms[seed].append(workload.step_ms(step))
    except ValueError as error:
        return Entry.about(strategy, "refused", str(fidelity), None, str(error))
    mean_ms = statistics.fmean(ms for of in steps_ms.values() for ms in of)
    entry = Entry.about(strategy, "simulated", str(fidelity), mean_ms)
    return replace(entry, steps_ms={str(seed): ms for seed, ms in steps_ms.items()})


# --- a lower bound on the time of a step ------------------------------------------------------------------------------


def plan_bound_ms(step: Sequence[StepPlan]) -> float:
    """Returns the milliseconds of the busiest rank between meetings of all ranks, or of the busiest link of all.

    The bound of MegaKernels is lower: they have tiles of their own, and pull a row once for several experts if told to.
    """
    model, cluster, strategy = step[0].model, step[0].cluster, step[0].strategy
    sharding, layers = strategy.sharding, [plan for micro_batch in step for plan in micro_batch.layers]
    fused = strategy.overlap if strategy.overlap.reaches_memory else None
    # Rows that are pulled once for several experts are not counted.
    counted = () if fused and fused.deduplicate else step
    traffic = [[row_traffic(plan.tokens, model, cluster, strategy.overlap) for plan in of.layers] for of in counted]
    loads = [[rows.loads(model, cluster) for rows in rows_L] for rows_L in traffic]
    if fused:
        # Products take the matmul rate; inside of a MegaKernel they take longer, by ``fused_rate``.
        rows_R = sum(plan.tokens.tokens_R for plan in layers)
        computing = float(np.max(rows_R)) * row_product_seconds(model, cluster)
    else:
        computing = sum(
            _computing(of, [bool(by_kind["dispatch"].used_4R.any(axis=0).all()) for by_kind in loads_L])
            for of, loads_L in zip(step, loads, strict=True)
        )
    link_busy = np.zeros(2 * (cluster.num_ranks + cluster.num_nodes))
    # The sum is over forward and backward.
    for by_kind in (by_kind for loads_L in loads for by_kind in loads_L):
        link_busy += 2 * sum(load.seconds_L for load in by_kind.values())
    for plan in layers:
        for bytes_RR in restore_bytes(plan.layout, model, cluster, sharding):
            link_busy += restores_per_step(sharding) * link_seconds(bytes_RR, cluster)
        for bytes_RR in reshard_bytes(plan.layout, model, cluster, sharding):
            link_busy += link_seconds(bytes_RR, cluster)
    return 1000 * max(computing, float(link_busy.max()))


def _computing(micro_batch: StepPlan, meets_L: Sequence[bool]) -> float:
    """Returns the seconds of a micro-batch's products."""

    def seconds_R(plan: LayerPlan, backward: bool) -> FloatArray:
        # Rows are computed in whole tiles and waves; chunks would need more of them.
        passes: tuple[ExpertPass, ...] = ("input_gradients", "weight_gradients") if backward else ("forward",)
        rows_RE = rows_of(plan.tokens)
        return np.sum([pass_seconds(rows_RE, micro_batch.model, micro_batch.cluster, of) for of in passes], axis=0)

    return sum(
        float(np.sum([seconds_R(micro_batch.layers[layer], backward) for layer, backward in stretch], axis=0).max())
        for stretch in _stretches(meets_L)
    )


def _stretches(meets_L: Sequence[bool]) -> Iterator[list[tuple[int, bool]]]:
    """Yields the passes of a micro-batch, (layer, whether backward), in order, in lists in which a rank may go on while
    others are still at an earlier pass.

    All ranks exchange counts before a layer's forward. Backward begins with rows that travel: a rank that sends or
    receives rows waits for all, and a rank that does not goes on alone. ``meets_L``: whether every rank has such rows.
    """
    stretch: list[tuple[int, bool]] = []
    forward = [(layer, False) for layer in range(len(meets_L))]
    for layer, backward in [*forward, *((layer, True) for layer, _ in reversed(forward))]:
        if stretch and (not backward or meets_L[layer]):
            yield stretch
            stretch = []
        stretch.append((layer, backward))
    yield stretch
