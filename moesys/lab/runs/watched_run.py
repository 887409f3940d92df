"""A training that ``Watch`` has watched, read from its folder and combined over ranks.

S steps that were written, L layers, E experts, N lines of one rank's file, F fields of a layer's line.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.load import IntArray
from moesys.step_lines import EventLine, StepLine, read_spans, step_files, step_journal
from moesys.timeline import Timeline

FloatArray = npt.NDArray[np.float64]

_FIELDS = ("load_p50", "load_p95", "load_max", "experts_without_tokens", "exposed_ms", "plan_ms", "restored_mib")
# The number of newest steps over which the tokens of experts are added up.
NEWEST_STEPS = 100


class RunEvent(NamedTuple):
    """An event, and the step in whose line it stands."""

    step: int
    event: EventLine


@dataclass(frozen=True, eq=False)
class WatchedRun:
    """A watched training. Arrays are float64 with nan where nothing was written; steps are those of the lowest rank.

    num_ranks: that trained the newest step. layers: ``layer_index`` of each of L.
    numbers: by name [S], those of the lowest rank.
    load_p50_SL, load_p95_SL, load_max_SL, experts_without_tokens_SL: of the lowest rank that has the layer.
    exposed_ms_SL, plan_ms_SL: means over ranks; worst_exposed_ms_SL of the rank that waits longest.
    restored_mib_SL: sums over ranks.
    tokens_E: by layer, of the newest ``NEWEST_STEPS`` steps.
    """

    folder: Path
    num_ranks: int
    layers: tuple[int, ...]
    steps_S: IntArray
    time_s_S: FloatArray
    step_ms_S: FloatArray
    numbers: dict[str, FloatArray]
    load_p50_SL: FloatArray
    load_p95_SL: FloatArray
    load_max_SL: FloatArray
    experts_without_tokens_SL: FloatArray
    exposed_ms_SL: FloatArray
    worst_exposed_ms_SL: FloatArray
    plan_ms_SL: FloatArray
    restored_mib_SL: FloatArray
    tokens_E: dict[int, IntArray]
    events: tuple[RunEvent, ...]
    timeline: Timeline | None

    def samples(self) -> dict[str, FloatArray]:
        """Returns metrics of each step [S] by their names in tables: the mean load of layers, and sums over them."""
        found = {"step_ms": self.step_ms_S}
        if self.layers:
            found["load_max_over_mean"] = np.nansum(self.load_p50_SL, axis=1) / len(self.layers)
            found["exposed_ms"] = np.nansum(self.exposed_ms_SL, axis=1)
            found["plan_ms"] = np.nansum(self.plan_ms_SL, axis=1)
            found["restored_mib"] = np.nansum(self.restored_mib_SL, axis=1)
        return found


def read_watched_run(folder: Path) -> WatchedRun:
    """Reads a folder that ``Watch`` wrote to, one rank after another.

    Raises ValueError where there is none, where no step was written yet, and for a line that is no step.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the one that ms.Watch(model, folder) writes to")
    files = step_files(folder)
    if not files:
        raise ValueError(f"{folder} has no rank-0000.jsonl; give the folder that ms.Watch(model, folder) writes to")
    lowest = next(iter(files))
    first = _RankLines.read(files[lowest])
    if not first.steps:
        raise ValueError(f"{files[lowest]} has no step yet; come back when the first one is through")
    steps_S = np.array(first.steps)[first.kept_N]
    num_ranks_S = np.array(first.num_ranks)[first.kept_N]
    columns: dict[int, _LayerColumns] = defaultdict(lambda: _LayerColumns(len(steps_S)))
    tokens_E: dict[int, IntArray] = {}
    # Most events happen on all ranks; the others name their rank.
    events: dict[RunEvent, None] = {}
    for rank in files:
        lines = first if rank == lowest else _RankLines.read(files[rank])
        # If a run is resumed with fewer ranks, the old lines of the other ranks stay behind.
        lines.fold_into(columns, steps_S, num_ranks_S > rank)
        tokens_E = lines.tokens_E() | tokens_E
        wanted = set(steps_S[num_ranks_S > rank].tolist())
        events |= {event: None for line, event in lines.events if lines.kept_N[line] and event.step in wanted}
    by_layer = [columns[layer].by_name() for layer in sorted(columns)]
    return WatchedRun(
        folder=folder,
        num_ranks=int(num_ranks_S[-1]),
        layers=tuple(sorted(columns)),
        steps_S=steps_S,
        time_s_S=np.array(first.times_s)[first.kept_N],
        step_ms_S=np.array(first.steps_ms)[first.kept_N],
        numbers=first.numbers_S(),
        **{f"{name}_SL": _beside([of[name] for of in by_layer], steps_S) for name in (*_FIELDS, "worst_exposed_ms")},
        tokens_E=dict(sorted(tokens_E.items())),
        events=tuple(sorted(events, key=lambda event: event.step)),
        timeline=read_spans(folder),
    )


def _beside(columns: list[FloatArray], steps_S: IntArray) -> FloatArray:
    """Returns columns [S] as one array [S, L], of which there may be none."""
    return np.column_stack(columns) if columns else np.zeros((len(steps_S), 0))


class _LayerColumns:
    """The numbers of one layer over steps, while ranks are combined."""

    def __init__(self, num_steps: int) -> None:
        self._loads_4S = np.full((4, num_steps), np.nan)
        self._worst_exposed_ms_S = np.full(num_steps, np.nan)
        self._sums_3S = np.zeros((3, num_steps))
        self._num_ranks_S = np.zeros(num_steps)

    def add(self, fields_NF: FloatArray, position_N: IntArray) -> None:
        """Adds the lines of a rank, each of another step."""
        there = self._loads_4S[:, position_N]
        self._loads_4S[:, position_N] = np.where(np.isnan(there), fields_NF[:, :4].T, there)
        self._worst_exposed_ms_S[position_N] = np.fmax(self._worst_exposed_ms_S[position_N], fields_NF[:, 4])
        self._sums_3S[:, position_N] += fields_NF[:, 4:].T
        self._num_ranks_S[position_N] += 1

    def by_name(self) -> dict[str, FloatArray]:
        """Returns the columns [S] of ``_FIELDS``, and that of the rank that waits longest."""
        exposed_S, plan_S, restored_S = np.where(self._num_ranks_S > 0, self._sums_3S, np.nan)
        num_ranks_S = np.maximum(self._num_ranks_S, 1)
        of_ranks = (exposed_S / num_ranks_S, plan_S / num_ranks_S, restored_S)
        columns = dict(zip(_FIELDS, (*self._loads_4S, *of_ranks), strict=True))
        return columns | {"worst_exposed_ms": self._worst_exposed_ms_S}


class _RankLines:
    """All lines of one rank's file, by columns; ``kept_N`` are those that count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[int] = []
        self.num_ranks: list[int] = []
        self.times_s: list[float] = []
        self.steps_ms: list[float] = []
        self.events: list[tuple[int, RunEvent]] = []
        self.kept_N = np.zeros(0, dtype=bool)
        self._numbers: dict[str, dict[int, float]] = defaultdict(dict)
        # The numbers of lines of each layer, and F fields of each line.
        self._lines: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self._fields: dict[int, array[float]] = defaultdict(lambda: array("d"))
        self._newest: deque[tuple[int, StepLine]] = deque(maxlen=NEWEST_STEPS)

    @classmethod
    def read(cls, path: Path) -> _RankLines:
        found = cls(path)
        for number, line in enumerate(step_journal(path).read()):
            found._add(number, line)
        # A line counts if no later one is of the same step or of one before: there the run began again.
        steps_N = np.array(found.steps, dtype=np.int64)
        later_N = np.append(np.minimum.accumulate(steps_N[::-1])[::-1][1:], np.iinfo(np.int64).max)
        found.kept_N = steps_N < later_N[: len(steps_N)]
        return found

    def _add(self, number: int, line: StepLine) -> None:
        self.steps.append(line.step)
        self.num_ranks.append(line.num_ranks)
        self.times_s.append(line.time_s)
        self.steps_ms.append(line.step_ms)
        self.events += [(number, RunEvent(line.step, event)) for event in line.events]
        for name, value in line.numbers.items():
            self._numbers[name][number] = value
        for layer in line.layers:
            self._lines[layer.layer].append(number)
            self._fields[layer.layer].extend(getattr(layer, name) for name in _FIELDS)
        self._newest.append((number, line))

    def numbers_S(self) -> dict[str, FloatArray]:
        """Returns the numbers of the lines that count, by name."""
        kept = np.flatnonzero(self.kept_N).tolist()
        return {name: np.array([of.get(line, np.nan) for line in kept]) for name, of in self._numbers.items()}

    def fold_into(self, columns: dict[int, _LayerColumns], steps_S: IntArray, wanted_S: npt.NDArray[np.bool_]) -> None:
        """Adds what is known of the steps that are wanted: another rank may be one ahead or behind."""
        steps_N = np.array(self.steps, dtype=np.int64)
        position_N = np.searchsorted(steps_S, steps_N).clip(max=len(steps_S) - 1)
        known_N = self.kept_N & (steps_S[position_N] == steps_N) & wanted_S[position_N]
        for layer, lines in self._lines.items():
            lines_N = np.array(lines)
            fields_NF = np.array(self._fields[layer]).reshape(-1, len(_FIELDS))
            here = known_N[lines_N]
            columns[layer].add(fields_NF[here], position_N[lines_N[here]])

    def tokens_E(self) -> dict[int, IntArray]:
        """Returns the tokens of each layer whose tokens this rank wrote, in the newest lines."""
        totals: dict[int, IntArray] = {}
        for number, line in self._newest:
            for layer in line.layers:
                if self.kept_N[number] and layer.tokens_E:
                    tokens_E = np.array(layer.tokens_E, dtype=np.int64)
                    if (total_E := totals.setdefault(layer.layer, np.zeros_like(tokens_E))).shape != tokens_E.shape:
                        raise ValueError(
                            f"{self.path}: step {line.step} has {len(tokens_E)} experts in layer {layer.layer}, and a "
                            f"step before it {len(total_E)}; delete the line"
                        )
                    total_E += tokens_E
        return totals
