"""Task times of MegaKernels as spans: lanes are programs, and what a task waited for is a span of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moesys.kernels.mega.task_times import TaskTime
from moesys.overlap.comm.record import Record


def task_spans(tasks: Sequence[TaskTime], expert_G: Sequence[int]) -> Iterator[Record]:
    """Of each task ``wait``, from when it was taken until it was ready, and then its kind, by when they began.

    ``expert_G``: the expert of each group of the rank.
    """
    for task in sorted(tasks, key=lambda task: task.start_us):
        lane = f"program {task.program:03d}"
        detail = task.launch if task.group < 0 else f"{task.launch}, expert {expert_G[task.group]}"
        yield Record(lane, "wait", task.start_us, task.ready_us, f"{task.kind}, {detail}")
        yield Record(lane, task.kind, task.ready_us, task.end_us, detail)
