"""Memory of which nobody sees more than he must: who has stored what when, and who is bound to know it.

Every agent (a program of a kernel, or a stream of a rank) has a slot, and counts intervals, which its barriers end. Its
view says of each slot until which interval it knows everything. A plain load may return any value of a word that is not
older than the newest one that its agent knows. An atomic sees the newest; one that releases leaves its agent's view at
its word, and one that acquires takes the views that lie there.

A barrier stands between threads of one program: what its agent has stored since the last one, and what it has acquired,
it does not know yet, as another thread did. Nor may it hand that on. So its own accesses need barriers between them as
those of others need a release and an acquire. Atomics on single words are the exception: one thread, its lead, makes
all of them, in order, and a single store behind them depends on what they found.

What no view orders is a finding: any load that had several values to choose from, and any store that what came before
could still be mistaken for.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from triton._C.libtriton import interpreter as native

# Bytes of a word, of which a store knows who made it: what is narrower shares one.
WORD = 4


class Segment(NamedTuple):
    """``num_bytes`` from address ``start`` on; ``name``: what findings say."""

    start: int
    num_bytes: int
    name: str


class Overwritten(NamedTuple):
    """Values before a store, and when they had been stored."""

    index: np.ndarray
    address: np.ndarray
    values: np.ndarray
    slot: np.ndarray
    interval: np.ndarray


class Cell:
    """A word that atomics have touched: until when each slot has, and has changed it, and the views that lie there, for
    everybody and for the programs of one rank.
    """

    def __init__(self, num_slots: int, num_ranks: int) -> None:
        self.accessed = np.zeros(num_slots, dtype=np.int64)
        self.changed = np.zeros(num_slots, dtype=np.int64)
        self.everybody = np.zeros(num_slots, dtype=np.int64)
        self.of_rank = [np.zeros(num_slots, dtype=np.int64) for _ in range(num_ranks)]
        self.version = 0
        # Ranks that have touched it, and whether by an atomic that only one GPU sees.
        self.ranks: set[int] = set()
        self.narrow = False
        # What the atomic under way must not change: where somebody has loaded, who, and when.
        self.unknown: tuple[Space, int, int, int] | None = None


class Space:
    """Segments with what is known of their words; ``slots``: who may touch them."""

    def __init__(self, segments: Iterable[Segment], slots: range) -> None:
        self.segments = sorted(segments)
        self.slots = slots
        self.starts = [segment.start for segment in self.segments]
        self._starts = np.array(self.starts, dtype=np.int64)
        self.ends = np.array([segment.start + segment.num_bytes for segment in self.segments], dtype=np.int64)
        words = [-(-segment.num_bytes // WORD) + 1 for segment in self.segments]
        first = np.concatenate([[0], np.cumsum(words)])
        self.shift = first[:-1] - self._starts // WORD
        self._ends, self._shift = self.ends.tolist(), self.shift.tolist()
        num_words = int(first[-1])
        self.slot = np.zeros(num_words, dtype=np.int64)
        self.interval = np.zeros(num_words, dtype=np.int64)
        self.read = np.zeros((num_words, len(slots)), dtype=np.int64)
        self.cells: dict[int, Cell] = {}
        self.is_cell = np.zeros(num_words, dtype=bool)
        self.log: list[Overwritten] = []

    def word(self, address: int) -> int | None:
        """The number of its word; None where it is of another space, or of none."""
        place = bisect_right(self.starts, address) - 1
        if place < 0 or address >= self._ends[place]:
            return None
        return address // WORD + self._shift[place]

    def holds(self, address: np.ndarray) -> np.ndarray:
        """Which addresses are its own."""
        low, high = int(address.min()), int(address.max())
        place = bisect_right(self.starts, low) - 1
        if place >= 0 and high < self._ends[place]:
            return _ones(len(address))
        places = np.searchsorted(self._starts, address, "right") - 1
        return (places >= 0) & (address < self.ends[places])

    def index(self, address: np.ndarray) -> np.ndarray | None:
        """The same of several addresses."""
        low, high = int(address.min()), int(address.max())
        place = bisect_right(self.starts, low) - 1
        if place < 0 or low >= self.ends[place]:
            return None
        if high < self.ends[place]:
            return address // WORD + self.shift[place]
        places = np.searchsorted(self._starts, address, "right") - 1
        if not (address < self.ends[places]).all():
            return None
        return address // WORD + self.shift[places]

    def end(self, whose: str) -> None:
        """Nobody may reach segments whose names end so any more."""
        for place, segment in enumerate(self.segments):
            if segment.name.endswith(whose):
                self.ends[place] = self._ends[place] = segment.start

    def name_of(self, address: int) -> str:
        segment = self.segments[bisect_right(self.starts, address) - 1]
        return f"{segment.name} + {address - segment.start}"


@dataclass(eq=False)
class Agent:
    """Whoever loads and stores: a program, or a stream. ``view``: of each slot, until which interval it knows all."""

    name: str
    rank: int
    slot: int
    view: np.ndarray
    interval: int
    # What its lead knows, which counts its atomics in a slot of its own; and what other threads have acquired.
    lead_view: np.ndarray = field(init=False)
    acquired: np.ndarray = field(init=False)
    spaces: Sequence[Space] = ()
    # Atomics since it last waited: where, and the version of what they found.
    polled: dict[int, tuple[str, Cell, int]] = field(default_factory=dict)
    # Whether it waits, since when, and whether it has napped since it last asked for the time.
    waits: bool = False
    napped: bool = False
    since_ns: int = 0

    def __post_init__(self) -> None:
        self.lead_view, self.acquired = self.view.copy(), self.view.copy()

    @property
    def lead(self) -> int:
        return self.slot + len(self.view) // 2

    def barrier(self) -> None:
        """Its threads know what each of them did and acquired."""
        np.maximum(self.view, self.acquired, out=self.view)
        np.maximum(self.view, self.lead_view, out=self.view)
        self.view[self.slot] = self.interval
        self.lead_view[:] = self.view
        self.interval += 1


class ClockedMemory:
    """What agents load and store by. ``stale``: how likely a load that may choose takes an older value."""

    def __init__(self, num_slots: int, num_ranks: int, choices: random.Random, stale: float) -> None:
        self._num_slots, self._num_ranks = num_slots, num_ranks
        self._choices, self._stale = choices, stale
        self.findings: list[str] = []
        # Once somebody has given up all go on with what is there; but what he reports must be read.
        self.lenient = False
        self._names: dict[int, list[tuple[int, str]]] = {}

    def begin(self, agent: Agent) -> None:
        """From now on its slot is its own."""
        self._names.setdefault(agent.slot, []).append((agent.interval, agent.name))

    def load(self, agent: Agent, address: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Values at addresses int64 [n], which may be of several spaces."""
        values = np.zeros(len(address), dtype)
        left = _ones(len(address))
        for space in agent.spaces:
            inside = left & space.holds(address)
            if inside.any():
                values[inside] = self._load(agent, space, address[inside], dtype)
                left = left & ~inside
        if left.any():
            raise RuntimeError(f"{agent.name} reaches outside of all memory: {address[left].tolist()}")
        return values

    def _load(self, agent: Agent, space: Space, address: np.ndarray, dtype: np.dtype) -> np.ndarray:
        index = space.index(address)
        assert index is not None
        slot, interval = space.slot[index], space.interval[index]
        space.read[index, agent.slot - space.slots.start] = agent.interval
        values = native.load(address.view(np.uint64), _ones(len(address)), np.zeros(len(address), dtype), dtype)
        unknown = agent.view[slot] < interval
        if unknown.any():
            lanes = np.flatnonzero(unknown)
            first = lanes[0]
            self._find_fault(agent, space, int(address[first]), slot[first], interval[first], "loads what is stored by")
            for lane in lanes.tolist():
                values[lane] = self._chosen(agent, space, int(index[lane]), int(address[lane]), values[lane])
        if space.cells:
            self._plain_on_cells(agent, space, index, address, "loads")
        return values

    def load_word(self, agent: Agent, address: int, dtype: np.dtype) -> np.ndarray:
        """The same of one address, quicker where there is nothing to choose."""
        at = np.array([address], dtype=np.int64)
        for space in agent.spaces:
            index = space.word(address)
            if index is not None:
                if index in space.cells or agent.view[space.slot[index]] < space.interval[index]:
                    break
                space.read[index, agent.slot - space.slots.start] = agent.interval
                return native.load(at.view(np.uint64), _ones(1), np.zeros(1, dtype), dtype)
        return self.load(agent, at, dtype)

    def store(self, agent: Agent, address: np.ndarray, values: np.ndarray) -> None:
        """``values`` at addresses int64 [n], all different."""
        space, index = self._find(agent, address)
        slot, interval = space.slot[index], space.interval[index]
        view = agent.lead_view if len(address) == 1 else agent.view
        unknown = view[slot] < interval
        if unknown.any():
            first = np.flatnonzero(unknown)[0]
            self._find_fault(
                agent, space, int(address[first]), slot[first], interval[first], "stores what is stored by"
            )
        slots = space.slots
        unread = space.read[index] > view[slots.start : slots.stop]
        if unread.any():
            lane, reader = (int(each[0]) for each in np.nonzero(unread))
            since = space.read[index][lane, reader]
            self._find_fault(agent, space, int(address[lane]), reader + slots.start, since, "stores what is loaded by")
        if space.cells:
            self._plain_on_cells(agent, space, index, address, "stores")
        raw, ones = address.view(np.uint64), _ones(len(address))
        before = native.load(raw, ones, np.zeros_like(values), values.dtype)
        space.log.append(Overwritten(index, address, before, slot, interval))
        native.store(raw, values, ones)
        space.slot[index], space.interval[index] = agent.slot, agent.interval

    def atomic(self, agent: Agent, address: int, sem: str, scope: str, alone: bool) -> Cell:
        """Before an atomic on a word, ``alone`` or one of several lanes: what it orders. Then the caller carries it
        out, and says if it has changed something.
        """
        space, (index,) = self._find(agent, np.array([address], dtype=np.int64))
        cell = space.cells.get(index)
        if cell is None:
            cell = space.cells[index] = Cell(self._num_slots, self._num_ranks)
            space.is_cell[index] = True
        if alone:
            agent.lead_view[agent.lead] += 1
        view = agent.lead_view if alone else agent.view
        if view[space.slot[index]] < space.interval[index]:
            other, since = space.slot[index], space.interval[index]
            self._find_fault(agent, space, address, other, since, "has an atomic on what is stored by")
        slots = space.slots
        cell.unknown = None
        readers = np.flatnonzero(space.read[index] > view[slots.start : slots.stop])
        if len(readers):
            cell.unknown = space, address, readers[0] + slots.start, int(space.read[index, readers[0]])
        cell.ranks.add(agent.rank)
        cell.narrow |= scope == "gpu"
        if cell.narrow and len(cell.ranks) > 1:
            self.findings.append(
                f"{agent.name} has an atomic that one GPU sees between ranks: {space.name_of(address)}"
            )
        gained = agent.lead_view if alone else agent.acquired
        if sem in ("acquire", "acq_rel"):
            np.maximum(gained, cell.of_rank[agent.rank], out=gained)
            if scope == "sys":
                np.maximum(gained, cell.everybody, out=gained)
        if sem in ("release", "acq_rel"):
            np.maximum(cell.of_rank[agent.rank], view, out=cell.of_rank[agent.rank])
            if scope == "sys":
                np.maximum(cell.everybody, view, out=cell.everybody)
        if alone:
            cell.accessed[agent.lead] = agent.lead_view[agent.lead]
        else:
            cell.accessed[agent.slot] = agent.interval
        name = space.name_of(address)
        if not name.startswith("seen_ns"):
            # The first of them, as lanes may ask for the same word.
            agent.polled.setdefault(address, (name, cell, cell.version))
        return cell

    def change(self, agent: Agent, cell: Cell, alone: bool) -> None:
        """It has: until then it is a load beside others' loads."""
        if cell.unknown is not None:
            self._find_fault(agent, *cell.unknown, "has an atomic on what is loaded by")
        cell.version += 1
        slot = agent.lead if alone else agent.slot
        cell.changed[slot] = cell.accessed[slot]

    def acquire_word(self, agent: Agent, address: int) -> None:
        """A host has looked at a word, and goes by what it says."""
        space, index = self._find(agent, np.array([address], dtype=np.int64))
        cell = space.cells.get(int(index[0]))
        if cell is not None:
            np.maximum(agent.acquired, cell.everybody, out=agent.acquired)
            np.maximum(agent.acquired, cell.of_rank[agent.rank], out=agent.acquired)
            agent.barrier()

    def _find(self, agent: Agent, address: np.ndarray) -> tuple[Space, np.ndarray]:
        for space in agent.spaces:
            index = space.index(address)
            if index is not None:
                return space, index
        raise RuntimeError(f"{agent.name} reaches outside of all memory: {address.tolist()}")

    def _plain_on_cells(self, agent: Agent, space: Space, index: np.ndarray, address: np.ndarray, does: str) -> None:
        for lane in np.flatnonzero(space.is_cell[index]).tolist():
            cell = space.cells[int(index[lane])]
            known = agent.lead_view if does == "stores" and len(address) == 1 else agent.view
            others = np.flatnonzero((cell.accessed if does == "stores" else cell.changed) > known)
            if len(others):
                since = int(cell.accessed[others[0]])
                self._find_fault(agent, space, int(address[lane]), others[0], since, f"{does} what has an atomic of")
            if does == "stores":
                cell.everybody[:] = 0
                for view in cell.of_rank:
                    view[:] = 0

    def _chosen(self, agent: Agent, space: Space, index: int, address: int, newest: object) -> object:
        """One of the values that a load may return: the newest, or what it replaced, back to what the agent knows."""
        if self._choices.random() >= self._stale:
            return newest
        found = []
        for entry in reversed(space.log):
            for lane in np.flatnonzero((entry.index == index) & (entry.address == address)).tolist():
                found.append(entry.values[lane])
                if agent.view[entry.slot[lane]] >= entry.interval[lane]:
                    return self._choices.choice(found)
        return self._choices.choice(found) if found else newest

    def _find_fault(self, agent: Agent, space: Space, address: int, other: int, interval: int, what: str) -> None:
        name = space.name_of(address)
        if self.lenient and "report" not in name:
            return
        names = self._names[other % (self._num_slots // 2)]
        whose = names[-1 if other >= self._num_slots // 2 else bisect_right(names, (interval, "~")) - 1][1]
        self.findings.append(f"{agent.name} {what} {whose if whose != agent.name else 'its own'}: {name}")


@cache
def _ones(size: int) -> np.ndarray:
    return np.ones(size, dtype=bool)
