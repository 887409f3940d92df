"""Backward passes of autograd functions that have first derivatives only: second derivatives raise an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from moesys.kernels.torch_internals import refuse_function_transforms

InputGradients = tuple[Tensor | None, ...]


def first_derivatives_only(
    backward: Callable[..., tuple[InputGradients, Sequence[Tensor | None]]],
) -> Callable[..., InputGradients]:
    """Turns ``backward`` into the backward pass of an ``autograd.Function``. ``backward`` runs without autograd, and
    returns the gradients and all differentiable inputs of forward, because the gradients are functions of these.

    Under ``create_graph=True`` gradients have the usual values, and to differentiate them raises RuntimeError, with
    respect to whatever inputs. torch's ``once_differentiable`` does so only where incoming gradients require one, and
    not for inputs before the function. ``ctx.creates_graph`` says whether gradients may be differentiated.
    """

    @wraps(backward)
    def called(ctx: Any, *grad_outputs: Tensor) -> InputGradients:
        refuse_function_transforms(*grad_outputs)
        ctx.creates_graph = torch.is_grad_enabled()
        with torch.no_grad():
            gradients, inputs = backward(ctx, *grad_outputs)
        if not ctx.creates_graph:
            return gradients
        refused: InputGradients = _Refusal.apply(len(gradients), *gradients, *inputs, *grad_outputs)
        return refused

    return called


class _Refusal(torch.autograd.Function):
    """An identity on the first ``num_gradients`` tensors, which autograd treats as functions of all tensors."""

    @staticmethod
    def forward(ctx: Any, num_gradients: int, *tensors: Tensor | None) -> InputGradients:
        # They are detached, because torch allows no in-place operation on views that one function returns.
        return tuple(None if tensor is None else tensor.detach() for tensor in tensors[:num_gradients])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> InputGradients:
        raise RuntimeError(
            "second derivatives through experts or tokens of moesys are not possible, as its backward passes have no "
            "derivatives of their own; leave MoE layers out of gradient penalties and Hessian-vector products, or use "
            "finite differences of first derivatives"
        )
