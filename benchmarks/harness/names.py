"""Names on a command line."""

from __future__ import annotations

from collections.abc import Collection


def chosen(what: str, words: str, known: Collection[str]) -> list[str]:
    """Returns those of ``known`` that ``words`` names, several with commas between them, or "all".

    Raises ValueError for a name that is not known; ``what`` is the option.
    """
    names = list(known) if words == "all" else words.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{what}={name!r} is not known; use all or some of {', '.join(known)}")
    return names
