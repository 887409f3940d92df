"""Experiments from files: a Python file with one function that returns an ``Experiment``, or JSON, or TOML.

What is read here is frozen: a file that is edited while its experiment runs changes nothing.
"""

from __future__ import annotations

import inspect
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from moesys.experiment import Experiment

_MODULE = "moesys_experiment_file"


def load_experiment(path: Path) -> Experiment:
    """The experiment that a ``.py``, ``.json`` or ``.toml`` file declares.

    Raises ValueError, in words for the file's author, where there is none, or where the file fails: then with those
    lines of the traceback that are the author's own.
    """
    if path.suffix not in (".py", ".json", ".toml"):
        raise ValueError(f"{path} is no experiment file; give a .py, .json or .toml file")
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file; give the path of an experiment file, such as experiments/skew_sweep.py"
        )
    if path.suffix == ".py":
        return _from_python(path)
    try:
        text = path.read_text(encoding="utf-8")
        return Experiment.from_json(text) if path.suffix == ".json" else Experiment.from_toml(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ValueError(f"{path} declares no experiment: {in_words(error)}") from None


def in_words(error: Exception) -> str:
    """An exception's message; pydantic's in one line, as ``field: message; field: message``."""
    if not isinstance(error, ValidationError):
        return str(error)
    parts = []
    for detail in error.errors(include_url=False):
        field = ".".join(str(step) for step in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        parts.append(f"{field}: {message}" if field else message)
    return "; ".join(parts)


def _from_python(path: Path) -> Experiment:
    module = ModuleType(_MODULE)
    module.__file__ = str(path)
    with _own_lines(path, f"{path} cannot be run"), _importable(module, path):
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    function = _experiment_function(module, path)
    with _own_lines(path, f"{path}: {function.__name__}() failed"), _importable(module, path):
        experiment = function()
    if not isinstance(experiment, Experiment):
        raise ValueError(
            f"{path}: {function.__name__}() returned {type(experiment).__name__}; let it return an Experiment"
        )
    return experiment


def _experiment_function(module: ModuleType, path: Path) -> Callable[[], Any]:
    """The file's function that is annotated to return an Experiment, else the one that is called ``experiment``."""
    own = [
        value
        for value in vars(module).values()
        if inspect.isfunction(value) and value.__module__ == _MODULE and not value.__name__.startswith("_")
    ]
    found = [function for function in own if _returns_experiment(function)]
    found = found or [function for function in own if function.__name__ == "experiment"]
    if not found:
        raise ValueError(
            f"{path} has no function that returns an Experiment; write one: def experiment() -> Experiment: ..."
        )
    if len(found) > 1:
        names = ", ".join(function.__name__ for function in found)
        raise ValueError(
            f"{path} has {len(found)} functions that return an Experiment ({names}); "
            "keep one, and begin the names of its helpers with an underscore"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(found[0]).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"{path}: {found[0].__name__}() needs {', '.join(needed)}; it is called without arguments, so give defaults"
        )
    return found[0]


def _returns_experiment(function: Callable[..., Any]) -> bool:
    annotation = function.__annotations__.get("return")
    # A string where the file postpones its annotations: Experiment or ms.Experiment.
    return annotation is Experiment or str(annotation).rpartition(".")[2] == Experiment.__name__


@contextmanager
def _importable(module: ModuleType, path: Path) -> Iterator[None]:
    """Lets the file import its neighbours, and its classes find their module, while it runs."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    sys.modules[_MODULE] = module
    try:
        yield
    finally:
        del sys.modules[_MODULE]
        sys.path.remove(folder)


@contextmanager
def _own_lines(path: Path, what: str) -> Iterator[None]:
    """Turns whatever the file raises into a ValueError with the file's own lines of the traceback."""
    try:
        yield
    except SyntaxError as error:
        told = "".join(traceback.format_exception_only(error)).rstrip()
        raise ValueError(f"{what}\n{told}") from None
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        lines = "".join(traceback.format_list(own))
        raise ValueError(f"{what}\n{lines}{type(error).__name__}: {in_words(error)}") from None
