"""Moves of experts to other owners: masters, gradients and optimizer state change places between ranks.

State dicts have experts in the model's order whatever their homes, and checkpoints are as if none had moved: experts
change places on the way out and on the way in.

E experts, L layers, R ranks, T tokens of this rank, K top-k.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moesys.balance.homes import Homes
from moesys.config import Ep
from moesys.load import IntArray, LoadMatrix
from moesys.moe.experts import Experts
from moesys.moe.masters import local_part
from moesys.moe.planners import agreed
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.frames import Position
from moesys.overlap.comm.record import Meter, Recorder

MOVING = Position("move_homes()")


class SharedRows:
    """The places of the E rows of ``like``, a tensor [E, ...] that is cut into whole rows over the ranks of
    ``channel``, each row on one of them. It moves rows of this tensor, and of others that are cut in the same way.
    """

    def __init__(self, like: Tensor, channel: Channel) -> None:
        self._channel, self._mine = channel, _rows_here(like)
        owned_E = torch.full((len(like),), -1, dtype=torch.int64)
        owned_E[torch.from_numpy(self._mine)] = channel.rank
        self._rank_E = channel.all_gather(owned_E.to(like.device), lane="homes", at=MOVING).amax(0).cpu().numpy()

    def moved(self, tensor: Tensor, target_E: IntArray) -> Tensor:
        """Returns a tensor that has in row ``target_E[e]`` what ``tensor`` has in row e. A collective, unless it is
        whole here.
        """
        if not isinstance(tensor, DTensor):
            return tensor[torch.from_numpy(np.argsort(target_E)).to(tensor.device)]
        local = tensor.to_local()
        rows_N, received = self._received(local, target_E)
        moved = torch.empty_like(local)
        moved[rows_N] = received
        return DTensor.from_local(
            moved, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def move(self, tensor: Tensor, target_E: IntArray) -> None:
        """Moves the rows of ``tensor`` in place, as ``moved`` does in a copy."""
        local = local_part(tensor)
        rows_N, received = self._received(local, target_E)
        local[rows_N] = received

    def _received(self, local: Tensor, target_E: IntArray) -> tuple[Tensor, Tensor]:
        """Returns which rows here have come, and what they are."""
        R, rank_E, mine = self._channel.num_ranks, self._rank_E, self._mine
        target_N, source_N = target_E[mine], np.argsort(target_E)[mine]
        # By rank, and of one rank by where rows go: both sides know this order.
        sending, receiving = np.lexsort((target_N, rank_E[target_N])), np.lexsort((mine, rank_E[source_N]))
        counts = (np.bincount(rank_E[rows], minlength=R).tolist() for rows in (source_N, target_N))
        sending_N, receiving_N = (torch.from_numpy(rows).to(local.device) for rows in (sending, receiving))
        sent = local[sending_N].contiguous()
        received = torch.empty_like(sent)
        self._channel.all_to_all(received, sent, *counts, lane="homes").wait()
        return receiving_N, received


def lie_alike(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether both tensors have E rows, which lie over the same ranks."""
    if tensor.shape[:1] != other.shape[:1]:
        return False
    if isinstance(tensor, DTensor) and isinstance(other, DTensor):
        return tensor.device_mesh == other.device_mesh and tensor.placements == other.placements
    return isinstance(tensor, DTensor) == isinstance(other, DTensor)


def _rows_here(tensor: Tensor) -> IntArray:
    """Returns the numbers of this rank's rows, in their order here."""
    if not isinstance(tensor, DTensor):
        return np.arange(len(tensor))
    chunks = [(chunk.offsets[0], chunk.sizes[0]) for chunk in tensor.__create_chunk_list__() if chunk.sizes.numel()]
    rows = [np.arange(first, first + count) for first, count in chunks]
    return np.concatenate([np.zeros(0, np.int64), *rows])


@contextmanager
def shared_rows(like: Tensor) -> Iterator[SharedRows]:
    """Gives the rows of ``like``, a ``DTensor`` that is cut into rows, or a tensor that one rank has alone."""
    with channel_over(like, copies=False) as channel:
        yield SharedRows(like, channel)


@contextmanager
def channel_over(tensor: Tensor, *, copies: bool) -> Iterator[Channel]:
    """Gives a channel of the ranks that have ``tensor`` together, and with ``copies`` of those that have copies too. A
    collective of the ranks of its mesh.
    """
    group, made = None, None
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        cut = [mesh.size(dim) > 1 and (copies or not each.is_replicate()) for dim, each in enumerate(tensor.placements)]
        index = tuple(slice(None) if wanted else at for wanted, at in zip(cut, coordinate, strict=True))
        ranks = mesh.mesh[index].flatten().tolist()
        if sum(cut) == 1:
            group = mesh.get_group(cut.index(True))
        elif len(ranks) == dist.get_world_size():
            group = dist.group.WORLD
        elif sum(cut) > 1:
            group = made = dist.new_group(ranks, use_local_synchronization=True)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    try:
        yield Channel(group, [0] * num_ranks, Recorder(0), Meter(), tensor.device.type)
    finally:
        if made is not None:
            dist.destroy_process_group(made)


def gather_loads(model: nn.Module, expert_LTK: Sequence[Tensor]) -> list[LoadMatrix]:
    """Returns what the routers of each layer wanted in micro-batches together, of all ranks: for ``ms.plan_homes``.

    ``expert_LTK``: what ``ms.record_routing`` gave on this rank, [L, T, K] of each micro-batch. A collective. Groups
    of ranks that have copies of the experts are added up.

    Raises ValueError for a model without experts under ``Ep``, and for ids of another number of layers.
    """
    homed, loads = _homed(model), []
    if wrong := [len(ids) for ids in expert_LTK if len(ids) != len(homed)]:
        raise ValueError(
            f"expert_LTK has {wrong[0]} routers and the model {len(homed)} layers of experts under a strategy; give "
            "what ms.record_routing(model) recorded"
        )
    for layer, (module, experts) in enumerate(homed):
        E = experts.shape.num_experts
        tokens_E = torch.zeros(E, dtype=torch.int64)
        for ids in expert_LTK:
            chosen = ids[layer].long().cpu()
            # Recorded padding has none.
            tokens_E += torch.bincount(chosen[chosen >= 0], minlength=E)
        wanted_N = torch.cat([torch.tensor([experts.token_channel.rank]), tokens_E]).to(experts.store.masters.device)
        with channel_over(_parameters(module)[0], copies=True) as channel:
            rank_N, *tokens_EN = channel.all_gather(wanted_N, lane="homes", at=MOVING).cpu().T
        tokens_RE = torch.zeros(experts.cluster.num_ranks, E, dtype=torch.int64)
        tokens_RE.index_add_(0, rank_N, torch.stack(tokens_EN, dim=1))
        loads.append(LoadMatrix(tokens_RE.numpy()))
    return loads


@torch.no_grad()
def move_homes(model: nn.Module, homes: Sequence[IntArray | Tensor] | None, *optimizers: Optimizer) -> None:
    """Moves the experts of ``model`` to ``homes``: a rank for each, integers [E] for each of L layers in order, as
    ``ms.plan_homes`` makes them. None moves all back to where they are without homes. A collective, between steps;
    rare, as all that moves travels.

    Masters, their gradients, and what ``optimizers`` keep for each go along, layer by layer, and no bit changes. Give
    every optimizer that trains experts: what another keeps of them would be saved in another order than theirs, and
    without any they cannot be trained until one is given. Histories of loads stay, and layouts that follow from them
    begin anew.

    From then on state dicts of model and optimizers have the experts in the model's order, and ``load_state_dict``
    takes them so: checkpoints fit any homes. Both are collectives, and have this rank's experts a second time.

    Raises ValueError, and on ranks that could go on RuntimeError, before anything moves: for a model without experts
    under ``Ep``, homes of another number of layers or experts, a rank that is none, a rank with more experts than the
    rule has room for, homes that differ between ranks, and optimizers that do not train the experts or keep state that
    is not one row an expert.
    """
    homed = _homed(model)
    plain = [_plain(optimizer) for optimizer in optimizers]
    with channel_over(_parameters(homed[0][0])[0], copies=True) as channel:
        checked = agreed(
            lambda: _checked(homed, homes, plain),
            lambda all_homes: hashlib.sha256(repr([each.home_E.tolist() for each in all_homes]).encode()).digest(),
            channel,
            homed[0][1].store.masters.device,
            what="move_homes",
            differing="have different homes for the same experts; plan them from ms.gather_loads, alike on every rank",
        )
    for (module, experts), moved in zip(homed, checked, strict=True):
        target_E = moved.number_E[experts.homes.expert_E]
        if moved != experts.homes:
            with shared_rows(_parameters(module)[0]) as rows:
                for tensor in _moving(module, plain):
                    rows.move(tensor, target_E)
            experts.move_homes(moved)
        _keep_order(module, experts)
    for optimizer in plain:
        _follow([each for each in homed if optimizer not in each[1].followers], optimizer)


def _homed(model: nn.Module) -> list[tuple[Any, Experts]]:
    """Returns the modules that have the parameters of experts which stay whole, with those experts."""
    found = [(module, each) for module in model.modules() for each in _experts_at(module)]
    if not found:
        raise ValueError(
            "the model has no ms.Experts, so nobody has a home; build it of ms.MoELayer, or ms.parallelize it"
        )
    for module, experts in found:
        strategy = experts.strategy
        if not isinstance(strategy.sharding, Ep):
            raise ValueError(
                f"strategy {strategy.name!r} has sharding={type(strategy.sharding).__name__}, where every rank has a "
                "slice of each expert and none has a home; leave homes out, or use Ep"
            )
        if isinstance(module, FSDPModule):
            module.reshard()
        if not _parameters(module):
            raise ValueError(
                f"layer {experts.layer_index} has experts whose parameters are kept outside; homes are for those of "
                "ms.MoELayer, ms.Experts and transformers' models"
            )
    return found


def _experts_at(module: nn.Module) -> list[Experts]:
    experts = module.__dict__.get("moesys_experts", module)
    return [experts] if isinstance(experts, Experts) else []


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _plain(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer without what accelerate wraps around it."""
    inner = getattr(optimizer, "optimizer", None)
    return _plain(inner) if isinstance(inner, Optimizer) else optimizer


def _checked(
    homed: Sequence[tuple[nn.Module, Experts]],
    homes: Sequence[IntArray | Tensor] | None,
    optimizers: Sequence[Optimizer],
) -> list[Homes]:
    """Returns the homes of each layer. Raises ValueError for what cannot be moved so."""
    if homes is not None and len(homes) != len(homed):
        raise ValueError(f"homes is of {len(homes)} layers and the model has {len(homed)}; give ranks [E] of each")
    checked = []
    for layer, (module, experts) in enumerate(homed):
        E, R = experts.shape.num_experts, experts.cluster.num_ranks
        if homes is None:
            checked.append(Homes.by_rule(E, R))
        else:
            if len(homes[layer]) != E:
                raise ValueError(f"homes[{layer}] is of {len(homes[layer])} experts and the layer has {E}")
            try:
                checked.append(Homes(np.asarray(homes[layer]), R))
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from error
        if optimizers:
            _check_optimizers(layer, module, optimizers)
    return checked


def _check_optimizers(layer: int, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    trained = {id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]}
    for parameter in _parameters(module):
        if parameter.requires_grad and id(parameter) not in trained:
            raise ValueError(
                f"none of the optimizers given trains the experts of layer {layer}; give all that train experts, made "
                "of the model's parameters as they are now"
            )
        for each in optimizers:
            for name, value in each.state.get(parameter, {}).items():
                if _has_rows(value) and not lie_alike(value, parameter):
                    raise ValueError(
                        f"{type(each).__name__} keeps {name} {list(value.shape)} for experts of layer {layer}, "
                        f"{list(parameter.shape)}, which is no row an expert and cannot move with them; use another "
                        "optimizer, or leave homes as they are"
                    )


def _has_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _moving(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """Gives what moves with a layer's experts, in the same order on every rank."""
    for parameter in _parameters(module):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        for each in optimizers:
            yield from filter(_has_rows, each.state.get(parameter, {}).values())


# --- what is saved ----------------------------------------------------------------------------------------------


def _keep_order(module: nn.Module, experts: Experts) -> None:
    """Makes the module's state dicts have the model's order, once its homes have moved."""
    if not experts.keeps_order:
        experts.keeps_order = True
        module.register_state_dict_post_hook(partial(_reorder, _TO_IDS))
        module.register_load_state_dict_pre_hook(partial(_reorder, _TO_NUMBERS))


_TO_IDS: Callable[[Homes], IntArray] = attrgetter("expert_E")
_TO_NUMBERS: Callable[[Homes], IntArray] = attrgetter("number_E")


def _reorder(
    target_of: Callable[[Homes], IntArray], module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any
) -> None:
    [experts] = _experts_at(module)
    names = [prefix + name for name, parameter in module._parameters.items() if parameter is not None]
    if experts.homes.moved:
        with torch.no_grad(), shared_rows(_parameters(module)[0]) as rows:
            for name in names:
                if name in state:
                    state[name] = rows.moved(state[name].detach(), target_of(experts.homes))


def _follow(homed: Sequence[tuple[nn.Module, Experts]], optimizer: Optimizer) -> None:
    """Makes the optimizer's state dicts have the model's order too."""
    # A model that is dropped is not kept by its optimizer's hooks more than by its parameters.
    modules = [weakref.ref(module) for module, _ in homed]
    for _, experts in homed:
        experts.followers.add(optimizer)

    def reordered(
        target_of: Callable[[Homes], IntArray], optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        ids = chain.from_iterable(group["params"] for group in state["param_groups"])
        live = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        id_of = {id(parameter): key for key, parameter in zip(ids, live, strict=True)}
        values = dict(state["state"])
        for module in filter(None, (each() for each in modules)):
            [experts] = _experts_at(module)
            if experts.homes.moved:
                with torch.no_grad(), shared_rows(_parameters(module)[0]) as rows:
                    for key in (id_of.get(id(parameter)) for parameter in _parameters(module)):
                        if key in values:
                            values[key] = {
                                name: rows.moved(value, target_of(experts.homes)) if _has_rows(value) else value
                                for name, value in values[key].items()
                            }
        return {**state, "state": values}

    if modules:
        optimizer.register_state_dict_post_hook(partial(reordered, _TO_IDS))
        optimizer.register_load_state_dict_pre_hook(partial(reordered, _TO_NUMBERS))
