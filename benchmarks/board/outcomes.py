"""What became of every planner in every setting: lines of JSON in a folder, so that a crash loses one at most."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from benchmarks.board.contests import Entry, Group, Setting
from benchmarks.board.play import Scores, play
from benchmarks.board.workloads import SCORED, WARM_UP
from moesys.lab.show.steps import steps_told
from moesys.load import IntArray
from moesys.whole_file import append_line

SCHEMA = 1
FILE = "results.jsonl"
# Rooms from which no planned or simulated number follows.
_NOT_OF_NUMBERS = {"kernels", "overlap", "moe", "hf", "train", "tuner", "lab"}


@dataclass(frozen=True)
class Outcome:
    """A line: one planner in one group, setting and sample. ``key`` is of all that its numbers follow from."""

    key: str
    group: str
    workload: str
    model: str
    cluster: str
    slots: int
    planner: str
    sample: int
    scores: Scores

    @property
    def setting(self) -> tuple[str, str, str]:
        return self.workload, self.model, self.cluster

    def to_line(self) -> bytes:
        return json.dumps({"schema": SCHEMA, **asdict(self)}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Raises ValueError for what is no line of this schema."""
        try:
            fields: dict[str, Any] = json.loads(line)
            if (schema := fields.pop("schema", None)) != SCHEMA:
                raise ValueError(f"it has schema {schema}, and this moesys reads {SCHEMA}")
            return cls(scores=Scores(**fields.pop("scores")), **fields)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"it is no outcome: {error}") from None


@dataclass(frozen=True)
class Case:
    """What one line will be about."""

    setting: Setting
    group: Group
    entry: Entry
    sample: int


def cases(settings: Sequence[Setting], groups: Sequence[Group], num_samples: int) -> list[Case]:
    """Sample by sample, so that a board that is not through yet has all settings. Those of one layout follow one
    another.
    """
    return [
        Case(setting, group, entry, sample)
        for sample in range(num_samples)
        for setting in settings
        for group in groups
        for entry in sorted(group.entries, key=lambda entry: _place(group, entry))
    ]


def outcomes(asked: Sequence[Case], folder: Path) -> list[Outcome]:
    """Plays what ``folder`` has no line of, and gives the lines of all. The folder is locked by who calls."""
    path, keys = folder / FILE, _keys(asked)
    known = {outcome.key: outcome for outcome in written(path)}
    missing = [case for case, key in zip(asked, keys, strict=True) if key not in known]
    key_of = dict(zip(asked, keys, strict=True))
    rounds = [list(of_one) for _, of_one in groupby(missing, lambda case: (case.setting, case.sample))]
    with steps_told("leaderboard", len(rounds)) as tell:
        for of_one in rounds:
            tell(f"{of_one[0].setting.name}, seed {of_one[0].sample}")
            for outcome in _played(of_one, key_of):
                append_line(path, outcome.to_line())
                known[outcome.key] = outcome
    return [known[key] for key in keys]


def written(path: Path) -> Iterator[Outcome]:
    """Lines of a file that may not be there. A torn last one is none.

    Raises ValueError, with its number, for a whole line that is no outcome.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            yield Outcome.from_line(line)
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} cannot be read: {error}; delete the line to play it again, or give another "
                "folder"
            ) from None


def _played(of_one: Iterable[Case], key_of: dict[Case, str]) -> Iterator[Outcome]:
    for (group, _), of_layout in groupby(of_one, lambda case: (case.group, case.entry.balance)):
        together = {case.entry: case for case in of_layout}
        first = next(iter(together.values()))
        slots = group.slots(first.setting.model, first.setting.cluster)
        names = first.setting.workload.name, first.setting.model_name, first.setting.cluster_name
        for entry, scores in play(first.setting, group, tuple(together), first.sample):
            key = key_of[together[entry]]
            yield Outcome(key, group.name, *names, slots, entry.name, first.sample, scores)


def _keys(asked: Iterable[Case]) -> list[str]:
    keys = []
    for (setting, sample), of_one in groupby(asked, lambda case: (case.setting, case.sample)):
        tokens_SRE = setting.workload.tokens_SRE(setting.model, setting.cluster, sample)
        keys += [_key(case, _digest(tokens_SRE)) for case in of_one]
    return keys


def _key(case: Case, routing: str) -> str:
    """Of one's own planners the source counts too, and so does all of ours that numbers follow from."""
    group, entry = case.group, case.entry
    parts = (entry.balance, entry.split, case.setting.model, case.setting.cluster)
    rules = group.sharding, group.slots(case.setting.model, case.setting.cluster), group.lag, group.late_slots
    names = case.setting.workload.name, group.name, str(case.sample)
    said = [*(part.fingerprint() for part in parts), routing, repr(rules), *names, repr((WARM_UP, SCORED))]
    said.append(_digest_of_moesys())
    return sha256("\n".join(said).encode()).hexdigest()[:24]


@cache
def _digest_of_moesys() -> str:
    root, found = Path(__file__).parents[2], sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in _NOT_OF_NUMBERS:
            found.update(path.read_bytes())
    return found.hexdigest()


def _digest(tokens_SRE: IntArray) -> str:
    return sha256(repr(tokens_SRE.shape).encode() + tokens_SRE.astype("<i8").tobytes()).hexdigest()


def _place(group: Group, entry: Entry) -> int:
    """Of the first entry with the same balance."""
    return next(place for place, other in enumerate(group.entries) if other.balance == entry.balance)
