"""Functions of rows whose bits do not depend on how many rows share the call: any torch code that works on each row by
itself, forward and backward, computed *wide*: in float32, or in float64 where rows are float64.

N rows; A and B any widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

# On a CPU torch computes the last elements of an array, fewer than these, by another path than the rest ...
TAIL_ELEMENTS = 64
# ... and from so many elements on it cuts an array between threads, which gives it more ends.
THREADED_ELEMENTS = 1 << 15


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
    """``out = function(x)``, computed wide by any torch code that works on each row by itself.

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
    """Gradients of ``weight * function(x)`` by autograd, as ``swiglu_backward`` gives those of SwiGLU.

    Writes ``dx`` [N, A] and ``wy = weight * function(x)`` [N, B], which may lie on the inputs, adds those of the
    function's parameters to ``gradients``, and returns dL/dweight [N], wide.
    """
    dweight_N = torch.empty_like(weight_N)
    for block, padding in _padded_blocks(x_NA, dy_NB.shape[1]):
        num_rows = len(dy_NB[block])
        x, dy, weight = (_wide(rows[block], padding) for rows in (x_NA, dy_NB, weight_N[:, None]))
        # What fills up is not there.
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
    """Blocks of rows, and how many rows are to be put behind each so that its end is none of its own."""
    width, narrow = max(x_NA.shape[1], out_width), min(x_NA.shape[1], out_width)
    if x_NA.device.type != "cpu":
        return ((block, 0) for block in row_blocks(len(x_NA), len(x_NA)))
    padding = -(-TAIL_ELEMENTS // narrow)
    return ((block, padding) for block in row_blocks(len(x_NA), (THREADED_ELEMENTS - 1) // width - padding))


def _wide(rows_NA: Tensor, padding: int) -> Tensor:
    """A wide copy with so many copies of the first row behind it."""
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
        """None is for parameters that were not used."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total += gradient

    def write(self) -> None:
        for gradient, total in zip(self._gradients, self._sums, strict=True):
            gradient.copy_(total)


def row_blocks(num_rows: int, rows_per_block: int) -> Iterator[slice]:
    """Where they begin and end; where there are rows, at least one each."""
    step = max(1, rows_per_block)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))
