"""The checkpoint format of the Hugging Face hub: names and shapes of tensors, and safetensors files.

A model has all experts of a layer in one parameter [E, ...]; the files of most families have two or three tensors per
expert. ``HubNames`` translates by transformers' own rules (``conversion_mapping``), of models and tensors on the meta
device or of pieces that the caller has. ``HubFiles`` reads files slice by slice, and ``NewHubFiles`` writes them piece
by piece, from any number of processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightTransform,
    apply_converters,
    dot_natural_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import str_to_torch_dtype

from moesys.files import read_json, resolved
from moesys.hf.experts_module import DTYPES, ExpertsModule, is_experts

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What else lies in a folder goes along with the model: configuration, tokenizer, licence.
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".distcp")
DTYPE_OF: dict[str, torch.dtype] = str_to_torch_dtype
NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}


def read_config(path: Path) -> Any:
    """Returns the configuration in a config.json. Raises ValueError, which names the file, for anything else, and for
    a model that has code of its own.
    """
    if not isinstance(read_json(path), dict):
        raise ValueError(f"{path} is not a configuration: it has no fields; give the config.json of a model")
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    # Values that are not checked make transformers raise almost any error.
    except Exception as error:
        raise ValueError(
            f"{path} is not read by transformers {transformers.__version__}: {_in_a_line(error)}"
        ) from error


def skeleton(config: Any, num_tensors: int) -> Any:
    """Returns a model of the config's architecture, on the meta device.

    Raises ValueError for an architecture that transformers does not have, values of which it makes no model, and more
    layers than ``num_tensors``, those of a checkpoint, can fill.
    """
    architectures = config.architectures or []
    if not architectures:
        kind = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    elif isinstance(architectures, list):
        kind = getattr(transformers, str(architectures[0]), None)
    else:
        kind = None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"config.json has architectures={architectures} and model_type={config.model_type!r}, a model that "
            f"transformers {transformers.__version__} does not have; take one that does, and no code of one's own"
        )
    try:
        if 0 < (num_layers := getattr(config.get_text_config(), "num_hidden_layers", 1)) <= num_tensors:
            return without_memory(kind, config)
    except Exception as error:
        raise ValueError(
            f"transformers {transformers.__version__} makes no {kind.__name__} of config.json: {_in_a_line(error)}; "
            "give the model's own"
        ) from error
    raise ValueError(
        f"config.json has num_hidden_layers={num_layers}, and the checkpoint {num_tensors} tensors; give the model's "
        "own"
    )


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def without_memory(kind: Any, config: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return kind._from_config(deepcopy(config), **options)


def tied_names(model: Any) -> dict[str, list[str]]:
    """Returns for each parameter that the configuration of ``model`` ties to others the names of all of them.

    The first name is the one that transformers writes.
    """
    groups: dict[str, list[str]] = {}
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        groups.setdefault(source, [source]).append(name)
    return {name: group for group in groups.values() for name in group}


def loading_dtype(model: Any, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Returns the smallest dtype for config.json in which ``from_pretrained`` rounds none of ``tensors``.

    transformers gives every tensor that one dtype, except for those that it keeps in float32. ``model`` is on the meta
    device, of the architecture and configuration of ``tensors``.
    """
    found = {each.dtype for each in tensors.values() if each.dtype in DTYPES} or {torch.get_default_dtype()}
    widest = reduce(torch.promote_types, found)
    for dtype in sorted(found - {widest}, key=lambda each: each.itemsize):
        made = without_memory(type(model), model.config, dtype=dtype)
        dtype_of = {name: each.dtype for name, each in made.state_dict().items()}
        for pattern, kept in made._get_dtype_plan(dtype).items():
            dtype_of |= {name: kept for name in dtype_of if re.search(pattern.replace("*", ".*"), name)}
        pairs = [(dtype_of.get(name, dtype), each.dtype) for name, each in tensors.items() if each.dtype in DTYPES]
        if all(torch.promote_types(held, of_file) == held for held, of_file in pairs):
            return dtype
    return widest


class HubNames:
    """Turns a model's tensors into those of files.

    model: on the meta device. conversions: with which its weights were loaded; transformers' for its family by default.
    group_of: for each name of the model's, those whose tensors become one in files, in order. experts: names of the
    parameters that have all experts of a layer in their first dimension, unless conversions make something else of one
    expert than of all.
    """

    def __init__(self, model: Any, conversions: list[WeightTransform] | None = None) -> None:
        if conversions is None:
            found = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [each for each in found if not isinstance(each, PrefixChange)]
        reverse: list[Any] = [each.reverse_transform() for each in conversions]
        self._conversions = [SimpleNamespace(reverse_transform=lambda each=each: each) for each in reverse]
        self._model, self._converters = model, [each for each in reverse[::-1] if isinstance(each, WeightConverter)]
        self.group_of = {name: group for group in self.groups(model.state_dict()) for name in group}
        self.experts = {
            f"{path}.{name}"
            for path, module in model.named_modules()
            if is_experts(module)
            for name in ExpertsModule.of(module).names
        }
        # All at once, because some renamings apply only after they have seen another tensor's name.
        self.to_hub(model.state_dict())
        self._names_of_all: dict[str, list[str]] = {}
        for group in [self.group_of[name] for name in sorted(self.experts)]:
            self._names_of_all[group[0]] = self._names_by_expert(group)
            self.experts -= set() if self._names_of_all[group[0]] else set(group)

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Returns the names, those together whose tensors become one in files."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(apply_converters(name, self._converters)[0], []).append(name)
        return list(groups.values())

    def _names_by_expert(self, group: list[str]) -> list[str]:
        """Returns the names in files of a group of experts' parameters; [] if it has others, or if one expert does not
        become what it becomes among all: a row of each tensor, or one tensor in E.
        """
        all_of = {name: self._model.get_parameter(name) for name in group if name in self.experts}
        one_of = {name: each[:1] for name, each in all_of.items()}
        # Conversions raise almost any error for one expert of a group that they only take as a whole.
        with suppress(Exception):
            found, E = self.to_hub(all_of), len(next(iter(all_of.values())))
            shapes = [each.shape for each in revert_weight_conversion(self.stand_in(one_expert=True), one_of).values()]
            rows, apart = [torch.Size((E, *each[1:])) for each in shapes], [each for each in shapes for _ in range(E)]
            if len(all_of) == len(group) and [each.shape for each in found.values()] in (rows, apart):
                return list(found)
        return []

    def stand_in(self, *, one_expert: bool) -> Any:
        """Returns what conversions ask of a model; ``one_expert``: one whose parameters of experts are [1, ...]."""
        rows = 1 if one_expert else None
        return SimpleNamespace(
            _weight_conversions=self._conversions,
            config=self._model.config,
            get_parameter=lambda name: self._model.get_parameter(name)[: rows if name in self.experts else None],
        )

    def layout(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all tensors of a model, which are on the meta device, by their names in files.

        Raises ValueError where two of them have one name in files.
        """
        found: dict[str, Tensor] = {}
        for group in self.groups(sorted(tensors, key=dot_natural_key)):
            made = self.to_hub({name: tensors[name] for name in group})
            if twice := sorted(found.keys() & made.keys()):
                raise ValueError(
                    f"{type(self._model).__name__}: {twice[0]} is the name in files of {group[0]} and of another "
                    "tensor; give one of them another name"
                )
            found |= made
        return found

    def to_hub(self, tensors: dict[str, Tensor], expert: int | None = None) -> dict[str, Tensor]:
        """Returns a group's tensors by their names in files; with ``expert`` they have that one alone, as [1, ...]."""
        made: dict[str, Tensor] = revert_weight_conversion(self.stand_in(one_expert=expert is not None), tensors)
        if expert is None:
            return made
        names = self._names_of_all[self.group_of[next(iter(tensors))][0]]
        # Files have a tensor for each expert, behind one another, or one of all.
        step = len(names) // len(made)
        return dict(zip(names[expert % step :: step], made.values(), strict=True))


@contextmanager
def errors_of_checkpoints(folder: Path) -> Iterator[None]:
    """Raises the error or the interruption because of which ``torch.distributed.checkpoint`` fails in the block, of the
    first rank that has one: CheckpointException is no Exception, and its message has a traceback of each rank. An
    OSError without a file's name, as on a full disk, gets that of ``folder``.
    """
    try:
        yield
    except (dcp.CheckpointException, OSError) as failure:
        error: BaseException = failure
        if isinstance(failure, dcp.CheckpointException):
            error, _ = failure.failures[min(failure.failures)]
        # A writer that is closed because of an error raises another one.
        while not isinstance(error, OSError | KeyboardInterrupt) and error.__context__ is not None:
            error = error.__context__
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(folder)
        raise error from None


def other_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that are not weights. Raises ValueError for a link out of the folder."""
    return [
        without_links(folder, path.name)
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith(WEIGHTS) and not path.name.startswith(".")
    ]


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that a checkpoint in ``folder`` names, which may be a link, as weights often are.

    Raises ValueError for a name that leads out of the folder, and for what is no regular file.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{folder}: the checkpoint names {name!r}, which is outside of it; do not use it")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file; remove it, or fetch the checkpoint again")
    return path


def without_links(folder: Path, name: str) -> Path:
    """Returns the path of a file in ``folder`` that is copied. Raises ValueError for a link out of the folder, because
    somebody else could thereby have a file of this user copied; links into the hub's cache are followed.
    """
    path, whole = inside(folder, name), resolved(folder)
    found = resolved(path)
    caches = [Path(HF_HUB_CACHE).resolve()]
    if whole.parent.name == "snapshots":
        # The files of a revision link to those of the model, or of the whole cache.
        caches += [place / "blobs" for place in whole.parents[1:3]]
    if not any(map(found.is_relative_to, [whole, *caches])):
        raise ValueError(f"{path} is a link out of {folder}, to {found}; copy the file into the folder, or remove it")
    return path


class HubFiles:
    """The tensors of a folder's safetensors files, of which nothing is read but their names and shapes.

    Raises ValueError for files that are torn or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self._slices: dict[str, Any] = {}
        for path in _paths(folder):
            opened = _open(path)
            for name in opened.keys():  # noqa: SIM118
                self.file_of[name] = path
                self._slices[name] = opened.get_slice(name)

    def meta(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Returns the shape and dtype of a tensor, or of some rows of it, as a tensor without memory."""
        dtype = self._slices[name].get_dtype()
        if dtype not in DTYPE_OF:
            raise ValueError(f"{self.file_of[name]}: {name} is of dtype {dtype}; known are {', '.join(DTYPE_OF)}")
        shape = self._slices[name].get_shape()
        return torch.empty(shape, dtype=DTYPE_OF[dtype], device="meta")[rows if shape else ...]

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        tensor: Tensor = self._slices[name][rows if self._slices[name].get_shape() else ...]
        return tensor


def has_safetensors(folder: Path) -> bool:
    return (folder / INDEX).exists() or (folder / SINGLE).exists()


def _paths(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; is it a model's folder, and fully there?")
        return [inside(folder, SINGLE)]
    content = read_json(inside(folder, INDEX))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} has no weight_map of tensors to files; fetch it again")
    paths = [inside(folder, name) for name in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{index} names {path.name}, which is not there; fetch it, or the whole folder, again")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is torn at its {path.stat().st_size} bytes ({error}); fetch or save it again"
        ) from error


@dataclass(frozen=True)
class _Place:
    file: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class NewHubFiles:
    """Safetensors files of tensors that are known before any is there; any process writes any piece of them.

    layout: the tensors, on the meta device. Nothing is written before one process has called ``create``. Raises
    ValueError for a dtype that safetensors does not have.
    """

    def __init__(self, layout: Mapping[str, Tensor], max_shard_size: str) -> None:
        for name, tensor in layout.items():
            if tensor.dtype not in NAME_OF:
                raise ValueError(f"{name} has {tensor.dtype}; safetensors files store {', '.join(DTYPE_OF)}; cast it")
        split = split_torch_state_dict_into_shards(
            dict(layout), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        self._sharded = split.is_sharded
        self._weight_map, self._metadata = split.tensor_to_filename, split.metadata
        self._heads: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self.places: dict[str, _Place] = {}
        for file, names in split.filename_to_tensors.items():
            self._lay_out(file, {name: layout[name] for name in names})

    def _lay_out(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        # Larger items first, as safetensors does, so that all are aligned.
        order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        size = 0
        for name, tensor in order:
            ends = [size, size + tensor.nbytes]
            header[name] = {"dtype": NAME_OF[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
            size = ends[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._heads[file] = len(text).to_bytes(8, "little") + text
        begin = len(self._heads[file])
        self._sizes[file] = begin + size
        for name, tensor in order:
            start = begin + header[name]["data_offsets"][0]
            self.places[name] = _Place(file, start, tuple(tensor.shape), tensor.dtype)

    def create(self, folder: Path) -> None:
        for name, head in self._heads.items():
            with (folder / name).open("wb") as file:
                file.write(head)
                file.truncate(self._sizes[name])
        if self._sharded:
            index = {"metadata": self._metadata, "weight_map": self._weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def write(self, folder: Path, name: str, tensor: Tensor, row: int = 0) -> None:
        """Writes a whole tensor, or where it has fewer rows than the file's those from ``row`` on."""
        place = self.places[name]
        whole = tuple(tensor.shape) == place.shape
        if tensor.dtype != place.dtype or not (whole or tensor.shape[1:] == place.shape[1:]):
            raise ValueError(
                f"{name} is now {list(tensor.shape)} of {tensor.dtype}, and was {place}; save it as a whole"
            )
        data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        with (folder / place.file).open("r+b") as file:
            file.seek(place.start + (0 if whole else row * (data.size // len(tensor))))
            file.write(data.data)
