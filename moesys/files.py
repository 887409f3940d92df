"""How moesys writes files and folders, and reads what others wrote. Whatever it writes, except kernels' caches, goes
through this module.

- A file or folder that is replaced as a whole has its old content or its new one, on the disk, even after a crash.
- Symbolic links are followed: what they name is replaced, and the link stays. What is there and is no regular file,
  such as a device or a named pipe, is written into. A file keeps its mode, and one that is read-only is refused.
- Files of lines are appended to, each line in one write that is checked. What a crash or a full disk tore is cut off.
- A folder has one writer at a time; others are refused, with the name of the writer. What a killed writer left beside
  a file or folder is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import io
import os
import re
import secrets
import shutil
import socket
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

# Errors of folders in which no file can be made or renamed, although a file that is there may be written.
_FIXED_NAMES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
# So often a file is made anew that others remove before it is locked.
_TRIES = 100


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file whose content replaces that of ``path``, on the disk, when the block ends, unless it raises.

    Where a file cannot be made beside ``path``, or ``path`` is a mount point, the content is written into ``path``
    itself, and a crash may leave a part of it. Raises OSError for a folder, and for a file that is read-only.
    """
    mode = path.stat().st_mode if path.exists() else None
    if mode is None or stat.S_ISREG(mode):
        path = resolved(path)
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only", str(path))
    new = _new_file_beside(path, mode)
    if new is None:
        buffer = io.BytesIO()
        yield buffer
        with _errors_name(path):
            path.write_bytes(buffer.getbuffer())
        return
    beside, handle = new
    try:
        with _errors_name(path), open(handle, "w+b") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(handle, stat.S_IMODE(mode))
            os.fsync(handle)
            try:
                beside.replace(path)
            except OSError as error:
                if mode is None or error.errno not in _FIXED_NAMES:
                    raise
                path.write_bytes(beside.read_bytes())
        sync_path(path.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Adds ``path`` to errors of the system that name no file, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _new_file_beside(path: Path, mode: int | None) -> tuple[Path, int] | None:
    """Makes an empty file beside ``path``, locked, and removes those that killed writers left.

    Returns its path and handle; None if ``path`` itself is to be written, as a device is.
    """
    if mode is not None and not stat.S_ISREG(mode):
        return None
    # A new name is longer than the old one, and file systems limit names to 255 bytes.
    prefix = f".{os.fsencode(path.name)[:150].decode(errors='ignore')}."
    for left in path.parent.glob(f"{glob.escape(prefix)}*"):
        if re.fullmatch(r"\d+-[0-9a-f]{8}", left.name.removeprefix(prefix)):
            with suppress(OSError), open(os.open(left, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
                if _lock(file.fileno()):
                    left.unlink()
    for _ in range(_TRIES):
        new = path.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        except OSError as error:
            if mode is None or error.errno not in _FIXED_NAMES:
                raise
            return None
        # Another writer may have taken it for a leftover before it was locked.
        locked = _lock(handle)
        if locked is None or (locked and os.fstat(handle).st_nlink):
            return new, handle
        os.close(handle)
    raise OSError(errno.EAGAIN, "other processes remove every new file beside it", str(path))


def write_whole(path: Path, text: str) -> None:
    """Writes ``text`` in UTF-8 as the content of ``path``."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that others may have written, to read it. Raises ValueError for what would be waited for or has no
    end, such as a named pipe or a device.
    """
    # Without waiting for who writes into a pipe.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is no regular file, but a pipe, a device or the like; give another, or remove it")
        yield file


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file that others may have written. Raises as ``opened`` does."""
    with opened(path) as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises ValueError, which names the file, for what is not JSON or nested too
    deeply, and OSError for a file that cannot be read.
    """
    return json_of(read_bytes(path), str(path))


def json_of(text: str | bytes, source: str) -> Any:
    """Returns what a text in JSON says. Raises ValueError, which names ``source``, for what is not JSON or nested too
    deeply.
    """
    try:
        # This import is here because a process that only starts ranks may lack pydantic.
        import pydantic_core

        # Some texts of the command line are none in UTF-8.
        return pydantic_core.from_json(text.encode() if isinstance(text, str) else text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file. Raises ValueError, which names the file, for what is not TOML or nested too
    deeply, and OSError for a file that cannot be read.
    """
    content = read_bytes(path)
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def number_set(variable: str, default: int) -> int:
    """Returns the number to which launchers set a variable of the environment, ``default`` where it is not set.

    Raises ValueError, which names the variable, for anything else than 0 and above.
    """
    text = os.environ.get(variable, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError(f"{variable}={text[:40]!r} is no number; set a whole number of at least 0, or leave it out")
    return int(text)


def resolved(path: Path) -> Path:
    """Returns ``path`` without symbolic links. Raises OSError for links that name each other."""
    try:
        return path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, "symbolic links name each other", str(path)) from None


def sync_path(path: Path) -> None:
    """Returns when a file, or the names of a folder's files, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_line(path: Path, line: bytes, *, sync: bool = True, lock: FolderLock | None = None) -> None:
    """Appends ``line``, which ends with a newline, in one write, after it has cut off an incomplete line.

    The line is on the disk when this returns, or with ``sync=False`` with the system. Raises OSError if not all of the
    line was taken, and takes back the part that was; and ValueError if ``lock`` is no longer that of its folder.
    """
    if lock is not None:
        lock.check()
    is_new = not path.exists()
    cut_torn_line(path)
    with _errors_name(path), path.open("ab", buffering=0) as file:
        if (written := file.write(line)) != len(line):
            cut_torn_line(path)
            raise OSError(errno.ENOSPC, f"took {written} of {len(line)} bytes, the disk may be full", str(path))
        if sync:
            os.fsync(file.fileno())
    if sync and is_new:
        sync_path(path.parent)


def cut_torn_line(path: Path) -> None:
    """Cuts off what follows the last newline of ``path``, if it is a file."""
    if not path.is_file() or not (size := path.stat().st_size):
        return
    with path.open("r+b") as file:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)


class Closing:
    """A resource that the end of a ``with`` block closes."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FolderLock(Closing):
    """The right to write a folder, which one process at a time has until it calls ``close`` or ends in whatever way.

    It lies in a file, which names the process that has it. On file systems without locks, ``is_locked`` is False, and
    nobody is refused.
    """

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """Takes the lock of ``folder``, whose file is ``path``, by default ``.lock`` in it.

        Raises ValueError if another process has it.
        """
        self.folder, self._path = folder, path or folder / ".lock"
        for _ in range(_TRIES):
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            self._file = os.fdopen(handle, "r+", encoding="utf-8", errors="replace")
            locked = _lock(handle)
            if locked is False:
                holder = self._file.read(200).strip() or "another process"
                self._file.close()
                raise ValueError(
                    f"{folder} is being written by {holder}; wait until it ends, or use another name or out folder"
                )
            self.is_locked = locked is True
            # The one who had it may have removed the file before this process locked it.
            if self.is_there:
                break
            self._file.close()
        else:
            raise ValueError(f"{folder}: other processes remove {self._path}; end them, or use another folder")
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    @property
    def is_there(self) -> bool:
        """This is true if the file of the lock is where it was made: the folder may be removed, or made anew."""
        if not self.is_locked:
            return self._path.exists()
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def check(self) -> None:
        """Raises ValueError if the folder was removed, or made anew by somebody else."""
        if not self.is_there:
            raise ValueError(
                f"{self.folder} was removed or made anew while this process wrote it; start it again there, or "
                "elsewhere"
            )

    def remove(self) -> None:
        """Removes the file of the lock and gives up the lock."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Gives up the lock, which forked processes have too as long as it is not taken from the file."""
        if not self._file.closed and self.is_locked:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
        self._file.close()


def _lock(handle: int) -> bool | None:
    """Locks an open file. Returns False if another process has locked it, and None on file systems without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def whole_folder(folder: Path | str) -> Iterator[Path]:
    """Gives an empty folder that replaces ``folder``, on the disk, when the block ends on every rank:
    ``with ms.whole_folder("checkpoint") as new: dcp.save(state, checkpoint_id=new)``.

    Where the block raises on any rank, or a process dies, ``folder`` stays what it was. This is a collective if there
    is a process group, and then all ranks write to one file system. The new folder is made beside the old one, or
    beside the folder that a symbolic link names, and takes room there. A crash between the two renames at the end
    leaves the old one as ``.NAME.old``; the next call restores it. Links and pipes in the folder stay what they are.

    Raises FileNotFoundError on ranks that do not see the new folder, ValueError while another process writes the same
    folder, and RuntimeError where another rank failed.
    """
    # Imported here, because single files need no torch.
    import torch.distributed as dist

    from moesys.collectives import agreement

    first, call = not dist.is_initialized() or dist.get_rank() == 0, "whole_folder()"
    lock: FolderLock | None = None
    try:
        with agreement(call):
            folder = resolved(Path(folder).absolute())
            new, old = (folder.parent / f".{folder.name}.{kind}" for kind in ("new", "old"))
            if first:
                lock = _begin(folder, new, old)
        with agreement(call):
            if not new.is_dir():
                raise FileNotFoundError(f"{new} is there on rank 0 alone; give a folder on a file system of all ranks")
            yield new
        with agreement(call):
            if first:
                _end(folder, new, old)
    finally:
        if lock is not None:
            # Where neither folder could get its name, the new one is complete.
            if lock.folder.exists() or not old.exists():
                shutil.rmtree(new, ignore_errors=True)
            lock.remove()


def _begin(folder: Path, new: Path, old: Path) -> FolderLock:
    """Takes the lock, restores the old folder where a crash left it aside, and makes the new one."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is there; give another path, or remove it", str(folder))
    refused = "a mount point" if folder.is_mount() else ""
    # The current folder may be gone.
    with suppress(FileNotFoundError):
        refused = refused or "the current folder or one around it" * Path.cwd().is_relative_to(folder)
    if refused:
        raise ValueError(f"{folder} is {refused}, which cannot be replaced as a whole; give a folder inside it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder, folder.with_name(f".{folder.name}.lock"))
    try:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for left in (new, old):
            if left.exists():
                shutil.rmtree(left)
        new.mkdir()
    except BaseException:
        lock.remove()
        raise
    return lock


def _end(folder: Path, new: Path, old: Path) -> None:
    for path in [new, *new.rglob("*")]:
        # Links stay as they are, and pipes would be waited for.
        if stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode):
            sync_path(path)
    try:
        if folder.exists():
            new.chmod(stat.S_IMODE(folder.stat().st_mode))
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        # The second one may have failed, or Ctrl-C came between them.
        if old.exists() and not folder.exists():
            old.rename(folder)
        elif old.exists() and new.exists():
            # The next call would remove it under its present name.
            old.rename(kept := folder.with_name(f"{folder.name}.old"))
            raise FileExistsError(
                errno.EEXIST, f"somebody made this folder between two renames; what it was is {kept}", str(folder)
            ) from None
        raise
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
