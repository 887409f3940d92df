"""Correction biases of routers, which balance experts without a loss: how they move after each optimizer step.

A bias is added to the scores by which a router chooses, and not to the weights that it gives. E experts.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moesys.moe.arguments import require_module
from moesys.moe.experts import counts_of_batch, experts_beside, experts_of
from moesys.moe.router import Router

# The names of biases in moesys' routers and in those of transformers.
BIASES = ("e_score_correction_bias", "expert_bias")


def update_router_bias(model: nn.Module, group: dist.ProcessGroup | None = None, *, rate: float | None = None) -> None:
    """Moves every router's correction bias towards balance, after an optimizer step, as ``move_router_bias`` does.

    A step's tokens are counted in integers, on all ranks and in all micro-batches since the last call; those of
    evaluation and of recomputation are not. So all ranks have the bias that one process with the whole batch would
    have. Call it after every step also where no router has a bias, if ``router_loss(over="global_batch")`` or
    ``global_aux_loss`` use the counts: they are of one step only because this call ends it.

    Args:
        model: moesys' routers, and transformers' under ``parallelize`` or ``ep_implementation="moesys"``.
        group: all ranks that have a copy of the routers, where these are more than the ranks that share the experts, as
            on a mesh of several expert groups: their tokens count together. A collective of these ranks.
        rate: by default each moesys router's own ``router_bias_update_rate``. Needed for others' routers.

    Raises:
        ValueError: the experts' group is smaller than the job and no ``group`` is given; a router of another library
            has a bias and no ``rate`` is given, or its experts do not count; a bias that ``move_router_bias`` refuses.
    """
    require_module(model)
    moves: dict[str, tuple[Tensor, float]] = {}
    for path, bias_E in chain(model.named_buffers(), model.named_parameters()):
        owner, _, name = path.rpartition(".")
        # A bias that requires gradients is its optimizer's.
        if name in BIASES and not bias_E.requires_grad:
            router = model.get_submodule(owner)
            own_rate = router.shape.router_bias_update_rate if isinstance(router, Router) else None
            if (used := own_rate if rate is None else rate) is None:
                raise ValueError(
                    f"{path} is the bias of a router that declares no rate; give rate=, for example 0.001 as "
                    "DeepSeek-V3 has it, or 0 to leave biases as they are"
                )
            if used:
                moves[path] = bias_E, used
    layers = experts_beside(
        model,
        moves,
        "{} belongs to experts that do not count their tokens; run the model under ms.parallelize, which one rank can "
        "too, or call ms.move_router_bias(bias_E, tokens_E, rate) with counts of your own",
    )
    tokens_LE = counts_of_batch(layers, group, "update_router_bias()")
    for (bias_E, _), tokens_E in zip(moves.values(), tokens_LE, strict=True):
        _check(bias_E, tokens_E)
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
    step_E = (rate * shortfall_E.sign().to(bias_E.device, bias_E.dtype)).view(bias_E.shape)
    if isinstance(bias_E, DTensor):
        step_E = distribute_tensor(step_E, bias_E.device_mesh, bias_E.placements, src_data_rank=None)
    bias_E += step_E


def _check(bias_E: Tensor, tokens_E: Tensor) -> None:
    """Raises what ``move_router_bias`` says."""
    if tokens_E.is_floating_point():
        raise TypeError(f"tokens_E has dtype {tokens_E.dtype}, which is not exact; count tokens in int64")
    if bias_E.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the bias has dtype {bias_E.dtype}, in which small steps are lost; keep biases in float32")
    if bias_E.numel() != tokens_E.numel():
        raise ValueError(
            f"the bias has {bias_E.numel()} elements and tokens_E has {tokens_E.numel()}; give one count for each"
        )
