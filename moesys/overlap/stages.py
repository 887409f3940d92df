"""A direction in stages, so that virtual ranks, which share one GPU, can go through it side by side.

A kernel that waits for a peer holds its multiprocessors, and on one GPU the peer may need them. So a direction pauses
where a kernel behind must find something of all ranks, done or resident:

- announced: from here on rows are pulled from peers, by kernels that fill the GPU;
- fetched and multiplied: from here on programs wait for those of peers, which must be able to come beside them. So a
  rank has no more programs than its share of the multiprocessors, of each of which one program may need all: what a
  rank launches finds its own share free, whoever else waits. And all ranks launch the same kernels in this stage, as
  one that is loaded first may have to wait for all that runs;
- combined: what follows waits for nobody, and is launched when all that wait have whom they wait for.

Ranks with a device each run through: waiting, they keep nobody from coming.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")
Stages = Generator[None, None, Result]


def at_once(stages: Stages[Result]) -> Result:
    """One rank's, on the stream that is current."""
    return side_by_side([stages])[0]


def side_by_side(stages: Sequence[Stages[Result]], streams: Sequence[torch.cuda.Stream] = ()) -> list[Result]:
    """All ranks of this process, each on its stream: none begins a stage before all have been through the last.

    The current stream waits for them, and they for it; without ``streams`` all are on it. May be captured in a CUDA
    graph.
    """
    contexts: list[Callable[[], AbstractContextManager[object]]]
    contexts = [partial(torch.cuda.stream, stream) for stream in streams] or [nullcontext] * len(stages)
    results: list[Result] = []
    while len(results) < len(stages):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for of_rank, on_its_own in zip(stages, contexts, strict=True):
            with on_its_own():
                try:
                    next(of_rank)
                except StopIteration as end:
                    results.append(end.value)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
    return results
