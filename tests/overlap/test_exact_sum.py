"""Sums on a grid: the same total in any order and any parts, as near to the true one as the grid is fine."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesys.overlap.exact_sum import add_on_grid, grid_below, largest_size, row_sizes

# Of very different sizes, and some of which cancel.
SEEDS = st.integers(0, 2**32 - 1)


def addends(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    number = int(torch.randint(1, 40, (), generator=generator))
    sizes = torch.randint(-30, 30, (number, 1), generator=generator).double().exp2()
    drawn = torch.randn(number, 6, generator=generator, dtype=torch.float64) * sizes
    drawn[::3] = -drawn[0]
    return list(drawn.to(dtype))


def grid_of(bound: float) -> float:
    return grid_below(torch.tensor(bound, dtype=torch.float64)).item()


def total(parts: list[torch.Tensor], grid: float) -> torch.Tensor:
    into = torch.zeros(6, dtype=torch.float64)
    for part in parts:
        add_on_grid(into, part, grid)
    return into


def bound_of(parts: list[torch.Tensor]) -> float:
    return float(sum(largest_size(part).double() for part in parts))


def reordered(parts: list[torch.Tensor], grid: float, seed: int) -> torch.Tensor:
    """In another order, and as two sums that are added."""
    order = np.random.default_rng(seed).permutation(len(parts))
    half = len(parts) // 2
    return total([parts[n] for n in order[:half]], grid) + total([parts[n] for n in order[half:]], grid)


@given(SEEDS, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_no_order_shows(seed: int, dtype: torch.dtype) -> None:
    parts = addends(seed, dtype)
    grid = grid_of(bound_of(parts))
    assert torch.equal(total(parts, grid), reordered(parts, grid, seed))


def test_on_a_grid_too_fine_it_does() -> None:
    """What the 51 bits are for: on a grid 2^12 finer some sum rounds, and another order shows."""
    cases = [(addends(seed, torch.float64), seed) for seed in range(200)]
    grids = [grid_of(bound_of(parts)) * 2.0**-12 for parts, _ in cases]
    assert any(
        not torch.equal(total(parts, grid), reordered(parts, grid, seed))
        for (parts, seed), grid in zip(cases, grids, strict=True)
    )


@given(SEEDS)
def test_no_addend_is_farther_from_itself_than_half_a_grid(seed: int) -> None:
    parts = addends(seed, torch.float32)
    bound = bound_of(parts)
    found = total(parts, grid_of(bound))
    for place, value in enumerate(found.tolist()):
        exact = sum(Fraction(float(part[place])) for part in parts)
        assert abs(Fraction(value) - exact) <= len(parts) * Fraction(bound) * Fraction(1, 2**51)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_addends_are_rounded_to_the_grid_and_halves_to_even(dtype: torch.dtype) -> None:
    into = torch.zeros(6, dtype=torch.float64)
    add_on_grid(into, torch.tensor([0.5, 1.5, -2.5, 0.75, -0.25, 3.0], dtype=dtype) * 4, 4.0)
    assert into.tolist() == [0.0, 8.0, -8.0, 4.0, 0.0, 12.0]


@given(SEEDS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_the_largest_sizes_of_rows_are_the_same_on_devices(seed: int, dtype: torch.dtype) -> None:
    rows_NA = torch.stack(addends(seed, dtype))
    assert row_sizes(rows_NA).equal(rows_NA.to(torch.float32).abs().amax(dim=1))
    assert largest_size(rows_NA, dim=1).equal(row_sizes(rows_NA))
    rows_NA[0, 1] = math.nan
    assert row_sizes(rows_NA)[0] == largest_size(rows_NA, dim=1)[0] == math.inf


@pytest.mark.parametrize("bound", [1e-290, 2.0**-60, 0.75, 1.0, 3.0, 2.0**52, 1e80])
def test_a_grid_is_a_power_of_two_of_its_bits(bound: float) -> None:
    grid = grid_of(bound)
    assert math.frexp(grid)[0] == 0.5
    assert 2.0**50 <= bound / grid < 2.0**51


@pytest.mark.parametrize("bound", [1e-300, 1e-320, 5e-324])
def test_a_grid_of_next_to_nothing_can_be_divided_by(bound: float) -> None:
    into = torch.zeros(1, dtype=torch.float64)
    add_on_grid(into, torch.tensor([bound], dtype=torch.float64), grid_of(bound))
    assert 0.0 <= into.item() <= 2 * bound


def test_zeros_and_what_is_not_finite() -> None:
    into = torch.zeros(2, dtype=torch.float64)
    add_on_grid(into, torch.zeros(2), grid_of(0.0))
    assert into.tolist() == [0.0, 0.0]
    add_on_grid(into, torch.ones(2), grid_of(math.inf))
    assert into.isnan().all()
    for worst in (math.nan, math.inf, -math.inf):
        assert largest_size(torch.tensor([1.0, worst, -2.0])) == math.inf
    assert largest_size(torch.tensor([1.0, -2.0])) == 2.0
    assert largest_size(torch.zeros(0)) == 0.0
