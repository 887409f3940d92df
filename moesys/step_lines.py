"""What a training tells about its steps: one line of JSON a step, in a file for each rank of a run's folder.

A process that dies leaves whole lines and at most a torn one, which nobody reads. A run that is resumed appends; where
it repeats steps, its newest lines count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moesys.files import cut_torn_line, write_whole
from moesys.timeline import Span, Timeline

# Of a ``LayerLine``, what is drawn over steps.
SCALARS = ("load_p50", "load_p95", "experts_without_tokens", "exposed_ms", "plan_ms", "restored_mib")


@dataclass(frozen=True)
class LayerLine:
    """What one layer did in one step.

    micro_batches: how many it trained on.
    load_p50, load_p95, load_max: quantiles over the micro-batches of the busiest rank's tokens over the mean.
    experts_without_tokens: in none of the micro-batches, on no rank.
    exposed_ms, plan_ms, restored_mib: of this rank, as in ``LayerMetrics``.
    tokens_E: over ranks and micro-batches; () but for the first of the ranks that share the experts, which all have
        the same.
    """

    layer: int
    micro_batches: int
    load_p50: float
    load_p95: float
    load_max: float
    experts_without_tokens: int
    exposed_ms: float
    plan_ms: float
    restored_mib: float
    tokens_E: tuple[int, ...] = ()


@dataclass(frozen=True)
class EventLine:
    """A departure from the plan."""

    layer: int
    micro_batch: int
    what: str


@dataclass(frozen=True)
class StepLine:
    """What one rank tells about one step.

    num_ranks: that trained it. time_s: of its end, seconds since 1970. step_ms: its length by the clock.
    numbers: what the training adds, such as its loss; nan where that was no finite number.
    layers: those that ran. events: since the line before.
    """

    step: int
    num_ranks: int
    time_s: float
    step_ms: float
    numbers: dict[str, float]
    layers: tuple[LayerLine, ...]
    events: tuple[EventLine, ...] = ()

    def of_all_layers(self) -> dict[str, float]:
        """Returns each scalar of all layers together: the worst of loads, the sum of all else."""
        return {
            name: float((max if name.startswith("load") else sum)(getattr(layer, name) for layer in self.layers))
            for name in SCALARS
            if self.layers
        }

    def to_line(self) -> bytes:
        """Returns one line of JSON, which knows no nan: null stands for it."""
        fields = asdict(self)
        fields["numbers"] = {name: value if math.isfinite(value) else None for name, value in self.numbers.items()}
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> StepLine:
        """The inverse of ``to_line``. Raises ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(line)
            numbers = {name: math.nan if value is None else value for name, value in fields.pop("numbers").items()}
            layers = tuple(
                LayerLine(**layer | {"tokens_E": tuple(layer["tokens_E"])}) for layer in fields.pop("layers")
            )
            events = tuple(EventLine(**event) for event in fields.pop("events"))
            return cls(**fields, numbers=numbers, layers=layers, events=events)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


class StepFile:
    """The file of one rank in ``folder``, open to append to; what a crash tore is cut off.

    ``last``: the step of its last line; None of a new file. Raises ValueError where that is no step.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank:04d}.jsonl"
        cut_torn_line(self.path)
        self.last = _last_step(self.path) if self.path.exists() else None
        self._file = self.path.open("ab")

    def append(self, line: StepLine) -> None:
        """Writes a line, which the system has when this returns."""
        self._file.write(line.to_line())
        self._file.flush()
        self.last = line.step

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path) -> Iterator[StepLine]:
    """Gives the lines of a file as they were written, without a torn last one.

    Raises ValueError, with its number, for a whole line that is no step.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield StepLine.from_line(line)
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {path} is no step of a training ({error}); delete it, the others are whole"
                ) from None


def _last_step(path: Path) -> int | None:
    """Reads as much of the end of a file of whole lines as the last one takes."""
    most, size = 1 << 16, path.stat().st_size
    with path.open("rb") as file:
        while size:
            file.seek(max(0, size - most))
            _, newline, line = file.read().removesuffix(b"\n").rpartition(b"\n")
            if newline or most >= size:
                return StepLine.from_line(line).step
            most *= 4
    return None


def step_files(folder: Path) -> dict[int, Path]:
    """Returns the files of steps in ``folder`` by rank, in their order."""
    return _by_rank(folder, "rank", "jsonl")


def write_spans(timeline: Timeline, folder: Path, rank: int) -> None:
    """Writes what one rank did when, in place of what was written before."""
    spans = [(span.lane, span.start_us, span.end_us, span.kind, span.detail) for span in timeline.spans]
    write_whole(folder / f"spans-{rank:04d}.json", json.dumps(spans, separators=(",", ":")))


def read_spans(folder: Path) -> Timeline | None:
    """Returns the spans of all ranks that wrote theirs; None if nobody did."""
    files = _by_rank(folder, "spans", "json")
    if not files:
        return None
    return Timeline(
        (Span(rank, *span) for rank, path in files.items() for span in json.loads(path.read_text())), "measured"
    )


def _by_rank(folder: Path, stem: str, suffix: str) -> dict[int, Path]:
    matches = ((re.fullmatch(rf"{stem}-(\d+)\.{suffix}", path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))
