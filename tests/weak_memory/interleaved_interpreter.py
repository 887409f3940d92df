"""Triton's interpreter, with programs, loads, stores, atomics and barriers by a ``Schedule`` where there is one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from clocked_memory import Segment
from interpreted_ranks import Group, Schedule
from quick_tensors import quick_tensors
from side_streams import side_streams
from torch import Tensor

from moesys.kernels.symmetric import pulls, signals
from moesys.kernels.symmetric.heap import Heap
from moesys.kernels.symmetric.pulls import Copy, start_copies
from moesys.kernels.symmetric.signals import raise_if_given_up

interpreter = importlib.import_module("triton.runtime.interpreter")
language = importlib.import_module("triton.language")
native = interpreter._interpreter

# Programs of copies.
COPYING = 2
MODELLED = ("moesys.kernels.mega.", "moesys.kernels.symmetric.")
VIEWS = ("view", "reshape", "__getitem__", "__get__", "data_ptr", "numel", "size")


class InterleavedBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc, name-defined]
    def create_masked_load(self, pointers: Any, mask: Any, other: Any, *policy: Any) -> Any:
        if Schedule.active is None:
            return super().create_masked_load(pointers, mask, other, *policy)
        return Schedule.active.load(pointers, mask, other)

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, *policy: Any) -> Any:
        if Schedule.active is None:
            return super().create_masked_store(pointers, value, mask, *policy)
        return Schedule.active.store(pointers, value, mask)

    def create_atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if Schedule.active is None:
            return super().create_atomic_rmw(op, pointers, value, mask, sem, scope)
        kind, order = self.ir_rmw_op_to_interpreter_rmw_op[op], self.ir_sem_to_interpreter_sem[sem]
        values = np.broadcast_to(value.data, pointers.data.shape)

        def carry_out(lane: int) -> Any:
            return native.atomic_rmw(kind, _lane(pointers.data, lane), _lane(values, lane), np.ones(1, bool), order)[0]

        stores = kind == native.RMW_OP.XCHG
        return Schedule.active.atomic(pointers, mask.data, sem, scope, carry_out, value, stores)

    def create_atomic_cas(self, pointers: Any, expected: Any, value: Any, sem: Any, scope: Any) -> Any:
        if Schedule.active is None:
            return super().create_atomic_cas(pointers, expected, value, sem, scope)
        order = self.ir_sem_to_interpreter_sem[sem]

        def carry_out(lane: int) -> Any:
            at, old, new = (_lane(each.data, lane) for each in (pointers, expected, value))
            return native.atomic_cas(at, old, new, order)[0]

        return Schedule.active.atomic(pointers, np.True_, sem, scope, carry_out, value, stores=False)

    def create_barrier(self) -> None:
        if Schedule.active is not None:
            Schedule.active.barrier()

    def create_get_program_id(self, axis: int) -> Any:
        if Schedule.active is None:
            return super().create_get_program_id(axis)
        return self.get_int32(Schedule.active.program.place[axis])

    def create_get_num_programs(self, axis: int) -> Any:
        if Schedule.active is None:
            return super().create_get_num_programs(axis)
        return self.get_int32(Schedule.active.program.grid[axis])


def _lane(values: np.ndarray, lane: int) -> np.ndarray:
    return values.reshape(-1)[lane : lane + 1].copy()


class InterleavedGrid(interpreter.GridExecutor):  # type: ignore[misc, name-defined]
    """A launch: by the schedule, where there is one that models the kernel."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        schedule = Schedule.active
        if schedule is None or not self.fn.__module__.startswith(MODELLED):
            # What only its own rank sees runs as ever.
            Schedule.active = None
            try:
                super().__call__(*args, **kwargs)
            finally:
                Schedule.active = schedule
            return
        known = inspect.getfullargspec(self.fn)
        kwargs = {name: value for name, value in kwargs.items() if name in known.args or name in known.kwonlyargs}
        arguments = inspect.getcallargs(self.fn, *args, **kwargs)
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        schedule.launch(self.fn, grid, arguments, self.constexprs)


class Watched(Tensor):
    """A part of this rank's arena: what a host copies there is stored, what it asks of it is loaded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schedule = Schedule.active
        if schedule is None or func.__name__ in VIEWS:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "copy_" and isinstance(args[0], Watched):
                schedule.host_store(args[0], args[1])
                return args[0]
            loaded = [schedule.host_load(each) if isinstance(each, Watched) else each for each in args]
            return func(*loaded, **(kwargs or {}))


@contextmanager
def interleaved() -> Iterator[None]:
    """Inside, kernels run by the ``Schedule`` that is active."""
    everywhere = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    own, of_group = Heap.own, Heap.of_group
    scope = interpreter._patch_lang(everywhere)
    try:
        with quick_tensors(), side_streams(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.interpreter_builder, "__class__", InterleavedBuilder)
            patch.setattr(interpreter, "GridExecutor", InterleavedGrid)
            # It is done, for all launches.
            patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
            patch.setattr(Heap, "own", lambda heap, region: own(heap, region).as_subclass(Watched))
            patch.setattr(Heap, "of_group", staticmethod(_of_group(of_group)))
            for module, name, function in (
                (signals, "nap", _nap),
                (signals, "raise_if_given_up", _raise_if_given_up),
                (signals, "SPOILERS", 2),
                (signals, "host_ns", _now_ns),
                (pulls, "start_copies", _start_copies),
                (dist, "barrier", _barrier),
            ):
                patch.setattr(module, name, function)
            yield
    finally:
        scope.restore()


def _of_group(usual: Any) -> Any:
    def of_group(regions: Any, group: Any, device: Any, timeout_s: float = 30.0) -> Heap:
        if Schedule.active is None:
            return usual(regions, group, device, timeout_s)
        return Schedule.active.new_heap(regions, timeout_s)

    return of_group


def _start_copies(copies: Sequence[Copy], device: torch.device) -> None:
    """By several programs, to memory that the launch does not name."""
    assert Schedule.active is not None
    Schedule.active.lend(Segment(copy.destination, copy.num_bytes, "destination") for copy in copies)
    start_copies(copies, device, COPYING)


def _barrier(group: Group) -> None:
    assert Schedule.active is not None
    Schedule.active.meet()


def _nap() -> None:
    assert Schedule.active is not None
    Schedule.active.nap()


def _now_ns() -> int:
    assert Schedule.active is not None
    return Schedule.active.now_ns()


def _raise_if_given_up(heap: Heap) -> None:
    if Schedule.active is None or not Schedule.active.quiet:
        raise_if_given_up(heap)
