"""The parts of a model that a pipeline's stages hold: neighbouring layers, as even in seconds as they can be."""

from __future__ import annotations

from collections.abc import Sequence


def split_evenly(costs: Sequence[float], num_parts: int) -> list[range]:
    """Returns neighbouring layers for each part, at least one, so that the costliest part costs least.

    Of all such splits, the one whose first parts are the largest.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"num_parts={num_parts} does not fit {len(costs)} layers; use 1 to {len(costs)}")
    bounds = sorted({sum(costs[first:end]) for first in range(len(costs)) for end in range(first + 1, len(costs) + 1)})
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(costs, num_parts, bounds[middle]) is None:
            low = middle + 1
        else:
            high = middle
    found = _fits(costs, num_parts, bounds[high])
    assert found is not None
    return found


def _fits(costs: Sequence[float], num_parts: int, most: float) -> list[range] | None:
    """Returns parts that cost at most ``most``, each as large as that lets it be; None where there are none."""
    parts, first = [], 0
    for part in range(num_parts):
        # One layer is left for each later part.
        end, last = first + 1, len(costs) - (num_parts - part - 1)
        while end < last and sum(costs[first : end + 1]) <= most * (1 + 1e-12):
            end += 1
        if sum(costs[first:end]) > most * (1 + 1e-12):
            return None
        parts.append(range(first, end))
        first = end
    return parts if first == len(costs) else None
