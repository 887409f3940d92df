"""Keeps what a tuning found out: one JSON line a point and stage, so that one that was killed goes on where it was.

A search is a function of its seed and of what its points cost. So going on is searching again, with every cost that is
in the journal taken from there.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from moesys.config import Strategy

JOURNAL_SCHEMA = 1

Stage = Literal["pruned", "simulated", "measured", "refused"]


@dataclass(frozen=True)
class Entry:
    """One finding about one strategy.

    fingerprint: of the strategy; ``name``, in words; ``strategy``, all its fields.
    stage: ``pruned``, by closed forms; ``simulated``; ``measured``; ``refused``, by the cost model or by a failure.
    of: what ``ms`` is of: ``20 steps of seeds 0, 1``, or ``seed 3``. Costs of other words cannot be compared. What is
        too large has no ``ms``, and ``memory 80 GB`` here.
    ms: a step's milliseconds: a lower bound where it is pruned; None where there is none.
    reason: why it was pruned or refused.
    steps_ms: of each step that ``ms`` is the mean of, by seed, where it is simulated.
    """

    fingerprint: str
    name: str
    stage: Stage
    of: str
    ms: float | None = None
    reason: str = ""
    strategy: dict[str, Any] = field(default_factory=dict)
    steps_ms: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def about(cls, strategy: Strategy, stage: Stage, of: str, ms: float | None, reason: str = "") -> Self:
        fields = strategy.model_dump(mode="json", exclude_none=True)
        return cls(strategy.fingerprint(), strategy.name, stage, of, ms, reason, fields)

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Raises ValueError for what is no entry."""
        try:
            entry = cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(str(error)) from None
        if entry.stage not in get_args(Stage):
            raise ValueError(f"stage={entry.stage!r} is none of {', '.join(get_args(Stage))}")
        none = entry.ms is None and entry.stage in ("pruned", "refused")
        if not none and not (isinstance(entry.ms, int | float) and 0 <= entry.ms < math.inf):
            raise ValueError(f"ms={entry.ms!r} of stage={entry.stage!r} are no milliseconds")
        return entry


class Journal:
    """A file of entries, or without ``path`` what is remembered while it lives.

    ``setting``: words by name for all that costs depend on besides the strategy. The first line of the file has them.

    Raises ValueError for a file of another setting, or with a whole line that is no entry. A last line that was torn by
    a kill is cut off.
    """

    def __init__(self, path: Path | None, setting: dict[str, str]) -> None:
        self.path = path
        self._found: dict[tuple[str, str, bool], Entry] = {}
        if path is None:
            return
        head = json.dumps({"schema": JOURNAL_SCHEMA, "setting": setting}).encode() + b"\n"
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if not whole:
            path.write_bytes(head)
        elif whole != text:
            os.truncate(path, len(whole))
        lines = (whole or head).splitlines()
        self._check(lines[0], setting)
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._keep(Entry.from_line(line))
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {path} is no entry of a tuning: {error}; delete the line to find it out again"
                ) from None

    def _check(self, line: bytes, setting: dict[str, str]) -> None:
        try:
            head = json.loads(line)
            schema, there = head["schema"], head["setting"]
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

    def find(self, fingerprint: str, of: str, *, pruned: bool = False) -> Entry | None:
        """What it cost or why it was refused; with ``pruned``, what ruled it out before anybody tried."""
        return self._found.get((fingerprint, of, pruned))

    def add(self, entry: Entry) -> Entry:
        """Written when this returns; on the disk where a clock was waited for."""
        if self.path is not None:
            with self.path.open("ab", buffering=0) as file:
                file.write(entry.to_line())
                if entry.stage == "measured":
                    os.fsync(file.fileno())
        self._keep(entry)
        return entry

    def entries(self) -> tuple[Entry, ...]:
        """The newest for each strategy and what it is of; bounds beside costs."""
        return tuple(self._found.values())

    def _keep(self, entry: Entry) -> None:
        self._found[entry.fingerprint, entry.of, entry.stage == "pruned"] = entry
