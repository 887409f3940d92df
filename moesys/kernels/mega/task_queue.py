"""The queue that a MegaKernel's programs take their tasks from, and the rule that says which task comes when.

A task waits only for tasks with lower numbers, of its own rank or of a peer, and tasks are taken in the order of their
numbers. So the lowest that is not done can always be done: no number of resident programs, not even one, is too few,
and Triton's interpreter, which runs programs one after another, gets through as well.

Two kinds of tasks share a queue: fetches, which bring data, and work, which needs what the first fetches brought. Work
comes in sweeps (``tiles.tile_of``), each of which needs as many more fetches.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A share of 1 in the kernels.
WHOLE = tl.constexpr(1024)


@triton.jit
def take(queue_ptr):  # type: ignore[no-untyped-def]
    """Returns the number of this program's next task; ``queue_ptr`` int32 [2], zeros between launches."""
    return tl.atomic_add(queue_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit
def leave(queue_ptr):  # type: ignore[no-untyped-def]
    """Puts the queue back to zeros if this is the last program of a launch."""
    if tl.atomic_add(queue_ptr + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(queue_ptr, 0)
        tl.store(queue_ptr + 1, 0)


@triton.jit
def mixed_task(  # type: ignore[no-untyped-def]
    task, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share: tl.constexpr
):
    """Returns (is it work, its number among its kind) of the queue's ``task``.

    Before each work task come the fetches that its sweep needs, and at least so many that ``share`` / ``WHOLE`` of all
    tasks until then are fetches. A share of 0 brings what is needed just before it is, ``WHOLE`` all before any work.
    Each sweep needs ``fetches_of_sweep`` more, or, where ``needed_ptr`` is not None, as many times as that says.
    """
    # The first work task that is not before ``task``: where they are is a rising function of their number.
    low, high = 0, num_work
    while low < high:
        middle = (low + high) // 2
        before = _fetches_before(middle, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share)
        is_before = middle + before < task
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    fetches = _fetches_before(low, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share)
    is_work = (low < num_work) & (low + fetches == task)
    return is_work, tl.where(is_work, low, task - low)


@triton.jit
def _fetches_before(  # type: ignore[no-untyped-def]
    work, num_fetches, num_work, fetches_of_sweep, work_of_sweep, needed_ptr, share: tl.constexpr
):
    if share >= WHOLE:
        return num_fetches
    else:
        sweep = tl.minimum(work, num_work - 1) // work_of_sweep
        if needed_ptr is None:
            needed = (sweep + 1) * fetches_of_sweep
        else:
            needed = tl.load(needed_ptr + sweep, mask=num_work > 0, other=0) * fetches_of_sweep
        # Narrowed when it is no more than there are: a share of nearly all asks for a thousand times the work.
        spread = tl.minimum(tl.cast(work, tl.int64) * share // (WHOLE - share), num_fetches).to(tl.int32)
        return tl.minimum(tl.maximum(needed, spread), num_fetches)
