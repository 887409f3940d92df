"""Rows summed into their tokens in the interpreter: right, rounded once, in the order of choices."""

from __future__ import annotations

import pytest
import torch
from kernel_references import combine_reference, route_reference
from test_grouped_gemm import HALF, every_dtype
from torch import Tensor

from moesys.kernels.experts import token_rows
from moesys.kernels.experts.token_rows import combine

# Each case says which edge it is: (T, K, G, H, probability that a choice is dropped).
CASES = {
    "one token": (1, 2, 3, 24, 0.0),
    "no tokens": (0, 2, 3, 24, 0.0),
    "one column": (5, 2, 3, 1, 0.0),
    "one choice": (6, 1, 3, 16, 0.0),
    "every expert chosen": (4, 5, 5, 16, 0.0),
    "more choices than rows in flight": (3, 11, 11, 16, 0.2),
    "odd width": (7, 3, 8, 37, 0.3),
    "several programs a token": (2, 2, 4, 1061, 0.3),
    "everything dropped": (5, 2, 3, 16, 1.0),
}


def operands(T: int, K: int, G: int, H: int, dropped: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(y, row, weight); rows that no choice has are NaN, and so are weights of dropped choices."""
    generator = torch.Generator().manual_seed(T * 1000 + K * 100 + H)
    group_TK = torch.rand(T, G, generator=generator).argsort(1)[:, :K]
    group_TK = torch.where(torch.rand(T, K, generator=generator) < dropped, -1, group_TK)
    routing = route_reference(group_TK, G)
    y_PH = torch.randn(T * K, H, generator=generator).to(dtype)
    y_PH[int(routing.first_G1[-1]) :] = torch.nan
    weight_TK = torch.rand(T, K, generator=generator)
    return y_PH, routing.row_TK, torch.where(routing.row_TK < 0, torch.nan, weight_TK)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "sum"])
@every_dtype
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees_with_float64(case: tuple, dtype: torch.dtype, weighted: bool) -> None:
    y_PH, row_TK, weight_TK = operands(*case, dtype)
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
    for found_TH in (out_TH, combine_reference(y_PH, row_TK, weight, dtype)):
        assert ((found_TH.double() - exact_TH).abs() <= tolerance_TH).all()
    assert torch.equal(combine(y_PH, row_TK, weight, dtype), out_TH)


def test_terms_are_added_in_the_order_of_choices() -> None:
    """Large, small, minus large: what is left of the small one depends on the order."""
    y_PH = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    for row, left in ([0, 1, 2], 0.0), ([0, 2, 1], 1.0), ([1, 0, 2], 0.0), ([2, 0, 1], 1.0):
        row_TK = torch.tensor([row], dtype=torch.int32)
        assert combine(y_PH, row_TK, None, torch.float32).item() == left
        assert combine(y_PH, row_TK, torch.ones(1, 3), torch.float32).item() == left


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=["float16", "bfloat16"])
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """Halves of the last place, which are lost if sums are rounded on the way, and exact ties."""
    eps = torch.finfo(dtype).eps
    y_PH = torch.tensor([[1.0], [eps / 2], [eps / 2], [eps / 2]], dtype=dtype)
    one, two, three = (torch.tensor([[0, 1, 2, 3][: n + 1]], dtype=torch.int32) for n in (1, 2, 3))
    assert combine(y_PH, one, None, dtype).item() == 1.0
    assert combine(y_PH, two, None, dtype).item() == 1.0 + eps
    assert combine(y_PH, three, None, dtype).item() == 1.0 + 2 * eps


def test_the_result_may_have_another_dtype() -> None:
    y_PH, row_TK, weight_TK = operands(5, 2, 3, 16, 0.2, torch.bfloat16)
    out_TH = combine(y_PH, row_TK, weight_TK, torch.float32)
    assert torch.equal(out_TH.bfloat16(), combine(y_PH, row_TK, weight_TK, torch.bfloat16))


def test_columns_of_a_program_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    y_PH, row_TK, weight_TK = operands(6, 3, 5, 70, 0.2, torch.bfloat16)
    together = combine(y_PH, row_TK, weight_TK, torch.bfloat16)
    for columns in (16, 64):
        monkeypatch.setattr(token_rows, "MOST_COLUMNS", columns)
        assert torch.equal(combine(y_PH, row_TK, weight_TK, torch.bfloat16), together)
