"""How inner loops of planners and simulators are compiled: by numba, once per installation, and kept on disk.

Compiled functions contain those that they call, from other files of their package as well. So the machine code of a
package is kept in a folder whose name is a digest of all these files. It is read wherever it is found, and written to
the first place that can be written; an error there never ends a command, because the function is only compiled again.

Whoever can write machine code can run code as this user, and the files are pickles. So a folder of code is used only
if it belongs to this user, to root or to the owner of moesys' source, who could change what runs anyway, and if its
mode lets nobody else write. In a folder that all users can write, such as a NUMBA_CACHE_DIR of mode 1777, the code of
one user is therefore not loaded by another one, except that of root and of that owner.

Functions of a package can run in Python instead, with the same results: ``compile_or_use_python`` decides.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial, update_wrapper
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

# A warning is shown even where nobody configured logging: a person who waits for the compiler has to know why.
_LOG = logging.getLogger("moesys")
_MONTH_S = 30 * 24 * 60 * 60


@cache
def code_folders(folder: Path) -> tuple[Path, ...]:
    """Returns the folders in which the machine code of the package of ``folder`` can be, best first: below
    NUMBA_CACHE_DIR where that is set, beside the byte code, in the user's cache, and with the temporary files for users
    without a home. The package is the one just below the topmost one.
    """
    room, home = _room_of(folder), os.path.expanduser("~")
    # How functions are compiled decides about their code too.
    digest = sha256(Path(__file__).read_bytes())
    for path in sorted(room.rglob("*.py")):
        source = path.read_bytes()
        if b"moesys.compiled import" in source:
            digest.update(source)
    caches = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if os.path.isdir(home) else "")
    temporary = Path(os.environ.get("TMPDIR") or "/tmp", f"moesys-{os.getuid()}")
    places = os.environ.get("NUMBA_CACHE_DIR"), room / "__pycache__", caches and Path(caches, "moesys"), temporary
    found = [Path(place, f"{room.name}-{digest.hexdigest()[:16]}").absolute() for place in places if place]
    for each in found:
        # Code that is in use is not old.
        with suppress(OSError):
            os.utime(each, follow_symlinks=False)
    return tuple(found)


def _room_of(folder: Path) -> Path:
    while (folder.parent.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def cache_dir(folder: Path) -> Path:
    """Returns the first of the folders of code that this process can write, and the lock in it, which it makes both.

    Raises OSError if there is none.
    """
    for place in code_folders(folder):
        with suppress(OSError), _opened(place, make=True), (place / "lock").open("a"):
            return place
    raise OSError(errno.EROFS, "there is no folder for machine code")


@contextmanager
def _opened(folder: Path, make: bool = False) -> Iterator[Callable[[str, int], int]]:
    """Opens a folder of code, and yields an opener of the files in it; the folder cannot be exchanged in between.

    Raises OSError where it cannot be opened, and where somebody else could write into it. A folder that is made takes
    the place of those of other versions that nobody has used for a month.
    """
    if make and not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(0o755)
        for other in folder.parent.glob(folder.name[:-16] + 16 * "[0-9a-f]"):
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > _MONTH_S:
                    shutil.rmtree(other)
    descriptor = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_mode & 0o022 or found.st_uid not in (os.getuid(), 0, os.stat(__file__).st_uid):
            raise PermissionError(errno.EACCES, "another user could write there", str(folder))
        # Whatever the umask is, other users may read the files and not write them.
        yield partial(os.open, mode=0o644, dir_fd=descriptor)
    finally:
        os.close(descriptor)


@dataclass
class _Package:
    """How this process runs the functions of a package."""

    in_python: bool = False


@cache
def _package_of(folder: Path) -> _Package:
    return _Package() if (room := _room_of(folder)) == folder else _package_of(room)


class _NotCompiledError(Exception):
    """There is no machine code on the disk for a function, or it is not to be loaded."""


# Whether functions that numba compiles raise the error above: when they are called, or when they would be compiled.
_refused: ContextVar[str] = ContextVar("moesys_refused", default="nothing")


def _runs_without(refused: str, run: Callable[[], object]) -> bool:
    """Calls ``run``; returns False as soon as that needs "machine code", without importing numba, or "compiling"."""
    token = _refused.set(refused)
    try:
        run()
    except _NotCompiledError:
        return False
    finally:
        _refused.reset(token)
    return True


@cache
def _subjects_of_lines() -> set[str]:
    return set()


def _say_once(subject: str, line: str) -> None:
    """Logs a line, once per process about a subject, and on the first of several ranks only."""
    torch = sys.modules.get("torch.distributed")
    is_first = not (torch and torch.is_available() and torch.is_initialized() and torch.get_rank())
    is_first &= all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    if is_first and subject not in _subjects_of_lines():
        _subjects_of_lines().add(subject)
        _LOG.warning(line)


def compile_or_use_python(folder: Path, run: Callable[[], object], way_out: str = "") -> None:
    """Loads the machine code of the functions of a package that ``run`` calls, or compiles them, which one process of a
    machine does while others wait for it.

    With ``way_out``, which says how to compile them, nothing is compiled: without machine code on the disk all
    functions of the package run in Python from then on.
    """
    package = _package_of(folder)
    # numba takes 49 MiB of memory, so it is imported only where something needs it.
    if _runs_without("machine code", run):
        return
    package.in_python = False
    if _runs_without("compiling", run):
        return
    if way_out:
        package.in_python = True
        # This imports what planning needs before anybody waits for a plan.
        run()
        _say_once("Python", f"moesys plans in Python, with equal results: its loops are not compiled yet; {way_out}")
        return
    with ExitStack() as stack:
        # Not every file system has locks.
        with suppress(OSError):
            fcntl.flock(stack.enter_context((cache_dir(folder) / "lock").open("a")), fcntl.LOCK_EX)
        run()


class _KeptCode:
    """The machine code of a function on the disk, with the methods that numba calls of its own cache. That one finds
    code only where it can write, and only under the path that the source had when it was compiled.
    """

    cache_path = None

    def __init__(self, code: CodeType, is_announced: bool) -> None:
        self._code, self._folder, self._is_announced = code, Path(code.co_filename).parent, is_announced

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Returns the code for the types of arguments. Returns None, and says so, where it is to be compiled."""
        from numba.core.compiler import CompileResult

        target.refresh()
        name = self._file(signature, target.codegen())
        for place in code_folders(self._folder):
            # A crash of the machine may have torn a file, which is then written anew.
            with suppress(Exception), _opened(place) as opener, open(name, "rb", opener=opener) as file:
                return CompileResult._rebuild(target, *pickle.load(file))
        if _refused.get() == "compiling":
            raise _NotCompiledError
        if self._is_announced:
            _say_once("compiling", "moesys compiles its loops, which takes about two minutes, once per installation")
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Writes the code to the first folder that takes it; says why none does."""
        from numba.core.serialize import dumps

        code, name, faults = dumps(result._reduce()), self._file(signature, result.codegen), []
        for place in code_folders(self._folder):
            new = place / f"{name}.{secrets.token_hex(4)}"
            try:
                with _opened(place, make=True) as opener:
                    try:
                        with open(new.name, "xb", opener=opener) as file:
                            file.write(code)
                        new.replace(place / name)
                        return
                    finally:
                        new.unlink(missing_ok=True)
            except OSError as error:
                faults.append(f"{place.parent} ({error.strerror})")
        _say_once(
            "keeping",
            f"moesys cannot keep compiled loops in {' or '.join(faults)}, so every process compiles them again; make "
            "room there, or set NUMBA_CACHE_DIR to a folder that only you can write",
        )

    def _file(self, signature: Any, codegen: Any) -> str:
        """Returns the name of the file of the code for the types of arguments, this processor and these versions."""
        import numba

        path = Path(self._code.co_filename).relative_to(_room_of(self._folder)), self._code.co_firstlineno
        versions = code_folders(self._folder)[0].name, numba.__version__, sys.implementation.cache_tag, sys.abiflags
        key = repr((*path, self._code.co_qualname, signature, codegen.magic_tuple(), versions))
        return f"{self._code.co_name}-{sha256(key.encode()).hexdigest()[:16]}.nbc"


class _LazyFunction:
    """A function that numba compiles when it is first called, so that importing a planner does not import numba."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], is_announced: bool) -> None:
        self._function, self._options, self._is_announced = function, options, is_announced
        self._package = _package_of(Path(function.__code__.co_filename).parent)
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        if _refused.get() == "machine code":
            raise _NotCompiledError
        if self._package.in_python:
            # Machine code wraps around without a warning.
            with np.errstate(over="ignore"):
                return self._function(*arguments)
        return self.dispatcher(*arguments)

    @cached_property
    def dispatcher(self) -> Any:
        """The function as numba has compiled it, which compiled functions can call."""
        from numba import njit

        # numba knows a compiled function that this one calls by its dispatcher only; in Python they call each other.
        names = dict(self._function.__globals__)
        for name in self._function.__code__.co_names:
            if isinstance(called := names.get(name), _LazyFunction):
                names[name] = called.dispatcher
        function = update_wrapper(FunctionType(self._function.__code__, names), self._function)
        dispatcher = njit(nogil=True, **self._options)(function)
        dispatcher._cache = _KeptCode(self._function.__code__, self._is_announced)
        return dispatcher


def _kept(is_announced: bool = True, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    return partial(_LazyFunction, options=options, is_announced=is_announced)


compiled = _kept()

# For loops that allocate no array: references to the arrays that they are given are not counted, which took half of
# the time of a split. Such a function must not return one of them.
borrowing = _kept(_nrt=False)

# The same for functions that are compiled in a moment, so that no line says it.
briefly_borrowing = _kept(is_announced=False, _nrt=False)

# For small functions in inner loops, which become a part of the functions that call them.
inlined = _kept(inline="always")
