"""Rows in expert order: copied exactly, and only where there is one."""

from __future__ import annotations

import pytest
import torch
from kernel_references import gather_rows_reference, route_reference

from moesys.kernels.experts.token_rows import gather_rows

# Each case says which edge it is: (group of every choice, G, H).
CASES = {
    "one token": ([[1, 0]], 3, 20),
    "wider than a step": ([[0], [1], [0]], 2, 1030),
    "width of one": ([[t % 3, 1] for t in range(7)], 3, 1),
    "dropped choices": ([[t % 4 - 1, (t + 2) % 4] for t in range(21)], 3, 16),
    "everything dropped": ([[-1, 7]] * 5, 3, 20),
    "no tokens": ([], 2, 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_row_is_its_tokens(case: tuple, dtype: torch.dtype) -> None:
    groups, G, H = case
    group_TK = torch.tensor(groups).reshape(len(groups), -1 if groups else 2).long()
    T, K = group_TK.shape
    routing = route_reference(group_TK, G)
    x_TH = torch.randn(T, H, generator=torch.Generator().manual_seed(T)).to(dtype)
    gathered = (x_TH, routing.entry_P, routing.first_G1, K)
    x_PH, rows = gather_rows(*gathered), int(routing.first_G1[-1])
    assert torch.equal(x_PH[:rows], gather_rows_reference(*gathered)[:rows])
    assert x_PH[rows:].isnan().all()
    for row in range(rows):
        assert torch.equal(x_PH[row], x_TH[int(routing.entry_P[row]) // K])
