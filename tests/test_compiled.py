"""Where machine code is kept, and that nobody needs a place to keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moesys
import moesys as ms
from moesys.compiled import _package_of, _user_caches, cache_dir
from tests.golden.plan_cases import SETTINGS, drawn_load

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
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


@pytest.mark.ranks
@pytest.mark.parametrize(
    "of_machine", [READ_ONLY, pytest.param(HOMELESS, marks=pytest.mark.slow)], ids=["read_only", "homeless"]
)
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


# Of a package of its own, so that it is compiled in a moment.
LOOPS = """
import sys
from pathlib import Path
import numpy as np
from moesys.compiled import compile_or_use_python, compiled
@compiled
def wrapped(number): return np.uint64(number) * np.uint64(2**63 + 1)
@compiled
def doubled(number): return wrapped(number) + wrapped(number)
compile_or_use_python(Path(__file__).parent, lambda: doubled(3), "some loops", *sys.argv[1:])
assert int(doubled(3)) == 6
print(sum(doubled.dispatcher.stats.cache_hits.values()))
"""


@pytest.mark.ranks
def test_one_process_compiles_says_so_in_a_line_and_others_load(tmp_path):
    program = tmp_path / "loops" / "program.py"
    program.parent.mkdir()
    program.write_text(LOOPS)
    root = str(Path(moesys.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", str(program), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    def ends(*started: subprocess.Popen[str]) -> tuple[int, list[str]]:
        outputs = [process.communicate(timeout=60) for process in started]
        assert [process.returncode for process in started] == [0] * len(started), outputs
        return sum(int(out) for out, _ in outputs), [line for _, lines in outputs for line in lines.splitlines()]

    in_python = "moesys plans in Python, because some loops are not compiled on this machine; do this"
    assert ends(start("do this")) == (0, [in_python])
    num_loaded, lines = ends(start(), start())
    assert num_loaded == 1
    assert [line.partition(", ")[0] for line in lines] == ["moesys compiles some loops"]
    assert "once per installation" in lines[0]
    assert lines[0].endswith(cache_dir.__wrapped__(program.parent).rpartition("/")[2])
    assert ends(start(), start("do this")) == (2, [])


def test_planners_decide_the_same_in_python_as_compiled(monkeypatch):
    splits = (ms.FlowSplit(), ms.FlowSplit(max_inter_node="seconds"), ms.Proportional())

    def plans() -> list[bytes]:
        found = []
        # The last is like those before it, and larger.
        for number, (cluster, num_experts, slots) in enumerate([*SETTINGS.values()][: None if SWEEP else -1]):
            model = ms.ModelShape(hidden_size=64, intermediate_size=128, num_experts=num_experts, top_k=2)
            layout = None
            for seed in (number, number + 1):
                load = drawn_load(cluster, num_experts, seed)
                layout = ms.plan_layout(load, cluster, ms.Greedy(), slots, model=model, previous=layout)
                for split in splits if SWEEP else (splits[(number + seed) % 3],):
                    plan = ms.split_tokens(load, layout, cluster, split, seed, model=model)
                    found.append(layout.expert_RS.tobytes() + np.ascontiguousarray(plan.entries).tobytes())
        return found

    compiled = plans()
    monkeypatch.setattr(_package_of(Path(moesys.__file__).with_name("balance")), "in_python", True)
    assert plans() == compiled


@pytest.mark.ranks
def test_numba_is_imported_only_where_something_compiled_is_called(tmp_path):
    program = """
import sys
from pathlib import Path
from moesys.compiled import compile_or_use_python, compiled
@compiled
def doubled(number): return 2 * number
for run in (lambda: 1, lambda: doubled(3)):
    compile_or_use_python(Path(__file__).parent, run, "a loop")
    print("numba" in sys.modules)
"""
    path = tmp_path / "loop" / "program.py"
    path.parent.mkdir()
    path.write_text(program)
    root = str(Path(moesys.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True"]), done.stderr
