"""Activations and their slopes in the interpreter: right against float64, kept at the extremes, one set of bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_references import exact_activation
from torch import Tensor

from moesys.kernels.experts.activations import GATED, activate, activate_one, slope_one, slopes

EXTREMES = [-3e38, -200.0, -88.0, -20.0, -1.0, -1e-30, -0.0, 0.0, 1e-30, 0.5, 1.0, 20.0, 88.0, 200.0]


@triton.jit
def _kernel(h_ptr, a_ptr, again_ptr, slope_ptr, N, gated: tl.constexpr, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, 128)
    mask = n < N
    if gated:
        gate, up = tl.load(h_ptr + n, mask=mask), tl.load(h_ptr + N + n, mask=mask)
        a = activate(gate, up, activation)
        again, along_gate, along_up = slopes(gate, up, activation)
        tl.store(slope_ptr + n, along_gate, mask=mask)
        tl.store(slope_ptr + N + n, along_up, mask=mask)
    else:
        h = tl.load(h_ptr + n, mask=mask)
        a = activate_one(h, activation)
        again, along = slope_one(h, activation)
        tl.store(slope_ptr + n, along, mask=mask)
    tl.store(a_ptr + n, a, mask=mask)
    tl.store(again_ptr + n, again, mask=mask)


def float64(h_U: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    h = h_U.double().requires_grad_()
    a = exact_activation(h, activation)
    (slope,) = torch.autograd.grad(a.sum(), h)
    return a.detach(), slope


def computed(h_U: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(activation, slopes) of one row, of which ``slopes`` gives the same activation as ``activate``."""
    N = len(h_U) // (2 if GATED[activation] else 1)
    a_N, again_N = torch.full((2, N), torch.nan)
    slope_U = torch.full_like(h_U, torch.nan)
    _kernel[(1,)](h_U, a_N, again_N, slope_U, N, GATED[activation], activation)
    assert torch.equal(a_N.view(torch.int32), again_N.view(torch.int32))
    return a_N, slope_U


@pytest.mark.parametrize("activation", GATED)
def test_value_and_slopes(activation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    h_U = 3 * torch.randn(100, generator=generator)
    expected = float64(h_U, activation)
    for value, exact in zip(computed(h_U, activation), expected, strict=True):
        # some roundings of numbers up to 1 in size times the other factor
        torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)


# The interpreter's numpy warns where a GPU goes on with infinity, as it should.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("activation", GATED)
def test_extremes_are_finite(activation: str) -> None:
    h_N = torch.tensor(EXTREMES)
    h_U = torch.cat([h_N, torch.full_like(h_N, 2.0)]) if GATED[activation] else h_N
    for value, exact in zip(computed(h_U, activation), float64(h_U, activation), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", GATED)
def test_nan_stays(activation: str) -> None:
    h_U = torch.tensor([torch.nan, 1.0, 2.0, 3.0])
    a_N, slope_U = computed(h_U, activation)
    assert a_N[0].isnan()
    assert slope_U[0].isnan()
    assert a_N[1].isfinite()
