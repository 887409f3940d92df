"""Saves a model that ranks share in the hub's format: each writes its experts, and nobody has all of a layer's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from moesys.hf.hub_files import INDEX, NewHubFiles
from moesys.hf.hub_names import HubNames, without_memory
from moesys.whole_folders import whole_folder


def save_pretrained(model: nn.Module, folder: Path | str, *, max_shard_size: str = "5GB") -> None:
    """Saves ``model``, under a strategy, as a folder that transformers' ``from_pretrained`` reads. A collective.

    For models of ``from_pretrained(distributed_config=...)`` and of ``ms.parallelize``. Names and shapes of tensors are
    the hub's, dtypes the model's, files no larger than ``max_shard_size``. A rank has besides its shards one expert of
    a layer at a time, or one of the other parameters whole.

    The weights that ``folder`` had stay whole until the new ones are (``ms.whole_folder``); its other files are kept.

    Raises ValueError for a model with adapters, which saves them itself, and what ``ms.whole_folder`` raises.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{type(model).__name__} has adapters; save them by its own save_pretrained")
    live: Any = model
    kind = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers."))
    empty = without_memory(kind, live.config)
    names = HubNames(empty, getattr(model, "_weight_conversions", None))
    tied = getattr(empty, "all_tied_weights_keys", {})
    everything: dict[str, Any] = get_model_state_dict(model)
    state: dict[str, Tensor] = {name: each for name, each in everything.items() if name not in tied}
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    errors: list[OSError] = []
    with whole_folder(folder) as new:
        layout = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in state.items()}
        files = NewHubFiles(new, names.to_hub(layout), max_shard_size)
        if rank == 0:
            with _kept(errors):
                _link_other_files(Path(folder), new)
                _write_config(live, kind.__name__, state, new)
                files.create()
        if world > 1:
            dist.barrier()
        for index, group in enumerate(names.groups(state)):
            if names.experts.issuperset(group):
                for parts in zip(*(_whole_experts(state[name]) for name in group), strict=True):
                    tensors = dict(zip(group, (part for _, part in parts), strict=True))
                    _write(files, names, tensors, errors, parts[0][0])
                continue
            whole = {name: _whole(state[name]) for name in group}
            if index % world == rank:
                _write(files, names, whole, errors)
        if errors:
            raise errors[0]


@contextmanager
def _kept(errors: list[OSError]) -> Iterator[None]:
    """Keeps an error for the end, as other ranks wait for what this one sends."""
    try:
        yield
    except OSError as error:
        errors.append(error)


def _write(
    files: NewHubFiles, names: HubNames, tensors: dict[str, Tensor], errors: list[OSError], expert: int | None = None
) -> None:
    for name, tensor in names.to_hub(tensors, expert).items():
        with _kept(errors):
            files.write(name, tensor, row=expert or 0)


def _link_other_files(folder: Path, new: Path) -> None:
    """Has what else lies in ``folder`` in ``new`` too, without copying it where the file system can."""
    if folder.exists():
        written = shutil.ignore_patterns("*.safetensors", INDEX, "config.json", "generation_config.json")
        shutil.copytree(folder, new, ignore=written, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_config(model: Any, architecture: str, state: dict[str, Tensor], new: Path) -> None:
    config = deepcopy(model.config)
    config.dtype = next(each.dtype for each in state.values() if each.is_floating_point())
    config.architectures = [architecture]
    config.save_pretrained(new)
    if model.can_generate():
        model.generation_config.save_pretrained(new)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole_experts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Gives experts with their numbers, whole, as [1, ...], each on one rank of all.

    Where every rank has a slice of every expert, those of as many experts as there are ranks change places at a time.
    """
    if not isinstance(tensor, DTensor):
        yield from enumerate(tensor.split(1))
        return
    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinate, placements = list(mesh.get_coordinate() or ()), list[Any](tensor.placements)
    if any(at and placement.is_replicate() for at, placement in zip(coordinate, placements, strict=True)):
        return
    first: int = tensor.__create_chunk_list__()[0].offsets[0]
    cut = [(axis, each.dim) for axis, each in enumerate(placements) if getattr(each, "dim", 0) > 0]
    if not cut:
        yield from enumerate(local.split(1), first)
        return
    [(axis, dim)] = cut
    group, me, R = mesh.get_group(axis), coordinate[axis], mesh.size(axis)
    for start in range(0, len(local), R):
        slices = local[start : start + R].contiguous()
        mine = int(me < len(slices))
        received = slices.new_empty(R * mine, *slices.shape[1:])
        here = [int(rank < len(slices)) for rank in range(R)]
        dist.all_to_all_single(received, slices, [mine] * R, here, group=group)
        if mine:
            yield first + start + me, torch.cat(received.split(1), dim=dim)
