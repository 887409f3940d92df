"""Checks that end in every way that a check can: what tests give to the doctor of GPUs in place of its own."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.doctor.checks import Check, Ranks
from benchmarks.doctor.doctor_page import PAGE
from benchmarks.doctor.place import LeftOutError, Place


def case(name: str, *after: str, ranks: Ranks = "alone", budget_s: float = 60, dies: bool = False) -> Check:
    return Check(name, f"layer of {name}", "", f"{__name__}:{name}", budget_s, ranks, after, dies)


def passes(place: Place) -> str:
    print("printed by a check")
    return f"rank {place.rank} of {place.num_ranks}"


def raises(place: Place) -> str:
    raise RuntimeError("planted: a wrong kernel\nand more")


def segfaults(place: Place) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "lives"


def hangs(place: Place) -> str:
    time.sleep(600)
    return "woke up"


def cannot(place: Place) -> str:
    raise LeftOutError("planted: nothing to see")


def second_fails(place: Place) -> str:
    if place.rank == 1:
        raise RuntimeError("planted: the second rank")
    return "the first is well"


def last_is_killed(place: Place) -> str:
    if place.rank == place.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "the first goes on"


def reads_page(place: Place) -> str:
    """What the page says while this runs."""
    page = (place.folder / PAGE).read_text()
    return "; ".join(line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| "))
