"""What TMA can read, and whose allocator a launch uses."""

from __future__ import annotations

import pytest
import torch
from triton.runtime import _allocation

from moesys.kernels.experts.products import readable_by_tma, run_with_descriptors

HALF = torch.zeros(4, 16, dtype=torch.float16)


@pytest.mark.parametrize(
    ("tensor", "readable"),
    [
        (HALF, True),
        (HALF.bfloat16(), True),
        (HALF.float(), False),
        (torch.zeros(4, 12, dtype=torch.float16), False),
        (torch.zeros(0, 16, dtype=torch.float16), False),
        (torch.zeros(33, dtype=torch.float16)[1:].view(2, 16), False),
    ],
    ids=["float16", "bfloat16", "float32", "rows of 24 bytes", "empty", "address no multiple of 16"],
)
def test_what_tma_can_read(tensor: torch.Tensor, readable: bool) -> None:
    assert readable_by_tma(HALF, tensor) == readable


def test_memory_for_descriptors_comes_from_torch_and_nobody_elses_allocator_changes() -> None:
    before, given = _allocation._allocator.get(), []
    run_with_descriptors(lambda: given.append(_allocation._allocator.get()(256, 128, None)), torch.device("cpu"))
    assert given[0].nbytes == 256
    assert _allocation._allocator.get() is before
