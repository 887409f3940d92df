"""The queue: every task once, what work needs before it, and at zeros again when all programs have left."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesys.kernels.mega.tasks import WHOLE, leave, mixed_task, take


class Queue(NamedTuple):
    """Fetches, work, more fetches that a sweep needs, work of a sweep, share in parts of ``WHOLE``; and, where a table
    says how often that many fetches a sweep needs, the table.
    """

    num_fetches: int
    num_work: int
    fetches_of_sweep: int
    work_of_sweep: int
    share: int
    needed: list[int] | None = None


# Each case says which edge it is.
EDGES = {
    "nothing to do": (0, 0, 8, 3, 256),
    "fetches alone": (7, 0, 2, 3, 256),
    "work that needs nothing": (0, 9, 0, 1, 256),
    "one of each": (1, 1, 1, 1, 0),
    "what is needed and no more": (20, 30, 4, 6, 0),
    "all fetches first": (20, 30, 4, 6, WHOLE.value),
    "nearly all tasks are fetches": (20, 30, 4, 6, WHOLE.value - 1),
    "more fetches than the sweeps need": (50, 6, 4, 3, 100),
    "the last sweep needs less than the others": (9, 14, 4, 6, 0),
    "sums before the first weight gradient, as there is none": (0, 5, 0, 1, WHOLE.value),
    "as many weight gradients as sums": (8, 8, 0, 1, WHOLE.value // 2),
}


@triton.jit
def _run(
    queue_ptr, kind_ptr, number_ptr, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr,
    share: tl.constexpr,
):  # fmt: skip
    """Notes of each task, in the order in which it is taken, what it is."""
    task = take(queue_ptr)
    while task < num_fetches + num_work:
        is_work, number = mixed_task(task, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share)
        tl.store(kind_ptr + task, is_work.to(tl.int32))
        tl.store(number_ptr + task, number)
        task = take(queue_ptr)
    leave(queue_ptr)


Order = list[tuple[bool, int]]


def order_of(queue: Queue, programs: int = 3) -> Order:
    """(is it work, its number) of every task in turn."""
    queue_2 = torch.zeros(2, dtype=torch.int32)
    *sizes, share, needed = queue
    kind, number = (torch.full((queue.num_fetches + queue.num_work,), -1, dtype=torch.int32) for _ in range(2))
    table = None if needed is None else torch.tensor(needed, dtype=torch.int32)
    # Twice: the queue is back at zeros.
    for _ in range(2):
        _run[(programs,)](queue_2, kind, number, *sizes, table, share)
        assert queue_2.tolist() == [0, 0]
    return answers(kind, number)


def answers(kind: Tensor, number: Tensor) -> Order:
    return list(zip(kind.bool().tolist(), number.tolist(), strict=True))


def assert_right(order: Order, queue: Queue) -> None:
    num_fetches, num_work, fetches_of_sweep, work_of_sweep, share, needed = queue
    assert [number for is_work, number in order if not is_work] == list(range(num_fetches))
    assert [number for is_work, number in order if is_work] == list(range(num_work))
    fetched = 0
    for is_work, number in order:
        if not is_work:
            fetched += 1
            continue
        sweep = number // work_of_sweep
        times = sweep + 1 if needed is None else needed[sweep]
        required = min(times * fetches_of_sweep, num_fetches)
        # By the share: fetches of all tasks until then.
        spread = num_fetches if share >= WHOLE.value else number * share // (WHOLE.value - share)
        assert fetched == max(required, min(spread, num_fetches)), f"before work {number}"


@pytest.mark.parametrize("name", EDGES)
def test_every_task_comes_once_and_what_it_needs_before_it(name: str) -> None:
    queue = Queue(*EDGES[name])
    assert_right(order_of(queue), queue)


@given(sweeps=st.lists(st.integers(0, 5), max_size=6), tabled=st.booleans(), data=st.data())
def test_any_counts_sweeps_shares_and_tables(sweeps: list[int], tabled: bool, data: st.DataObject) -> None:
    extra, fetches_of_sweep, left_out = (data.draw(st.integers(0, most)) for most in (9, 5, 4))
    work_of_sweep, programs = (data.draw(st.integers(1, most)) for most in (5, 4))
    needed = torch.tensor(sweeps).cumsum(0).tolist() if tabled else None
    num_fetches = (sum(sweeps) if tabled else len(sweeps)) * fetches_of_sweep + extra
    # The last sweep may be shorter than the others.
    num_work = max(0, len(sweeps) * work_of_sweep - min(left_out, work_of_sweep - 1)) if sweeps else 0
    share = data.draw(st.integers(0, WHOLE.value))
    queue = Queue(num_fetches, num_work, fetches_of_sweep, work_of_sweep, share, needed)
    assert_right(order_of(queue, programs), queue)


@triton.jit
def _at(task_ptr, kind_ptr, number_ptr, num_fetches, num_work, num_tasks, share: tl.constexpr):
    for place in range(num_tasks):
        is_work, number = mixed_task(tl.load(task_ptr + place), num_fetches, num_work, 1, 4, None, share)
        tl.store(kind_ptr + place, is_work.to(tl.int32))
        tl.store(number_ptr + place, number)


def test_more_tasks_than_a_share_can_count_in_32_bits() -> None:
    """A share of 1023 / 1024 asks for 1023 fetches before each work task, of which there are 2^23."""
    num_fetches, num_work, share = 1 << 30, 1 << 23, WHOLE.value - 1
    task = torch.tensor([0, 1, 1024, 1025, num_fetches, num_fetches + num_work - 1], dtype=torch.int32)
    kind, number = (torch.full_like(task, -1) for _ in range(2))
    _at[(1,)](task, kind, number, num_fetches, num_work, len(task), share)

    def before(work: int) -> int:
        return min(max(work // 4 + 1, work * share), num_fetches)

    assert answers(kind, number) == [expected(each, before, num_work) for each in task.tolist()]


def expected(task: int, before, num_work: int) -> tuple[bool, int]:
    low, high = 0, num_work
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle + before(middle) < task else (low, middle)
    is_work = low < num_work and low + before(low) == task
    return is_work, low if is_work else task - low
