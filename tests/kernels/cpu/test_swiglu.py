"""SwiGLU forward and backward: right, and with bits that do not depend on where a row lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesys.kernels.cpu import row_invariant_ops
from moesys.kernels.cpu.row_invariant_ops import swiglu, swiglu_backward

# Each case says which edge it is: (rows, width).
SIZES = {
    "one row": (1, 24),
    "one column": (5, 1),
    "odd in both": (37, 13),
    "no rows": (0, 16),
    "several blocks of rows": (300, 1000),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Relative norm of the difference from float64: some roundings of float32, one of bfloat16.
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 3e-3}


def forward(h_N2I: Tensor) -> Tensor:
    out_NI = torch.full((len(h_N2I), h_N2I.shape[1] // 2), torch.nan, dtype=h_N2I.dtype)
    swiglu(h_N2I, out_NI)
    return out_NI


def backward(h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor) -> dict[str, Tensor]:
    dh_N2I, wa_NI = torch.full_like(h_N2I, torch.nan), torch.full_like(da_NI, torch.nan)
    dweight_N = swiglu_backward(h_N2I, da_NI.clone(), weight_N, dh_N2I, wa_NI)
    return {"dh": dh_N2I, "wa": wa_NI, "dweight": dweight_N}


def operands(N: int, I: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N * 1000 + I)
    h_N2I = (3 * torch.randn(N, 2 * I, generator=generator)).to(dtype)
    return h_N2I, torch.randn(N, I, generator=generator).to(dtype), torch.rand(N, generator=generator)


def float64(h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor) -> dict[str, Tensor]:
    """By autograd, in float64."""
    h, weight = h_N2I.double().requires_grad_(), weight_N.double().requires_grad_()
    gate, up = h.chunk(2, dim=1)
    a = torch.nn.functional.silu(gate) * up
    wa = weight[:, None] * a
    dh, dweight = torch.autograd.grad(wa, (h, weight), da_NI.double())
    return {"a": a.detach(), "wa": wa.detach(), "dh": dh, "dweight": dweight}


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-300))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("N", "I"), SIZES.values(), ids=SIZES)
def test_agrees_with_float64(N: int, I: int, dtype: torch.dtype) -> None:
    h_N2I, da_NI, weight_N = operands(N, I, dtype)
    expected = float64(h_N2I, da_NI, weight_N)
    actual = {"a": forward(h_N2I), **backward(h_N2I, da_NI, weight_N)}
    for name, value in expected.items():
        tolerance = TOLERANCE[torch.float32 if name == "dweight" else dtype]
        assert actual[name].dtype == (torch.float32 if name == "dweight" else dtype)
        assert relative(actual[name], value) <= tolerance, name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("gate", [-200.0, -100.0, -88.0, 0.0, 88.0, 100.0])
def test_extreme_gates_have_finite_gradients(gate: float, dtype: torch.dtype) -> None:
    h_N2I = torch.tensor([[gate, 2.0]], dtype=dtype)
    da_NI, weight_N = torch.ones(1, 1, dtype=dtype), torch.ones(1)
    expected = float64(h_N2I, da_NI, weight_N)
    for name, value in {"a": forward(h_N2I), **backward(h_N2I, da_NI, weight_N)}.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-2, atol=1e-30)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("I", [1, 13, 24, 129])
def test_a_row_has_the_same_bits_wherever_it_lies(I: int, dtype: torch.dtype, threads: int) -> None:
    """Alone, in the middle, at the end, and in another block. torch's silu does not promise that: it takes another
    path for an array's last elements, and with it another ``exp``.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        N = 700
        h_N2I, da_NI, weight_N = operands(N, I, dtype)
        together = {"a": forward(h_N2I), **backward(h_N2I, da_NI, weight_N)}
        for first, last in [(0, 1), (5, 6), (N - 1, N), (3, 20), (100, 357), (333, N)]:
            rows = slice(first, last)
            h, da, weight = (tensor[rows].clone() for tensor in (h_N2I, da_NI, weight_N))
            for name, value in {"a": forward(h), **backward(h, da, weight)}.items():
                assert torch.equal(value, together[name][rows]), (name, first, last)
    finally:
        torch.set_num_threads(before)


def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    h_N2I, da_NI, weight_N = operands(50, 24, torch.float32)
    whole = {"a": forward(h_N2I), **backward(h_N2I, da_NI, weight_N)}
    monkeypatch.setattr(row_invariant_ops, "BLOCK_ELEMENTS", 7 * 48)
    for name, value in {"a": forward(h_N2I), **backward(h_N2I, da_NI, weight_N)}.items():
        assert torch.equal(value, whole[name]), name
