"""Functions of rows whose bits do not depend on how many rows share the call, computed *wide*: in float32, or in
float64 where rows are float64.

SwiGLU with the routing weight is written out, from operations that give an element the same bits anywhere: torch's own
silu and sigmoid take another code path for the last elements of an array than for the rest, while ``exp`` and plain
arithmetic do not (``tests/kernels`` checks it). ``row_function`` makes such a function of any torch code that works on
each row by itself.

N rows; A and B any widths; I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

# On a CPU torch computes the last elements of an array, fewer than these, by another code path.
TAIL_ELEMENTS = 64
# An array of at least so many elements is divided over threads, and each part has last elements of its own.
THREADED_ELEMENTS = 1 << 15
# Rows are computed in blocks of about so many elements, whose intermediate results stay in a core's cache.
BLOCK_ELEMENTS = 1 << 18


class RowFunction(NamedTuple):
    """A function of rows [N, A] that gives [N, B], so that a row's bits depend on no other row.

    forward(x, out): writes out.
    backward(x, dy, weight_N, dx, wy): writes dx and wy of ``weight * function(x)`` and returns dL/dweight, as
        ``by_rows_backward`` and ``swiglu_backward`` do.
    halves: A / B, 2 where a row is [gate | up].
    """

    forward: Callable[[Tensor, Tensor], None]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    halves: int = 1


def by_rows(function: Callable[[Tensor], Tensor], x_NA: Tensor, out_NB: Tensor) -> None:
    """Writes ``out = function(x)``, computed wide by any torch code that works on each row by itself.

    A row's bits depend on no other row: rows go through in blocks with padding, so that a block's end, which torch
    computes in another way, holds no row that counts.
    """
    for block, padding in _padded_blocks(x_NA, out_NB.shape[1]):
        out_NB[block] = function(_wide(x_NA[block], padding))[: len(out_NB[block])]


def by_rows_backward(
    function: Callable[[Tensor], Tensor],
    x_NA: Tensor,
    dy_NB: Tensor,
    weight_N: Tensor,
    dx_NA: Tensor,
    wy_NB: Tensor,
    gradients: ParameterGradients,
) -> Tensor:
    """Computes the gradients of ``weight * function(x)`` by autograd, as ``swiglu_backward`` gives those of SwiGLU.

    Writes ``dx`` [N, A] and ``wy = weight * function(x)`` [N, B], which may lie on the inputs, adds those of the
    function's parameters to ``gradients``, and returns dL/dweight [N], wide.
    """
    dweight_N = torch.empty_like(weight_N)
    for block, padding in _padded_blocks(x_NA, dy_NB.shape[1]):
        num_rows = len(dy_NB[block])
        x, dy, weight = (_wide(rows[block], padding) for rows in (x_NA, dy_NB, weight_N[:, None]))
        # Rows that pad the block have no part in any sum.
        weight[num_rows:] = 0
        with torch.enable_grad():
            y = function(x.requires_grad_())
            dx, *dparameters = torch.autograd.grad(
                y, (x, *gradients.parameters), (dy * weight).to(y.dtype), allow_unused=True
            )
        y = y.detach()
        gradients.add(dparameters)
        dweight_N[block] = (dy * y).sum(dim=1)[:num_rows]
        dx_NA[block] = dx[:num_rows]
        wy_NB[block] = (y * weight)[:num_rows]
    return dweight_N


def row_function(function: Callable[[Tensor], Tensor], gradients: ParameterGradients, halves: int = 1) -> RowFunction:
    """Returns what torch code on rows computes, with its gradients by autograd; those of its parameters are added to
    ``gradients``.
    """
    return RowFunction(partial(by_rows, function), partial(by_rows_backward, function, gradients=gradients), halves)


def _padded_blocks(x_NA: Tensor, out_width: int) -> Iterator[tuple[slice, int]]:
    """Returns blocks of rows, and how many rows to add behind each so that none of its own is at the end."""
    width, narrow = max(x_NA.shape[1], out_width), min(x_NA.shape[1], out_width)
    if x_NA.device.type != "cpu":
        return ((block, 0) for block in row_blocks(len(x_NA), len(x_NA)))
    padding = -(-TAIL_ELEMENTS // narrow)
    return ((block, padding) for block in row_blocks(len(x_NA), (THREADED_ELEMENTS - 1) // width - padding))


def _wide(rows_NA: Tensor, padding: int) -> Tensor:
    """Returns a wide copy with ``padding`` copies of the first row behind it."""
    wide = rows_NA.new_empty(
        (len(rows_NA) + padding, rows_NA.shape[1]), dtype=torch.promote_types(rows_NA.dtype, torch.float32)
    )
    wide[: len(rows_NA)] = rows_NA
    wide[len(rows_NA) :] = rows_NA[:1]
    return wide


class ParameterGradients:
    """Gradients of parameters that a function of rows has, summed wide, block of rows after block of rows."""

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        needed = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        self.parameters = [parameter for parameter, _ in needed]
        self._gradients = [gradient for _, gradient in needed]
        self._sums = [torch.zeros_like(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in self._gradients]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds gradients; None stands for a parameter that was not used."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total += gradient

    def write(self) -> None:
        for gradient, total in zip(self._gradients, self._sums, strict=True):
            gradient.copy_(total)


def row_blocks(num_rows: int, rows_per_block: int) -> Iterator[slice]:
    """Returns blocks of at most ``rows_per_block`` rows, and of at least one."""
    step = max(1, rows_per_block)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def swiglu(h_N2I: Tensor, out_NI: Tensor) -> None:
    """Writes ``out = silu(gate) * up`` for ``h = [gate | up]``; reads 2·N·I elements and writes N·I of ``h``'s
    dtype.
    """
    for h, out in zip(*_blocks(h_N2I, out_NI), strict=True):
        gate, up = h.float().chunk(2, dim=1)
        silu = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        torch.neg(gate, out=silu).exp_().add_(1)
        torch.div(gate, silu, out=silu).mul_(up)
        if silu is not out:
            out.copy_(silu)


def swiglu_backward(h_N2I: Tensor, da_NI: Tensor, weight_N: Tensor, dh_N2I: Tensor, wa_NI: Tensor) -> Tensor:
    """Computes the gradients of ``weight * swiglu(h)`` for ``da = dL/d(weighted activation)``, not yet weighted.

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
    """Returns the tensors [N, ...] cut into the same blocks of rows, whose size the width of the first one decides."""
    rows = max(1, BLOCK_ELEMENTS // max(1, tensors[0].shape[1]))
    return (tensor.split(rows) for tensor in tensors)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes ``out = left * right`` of float32 factors; a product that must be rounded overwrites ``left``."""
    if out.dtype == torch.float32:
        torch.mul(left, right, out=out)
    else:
        out.copy_(left.mul_(right))
