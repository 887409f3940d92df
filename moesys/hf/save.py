"""Saves a model that ranks share in the hub's format: each writes its experts, and nobody has all of a layer's."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesys.collectives import agreement, guarded
from moesys.files import whole_folder
from moesys.hf.hub_files import INDEX, SINGLE, HubNames, NewHubFiles, loading_dtype, without_memory
from moesys.moe.experts import experts_of, require_module

T = TypeVar("T")

_CALL = "ms.hf.save_pretrained()"


def save_pretrained(model: nn.Module, folder: Path | str, *, max_shard_size: str = "5GB") -> None:
    """Saves ``model``, under a strategy, as a folder that transformers' ``from_pretrained`` reads. A collective.

    For models of ``from_pretrained(distributed_config=...)`` and of ``ms.parallelize``, also inside ``torch.compile``,
    ``DistributedDataParallel`` or a module without parameters of its own. Names and shapes of tensors are the hub's,
    each has its own dtype, and files are no larger than ``max_shard_size``. A rank has besides its shards one expert of
    a layer at a time, or one of the other parameters whole.

    Every parameter and persistent buffer is written. A tied parameter is left out only where the model shares it and
    ``from_pretrained`` ties it again. config.json has the model's configuration, with the smallest dtype in which
    ``from_pretrained`` rounds no tensor.

    The weights that ``folder`` had stay whole until the new ones are (``ms.whole_folder``); its other files are kept.

    Raises, on every rank and before anything is written, TypeError for a module without one model of transformers, and
    ValueError for a model with adapters, one inside a module that has parameters of its own, one that lacks a tensor of
    its configuration or has it in another shape, one whose configuration transformers refuses to
    write, and one that differs between ranks. Raises as well what ``ms.whole_folder`` raises.
    """
    with agreement(_CALL, ValueError):
        live, empty = _transformers_model(model)
        for experts in experts_of(model):
            experts.require_group(learning=False)
        names = HubNames(empty, getattr(live, "_weight_conversions", None))
        config, state, files = _plan(live, empty, names, get_model_state_dict(live), max_shard_size)
    _check_alike(files)
    rank, world = _rank_and_world()
    errors: list[Exception] = []
    with whole_folder(folder) as new:
        if rank == 0:
            with _kept(errors):
                _link_other_files(Path(folder), new)
                _save_configurations(live, config, new)
                files.create(new)
        if world > 1:
            guarded(_CALL, dist.group.WORLD, dist.barrier)
        for index, group in enumerate(names.groups(state)):
            if names.experts.issuperset(group):
                for parts in zip(*(_whole_experts(state[name]) for name in group), strict=True):
                    tensors = dict(zip(group, (part for _, part in parts), strict=True))
                    _write(files, new, names, tensors, errors, parts[0][0])
                continue
            whole = {name: _whole(state[name]) for name in group}
            if index % world == rank:
                _write(files, new, names, whole, errors)
        if errors:
            raise errors[0]


# --- checks before writing ---------------------------------------------------------------------


def _transformers_model(model: Any) -> tuple[Any, Any]:
    """Returns the model of transformers that ``model`` is or contains, and one of its configuration without memory."""
    require_module(model)
    given, modules = _name(model), dict(model.named_modules())
    if adapted := [path or given for path, each in modules.items() if _classes(each, "peft")]:
        raise ValueError(
            f"{given} has adapters of PEFT, as in {adapted[0]}, and ms.hf.save_pretrained writes whole models; call "
            "state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on "
            "every rank and model.save_pretrained(folder, state_dict=state) on rank 0, or merge the adapters first "
            "(merge_and_unload)"
        )
    if any(isinstance(each, FullyShardedDataParallel) for each in modules.values()):
        raise TypeError(
            f"{given} is sharded by FullyShardedDataParallel, whose parameters are not in the model's shapes; shard "
            "it by ms.parallelize or fully_shard (FSDP2), or save it by torch.distributed.checkpoint"
        )
    found: dict[str, Any] = {}
    for path, module in modules.items():
        if isinstance(module, PreTrainedModel) and not any(f"{path}.".startswith(each) for each in found):
            found[f"{path}." if path else ""] = module
    if len(found) != 1:
        raise TypeError(
            f"model is of type {given}, with {len(found)} models of transformers in it, and ms.hf.save_pretrained "
            "takes one (Qwen3MoeForCausalLM, ...), or a module around one; save others by torch.distributed.checkpoint"
        )
    [(path, live)] = found.items()
    inside = {id(each) for module in live.modules() for each in (module, *_own_tensors(module).values())}
    outside = [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in modules.items()
        if id(module) not in inside
        for name, tensor in _own_tensors(module).items()
        if id(tensor) not in inside
    ]
    kind = next(each for each in _classes(live, "transformers") if issubclass(each, PreTrainedModel))
    if outside:
        raise ValueError(
            f"{given} has {', '.join(outside[:3])}{', ...' if outside[3:] else ''} besides the tensors of its "
            f"{kind.__name__}, and transformers' from_pretrained would not read them; call "
            f"ms.hf.save_pretrained(model.{path.removesuffix('.')}, folder), and save the others on their own"
        )
    if kind.__init__ is PreTrainedModel.__init__:
        raise TypeError(
            f"{_name(live)} is no architecture of transformers {transformers.__version__}, and from_pretrained would "
            "not know it; save it by its own save_pretrained"
        )
    return live, without_memory(kind, live.config)


def _name(module: Any) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _classes(module: nn.Module, package: str) -> list[type]:
    """Returns the classes of ``module`` that ``package`` defines, in method resolution order."""
    return [each for each in type(module).__mro__ if each.__module__.partition(".")[0] == package]


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers of a module without those of its submodules."""
    found = {**module._parameters, **module._buffers}
    transient = module._non_persistent_buffers_set
    return {name: each for name, each in found.items() if each is not None and name not in transient}


def _plan(
    live: Any, empty: Any, names: HubNames, everything: dict[str, Any], max_shard_size: str
) -> tuple[Any, dict[str, Tensor], NewHubFiles]:
    """Returns the configuration, the tensors to write, and the layout of their files."""
    kind = type(empty).__name__
    for name, tensor in everything.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{kind}: {name} of its state_dict is a {type(tensor).__name__}, and safetensors files have tensors "
                "alone; save the model by torch.distributed.checkpoint"
            )
        if tensor.device.type == "meta":
            raise ValueError(f"{kind}: {name} is on the meta device, without values; load the model before it is saved")
    for name, wanted in empty.state_dict().items():
        found = everything.get(name)
        if found is None or found.shape != wanted.shape:
            has = "no such tensor" if found is None else f"shape {list(found.shape)}"
            raise ValueError(
                f"{kind}: its configuration makes {name} a tensor of shape {list(wanted.shape)}, and the model has "
                f"{has}; set model.config to what the model is, or save it by torch.distributed.checkpoint"
            )
    tied = getattr(empty, "all_tied_weights_keys", {})
    state = {
        name: each
        for name, each in everything.items()
        if name not in tied or not _is_same(each, everything[tied[name]])
    }
    meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in state.items()}
    config = deepcopy(live.config)
    config.dtype = loading_dtype(empty, meta)
    config.architectures = [kind]
    # transformers validates configurations when it writes them, and only one rank writes them into the folder.
    with TemporaryDirectory() as scratch:
        _save_configurations(live, config, scratch)
    return config, state, NewHubFiles(names.layout(meta), max_shard_size)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of a state dict share the same memory."""
    a, b = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
    return a.is_set_to(b)


def _check_alike(files: NewHubFiles) -> None:
    """Raises ValueError, on every rank, unless all ranks are about to write the same tensors to the same files."""
    mine = {name: f"{list(each.shape)} of {each.dtype} in {each.file}" for name, each in files.places.items()}
    # Ranks usually agree, and then a digest is enough.
    if len(set(_of_all_ranks(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
        return
    first, *others = _of_all_ranks(mine)
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"ranks differ in what they save: rank {rank} has {name} as {other.get(name)}, and rank 0 as "
                    f"{first.get(name)}; give the same model and max_shard_size on every rank"
                )


def _of_all_ranks(value: T) -> list[T]:
    _, world = _rank_and_world()
    values = [value] * world
    if world > 1:
        guarded(_CALL, dist.group.WORLD, partial(dist.all_gather_object, values, value))
    return values


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# --- writing ------------------------------------------------------------------------------------------------


@contextmanager
def _kept(errors: list[Exception]) -> Iterator[None]:
    """Keeps an error for the end, as other ranks wait for what this one sends."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def _write(
    files: NewHubFiles,
    folder: Path,
    names: HubNames,
    tensors: dict[str, Tensor],
    errors: list[Exception],
    expert: int | None = None,
) -> None:
    with _kept(errors):
        for name, tensor in names.to_hub(tensors, expert).items():
            files.write(folder, name, tensor, row=expert or 0)


def _save_configurations(live: Any, config: Any, folder: Path | str) -> None:
    config.save_pretrained(folder)
    if live.can_generate():
        live.generation_config.save_pretrained(folder)


def _link_other_files(folder: Path, new: Path) -> None:
    """Adds the files of ``folder`` that a save does not replace to ``new``, as hard links, or as copies if the file
    system has none. Symbolic links stay links, and what is neither file nor folder is never read.

    A save replaces only files of ``folder`` itself: its subfolders may have weights of their own.
    """
    if folder.exists():
        written = shutil.ignore_patterns(
            SINGLE, "model-*-of-*.safetensors", INDEX, "config.json", "generation_config.json"
        )
        shutil.copytree(
            folder,
            new,
            ignore=lambda at, names: written(at, names) if Path(at) == folder else set(),
            copy_function=_link,
            symlinks=True,
            dirs_exist_ok=True,
        )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        if os.path.isfile(source):
            shutil.copy2(source, target)


def _whole(tensor: Tensor) -> Tensor:
    return guarded(_CALL, dist.group.WORLD, tensor.full_tensor) if isinstance(tensor, DTensor) else tensor


def _whole_experts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Gives experts with their numbers, whole, as [1, ...], each on one rank of all.

    If every rank has a slice of every expert, the slices of as many experts as there are ranks change places at a time.
    """
    if not isinstance(tensor, DTensor):
        rank, world = _rank_and_world()
        yield from (each for each in enumerate(tensor.split(1)) if each[0] % world == rank)
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
        exchange = partial(dist.all_to_all_single, received, slices, [mine] * R, here, group=group)
        guarded(_CALL, group, exchange, device_type=slices.device.type)
        if mine:
            yield first + start + me, torch.cat(received.split(1), dim=dim)
