"""Files that are written whole: the new content or the old one, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesys.files import cut_torn_line, whole_file, write_whole


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


@pytest.mark.parametrize(
    ("there", "left"),
    [(b"", b""), (b"one\n", b"one\n"), (b"one\ntwo\nthr", b"one\ntwo\n"), (b"torn", b""), (b"one\n\n", b"one\n\n")],
)
def test_what_a_crash_tore_is_cut_off(tmp_path: Path, there: bytes, left: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(there)
    cut_torn_line(path)
    assert path.read_bytes() == left


def test_no_file_has_no_torn_line(tmp_path: Path) -> None:
    cut_torn_line(tmp_path / "lines.jsonl")
    assert list(tmp_path.iterdir()) == []
