"""The journal of a tuning: one JSON line per finding, so that a tuning that was stopped resumes where it was.

A search is a function of its seed and of the costs of its points. To resume it, the search runs again and takes every
cost that is in the journal from there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pydantic_core
from pydantic import ConfigDict

from moesys.config import Strategy
from moesys.files import FolderLock, append_line, cut_torn_line, read_bytes
from moesys.journal import Journal

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
