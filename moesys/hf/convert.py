"""Turns checkpoints of the hub's format into distributed ones (``torch.distributed.checkpoint``), and back.

One process, and an expert, a stored shard or another parameter at a time.
"""

from __future__ import annotations

import io
import pickle
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import reduce
from itertools import pairwise
from math import prod
from operator import gt
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moesys.files import whole_folder
from moesys.hf.checkpoint_check import Source, sources_of, warn_of_others
from moesys.hf.experts_module import DTYPES
from moesys.hf.hub_files import (
    HubFiles,
    HubNames,
    NewHubFiles,
    errors_of_checkpoints,
    has_safetensors,
    inside,
    loading_dtype,
    other_files,
    read_config,
    skeleton,
    tied_names,
    without_links,
)

METADATA = ".metadata"
# Under it a loop's state dict has the model: dcp.save({"model": ..., "optimizer": ...}).
MODEL = "model"
KEPT = "they are copied unchanged, and transformers ignores them"
LEFT_OUT = f"they are left out, because they are not tensors or may not be the model's; save those under {MODEL!r}"

# Told after each piece: bytes that are done, and of all.
Tick = Callable[[int, int], None]


def convert(source: Path, out: Path, config: Path | None, tick: Tick) -> str:
    """Turns the checkpoint in ``source`` into one of the other format in ``out``, and returns which: "hub" or "dcp".

    A hub folder has safetensors, a distributed checkpoint ``.metadata``; config.json is in either, or ``config`` is it
    or a folder with it. What else lies beside it goes along, besides weights.

    Every tensor of the checkpoint is written. Tensors of different dtypes that become one parameter get the widest,
    which holds the values of all. Warns of tensors that the model does not have, which are copied unchanged, and of
    what is left out.

    Raises ValueError, before anything is written, for a checkpoint that is torn, or not all of its model's, for an
    ``out`` with something in it, and for a ``source`` that is neither. Raises OSError if ``out`` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already, and not an empty folder; give another, or remove it")
    with errors_of_checkpoints(out), _one_interruption(tick) as tick:
        if (source / METADATA).exists():
            _to_hub(source, out, config or source, tick)
            return "hub"
        if has_safetensors(source):
            _to_dcp(source, out, config or source, tick)
            return "dcp"
    raise ValueError(
        f"{source} is neither a hub folder (config.json and model.safetensors, or its index) nor a distributed "
        f"checkpoint ({METADATA})"
    )


@contextmanager
def _one_interruption(tick: Tick) -> Iterator[Tick]:
    """Raises KeyboardInterrupt for the first Ctrl-C or SIGTERM, at once, and leaves others unheard, so that they do not
    stop the removal of what was written. What the signal does outside follows at the end: torch's C++ may have turned
    the KeyboardInterrupt into another error, or dropped it.
    """
    kept: list[int] = []

    def stop(number: int, _: object) -> None:
        kept.append(number)
        if len(kept) == 1:
            raise KeyboardInterrupt

    def tick_and_stop(done: int, total: int) -> None:
        tick(done, total)
        if kept:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    # Ignored signals stay ignored, and a handler that is not Python's (None) could not be restored.
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield tick_and_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if kept:
            signal.raise_signal(kept[0])


def _model(place: Path, num_tensors: int) -> Any:
    """Returns the model that config.json, ``place`` or in it, declares, on the meta device."""
    file = without_links(place, "config.json") if place.is_dir() else place
    if not file.exists():
        raise ValueError(f"{file} is not there; name the config.json of the model by --config")
    config = read_config(file)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{file} has quantization_config; load the model dequantized, by transformers, and save it before"
        )
    return skeleton(config, num_tensors)


def _to_dcp(source: Path, out: Path, config_at: Path, tick: Tick) -> None:
    files = HubFiles(source)
    model = _model(config_at, len(files.file_of))
    names = HubNames(model)
    sources = sources_of(model, files, names)
    warn_of_others(source, model, (each.name for each in sources), KEPT)
    planner = _Pieces(model, names, files, sources, tick)
    others = other_files(source)
    with whole_folder(out) as new:
        for path in others:
            shutil.copy(path, new)
        if config_at != source:
            model.config.save_pretrained(new)
        with warnings.catch_warnings():
            # torch warns of one process, which is what is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({MODEL: planner.layout}, checkpoint_id=new, planner=planner, no_dist=True)


class _Pieces(DefaultSavePlanner):
    """Saves the parameters of ``layout``, which are on the meta device, from hub files, experts one by one."""

    def __init__(self, model: Any, names: HubNames, files: HubFiles, sources: list[Source], tick: Tick) -> None:
        super().__init__()
        self._names, self._files, self._tick = names, files, tick
        state = model.state_dict()
        # Each source has the name under which it makes the tensor: for a tied tensor this may be another one's name.
        self._source: dict[str, tuple[Source, str]] = {}
        self.layout: dict[str, Tensor] = {}
        for source in sources:
            for name, part in source.made(names, files.meta, 0 if source.num_experts else None).items():
                dtype, like = _common_dtype(source, files, part), state.get(name, part)
                self.layout[name] = torch.empty(like.shape, dtype=dtype, device="meta")
                self._source[name] = source, name
        stored = set(self.layout)
        for name, group in tied_names(model).items():
            if name not in stored and (others := [other for other in group if other in stored]):
                self.layout[name], self._source[name] = self.layout[others[0]], self._source[others[0]]
        self._done, self._all = 0, sum(each.nbytes for each in self.layout.values())

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
        return self.plan

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        name = item.index.fqn.removeprefix(f"{MODEL}.")
        if name not in self._names.experts:
            yield item
            return
        shape = self.layout[name].shape
        for expert in range(shape[0]):
            offsets = torch.Size([expert] + [0] * (len(shape) - 1))
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([1, *shape[1:]]))
            properties = TensorProperties(dtype=self.layout[name].dtype)
            data = TensorWriteData(chunk=chunk, properties=properties, size=shape)
            index = MetadataIndex(item.index.fqn, offsets, index=expert)
            yield WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix(f"{MODEL}.")
        (source, made_as), offset = self._source[name], write_item.index.offset
        expert = offset[0] if name in self._names.experts and offset else None
        tensor = source.made(self._names, self._files.read, expert)[made_as].to(self.layout[name].dtype)
        self._done += tensor.nbytes
        self._tick(self._done, self._all)
        return tensor


def _common_dtype(source: Source, files: HubFiles, made: Tensor) -> torch.dtype:
    """Returns a dtype that can represent all tensors from which ``source`` makes the parameter ``made``."""
    found = [{files.meta(name).dtype: name for name in reversed(names)} for names in source.parts.values()]
    dtypes = {dtype for each in found for dtype in each}
    if dtypes <= set(DTYPES):
        return reduce(torch.promote_types, dtypes)
    for each in found:
        if len(each) > 1:
            (one, first), (other, second), *_ = each.items()
            raise ValueError(
                f"{files.folder}: {first} has {one} and {second} {other}, and no dtype holds the values of both, which "
                f"{source.name} needs; save the weights in one of {', '.join(map(str, DTYPES))}"
            )
    return made.dtype


def _to_hub(source: Path, out: Path, config_at: Path, tick: Tick) -> None:
    stored = _SavedModel(source)
    model = _model(config_at, stored.num_tensors)
    names, config = HubNames(model), model.config
    layout, others = stored.layout(model), stored.others(model)
    config.dtype = loading_dtype(model, layout)
    config.architectures = [type(model).__name__]
    in_files = names.layout(layout)
    if twice := sorted(in_files.keys() & others.keys()):
        raise ValueError(
            f"{source}: {twice[0]}, which {type(model).__name__} does not have, is the name in files of one of its "
            "tensors; save it under another name"
        )
    files = NewHubFiles(in_files | others, max_shard_size="5GB")
    beside = other_files(config_at) if config_at.is_dir() else []
    done, total = 0, sum(each.nbytes for each in (layout | others).values())
    with whole_folder(out) as new:
        for path in beside:
            shutil.copy(path, new)
        config.save_pretrained(new)
        files.create(new)
        for group in names.groups(layout):
            for rows in stored.rows(group) if names.experts.issuperset(group) else [None]:
                tensors = {name: stored.read(name, layout[name], rows) for name in group}
                done += sum(each.nbytes for each in tensors.values())
                for expert, part in _by_expert(tensors, rows):
                    for name, tensor in names.to_hub(part, expert).items():
                        files.write(new, name, tensor, row=expert or 0)
                tick(done, total)
        for name, like in others.items():
            files.write(new, name, stored.read(name, like, None))
            done += like.nbytes
            tick(done, total)


def _by_expert(tensors: dict[str, Tensor], rows: range | None) -> Iterator[tuple[int | None, dict[str, Tensor]]]:
    """Gives the experts that ``rows`` of tensors are, one by one, as [1, ...]; without rows the tensors as they are."""
    if rows is None:
        yield None, tensors
        return
    for index, expert in enumerate(rows):
        yield expert, {name: each[index : index + 1] for name, each in tensors.items()}


# torch pickles these classes into the metadata of a checkpoint, by module. Anything else could run code.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # torch up to 2.2 has them there.
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, each in vars(torch).items() if isinstance(each, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}


# The one of Python, because that of C calls no method of a subclass for BUILD.
class _MetadataUnpickler(pickle._Unpickler):
    """Reads the metadata of a checkpoint, and runs none of its code."""

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 calls the module of paths so.
        module = module.removesuffix("._local")
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there")
        # This system can make no path of the other.
        return super().find_class(module, f"Pure{name}" if name in ("PosixPath", "WindowsPath") else name)

    def load_build(self) -> None:
        """Sets the attributes of an instance. Those of a class or function, which all code has, stay."""
        made = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(made, type) or not is_dataclass(made):
            raise pickle.UnpicklingError(f"it changes {made!r}, which torch does not do there")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def _read_metadata(folder: Path) -> Metadata:
    """Returns the metadata of a distributed checkpoint. Raises ValueError, which names the file, for anything else."""
    path = inside(folder, METADATA)
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    # Damaged bytes make a pickle raise almost any error.
    except Exception as error:
        raise ValueError(
            f"{path} is torn, or not the metadata of a checkpoint ({error}); save the checkpoint again, or do not use "
            "it if you do not know its author"
        ) from error
    if reason := _metadata_fault(found):
        raise ValueError(f"{path} is not the metadata of a checkpoint: {reason}; save the checkpoint again")
    assert isinstance(found, Metadata)
    return found


def _metadata_fault(found: Any) -> str:
    """Returns what contradicts itself in the metadata of a checkpoint; "" if it is whole."""
    try:
        if not isinstance(found, Metadata):
            return f"it has a {type(found).__name__}"
        for name, each in found.state_dict_metadata.items():
            if isinstance(each, BytesStorageMetadata):
                continue
            for chunk in each.chunks:
                ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
                if (
                    min((0, *chunk.offsets, *chunk.sizes)) < 0
                    or any(map(gt, ends, each.size))
                    or len(ends) != len(each.size)
                ):
                    return f"{name} has a piece at {list(chunk.offsets)} of shape {list(chunk.sizes)}, outside of it"
            # Ranks that have nothing of a tensor store an empty piece.
            pieces = {chunk.offsets: prod(chunk.sizes) for chunk in each.chunks if prod(chunk.sizes)}
            if sum(pieces.values()) != prod(each.size):
                return f"the pieces of {name} have {sum(pieces.values())} of its {prod(each.size)} values"
            if not isinstance(name, str) or not isinstance(each.properties.dtype, torch.dtype):
                return f"{name} has dtype {each.properties.dtype}"
            for offsets, size in pieces.items():
                info = found.storage_data[MetadataIndex(name, offsets)]
                if info.length < size * each.properties.dtype.itemsize and not info.transform_descriptors:
                    return f"the piece of {name} at {list(offsets)} has {size} values in {info.length} bytes"
        for index, info in found.storage_data.items():
            if (
                not isinstance(index, MetadataIndex)
                or not isinstance(info.relative_path, str)
                or min(info.offset, info.length) < 0
            ):
                return f"{index} lies at {info}"
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return str(error)
    return ""


class _SavedModel:
    """The model in a distributed checkpoint, read part by part. Raises ValueError for one that is torn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _read_metadata(folder)
        self._reader = dcp.FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, True)
        for info in self._metadata.storage_data.values():
            path = inside(folder, info.relative_path)
            size = path.stat().st_size if path.exists() else 0
            if size < info.offset + info.length:
                raise ValueError(
                    f"{path} is torn or missing: it has {size} bytes, and {METADATA} says at least "
                    f"{info.offset + info.length}; take an earlier checkpoint, or copy this one again"
                )

    @property
    def num_tensors(self) -> int:
        return len(self._metadata.state_dict_metadata)

    def layout(self, model: Any) -> dict[str, Tensor]:
        """Returns the stored parameters and buffers of ``model``, without memory.

        A tied parameter is left out where it has the bits of the one that it is tied to.
        """
        wanted = model.state_dict()
        tied = tied_names(model)
        stored = self._metadata.state_dict_metadata
        prefixes = (f"{MODEL}.", "")
        prefix = next((each for each in prefixes if any(each + name in stored for name in wanted)), None)
        if prefix is None:
            raise ValueError(
                f"{self._folder} has no {next(iter(wanted))!r}, which {type(model).__name__} has, nor that under "
                f"{MODEL!r}; it has {', '.join(list(stored)[:3])}, ...; save "
                f"dcp.save({{{MODEL!r}: get_model_state_dict(model)}})"
            )
        self._prefix = prefix
        layout = {}
        for name, tensor in wanted.items():
            found = stored.get(self._prefix + name)
            if found is None and any(self._prefix + other in stored for other in tied.get(name, ())):
                continue
            if not isinstance(found, TensorStorageMetadata):
                raise ValueError(
                    f"{self._folder} has no {name}, which {type(model).__name__} has; is its config another?"
                )
            if found.size != tensor.shape:
                raise ValueError(
                    f"{self._folder}: {name} is of shape {list(found.size)}, and by config.json {list(tensor.shape)}; "
                    "give the config.json of this model by --config"
                )
            layout[name] = torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, group in tied.items():
            first = layout.get(group[0])
            if name != group[0] and first is not None and name in layout and self._is_copy(name, group[0], layout):
                del layout[name]
        return layout

    def _is_copy(self, name: str, other: str, layout: dict[str, Tensor]) -> bool:
        one, first = layout[name], layout[other]
        same = (one.dtype, one.shape) == (first.dtype, first.shape)
        return same and torch.equal(self.read(name, one, None), self.read(other, first, None))

    def others(self, model: Any) -> dict[str, Tensor]:
        """Returns the tensors saved under "model" that ``model`` does not have, without memory. Warns of these and of
        other entries that it does not have. Call ``layout`` first.
        """
        stored = self._metadata.state_dict_metadata
        names = {key.removeprefix(self._prefix) for key in stored if key.startswith(self._prefix)}
        kept = {}
        for name in sorted(names - model.state_dict().keys()):
            found = stored[self._prefix + name]
            if self._prefix and isinstance(found, TensorStorageMetadata):
                kept[name] = torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        warn_of_others(self._folder, model, kept, KEPT)
        warn_of_others(self._folder, model, names - kept.keys(), LEFT_OUT)
        return kept

    def rows(self, group: list[str]) -> list[range]:
        """Returns experts in ranges that no stored shard of the group's crosses, so that each is read once."""
        chunks = [chunk for name in group for chunk in self._chunks(name)]
        last = max(chunk.offsets[0] + chunk.sizes[0] for chunk in chunks)
        cuts = sorted({chunk.offsets[0] for chunk in chunks} | {last})
        crossed = {cut for cut in cuts for each in chunks if each.offsets[0] < cut < each.offsets[0] + each.sizes[0]}
        kept = [cut for cut in cuts if cut not in crossed]
        return [range(start, end) for start, end in pairwise(kept)]

    def _chunks(self, name: str) -> list[ChunkStorageMetadata]:
        found = self._metadata.state_dict_metadata[f"{self._prefix}{name}"]
        assert isinstance(found, TensorStorageMetadata)
        return [chunk for chunk in found.chunks if chunk.sizes.numel()]

    def read(self, name: str, like: Tensor, rows: range | None) -> Tensor:
        """Returns a parameter like ``like``, or some rows of it."""
        key = f"{self._prefix}{name}"
        offsets, sizes = [0] * like.ndim, list(like.shape)
        if rows is not None:
            offsets[0], sizes[0] = rows[0], len(rows)
        tensor = torch.empty(sizes, dtype=like.dtype)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        found: Any = self._metadata.state_dict_metadata[key]
        items = create_read_items_for_chunk_list(key, found, [chunk])
        try:
            self._reader.read_data(LoadPlan(items), _Into(tensor)).wait()
        # Damaged bytes make torch raise almost any error.
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"{self._folder}: {name} cannot be read ({what}); take an earlier checkpoint, or copy this one again"
            ) from error
        return tensor


class _Into(DefaultLoadPlanner):
    """Loads into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        sides = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._tensor[tuple(slice(start, start + size) for start, size in sides)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
