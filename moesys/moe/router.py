"""The router: which experts a token is sent to, with which weight, and the losses that keep them balanced.

T tokens, E experts, K top-k, H hidden size, G expert groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moesys.collectives import guarded
from moesys.config import ModelShape
from moesys.moe.arguments import require_module
from moesys.moe.experts import counts_of_batch, experts_beside, experts_of, mean_over_ranks, ranks_of_routers
from moesys.moe.token_blocks import TokenBlocks
from moesys.torch_private import NO_BACKWARD, current_backward, unseen_by_selective_checkpoints

# The published sigmoid routers add this before they divide by a sum; a softmax's sum (>= 1/E) is not changed by it.
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


class _Losses:
    """The losses of a pass, as means over this rank's tokens. ``own``: their sum for the shares of these tokens.

    ``ended_ns``: when ``router_loss`` first returned them, or backward went through the pass; None before.
    """

    def __init__(self, shape: ModelShape, routing: Routing) -> None:
        self._shape, self.num_tokens = shape, len(routing.expert_TK)
        self._score_E = self._z = None
        share_E = torch.zeros(())
        if shape.router_aux_loss_coef:
            share_E = token_shares(_tokens_of(routing.expert_TK, shape.num_experts), shape.top_k, shape.scoring_func)
            self._score_E = mean_scores(routing.logits_TE, shape.scoring_func)
        if shape.router_z_loss_coef:
            self._z = z_loss(routing.logits_TE)
        self.own = self.total(share_E)
        self.ended_ns: int | None = None
        self.was_returned = False

    def total(self, share_E: Tensor) -> Tensor:
        """Returns the sum for ``share_E``, each expert's share of tokens."""
        shape, terms = self._shape, []
        if self._score_E is not None:
            terms.append(shape.router_aux_loss_coef * (shape.num_experts * (share_E * self._score_E).sum()))
        if self._z is not None:
            terms.append(shape.router_z_loss_coef * self._z)
        return torch.stack(terms).sum()

    def end(self, *, by_backward: bool = False) -> None:
        """Records that ``router_loss`` has returned them, or that backward went through. After both they count no more,
        and their graph is released.
        """
        self.ended_ns = self.ended_ns or perf_counter_ns()
        if by_backward and self.was_returned:
            self.ended_ns, self.own, self._score_E, self._z = 0, self.own.detach(), None, None
        self.was_returned |= not by_backward


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

    Each pass in training mode with gradients enabled adds ``router_aux_loss_coef`` x the load-balancing loss +
    ``router_z_loss_coef`` x :func:`z_loss` over this rank's real tokens to the loss: :func:`router_loss` gives the sum.

    The load-balancing loss is the Switch loss, E x sum over experts of (share of tokens) x (mean score), lowest when
    both are even. Softmax: share = tokens / T, score = probability; what transformers computes for one layer, K at
    perfect balance (arXiv 2101.03961, equations 4 to 6). Sigmoid: share = tokens / (K T), score = sigmoid divided by
    its sum over experts; 1 at perfect balance (arXiv 2412.19437, equations 17 to 20, with the T tokens of a pass in the
    place of one sequence). Only the scores are differentiable.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self, shape: ModelShape, device: torch.device | str | None = None, generator: torch.Generator | None = None
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
        # When its passes began, and their losses, each for as long as the graph of its output exists.
        self._passes: list[tuple[int, ref[_Losses]]] = []
        # The losses of the newest pass, which exist even if its output is not used.
        self._newest: _Losses | None = None
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
        has_losses = shape.router_aux_loss_coef or shape.router_z_loss_coef
        if has_losses and self.training and torch.is_grad_enabled():
            # A recomputation computes them too, since activation checkpointing counts saved tensors, but keeps none.
            losses = _Losses(shape, routing if mask_T is None else Routing(*(each[mask_T] for each in routing)))
            if current_backward() == NO_BACKWARD:
                self._keep(losses, routing)
        return routing

    def _keep(self, losses: _Losses, routing: Routing) -> None:
        """Keeps the losses of a new pass, and those of the passes before it that may share a step with it."""
        self._newest = None
        self._passes = [one for one in self._passes if (kept := one[1]()) is not None and kept.ended_ns is None]
        self._passes.append((perf_counter_ns(), this := ref(losses)))
        self._newest = losses
        node: Any = routing.weight_TK.grad_fn
        if node is not None:
            node.metadata["moesys_router_loss"] = losses
            # The reference is weak, because the losses own the graph and the graph would own the losses.
            routing.logits_TE.register_hook(
                lambda _: None if (alive := this()) is None else alive.end(by_backward=True)
            )

    def alive(self) -> list[_Losses]:
        """Returns the losses of passes through which backward may still go, the oldest first."""
        return [losses for _, each in self._passes if (losses := each()) is not None]

    def extra_repr(self) -> str:
        shape = self.shape
        return f"{shape.hidden_size} -> top {shape.top_k} of {shape.num_experts}, {shape.scoring_func}"

    def __getstate__(self) -> dict[str, Any]:
        # Losses belong to a graph, and a tensor of a graph can be neither copied nor pickled with its model.
        return self.__dict__ | {"_passes": [], "_newest": None}


def token_shares(tokens_E: Tensor, top_k: int, scoring_func: str) -> Tensor:
    """Returns the share of tokens of each expert, float32 [E], from their integers: their sum is K for softmax, and 1
    for sigmoid. No tokens: 0.
    """
    choices = tokens_E.sum().clamp(min=1)
    return tokens_E / (choices // top_k if scoring_func == "softmax" else choices)


def mean_scores(logits_TE: Tensor, scoring_func: str) -> Tensor:
    """Returns the mean over tokens of each expert's score as the Switch loss has it, float32 [E]. No tokens: 0."""
    score_TE = logits_TE.softmax(dim=1) if scoring_func == "softmax" else logits_TE.sigmoid()
    if scoring_func == "sigmoid":
        score_TE = score_TE / (score_TE.sum(dim=1, keepdim=True) + SUM_EPS)
    return score_TE.sum(dim=0) / max(len(logits_TE), 1)


def _tokens_of(expert_TK: Tensor, num_experts: int) -> Tensor:
    # An integer sum is the same in any order, and unlike bincount it does not wait for the device.
    expert = expert_TK.flatten()
    tokens_E = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    # Experts refuse other ids, on all ranks.
    return tokens_E.scatter_add_(0, expert.clamp(0, num_experts - 1), torch.ones_like(expert))


def z_loss(logits_TE: Tensor) -> Tensor:
    """Returns the mean over tokens of logsumexp(logits) squared, which keeps logits small (ST-MoE, arXiv 2202.08906,
    equation 5).

    ``logits_TE`` float32 [T, E], of which no rows give 0. Returns a float32 scalar.
    """
    return logits_TE.logsumexp(dim=1).square().sum() / max(logits_TE.shape[0], 1)


def router_loss(
    model: nn.Module,
    over: Literal["micro_batch", "global_batch"] = "micro_batch",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
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

    ``over``: whose shares of tokens the load-balancing loss has. "micro_batch": this rank's, of each pass.
    "global_batch": those of all ranks, in all passes since the last ``update_router_bias``, which is to be called after
    each step (arXiv 2501.11873). Scores are then weighted by the tokens of their rank, so that the mean of the ranks'
    losses is the loss of one process with the tokens of all. A collective, in which each router has run equally often
    on all ranks. ``group``: all ranks with a copy of the routers, as in ``update_router_bias``.

    Raises ValueError for a model without a ``MoELayer``'s router and, for "global_batch", for a router beside which no
    ``Experts`` count, and where the experts' group is smaller than the job and no ``group`` is given.
    """
    require_module(model)
    if not any(isinstance(each, Router) for each in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no router of moesys, whose losses it would be; for routers of transformers "
            "add outputs.aux_loss or ms.global_aux_loss, and leave the call out where there are none"
        )
    if over not in ("micro_batch", "global_batch"):
        raise ValueError(f'over={over!r} is not known; give "micro_batch" or "global_batch"')
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router) and module.training}
    newest_ns = max((router._passes[-1][0] for router in routers.values() if router._passes), default=0)
    # A router that was not run again after a forward that raised would keep the graph of that forward.
    repeated = [(passes[0][0], passes[-1][0]) for router in routers.values() if len(passes := router._passes) > 1]
    for router in routers.values():
        if router._newest is not None and router._newest.own.requires_grad:
            began_ns = router._passes[-1][0]
            if any(first_ns <= began_ns < last_ns for first_ns, last_ns in repeated):
                router._newest = None
    found: dict[str, list[_Losses]] = {}
    for name, router in routers.items():
        if losses_N := [each for each in router.alive() if each.ended_ns is None or each.ended_ns > newest_ns]:
            found[name] = losses_N
        for losses in losses_N:
            losses.end()
    if over == "global_batch":
        totals = _over_global_batch(model, found, group)
    else:
        totals = [losses.own for losses_N in found.values() for losses in losses_N]
    return torch.stack(totals).sum() if totals else torch.zeros(())


def _over_global_batch(
    model: nn.Module, found: dict[str, list[_Losses]], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Returns the losses of each pass with the shares of the global batch. ``found``: by the names of their routers."""
    layers = experts_beside(
        model,
        found,
        "router {!r} has no ms.Experts of its own in the module around it, whose counts its loss over the global batch "
        'needs; use over="micro_batch"',
    )
    if not layers:
        return []
    own_L = [sum(losses.num_tokens for losses in losses_N) for losses_N in found.values()]
    mean_L = mean_over_ranks(own_L, layers[0], group, "router_loss()")
    tokens_LE = counts_of_batch(layers, group, "router_loss()")
    totals = []
    for layer, losses_N, tokens_E, mean in zip(layers, found.values(), tokens_LE, mean_L, strict=True):
        share_E = token_shares(tokens_E, layer.shape.top_k, layer.shape.scoring_func)
        # The caller divides a router's sum over its N passes by N, as it divides by the ranks.
        for losses in losses_N:
            weight = losses.num_tokens * len(losses_N) / mean
            totals.append(weight * losses.total(share_E.to(weight.device)))
    return totals


def global_aux_loss(
    model: nn.Module,
    router_logits: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Returns what transformers' models return as ``aux_loss``, with shares of tokens over the global batch: all ranks,
    and all micro-batches since the last ``update_router_bias``, which is to be called after each step. Call it once for
    each micro-batch.

    E x sum over experts of f x P (arXiv 2101.03961, equation 4; arXiv 2501.11873): f is the share of tokens in all
    layers, K in sum, whose K largest logits an expert is among; P the mean probability over the tokens of this
    micro-batch in all layers. As in transformers, both are of the logits alone, whatever chooses the experts: sigmoids,
    correction biases or groups of experts. Scores are weighted by the tokens of their rank, so that the mean of the
    ranks' losses is that of one process with the micro-batches of all. Differentiable in ``router_logits``; logits
    without gradients, as in evaluation, count in their own call alone. A collective.

    Args:
        model: a model of transformers under ``parallelize`` or ``ep_implementation="moesys"``.
        router_logits: ``outputs.router_logits`` of a forward with ``output_router_logits=True``, [T, E] of each layer.
        group: all ranks with a copy of the routers, as in ``update_router_bias``.
        attention_mask: as in the model's forward: tokens at 0 do not count.

    Raises:
        ValueError: the model has no counting experts, as many as ``router_logits`` have columns, or the experts' group
            is smaller than the job and no ``group`` is given.
    """
    require_module(model)
    layers = experts_of(model)
    columns, held = ({each.shape[-1] for each in router_logits}, {each.shape.num_experts for each in layers})
    if not columns or columns != held:
        raise ValueError(
            f"router_logits has {len(router_logits)} layers with {sorted(columns)} columns, and the model has "
            f"{len(layers)} of experts that count their tokens, with {sorted(held)} experts; give "
            "outputs.router_logits of a forward with output_router_logits=True, of a model under ms.parallelize"
        )
    first, ranks, newest = layers[0], ranks_of_routers(layers[0], group), router_logits[0]
    E, K = first.shape.num_experts, first.shape.top_k
    kept_T = None if attention_mask is None else attention_mask.flatten().to(newest.device).bool()
    score_E, num_tokens = torch.zeros(E, device=newest.device), 0
    tokens_E = torch.zeros(E, dtype=torch.int64, device=newest.device)
    for logits_TE in router_logits:
        score_TE = (logits_TE if kept_T is None else logits_TE[kept_T]).softmax(dim=1)
        score_E = score_E + score_TE.float().sum(dim=0)
        tokens_E += _tokens_of(score_TE.topk(K, dim=1).indices, E)
        num_tokens += len(score_TE)
    if newest.requires_grad:
        first.preferred_E = tokens_E = first.preferred_E.to(newest.device) + tokens_E
    [mean] = mean_over_ranks([num_tokens], first, group, "global_aux_loss()").to(newest.device)
    if ranks is not None:
        # The counts of this rank are added up further in the next micro-batch.
        tokens_E = tokens_E.clone()
        reduce = partial(dist.all_reduce, tokens_E, group=ranks)
        guarded("global_aux_loss()", ranks, reduce, device_type=tokens_E.device.type)
    return E * (token_shares(tokens_E, K, "softmax") * score_E / mean).sum()


@torch.no_grad()
def topk_by_index(scores: Tensor, k: int) -> Tensor:
    """Returns the columns of each row's k largest scores, largest first, equal scores by the lower column.

    ``torch.topk`` leaves the order of equal scores to the device, and routers do tie: at zero weights, after
    underflow, between groups. Scores and column are packed into one int64 key that no two columns share, so any
    correct top-k gives the one answer without sorting all E.

    ``topk_by_index(tensor([[0.5, 0.9, 0.5, 0.9]]), 3)`` is ``[[1, 3, 0]]``.

    Args:
        scores: [T, E] float32, any device; infinities are ordered, -0.0 equals 0.0. NaN is not an order: the columns
            are then valid and distinct, but which is unspecified.
        k: 0..E.

    Returns:
        [T, k] int64 on the device of ``scores``. Not differentiable: gather with it what should be.

    Raises:
        ValueError: another dtype or shape, or k outside 0..E.
    """
    if scores.dtype != torch.float32 or scores.dim() != 2:
        raise ValueError(f"scores are {scores.dtype} of {scores.dim()} dimensions; give float32 [T, E]")
    num_columns = scores.shape[1]
    if not 0 <= k <= num_columns:
        raise ValueError(f"k={k} of {num_columns} columns; use 0 <= k <= {num_columns}")
    # Adding +0.0 makes -0.0 positive. The bits of positive floats are ordered as integers; those of negative floats
    # are ordered backwards, so all but the sign is flipped.
    bits = (scores + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    key = bits.to(torch.int64)
    key <<= 32
    key |= torch.arange(num_columns - 1, -1, -1, device=scores.device)
    return (num_columns - 1) - (key.topk(k, dim=1).values & 0xFFFFFFFF)
