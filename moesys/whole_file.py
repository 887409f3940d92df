"""Files that are written whole: whoever reads one, even after a crash, finds the old content or the new one. And files
of lines, of which a crash tears the last one at most.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens what takes the place of ``path``, on the disk, when the block ends; not where the block raises."""
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
    """Cuts off what stands behind the last newline of ``path``, if there is such a file."""
    if not path.exists() or not (size := path.stat().st_size):
        return
    with path.open("r+b") as file:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
