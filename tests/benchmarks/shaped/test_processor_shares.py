"""Hosts with a share of the processor: what the kernel is told, and, for root, what a busy host gets of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.shaped import processor_shares
from benchmarks.shaped.processor_shares import ProcessorShares, find_shares, lacks_shares, own_name

LACKS = lacks_shares()
shares_can_be_had = pytest.mark.skipif(bool(LACKS), reason=LACKS)


@pytest.mark.parametrize("cpus", [0.01, 0.05, 0.45, 0.9, 3.6])
def test_both_manners_say_the_same(cpus: float) -> None:
    first, second = (ProcessorShares(Path("/"), version).settings(cpus) for version in (1, 2))
    assert second == {"cpu.max": f"{first['cpu.cfs_quota_us']} {first['cpu.cfs_period_us']}"}
    quota_us, period_us = int(first["cpu.cfs_quota_us"]), int(first["cpu.cfs_period_us"])
    assert quota_us / period_us == pytest.approx(cpus, rel=0.01)
    # What the kernel takes.
    assert quota_us >= 1000
    assert 1000 <= period_us <= 1_000_000


def test_the_kernel_says_where_its_groups_are(tmp_path: Path) -> None:
    unified, mounts = tmp_path / "unified", tmp_path / "mounts"
    unified.mkdir()
    second = f"cgroup2 {unified} cgroup2 rw,relatime 0 0\n"
    mounts.write_text(f"proc /proc proc rw 0 0\n{second}cgroup /sys/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n")
    assert find_shares(mounts) == ProcessorShares(Path("/sys/cpu,cpuacct"), 1)
    mounts.write_text(f"cgroup /sys/cpuset cgroup rw,cpuset 0 0\n{second}")
    assert find_shares(mounts) is None
    (unified / "cgroup.controllers").write_text("cpuset cpu io\n")
    assert find_shares(mounts) == ProcessorShares(unified, 2)
    assert find_shares(tmp_path / "none") is None


def test_whoever_cannot_have_shares_is_told_why_and_a_group_says_what_it_gets(monkeypatch, tmp_path):
    group = ProcessorShares(tmp_path, 2).make("host0", 0.5)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert {path.name: path.read_text() for path in group.iterdir()} == {"cpu.max": "5000 10000"}
    for found, words in (
        (None, "no control groups for the processor are mounted; leave shares out"),
        (ProcessorShares(tmp_path / "none", 1), "(No such file or directory); leave shares out"),
    ):
        monkeypatch.setattr(processor_shares, "find_shares", lambda found=found: found)
        assert words in lacks_shares()


# --- for root ------------------------------------------------------------------------------------------------


def busy(seconds: float) -> tuple[float, float]:
    """(seconds by the clock, seconds of the processor) of a loop."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin_s < seconds:
        pass
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


@shares_can_be_had
def test_a_process_gets_no_more_than_the_share_of_its_group() -> None:
    with processor_shares.processor_shares((own_name("host0"),), 0.5) as (group,):
        came_from, goes_to = os.pipe()
        if not (child := os.fork()):
            processor_shares.join(group)
            os.write(goes_to, repr(busy(1.0)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        clock_s, processor_s = ast.literal_eval(os.read(came_from, 1000).decode())
        for end in (came_from, goes_to):
            os.close(end)
        throttled = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    # A tick late at most; a busy machine gives less.
    assert 0 < processor_s <= 0.5 * clock_s + 0.02
    assert int(throttled["nr_throttled"]) > 0 or processor_s < 0.5 * clock_s - 0.02


def stay_inside() -> None:
    with processor_shares.processor_shares((own_name("host0"),), 0.5) as (group,):
        processor_shares.join(group)
        print("up", flush=True)
        time.sleep(60)


def killed_inside(module: str) -> int:
    """Returns the number of a process that was killed in ``stay_inside`` of this module."""
    script = f"from {module} import stay_inside; stay_inside()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.kill()
    return child.pid


@shares_can_be_had
def test_what_a_killed_process_leaves_the_next_one_removes() -> None:
    pid = killed_inside("test_processor_shares")
    shares = find_shares()
    assert shares is not None
    assert [name for name in shares.remove_leftovers() if name.startswith(f"moesys-{pid}-")]
    assert not list(shares.folder.glob(f"moesys-{pid}-*"))
