"""A second stream of a rank, as GPUs have: what is put on it runs beside the first one's kernels, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from interpreted_ranks import Schedule

from moesys.kernels.symmetric import pulls


class SideStream:
    """What ``PullRing`` uses of a stream. An event is how much had been put on it."""

    def __init__(self) -> None:
        assert Schedule.active is not None
        self._schedule, main = Schedule.active, Schedule.active.agent
        self._agent = self._schedule.new_stream(f"pulls of rank {main.rank}", main.rank, 1)
        self._work: deque[tuple[np.ndarray, Callable[[], Any]]] = deque()
        self._known = main.view.copy()
        self._put = self._done = 0
        self._ends = False
        self._schedule.begin(self._agent, self._run)
        self._schedule.ends[main.rank].append(self._end)

    def wait_stream(self, main: object) -> None:
        self._known = self._schedule.agent.view.copy()

    def put(self, work: Callable[[], Any]) -> None:
        self._put += 1
        self._work.append((self._known, work))

    def record_event(self) -> tuple[SideStream, int]:
        return self, self._put

    def wait_event(self, put: int) -> None:
        """Of the first stream: until so much is done."""
        self._schedule.strands.wait("its pulls", lambda: self._done >= put)
        main = self._schedule.agent
        np.maximum(main.view, self._agent.view, out=main.view)
        main.barrier()

    def synchronize(self) -> None:
        self.wait_event(self._put)

    def _run(self) -> None:
        while True:
            self._schedule.strands.wait("anything to pull", lambda: bool(self._work) or self._ends)
            if not self._work:
                return
            known, work = self._work.popleft()
            np.maximum(self._agent.view, known, out=self._agent.view)
            self._agent.barrier()
            work()
            self._done += 1

    def _end(self) -> None:
        self._ends = True


class _Cuda:
    """``torch.cuda`` for rings that have a ``SideStream``."""

    @staticmethod
    @contextmanager
    def stream(side: SideStream) -> Iterator[None]:
        yield

    @staticmethod
    def current_stream(device: object) -> type[_Cuda]:
        return _Cuda

    @staticmethod
    def wait_event(event: tuple[SideStream, int]) -> None:
        event[0].wait_event(event[1])


class _Torch:
    cuda = _Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def side_streams() -> Iterator[None]:
    """Inside, pulls of a ring whose stream is a ``SideStream`` run there."""
    usual = pulls.PullRing._run

    def run(ring: pulls.PullRing, pull: pulls.Pull) -> None:
        if isinstance(ring.stream, SideStream):
            ring.stream.put(lambda: usual(ring, pull))
        else:
            usual(ring, pull)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulls, "torch", _Torch())
        patch.setattr(pulls.PullRing, "_run", run)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        yield
