"""Reads what a config.json of transformers says of a model's experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from moesys.config.base import DType
from moesys.config.model import ModelShape

NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    # A model whose dense layers are wider names both.
    "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
}
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_PACKAGED = files("moesys.config") / "models"
_PUBLISHED = _PACKAGED / "published"


def model_names() -> list[str]:
    """Returns the names of the packaged configurations of small models, made for moesys."""
    return _names_in(_PACKAGED)


def published_names() -> list[str]:
    """Returns the names of the packaged configurations of published models: what decides sizes in the config.json of
    huggingface.co's repository ``_name_or_path``.
    """
    return _names_in(_PUBLISHED)


def _names_in(folder: Traversable) -> list[str]:
    return sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json"))


def read_config(model: str) -> dict[str, Any]:
    """Returns the content of a config.json: a file, that of a folder, or a packaged one by its name.

    Raises ValueError where there is none, or it is no JSON object.
    """
    if model in model_names():
        text, source = (_PACKAGED / f"{model}.json").read_text(encoding="utf-8"), model
    elif model in published_names():
        text, source = (_PUBLISHED / f"{model}.json").read_text(encoding="utf-8"), model
    else:
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        try:
            text, source = path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ValueError(
                f"model={model!r}: cannot read {path}: {reason}; give a config.json, a folder with one, or one of "
                f"{', '.join([*model_names(), *published_names()])}"
            ) from None
    return parse_config(text, f"model={model!r}: {source}")


def parse_config(text: str, source: str) -> dict[str, Any]:
    """Returns the JSON object that ``text`` is. Raises ValueError, in which ``source`` says where it is from."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{source} holds no JSON object, so it is no config.json of transformers")
    return config


def shape_of(config: Mapping[str, Any], dtype: DType) -> ModelShape:
    """Returns the shape of a layer's experts. Raises ValueError for a configuration that does not say it."""
    found: dict[str, Any] = {}
    for field, names in NAMES.items():
        values = [_whole(config, name) for name in names if config.get(name) is not None]
        if not values:
            way_out = (
                "take that of the language model, which is its text_config"
                if "text_config" in config
                else "take a Mixture-of-Experts model, set what is null, and write the file with save_pretrained()"
            )
            raise ValueError(
                f"the config.json of model_type={config.get('model_type')!r} has none of {', '.join(names)}, so it "
                f"does not say how large its experts are; {way_out}"
            )
        found[field] = values[0]
    return ModelShape(**found, dtype=dtype)


def moe_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Returns for each layer whether it has experts: those of ``mlp_layer_types`` that are not dense; without it, all
    but the first ``first_k_dense_replace``, those in ``mlp_only_layers``, and of ``decoder_sparse_step`` all but the
    last.
    """
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        return tuple(kind != "dense" for kind in kinds)
    listed, every = config.get("mlp_only_layers"), _whole(config, "decoder_sparse_step") or 1
    dense = listed if isinstance(listed, list) else []
    first = max(_whole(config, name) for name in _FIRST_DENSE)
    layers = range(_whole(config, "num_hidden_layers"))
    return tuple(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in layers)


def num_moe_layers(config: Mapping[str, Any]) -> int:
    """Returns how many layers have experts."""
    return sum(moe_layers(config))


def _whole(config: Mapping[str, Any], name: str) -> int:
    """Returns a number, 0 where it is not there."""
    value = config.get(name) or 0
    if not isinstance(value, int):
        raise ValueError(f"the config.json has {name}={value!r}, which is no whole number")
    return value
