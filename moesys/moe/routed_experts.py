"""RoutedExperts: the autograd.Function of a layer, which runs a planned ``LayerCall`` forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesys.kernels.first_derivatives import InputGradients, first_derivatives_only
from moesys.kernels.launch import on_its_device
from moesys.moe.call import LayerCall
from moesys.moe.lookahead import Link
from moesys.moe.shards import Cross, Finish, Restored
from moesys.overlap.executor import Saved
from moesys.torch_private import after_this_backward, will_execute

# Tensors of a layer that are saved for backward, beside its masters.
NUM_SAVED = 3


class RoutedExperts(torch.autograd.Function):
    """y [T, H] from x [T, H], routing weights float32 [T, K] and this rank's masters.

    Saves the arrived rows of x and the pre-activations, and no expert that can be restored.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_TK: Tensor, call: LayerCall, link: Link, *masters: Tensor) -> Tensor:
        store = call.store

        def wait_for_experts() -> Restored:
            # Dispatch is through, so the next layers' experts may travel.
            restored = call.restore().spread()
            call.prefetch_upcoming()
            return restored.wait()

        with torch.autocast(x_TH.device.type, enabled=False):
            call.restore().keep_casts = call.expects_backward and not store.reshard_after_forward
            if call.replayed:
                y_TH, saved = call.executor.recompute(x_TH, weight_TK, wait_for_experts, read=call.output_read)
            else:
                y_TH, saved = call.executor.forward(x_TH, weight_TK, wait_for_experts)
        if y_TH is None:
            # The checkpoint stops before anybody sees it.
            y_TH = x_TH.new_full((), math.nan).expand_as(x_TH)
        ctx.call, ctx.link = call, link
        # Gradients are functions of x, which backward does not read; an empty slice says so without keeping x.
        with torch.enable_grad():
            ctx.x_0H = x_TH[:0].clone()
        ctx.save_for_backward(weight_TK, saved.arrivals_MH, saved.h_P2I, *masters)
        # What a recomputation restores, the backward right behind it uses.
        if store.reshard_after_forward and not call.replayed:
            call.release()
        return y_TH

    @staticmethod
    @first_derivatives_only
    @on_its_device
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[InputGradients, Sequence[Tensor]]:
        call: LayerCall = ctx.call
        lookahead, store = ctx.link.lookahead, call.store
        weight_TK, arrivals_MH, h_P2I, *masters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        dy_TH = grad_outputs[0].contiguous()
        grads_DP = gradients = None
        if any(wanted):
            grads_DP = store.new_gradients(call.layout)
            gradients = store.shards.form.gradients(grads_DP)

        def wait_for_experts() -> Restored:
            # Meanwhile the layers before restore theirs, and gradients that waited set off.
            restored = call.restore().spread()
            lookahead.behind_backward(call)
            return restored.wait()

        with torch.autocast(dy_TH.device.type, enabled=False):
            call.restore()
            saved = Saved(arrivals_MH, h_P2I, weight_TK)
            dx_TH, dweight_TK = call.executor.backward(dy_TH, saved, wait_for_experts, gradients)
        call.release()
        dmasters: list[Tensor | None] = [None] * len(masters)
        if grads_DP is not None:
            cross = _in_dtypes(
                store.start_reshard(grads_DP, call.layout, call.generation), [master.dtype for master in masters]
            )
            leaf = ctx.next_functions[2 + wanted.index(True)][0]
            # Delayed gradients are in no graph, so none is delayed where gradients may be differentiated.
            may_delay = store.delay_reshard and store.masters.may_delay and not ctx.creates_graph
            late = may_delay and _reaches_grad(leaf) and lookahead.delay(store, cross)
            if store.delay_reshard:
                store.masters.expect_gradient(late=late)
            if not late:
                dmasters = [gradient if want else None for gradient, want in zip(cross()(), wanted, strict=True)]
        lookahead.after_backward()
        # All of backward is launched by then, so the device has work while the host waits for a part of forward.
        if call.check is not None:
            after_this_backward(call.check)
        return (dx_TH, dweight_TK, None, None, *dmasters), (ctx.x_0H, weight_TK, *masters)


def _in_dtypes(cross: Cross, dtypes: Sequence[torch.dtype]) -> Cross:
    """Gives gradients in the masters' dtypes, whenever they come: from float32, as some layouts add them up in float64
    and others do not.
    """

    def crossed() -> Finish:
        finish = cross()
        return lambda: tuple(gradient.float().to(dtype) for gradient, dtype in zip(finish(), dtypes, strict=True))

    return crossed


def _reaches_grad(node: Any) -> bool:
    """Whether this backward ends in the ``.grad`` of the leaf behind ``node``: not so for ``torch.autograd.grad``, nor
    for other ``inputs`` of ``backward``.
    """
    while node.next_functions:
        node = node.next_functions[0][0]
    return will_execute(node)
