"""OwnCode: where a person's class comes from, and what of its file it is made of.

A class is named by its import path, ``my_planners:RoundRobin``. What it is made of is text, so that a changed class can
be told from the one that was, and so that other processes make the very class of this one.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import SourceLoader
from importlib.util import decode_source, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Self

_SCRIPTS = ("__main__", "__mp_main__")


@dataclass(frozen=True)
class OwnCode:
    """A class of a person's own: the name and the file of its module, the text of that when the class was made, and the
    class's name there. Path and text are empty where there is no file to find the class in.
    """

    module: str
    path: str
    text: str
    name: str
    extended: tuple[OwnCode, ...] = ()

    @classmethod
    def of(cls, owner: type, extended: tuple[OwnCode, ...] = ()) -> Self:
        module = sys.modules.get(owner.__module__)
        path = getattr(module, "__file__", None)
        if module is None or path is None or "<locals>" in owner.__qualname__:
            return cls(owner.__module__, "", "", owner.__qualname__, extended)
        loader = module.__loader__
        data = loader.data if isinstance(loader, _TextLoader) else Path(path).read_bytes()
        return cls(_name_of(module), path, decode_source(data), owner.__qualname__, extended)

    @property
    def import_path(self) -> str:
        return f"{self.module}:{self.name}"

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the class and what it names of its file, functions and constants, and over what it
        extends. Other files and the rest of this one do not count.

        Raises ValueError for a class of no file or of a function, which no other process can find.
        """
        if not self.path:
            where = "inside a function" if "<locals>" in self.name else "in no file"
            raise ValueError(
                f"{self.import_path} is defined {where}, where neither records nor other processes find it; define it "
                "at the top level of a .py file"
            )
        made_of = [used_lines(self.text, self.name.partition(".")[0]), *(code.digest for code in self.extended)]
        return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]

    def is_that_of(self, other: OwnCode) -> bool:
        """Whether both are one class under one name."""
        if self.import_path != other.import_path or not (self.path and other.path):
            return self is other
        return self.digest == other.digest

    def load(self) -> type:
        """Makes the class from the text, in a module that nobody else sees."""
        module = module_of_text(self.module, self.path, self.text.encode())
        root = Path(self.path).resolve().parents[self.module.count(".") + (Path(self.path).stem == "__init__")]
        with importable(module, root):
            run_module(module)
        found: Any = module
        for name in self.name.split("."):
            found = getattr(found, name)
        loaded: type = found
        return loaded


def _name_of(module: ModuleType) -> str:
    """As others import it: a script is ``__main__`` only where it is run."""
    if module.__name__ not in _SCRIPTS:
        return module.__name__
    return module.__spec__.name if module.__spec__ is not None else Path(str(module.__file__)).stem


# --- modules from text ------------------------------------------------------------------------------------------


class _TextLoader(SourceLoader):
    """Loads a module from text that was read before, whatever its file says by now."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str | bytes) -> bytes:
        return self.data


def module_of_text(name: str, path: str, data: bytes) -> ModuleType:
    """Returns a module that has not run yet; ``run_module`` runs it."""
    spec = spec_from_loader(name, _TextLoader(path, data))
    assert spec is not None
    return module_from_spec(spec)


def run_module(module: ModuleType) -> None:
    """Raises what its text raises, SyntaxError too."""
    loader = module.__loader__
    assert isinstance(loader, _TextLoader)
    exec(compile(loader.data, loader.path, "exec", dont_inherit=True), vars(module))


@contextmanager
def importable(module: ModuleType, folder: Path) -> Iterator[None]:
    """Lets the module import what lies in ``folder``, and its classes find their module, while it runs."""
    before = sys.modules.get(module.__name__)
    sys.path.insert(0, str(folder))
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before


# --- what a class is made of ------------------------------------------------------------------------------------


def used_lines(text: str, name: str) -> str:
    """The lines of ``text`` that define ``name`` at its top level, and of those that define what they name in turn."""
    statements, lines = ast.parse(text).body, text.splitlines()
    defining: dict[str, list[int]] = {}
    for index, statement in enumerate(statements):
        for bound in _bound(statement):
            defining.setdefault(bound, []).append(index)
    used: set[int] = set()
    names = [name]
    while names:
        for index in set(defining.get(names.pop(), ())) - used:
            used.add(index)
            names += [node.id for node in ast.walk(statements[index]) if isinstance(node, ast.Name)]
    return "\n".join(line for index in sorted(used) for line in _lines_of(statements[index], lines))


def _lines_of(statement: ast.stmt, lines: list[str]) -> list[str]:
    # a decorator stands before the line that a function or a class says it begins on
    first = min([statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", ()))])
    return lines[first - 1 : statement.end_lineno]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement gives a meaning. Those inside a function or a class are its own."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name.partition(".")[0]
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
