"""Gradients of a model whose experts are sharded and whose other parameters are replicated."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from moesys.collectives import group_destroyed, guarded, meet
from moesys.frames import ALIKE, NO_LAYER, Position, RankMismatchError
from moesys.moe.experts import Experts, experts_of
from moesys.moe.layer import MoELayer
from moesys.moe.masters import local_part
from moesys.overlap.comm.channel import Channel, is_shared
from moesys.overlap.exact_sum import grid_below, largest_size

# A norm's squares are computed in pieces of so many elements, which stay in a core's cache.
_ELEMENTS_AT_ONCE = 1 << 18
# The dtypes of gradients; ranks send the index of a dtype in this table.
_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_OTHER = 255
# The names of correction biases in moesys' routers and in those of transformers.
BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


@torch.no_grad()
def sync_gradients(model: nn.Module) -> None:
    """Adds up the gradients of replicated parameters over the ranks; experts' gradients are summed already.

    A gradient that is missing on some ranks counts as zero there, so that all ranks have the sum; one that is missing
    on all ranks stays None. One all-reduce of a flat buffer per dtype. Does nothing without a process group.

    Leaves out parameters of which ranks have parts of their own, which Megatron's ``tensor_model_parallel`` marks.

    Raises ``RankMismatchError`` on all ranks where their parameters or the dtypes of gradients differ, and in the first
    call with a parameter of a name where its values do; ValueError for a sparse gradient.
    """
    experts = experts_of(model)
    channel = channel_of(experts)
    if channel.group is None:
        return
    reshard_units(model)
    device = experts[0].store.masters.device
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    summed = {id(parameter) for layer in layers for parameter in layer.summed_in_backward()}
    replicated = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor)
        and not isinstance(parameter.grad, DTensor)
        and is_shared(parameter)
        and id(parameter) not in summed
    }
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    dtypes = _gradient_dtypes(replicated, channel, device)
    require_equal_values(model, channel, "sync_gradients()", device)
    for parameter, dtype in zip(replicated.values(), dtypes, strict=True):
        if dtype is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        by_dtype.setdefault(dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        channel.guard("sync_gradients()", partial(dist.all_reduce, flat, group=channel.group))
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def require_equal_values(
    model: nn.Module, channel: Channel, call: str, device: torch.device, always: Mapping[str, Tensor] | None = None
) -> None:
    """Raises ``RankMismatchError`` on all ranks where they have other values of what ``model`` should have alike on
    each: parameters, as far as they are not sharded, and the biases of routers. Those that ``call`` has compared before
    are left out, except for ``always``. A collective if any are left, or if ``always`` is given. ``device``: where
    messages travel.
    """
    buffers = ((name, each) for name, each in model.named_buffers() if name.rpartition(".")[2] in BIASES)
    compared = channel.compared.setdefault(call, set())
    seen = {name: each for name, each in chain(model.named_parameters(), buffers) if name not in compared}
    units = (each for each in model.modules() if isinstance(each, FullyShardedDataParallel)) if seen else ()
    split = {id(parameter) for unit in units for parameter in unit.parameters()}
    new = {name: each for name, each in seen.items() if id(each) not in split} | dict(always or {})
    found, without_values = None, set[str]()
    if new or always is not None:
        found, without_values = channel.differing(new, Position(call), device)
    if found:
        name, first, second = found
        raise RankMismatchError(
            f"{call}: ranks {first} and {second} differ in {name}, which every rank should have alike; make the model "
            "with the same seed on all ranks (seed data apart, with a torch.Generator), or load or broadcast the "
            "values of one rank before this call; outside of ms.parallelize, mark parameters of which ranks have parts "
            f"of their own by parameter.tensor_model_parallel = True. {ALIKE}"
        )
    # All ranks compare again the tensors that have no values on some rank.
    compared.update(seen.keys() - without_values)


def _gradient_dtypes(
    parameters: Mapping[str, nn.Parameter], channel: Channel, device: torch.device
) -> list[torch.dtype | None]:
    """Returns the dtype of each gradient that exists on any rank; None where it exists on none. A collective.

    Raises ``RankMismatchError`` where ranks have other parameters, or gradients of other dtypes.
    """
    at = Position("sync_gradients()")
    names = "\n".join(f"{name} {list(each.shape)} {each.dtype}" for name, each in parameters.items()).encode()
    digest = hashlib.sha256(names).digest()
    sent_R = channel.gather_bytes(digest + bytes(map(_kind_of_gradient, parameters.values())), at, device)
    if len({sent[: len(digest)] for sent in sent_R}) > 1:
        raise_mismatch(names, channel, at, device, "have different parameters beside experts: {}, and {}")
    found: list[torch.dtype | None] = []
    for name, codes in zip(parameters, zip(*(sent[len(digest) :] for sent in sent_R), strict=True), strict=True):
        if _OTHER in codes:
            rank = channel.members[codes.index(_OTHER)]
            raise ValueError(
                f"the gradient of {name} on rank {rank} is sparse or of a dtype that sync_gradients cannot sum; use a "
                "module with dense gradients (Embedding(sparse=False))"
            )
        of_ranks = {_DTYPES[code] for code in codes} - {None}
        if len(of_ranks) > 1:
            raise RankMismatchError(f"gradients of {name} have different dtypes on the ranks: {of_ranks}")
        found.append(of_ranks.pop() if of_ranks else None)
    return found


def _kind_of_gradient(parameter: nn.Parameter) -> int:
    """Returns the index of a gradient's dtype in ``_DTYPES``, or ``_OTHER``."""
    if parameter.grad is None:
        return 0
    known = parameter.grad.layout == torch.strided and parameter.grad.dtype in _DTYPES
    return _DTYPES.index(parameter.grad.dtype) if known else _OTHER


def raise_mismatch(described: bytes, channel: Channel, at: Position, device: torch.device, words: str) -> None:
    """Raises ``RankMismatchError`` on all ranks where they describe parameters, one a line, differently. ``words``: of
    two ranks, with ``{}`` in the places of the first lines that differ. A collective.
    """
    of_ranks = [text.decode().split("\n") for text in channel.gather_bytes(described, at, device)]
    for rank, others in zip(channel.members, of_ranks, strict=True):
        for mine, other in zip_longest(of_ranks[0], others, fillvalue="no further parameter"):
            if mine != other:
                told = words.format(mine, other)
                raise RankMismatchError(f"{at.what}: ranks {channel.members[0]} and {rank} {told}. {ALIKE}")


@torch.no_grad()
def clip_grad_norm_(model: nn.Module | Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients so that their joint L2 norm is at most ``max_norm``; returns the norm before, float32.

    The norm is that of the whole model: shards are added up over the ranks of their own meshes, and what several ranks
    have alike counts once (call ``sync_gradients`` first, where parameters are replicated without FSDP). The same bits
    on every rank, and for every way to shard. A collective. ``model``: a module, or its parameters as torch's own
    function takes them, in the same order on every rank.

    Raises TypeError for anything else, and ValueError for a ``max_norm`` that is not positive and where there are no
    parameters.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive; leave the call out to not clip")
    parameters = _parameters_of(model)
    # This lets ranks that are in different calls raise an error.
    if isinstance(model, nn.Module):
        for channel in channels_of(experts_of(model)):
            channel.gather_bytes(b"", Position("clip_grad_norm_()"), parameters[0].device)
    else:
        for group in dict.fromkeys(group for each in parameters for group in _groups_of_shards(each)):
            meet("clip_grad_norm_()", group, parameters[0].device)
    by_group: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    num_elements = 0
    for parameter in parameters:
        # Every rank of a group takes part in the collectives below, also if it has no gradient of the parameter.
        parts = by_group.setdefault(_groups_of_shards(parameter), [])
        num_elements += parameter.numel()
        if parameter.grad is not None:
            parts.append(local_part(parameter.grad))
    norm = _norm(by_group, num_elements, parameters[0].device)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_group.values():
        for part in parts:
            part.mul_(scale.to(part.dtype))
    return norm.float()


def _parameters_of(model: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Returns the parameters of a module, or those that are given."""
    given = model.parameters() if isinstance(model, nn.Module) else [model] if isinstance(model, Tensor) else model
    if isinstance(model, nn.Module):
        reshard_units(model)
    parameters = list(given) if isinstance(given, Iterable) else [given]
    if others := [type(each).__name__ for each in parameters if not isinstance(each, Tensor)]:
        raise TypeError(f"model has a {others[0]} in it; give a torch.nn.Module, or an iterable of its parameters")
    if any(map(is_lost, parameters)):
        raise ValueError(
            "model has parameters that nothing trains, because ms.parallelize has replaced them, or FSDP had gathered "
            "them for a forward and has freed them since; give the module itself, or its parameters as "
            "model.parameters() has them now"
        )
    if not parameters:
        raise ValueError("model has no parameters, or its iterator of parameters is used up; give the module itself")
    return parameters


def reshard_units(model: nn.Module) -> None:
    """Makes FSDP's modules in ``model`` register their sharded parameters again, where a forward without a backward has
    left gathered copies, which no optimizer trains. Gathers nothing, and does not wait.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_lost(parameter: Tensor) -> bool:
    """Returns whether nothing trains a parameter: ``ms.parallelize`` has replaced it, which it marks so, or it is a
    copy that FSDP had gathered and has freed.
    """
    if getattr(parameter, "moesys_replaced", False):
        return True
    plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided and not parameter.is_meta
    return plain and parameter.numel() > 0 and parameter.untyped_storage().size() == 0


def _norm(
    by_group: dict[tuple[dist.ProcessGroup, ...], list[Tensor]], num_elements: int, device: torch.device
) -> Tensor:
    """Returns the norm, float64. Squares are rounded to a grid, and their remainders to a finer one; sums on a grid are
    exact, so the norm does not depend on how parameters are sharded. The sum of n squares is off by at most
    n³ · 2⁻¹⁰² of the largest one. Where it is not finite, it is that of a plain sum.
    """
    # Sharded parameters come before replicated ones.
    ordered = sorted(by_group.items(), key=lambda item: not item[0])
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for groups, parts in ordered:
        for part in parts:
            largest = torch.maximum(largest, largest_size(part).double())
        for group in groups:
            _reduce(largest, group, dist.ReduceOp.MAX)
    coarse = grid_below(largest.square() * num_elements)
    fine = grid_below(coarse * num_elements)
    totals_3 = torch.zeros(3, dtype=torch.float64, device=device)
    for groups, parts in ordered:
        sums_3 = torch.zeros_like(totals_3)
        for part in parts:
            for elements in part.flatten().split(_ELEMENTS_AT_ONCE):
                squares = elements.to(torch.float64, copy=True).square_()
                plain, rounded = squares.sum(), squares.div(coarse).round_().mul_(coarse)
                left = squares.sub_(rounded).div_(fine).round_().mul_(fine)
                sums_3 += torch.stack([rounded.sum(), left.sum(), plain])
        for group in groups:
            _reduce(sums_3, group)
        totals_3 += sums_3
    coarse_and_fine, plain = totals_3[:2].sum(), totals_3[2]
    return torch.where(plain.isfinite(), coarse_and_fine, plain).sqrt()


def _reduce(values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    guarded(
        "clip_grad_norm_()", group, partial(dist.all_reduce, values, op, group=group), device_type=values.device.type
    )


def _groups_of_shards(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups over which a tensor is sharded; none if it is not. Raises RuntimeError where they were
    destroyed.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    cut = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    try:
        return tuple(mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1)
    except RuntimeError:
        # A mesh has the names of its groups.
        raise group_destroyed("these parameters") from None


def channel_of(layers: Sequence[Experts]) -> Channel:
    """Returns a channel of the one group that all experts of a model share.

    Raises ValueError for no experts or several groups, and RuntimeError for layers that were made before the process
    group.
    """
    channels = channels_of(layers)
    if not channels:
        raise ValueError("the model has no ms.Experts, so there is nothing to do; call torch's own function")
    if len(channels) > 1:
        raise ValueError(f"the model's MoE layers use {len(channels)} different groups; give them all the same group")
    return channels[0]


def channels_of(layers: Sequence[Experts]) -> list[Channel]:
    """Returns a channel of each group that the experts of a model use, in the order of its layers.

    Raises RuntimeError for layers that were made before the process group.
    """
    channels: dict[dist.ProcessGroup | None, Channel] = {}
    for layer in layers:
        layer.require_group()
        if layer.group not in channels:
            # A call for the whole model belongs to none of its layers.
            channel = channels[layer.group] = copy.copy(layer.token_channel)
            channel.identity = NO_LAYER
    return list(channels.values())
