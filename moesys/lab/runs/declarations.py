"""Reads declarations, from files and from the command line: experiments, strategies, clusters and planners.

An experiment is in a Python file with a function that returns an ``Experiment``, in JSON, or in TOML.

A Python file may also have ``experiments()``, which returns a list: those are run, one after another, and
``experiment()`` is the one that is meant where only one can be, as in ``moesys explain``.

What is read here is frozen: a file that is edited while its experiment runs changes nothing.

Reading a file imports no module that it names. ``import_module_of_user`` imports those that the command line names, by
``--import`` or as a planner.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from moesys.config import Balance, ClusterSpec, Declaration, Predictor, Split, Strategy, presets
from moesys.config.base import in_words
from moesys.config.experiment import Experiment
from moesys.config.member import RECORDED, found_in, running_module
from moesys.files import json_of, read_bytes, read_json, read_toml
from moesys.kinds import did_you_mean

# The name of the module of a file whose own name is that of another module.
_MODULE = "moesys_experiment_file"
_LIST = "experiments"
_PRESETS = {name: getattr(presets, name) for name in ("a100", "h800", "h100", "h200", "b200", "gb200", "gb300")}
T = TypeVar("T")


D = TypeVar("D", bound=BaseModel)


def load_experiments(path: Path, settings: Sequence[str] = ()) -> tuple[Experiment, ...]:
    """Returns all experiments of a ``.py``, ``.json`` or ``.toml`` file, which have different names: those of its
    ``experiments()``, or its only one.

    Raises ValueError, in words for the file's author, where there is none, or where the file fails: then with those
    lines of the traceback that are the author's own.
    """
    return changed(_loaded(path, all_of_them=True), settings)


def load_experiment(path: Path, settings: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a file: that of its only function for one, else the first of its ``experiments()``.

    Raises ValueError as ``load_experiments`` does.
    """
    experiment, *others = changed(_loaded(path, all_of_them=False)[:1], settings)
    if others:
        raise ValueError(
            f"--set {' '.join(settings)} makes {1 + len(others)} experiments; give one value of each field here"
        )
    return experiment


def changed(experiments: Sequence[Experiment], settings: Sequence[str]) -> tuple[Experiment, ...]:
    """Returns the experiments with fields changed by settings such as ``strategies.fsep.overlap.chunks=2,4``.

    A member of a list is named by its place or its name. Several values make an experiment for each, which is named
    after the value; a field that is a list, such as ``seeds=0,1,2``, takes all of them. Raises ValueError for a setting
    that cannot be.
    """
    found = tuple(experiments)
    for text in settings:
        path, equals, words = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text} gives no value; write it as in strategies.1.overlap.chunks=2,4")
        try:
            found = tuple(variant for one in found for variant in _variants(one, path, _values(words)))
        except ValueError as error:
            raise ValueError(f"--set {text}: {in_words(error)}") from None
    return found


def _values(words: str) -> list[Any]:
    """Reads one value or several, as JSON or as words."""

    def read(word: str) -> Any:
        try:
            return json_of(word, word)
        except ValueError:
            return word

    whole = read(words)
    if isinstance(whole, list):
        return whole
    return [whole] if whole != words else [read(word) for word in words.split(",")]


def _variants(experiment: Experiment, path: str, values: Sequence[Any]) -> Iterator[Experiment]:
    names = path.split(".")
    for value, variant in _replaced(experiment, names, values):
        if path not in ("name", "seeds"):
            suffix = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{names[-1]}-{value}")
            variant = variant.replace(name=f"{experiment.name}-{suffix}")
        yield variant


def _replaced(declared: Any, names: Sequence[str], values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields each value with a copy of ``declared`` that has it."""
    name, *rest = names
    if isinstance(declared, tuple):
        places = {str(place): place for place in range(len(declared))}
        places |= {one.name: place for place, one in enumerate(declared) if hasattr(one, "name")}
        known: Collection[str] = places
    else:
        known = type(declared).model_fields if isinstance(declared, Declaration) else ()
    if name not in known:
        what = f"use one of {', '.join(known)}{did_you_mean(name, known)}" if known else "end the path before it"
        where = "the list" if isinstance(declared, tuple) else type(declared).__name__
        raise ValueError(f"{name!r} is not in {where}; {what}")
    inner = declared[places[name]] if isinstance(declared, tuple) else getattr(declared, name)
    if rest:
        found = _replaced(inner, rest, values)
    else:
        found = iter([(values, tuple(values))] if isinstance(inner, tuple) else [(value, value) for value in values])
    for value, new in found:
        if isinstance(declared, tuple):
            yield value, (*declared[: places[name]], new, *declared[places[name] + 1 :])
        else:
            yield value, declared.replace(**{name: new})


def _loaded(path: Path, all_of_them: bool) -> tuple[Experiment, ...]:
    if path.suffix not in (".py", ".json", ".toml"):
        there = f", as {found}" if (found := next(path.glob("experiment.*"), None)) else ""
        raise ValueError(f"{path} is no experiment file; give a .py, .json or .toml file{there}")
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file; give the path of an experiment file, such as experiments/skew_sweep.py"
        )
    if path.suffix == ".py":
        return _from_python(path, all_of_them)
    return (declared_in(path, Experiment),)


def declared_in(path: Path, kind: type[D]) -> D:
    """Reads what a .json or .toml file declares. Planners of the user's own that it names have been imported before.

    Raises ValueError, which names the file, and OSError for one that cannot be read.
    """
    name = kind.__name__
    if path.suffix not in (".json", ".toml") or not path.is_file():
        raise ValueError(f"{name.lower()}={str(path)!r} is no .json or .toml file; give one that declares a {name}")
    fields = _fields_in(path)
    try:
        return kind.model_validate(fields)
    except ValueError as error:
        raise ValueError(f"{path} declares no {name.lower()}: {error}") from None


def _fields_in(path: Path) -> Any:
    return read_json(path) if path.suffix == ".json" else read_toml(path)


def recorded_experiment(path: Path) -> Experiment:
    """Reads the experiment that a run has written. It imports nothing that the experiment names.

    Raises ValueError, which names the file.
    """
    try:
        return Experiment.model_validate_json(read_bytes(path), context=RECORDED)
    except ValueError as error:
        raise ValueError(f"{path} declares no experiment: {error}") from None


def _from_python(path: Path, all_of_them: bool) -> tuple[Experiment, ...]:
    with ExitStack() as running:
        with _own_lines(path, f"{path} cannot be run"):
            of_file = running_module(_module_name(path), str(path), read_bytes(path), path.resolve().parent)
            module = running.enter_context(of_file)
        function = _function(module, path, all_of_them)
        called = f"{path}: {function.__name__}()"
        if needed := _needed(function):
            raise ValueError(f"{called} needs {', '.join(needed)}; it is called without arguments, so give defaults")
        with _own_lines(path, f"{called} failed"):
            returned = function()
    if function.__name__ == _LIST:
        return _several(returned, called)
    if not isinstance(returned, Experiment):
        raise ValueError(f"{called} returned {type(returned).__name__}; let it return an Experiment")
    return (returned,)


def _module_name(path: Path) -> str:
    """Returns the name by which others import the file, so that its classes have it, unless it would hide a module."""
    if "." in path.stem:
        return _MODULE
    try:
        taken = find_spec(path.stem)
    except ValueError:
        return _MODULE
    return path.stem if taken is None or taken.origin in (None, str(path.resolve())) else _MODULE


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
    """Returns ``experiments`` if all are asked for; else the function that is annotated to return an Experiment, or the
    function ``experiment``.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
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
    """Returns the names of the parameters without a default."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _returns_experiment(function: Callable[..., Any]) -> bool:
    annotation = function.__annotations__.get("return")
    # The annotation is a string if the file postpones annotations: Experiment or ms.Experiment.
    return annotation is Experiment or str(annotation).rpartition(".")[2] == Experiment.__name__


@contextmanager
def _own_lines(path: Path, what: str) -> Iterator[None]:
    """Turns whatever the file raises into a ValueError with the file's own lines of the traceback."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}\n{_reason_in(str(path), error)}") from None


def _reason_in(path: str, error: BaseException) -> str:
    """Returns the message of what a file raised, below the file's own lines of the traceback."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).rstrip()
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return "".join(traceback.format_list(own)) + f"{type(error).__name__}: {error}"


# --- the command line -------------------------------------------------------------------------------------------------


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
        raise ValueError(
            f"strategy={name!r} is not in {experiment.name}; choose one of {', '.join(map(repr, named))}"
            f"{way_out}{did_you_mean(name, named)}"
        )
    return named[name]


def cluster_of(text: str, declared: ClusterSpec | None = None) -> ClusterSpec:
    """Reads ``4x8``, 4 nodes of 8 ranks with the speeds of ``declared``, by default those of ``ClusterSpec``; ``h100``
    and ``h100:4``, one node and 4 nodes of a preset; or a ``ClusterSpec`` in a file.

    Raises ValueError for others.
    """
    path = Path(text)
    try:
        if shorthand := re.fullmatch(r"(\d+)x(\d+)", text):
            shape = dict(zip(("num_nodes", "ranks_per_node"), map(int, shorthand.groups()), strict=True))
            return (declared or ClusterSpec()).replace(**shape, ranks_per_domain=None, name="")
        if preset := re.fullmatch(rf"({'|'.join(_PRESETS)})(?::(\d+))?", text):
            return _PRESETS[preset[1]](int(preset[2] or 1))
        if path.suffix not in (".json", ".toml") or not path.is_file():
            raise ValueError(
                "no .json or .toml file; give one, or nodes and ranks a node as in 4x8, or nodes of a preset as in "
                f"h100:4 ({', '.join(_PRESETS)}){did_you_mean(text.partition(':')[0], _PRESETS)}"
            )
        return ClusterSpec.model_validate(_fields_in(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"cluster={text!r}: {error}") from None


def import_module_of_user(name: str) -> str:
    """Imports the module that the command line names, and returns its name: ``my_planners``, from the current folder or
    where Python finds modules, or the file ``folder/my_planners.py``.

    Raises ValueError for what cannot be imported, and for a file whose name is that of another imported module.
    """
    file = Path(name) if name.endswith(".py") else None
    if file and not file.is_file():
        raise ValueError(f"{name} is not a file; give the file or the module that defines the planners")
    module_name = file.stem if file else name
    with found_in(*([str(file.resolve().parent)] if file else []), ""):
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{name} cannot be imported: {type(error).__name__}: {error}; modules are looked for in the current "
                "folder and where PYTHONPATH says, so add the folder there, or give the file, as in "
                "folder/my_planners.py"
            ) from None
        except (Exception, SystemExit) as error:
            spec = find_spec(module_name)
            raise ValueError(f"{name} cannot be imported\n{_reason_in(str(spec and spec.origin), error)}") from None
    source = getattr(module, "__file__", None)
    if file and not (source and Path(source).read_bytes() == read_bytes(file)):
        raise ValueError(
            f"{name}: {module_name} was imported from {source} already; give one of the files another name"
        )
    return module_name


def import_modules_of_user(names: Iterable[str]) -> None:
    """Imports the modules of --import. Raises ValueError as ``import_module_of_user`` does."""
    for name in names:
        import_module_of_user(name)


def own_kind(kind: str) -> str:
    """Returns the ``kind`` of a class of the user's own, whose module is imported now, and others as they are. Raises
    ValueError as ``import_module_of_user`` does.
    """
    module, _, name = kind.partition(":")
    return f"{import_module_of_user(module)}:{name}" if name else kind


def _member(text: str, field: str, union: TypeAdapter[T]) -> T:
    fields: Any = json_of(text, f"{field}={text!r}") if text.lstrip().startswith("{") else {"kind": text}
    try:
        if isinstance(kind := fields.get("kind"), str):
            fields["kind"] = own_kind(kind)
        return union.validate_python(fields)
    except ValueError as error:
        raise ValueError(f"{field}={text!r}: {in_words(error)}") from None
