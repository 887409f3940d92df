"""Defines the options and names that the commands of several benchmarks share. This module imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from moesys.lab.commands.options import option

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
