"""The parts of a model that a pipeline's stages hold: neighbouring layers, as even in seconds as they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import itemgetter


def split_evenly(costs: Sequence[float], num_parts: int) -> list[range]:
    """Returns neighbouring layers for each part, at least one, so that the costliest part costs least, and of all such
    splits the most even: that with the least sum of squares, as a stage of an interleaved pipeline has several parts.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"num_parts={num_parts} does not fit {len(costs)} layers; use 1 to {len(costs)}")
    until = [0.0, *accumulate(costs)]
    most, _ = _best(until, num_parts, max)
    # Sums over the same layers differ in their last bits.
    limit = most * (1 + 1e-12)
    _, bounds = _best(until, num_parts, lambda squares, cost: squares + cost * cost if cost <= limit else inf)
    return [range(first, end) for first, end in pairwise(bounds)]


def _best(
    until: Sequence[float], num_parts: int, with_part: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Returns the least value of a split, which ``with_part`` makes of the value without its last part and that part's
    cost, and the split: where its parts begin, and the end. ``until``: costs of all layers before each.
    """
    layers = len(until) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for part in range(1, num_parts + 1):
        best = {
            # Of equals the first: where the parts before hold most.
            end: min(
                (
                    (with_part(value, until[end] - until[first]), [*bounds, end])
                    for first, (value, bounds) in reversed(best.items())
                    if first < end
                ),
                key=itemgetter(0),
            )
            for end in range(part, layers - (num_parts - part) + 1)
        }
    return best[layers]
