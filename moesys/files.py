"""Files and folders that are replaced as a whole: a reader finds the old content or the new one, even after a crash.

Files of lines are appended to instead; a crash leaves at most their last line incomplete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that replaces ``path``, on the disk, when the block ends, unless it raises."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        sync_folder(path.parent)
    finally:
        new.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes ``text`` in UTF-8 as the content of ``path``."""
    with whole_file(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Returns when the names of a folder's files are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cut_torn_line(path: Path) -> None:
    """Cuts off what follows the last newline of ``path``, if that file exists."""
    if not path.exists() or not (size := path.stat().st_size):
        return
    with path.open("r+b") as file:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)


@contextmanager
def whole_folder(folder: Path | str) -> Iterator[Path]:
    """Gives an empty folder that replaces ``folder``, on the disk, when the block ends on every rank:
    ``with ms.whole_folder("checkpoint") as new: dcp.save(state, checkpoint_id=new)``.

    Where the block raises on any rank, or a process dies, ``folder`` stays what it was. This is a collective if there
    is a process group, and then all ranks write to one file system. The new folder is made beside the old one, which
    takes room there. A crash between the two renames at the end leaves the old one as ``.NAME.old``; the next call
    restores it.

    Raises FileNotFoundError on ranks that do not see the new folder, and RuntimeError where another rank failed.
    """
    # Imported here, because single files need no torch.
    import torch.distributed as dist

    from moesys.collectives import agreement

    folder = Path(folder).absolute()
    new, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    first, call = not dist.is_initialized() or dist.get_rank() == 0, "whole_folder()"
    with agreement(call):
        if first:
            _begin(folder, new, old)
    try:
        with agreement(call):
            if not new.is_dir():
                raise FileNotFoundError(f"{new} is there on rank 0 alone; give a folder on a file system of all ranks")
            yield new
        with agreement(call):
            if first:
                _end(folder, new, old)
    finally:
        if first:
            shutil.rmtree(new, ignore_errors=True)


def _begin(folder: Path, new: Path, old: Path) -> None:
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)
    new.mkdir(parents=True)


def _end(folder: Path, new: Path, old: Path) -> None:
    for path in [new, *new.rglob("*")]:
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
