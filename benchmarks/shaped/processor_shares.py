"""Control groups of Linux whose threads together get a fixed share of the processor, and names for what is made here.

The limit of a group holds whether other groups compute or wait, so that hosts on one machine do not speed each other
up. Kernel time that a thread causes counts as its own; the kernel's work for links, and the relay's, does not.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The period of a limit is short, so that a thread that has used up its share waits only briefly, and yet several
# scheduler ticks (4 ms and less) long: an overrun is noticed at a tick and then delays the whole group.
PERIOD_US = 10_000
# The smallest quota that the kernel accepts.
_LEAST_QUOTA_US = 1_000
_MOUNTS = Path("/proc/self/mounts")
# The time that the last processes of a group have to end.
_EXIT_S = 5.0
_NAME = re.compile(r"moesys-(\d+)-(\d+)-.+")


@dataclass(frozen=True)
class ProcessorShares:
    """The kernel's control groups for the processor: the folder of the root group, and the version of the interface."""

    folder: Path
    version: Literal[1, 2]

    def settings(self, cpus: float) -> dict[str, str]:
        """Returns the text of each file of a group that may use ``cpus`` processors."""
        period_us = max(PERIOD_US, round(_LEAST_QUOTA_US / cpus))
        quota_us = round(cpus * period_us)
        if self.version == 2:
            return {"cpu.max": f"{quota_us} {period_us}"}
        return {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}

    def make(self, name: str, cpus: float) -> Path:
        """Makes a group and returns its folder, for ``join``. Raises OSError where the kernel refuses."""
        group = self.folder / name
        if self.version == 2:
            (self.folder / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        for file, text in self.settings(cpus).items():
            (group / file).write_text(text)
        return group

    def remove_leftovers(self) -> list[str]:
        """Removes the groups of dead processes and returns their names."""
        names = leftovers(path for path in self.folder.iterdir() if path.is_dir())
        for name in names:
            remove(self.folder / name)
        return names


def find_shares(mounts: Path = _MOUNTS) -> ProcessorShares | None:
    """Finds the mounted control groups for the processor; None where there are none."""
    lines = [line.split() for line in _text(mounts).splitlines()]
    for _, folder, kind, options, *_ in lines:
        if kind == "cgroup" and "cpu" in options.split(","):
            return ProcessorShares(Path(folder), 1)
    for _, folder, kind, *_ in lines:
        if kind == "cgroup2" and "cpu" in _text(Path(folder) / "cgroup.controllers").split():
            return ProcessorShares(Path(folder), 2)
    return None


def lacks_shares() -> str:
    """Returns why this machine cannot limit hosts to a share of the processor, and what to do; "" where it can."""
    way_out = "leave shares out, or use a machine of your own"
    shares = find_shares()
    if shares is None:
        return f"no control groups for the processor are mounted; {way_out}"
    group = shares.folder / own_name("probe")
    try:
        shares.make(group.name, 0.5)
    except OSError as error:
        return f"control groups cannot be made in {shares.folder} ({error.strerror}); {way_out}"
    finally:
        remove(group)
    return ""


@contextmanager
def processor_shares(names: Sequence[str], cpus: float) -> Iterator[tuple[Path, ...]]:
    """Makes a group of ``cpus`` processors for each name and yields their folders, where ``lacks_shares`` is "".

    The groups are removed at the end, by when their processes are to have ended. Groups that a killed process has left
    are removed by the next call.
    """
    shares = find_shares()
    assert shares is not None
    shares.remove_leftovers()
    with ExitStack() as opened:
        for name in names:
            opened.callback(remove, shares.folder / name)
        yield tuple(shares.make(name, cpus) for name in names)


def join(group: Path) -> None:
    """Moves the calling process with all its threads into a group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def remove(group: Path) -> None:
    """Removes a group once its processes have ended, which it waits for. It is no error if the group is gone, or if
    its processes go on.
    """
    until_s = time.monotonic() + _EXIT_S
    while _text(group / "cgroup.procs") and time.monotonic() < until_s:
        time.sleep(0.01)
    with suppress(OSError):
        group.rmdir()


def own_name(what: str) -> str:
    """Returns a name that says which process made the thing, such as ``moesys-4711-88123-host0``."""
    pid = os.getpid()
    return f"moesys-{pid}-{_start_of(pid)}-{what}"


def leftovers(paths: Iterator[Path]) -> list[str]:
    """Returns the names of those ``paths`` whose process, by ``own_name``, has ended."""
    found = ((name, _NAME.fullmatch(name)) for name in sorted(path.name for path in paths))
    return [name for name, match in found if match and _start_of(int(match[1])) != int(match[2])]


def _start_of(pid: int) -> int | None:
    """Returns when a living process started, in clock ticks since boot; process numbers are reused, these are not."""
    stat = _text(Path(f"/proc/{pid}/stat"))
    return int(stat.rpartition(")")[2].split()[19]) if stat else None


def _text(file: Path) -> str:
    """Returns the text of a file, "" where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
