"""Folders that are written whole by one process or by all ranks: whoever reads one, even after a crash, finds the old
content or the new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from moesys.collectives import agree
from moesys.whole_file import sync_folder

_CALL = "whole_folder()"


@contextmanager
def whole_folder(folder: Path | str) -> Iterator[Path]:
    """Gives an empty folder that takes the place of ``folder``, on the disk, when the block ends on every rank:
    ``with ms.whole_folder("checkpoint") as new: dcp.save(state, checkpoint_id=new)``.

    Where the block raises, on any rank, or a process dies, ``folder`` stays what it was. It is a collective where there
    is a process group, and then all ranks write to one file system. What replaces it is made beside it, and needs room
    there. A crash between the two renames of the end leaves the old one as ``.NAME.old``; the next call puts it back.

    Raises FileNotFoundError on ranks that do not see the new folder, and RuntimeError where another rank failed.
    """
    folder = Path(folder).absolute()
    new, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    first = _rank() == 0
    error: Exception | None = None
    try:
        if first:
            _begin(folder, new, old)
    except OSError as raised:
        error = raised
    agree(_CALL, error)
    try:
        try:
            if not new.is_dir():
                raise FileNotFoundError(f"{new} is there on rank 0 alone; give a folder on a file system of all ranks")
            yield new
        except Exception as raised:
            error = raised
        agree(_CALL, error)
        try:
            if first:
                _end(folder, new, old)
        except OSError as raised:
            error = raised
        agree(_CALL, error)
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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
