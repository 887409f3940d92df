"""The search in the cost model, by successive halving: a short look at many points, longer looks at the best of them.

The first look begins with random points, which find the region, and goes on with those that differ from the best one in
one field, until none of them is faster. The search is deterministic given a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain, islice

from moesys.config import Strategy
from moesys.tuner.costs import CostedStrategy, Costs
from moesys.tuner.space import Space
from moesys.tuner.tuned_workload import Fidelity, OutOfTimeError, ladder

# One in this number of points gets the next longer look, and at least so many points.
_KEPT_ONE_IN, _KEPT = 4, 8


@dataclass(frozen=True)
class SearchResult:
    """The strategies that were simulated.

    ranking: the strategies that would run, fastest first. baseline: None where it cannot be simulated. refused: points
    that would not run, or that the cost model does not support, with the reason. num_points: points that were looked
    at. of: the part of the workload that all costs are the mean of. not_seen: what the search was doing when its time
    was over; "" where it ended by itself.
    """

    ranking: tuple[CostedStrategy, ...]
    baseline: CostedStrategy | None
    refused: tuple[tuple[Strategy, str], ...]
    num_points: int
    of: Fidelity
    not_seen: str = ""


def search(space: Space, costs: Costs, *, budget: int, seed: int) -> SearchResult:
    """Returns the best strategies found, also where the time is over before the search has ended.

    The starts of ``costs`` get every look. budget: number of points that the first look begins with, starts included; a
    space with fewer points is searched whole.

    Raises ValueError where the space has no point, where no point would run, or where nothing was simulated in time.
    """
    rungs, draws = ladder(costs.plans.workload), random.Random(seed)
    try:
        alive, words = _first_points(space, costs, budget, draws), "points"
        for fidelity in rungs:
            costs.look(alive, fidelity, words)
            if fidelity == rungs[0]:
                _climb(space, costs, fidelity, draws)
            ranking = costs.ranking(fidelity)
            kept = [one.strategy for one in ranking[: max(_KEPT, len(ranking) // _KEPT_ONE_IN)]]
            # The baseline comes first, so that a look that is cut short has a baseline.
            simulated = costs.simulated.get(fidelity, {})
            alive = [*(one for one in costs.starts if one.fingerprint() in simulated), *kept]
    except OutOfTimeError:
        return _result(costs, _longest_look(costs, rungs), costs.stage)
    return _result(costs, rungs[-1])


def _first_points(space: Space, costs: Costs, budget: int, draws: random.Random) -> list[Strategy]:
    """Returns the starts and points of the space: all of them, or a random sample."""
    setting, found = costs.setting, {start.fingerprint() for start in costs.starts}
    for start in costs.starts:
        # A start that does not fit is refused, and simulated nevertheless.
        costs.fits(start)
    exhausts = space.num_combinations <= budget
    points = space.points(setting) if exhausts else space.drawn(setting, draws)
    if (first := next(points, None)) is None:
        raise ValueError(
            "space has no point: no combination of its values is a Strategy for this model and cluster; "
            "list others, such as slots_per_rank for a balance that moves experts"
        )
    new = (one for one in chain([first], points) if one.fingerprint() not in found and costs.fits(one))
    return [*costs.starts, *islice(new, None if exhausts else max(0, budget - len(found)))]


def _climb(space: Space, costs: Costs, fidelity: Fidelity, draws: random.Random) -> None:
    """Looks at the neighbours of the best point, until the best one is the best of its neighbours."""
    climbed: set[str] = set()
    while (ranking := costs.ranking(fidelity)) and (best := ranking[0].strategy).fingerprint() not in climbed:
        climbed.add(best.fingerprint())
        near = filter(costs.fits, space.neighbours(best, costs.setting, draws))
        costs.look(near, fidelity, f"neighbours of {best.name}")


def _longest_look(costs: Costs, rungs: tuple[Fidelity, ...]) -> Fidelity:
    """Returns the longest look at the baseline and another strategy that would run, or the shortest look."""
    baseline = costs.starts[0].fingerprint()
    for fidelity in reversed(rungs):
        others = [one for one in costs.ranking(fidelity) if one.strategy.fingerprint() != baseline]
        if others and baseline in costs.simulated[fidelity]:
            return fidelity
    return rungs[0]


def _result(costs: Costs, fidelity: Fidelity, not_seen: str = "") -> SearchResult:
    ranking, refused = costs.ranking(fidelity), tuple(costs.refused.values())
    if not ranking:
        reason = next((reason for _, reason in refused), "none is known to the cost model")
        time = f"the time was over while {not_seen}: give more minutes, or " if not_seen else ""
        raise ValueError(f"no point of the space would run: {reason}; {time}widen space, or raise memory_gb")
    baseline = costs.simulated[fidelity].get(costs.starts[0].fingerprint())
    return SearchResult(tuple(ranking), baseline, refused, len(costs.looked_at), fidelity, not_seen)
