"""The planners, splits and overlaps of moesys: the name of the class of each kind and its module; where a public name
is, and the choice that a misspelt one is closest to.

A module is imported when its kind is named, so that declaring a strategy loads no planner but its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

BALANCES = {
    "static": ("Static", "moesys.balance.static"),
    "eplb": ("Eplb", "moesys.balance.eplb"),
    "laer": ("Laer", "moesys.balance.laer"),
    "flex_moe": ("FlexMoe", "moesys.balance.flex_moe"),
    "greedy": ("Greedy", "moesys.balance.greedy.greedy"),
    "cp_sat": ("CpSat", "moesys.balance.cp_sat"),
    "moon_ep": ("MoonEp", "moesys.balance.moon_ep"),
    "llep": ("Llep", "moesys.balance.llep"),
    "ultra_ep": ("UltraEp", "moesys.balance.ultra_ep"),
    "faster_moe": ("FasterMoe", "moesys.balance.faster_moe"),
}
SPLITS = {
    "even": ("EvenSplit", "moesys.balance.even_split"),
    "proportional": ("Proportional", "moesys.balance.proportional_split"),
    "flow": ("FlowSplit", "moesys.balance.flow.flow_split"),
    "quotas": ("Quotas", "moesys.balance.quotas"),
}
OVERLAPS = {
    "sequential": ("Sequential", "moesys.config.overlap"),
    "pipelined": ("Pipelined", "moesys.config.overlap"),
    "mega_kernel": ("MegaKernel", "moesys.config.overlap"),
}


def public_path(name: str) -> str:
    """Returns how users write a public name, such as ``ms.planning.LoadMatrix``, and "" for a name that is not public.

    It imports the public modules, and is for messages of errors. An installation without the simulator lacks one.
    """
    for module in ("moesys", "moesys.planning", "moesys.traces", "moesys.models"):
        try:
            names = import_module(module).__all__
        except ImportError:
            continue
        if name in names:
            return f"{module.replace('moesys', 'ms')}.{name}"
    return ""


def did_you_mean(given: Any, choices: Iterable[str]) -> str:
    """Returns ``; did you mean 'greedy'?`` for the choice that is closest to ``given``, and "" if none is close."""
    # A name's beginning counts too: QWEN3 for QWEN3_30B_A3B.
    folded = {choice.lower(): choice for choice in choices}
    word = given.lower() if isinstance(given, str) else ""
    begun = [choice for choice in folded if len(word) > 2 and choice.startswith(word)]
    close = begun if len(begun) == 1 else get_close_matches(word, folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""
