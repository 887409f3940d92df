"""Correction biases of routers, which balance experts without a loss: how they move after each optimizer step.

A bias is added to the scores by which a router chooses, and not to the weights that it gives. T tokens, E experts, K
top-k, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moesys.collectives import guarded, meet, require_group
from moesys.moe.arguments import require_module
from moesys.moe.experts import Experts, counts_of_batch, experts_beside, experts_of, ranks_of_routers
from moesys.moe.gradients import BIASES, channels_of, require_equal_values, reshard_units
from moesys.moe.router import Router
from moesys.torch_private import NO_BACKWARD, current_backward, unseen_by_selective_checkpoints

# The names of routers that are beside or around their biases.
ROUTERS = ("gate", "router")
# The bins of a histogram of ``QuantileBalancer``, for each expert.
BINS = 1000
SCORES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softmax": partial(torch.softmax, dim=-1)}
# Scores that a router rounds to 16 bits may put experts in another order than exact ones, if they are as near as this.
ROUNDING = 0.01


def update_router_bias(model: nn.Module, group: dist.ProcessGroup | None = None, *, rate: float | None = None) -> None:
    """Moves every router's correction bias towards balance, after an optimizer step, as ``move_router_bias`` does.

    A step's tokens are counted in integers, on all ranks and in all micro-batches since the last call; those of
    evaluation and of recomputation are not. So all ranks have the bias that one process with the whole batch would
    have. Call it after every step also where no router has a bias, with ``rate=0``, if
    ``router_loss(over="global_batch")`` or ``global_aux_loss`` use the counts: they are of one step only because this
    call ends it. A collective of the ranks that share the experts.

    Args:
        model: moesys' routers, and transformers' under ``parallelize`` or ``ep_implementation="moesys"``.
        group: all ranks that have a copy of the routers, where these are more than the ranks that share the experts, as
            on a mesh of several expert groups: their tokens count together. A collective of these ranks.
        rate: by default each moesys router's own ``router_bias_update_rate``. Needed for others' routers.

    Raises:
        ValueError: ``rate`` is not 0, and ``model`` has neither a bias nor a router of moesys that declares a rate; the
            experts' group is smaller than the job and no ``group`` is given; a router of another library has a bias and
            no ``rate`` is given, or its experts do not count; a bias that ``move_router_bias`` refuses.
        RankMismatchError: some ranks call it while others are in another call, or ranks have other biases.
    """
    require_module(model)
    # A value that is written into a copy that FSDP has gathered is lost.
    reshard_units(model)
    biases = _biases(model)
    _compare(model, biases, "update_router_bias()")
    if not biases and (rate or (rate is None and not any(isinstance(each, Router) for each in model.modules()))):
        raise ValueError(
            f"{type(model).__name__} has no correction bias that rate={rate} could move: no buffer, and no parameter "
            f"without requires_grad, is named {' or '.join(BIASES)}; move one of another name by "
            "ms.move_router_bias(bias_E, tokens_E, rate), or give rate=0 to only end the step's counts"
        )
    moves: dict[str, tuple[Tensor, float]] = {}
    for path, bias_E in biases.items():
        router = model.get_submodule(path.rpartition(".")[0])
        own_rate = router.shape.router_bias_update_rate if isinstance(router, Router) else None
        if (used := own_rate if rate is None else rate) is None:
            raise ValueError(
                f"{path} is the bias of a router that declares no rate; give rate=, for example 0.001 as "
                "DeepSeek-V3 has it, or 0 to leave biases as they are"
            )
        if used:
            moves[path] = bias_E, used
    layers = _experts_beside(model, moves)
    if layers:
        _meet_others("update_router_bias()", group, layers[0])
    tokens_LE = counts_of_batch(layers, group, "update_router_bias()")
    for (path, (bias_E, _)), tokens_E in zip(moves.items(), tokens_LE, strict=True):
        _check(bias_E, tokens_E, path)
    for (bias_E, used), tokens_E in zip(moves.values(), tokens_LE, strict=True):
        move_router_bias(bias_E, tokens_E, used)
    for experts in experts_of(model):
        experts.take_counts()


@torch.no_grad()
def move_router_bias(bias_E: Tensor, tokens_E: Tensor, rate: float) -> None:
    """Moves a correction bias one step towards balance, in place: up where an expert has fewer tokens than the mean.

    bias += rate x sign(mean - tokens), DeepSeek-V3's balancing without an auxiliary loss (arXiv 2412.19437, section
    2.1.2). ``bias_E``: float32 or float64, of E elements; a ``DTensor`` is moved on all its ranks. ``tokens_E``
    integers [E]: each expert's tokens of the step, over all ranks and micro-batches, so that ranks stay equal.

    Raises TypeError for counts that are not integers, and ValueError for a bias of 16 bits, which would lose small
    steps, or of another number of experts.
    """
    _check(bias_E, tokens_E)
    # E x (mean - tokens), which has the same sign and is exact in integers.
    tokens_E = tokens_E.long()
    shortfall_E = tokens_E.sum() - tokens_E * tokens_E.numel()
    bias_E += _laid_out(rate * shortfall_E.sign().to(bias_E.dtype), bias_E)


class QuantileBalancer:
    """Sets every router's correction bias, after an optimizer step, to that with which each expert would have been
    chosen by K / E of the step's tokens: ``balancer = ms.QuantileBalancer(model)``, ``balancer.update()``.

    A token whose (K+1)-th best score + bias is α chooses an expert of score s from a bias of α - s on. An expert's new
    bias is the K / E quantile of α - s over the tokens, minus the mean over experts (Kimi K3's quantile balancing,
    section 2.3.3 and appendix D of its report): there is no rate, and a few steps balance skewed scores. The quantile
    is read from a histogram of 1000 bins from min(bias) - 1 to max(bias) + 1 for each expert. Tokens are counted in
    integers as for ``update_router_bias``, whose place ``update`` takes. Histograms are not saved: save between steps.
    Copies of the model, and what is unpickled, have no balancer.

    Args:
        model: as in ``update_router_bias``.
        group: all ranks that have a copy of the routers, as in ``update_router_bias``.
        scoring_func: how routers of other libraries make scores of their logits, which come first in their output.

    Raises ValueError for a model without biases or of torchtitan, which moves them itself; for a router of another
    library without ``scoring_func``, whose name is neither "gate" nor "router", or whose experts do not count; for a
    router that chooses all experts, is limited to groups of experts (``topk_group``), or is balanced already; for a
    bias that ``move_router_bias`` refuses; and for a ``group`` that is missing.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        scoring_func: Literal["sigmoid", "softmax"] | None = None,
    ) -> None:
        require_module(model)
        if any(type(each).__module__.startswith("torchtitan.") for each in model.modules()):
            raise ValueError(
                f"{type(model).__name__} has routers of torchtitan, which QuantileBalancer does not balance: "
                "torchtitan's optimizers move expert_bias_E after every step; set load_balance_coeff, which is their "
                "rate, in the model's configuration"
            )
        if not (biases := _biases(model)):
            raise ValueError(
                f"{type(model).__name__} has no correction bias that could be moved; declare "
                'ModelShape(scoring_func="sigmoid"), or balance its routers by ms.router_loss or ms.global_aux_loss'
            )
        layers = _experts_beside(model, biases)
        self._model, self._layer, self._ranks = model, layers[0], ranks_of_routers(layers[0], group)
        routers = [_router(model, path, scoring_func) for path in biases]
        for (path, bias_E), layer, router in zip(biases.items(), layers, routers, strict=True):
            _check(bias_E, layer.counted_E, path)
            # The first name is moesys', the second transformers'.
            limits = getattr(router, "shape", router)
            groups = getattr(limits, "n_group", getattr(limits, "num_group", 1))
            if layer.shape.top_k == layer.shape.num_experts or getattr(limits, "topk_group", groups) < groups:
                raise ValueError(
                    f"{path} is of a router that chooses all {layer.shape.num_experts} experts, or among some of "
                    f"{groups} groups, which quantiles do not balance; use ms.update_router_bias"
                )
            if layer.count_scores is not None:
                raise ValueError(f"{path} has a QuantileBalancer already, and two would count apart; use that one")
        self._histograms = {
            path: _Histogram(model, path, layer, router, scoring_func)
            for path, layer, router in zip(biases, layers, routers, strict=True)
        }

    @torch.no_grad()
    def update(self) -> None:
        """Sets the biases, and ends the step's counts as ``update_router_bias`` does. A collective.

        Raises ValueError where routers chose others than the K best by score + bias, before any bias is set.
        """
        histograms, biases = self._histograms.values(), _biases(self._model)
        _compare(self._model, biases, "QuantileBalancer.update()")
        flat = torch.cat([each.counted for each in histograms])
        _meet_others("QuantileBalancer.update()", self._ranks, self._layer)
        if self._ranks is not None:
            reduce = partial(dist.all_reduce, flat, group=self._ranks)
            guarded("QuantileBalancer.update()", self._ranks, reduce, device_type=flat.device.type)
        counted = flat.split([len(each.counted) for each in histograms])
        found = torch.stack([torch.stack([each[:BINS].sum(), each[-1]]) for each in counted]).tolist()
        for path, (tokens, astray) in zip(self._histograms, found, strict=True):
            if astray:
                raise ValueError(
                    f"{path}: {astray} of {tokens} tokens have others than the experts of the highest score + bias, as "
                    "under replay or with another scoring_func; use ms.update_router_bias, which only needs counts"
                )
        for (path, each), counts, (tokens, _) in zip(self._histograms.items(), counted, found, strict=True):
            if tokens:
                bias_E = biases[path]
                bias_E.copy_(_laid_out(each.quantiles(counts, bias_E), bias_E))
            each.counted.zero_()
        for experts in experts_of(self._model):
            experts.take_counts()


class _Hook:
    """A hook of a router, which does nothing in copies of the router: they have no balancer."""

    def __init__(self, see: Callable[..., None] | None = None) -> None:
        self._see = see

    def __call__(self, *given: Any) -> None:
        if self._see is not None:
            self._see(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class _Histogram:
    """Counts, for each expert of a router, of the biases from which on the tokens of a step choose it, int32 [E x B];
    and of the tokens whose experts were not the best, behind them.
    """

    def __init__(self, model: nn.Module, path: str, layer: Experts, router: nn.Module, scoring: Any) -> None:
        self._top_k, self._path = layer.shape.top_k, path
        # The scores and the bias of the router's newest pass, until its experts run.
        self._seen: tuple[Tensor, Tensor] | None = None
        self.counted = torch.zeros(layer.shape.num_experts * BINS + 1, dtype=torch.int32)
        owner, _, name = path.rpartition(".")
        module, see = model.get_submodule(owner), self._see
        if isinstance(router, Router):
            router.chooser.register_forward_pre_hook(_Hook(lambda _, given: see(Tensor.detach, given[0], given[1])))
        else:
            # First, as FSDP's hook takes a bias that is a parameter away.
            scores = SCORES[scoring]
            hook = _Hook(lambda *given: see(scores, given[2][0], getattr(module, name)))
            router.register_forward_hook(hook, prepend=True)
        layer.count_scores = self._count

    @torch.compiler.disable
    @unseen_by_selective_checkpoints
    def _see(self, scores: Callable[[Tensor], Tensor], given_TE: Tensor, bias_E: Tensor) -> None:
        if torch.is_grad_enabled() and current_backward() == NO_BACKWARD:
            self._seen = scores(given_TE.detach()), bias_E.detach().flatten().to(torch.float32, copy=True)

    @torch.no_grad()
    def _count(self, expert_TK: Tensor, mask_T: Tensor | None) -> None:
        if self._seen is None:
            raise ValueError(
                f"{self._path}: experts train on choices of a router that ran without gradients, whose scores are not "
                "counted; use ms.update_router_bias, which only needs counts"
            )
        (score_TE, bias_E), self._seen = self._seen, None
        if len(score_TE) != len(expert_TK):
            raise ValueError(
                f"a router gives scores of {len(score_TE)} tokens, of which its experts have {len(expert_TK)} on this "
                "rank, as under tensor parallelism, where QuantileBalancer cannot count; use ms.update_router_bias"
            )
        choice_TE = score_TE + bias_E
        cutoff_T1 = choice_TE.topk(self._top_k + 1, dim=1).values[:, -1:]
        low, width = _bins(bias_E)
        bin_TE = ((cutoff_T1 - score_TE - low) / width).long().clamp_(0, BINS - 1)
        bin_TE += torch.arange(0, BINS * bin_TE.shape[1], BINS, device=bin_TE.device)
        real_T1 = torch.ones_like(cutoff_T1, dtype=torch.int32) if mask_T is None else mask_T[:, None].int()
        # Padding has the expert -1.
        chosen_TK = expert_TK.long().clamp(min=0)
        astray_T1 = choice_TE.gather(1, chosen_TK).amin(dim=1, keepdim=True) < cutoff_T1 - ROUNDING
        self.counted = self.counted.to(bin_TE.device)
        self.counted.scatter_add_(0, bin_TE.flatten(), real_T1.expand_as(bin_TE).flatten())
        self.counted[-1] += (astray_T1 * real_T1).sum()

    def quantiles(self, counted: Tensor, bias_E: Tensor) -> Tensor:
        """Returns the biases, float64 [E], from the counts of all ranks, which were made beside ``bias_E``."""
        count_EB = counted[:-1].view(-1, BINS).long()
        up_to_EB = count_EB.cumsum(dim=1)
        E, choices = len(count_EB), up_to_EB[0, -1] * self._top_k
        bin_E1 = (up_to_EB * E < choices).sum(dim=1, keepdim=True)
        count_E1 = count_EB.gather(1, bin_E1)
        before_E1 = up_to_EB.gather(1, bin_E1) - count_E1
        whole_E = bias_E.full_tensor() if isinstance(bias_E, DTensor) else bias_E
        low, width = (each.double().to(counted.device) for each in _bins(whole_E.float()))
        quantile_E1 = low + width * (bin_E1 + (choices.double() / E - before_E1) / count_E1)
        return (quantile_E1 - quantile_E1.mean()).flatten()


def _bins(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the beginning of the first bin and the width of bins, which hold all biases for scores in [0, 1]."""
    low = bias_E.min() - 1
    return low, (bias_E.max() + 1 - low) / BINS


def _router(model: nn.Module, path: str, scoring_func: str | None) -> nn.Module:
    """Returns the router that chooses by the bias at ``path``: the bias' owner, or around it, or a child."""
    modules, owner = dict(model.named_modules()), path.rpartition(".")[0]
    if isinstance(modules[owner], Router):
        return modules[owner]
    names = (owner, owner.rpartition(".")[0], *(f"{owner}.{child}" for child in ROUTERS))
    found = [modules[name] for name in names if name in modules and name.rpartition(".")[2] in ROUTERS]
    if not found:
        raise ValueError(
            f"{path} has no router beside it that is named {' or '.join(ROUTERS)}; use ms.update_router_bias, which "
            "only needs counts"
        )
    if scoring_func is None or scoring_func not in SCORES:
        raise ValueError(
            f"{path} is the bias of another library's router, and scoring_func={scoring_func!r} does not say what it "
            'is added to; give scoring_func="sigmoid", as DeepSeek-V3 and GLM-4 have it, or "softmax", as Ernie 4.5'
        )
    return found[0]


def _biases(model: nn.Module) -> dict[str, Tensor]:
    """Returns the correction biases in ``model`` by their paths."""
    tensors = chain(model.named_buffers(), model.named_parameters())
    # A bias that requires gradients is its optimizer's.
    return {path: each for path, each in tensors if path.rpartition(".")[2] in BIASES and not each.requires_grad}


def _compare(model: nn.Module, biases: Mapping[str, Tensor], call: str) -> None:
    """Raises ``RankMismatchError`` on all ranks where they are in different calls, or have other biases."""
    layers = experts_of(model)
    for channel in channels_of(layers):
        require_equal_values(model, channel, call, layers[0].store.masters.device, always=biases)


def _meet_others(call: str, group: dist.ProcessGroup | None, layer: Experts) -> None:
    """Raises ``RankMismatchError`` where ranks of ``group`` beside those that share the experts are in another call.
    The ranks that share the experts have met in ``_compare``.
    """
    require_group(group, "the argument group")
    if group is not None and not {*dist.get_process_group_ranks(group)} <= {*layer.token_channel.members}:
        meet(call, group, layer.store.masters.device)


def _experts_beside(model: nn.Module, paths: Iterable[str]) -> list[Experts]:
    return experts_beside(
        model,
        paths,
        "{} belongs to experts that do not count their tokens; run the model under ms.parallelize, which one rank can "
        "too, or call ms.move_router_bias(bias_E, tokens_E, rate) with counts of your own",
    )


def _laid_out(value_E: Tensor, bias_E: Tensor) -> Tensor:
    """Returns the values in dtype, shape and sharding of a bias."""
    value_E = value_E.to(bias_E.device, bias_E.dtype).view(bias_E.shape)
    if isinstance(bias_E, DTensor):
        return distribute_tensor(value_E, bias_E.device_mesh, bias_E.placements, src_data_rank=None)
    return value_E


def _check(bias_E: Tensor, tokens_E: Tensor, path: str = "the bias") -> None:
    """Raises what ``move_router_bias`` says."""
    if tokens_E.is_floating_point():
        raise TypeError(f"tokens_E has dtype {tokens_E.dtype}, which is not exact; count tokens in int64")
    if bias_E.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{path} has dtype {bias_E.dtype}, in which small steps are lost; keep biases in float32")
    if bias_E.numel() != tokens_E.numel():
        raise ValueError(
            f"{path} has {bias_E.numel()} elements and tokens_E has {tokens_E.numel()}; give one count for each, "
            "by ms.move_router_bias(bias_E, tokens_E, rate) for a router such as Zaya's, which may choose no expert"
        )
