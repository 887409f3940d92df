"""Files that are written whole: the new content or the old one, and nothing beside it."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import moesys as ms
from moesys.files import FolderLock, cut_torn_line, read_bytes, read_json, read_toml, whole_file, write_whole
from moesys.kernels.experts.tile_tuner import read_blocks
from moesys.lab.commands.plan_load import read_layout
from moesys.lab.runs.environment import load_environments
from moesys.lab.show.run_page import write_index
from moesys.lab.train.text import load_files
from moesys.step_lines import step_journal
from moesys.tuner.costs import TuneJournal


@pytest.mark.parametrize("name", ["page.md", "n" * 255, "ü" * 127])
def test_text_takes_the_place_of_what_was_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for text in ("old\n", "nöw\n"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode()
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
    cut_torn_line(path)
    assert not path.exists()
    path.write_bytes(there)
    cut_torn_line(path)
    assert path.read_bytes() == left


def test_the_target_of_links_is_replaced_and_the_links_stay(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    target, link, far = tmp_path / "other" / "page.md", tmp_path / "link.md", tmp_path / "far.md"
    link.symlink_to("other/page.md")
    far.symlink_to(link)
    for path, text in ((link, "one"), (far, "two")):
        write_whole(path, text)
        assert (target.read_text(), link.is_symlink(), far.is_symlink()) == (text, True, True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["far.md", "link.md", "other", "page.md"]
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links name each other"):
        write_whole(tmp_path / "a", "text")


@pytest.mark.parametrize("mode", [None, 0o600, 0o640, 0o755])
def test_the_mode_of_the_old_file_is_kept_from_the_beginning_or_is_that_of_new_files(tmp_path, mode) -> None:
    path, plain = tmp_path / "page.md", tmp_path / "plain"
    plain.write_text("")
    if mode is not None:
        path.write_text("old")
        path.chmod(mode)
        plain.chmod(mode)
    with whole_file(path) as file:
        assert mode is None or not os.fstat(file.fileno()).st_mode & ~plain.stat().st_mode & 0o777
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_named_pipe_is_written_into(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "text")
    reader.join(20.0)
    assert read == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_device_is_written_into() -> None:
    script = "from pathlib import Path; from moesys.files import write_whole\n"
    script += "for name in ('stdout', 'null'): write_whole(Path('/dev', name), 'text')"
    before = os.stat("/dev/null").st_rdev
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "text"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert os.stat("/dev/null").st_rdev == before


READERS: dict[str, Callable[[Path], object]] = {
    "file": read_bytes,
    "json": read_json,
    "toml": read_toml,
    "journal": lambda path: list(step_journal(path).read()),
    "last line": lambda path: step_journal(path).last(),
    "trace": ms.traces.load_trace,
    "router_trace_rank0.jsonl": lambda path: ms.traces.megatron_trace(path.parent, 4),
    "environment-1.json": lambda path: load_environments(path.parent),
    "index.html": lambda path: write_index(path.parent),
    "tune.jsonl": lambda path: TuneJournal(path, {}),
    "config.json": lambda path: ms.models.ModelSpec.from_config(path.parent),
    "plan.json": read_layout,
    "blocks.json": read_blocks,
    "text": lambda path: load_files([str(path)], "bytes", 256),
    "tokens.bin": lambda path: load_files([str(path)], "bytes", 256),
    "tokenizer.json": lambda path: load_files([], str(path), 256),
}


# A pipe would be waited for, and the device has no end.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is no regular file"):
        READERS[name](path)


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from moesys.files import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    path, user_s = tmp_path / "page.md", tmp_path / ".page.md.bak"
    user_s.write_text("")
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 3
    with whole_file(path) as other:
        other.write(b"other")
        assert len(list(tmp_path.iterdir())) == 3
        write_whole(path, "new")
        assert path.read_text() == "new"
    assert path.read_text() == "other"
    assert sorted(tmp_path.iterdir()) == sorted([path, user_s])


# A limit on the size of files stands in for a full disk: it also takes a part of a line.
FULL_DISK = r"""
import resource, signal, sys
from pathlib import Path
from moesys.files import append_line, write_whole
lines, page = Path(sys.argv[1], "lines"), Path(sys.argv[1], "page")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
page.write_text("old")
append_line(lines, b"first\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
for write in (lambda: append_line(lines, b"second\n"), lambda: write_whole(page, "x" * 11)):
    try:
        write()
    except OSError as error:
        print(Path(error.filename).name)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
append_line(lines, b"third\n", sync=False)
"""


def test_a_full_disk_takes_whole_lines_and_files_or_none(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "lines\npage\n"
    assert (tmp_path / "lines").read_text() == "first\nthird\n"
    assert (tmp_path / "page").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_has_one_writer_who_is_named(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, tmp_path / ".lock")
    with pytest.raises(ValueError, match=rf"{tmp_path} is being written by process {os.getpid()} on .*; wait until"):
        FolderLock(tmp_path, tmp_path / ".lock")
    first.close()
    with FolderLock(tmp_path, tmp_path / ".lock") as second:
        assert second.is_there
        (tmp_path / ".lock").unlink()
        with FolderLock(tmp_path, tmp_path / ".lock") as third:
            assert (second.is_there, third.is_there) == (False, True)


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """A link that somebody else made would let them empty any file of this user."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(OSError, match="lock"):
        FolderLock(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_lock_that_is_given_up_is_free_while_forked_processes_have_its_file(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock._file.fileno()])
    try:
        with pytest.raises(ValueError, match="is being written by"):
            FolderLock(tmp_path)
        lock.close()
        FolderLock(tmp_path).close()
    finally:
        child.kill()
        child.wait()


def test_where_there_are_no_locks_nobody_is_refused_and_nothing_is_removed(tmp_path, monkeypatch):
    def without_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    path = tmp_path / "page.md"
    with FolderLock(tmp_path) as first, FolderLock(tmp_path) as second, whole_file(path) as other:
        other.write(b"other")
        write_whole(path, "new")
        assert not first.is_locked
        first.check()
        second.check()
    assert path.read_text() == "other"
