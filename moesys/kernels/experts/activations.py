"""The activations between the two projections of an expert: swiglu, geglu (gated), gelu, relu2 (not gated).

A gated activation takes [gate | up] of width U = 2I and gives I values, act(gate) · up; the others take U = I.
gelu is the exact one, h · Φ(h) with Gauss' distribution function Φ; relu2 is max(h, 0)².

Kernels call, on float32 tensors of any shape and with ``activation`` a constexpr string:

    gated:      ``activate(gate, up, activation)``  -> a
                ``slopes(gate, up, activation)``    -> a, ∂a/∂gate, ∂a/∂up
    not gated:  ``activate_one(h, activation)``     -> a
                ``slope_one(h, activation)``        -> a, ∂a/∂h

``slopes`` and ``slope_one`` give the same bits of a as ``activate`` and ``activate_one``. Nothing overflows to NaN at
finite h unless the activation itself overflows, and a NaN stays one.

Sources: SwiGLU and GEGLU of Shazeer, arXiv:2002.05202; GELU of Hendrycks and Gimpel, arXiv:1606.08415; ReLU² of So et
al., arXiv:2109.08668.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moesys.kernels.experts.products import INTERPRETED

# Every activation, and whether it takes a gate.
GATED: Mapping[str, bool] = MappingProxyType({"swiglu": True, "geglu": True, "gelu": False, "relu2": False})

SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def activate(gate, up, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the activation of float32 ``gate`` and ``up``."""
    tl.static_assert(activation == "swiglu" or activation == "geglu", "not a gated activation")
    if activation == "swiglu":
        return gate * _sigmoid(gate) * up
    else:
        return gate * _normal_below(gate) * up


@triton.jit
def activate_one(h, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the activation of float32 ``h`` without a gate."""
    tl.static_assert(activation == "gelu" or activation == "relu2", "not an ungated activation")
    if activation == "gelu":
        return h * _normal_below(h)
    else:
        positive = _positive(h)
        return positive * positive


@triton.jit
def slopes(gate, up, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (value, slope along ``gate``, slope along ``up``) of a gated activation."""
    tl.static_assert(activation == "swiglu" or activation == "geglu", "not a gated activation")
    if activation == "swiglu":
        sigmoid = _sigmoid(gate)
        curve = gate * sigmoid
        slope = sigmoid + curve * (1 - sigmoid)
    else:
        below = _normal_below(gate)
        curve = gate * below
        slope = below + gate * _normal_density(gate)
    return curve * up, slope * up, curve


@triton.jit
def slope_one(h, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (value, slope) of an activation without a gate."""
    tl.static_assert(activation == "gelu" or activation == "relu2", "not an ungated activation")
    if activation == "gelu":
        below = _normal_below(h)
        return h * below, below + h * _normal_density(h)
    else:
        positive = _positive(h)
        return positive * positive, 2 * positive


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    # exp overflows to infinity, whose inverse is the right zero. Triton's own exp and division also handle numbers
    # that are too small to change 1 + exp(-x), with twice as many instructions.
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    else:
        return libdevice.fast_dividef(1.0, 1 + libdevice.fast_expf(-x))


@triton.jit
def _normal_below(x):  # type: ignore[no-untyped-def]
    """Returns Φ(x)."""
    return 0.5 * (1 + tl.erf(x * SQRT_HALF))


@triton.jit
def _normal_density(x):  # type: ignore[no-untyped-def]
    """Returns Φ'(x)."""
    return INVERSE_SQRT_2PI * tl.exp(-0.5 * x * x)


@triton.jit
def _positive(x):  # type: ignore[no-untyped-def]
    # not a maximum, which would turn NaN into zero
    return tl.where(x < 0, 0.0, x)
