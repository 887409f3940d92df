"""Journals: files of JSON lines that outlive a crash, so that work which was stopped resumes where it was.

A process that dies leaves complete lines and at most an incomplete one at the end. That line is not read, and the next
one that is appended replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from moesys.config.base import in_words
from moesys.files import FolderLock, append_line, cut_torn_line, opened

T = TypeVar("T")


@dataclass(frozen=True)
class Journal(Generic[T]):
    """The lines of ``path``, which need not exist yet; each is a ``kind``, such as a frozen dataclass, in JSON.

    noun: the name of a line in errors, such as "a record". repair: what to do about a line that cannot be read.
    schema: a number that each line begins with; None for lines without. A line with another number is not read.
    """

    path: Path
    kind: type[T]
    noun: str = "an entry"
    repair: str = "delete the line; the other lines are complete"
    schema: int | None = None
    lock: FolderLock | None = None
    _adapter: TypeAdapter[T] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind: Any = self.kind
        object.__setattr__(self, "_adapter", _adapter_of(kind))

    def append(self, entry: T, *, sync: bool = True) -> None:
        """Writes a line in one write. It is on the disk when this returns, or with ``sync=False`` with the system.

        Raises OSError if not all of it was taken, and ValueError if ``lock`` is no longer that of the folder.
        """
        append_line(self.path, self.to_line(entry), sync=sync, lock=self.lock)

    def read(self) -> Iterator[T]:
        """Yields the entries as they were written, without an incomplete last line.

        Raises ValueError, with the number of the line, for a complete line that is no entry.
        """
        if not self.path.exists():
            return
        with opened(self.path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield self._entry(f"line {number}", line[:-1])

    def last(self) -> T | None:
        """Returns the last entry, from as much of the end of the file as it takes; None if there is none."""
        if not self.path.exists():
            return None
        cut_torn_line(self.path)
        most, size = 1 << 16, self.path.stat().st_size
        with opened(self.path) as file:
            while size:
                file.seek(max(0, size - most))
                _, newline, line = file.read().removesuffix(b"\n").rpartition(b"\n")
                if newline or most >= size:
                    return self._entry("the last line", line)
                most *= 4
        return None

    def _entry(self, which: str, line: bytes) -> T:
        try:
            return self.from_line(line)
        except ValueError as error:
            raise ValueError(f"{which} of {self.path} is not {self.noun}: {error}; {self.repair}") from None

    def to_line(self, entry: T) -> bytes:
        line = self._adapter.dump_json(entry) + b"\n"
        return line if self.schema is None else b'{"schema":%d,' % self.schema + line[1:]

    def from_line(self, line: bytes) -> T:
        """Raises ValueError, in one line, for anything else than a line of ``to_line``."""
        fields = pydantic_core.from_json(line)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        if self.schema is not None and (schema := fields.pop("schema", None)) != self.schema:
            raise ValueError(
                f"it has schema {schema}, and this moesys reads schema {self.schema}; use the moesys that wrote it, or "
                "another folder"
            )
        try:
            return self._adapter.validate_python(fields)
        except ValidationError as error:
            raise ValueError(in_words(error)) from None


@cache
def _adapter_of(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
