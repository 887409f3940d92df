"""Memory: pages are used again, never while a tensor lies on them, and idle pages are bounded."""

from __future__ import annotations

import pickle

import torch

from moesys.kernels.cpu.page_pool import FROM_BYTES, PagePool

CPU = torch.device("cpu")
LARGE = (FROM_BYTES // 4,)


def test_pages_are_used_again_once_no_view_is_left() -> None:
    memory = PagePool()
    first = memory.empty(LARGE, torch.float32, CPU)
    address, view = first.data_ptr(), first[10:20]
    del first
    other = memory.empty(LARGE, torch.float32, CPU)
    assert other.data_ptr() != address
    del view
    assert memory.empty(LARGE, torch.float32, CPU).data_ptr() == address


def test_tensors_that_live_at_the_same_time_share_nothing() -> None:
    memory = PagePool()
    tensors = [memory.empty(LARGE, torch.float32, CPU).fill_(value) for value in range(8)]
    del tensors[2], tensors[4]
    tensors += [memory.empty(LARGE, torch.float32, CPU).fill_(value) for value in range(8, 12)]
    for tensor in tensors:
        assert tensor.eq(tensor[0]).all()
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_sizes_that_vary_find_each_others_pages() -> None:
    memory = PagePool()
    large = memory.empty((3 * LARGE[0],), torch.float32, CPU)
    address = large.data_ptr()
    del large
    assert memory.empty((2 * LARGE[0],), torch.float32, CPU).data_ptr() == address


def test_idle_pages_are_bounded_by_what_was_lent_at_once() -> None:
    memory = PagePool()
    # Each size fits nothing before it, so without a bound all would stay.
    for factor in (1, 3, 9, 27, 81, 27, 9, 3, 1):
        tensor = memory.empty((factor * LARGE[0],), torch.float32, CPU)
        del tensor
        assert memory._mapped_bytes <= 2 * memory._peak_lent_bytes


def test_small_tensors_and_copies_of_the_memory() -> None:
    memory = pickle.loads(pickle.dumps(PagePool()))
    assert memory.empty((0, 4), torch.bfloat16, CPU).shape == (0, 4)
    assert memory.empty_like(torch.ones(2, 3)).shape == (2, 3)
