"""Rows are added in their order, and in no other."""

from __future__ import annotations

import pytest
import torch
from kernel_references import ordered_sum_reference

from moesys.kernels.symmetric.pulls import COLUMNS, ordered_sum


@pytest.mark.parametrize(
    ("num_parts", "num_rows", "num_columns"),
    [
        pytest.param(7, 3, 5, id="several parts of a row"),
        pytest.param(3, 6, 9, id="rows without parts"),
        pytest.param(0, 4, 9, id="no parts"),
        pytest.param(5, 2, 0, id="a rank that owns nothing"),
        pytest.param(4, 2, COLUMNS + 3, id="more than one program's columns"),
    ],
)
def test_it_is_the_reference_to_the_bit(num_parts, num_rows, num_columns):
    generator = torch.Generator().manual_seed(num_parts)
    # Of many magnitudes, so that another order has other bits.
    scale_N = 10.0 ** torch.randint(-4, 5, (num_parts, 1), generator=generator)
    parts_NP = torch.randn(num_parts, num_columns, generator=generator) * scale_N
    row_N = torch.randint(0, num_rows, (num_parts,), generator=generator)
    assert torch.equal(ordered_sum(parts_NP, row_N, num_rows), ordered_sum_reference(parts_NP, row_N, num_rows))


def test_columns_of_wider_rows_are_summed_where_they_are():
    parts_NP = torch.randn(4, 12)
    row_N = torch.tensor([1, 0, 1, 1])
    wanted = ordered_sum_reference(parts_NP[:, :5], row_N, 2)
    assert torch.equal(ordered_sum(parts_NP[:, :5], row_N, 2), wanted)


def test_the_sum_of_one_part_is_that_part_the_sign_of_its_zero_too():
    parts_NP = torch.tensor([[-0.0]])
    for add in (ordered_sum, ordered_sum_reference):
        assert torch.signbit(add(parts_NP, torch.zeros(1, dtype=torch.int64), 1)).item() is True
