"""Defines the options and names that the commands of several benchmarks share. This module imports no torch."""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from importlib.metadata import version
from typing import Annotated

from moesys.display import counted
from moesys.lab.commands.options import option
from moesys.lab.runs.environment import available_cores, cpu_name

Repeats = Annotated[int, option("N", "Number of timed repetitions.", min=1)]


def chosen(what: str, words: str, known: Collection[str]) -> list[str]:
    """Returns the names that ``words`` lists: some of ``known``, separated by commas, or "all".

    Raises ValueError for an unknown name; ``what`` is the name of the option.
    """
    names = list(known) if words == "all" else words.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{what}={name!r} is not known; use all or some of {', '.join(known)}")
    return names


def machine_line(threads: int, packages: Sequence[str] = ("torch",)) -> str:
    """Returns the processor, cores, threads and versions that numbers were measured with, in one line."""
    versions = [f"{package} {version(package)}" for package in packages]
    python = f"Python {platform.python_version()}"
    return ", ".join([cpu_name(), counted(available_cores(), "core"), counted(threads, "thread"), python, *versions])
