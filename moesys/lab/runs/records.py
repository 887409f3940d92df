"""The records of trials, one JSON line each, in a run folder that anyone can read.

A line holds every single sample, with its unit and its direction, so that any statistic can be computed later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict

from moesys.config.experiment import Experiment, Source
from moesys.files import Closing, FolderLock, write_whole
from moesys.journal import Journal
from moesys.lab.runs.declarations import recorded_experiment

EXPERIMENT_FILE, RECORDS_FILE = "experiment.json", "records.jsonl"
# The page that lists the run folders beside it.
INDEX_FILE = "index.html"
# What else moesys writes beside run folders, by a file that a folder of it has, and what it is for.
_OTHERS = {
    "leaderboard.*": "a leaderboard, whose page is leaderboard.html",
    "journal.jsonl": "a tuning, whose experiment.toml is for moesys run and explain",
    "rank-*.jsonl": "a watched training, which moesys report reads",
    "*.trace.json": "simulated steps, which ui.perfetto.dev opens",
    "model.json": "a simulated model, whose steps are in its model.json",
    "cluster.toml": "a calibration, whose cluster.toml is for moesys simulate --cluster",
    INDEX_FILE: "a folder of several, which moesys report lists",
    "*/rank-*.jsonl": "a folder of watched trainings, which moesys report lists",
    ".lock": "a run that was stopped before it began, or begins now",
}
# JSON has no number for an infinite loss or NaN: it is written as a string.
_AS_JSON = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


@dataclass(frozen=True)
class Samples:
    """Every single sample of one metric in one trial. ``better`` is empty where neither direction is."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_JSON

    unit: str
    better: Literal["lower", "higher", ""]
    values: list[float]

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Record:
    """The record of one trial.

    identity: of the ``Trial``; of several records of one identity the last one holds.
    strategy: its name at the time.
    started: ISO 8601, UTC. seconds: from then on, warm-up included.
    environment: id of the file ``environment-<id>.json`` beside the records.
    losses: of all steps, warm-up included, in nats a token; empty where it was simulated.
    tokens_LE: tokens of each expert in each layer, over the timed steps.
    routing: ``Trace.digest`` of what was replayed; empty for other workloads.
    would_not_run: what stands against the strategy on such a cluster, of a simulated trial; empty where nothing does.
    error: one line, of a failed trial; trace: the whole traceback.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _AS_JSON

    identity: str
    strategy: str
    seed: int
    repeat: int
    source: Source
    status: Literal["ok", "failed"]
    started: str
    seconds: float
    environment: str
    samples: dict[str, Samples] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    tokens_LE: list[list[int]] = field(default_factory=list)
    routing: str = ""
    would_not_run: str = ""
    error: str = ""
    trace: str = ""

    def __post_init__(self) -> None:
        steps = self.samples.get("step_ms")
        if steps is not None and not all(0 < value < math.inf for value in steps.values):
            raise ValueError(f"step_ms of {self.strategy}, seed {self.seed}, has a value that is no positive number")


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """Returns the last record of each identity, so that a trial that failed and was run again has its newest result."""
    return {record.identity: record for record in records}


def setting_fingerprint(experiment: Experiment) -> str:
    """Returns 8 hex digits of model, cluster and workload, which all trials of a run folder share."""
    parts = (experiment.model, experiment.cluster, experiment.workload)
    return sha256("-".join(part.fingerprint() for part in parts).encode()).hexdigest()[:8]


def differences(there: Experiment, here: Experiment) -> dict[str, tuple[Any, Any]]:
    """Returns the fields, by dotted path, that forbid two experiments to share a run folder, with both values.

    These are those of model, cluster and workload, and of strategies of one name; display names do not count.
    ``{"workload.steps": (30, 40)}``. A strategy or seed that only one of them has is no difference: the identity of a
    trial does not depend on other trials.
    """
    pairs = [(part, getattr(there, part), getattr(here, part)) for part in ("model", "cluster", "workload")]
    named = {strategy.name: strategy for strategy in there.strategies}
    pairs += [(f"strategies[{of.name}]", named[of.name], of) for of in here.strategies if of.name in named]
    found: dict[str, tuple[Any, Any]] = {}
    for path, a, b in pairs:
        found |= _differing_fields(a.model_dump(), b.model_dump(), path)
    return found


def _differing_fields(there: Any, here: Any, path: str) -> dict[str, tuple[Any, Any]]:
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return {} if there == here else {path: (there, here)}
    # Other fields are not compared if kinds differ, or the contents of the file of a user's planner.
    if differing := [name for name in ("kind", "source_digest") if there.get(name) != here.get(name)]:
        return {f"{path}.{name}": (there.get(name), here.get(name)) for name in differing[:1]}
    found: dict[str, tuple[Any, Any]] = {}
    for name in [name for name in there | here if name != "name"]:
        found |= _differing_fields(there.get(name), here.get(name), f"{path}.{name}")
    return found


def other_kind(folder: Path) -> str:
    """Returns what a folder of moesys is that is not of a run, and what reads it; "" for a run folder and others."""
    if (folder / EXPERIMENT_FILE).is_file():
        return ""
    return next((words for pattern, words in _OTHERS.items() if any(folder.glob(pattern))), "")


class RunFolder(Closing):
    """``runs/<name>-<fingerprint8>/``: ``experiment.json`` with all defaults, ``records.jsonl``, environments, figures.

    The fingerprint is of model, cluster and workload. ``RunFolder(path)`` reads one; ``RunFolder.open`` makes or
    resumes one to write into, which one process at a time may do.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError where there is no run folder."""
        self.path = Path(path)
        self._lock: FolderLock | None = None
        if not (self.path / EXPERIMENT_FILE).is_file():
            why = f"is {kind}" if (kind := other_kind(self.path)) else f"has no {EXPERIMENT_FILE}"
            raise ValueError(f"{self.path} is not a run folder: it {why}; give one that a run made")

    @classmethod
    def open(cls, experiment: Experiment, out: str | Path = "runs", *, fresh: bool = False) -> Self:
        """Returns the folder under ``out`` that holds this experiment's records, locked until ``close``.

        An experiment that gained or lost seeds or strategies resumes in its folder, where ``experiment.json`` is
        rewritten: only what is new will run, and no record is ever taken away. Where model, cluster, workload, or a
        strategy under the same name differ from every folder of that name, nothing is mixed and nothing is guessed:
        ValueError with the differing fields of the nearest folder. ``fresh=True`` makes a new folder beside them.

        Raises ValueError too where another process writes into the folder.
        """
        out = Path(out)
        folder = _new_folder(experiment, out) if fresh else _folder_to_resume(experiment, out)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            # Under the lock nobody else changes the folder.
            saved = folder / EXPERIMENT_FILE
            there = recorded_experiment(saved) if saved.exists() else None
            if there is not None and differences(there, experiment):
                raise ValueError(_refusal(folder, there, experiment))
            if there != experiment:
                write_whole(saved, experiment.to_json() + "\n")
            opened = cls(folder)
        except BaseException:
            lock.close()
            raise
        opened._lock = lock
        return opened

    def close(self) -> None:
        """Lets others write. A process that ends, in whatever way, closes too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def experiment(self) -> Experiment:
        """Raises ValueError where this moesys cannot read it."""
        return recorded_experiment(self.path / EXPERIMENT_FILE)

    def records(self) -> list[Record]:
        """Returns all records in the order in which they were written. Raises ValueError for a line that is none."""
        return list(record_journal(self.path).read())

    def append(self, record: Record) -> None:
        """Writes a record, which is on the disk when this returns.

        Raises ValueError if the folder was removed, or made anew by another run.
        """
        if self._lock is None:
            raise ValueError(f"{self.path} is open for reading; use RunFolder.open to append")
        replace(record_journal(self.path), lock=self._lock).append(record)


def record_journal(folder: Path) -> Journal[Record]:
    repair = "delete the line to run its trial again, the other lines are complete"
    return Journal(folder / RECORDS_FILE, Record, "a record", repair, schema=1)


# --- which folder --------------------------------------------------------------------------------------------


def _folders(experiment: Experiment, out: Path) -> dict[Path, Experiment]:
    """Returns the folders of experiments of this name, by their numbers."""
    numbered = re.compile(re.escape(experiment.name) + r"-[0-9a-f]{8}(?:-(\d+))?")
    found = []
    for folder in out.glob(f"{experiment.name}-*"):
        match = numbered.fullmatch(folder.name)
        if match and (folder / EXPERIMENT_FILE).is_file():
            there = recorded_experiment(folder / EXPERIMENT_FILE)
            if there.name == experiment.name:
                found.append((int(match[1] or 1), folder, there))
    return {folder: there for _, folder, there in sorted(found, key=lambda entry: entry[:2])}


def _folder_to_resume(experiment: Experiment, out: Path) -> Path:
    there = _folders(experiment, out)
    apart = {folder: len(differences(saved, experiment)) for folder, saved in there.items()}
    if same := [folder for folder, count in apart.items() if not count]:
        return same[-1]
    if apart:
        nearest = min(apart, key=lambda folder: apart[folder])
        raise ValueError(_refusal(nearest, there[nearest], experiment))
    return _new_folder(experiment, out)


def _new_folder(experiment: Experiment, out: Path) -> Path:
    names = numbered(f"{experiment.name}-{setting_fingerprint(experiment)}")
    return next(out / name for name in names if not (out / name / EXPERIMENT_FILE).exists())


def numbered(name: str) -> Iterator[str]:
    """Yields ``name``, ``name-2``, ``name-3`` and so on."""
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def _refusal(folder: Path, there: Experiment, here: Experiment) -> str:
    fields = "".join(f"\n  {path}: {a} there, {b} here" for path, (a, b) in differences(there, here).items())
    return (
        f"{folder} holds another experiment of the name {here.name!r}:{fields}\n"
        "Give the experiment another name or out folder, or start a folder beside it with --fresh (fresh=True)"
    )
