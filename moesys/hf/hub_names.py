"""How a model's tensors lie in files of the hub, by transformers' own rules (``conversion_mapping``).

A model has all experts of a layer in one parameter [E, ...]; most families' files have two or three tensors an expert.
Nothing here has memory: models and tensors are on the meta device, or pieces that the caller has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import transformers
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

from moesys.hf.experts_module import DTYPES, ExpertsModule, is_experts


def skeleton(config: Any) -> Any:
    """Returns a model of the config's architecture, on the meta device. Raises ValueError for one that is not known."""
    architectures = config.architectures or []
    if architectures:
        kind = getattr(transformers, architectures[0], None)
    else:
        kind = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise ValueError(
            f"config.json has architectures={architectures} and model_type={config.model_type!r}, a model that "
            f"transformers {transformers.__version__} does not have; take one that does, and no code of one's own"
        )
    return without_memory(kind, config)


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
        if all(_holds(dtype_of.get(name, dtype), each.dtype) for name, each in tensors.items()):
            return dtype
    return widest


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Returns whether every value of dtype ``other`` is one of ``dtype``; only floating-point dtypes are compared."""
    return other not in DTYPES or torch.promote_types(dtype, other) == dtype


class HubNames:
    """Turns a model's tensors into those of files.

    model: on the meta device. conversions: with which its weights were loaded; transformers' for its family by default.
    experts: names of the parameters that have all experts of a layer in their first dimension.
    """

    def __init__(self, model: Any, conversions: list[WeightTransform] | None = None) -> None:
        if conversions is None:
            found = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [each for each in found if not isinstance(each, PrefixChange)]
        self._model, self._conversions = model, conversions
        self.experts = {
            f"{path}.{name}"
            for path, module in model.named_modules()
            if is_experts(module)
            for name in ExpertsModule.of(module).names
        }

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Returns the names, those together whose tensors become one in files."""
        reverse: list[Any] = [each.reverse_transform() for each in self._conversions[::-1]]
        converters = [each for each in reverse if isinstance(each, WeightConverter)]
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(apply_converters(name, converters)[0], []).append(name)
        return list(groups.values())

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
        conversions = self._conversions if expert is None else [_of_one(each, expert) for each in self._conversions]
        loaded: Any = SimpleNamespace(
            _weight_conversions=conversions, config=self._model.config, get_parameter=self._model.get_parameter
        )
        found: dict[str, Tensor] = revert_weight_conversion(loaded, tensors)
        return found


def _of_one(conversion: WeightTransform, expert: int) -> WeightTransform:
    """Returns the conversion of one expert's tensors, whose names have its number where those of all have a star."""
    if not isinstance(conversion, WeightConverter):
        return conversion
    sources = [pattern.replace(".*.", f".{expert}.") for pattern in conversion.source_patterns]
    return conversion.copy(sources, list(conversion.target_patterns), operations=conversion.operations)
