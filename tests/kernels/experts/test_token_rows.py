"""Rows copied in expert order and summed into their tokens: right, rounded once, in the order of choices."""

from __future__ import annotations

import pytest
import torch
from expert_ops import EDGES, Edge, in_turn, rows_of
from kernel_references import gather_rows_reference
from torch import Tensor

from moesys.kernels.experts import token_rows
from moesys.kernels.experts.token_rows import combine, gather_rows

CASES = {
    **EDGES,
    "more choices than rows in flight": Edge([[*range(10), -1]] * 3, 11),
    "several programs a token": Edge([[0, 2], [1, -1]], H=1061),
}


def operands(edge: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    given = rows_of(CASES[edge], dtype)
    return given.y_PH, given.routing.row_TK, given.weight_TK


@in_turn("edge", CASES)
def test_rows_are_those_of_their_tokens(edge: str, dtype: torch.dtype) -> None:
    given = rows_of(CASES[edge], dtype)
    gathered = (given.x_TH, given.routing.entry_P, given.routing.first_G1, given.top_k)
    x_PH, rows = gather_rows(*gathered), given.num_rows
    for found_PH in (x_PH, gather_rows_reference(*gathered)):
        assert torch.equal(found_PH[:rows], given.x_TH[given.routing.entry_P[:rows].long() // given.top_k])
    assert x_PH[rows:].isnan().all()


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "sum"])
@in_turn("edge", CASES)
def test_sums_agree_with_float64(edge: str, dtype: torch.dtype, weighted: bool) -> None:
    y_PH, row_TK, weight_TK = operands(edge, dtype)
    weight = weight_TK if weighted else None
    out_TH = combine(y_PH, row_TK, weight, dtype)
    kept_TK = row_TK >= 0
    factor_TK = torch.where(kept_TK, weight_TK if weighted else torch.ones(()), 0.0).double()
    y_TKH = torch.where(kept_TK[:, :, None], y_PH[row_TK.clamp_min(0)].double(), 0.0)
    exact_TH = (factor_TK[:, :, None] * y_TKH).sum(1)
    # K roundings in float32 relative to the largest sum, then one rounding to dtype: half an ulp of the value
    largest = (factor_TK[:, :, None] * y_TKH).abs().sum(1).amax() if y_TKH.numel() else torch.zeros(())
    tolerance_TH = largest * row_TK.shape[1] * 2**-23 + exact_TH.abs() * torch.finfo(dtype).eps / 2
    assert out_TH.dtype == dtype
    assert out_TH.shape == (row_TK.shape[0], y_PH.shape[1])
    assert ((out_TH.double() - exact_TH).abs() <= tolerance_TH).all()


def test_terms_are_added_in_the_order_of_choices() -> None:
    """Large, small, minus large: what is left of the small one depends on the order."""
    y_PH = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    for row, left in ([0, 1, 2], 0.0), ([0, 2, 1], 1.0), ([1, 0, 2], 0.0), ([2, 0, 1], 1.0):
        row_TK = torch.tensor([row], dtype=torch.int32)
        assert combine(y_PH, row_TK, None, torch.float32).item() == left
        assert combine(y_PH, row_TK, torch.ones(1, 3), torch.float32).item() == left


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """Halves of the last place, which are lost if sums are rounded on the way, and exact ties."""
    eps = torch.finfo(dtype).eps
    y_PH = torch.tensor([[1.0], [eps / 2], [eps / 2], [eps / 2]], dtype=dtype)
    one, two, three = (torch.tensor([[0, 1, 2, 3][: n + 1]], dtype=torch.int32) for n in (1, 2, 3))
    assert combine(y_PH, one, None, dtype).item() == 1.0
    assert combine(y_PH, two, None, dtype).item() == 1.0 + eps
    assert combine(y_PH, three, None, dtype).item() == 1.0 + 2 * eps


def test_the_result_may_have_another_dtype() -> None:
    y_PH, row_TK, weight_TK = operands("dropped choices", torch.bfloat16)
    out_TH = combine(y_PH, row_TK, weight_TK, torch.float32)
    assert torch.equal(out_TH.bfloat16(), combine(y_PH, row_TK, weight_TK, torch.bfloat16))


def test_columns_of_a_program_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    y_PH, row_TK, weight_TK = operands("several programs a token", torch.bfloat16)
    together = combine(y_PH, row_TK, weight_TK, torch.bfloat16)
    for columns in (16, 64):
        monkeypatch.setattr(token_rows, "MOST_COLUMNS", columns)
        assert torch.equal(combine(y_PH, row_TK, weight_TK, torch.bfloat16), together)
