"""Where machine code is kept, and that nobody needs a place to keep it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesys
import moesys as ms
from moesys.compiled import _opened, _package_of, cache_dir, code_folders
from tests.golden.plan_cases import SETTINGS, drawn_load

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Of one file, which has a compiled function."""
    found = tmp_path / "checkout" / "loops"
    found.mkdir(parents=True)
    (found / "loop.py").write_text("from moesys.compiled import compiled\n")
    return found


def aged(folder: Path, days: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    then = time.time() - days * 24 * 60 * 60
    os.utime(folder, (then, then))
    return folder


def test_only_machine_code_that_was_not_used_for_a_month_is_removed(package, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    days = {"loops-0123456789abcdef": 31, "loops-1123456789abcdef": 29, "loops-results": 31, "hoops-" + 16 * "0": 31}
    folders = [aged(tmp_path / name, age) for name, age in days.items()]
    found = Path(cache_dir(package))
    assert found.parent == tmp_path
    assert [folder.exists() for folder in (*folders, found)] == [False, True, True, True, True]
    # What a process of this version finds is in use, and stays when another version makes its folder.
    aged(found, 31)
    code_folders.__wrapped__(package)
    (package / "loop.py").write_text("from moesys.compiled import borrowing\n")
    newer = Path(code_folders.__wrapped__(package)[0])
    with _opened(newer, make=True):
        assert newer != found
    assert found.exists()


def test_code_lies_in_folders_that_only_this_user_root_and_moesys_owner_can_write(package, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    before = os.umask(0)
    try:
        found = Path(cache_dir(package))
        with _opened(found) as opener, open("code", "x", opener=opener):
            assert found.stat().st_mode & 0o022 == (found / "code").stat().st_mode & 0o022 == 0
    finally:
        os.umask(before)
    for mode in (0o775, 0o757):
        found.chmod(mode)
        with pytest.raises(PermissionError, match="another user"), _opened(found):
            pass
        assert Path(cache_dir(package)).parent == package / "__pycache__"
    found.chmod(0o755)
    aside = found.rename(tmp_path / "aside")
    found.symlink_to(aside)
    with pytest.raises(OSError, match="loops-"), _opened(found):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_code_of_another_user_is_not_loaded_and_that_of_moesys_owner_is(package, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    found = Path(cache_dir(package))
    os.chown(found, 4321, 4321)
    with pytest.raises(PermissionError, match="another user"), _opened(found):
        pass
    assert cache_dir(package) != str(found)
    (installed := tmp_path / "compiled.py").touch()
    os.chown(installed, 4321, 4321)
    monkeypatch.setattr("moesys.compiled.__file__", str(installed))
    with _opened(found):
        pass


@pytest.mark.parametrize("value", ["", "/dev/full/x", "\x1b" * 5000])
def test_code_has_other_places_where_numba_cache_dir_is_none(value, package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", value)
    assert Path(cache_dir(package)).parent == package / "__pycache__"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkout"]


WITHOUT_A_PLACE = """
import os, pwd, sys
real = os.open
def refused(path, flags, *arguments, **options):
    if flags & (os.O_WRONLY | os.O_RDWR): raise PermissionError(13, "read-only", path)
    return real(path, flags, *arguments, **options)
def unknown(number): raise KeyError(number)
if sys.argv[1] == "read_only":
    os.open = refused
else:
    os.environ.pop("HOME", None)
    pwd.getpwuid = unknown
from moesys.compiled import borrowing
@borrowing
def one_more(number): return number + 1
assert one_more(1) == 2
"""


@pytest.mark.ranks
@pytest.mark.parametrize("why", ["read_only", pytest.param("homeless", marks=pytest.mark.slow)])
def test_functions_are_compiled_where_nothing_can_be_kept(why, tmp_path):
    """Nobody lets the process write anywhere, or nobody knows its user."""
    environment = {**os.environ, "PYTHONPATH": str(Path(moesys.__file__).parents[1])}
    path = tmp_path / "program.py"
    path.write_text(WITHOUT_A_PLACE)
    subprocess.run([sys.executable, path, why], check=True, timeout=60, env=environment)


def test_users_without_a_home_have_places(package, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    places = [found.parent for found in code_folders.__wrapped__(package)]
    assert places == [package / "__pycache__", tmp_path / f"moesys-{os.getuid()}"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert code_folders.__wrapped__(package)[1].parent == tmp_path / ".cache" / "moesys"


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
if sys.argv[1:] != ["at the first call"]:
    compile_or_use_python(Path(__file__).parent, lambda: doubled(3), *sys.argv[1:])
assert int(doubled(3)) == 6
print(sum(doubled.dispatcher.stats.cache_hits.values()))
"""
COMPILES = "moesys compiles its loops, which takes about two minutes, once per installation"


class Loops:
    """Processes that call compiled functions of a package in ``folder``, with their code below ``folder.parent``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.program = folder / "program.py"
        self.program.write_text(LOOPS)
        root = str(Path(moesys.__file__).parents[1])
        self.cache = folder.parent / "cache"
        self.variables = {**os.environ, "PYTHONPATH": root, "NUMBA_CACHE_DIR": str(self.cache)}

    def start(self, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", str(self.program), *arguments]
        pipe, settings = subprocess.PIPE, {"env": self.variables} | settings
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **settings)


def ends(*started: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Returns how many functions the processes have loaded, and the lines that they wrote."""
    outputs = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), outputs
    return sum(int(out) for out, _ in outputs), [line for _, lines in outputs for line in lines.splitlines()]


@pytest.fixture
def loops(tmp_path: Path) -> Loops:
    return Loops(tmp_path / "loops")


@pytest.mark.ranks
def test_one_process_compiles_says_so_in_a_line_and_others_load(loops):
    in_python = "moesys plans in Python, with equal results: its loops are not compiled yet; do this"
    assert ends(loops.start("do this")) == (0, [in_python])
    assert ends(loops.start(), loops.start()) == (1, [COMPILES])
    assert ends(loops.start("do this"), loops.start("at the first call")) == (2, [])
    # A crash may have torn a file; then it is written anew. Of several ranks the first alone says so.
    for rank, said in (("1", []), ("0", [COMPILES])):
        for file in loops.cache.rglob("*.nbc"):
            file.write_bytes(file.read_bytes()[:100])
        variables = loops.variables | {"RANK": rank, "LOCAL_RANK": rank}
        assert ends(loops.start("at the first call", env=variables)) == (0, said)
    assert ends(loops.start()) == (1, [])


@pytest.mark.ranks
def test_functions_that_compile_in_a_moment_do_not_say_so(loops):
    loops.program.write_text(
        LOOPS.replace(" compiled\n", " briefly_borrowing\n").replace("@compiled", "@briefly_borrowing")
    )
    assert ends(loops.start("at the first call")) == (0, [])
    assert ends(loops.start("at the first call")) == (1, [])


@pytest.mark.ranks
def test_code_that_cannot_be_kept_ends_nothing_and_a_line_names_the_folder(loops):
    """A limit on the size of files stands for the full disk."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    num_loaded, lines = ends(loops.start(preexec_fn=full))
    assert (num_loaded, lines[0], len(lines)) == (0, COMPILES, 2)
    assert lines[1].startswith(f"moesys cannot keep compiled loops in {loops.cache} (File too large) or ")
    assert lines[1].endswith("set NUMBA_CACHE_DIR to a folder that only you can write")
    assert [path.name for path in loops.cache.rglob("*") if path.is_file()] == ["lock"]


@pytest.mark.ranks
@pytest.mark.parametrize("planted", ["lock", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_lock_or_folder_that_cannot_be_opened_is_passed_over_and_code_in_it_is_read(loops, planted):
    assert ends(loops.start()) == (0, [COMPILES])
    [folder] = loops.cache.iterdir()
    if planted == "lock":
        (folder / "lock").unlink()
        (folder / "lock").mkdir()
    else:
        shutil.rmtree(folder)
        folder.touch()
        assert ends(loops.start()) == (0, [COMPILES])
    assert ends(loops.start()) == (1, [])


@pytest.mark.ranks
def test_code_is_found_wherever_the_package_was_moved_with_other_times_of_its_files(loops, tmp_path):
    del loops.variables["NUMBA_CACHE_DIR"]
    loops.variables |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "none")}
    assert ends(loops.start()) == (0, [COMPILES])
    (tmp_path / "image").mkdir()
    loops.program = loops.program.parent.rename(tmp_path / "image" / "loops") / "program.py"
    os.utime(loops.program, (1, 1))
    assert ends(loops.start()) == (1, [])


def test_planners_decide_the_same_in_python_as_compiled(monkeypatch):
    splits = (ms.FlowSplit(), ms.FlowSplit(max_inter_node="seconds"), ms.Proportional())
    usual = ("3+1+2", "3+3, uneven slots")

    def plans() -> list[bytes]:
        found = []
        for number, name in enumerate(SETTINGS if SWEEP else usual):
            cluster, num_experts, slots = SETTINGS[name]
            model = ms.ModelShape(hidden_size=64, intermediate_size=128, num_experts=num_experts, top_k=2)
            layout = None
            for seed in (number, number + 1):
                load = drawn_load(cluster, num_experts, seed)
                layout = ms.plan_layout(load, cluster, ms.Greedy(), slots, model=model, previous=layout)
                for split in splits if SWEEP else (splits[(number + seed) % 3],):
                    plan = ms.planning.split_tokens(load, layout, cluster, split, seed, model=model)
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
    compile_or_use_python(Path(__file__).parent, run)
    print("numba" in sys.modules)
"""
    path = tmp_path / "loop" / "program.py"
    path.parent.mkdir()
    path.write_text(program)
    root = str(Path(moesys.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True"]), done.stderr


TRAINS_WITHOUT_COMPILING = """
import numpy as np
import moesys as ms
from moesys.balance.replay import replay_steps
from moesys.balance.run_planner import warm_up
from moesys.compiled import _runs_without
warm_up(ms.Greedy(), ms.FlowSplit())
model = ms.ModelShape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
tokens_SLRE = np.random.default_rng(0).multinomial(400, [0.3, *[0.1] * 7], size=(12, 2, 2))
for sharding in (ms.Ep(slots_per_rank=6), ms.Fsep(slots_per_rank=6)):
    fields = {"balance": ms.Greedy(), "split": ms.FlowSplit(), "reduction": ms.LayoutInvariant()}
    strategy = ms.Strategy(name="one", sharding=sharding, **fields)
    steps = replay_steps(strategy, model, ms.ClusterSpec(ranks_per_node=2), tokens_SLRE)
    assert _runs_without("compiling", lambda: [*steps]), sharding
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_compiles_nothing_after_the_warm_up(tmp_path):
    variables = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", TRAINS_WITHOUT_COMPILING], env=variables, check=True)
