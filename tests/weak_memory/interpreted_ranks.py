"""Ranks of one process whose kernels run interleaved, on memory that nobody sees more of than he must.

Each rank is a strand: its stream, and the host that fills it. Kernels of ``moesys.kernels.mega`` and ``symmetric`` run
as strands too, a few programs of each at a time; what the host copies into its arena, or reads there, are loads and
stores of its stream. Between two launches of a rank nothing is lost: the end of a kernel is a barrier of the rank.
"""

from __future__ import annotations

import importlib
import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from clocked_memory import Agent, ClockedMemory, Segment, Space
from interleaving import Interleaving
from torch import Tensor

from moesys.kernels.symmetric.heap import TIMEOUT_S, Heap, Region
from moesys.kernels.symmetric.signals import PeerTimeoutError

interpreter = importlib.import_module("triton.runtime.interpreter")
native, ir = interpreter._interpreter, interpreter._ir

# Programs of a kernel that run at once; others follow when one of them ends.
RESIDENT = 4
TIMEOUT_NS = int(TIMEOUT_S * 1e9)
# What a step takes.
STEP_NS = 1_000_000
# Words that a copy of the host moves at a time.
COPIED = 64
SEM = {
    ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    ir.MEM_SEMANTIC.RELEASE: "release",
    ir.MEM_SEMANTIC.RELAXED: "relaxed",
    ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
SCOPE = {ir.MEM_SYNC_SCOPE.GPU: "gpu", ir.MEM_SYNC_SCOPE.SYSTEM: "sys"}


class Group:
    """A rank's sight of all, as far as ``torch.distributed`` is asked."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def size(self) -> int:
        return self._num_ranks


@dataclass(eq=False)
class Program(Agent):
    """An agent that runs one program of a launch, at its place in the grid."""

    place: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()


class Schedule:
    """One run of all ranks. ``jumps``: waits may run out: when everybody waits, that of who has waited longest; and,
    where it is above 0, those of all who wait after so many steps. ``quiet``: hosts do not ask whether any did.
    """

    active: Schedule | None = None

    def __init__(self, seed: int, num_ranks: int, jumps: int | None = None, quiet: bool = False) -> None:
        self.choices = random.Random(seed)
        self.num_ranks = num_ranks
        # Of two streams a rank, twice (``Agent``).
        self._num_slots = 2 * 2 * num_ranks * (1 + RESIDENT)
        self.memory = ClockedMemory(self._num_slots, num_ranks, self.choices, self.choices.choice([0.3, 0.7, 1.0]))
        self.strands = Interleaving(self.choices, self._stalled)
        self.agent_of: dict[Any, Agent] = {}
        self.arenas: list[Space] = []
        self.streams: list[Agent] = []
        for rank in range(num_ranks):
            self.new_stream(f"rank {rank}", rank, 0)
        # What each rank ends when it has come to an end.
        self.ends: list[list[Callable[[], None]]] = [[] for _ in range(num_ranks)]
        self.quiet = quiet
        self._jumps, self._jumped_ns = jumps, 0
        self._lent: list[Segment] = []
        self._come = self._met = 0
        self._heaps: list[list[Heap]] = []
        # Each rank has been given these of them, in the order of the arenas.
        self._given: list[list[weakref.ref[Heap]]] = [[] for _ in range(num_ranks)]

    def new_stream(self, name: str, rank: int, side: int) -> Agent:
        slot = (2 * rank + side) * (1 + RESIDENT)
        stream = Agent(name, rank, slot, np.zeros(self._num_slots, dtype=np.int64), 1, spaces=self.arenas)
        self.streams.append(stream)
        self.memory.begin(stream)
        return stream

    def begin(self, agent: Agent, work: Callable[[], Any]) -> None:
        self.agent_of[self.strands.begin(agent.name, work)] = agent

    @property
    def agent(self) -> Agent:
        """Whose turn it is."""
        return self.agent_of[self.strands.current]

    @property
    def program(self) -> Program:
        agent = self.agent
        assert isinstance(agent, Program)
        return agent

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work`` returns on each rank, or the exception that it ends with."""
        results: list[Any] = [None] * self.num_ranks

        def of_rank(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                if not isinstance(error, PeerTimeoutError):
                    raise
                results[rank] = error
            for end in self.ends[rank]:
                end()

        for rank in range(self.num_ranks):
            self.begin(self.streams[rank], lambda rank=rank: of_rank(rank))
        Schedule.active = self
        try:
            self.strands.run()
        finally:
            Schedule.active = None
        return results

    # What kernels do

    def launch(
        self, function: Callable[..., Any], grid: Sequence[int], arguments: dict[str, Any], constants: Sequence[str]
    ) -> None:
        """All programs, some at a time; the stream goes on when they have ended. ``constants``: which arguments are."""
        stream = self.agent
        slots = range(stream.slot, stream.slot + 1 + RESIDENT)
        segments = {each.start: each for name, value in arguments.items() for each in _segments(name, value)}
        local = Space([*segments.values(), *self._lent], slots)
        self._lent = []
        converted = {
            name: value if name in constants else interpreter._implicit_cvt(value) for name, value in arguments.items()
        }
        shape = tuple(int(size) for size in grid) + (1,) * (3 - len(grid))
        places = itertools.product(*(range(size) for size in shape))
        stream.barrier()
        known = stream.view.copy()
        resident = self.choices.randint(1, RESIDENT)
        running: list[Program] = []
        ended: list[Program] = []
        interval = stream.interval

        def run(program: Program) -> None:
            function(**converted)
            program.barrier()
            running.remove(program)
            ended.append(program)

        free = list(slots[1 : 1 + resident])
        begun = [interval] * len(slots)
        more = True
        while more or running:
            while more and free:
                place = next(places, None)
                if place is None:
                    more = False
                    break
                slot = free.pop(0)
                name = f"{function.__name__}{list(place)} of rank {stream.rank}"
                program = Program(
                    name,
                    stream.rank,
                    slot,
                    known.copy(),
                    begun[slot - slots.start],
                    spaces=(*self.arenas, local),
                    place=place,
                    grid=shape,
                )
                self.memory.begin(program)
                running.append(program)
                self.begin(program, lambda program=program: run(program))
            if running:
                self.strands.wait("its kernel", lambda: bool(ended))
            for program in ended:
                np.maximum(stream.view, program.view, out=stream.view)
                begun[program.slot - slots.start] = program.interval
                free.append(program.slot)
            ended.clear()
        stream.interval = max(begun)
        stream.barrier()

    def lend(self, segments: Iterable[Segment]) -> None:
        """Memory that the next launch reaches beside its arguments."""
        self._lent = list(segments)

    def load(self, pointers: Any, mask: Any, other: Any) -> Any:
        self.strands.step()
        kind = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        address, kept = pointers.data.view(np.int64), mask.data
        if address.size == 1 and kept.flat[0]:
            values = self.memory.load_word(self.agent, int(address.flat[0]), dtype).reshape(address.shape)
        elif kept.all():
            values = self.memory.load(self.agent, address.reshape(-1), dtype).reshape(address.shape)
        else:
            values = np.zeros(address.shape, dtype) if other is None else np.array(other.data, dtype=dtype, copy=True)
            values = np.broadcast_to(values, address.shape).copy()
            if kept.any():
                values[kept] = self.memory.load(self.agent, address[kept], dtype)
        return interpreter.TensorHandle(values, kind)

    def store(self, pointers: Any, value: Any, mask: Any) -> None:
        self.strands.step()
        kept = mask.data
        if kept.any():
            dtype = interpreter._get_np_dtype(pointers.get_element_ty())
            values = np.broadcast_to(value.data, kept.shape)[kept].astype(dtype, copy=False)
            self.memory.store(self.agent, pointers.data.view(np.int64)[kept], values)

    def atomic(
        self,
        pointers: Any,
        kept: np.ndarray,
        sem: Any,
        scope: Any,
        carry_out: Callable[[int], Any],
        like: Any,
        stores: bool,
    ) -> Any:
        """Of lanes that are ``kept``, one by one in any order; ``carry_out`` returns what a lane has found. ``stores``:
        even a value that is there.
        """
        address, found = pointers.data.reshape(-1), np.zeros(pointers.data.size, like.data.dtype)
        lanes = np.flatnonzero(np.broadcast_to(kept, pointers.data.shape)).tolist()
        self.choices.shuffle(lanes)
        agent, scope, alone = self.agent, SCOPE[scope], address.size == 1
        for lane in lanes:
            self.strands.step()
            cell = self.memory.atomic(agent, int(address[lane]), SEM[sem], scope, alone)
            found[lane] = carry_out(lane)
            now = native.load(address[lane : lane + 1], np.ones(1, bool), np.zeros_like(found[:1]), found.dtype)[0]
            if stores or now != found[lane]:
                self.memory.change(agent, cell, alone)
        return interpreter.TensorHandle(found.reshape(pointers.data.shape), like.dtype.scalar)

    def barrier(self) -> None:
        self.strands.step()
        self.agent.barrier()

    def nap(self) -> None:
        """A program that waits goes on when what it asked for has changed, or its time may be over."""
        agent = self.agent
        polled, agent.polled, agent.napped = agent.polled, {}, True
        if not any(name.startswith("abort") for name, _, _ in polled.values()):
            # It has not asked yet whether others gave up.
            self.strands.step()
            return
        jumped_ns, agent.waits = self._jumped_ns, True
        self.strands.wait(
            " or ".join(name for name, _, _ in polled.values()),
            lambda: (
                self._jumped_ns != jumped_ns or any(each.version != version for _, each, version in polled.values())
            ),
        )
        agent.waits = False

    def now_ns(self) -> int:
        """By a clock that goes with the steps. Who asks without a nap before begins to wait."""
        if self._jumps and self.strands.steps > self._jumps:
            self._jumps = 0
            self._jump(TIMEOUT_NS)
        now_ns = self.strands.steps * STEP_NS + self._jumped_ns
        if not self.agent.napped:
            self.agent.since_ns = now_ns
        self.agent.napped = False
        return now_ns

    def _stalled(self) -> bool:
        """Nothing happens until a wait runs out."""
        since_ns = [agent.since_ns for agent in self.agent_of.values() if agent.waits]
        if self._jumps is None or not since_ns:
            return False
        self._jump(max(STEP_NS, min(since_ns) + TIMEOUT_NS - self.strands.steps * STEP_NS - self._jumped_ns))
        return True

    def _jump(self, by_ns: int) -> None:
        self._jumped_ns += by_ns
        self.memory.lenient = True

    def is_right(self, value: Tensor, expected: Tensor) -> bool:
        """To the bit; or, where no host looks and some rank gave up, NaN in parts, and any counts."""
        if torch.equal(value, expected):
            return True
        given_up = any(int(heap.arena.view(torch.int32)[0]) for heaps in self._heaps for heap in heaps)
        nothing = value.isnan() if value.is_floating_point() else torch.ones_like(value, dtype=torch.bool)
        return self.quiet and given_up and bool(((value == expected) | nothing).all())

    # What hosts do

    def meet(self) -> None:
        """Goes on when all hosts have come."""
        met, self._met = self._met, self._met + 1
        self.strands.wait("others", lambda: self._met // self.num_ranks > met // self.num_ranks)

    def new_heap(self, regions: Mapping[str, Region], timeout_s: float) -> Heap:
        """New arenas, when all ranks have come. Of old ones, those that a rank has dropped by now are gone."""
        place, rank = len(self._heaps), self.agent.rank
        for arenas, given in zip(self.arenas, self._given[rank], strict=False):
            if given() is None:
                arenas.end(f" of rank {rank}")
        self._come += 1
        if self._come == self.num_ranks:
            self._come = 0
            heaps = Heap.virtual(regions, self.num_ranks, "cpu", timeout_s)
            self._heaps.append(heaps)
            segments = []
            for heap in heaps:
                start = heap.arena.data_ptr()
                for name, region in heap.layout.regions.items():
                    segments.append(Segment(start + heap.offset(name), region.num_bytes, f"{name} of rank {heap.rank}"))
            self.arenas.append(Space(segments, range(self._num_slots)))
            together = np.maximum.reduce([stream.view for stream in self.streams])
            for stream in self.streams:
                stream.view[:] = together
        self.strands.wait("others, to have new arenas", lambda: len(self._heaps) > place)
        heap = replace(self._heaps[place][rank])
        self._given[rank].append(weakref.ref(heap))
        return heap

    def host_store(self, target: Tensor, source: Tensor) -> None:
        """A copy into this rank's arena."""
        stream, values = self.agent, source.detach().to(target.dtype).contiguous().reshape(-1).view(torch.uint8)
        address = target.data_ptr() + np.arange(0, target.nbytes, 4, dtype=np.int64)
        words = np.frombuffer(values.numpy().tobytes() + b"\0" * (-target.nbytes % 4), dtype=np.uint32)
        for first in range(0, len(words), COPIED):
            self.strands.step()
            self.memory.store(stream, address[first : first + COPIED], words[first : first + COPIED])
        stream.barrier()

    def host_load(self, source: Tensor) -> Tensor:
        stream = self.agent
        found = torch.empty(source.nbytes, dtype=torch.uint8)
        if source.nbytes:
            self.strands.step()
            address = source.data_ptr() + np.arange(0, source.nbytes, 4, dtype=np.int64)
            if len(address) == 1:
                self.memory.acquire_word(stream, int(address[0]))
            words = self.memory.load(stream, address, np.dtype(np.uint32))
            found.copy_(torch.frombuffer(bytearray(words.tobytes()), dtype=torch.uint8)[: source.nbytes])
        stream.barrier()
        return found.view(source.dtype).view(source.shape)


def _segments(name: str, value: Any) -> Iterator[Segment]:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.nbytes():
            yield Segment(storage.data_ptr(), storage.nbytes(), name)
    elif isinstance(value, tuple):
        for place, each in enumerate(value):
            yield from _segments(getattr(value, "_fields", range(len(value)))[place], each)
