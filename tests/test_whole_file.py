"""Files that are written whole: the new content or the old one, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesys.whole_file import whole_file, write_whole


def test_text_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    write_whole(path, "old\n")
    write_whole(path, "nöw\n")
    assert path.read_bytes() == "nöw\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def half_written(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
        raise RuntimeError("half of it")


def test_the_old_content_stays_until_the_block_ends_and_where_it_raises(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half"):
        half_written(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
