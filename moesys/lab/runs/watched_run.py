"""A training that ``Watch`` has watched, read from its folder and combined over ranks.

S steps that were written, L layers, E experts, N lines of one rank's file, F fields of a layer's line.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.load import IntArray
from moesys.step_lines import EventLine, StepLine, step_files, step_journal

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
    of_layers: by name [S, L]. load_p50, load_p95, load_max and experts_without_tokens are of the lowest rank that has
        the layer, exposed_ms and plan_ms means over ranks, worst_exposed_ms of the rank that waits longest,
        restored_mib sums over ranks.
    tokens_E: by layer, of the newest ``NEWEST_STEPS`` steps.
    """

    folder: Path
    num_ranks: int
    layers: tuple[int, ...]
    steps_S: IntArray
    time_s_S: FloatArray
    step_ms_S: FloatArray
    numbers: dict[str, FloatArray]
    of_layers: dict[str, FloatArray]
    tokens_E: dict[int, IntArray]
    events: tuple[RunEvent, ...]

    def samples(self) -> dict[str, FloatArray]:
        """Returns metrics of each step [S] by their names in tables: the mean load of layers, and sums over them."""
        found = {"step_ms": self.step_ms_S}
        if self.layers:
            sums = {name: np.nansum(of_layers_SL, axis=1) for name, of_layers_SL in self.of_layers.items()}
            found["load_max_over_mean"] = sums["load_p50"] / len(self.layers)
            found |= {name: sums[name] for name in ("exposed_ms", "plan_ms", "restored_mib")}
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
    first, tokens_E = _read(files[lowest])
    if not first:
        raise ValueError(f"{files[lowest]} has no step yet; come back when the first one is through")
    steps_S = np.array([line.step for line in first])
    place_of = {line.step: place for place, line in enumerate(first)}
    columns: dict[int, _LayerColumns] = defaultdict(lambda: _LayerColumns(len(steps_S)))
    # Most events happen on all ranks; the others name their rank.
    events: dict[RunEvent, None] = {}
    for rank, path in files.items():
        lines, tokens_of_rank = (first, tokens_E) if rank == lowest else _read(path)
        tokens_E = tokens_of_rank | tokens_E
        # A rank may be a step ahead. If a run is resumed with fewer ranks, the old lines of the others stay behind.
        lines = [each for each in lines if each.step in place_of and first[place_of[each.step]].num_ranks > rank]
        events |= {RunEvent(line.step, event): None for line in lines for event in line.events}
        if lines:
            layer_N = np.concatenate([line.layers for line in lines])
            fields_NF = np.concatenate([line.fields_LF for line in lines])
            place_N = np.repeat([place_of[line.step] for line in lines], [len(line.layers) for line in lines])
            for layer in np.unique(layer_N).tolist():
                columns[layer].add(fields_NF[layer_N == layer], place_N[layer_N == layer])
    by_layer = [columns[layer].by_name() for layer in sorted(columns)]
    return WatchedRun(
        folder=folder,
        num_ranks=first[-1].num_ranks,
        layers=tuple(sorted(columns)),
        steps_S=steps_S,
        time_s_S=np.array([line.time_s for line in first]),
        step_ms_S=np.array([line.step_ms for line in first]),
        numbers={
            name: np.array([line.numbers.get(name, np.nan) for line in first])
            for name in dict.fromkeys(name for line in first for name in line.numbers)
        },
        of_layers={name: _beside([of[name] for of in by_layer], steps_S) for name in (*_FIELDS, "worst_exposed_ms")},
        tokens_E=dict(sorted(tokens_E.items())),
        events=tuple(sorted(events, key=lambda event: event.step)),
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


class _Line(NamedTuple):
    """The line of a step without its tokens; F fields of each of the step's layers."""

    step: int
    num_ranks: int
    time_s: float
    step_ms: float
    numbers: dict[str, float]
    layers: IntArray
    fields_LF: FloatArray
    events: tuple[EventLine, ...]


def _read(path: Path) -> tuple[list[_Line], dict[int, IntArray]]:
    """Returns the lines of one rank that count, and the tokens of each layer whose tokens the rank wrote, in the newest
    of them. Where a run began again, only lines before that step and those written since count.
    """
    lines: list[_Line] = []
    newest: deque[StepLine] = deque(maxlen=NEWEST_STEPS)
    both: tuple[Any, ...] = lines, newest
    for line in step_journal(path).read():
        for earlier in both:
            while earlier and earlier[-1].step >= line.step:
                earlier.pop()
        layers = np.array([layer.layer for layer in line.layers], dtype=np.int64)
        fields_LF = np.array([[getattr(layer, name) for name in _FIELDS] for layer in line.layers], dtype=np.float64)
        of_line = (line.step, line.num_ranks, line.time_s, line.step_ms, line.numbers)
        lines.append(_Line(*of_line, layers, fields_LF.reshape(-1, len(_FIELDS)), line.events))
        newest.append(line)
    totals: dict[int, IntArray] = {}
    for line in newest:
        for layer in line.layers:
            if layer.tokens_E:
                tokens_E = np.array(layer.tokens_E, dtype=np.int64)
                if (total_E := totals.setdefault(layer.layer, np.zeros_like(tokens_E))).shape != tokens_E.shape:
                    raise ValueError(
                        f"{path}: step {line.step} has {len(tokens_E)} experts in layer {layer.layer}, and a step "
                        f"before it {len(total_E)}; delete the line"
                    )
                total_E += tokens_E
    return lines, totals
