"""Reads what a config.json of transformers says of a model's experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from moesys.config.base import DType
from moesys.config.model import ModelShape

NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    # A model whose dense layers are wider names both.
    "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
}
_PACKAGED = files("moesys.config") / "models"


def model_names() -> list[str]:
    """Returns the names of the packaged configurations: small models of transformers' own code."""
    return sorted(each.name.removesuffix(".json") for each in _PACKAGED.iterdir() if each.name.endswith(".json"))


def read_config(model: str) -> dict[str, Any]:
    """Returns the content of a config.json: a file, that of a folder, or a packaged one by its name.

    Raises ValueError where there is none, or it is no JSON object.
    """
    if model in model_names():
        text, source = (_PACKAGED / f"{model}.json").read_text(encoding="utf-8"), model
    else:
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        try:
            text, source = path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ValueError(
                f"model={model!r}: cannot read {path}: {reason}; give a config.json, a folder with one, or one of "
                f"{', '.join(model_names())}"
            ) from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"model={model!r}: {source} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model={model!r}: {source} holds no JSON object, so it is no config.json of transformers")
    return config


def shape_of(config: Mapping[str, Any], dtype: DType) -> ModelShape:
    """Returns the shape of a layer's experts. Raises ValueError for a configuration that does not say it."""
    found: dict[str, Any] = {}
    for field, names in NAMES.items():
        values = [config[name] for name in names if config.get(name) is not None]
        if not values:
            raise ValueError(
                f"the config.json of model_type={config.get('model_type')!r} has none of {', '.join(names)}, so it "
                "does not say how large its experts are; take a Mixture-of-Experts model, and write the file with "
                "save_pretrained(), which leaves no default out"
            )
        found[field] = values[0]
    return ModelShape(**found, dtype=dtype)


def num_moe_layers(config: Mapping[str, Any]) -> int:
    """Returns how many layers have experts: all but the first ``first_k_dense_replace``, those in ``mlp_only_layers``,
    and of ``decoder_sparse_step`` all but the last.
    """
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = range(config.get("first_k_dense_replace") or 0, config.get("num_hidden_layers") or 0)
    return sum(1 for layer in layers if layer not in dense and (layer + 1) % every == 0)
