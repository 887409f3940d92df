"""What programs leave behind: processes, shared memory, and files that only a writer needs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

MARKER = "MOESYS_TEST_MARKER"
SHARED = Path("/dev/shm")


def alive(marker: str) -> list[int]:
    """Processes, ended ones not yet reaped left out, that have the marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={marker}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def gone(marker: str, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while alive(marker) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not alive(marker)


def unmapped(before: set[str]) -> list[str]:
    """New shared memory of moesys and torch that no process uses: that of other tests has one. Semaphores are removed
    by Python's resource tracker, and other programs that were killed leave some.
    """
    new = [name for name in os.listdir(SHARED) if name not in before and name.startswith(("moesys", "torch"))]
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            used += maps.read_text()
        except OSError:
            continue
    return [name for name in new if f"{SHARED}/{name}" not in used]


def temporary(folder: Path) -> list[str]:
    """Names below ``folder`` that only a writer needs. The lock in a folder that one process at a time may write stays
    there for the next one.
    """
    pattern = re.compile(r"\..*\.(new|old|lock)|\..*\.\d+-[0-9a-f]{8}|\.steps.*|\.metadata\.tmp|.*\.tmp")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if pattern.fullmatch(path.name))
