"""How inner loops of planners and simulators are compiled: by numba, once per installation, and kept on disk.

numba looks at the file of a function to see whether its machine code is old, but compiled functions contain those that
they call, from other files of their room as well. So a room's code is kept in a directory whose name is a digest of all
these files.

Functions of a package can run in Python instead, with the same results: ``compile_or_use_python`` decides.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial, update_wrapper
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

# A warning is shown even where nobody configured logging: a person who waits for the compiler has to know why.
_LOG = logging.getLogger("moesys")


@cache
def cache_dir(folder: Path) -> str:
    """Returns where a folder's room keeps its machine code: below NUMBA_CACHE_DIR where that is set, else beside its
    byte code, or in the user's cache. The room is the package just below the topmost one.

    Directories of older machine code, and nothing else, are removed when there is new code to keep. Empty where none of
    these can be written to.
    """
    room = _room_of(folder)
    # How functions are compiled is no part of what numba looks at either.
    digest = sha256(Path(__file__).read_bytes())
    for path in sorted(room.rglob("*.py")):
        source = path.read_bytes()
        if b"moesys.compiled import" in source:
            digest.update(source)
    for place in chain((os.environ.get("NUMBA_CACHE_DIR"), room / "__pycache__"), _user_caches()):
        if place is not None and _is_writable(Path(place)):
            found = Path(place) / f"{room.name}-{digest.hexdigest()[:16]}"
            if not found.exists():
                for older in Path(place).glob(f"{room.name}-{'[0-9a-f]' * 16}"):
                    shutil.rmtree(older, ignore_errors=True)
            return str(found)
    return ""


def _room_of(folder: Path) -> Path:
    while (folder.parent.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def _user_caches() -> Iterator[Path]:
    """Yields the folders in which this user's caches may be, best first: the last is for users without a home, and is
    made when it is asked for.
    """
    named, home = os.environ.get("XDG_CACHE_HOME"), os.path.expanduser("~")
    if named or os.path.isdir(home):
        yield Path(named or Path(home, ".cache"), "moesys")
    # There may be no folder for temporary files.
    with suppress(OSError):
        own = Path(tempfile.gettempdir(), f"moesys-{os.getuid()}")
        with suppress(FileExistsError):
            own.mkdir(mode=0o700)
        found = own.lstat()
        # Machine code in a folder that somebody else can write would be run.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            yield own / "moesys"


def _is_writable(folder: Path) -> bool:
    """Returns whether files can be written into ``folder``, or it and its parents can be made."""
    found = next((each for each in (folder, *folder.parents) if os.path.exists(each)), None)
    return found is not None and os.path.isdir(found) and os.access(found, os.W_OK | os.X_OK)


@dataclass
class _Package:
    """How this process runs the functions of a package."""

    in_python: bool = False


@cache
def _package_of(folder: Path) -> _Package:
    return _Package() if (room := _room_of(folder)) == folder else _package_of(room)


class _NotCompiledError(Exception):
    """There is no machine code on the disk for a function, or it is not to be loaded."""


# Whether a call of a function that numba compiles raises the error above.
_refuses: ContextVar[bool] = ContextVar("moesys_refuses_machine_code", default=False)


def _needs_no_code(run: Callable[[], object]) -> bool:
    """Calls ``run``; returns False, without importing numba, at the first call of a function that numba compiles."""
    token = _refuses.set(True)
    try:
        run()
    except _NotCompiledError:
        return False
    finally:
        _refuses.reset(token)
    return True


def _is_compiled(run: Callable[[], object]) -> bool:
    """Calls ``run``; returns False if it needs a function that is not compiled, and does not compile it."""
    from numba.core import event

    thread = threading.get_ident()

    class Refusal(event.Listener):
        def on_start(self, event: Any) -> None:
            if threading.get_ident() == thread:
                raise _NotCompiledError

        def on_end(self, event: Any) -> None: ...

    try:
        with event.install_listener("numba:compile", Refusal()):
            run()
    except _NotCompiledError:
        return False
    return True


def compile_or_use_python(folder: Path, run: Callable[[], object], names: str, way_out: str = "") -> None:
    """Loads the machine code of the functions of a package that ``run`` calls, or compiles them, which one process of a
    machine does while others wait for it.

    With ``way_out``, which says how to compile them, nothing is compiled: without machine code on the disk all
    functions of the package run in Python from then on. ``names``: what is compiled, for the line that says so.
    """
    package = _package_of(folder)
    # numba takes 49 MiB of memory, so it is imported only where something needs it.
    if _needs_no_code(run):
        return
    before, package.in_python = package.in_python, False
    if _is_compiled(run):
        return
    if way_out:
        package.in_python = True
        # This imports what planning needs before anybody waits for a plan.
        run()
        # Only the first rank of a machine logs the line.
        if not before and os.environ.get("LOCAL_RANK", "0") == "0":
            _LOG.warning("moesys plans in Python, because %s are not compiled on this machine; %s", names, way_out)
        return
    kept = cache_dir(folder)
    with _one_process(Path(f"{kept}.lock")) if kept else nullcontext():
        if not _is_compiled(run):
            _LOG.warning(
                "moesys compiles %s, which takes up to two minutes, %s",
                names,
                f"once per installation, and keeps them in {kept}"
                if kept
                else "in every process, because it can write to no folder; set NUMBA_CACHE_DIR to one",
            )
            run()


@contextmanager
def _one_process(path: Path) -> Iterator[None]:
    """Lets one process at a time run the block, if the file system has locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _LazyFunction:
    """A function that numba compiles when it is first called, so that importing a planner does not import numba."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._folder = Path(function.__code__.co_filename).parent
        self._package = _package_of(self._folder)
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        if _refuses.get():
            raise _NotCompiledError
        if self._package.in_python:
            # Machine code wraps around without a warning.
            with np.errstate(over="ignore"):
                return self._function(*arguments)
        return self.dispatcher(*arguments)

    @cached_property
    def dispatcher(self) -> Any:
        """The function as numba has compiled it, which compiled functions can call."""
        from numba import config, njit

        # numba knows a compiled function that this one calls by its dispatcher only; in Python they call each other.
        names = dict(self._function.__globals__)
        for name in self._function.__code__.co_names:
            if isinstance(called := names.get(name), _LazyFunction):
                names[name] = called.dispatcher
        function = update_wrapper(FunctionType(self._function.__code__, names), self._function)
        settings = vars(config)
        before = settings["CACHE_DIR"]
        settings["CACHE_DIR"] = cache_dir(self._folder) or before
        try:
            return njit(cache=True, nogil=True, **self._options)(function)
        except RuntimeError:
            # There is no place to keep it, so every process compiles it.
            return njit(nogil=True, **self._options)(function)
        finally:
            settings["CACHE_DIR"] = before


def _kept(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    return partial(_LazyFunction, options=options)


compiled = _kept()

# For loops that allocate no array: references to the arrays that they are given are not counted, which took half of
# the time of a split. Such a function must not return one of them.
borrowing = _kept(_nrt=False)

# For small functions in inner loops, which become a part of the functions that call them.
inlined = _kept(inline="always")
