"""The check of a hub folder before anything is loaded: whether it has every parameter of its model.

transformers warns of what is missing and draws it at random, or fails on some ranks while the others wait.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from moesys.files import read_json
from moesys.hf.hub_files import HubFiles, HubNames, has_safetensors, read_config, skeleton, tied_names

ALL = slice(None)


def check_checkpoint(folder: Path | str, config: Any = None) -> None:
    """Checks by names and shapes that a folder in the hub's format has every tensor of its model.

    ``config``: the model's, of transformers; by default what config.json says.

    Raises ValueError for a safetensors file that is torn or missing, for experts that are missing or too many, for
    other tensors that are missing or there twice, and for another shape than the configuration makes them, with the
    file, the tensor, both values and what to do. Warns of tensors that the model does not have: transformers ignores
    them.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder is a {type(folder).__name__}; give the path of a folder as a str or Path")
    folder = Path(folder)
    model, found = _model_and_sources(folder, read_config(folder / "config.json") if config is None else config)
    warn_of_others(folder, model, (each.name for each in found), "transformers ignores them")


def warn_of_others(folder: Path, model: Any, names: Iterable[str], what_happens: str) -> None:
    """Warns of those ``names`` in a checkpoint that ``model`` does not have."""
    if others := sorted(set(names) - model.state_dict().keys(), key=dot_natural_key):
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
        warnings.warn(
            f"{folder} has entries that a {type(model).__name__} of its config.json does not have: {shown}; "
            f"{what_happens}",
            stacklevel=3,
        )


def check_before_loading(config: Any) -> None:
    """Checks the folder that ``from_pretrained`` is about to load a model of ``config`` from, where it is one with
    safetensors in the hub's format.
    """
    name = getattr(config, "name_or_path", None)
    plain = getattr(config, "quantization_config", None) is None
    known = config.architectures and hasattr(transformers, config.architectures[0])
    if name and plain and known and has_safetensors(Path(name)):
        # transformers itself warns of what it ignores.
        _model_and_sources(Path(name), config)


def _model_and_sources(folder: Path, config: Any) -> tuple[Any, list[Source]]:
    files = HubFiles(folder)
    model = skeleton(config, len(files.file_of))
    return model, sources_of(model, files, HubNames(model))


@dataclass
class Source:
    """The tensors in files that parameters come from, and the way in which transformers makes them.

    name: of the parameter, the first if there are several. parts: tensors by the pattern of the converter that their
    names match. num_experts: E if tensors are of one expert each, in order, those of one parameter behind one another;
    otherwise 0.
    """

    name: str
    converter: WeightConverter | None
    parts: dict[str, list[str]] = field(default_factory=dict)
    num_experts: int = 0

    @property
    def tensors(self) -> Iterator[str]:
        return (tensor for names in self.parts.values() for tensor in names)

    def made(
        self, names: HubNames, get: Callable[[str, slice], Tensor], expert: int | None = None
    ) -> dict[str, Tensor]:
        """Returns parameters, or one expert's part of them as [1, ...], from what ``get`` gives for a name and rows."""
        converter, model = deepcopy(self.converter), names.stand_in(one_expert=expert is not None)
        rows = ALL if expert is None or self.num_experts else slice(expert, expert + 1)
        for pattern, tensors in self.parts.items():
            for tensor in tensors if expert is None or not self.num_experts else tensors[expert :: self.num_experts]:
                part: Any = get(tensor, rows)
                if converter is None:
                    return {self.name: part}
                converter.add_tensor(self.name, tensor, pattern, part)
        assert converter is not None
        found = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def sources_of(model: Any, files: HubFiles, names: HubNames) -> list[Source]:
    """Returns the sources in ``files`` of the parameters and buffers of ``model``, which is on the meta device.

    Each tied parameter is made from its own tensor if the files have it, as transformers does.
    Tensors that the model does not have are returned too, under their own names.

    Raises ValueError for a tensor of the model that is missing or stored twice.
    """
    state = model.state_dict()
    sources: dict[str, Source] = {}
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for key in sorted(files.file_of, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state:
            name, pattern = key, None
        converter = of_pattern[pattern] if pattern else None
        source = sources.setdefault(name, Source(name, converter))
        if source.parts and (converter is None or converter is not source.converter):
            first = next(source.tensors)
            raise ValueError(
                f"{files.file_of[key]}: {key} gives {name}, and so does {first} of {files.file_of[first].name}, so "
                "that it is not known which of the two is meant; remove one of them, or save the weights again"
            )
        source.parts.setdefault(pattern or key, []).append(key)
    made: dict[str, tuple[Tensor, Source]] = {}
    for name, source in sources.items():
        first = next(source.tensors)
        if name in names.experts and files.meta(first).ndim == state[name].ndim - 1:
            source.num_experts = len(state[name])
            _check_experts(model, files, names, source)
        try:
            parts = source.made(names, files.meta, 0 if source.num_experts else None)
        # Tensors that are missing or of other shapes make conversions raise almost any error.
        except Exception as error:
            raise ValueError(
                f"{files.file_of[first]}: transformers makes no {name} of {first} and what belongs to it "
                f"({type(error).__name__}: {error}); {_way_out()}"
            ) from error
        made |= {each: (part, source) for each, part in parts.items()}
    tied = tied_names(model)
    optional = re.compile("|".join(f"({each})" for each in model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
    for name, wanted in state.items():
        if name not in made:
            if any(other in made for other in tied.get(name, ())) or optional.search(name):
                continue
            missing, tensor = next(iter(names.to_hub({each: state[each] for each in names.group_of[name]}).items()))
            others = [each for each in sources if each not in state]
            raise ValueError(
                f"{files.folder}: {missing} is in no file, and config.json makes it a tensor of {list(tensor.shape)}"
                f"{f' (files have {others[0]}, which the model does not)' if others else ''}; {_way_out()}"
            )
        tensor, source = made[name]
        cut = 1 if source.num_experts else 0
        if tensor.shape[cut:] != wanted.shape[cut:]:
            first = next(source.tensors)
            raise ValueError(
                f"{files.file_of[first]}: {first} gives {name} the shape {list(tensor.shape[cut:])}, and config.json "
                f"{list(wanted.shape[cut:])}; {_way_out()}"
            )
    return list(sources.values())


def _check_experts(model: Any, files: HubFiles, names: HubNames, source: Source) -> None:
    """Raises ValueError where the tensors of a layer's experts are not one an expert, all of one shape."""
    group = names.group_of[source.name]
    E, held, modules = source.num_experts, max(map(len, source.parts.values())), len(group)
    found = set(source.tensors)
    known = set(names.to_hub({name: model.get_parameter(name) for name in group}))
    layer = source.name.rpartition(".")[0]
    counted = _field(files.folder, model.config, E)
    if any(len(tensors) != E * modules for tensors in source.parts.values()):
        wrong = sorted(found - known, key=dot_natural_key) or sorted(known - found, key=dot_natural_key)
        file = files.file_of.get(wrong[0], files.folder)
        what = "is too many" if wrong[0] in found else "is in no file"
        of_modules = f" of {modules} modules" if modules > 1 else ""
        others = f"{layer} has {held} experts{of_modules} there, and"
        if held == E * modules:
            others = f"other tensors of {layer} have all, as"
        raise ValueError(
            f"{file}: {wrong[0]} {what}: {others} config.json says {counted}={E}; "
            f"{_way_out(f'{counted} to {held // modules}' if held != E * modules and held % modules == 0 else '')}"
        )
    if len(source.parts) * E * modules != len(known):
        missing = sorted(known - found, key=dot_natural_key)[0]
        raise ValueError(f"{files.folder}: {missing} is in no file, of none of the {E} experts; {_way_out()}")
    for tensors in source.parts.values():
        numbers = _numbers(tensors)
        for expert, (tensor, number) in enumerate(zip(tensors, numbers, strict=True)):
            if number != expert and expert in numbers:
                raise ValueError(
                    f"{files.file_of[tensor]}: {tensor} belongs to expert {number}, but transformers loads tensors in "
                    f"the order of their names and would make it expert {expert}; give the names of all experts of "
                    f"{layer} the same prefix"
                )
            if number != expert:
                raise ValueError(
                    f"{files.file_of[tensor]}: {tensor} belongs to expert {number}, and no file has expert {expert}: "
                    f"config.json says {counted}={E}, which are numbered from 0; {_way_out()}"
                )
            first = tensors[expert - expert % E]
            if (other := files.meta(tensor).shape) != (shape := files.meta(first).shape):
                raise ValueError(
                    f"{files.file_of[tensor]}: {tensor} has shape {list(other)}, and {first} {list(shape)}; "
                    "fetch it again"
                )


def _numbers(tensors: list[str]) -> list[int]:
    """Returns the expert numbers in tensor names that differ in nothing else, -1 for what is no number."""
    # From the end, because a prefix such as "model." may be missing from some of the names.
    parts = zip(*(reversed(tensor.split(".")) for tensor in tensors), strict=False)
    differing = next((part for part in parts if len(set(part)) > 1), map(str, range(len(tensors))))
    return [int(part) if part.isdecimal() else -1 for part in differing]


def _field(folder: Path, config: Any, num_experts: int) -> str:
    """Returns the name of what says how many experts there are, as config.json has it where that is there."""
    path = folder / "config.json"
    written = read_json(path) if path.exists() else {}
    fields = [*written.items(), *config.to_dict().items()]
    return next((name for name, value in fields if "experts" in name and value == num_experts), "num_experts")


def _way_out(right: str = "") -> str:
    again = "fetch or save the weights again"
    return f"{again}, or set {right} if they are right" if right else f"{again}, or give the config.json of theirs"
