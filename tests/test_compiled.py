"""Where machine code is kept, and that nobody needs a place to keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import moesys
from moesys.compiled import _user_caches, cache_dir

# Nobody lets this process write anywhere.
READ_ONLY = """
import os
from numba.core import caching
def refused(*_): raise PermissionError("read-only")
os.access = lambda *_: False
for locator in vars(caching).values():
    if isinstance(locator, type) and issubclass(locator, caching._CacheLocator):
        locator.ensure_cache_path = refused
"""
HOMELESS = """
import os, pwd
def unknown(number): raise KeyError(number)
os.environ.pop("HOME", None)
pwd.getpwuid = unknown
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Of one file, which has a compiled function."""
    found = tmp_path / "checkout" / "loops"
    found.mkdir(parents=True)
    (found / "loop.py").write_text("from moesys.compiled import compiled\n")
    return found


def test_only_machine_code_is_removed(package, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    older, results, other = (
        tmp_path / name for name in ("loops-0123456789abcdef", "loops-results", "hoops-" + 16 * "0")
    )
    for directory in (older, results, other):
        directory.mkdir()
    found = Path(cache_dir.__wrapped__(package))
    assert found.parent == tmp_path
    assert [directory.exists() for directory in (older, results, other)] == [False, True, True]
    found.mkdir()
    (package / "loop.py").write_text("from moesys.compiled import borrowing\n")
    assert cache_dir.__wrapped__(package) != str(found)
    assert not found.exists()


@pytest.mark.parametrize("of_machine", [READ_ONLY, HOMELESS], ids=["read_only", "homeless"])
def test_functions_are_compiled_where_nothing_can_be_kept(of_machine, tmp_path):
    program = """
from moesys.compiled import borrowing
@borrowing
def one_more(number): return number + 1
assert one_more(1) == 2
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(moesys.__file__).parents[1])}
    path = tmp_path / "program.py"
    path.write_text(of_machine + program)
    subprocess.run([sys.executable, path], check=True, timeout=60, env=environment)


def test_a_user_without_a_home_has_caches_where_nobody_else_can_write(tmp_path, monkeypatch):
    """Machine code is run, so that a folder of somebody else, or that they can write, is none for it."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"moesys-{os.getuid()}"
    assert list(_user_caches()) == [own / "moesys"]
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    assert list(_user_caches()) == []
    own.rmdir()
    own.symlink_to(tmp_path)
    assert list(_user_caches()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert list(_user_caches()) == []
