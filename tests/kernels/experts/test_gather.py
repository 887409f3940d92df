"""Rows in expert order: copied exactly, and only where there is one."""

from __future__ import annotations

import pytest
import torch
from expert_rows import EDGES, Edge, rows_of
from kernel_references import gather_rows_reference

from moesys.kernels.experts.token_rows import gather_rows

CASES = {**EDGES, "wider than a step": EDGES["one by one"]._replace(H=1030)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edge", CASES.values(), ids=CASES)
def test_every_row_is_its_tokens(edge: Edge, dtype: torch.dtype) -> None:
    given = rows_of(edge, dtype)
    gathered = (given.x_TH, given.routing.entry_P, given.routing.first_G1, given.top_k)
    x_PH, rows = gather_rows(*gathered), given.num_rows
    assert torch.equal(x_PH[:rows], gather_rows_reference(*gathered)[:rows])
    assert x_PH[rows:].isnan().all()
    for row in range(rows):
        assert torch.equal(x_PH[row], given.x_TH[int(given.routing.entry_P[row]) // given.top_k])
