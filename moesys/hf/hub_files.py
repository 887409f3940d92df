"""Safetensors files of a hub folder: read slice by slice, and written piece by piece, by any number of processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What else lies in a folder goes along with the model: configuration, tokenizer, licence.
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".distcp")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def other_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that are not weights."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.endswith(WEIGHTS) and not path.name.startswith(".")
    )


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
        if dtype not in DTYPES:
            raise ValueError(f"{self.file_of[name]}: {name} is of dtype {dtype}; known are {', '.join(DTYPES)}")
        shape = self._slices[name].get_shape()
        return torch.empty(shape, dtype=DTYPES[dtype], device="meta")[rows if shape else ...]

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
        return [folder / SINGLE]
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} has no weight_map of tensors to files ({error}); fetch it again") from error
    paths = sorted(folder / name for name in named)
    for path in paths:
        if not path.exists():
            raise ValueError(f"{index} names {path.name}, which is not there; fetch it, or the whole folder, again")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            head = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(head)) if head <= path.stat().st_size else {}
            except ValueError:
                header = {}
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        wanted = f", and its header says {8 + head + max(ends)}" if ends else ", and its header cannot be read"
        raise ValueError(
            f"{path} is torn: it has {path.stat().st_size} bytes{wanted} ({error}); fetch or save it again"
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
            if tensor.dtype not in NAMES:
                raise ValueError(f"{name} has {tensor.dtype}; safetensors files store {', '.join(DTYPES)}; cast it")
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
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
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
        assert tensor.dtype == place.dtype and (whole or tensor.shape[1:] == place.shape[1:])  # noqa: PT018
        data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        with (folder / place.file).open("r+b") as file:
            file.seek(place.start + (0 if whole else row * (data.size // len(tensor))))
            file.write(data.data)
