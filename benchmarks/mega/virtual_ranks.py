"""Virtual ranks, which share one GPU: they go through a direction of MegaKernels side by side, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from moesys.overlap.mega_executor import Result, Stages


def side_by_side(stages: Sequence[Stages[Result]], streams: Sequence[torch.cuda.Stream] = ()) -> list[Result]:
    """Runs all ranks of this process, each on its stream; no rank begins a stage before all have been through the last.

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
