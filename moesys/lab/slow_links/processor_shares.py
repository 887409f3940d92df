"""Makes shares of the processor: control groups of Linux whose threads together get so much of it and no more.

A group's limit holds whether others compute or wait, so that hosts on one machine do not speed each other up. What its
threads do in the kernel on their own behalf counts as theirs; what the kernel does for links, and relays, does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesys.lab.slow_links.namespaces import leftovers, namespace_name

# Of a limit: short, so that a thread that has used its share up waits for little; yet some ticks long, by which kernels
# notice (4 ms and less), or a thread would be noticed late, wait for several, and its group's other threads with it.
PERIOD_US = 10_000
# The kernel's least.
_LEAST_QUOTA_US = 1_000
_MOUNTS = Path("/proc/self/mounts")
# How long the last processes of a group may take to end.
_EXIT_S = 5.0


@dataclass(frozen=True)
class ProcessorShares:
    """Where the kernel has groups with a share of the processor, and in which of its two manners.

    folder: of the group of all processes.
    """

    folder: Path
    version: Literal[1, 2]

    def settings(self, cpus: float) -> dict[str, str]:
        """What is written into which file of a group that is to have ``cpus`` of the machine's processors."""
        period_us = max(PERIOD_US, round(_LEAST_QUOTA_US / cpus))
        quota_us = round(cpus * period_us)
        if self.version == 2:
            return {"cpu.max": f"{quota_us} {period_us}"}
        return {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}

    def make(self, name: str, cpus: float) -> Path:
        """A group; its folder, for ``join``. Raises OSError where the kernel refuses."""
        group = self.folder / name
        if self.version == 2:
            (self.folder / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        for file, text in self.settings(cpus).items():
            (group / file).write_text(text)
        return group

    def remove_leftovers(self) -> list[str]:
        """Remove the groups of dead processes; their names."""
        names = leftovers(sorted(path.name for path in self.folder.iterdir() if path.is_dir()))
        for name in names:
            remove(self.folder / name)
        return names


def find_shares(mounts: Path = _MOUNTS) -> ProcessorShares | None:
    """By what the kernel has mounted; None where it has no such groups."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    for _, folder, kind, options, *_ in lines:
        if kind == "cgroup" and "cpu" in options.split(","):
            return ProcessorShares(Path(folder), 1)
    for _, folder, kind, *_ in lines:
        if kind == "cgroup2" and "cpu" in _words(Path(folder) / "cgroup.controllers"):
            return ProcessorShares(Path(folder), 2)
    return None


def lacks_shares() -> str:
    """Why hosts cannot be given a share of the processor here, with the way out; empty where they can be."""
    way_out = "leave shares out, or use a machine of your own"
    shares = find_shares()
    if shares is None:
        return f"no control groups for the processor are mounted; {way_out}"
    group = shares.folder / namespace_name("probe")
    try:
        shares.make(group.name, 0.5)
    except OSError as error:
        return f"control groups cannot be made in {shares.folder} ({error.strerror}); {way_out}"
    finally:
        remove(group)
    return ""


@contextmanager
def processor_shares(names: Sequence[str], cpus: float) -> Iterator[tuple[Path, ...]]:
    """A group for each name, of ``cpus`` processors each; their folders. They end with the block, as their processes
    are to. What a killed process has left, the next one that comes here removes.

    Raises RuntimeError where this machine cannot do it, with the way out.
    """
    if reason := lacks_shares():
        raise RuntimeError(f"hosts cannot be given cpus_per_host={cpus:g}: {reason}")
    shares = find_shares()
    assert shares is not None
    shares.remove_leftovers()
    with ExitStack() as opened:
        for name in names:
            opened.callback(remove, shares.folder / name)
        yield tuple(shares.make(name, cpus) for name in names)


def join(group: Path) -> None:
    """Puts the calling process with all its threads into a group, and whatever it starts from now on."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def remove(group: Path) -> None:
    """Once the processes in it have ended, which they have a while for. No error where it is gone already, or where
    they have not.
    """
    until_s = time.monotonic() + _EXIT_S
    while _words(group / "cgroup.procs") and time.monotonic() < until_s:
        time.sleep(0.01)
    with suppress(OSError):
        group.rmdir()


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
