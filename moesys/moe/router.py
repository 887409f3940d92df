"""The router: which experts a token is sent to, with which weight, and the losses that keep them balanced.

T tokens, E experts, K top-k, H hidden size, G expert groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moesys.config import ModelShape
from moesys.kernels.topk import topk_by_index
from moesys.moe.arguments import require_module
from moesys.moe.token_blocks import TokenBlocks
from moesys.torch_private import NO_BACKWARD, current_backward, unseen_by_selective_checkpoints

# What the published sigmoid routers add before they divide by a sum; it leaves a softmax's sum (>= 1/E) unchanged.
SUM_EPS = 1e-20


class Routing(NamedTuple):
    """The decision of a router for T tokens.

    ``expert_TK`` int64 [T, K]: the chosen experts, highest score first (with the correction bias, where there is one),
    equal scores by the lower expert; -1 for padding. ``weight_TK`` float32 [T, K]: their weights, differentiable with
    respect to the tokens and the router. ``logits_TE`` float32 [T, E].
    """

    expert_TK: Tensor
    weight_TK: Tensor
    logits_TE: Tensor


class _Pass:
    """A training pass of a router: its loss, when it began, and when it ended for ``router_loss``: as soon as its loss
    has been returned, or backward has gone through it.
    """

    _clock: ClassVar[Iterator[int]] = count(1)
    _all: ClassVar[weakref.WeakSet[_Pass]] = weakref.WeakSet()

    def __init__(self, loss: Tensor, routing: Routing) -> None:
        self.began, self.ended, self.was_returned = next(self._clock), 0, False
        # This keeps the loss of a pass whose output is not used, until its router runs again.
        self._held: Tensor | None = loss
        self._loss = weakref.ref(loss)
        node: Any = routing.weight_TK.grad_fn
        if node is not None:
            # The node holds the loss for as long as backward can go through it.
            node.metadata["moesys_router_loss"] = loss
        if routing.logits_TE.requires_grad:
            # The reference is weak, because the loss owns the graph and the graph would own the loss.
            this = weakref.ref(self)
            routing.logits_TE.register_hook(lambda _: None if (alive := this()) is None else alive._go_backward())
        self._all.add(self)

    @property
    def loss(self) -> Tensor | None:
        """Returns the loss, or None if backward can no longer go through the pass."""
        return self._loss()

    def leave_to_graphs(self) -> None:
        """Releases its own loss and those of all later passes, whose graphs would hold the graph of this one."""
        for each in list(self._all):
            if each.began >= self.began:
                each._held = None

    def end(self) -> None:
        self.ended = self.ended or next(self._clock)

    def _go_backward(self) -> None:
        self.end()
        if self.was_returned:
            # The pass counts as older than all others from now on, and its graph is released.
            self.ended, self._held = -1, None


class Chooser(nn.Module):
    """Top-k among the scores of experts, within a token's best groups. A module, so that a hook may choose others."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape

    @torch.no_grad()
    def forward(self, score_TE: Tensor, bias_E: Tensor | None, mask_T: Tensor | None) -> Tensor:
        """Returns ``expert_TK``, by scores + ``bias_E``."""
        shape = self.shape
        choice_TE = score_TE if bias_E is None else score_TE + bias_E
        if shape.n_group > 1:
            choice_TGE = choice_TE.unflatten(1, (shape.n_group, -1))
            group_score_TG = choice_TGE.topk(2, dim=2).values.sum(dim=2)
            group_TK = topk_by_index(group_score_TG, shape.topk_group)
            barred_TG = torch.ones_like(group_score_TG, dtype=torch.bool).scatter_(1, group_TK, False)
            choice_TE = choice_TGE.masked_fill(barred_TG.unsqueeze(2), -torch.inf).flatten(1)
        expert_TK = topk_by_index(choice_TE, shape.top_k)
        return expert_TK if mask_T is None else expert_TK.masked_fill(~mask_T[:, None], -1)


class Router(nn.Module):
    """Top-k routing as published by Mixtral, Qwen3-MoE and OLMoE (softmax) and by DeepSeek-V3 (sigmoid).

    Softmax: probabilities over all E, the K largest, divided by their sum if ``norm_topk_prob``. Sigmoid: a token
    chooses its ``topk_group`` best groups, each scored by its best two experts, and its K best experts in them, all
    by score + ``e_score_correction_bias``; the weights are scores without the bias (arXiv 2412.19437, section 2.1.2).
    Both are multiplied by ``routed_scaling_factor``. Everything is float32, under autocast too.

    ``weight`` float32 [E, H], normal with ``initializer_range`` from ``generator``; ``e_score_correction_bias``
    float32 [E], for sigmoid only. Names and shapes are those of the published checkpoints.

    Each pass in training mode with gradients enabled adds ``router_aux_loss_coef`` x :func:`load_balancing_loss` +
    ``router_z_loss_coef`` x :func:`z_loss` over this rank's real tokens to the loss: :func:`router_loss` gives the sum.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(
            torch.empty(shape.num_experts, shape.hidden_size, dtype=torch.float32, device=device)
        )
        if shape.scoring_func == "sigmoid":
            self.register_buffer(
                "e_score_correction_bias", torch.empty(shape.num_experts, dtype=torch.float32, device=device)
            )
        self.chooser = Chooser(shape)
        self._passes: list[_Pass] = []
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws initial weights and clears the bias, also of modules that were made on the meta device."""
        self.weight.normal_(std=self.shape.initializer_range, generator=generator)
        if self.shape.scoring_func == "sigmoid":
            self.e_score_correction_bias.zero_()

    @unseen_by_selective_checkpoints
    def forward(self, x_TH: Tensor, blocks: TokenBlocks | None = None, mask_T: Tensor | None = None) -> Routing:
        """Routes tokens [T, H] of any floating dtype; T may be 0. ``blocks`` is given if no bit may depend on T.
        ``mask_T``: bool [T], False for padding, which the losses leave out.
        """
        shape = self.shape
        with torch.autocast(x_TH.device.type, enabled=False):
            x_TH, weight_EH = x_TH.float(), self.weight.float()
            linear = functional.linear if blocks is None else blocks.linear
            logits_TE = linear(x_TH, weight_EH)
        if shape.scoring_func == "softmax":
            score_TE = logits_TE.softmax(dim=1)
        else:
            score_TE = logits_TE.sigmoid() if blocks is None else blocks.elementwise(torch.sigmoid, logits_TE)
        bias_E = self.e_score_correction_bias if shape.scoring_func == "sigmoid" else None
        expert_TK = self.chooser(score_TE, bias_E, mask_T)
        weight_TK = score_TE.gather(1, expert_TK.clamp(min=0))
        if shape.norm_topk_prob:
            weight_TK = weight_TK / (weight_TK.sum(dim=1, keepdim=True) + SUM_EPS)
        routing = Routing(expert_TK, weight_TK * shape.routed_scaling_factor, logits_TE)
        if self.training and torch.is_grad_enabled():
            # A recomputation computes the loss too, since activation checkpointing counts saved tensors, but does not
            # keep it: it would hold the recomputed graph until the next step.
            loss = self._loss(routing if mask_T is None else Routing(*(each[mask_T] for each in routing)))
            if loss is not None and current_backward() == NO_BACKWARD:
                self._passes = [*self._unfinished(), _Pass(loss, routing)]
        return routing

    def _unfinished(self) -> list[_Pass]:
        """Returns the passes of this step before another one, without those whose output is gone, as it is where a
        forward raised.
        """
        passes = [each for each in self._passes if not each.ended]
        if passes:
            passes[0].leave_to_graphs()
        return [each for each in passes if each.loss is not None]

    def _loss(self, routing: Routing) -> Tensor | None:
        shape = self.shape
        terms = []
        if shape.router_aux_loss_coef:
            balance = load_balancing_loss(
                routing.logits_TE, routing.expert_TK, shape.num_experts, scoring_func=shape.scoring_func
            )
            terms.append(shape.router_aux_loss_coef * balance)
        if shape.router_z_loss_coef:
            terms.append(shape.router_z_loss_coef * z_loss(routing.logits_TE))
        return torch.stack(terms).sum() if terms else None

    @torch.no_grad()
    def update_bias(self, tokens_E: Tensor) -> None:
        """Moves the correction bias one step towards balance: up where an expert has fewer tokens than the mean.

        bias += router_bias_update_rate x sign(mean - tokens), DeepSeek-V3's balancing without an auxiliary loss
        (arXiv 2412.19437, section 2.1.2). Does nothing at rate 0, which is the only rate for softmax. ``tokens_E``
        integers [E]: each expert's tokens of the step, over all ranks and micro-batches, so that ranks stay equal.
        """
        if not self.shape.router_bias_update_rate:
            return
        # E x (mean - tokens), which has the same sign and is exact in integers.
        shortfall_E = tokens_E.sum() - tokens_E * self.shape.num_experts
        self.e_score_correction_bias += self.shape.router_bias_update_rate * shortfall_E.sign()

    def extra_repr(self) -> str:
        shape = self.shape
        return f"{shape.hidden_size} -> top {shape.top_k} of {shape.num_experts}, {shape.scoring_func}"

    def __getstate__(self) -> dict[str, Any]:
        # Losses belong to a graph, and a tensor of a graph can be neither copied nor pickled with its model.
        return self.__dict__ | {"_passes": []}


def load_balancing_loss(
    logits_TE: Tensor, expert_TK: Tensor, num_experts: int, *, scoring_func: Literal["softmax", "sigmoid"] = "softmax"
) -> Tensor:
    """Returns the Switch loss, E x sum over experts of (share of tokens) x (mean score), lowest when both are even.

    Softmax: share = tokens / T, score = probability; what transformers computes for one layer, K at perfect balance
    (arXiv 2101.03961, equations 4 to 6). Sigmoid: share = tokens / (K T), score = sigmoid divided by its sum over
    experts; 1 at perfect balance (arXiv 2412.19437, equations 17 to 20, with the T tokens of this call in the place of
    one sequence). Only the scores are differentiable.

    Args:
        logits_TE: [T, E] float32. No tokens: the loss is 0.
        expert_TK: [T, K] int64, the chosen experts.
        num_experts: E.

    Returns:
        A float32 scalar.
    """
    num_tokens, top_k = expert_TK.shape
    if scoring_func == "softmax":
        score_TE, full_share = logits_TE.softmax(dim=1), 1
    else:
        sigmoid_TE = logits_TE.sigmoid()
        score_TE, full_share = sigmoid_TE / (sigmoid_TE.sum(dim=1, keepdim=True) + SUM_EPS), top_k
    # An integer sum is the same in any order, and unlike bincount it does not wait for the device.
    expert = expert_TK.flatten()
    tokens_E = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    tokens_E.scatter_add_(0, expert, torch.ones_like(expert))
    rows = max(num_tokens, 1)
    return num_experts * (tokens_E / (rows * full_share) * (score_TE.sum(dim=0) / rows)).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Returns the mean over tokens of logsumexp(logits) squared, which keeps logits small (ST-MoE, arXiv 2202.08906,
    equation 5).

    ``logits_TE`` float32 [T, E], of which no rows give 0. Returns a float32 scalar.
    """
    return logits_TE.logsumexp(dim=1).square().sum() / max(logits_TE.shape[0], 1)


def router_loss(model: nn.Module) -> Tensor:
    """Returns the sum of the losses of all passes through the routers in ``model`` that belong to this step, a float32
    scalar; 0 if there are none, as in evaluation.

    A pass is a forward in training mode with gradients enabled; recomputation by activation checkpointing is none. A
    router that runs twice counts twice, and one that does not run adds nothing. Where nothing is differentiated, as in
    a frozen router whose tokens have no gradient, only the newest pass of a router counts. Call it after the forward
    passes whose losses it is to return, and before backward:

    - Called again, it returns the same, until a router of ``model`` begins another pass: that is the next step's, or
      the next micro-batch's. So each micro-batch may have a call of its own, or several may have one together.
    - Losses that it has returned are left out once backward has gone through their passes.
    - A forward that raised does not count, once its router runs again: what it computed is gone.
    """
    require_module(model)
    routers = [module for module in model.modules() if isinstance(module, Router) and module.training]
    passes = [each for router in routers for each in router._passes]
    newest = max((each.began for each in passes), default=0)
    losses = []
    for router in routers:
        router._passes = [each for each in router._passes if not each.ended or each.ended > newest]
        for each in router._passes:
            if (loss := each.loss) is not None:
                losses.append(loss)
            each.end()
            each.was_returned = True
    return torch.stack(losses).sum() if losses else torch.zeros(())
