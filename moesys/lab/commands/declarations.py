"""Reads declarations from the command line, such as ``greedy``, JSON, a file, ``4x8`` or ``partition=gpu,time=30``."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from moesys.config import Balance, ClusterSpec, Predictor, Split, Strategy, presets
from moesys.config.experiment import Experiment
from moesys.lab.runs.experiment_files import declared_in, import_named, in_words
from moesys.lab.runs.slurm import Slurm
from moesys.tuner.space import Space

T = TypeVar("T")
D = TypeVar("D", Strategy, Space, Slurm)

_PRESETS = {
    make.__name__: make
    for make in (
        presets.a100,
        presets.h800,
        presets.h100,
        presets.h200,
        presets.b200,
        presets.gb200,
        presets.gb300,
    )
}


def balance_of(text: str) -> Balance:
    """Reads ``greedy``; ``{"kind": "greedy", "effort": 4}``; or ``my_planners:RoundRobin``, which is imported.

    Raises ValueError for others.
    """
    return _member(text, "balance", TypeAdapter(Balance))


def split_of(text: str) -> Split:
    """Reads ``flow``; ``{"kind": "flow", "max_inter_node": 0.1}``; or ``my_planners:Near``, which is imported.

    Raises ValueError for others.
    """
    return _member(text, "split", TypeAdapter(Split))


def predictor_of(text: str) -> Predictor:
    """Reads ``last``, or ``{"kind": "ema", "decay": 0.9}``. Raises ValueError for what is neither."""
    return _member(text, "predictor", TypeAdapter(Predictor))


def strategy_in(experiment: Experiment, name: str, way_out: str = "") -> Strategy:
    """Returns the strategy of ``experiment`` with this name. Raises ValueError if there is none."""
    named = {strategy.name: strategy for strategy in experiment.strategies}
    if name not in named:
        raise ValueError(f"strategy={name!r} is not in {experiment.name}; choose one of {', '.join(named)}{way_out}")
    return named[name]


def strategy_of(path: Path) -> Strategy:
    """Reads a ``Strategy`` in JSON or TOML, such as ``moesys tune`` writes. Raises ValueError for what is none."""
    return _declared_in(path, Strategy)


def space_of(path: Path) -> Space:
    """Reads a ``Space`` in JSON or TOML. Raises ValueError for what is none."""
    return _declared_in(path, Space)


def slurm_of(text: str) -> Slurm:
    """Reads ``partition=gpu,time=2:00:00``, fields of ``Slurm``; or a file of them in JSON or TOML.

    Raises ValueError for others.
    """
    if Path(text).suffix in (".json", ".toml") and "=" not in text:
        return _declared_in(Path(text), Slurm)
    named = [part.partition("=") for part in text.split(",")]
    if odd := next(("".join(part) for part in named if not all(part)), None):
        raise ValueError(f"slurm={text!r}: {odd!r} is no field with a value, as partition=gpu; separate them by commas")
    try:
        return Slurm.model_validate({name.strip(): value.strip() for name, _, value in named})
    except ValidationError as error:
        raise ValueError(f"slurm={text!r}: {in_words(error)}; fields are {', '.join(Slurm.model_fields)}") from None


def cluster_of(text: str) -> ClusterSpec:
    """Reads ``4x8``, 4 nodes of 8 ranks; ``h100:4``, 4 nodes of a preset; or a ``ClusterSpec`` in a file.

    Raises ValueError for others.
    """
    path = Path(text)
    try:
        if shorthand := re.fullmatch(r"(\d+)x(\d+)", text):
            num_nodes, ranks_per_node = map(int, shorthand.groups())
            return ClusterSpec(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
        if preset := re.fullmatch(rf"({'|'.join(_PRESETS)}):(\d+)", text):
            name, count = preset.groups()
            return _PRESETS[name](int(count))
        if path.suffix not in (".json", ".toml") or not path.is_file():
            raise ValueError(
                "no .json or .toml file; give one, or nodes and ranks a node as in 4x8, or nodes of a preset as in "
                f"h100:4 ({', '.join(_PRESETS)})"
            )
        declared = path.read_text(encoding="utf-8")
        return ClusterSpec.from_json(declared) if path.suffix == ".json" else ClusterSpec.from_toml(declared)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"cluster={text!r}: {in_words(error)}") from None


def _declared_in(path: Path, kind: type[D]) -> D:
    field = kind.__name__.lower()
    if path.suffix not in (".json", ".toml") or not path.is_file():
        raise ValueError(f"{field}={str(path)!r} is no .json or .toml file; give one that declares a {kind.__name__}")
    return declared_in(path, kind)


def _member(text: str, field: str, union: TypeAdapter[T]) -> T:
    try:
        fields: Any = json.loads(text) if text.lstrip().startswith("{") else {"kind": text}
    except json.JSONDecodeError as error:
        raise ValueError(f"{field}={text!r} is no JSON: {error}") from None
    try:
        import_named({field: fields}, Path.cwd())
        return union.validate_python(fields)
    except ValueError as error:
        raise ValueError(f"{field}={text!r}: {in_words(error)}") from None
