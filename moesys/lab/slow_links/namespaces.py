"""Makes and removes network namespaces of Linux by ``ip netns``; a thread enters one, and none is left behind for long.

A name carries the process that made it, so that a later run can remove what a killed one has left.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_FOLDER = Path("/run/netns")
_NAME = re.compile(r"moesys-(\d+)-(\d+)-.+")
_CLONE_NEWNET = 0x40000000

Command = tuple[str, ...]


@dataclass(frozen=True)
class RankNetwork:
    """Where ranks live when it is not the network of this machine.

    namespace_of_rank: of each rank, [R].
    interface: the one that gloo uses, called alike in all of them.
    store_namespace: of the store that ranks meet at.
    store_address: of the store, as ranks reach it; not through ``interface``, whose bytes are the ranks' own.
    share_of_rank: the control group that each rank joins for its host's share of the processor, [R]; empty: none.
    """

    namespace_of_rank: tuple[str, ...]
    interface: str
    store_namespace: str
    store_address: str
    share_of_rank: tuple[Path, ...] = ()


class CommandError(OSError):
    """A command that sets up a network failed; the message holds it and what it said."""


def namespace_name(what: str) -> str:
    """The name of this process's namespace ``what``, such as ``moesys-4711-88123-host0``."""
    pid = os.getpid()
    return f"moesys-{pid}-{_started(pid)}-{what}"


def leftovers(names: Sequence[str]) -> list[str]:
    """Those of ``names`` that a process made which is there no more."""
    found = ((name, _NAME.fullmatch(name)) for name in names)
    return [name for name, match in found if match and _started(int(match[1])) != int(match[2])]


def remove_leftovers() -> list[str]:
    """Remove the namespaces of dead processes; their names."""
    names = leftovers(sorted(path.name for path in _FOLDER.iterdir())) if _FOLDER.is_dir() else []
    for name in names:
        remove_namespace(name)
    return names


def remove_namespace(name: str) -> None:
    """Its interfaces end with it, once no process is in it. No error where it is gone already."""
    subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def enter_namespace(name: str) -> None:
    """Moves the calling thread, and those that it starts, into a namespace; sockets it has stay where they were.

    Raises OSError where there is no such namespace, or not the right to enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_FOLDER / name).open("rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter the network namespace {name}: {os.strerror(error)}; be root")


def in_namespace(name: str, make: Callable[[], T]) -> T:
    """What ``make`` gives when it runs inside a namespace; sockets and threads that it starts belong there."""

    def inside() -> T:
        enter_namespace(name)
        return make()

    # A thread of its own, as one that has entered would have to find the way back.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(inside).result()


def run_commands(commands: Sequence[Command]) -> None:
    """Run each, one after another. Raises CommandError for the first that fails."""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            raise CommandError(f"{' '.join(command)}: {said}")


def lacks() -> str:
    """Why no namespaces with shaped links can be made here, in one line with the way out; empty where they can be."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}; use a Linux machine"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} of iproute2 not found; install iproute2"
    if os.geteuid():
        return "only root can make network namespaces; run the same command as root"
    name = namespace_name("probe")
    try:
        run_commands([("ip", "netns", "add", name), tbf_command(name, "lo", 100.0)])
    except CommandError as error:
        return f"this kernel or container allows no shaped network namespace ({error}); use a machine of your own"
    finally:
        remove_namespace(name)
    return ""


def has_netem(namespace: str) -> bool:
    """Whether the kernel can delay packets by itself."""
    netem = ("dev", "lo", "root", "netem", "delay", "1ms")
    try:
        run_commands([("tc", "-n", namespace, "qdisc", "add", *netem)])
    except CommandError:
        return False
    run_commands([("tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root")])
    return True


def burst_bytes(mbit_per_s: float) -> int:
    """What a link may send at once after a pause: four milliseconds' worth, so that a late timer costs no bandwidth,
    and packets may be large: each costs hosts processor time that elsewhere their network cards spend.
    """
    return max(4096, round(mbit_per_s * 500))


def tbf_command(namespace: str, interface: str, mbit_per_s: float, parent: Sequence[str] = ("root",)) -> Command:
    """Shapes what leaves ``interface``, now or anew. The queue is so long that nothing is lost."""
    rate = ("rate", f"{round(mbit_per_s * 1000)}kbit", "burst", str(burst_bytes(mbit_per_s)), "limit", "64mb")
    return ("tc", "-n", namespace, "qdisc", "replace", "dev", interface, *parent, "tbf", *rate)


def _started(pid: int) -> int | None:
    """When a living process started, in clock ticks since boot: numbers of processes come again, these do not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
