"""Costs of points in the cost model: steps, each simulated once and written to the journal.

Points are simulated in batches, by worker processes where there are any. Results and journal are equal at any number of
workers.

The journal has one JSON line per finding. A search is a function of its seed and of the costs of its points: to resume
one that was stopped, it runs again and takes every cost that is in the journal from there.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import pydantic_core
from pydantic import ConfigDict

from moesys.balance.plan import out_of_rows
from moesys.config import Strategy
from moesys.files import FolderLock, append_line, cut_torn_line, read_bytes
from moesys.journal import Journal
from moesys.tuner.tuned_workload import MOST_BYTES, Fidelity, Plans, Setting, SimulatedWorkload, layers_of

# Points of a batch, which workers simulate side by side.
_BATCH = 16

# Milliseconds of a strategy's first steps, by seed.
StepsMs = dict[int, list[float]]


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
    """The means of a tuning: its journal, its observer and its worker processes."""

    journal: TuneJournal
    observer: Observer
    helpers: Helpers | None = None


@dataclass(frozen=True)
class CostedStrategy:
    """A strategy and the mean milliseconds of its simulated steps."""

    strategy: Strategy
    ms: float


class Costs:
    """Costs of points, from the journal or found now. ``starts``: the experiment's strategies, the baseline first.

    simulated: the strategies that were simulated, by fidelity and fingerprint. refused: the strategies that would not
    run or that the cost model does not support, with the reason.
    """

    def __init__(self, plans: Plans, setting: Setting, session: Session, starts: Sequence[Strategy]) -> None:
        self.plans, self.setting, self.session, self.starts = plans, setting, session, tuple(starts)
        self.simulated: dict[Fidelity, dict[str, CostedStrategy]] = {}
        self.refused: dict[str, tuple[Strategy, str]] = {}
        self.steps_ms: dict[str, StepsMs] = {}
        self.looked_at: set[str] = set()

    def fits(self, strategy: Strategy) -> bool:
        """Returns whether no reason is known why it would not run. Writes a reason to the journal."""
        reason, of = strategy.overlap.out_of_reach(self.setting.cluster), "reach"
        if not reason and (memory_gb := self.setting.cluster.memory_gb) is not None:
            reason, of = self.setting.out_of_memory(strategy, self.tokens_per_rank), f"memory {memory_gb:g} GB"
        if reason:
            self.refused.setdefault(strategy.fingerprint(), (strategy, reason))
            if self.session.journal.find(strategy.fingerprint(), of) is None:
                self.session.journal.add(Entry.about(strategy, "pruned", of, None, reason))
        return not reason

    @cached_property
    def tokens_per_rank(self) -> int:
        """The mean number of tokens of a rank in a micro-batch."""
        load = self.plans.first_layers(self.starts[0])[0].load
        return load.total // (self.setting.model.top_k * self.setting.cluster.num_ranks)

    def look(self, points: Iterable[Strategy], fidelity: Fidelity, words: str) -> None:
        """Simulates each distinct point, in order. ``words``: what the points are."""
        left = list({point.fingerprint(): point for point in points}.values())
        self.session.observer.stage(f"simulating {len(left)} {words}, {fidelity}", len(left))
        while left:
            helpers = self.session.helpers
            size = _BATCH if helpers is not None and helpers.are_due else 1
            batch, left = left[:size], left[size:]
            answers = [self._answer(point, fidelity) for point in batch]
            for point, answer in zip(batch, answers, strict=True):
                self._note(point, fidelity, answer())

    def ranking(self, fidelity: Fidelity) -> list[CostedStrategy]:
        """Returns the strategies that were simulated and would run, fastest first; of equals, those seen first."""
        found = self.simulated.get(fidelity, {}).items()
        return sorted((one for fingerprint, one in found if fingerprint not in self.refused), key=lambda one: one.ms)

    def _note(self, point: Strategy, fidelity: Fidelity, entry: Entry) -> None:
        self.looked_at.add(entry.fingerprint)
        self.session.journal.add(entry)
        if entry.ms is None:
            self.refused.setdefault(entry.fingerprint, (point, entry.reason))
        else:
            self.simulated.setdefault(fidelity, {}).setdefault(entry.fingerprint, CostedStrategy(point, entry.ms))
            known = self.steps_ms.setdefault(entry.fingerprint, {})
            known |= {int(seed): max(known.get(int(seed), []), ms, key=len) for seed, ms in entry.steps_ms.items()}
        self.session.observer.point(entry)

    def _answer(self, point: Strategy, fidelity: Fidelity) -> Callable[[], Entry]:
        """Returns a function that returns the entry. A worker process, if there is one, begins at once."""
        fingerprint = point.fingerprint()
        if (entry := self.session.journal.find(fingerprint, str(fidelity))) is not None:
            return lambda: entry
        known, helpers = self.steps_ms.get(fingerprint, {}), self.session.helpers
        if helpers is None or not helpers.are_due:
            return partial(_entry_of, self.plans, point, fidelity, known)
        most_bytes = MOST_BYTES // helpers.num_workers
        answer = helpers.submit(_entry_in_worker, self.plans.workload, most_bytes, point, fidelity, known)
        return partial(_result_of, answer, point.name, fidelity)


def _result_of(answer: Future[Entry], name: str, fidelity: Fidelity) -> Entry:
    try:
        return answer.result()
    except BrokenExecutor as error:
        raise ValueError(f"strategy {name!r}, {fidelity}: {error}; the same call goes on from here") from None


def _entry_in_worker(workload: SimulatedWorkload, most_bytes: int, *point: Any) -> Entry:
    return _entry_of(_plans_of(workload, most_bytes), *point)


@lru_cache(maxsize=1)
def _plans_of(workload: SimulatedWorkload, most_bytes: int) -> Plans:
    """Returns the plans of a worker process, which it keeps for the points to come."""
    return Plans(workload, most_bytes)


def _entry_of(plans: Plans, strategy: Strategy, fidelity: Fidelity, known: StepsMs) -> Entry:
    """Plans the steps of a point and simulates those that are not ``known``."""
    steps_ms = {seed: list(known.get(seed, ())[: fidelity.num_steps]) for seed in fidelity.seeds}
    try:
        for seed, ms in steps_ms.items():
            for step in plans.steps(strategy, seed, fidelity.num_steps)[len(ms) :]:
                if reason := out_of_rows(strategy, plans.workload.model, layers_of(step)):
                    raise ValueError(reason)
                ms.append(plans.workload.step_ms(step))
    except ValueError as error:
        return Entry.about(strategy, "refused", str(fidelity), None, str(error))
    mean_ms = statistics.fmean(ms for of in steps_ms.values() for ms in of)
    entry = Entry.about(strategy, "simulated", str(fidelity), mean_ms)
    return replace(entry, steps_ms={str(seed): ms for seed, ms in steps_ms.items()})


JOURNAL_SCHEMA = 1

Stage = Literal["pruned", "simulated", "measured", "refused"]


@dataclass(frozen=True)
class Entry:
    """One finding about one strategy.

    fingerprint: of the strategy; ``name``, in words; ``strategy``, all its fields.
    stage: ``pruned``, as it would not run; ``simulated``; ``measured``; ``refused`` by the cost model or by a failure.
    of: what ``ms`` is the cost of, such as ``20 steps of seeds 0, 1`` or ``seed 3``. Costs with different words cannot
        be compared. A point that would not run has no ``ms``; its words are ``memory 80 GB`` or ``reach``.
    ms: milliseconds of a step; None where there is none.
    reason: why the point was pruned or refused.
    steps_ms: milliseconds of each simulated step, by seed; ``ms`` is their mean.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    fingerprint: str
    name: str
    stage: Stage
    of: str
    ms: float | None = None
    reason: str = ""
    strategy: dict[str, Any] = field(default_factory=dict)
    steps_ms: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        none = self.ms is None and self.stage in ("pruned", "refused")
        if not none and (self.ms is None or not 0 <= self.ms < math.inf):
            raise ValueError(f"ms={self.ms!r} of stage={self.stage!r} are no milliseconds")

    @classmethod
    def about(cls, strategy: Strategy, stage: Stage, of: str, ms: float | None, reason: str = "") -> Self:
        fields = strategy.model_dump(mode="json", exclude_none=True)
        return cls(strategy.fingerprint(), strategy.name, stage, of, ms, reason, fields)


class TuneJournal:
    """A file of entries; without ``path``, entries are kept in memory only.

    ``setting``: words by name for everything that costs depend on besides the strategy. The first line has them.

    Raises ValueError for a file with another setting, or with a whole line that is not an entry. A last line that a
    kill has torn is cut off.
    """

    def __init__(self, path: Path | None, setting: dict[str, str], lock: FolderLock | None = None) -> None:
        self.path = path
        self._found: dict[tuple[str, str], Entry] = {}
        if path is None:
            return
        cut_torn_line(path)
        self._lines = Journal(path, Entry, lock=lock)
        lines = read_bytes(path).split(b"\n")[:-1] if path.exists() else []
        if lines:
            self._check(lines[0], setting)
        else:
            append_line(path, json.dumps({"schema": JOURNAL_SCHEMA, "setting": setting}).encode() + b"\n", lock=lock)
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._keep(self._lines.from_line(line))
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {path} is no entry of a tuning: {error}; delete the line to find it out again"
                ) from None

    def _check(self, line: bytes, setting: dict[str, str]) -> None:
        try:
            head = pydantic_core.from_json(line)
            schema, there = head["schema"], dict(head["setting"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is no journal of a tuning; use another folder") from None
        if schema != JOURNAL_SCHEMA:
            raise ValueError(
                f"{self.path} has schema {schema}, and this moesys reads schema {JOURNAL_SCHEMA}; use another folder"
            )
        if differing := sorted(name for name in there | setting if there.get(name) != setting.get(name)):
            raise ValueError(
                f"{self.path} is of another {' and '.join(differing)}, under which strategies cost something else; "
                "begin anew with --fresh (fresh=True), or use another folder"
            )

    def find(self, fingerprint: str, of: str) -> Entry | None:
        """Returns the cost or the refusal of a strategy."""
        return self._found.get((fingerprint, of))

    def add(self, entry: Entry) -> None:
        """Writes an entry, unless it is there. A measured entry is on the disk when this returns."""
        if self.find(entry.fingerprint, entry.of) is entry:
            return
        if self.path is not None:
            self._lines.append(entry, sync=entry.stage == "measured")
        self._keep(entry)

    def entries(self) -> tuple[Entry, ...]:
        """Returns the newest entry of each strategy and ``of``."""
        return tuple(self._found.values())

    def _keep(self, entry: Entry) -> None:
        self._found[entry.fingerprint, entry.of] = entry
