"""SwiGLU with the routing weight, forward and backward, from operations that give an element the same bits anywhere.

torch's own silu and sigmoid take another code path for the last elements of an array than for the rest, and so an
element's bits depend on its neighbours. ``exp`` and plain arithmetic do not (``tests/kernels`` checks it).
Everything is computed in float32 and rounded once.

N rows, I expert width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Rows go through in blocks of about so many elements, whose intermediate results stay in a core's cache.
BLOCK_ELEMENTS = 1 << 18


def swiglu(h_N2I: Tensor, out_NI: Tensor) -> None:
    """``out = silu(gate) * up`` for ``h = [gate | up]``; reads 2·N·I elements and writes N·I of ``h``'s dtype."""
    for h, out in zip(*_blocks(h_N2I, out_NI), strict=True):
        gate, up = h.float().chunk(2, dim=1)
        silu = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        torch.neg(gate, out=silu).exp_().add_(1)
        torch.div(gate, silu, out=silu).mul_(up)
        if silu is not out:
            out.copy_(silu)


def swiglu_reference(h_N2I: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = h_N2I.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(h_N2I.dtype)


def swiglu_backward(h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor, dh_N2I: Tensor, wa_NI: Tensor) -> Tensor:
    """Gradients of ``weight * swiglu(h)`` for ``da = dL/d(weighted activation)``, not yet weighted.

    Writes ``dh`` [N, 2I] and ``wa = weight * swiglu(h)`` [N, I], the operand of the down projection's weight gradient;
    returns dL/dweight float32 [N], the sum of ``da * swiglu(h)`` over I. Nothing but ``h`` is needed from forward
    (SonicMoE's dataflow). ``weight_N`` is float32. ``da`` is overwritten where it is float32.
    """
    dweight_N = torch.empty_like(weight_N)
    for block in zip(*_blocks(h_N2I, da_NI, weight_N, dh_N2I, wa_NI, dweight_N), strict=True):
        _swiglu_backward_block(*block)
    return dweight_N


def _swiglu_backward_block(
    h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor, dh_N2I: Tensor, wa_NI: Tensor, dweight_N: Tensor
) -> None:
    gate, up = h_N2I.float().chunk(2, dim=1)
    da, weight_N1 = da_NI.float(), weight_N[:, None]
    sigmoid = torch.neg(gate).exp_().add_(1).reciprocal_()
    silu = gate * sigmoid
    activation = silu * up
    torch.sum(da * activation, dim=1, out=dweight_N)
    _multiply(activation, weight_N1, wa_NI)
    weighted = da.mul_(weight_N1)
    dgate, dup = dh_N2I.chunk(2, dim=1)
    # d silu/d gate = sigmoid + silu * (1 - sigmoid)
    slope = (1 - sigmoid).mul_(silu).add_(sigmoid)
    _multiply(silu, weighted, dup)
    _multiply(slope, weighted.mul_(up), dgate)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each tensor [N, ...] cut into the same blocks of rows; the first one's elements count."""
    rows = max(1, BLOCK_ELEMENTS // max(1, tensors[0].shape[1]))
    return (tensor.split(rows) for tensor in tensors)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``out = left * right`` of float32 factors; a product that must be rounded overwrites ``left``."""
    if out.dtype == torch.float32:
        torch.mul(left, right, out=out)
    else:
        out.copy_(left.mul_(right))


def swiglu_backward_reference(h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by autograd: (dh, weighted activation, dweight)."""
    h = h_N2I.detach().float().requires_grad_()
    weight = weight_N.detach().clone().requires_grad_()
    with torch.enable_grad():
        gate, up = h.chunk(2, dim=1)
        wa = weight[:, None] * (torch.nn.functional.silu(gate) * up)
        dh, dweight = torch.autograd.grad(wa, (h, weight), da_NI.float())
    return dh.to(h_N2I.dtype), wa.detach().to(h_N2I.dtype), dweight
