"""SwiGLU with the routing weight, forward and backward, from operations that give an element the same bits anywhere.

torch's own silu and sigmoid take another code path for the last elements of an array than for the rest, and so an
element's bits depend on its neighbours. ``exp`` and plain arithmetic do not (``tests/kernels`` checks both claims).
Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(h_N2I: Tensor, out_NI: Tensor) -> None:
    """``out = silu(gate) * up`` for ``h = [gate | up]``; reads 2·N·I elements and writes N·I of ``h``'s dtype."""
    gate, up = h_N2I.float().chunk(2, dim=1)
    denominator = torch.neg(gate).exp_().add_(1)
    if out_NI.dtype == torch.float32:
        torch.div(gate, denominator, out=out_NI).mul_(up)
    else:
        out_NI.copy_(torch.div(gate, denominator, out=denominator).mul_(up))


def swiglu_reference(h_N2I: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = h_N2I.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(h_N2I.dtype)


def swiglu_backward(h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor, dh_N2I: Tensor, wa_NI: Tensor) -> Tensor:
    """Gradients of ``weight * swiglu(h)`` for ``da = dL/d(weighted activation)``, not yet weighted.

    Writes ``dh`` [N, 2I] and ``wa = weight * swiglu(h)`` [N, I], the operand of the down projection's weight gradient;
    returns dL/dweight float32 [N], the sum of ``da * swiglu(h)`` over I. Nothing but ``h`` is needed from forward
    (SonicMoE's dataflow). ``weight_N`` is float32.
    """
    gate, up = h_N2I.float().chunk(2, dim=1)
    da = da_NI.float()
    sigmoid = torch.neg(gate).exp_().add_(1).reciprocal_()
    silu = gate * sigmoid
    activation = silu * up
    dweight_N = (da * activation).sum(dim=1)
    weighted = da * weight_N[:, None]
    dgate, dup = dh_N2I.chunk(2, dim=1)
    dup.copy_(silu.mul_(weighted))
    # d silu/d gate = sigmoid * (1 + gate * (1 - sigmoid))
    slope = torch.rsub(sigmoid, 1).mul_(gate).add_(1).mul_(sigmoid)
    dgate.copy_(slope.mul_(weighted.mul_(up)))
    wa_NI.copy_(activation.mul_(weight_N[:, None]))
    return dweight_N


def swiglu_backward_reference(h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by autograd: (dh, weighted activation, dweight)."""
    h = h_N2I.detach().float().requires_grad_()
    weight = weight_N.detach().clone().requires_grad_()
    with torch.enable_grad():
        gate, up = h.chunk(2, dim=1)
        wa = weight[:, None] * (torch.nn.functional.silu(gate) * up)
        dh, dweight = torch.autograd.grad(wa, (h, weight), da_NI.float())
    return dh.to(h_N2I.dtype), wa.detach().to(h_N2I.dtype), dweight
