"""Reads experiments from files: a Python file with a function that returns an ``Experiment``, or JSON, or TOML.

A Python file may also have ``experiments()``, which returns a list: those are run, one after another, and
``experiment()`` is the one that is meant where only one can be, as in ``moesys explain``.

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

from moesys.config.experiment import Experiment

_MODULE = "moesys_experiment_file"
_LIST = "experiments"


def load_experiments(path: Path) -> tuple[Experiment, ...]:
    """All experiments of a ``.py``, ``.json`` or ``.toml`` file, at least one and each of another name: what its
    ``experiments()`` returns, else its only one.

    Raises ValueError, in words for the file's author, where there is none, or where the file fails: then with those
    lines of the traceback that are the author's own.
    """
    return _loaded(path, all_of_them=True)


def load_experiment(path: Path) -> Experiment:
    """The one experiment of a file: what its only function for one returns, else the first of its ``experiments()``.

    Raises ValueError as ``load_experiments`` does.
    """
    return _loaded(path, all_of_them=False)[0]


def _loaded(path: Path, all_of_them: bool) -> tuple[Experiment, ...]:
    if path.suffix not in (".py", ".json", ".toml"):
        raise ValueError(f"{path} is no experiment file; give a .py, .json or .toml file")
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file; give the path of an experiment file, such as experiments/skew_sweep.py"
        )
    if path.suffix == ".py":
        return _from_python(path, all_of_them)
    try:
        text = path.read_text(encoding="utf-8")
        return (Experiment.from_json(text) if path.suffix == ".json" else Experiment.from_toml(text),)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ValueError(f"{path} declares no experiment: {in_words(error)}") from None


def in_words(error: BaseException) -> str:
    """An exception's message; pydantic's in one line, as ``field: message; field: message``."""
    if not isinstance(error, ValidationError):
        return str(error)
    parts = []
    for detail in error.errors(include_url=False):
        field = ".".join(str(step) for step in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        parts.append(f"{field}: {message}" if field else message)
    return "; ".join(parts)


def _from_python(path: Path, all_of_them: bool) -> tuple[Experiment, ...]:
    module = ModuleType(_MODULE)
    module.__file__ = str(path)
    with _own_lines(path, f"{path} cannot be run"), _importable(module, path):
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    function = _function(module, path, all_of_them)
    called = f"{path}: {function.__name__}()"
    if needed := _needed(function):
        raise ValueError(f"{called} needs {', '.join(needed)}; it is called without arguments, so give defaults")
    with _own_lines(path, f"{called} failed"), _importable(module, path):
        returned = function()
    if function.__name__ == _LIST:
        return _several(returned, called)
    if not isinstance(returned, Experiment):
        raise ValueError(f"{called} returned {type(returned).__name__}; let it return an Experiment")
    return (returned,)


def _several(returned: Any, called: str) -> tuple[Experiment, ...]:
    if not isinstance(returned, list | tuple) or not all(isinstance(one, Experiment) for one in returned):
        raise ValueError(f"{called} returned something else; let it return a list of Experiments")
    if not returned:
        raise ValueError(f"{called} returned an empty list; let it return one Experiment or more")
    names = [one.name for one in returned]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"{called} returned several Experiments of the name {min(twice)!r}, after which their run folders are "
            "named; give each another name"
        )
    return tuple(returned)


def _function(module: ModuleType, path: Path, all_of_them: bool) -> Callable[[], Any]:
    """``experiments`` where all are asked for; else the file's function that is annotated to return an Experiment, else
    the one that is called ``experiment``.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == _MODULE and not name.startswith("_")
    }
    several = own.pop(_LIST, None)
    if several and all_of_them:
        return several
    found = [function for function in own.values() if _returns_experiment(function)]
    found = found or [function for name, function in own.items() if name == "experiment"]
    if not found and several:
        return several
    if not found:
        raise ValueError(
            f"{path} has no function that returns an Experiment; write one: def experiment() -> Experiment: ..."
        )
    if len(found) > 1:
        names = ", ".join(function.__name__ for function in found)
        raise ValueError(
            f"{path} has {len(found)} functions that return an Experiment ({names}); keep one, and begin the names of "
            f"its helpers with an underscore; or return them all from {_LIST}()"
        )
    return found[0]


def _needed(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


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
    except (Exception, SystemExit) as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        lines = "".join(traceback.format_list(own))
        raise ValueError(f"{what}\n{lines}{type(error).__name__}: {in_words(error)}") from None
