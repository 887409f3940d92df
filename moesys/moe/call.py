"""LayerCall: one micro-batch's way through one layer, from its plan to its gradients; and its autograd.Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesys.layout import ExpertLayout
from moesys.moe.expert_parameters import as_gradients
from moesys.moe.shards import Restored
from moesys.overlap.executor import Executor, Saved
from moesys.torch_private import will_execute

if TYPE_CHECKING:
    from moesys.moe.layer import MoELayer


class LayerCall:
    """What forward, recomputation and backward of one micro-batch share.

    It owns the layout of its micro-batch, so that however many micro-batches are under way, in whatever order their
    backwards run, each finds the experts where its own forward had them.

    ``previous`` is the call of the layer before, in the same forward pass of a linked model: backward restores for it.
    ``checkpointed``: a recomputation will come between forward and backward.
    """

    def __init__(
        self,
        owner: MoELayer,
        layout: ExpertLayout,
        executor: Executor,
        previous: LayerCall | None,
        checkpointed: bool,
    ) -> None:
        self.owner, self.layout, self.executor = owner, layout, executor
        self.previous, self.checkpointed = previous, checkpointed
        self.upcoming: Sequence[MoELayer] = ()
        self.expects_backward = torch.is_grad_enabled()
        self._restored: Restored | None = None

    @property
    def layer(self) -> int:
        return self.owner.layer_index

    def restore(self) -> Restored:
        """The experts of this call, on their way or here; starts bringing them if nobody has."""
        if self._restored is None:
            self._restored = self.owner.start_restore(self.layout)
        return self._restored

    def adopt(self, restored: Restored) -> None:
        """Use experts that were brought ahead of time."""
        self._restored = restored

    def release(self) -> None:
        self._restored = None

    def experts_for_forward(self) -> Restored:
        """Wait for the experts; dispatch is through, so the next layers' experts may travel."""
        restored = self.restore().spread()
        for layer in self.upcoming:
            layer.prefetch()
        self.upcoming = ()
        return restored.wait()

    def experts_for_backward(self) -> Restored:
        """Wait for the experts; the layers before restore theirs meanwhile, and gradients that waited set off."""
        restored = self.restore().spread()
        runtime = self.owner.runtime
        if runtime is not None:
            runtime.behind_backward(self)
        return restored.wait()

    @property
    def frees_after_forward(self) -> bool:
        return self.owner.reshard_after_forward


class RoutedExperts(torch.autograd.Function):
    """y [T, H] from x [T, H], routing weights float32 [T, K] and this rank's masters, by a ``LayerCall``.

    Saves the arrived rows of x and the pre-activations, and no expert that can be restored.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_TK: Tensor, masters: Tensor, call: LayerCall, replay: bool) -> Tensor:
        with torch.autocast(x_TH.device.type, enabled=False):
            call.restore().keep_casts = call.expects_backward and not call.frees_after_forward
            y_TH, saved = call.executor.forward(x_TH, weight_TK, call.experts_for_forward)
        ctx.call = call
        ctx.save_for_backward(weight_TK, masters, saved.arrivals_MH, saved.h_P2I)
        # What a recomputation restores, the backward right behind it uses.
        if call.frees_after_forward and not replay:
            call.release()
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        owner = call.owner
        weight_TK, masters, arrivals_MH, h_P2I = ctx.saved_tensors
        dy_TH = grad_outputs[0].contiguous()
        grads_DP = gradients = None
        if ctx.needs_input_grad[2]:
            grads_DP = owner.shards.new_gradients(call.layout, masters.device)
            gradients = as_gradients(grads_DP, owner.shape)
        with torch.autocast(dy_TH.device.type, enabled=False):
            call.restore()
            dx_TH, dweight_TK = call.executor.backward(
                dy_TH, weight_TK, Saved(arrivals_MH, h_P2I), call.experts_for_backward, gradients
            )
        call.release()
        dmasters = None
        if grads_DP is not None:
            dmasters = owner.reshard_gradients(grads_DP, call, may_delay=_reaches_grad(ctx.next_functions[2][0]))
        if owner.runtime is not None:
            owner.runtime.after_backward()
        return dx_TH, dweight_TK, dmasters, None, None


def _reaches_grad(node: Any) -> bool:
    """Whether this backward ends in the ``.grad`` of the leaf behind ``node``: not so for ``torch.autograd.grad``, nor
    for other ``inputs`` of ``backward``.
    """
    while node.next_functions:
        node = node.next_functions[0][0]
    return will_execute(node)
