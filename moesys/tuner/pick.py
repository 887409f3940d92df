"""Tuning from end to end: search, time where there is a clock, and give a reason for each field of the pick.

The search in the cost model is by successive halving: a short look at many points, longer looks at the best of them.
The first look begins with random points, which find the region, and goes on with those that differ from the best one in
one field, until none of them is faster. The search is deterministic given a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from moesys.config import Strategy
from moesys.config.experiment import Source
from moesys.tuner.costs import CostedStrategy, Costs, Session
from moesys.tuner.space import PARTS, SearchBounds, Space, default_space
from moesys.tuner.timing import Clock, Rounds, TimedStrategy, TimingResult, kinds_of
from moesys.tuner.tuned_workload import Fidelity, Plans, Setting, SimulatedWorkload, ladder, value_words

# Number of the experiment's strategies that are timed in any case, besides the baseline.
_STARTS_TIMED = 3
# Number of the fastest strategies that are drawn again, and the number of steps per seed.
_DRAWN, _DRAWN_STEPS = 3, 2


@dataclass(frozen=True)
class Choice:
    """One field of the strategy, a dotted path as in TOML.

    next_best: the value of the fastest other strategy that was simulated with another value; its other fields may
    differ too. costs: the relative increase of a simulated step with it, 0.02 for 2 %, by the longest look at both.
    Both are None where no other value was simulated.
    """

    field: str
    value: str
    next_best: str | None = None
    costs: float | None = None

    def __str__(self) -> str:
        if self.next_best is None or self.costs is None:
            return "no other value was simulated"
        if abs(self.costs) < 5e-5:
            return f"{self.next_best} is as fast, simulated"
        if self.costs < 0:
            saved = f"{self.next_best} would save {-100 * self.costs:.2f} %, simulated"
            return f"{saved}; longer looks or the clock chose otherwise"
        return f"{self.next_best} would cost {100 * self.costs:.2f} %, simulated"


@dataclass(frozen=True)
class Draws:
    """Simulated milliseconds of the same steps under a strategy and under the baseline, by draw. A draw is a seed, or
    one step where there is one seed only.
    """

    strategy: Strategy
    own_ms: dict[int, list[float]] = field(hash=False)
    baseline_ms: dict[int, list[float]] = field(hash=False)


@dataclass(frozen=True)
class TunePick:
    """The pick of a tuning, called ``tuned``, and the reasons for it.

    decided_by: the kind of time by which the pick is the fastest. speedup: the baseline's time divided by the pick's,
    both of that kind. timing: None where nothing was timed. draws: intervals of the fastest strategies in the cost
    model.
    """

    strategy: Strategy
    baseline: Strategy
    decided_by: Source
    speedup: float
    choices: tuple[Choice, ...]
    space: Space
    search: SearchResult
    timing: TimingResult | None
    draws: tuple[Draws, ...] = ()

    @property
    def compared(self) -> tuple[Draws, ...]:
        """The timed trials by seed, the baseline's too; without any, ``draws``."""
        if self.timing is None:
            return self.draws
        ms = {timed.strategy: {seed: [ms] for seed, ms in timed.ms_by_seed.items()} for timed in self.timing.ranking}
        return tuple(Draws(strategy, own_ms, ms[self.baseline]) for strategy, own_ms in ms.items())

    def to_toml(self, decided: str) -> str:
        """Returns the strategy as a file, below comments with the reason for each field. ``decided``: how much faster
        it is, in words.
        """
        counted = f"{self.search.num_points} of {self.space.num_combinations} combinations looked at"
        trials = f", {self.timing.num_trials} timed trials" if self.timing else ""
        lines = [f"Found by moesys tune: {counted}{trials}.", decided]
        lines += [f"{of.field} = {of.value}: {of}" for of in self.choices if of.next_best is not None]
        return "".join(f"# {line}\n" for line in lines) + self.strategy.to_toml()


def tune_workload(
    workload: SimulatedWorkload,
    strategies: Sequence[Strategy],
    session: Session,
    *,
    space: Space | None = None,
    bounds: SearchBounds | None = None,
    mega_kernels: bool = True,
    clock: Clock | None = None,
    draw_seeds: Sequence[int] = (),
) -> TunePick:
    """Returns the fastest strategy found. The search begins with ``strategies``; the first is the baseline.

    space: None for ``default_space``, with ``MegaKernel`` if ``mega_kernels``. clock: times the best strategies at the
    end and decides; simulated and measured times are never in one ranking. draw_seeds: seeds on which the fastest are
    simulated once more, for intervals.

    Raises ValueError where the space has no point, where nothing of it or not the baseline can be simulated, or where
    the baseline's trials fail.
    """
    bounds, plans = bounds or SearchBounds(), Plans(workload)
    cluster = workload.cluster.replace(memory_gb=bounds.memory_gb or workload.cluster.memory_gb)
    num_layers = len(plans.first_layers(strategies[0]))
    setting = Setting(workload.model, cluster, num_layers, bounds.model_layers, workload.workload.recompute != "none")
    starts = [setting.plainest(strategy).replace(name=strategy.name) for strategy in strategies]
    costs = Costs(plans, setting, session, starts)
    if space is None:
        space = default_space(setting, costs.tokens_per_rank, mega_kernels=mega_kernels)
    found, timing = search(space, costs, budget=bounds.budget, seed=bounds.seed), None
    if clock is None:
        if found.baseline is None:
            _, reason = costs.refused[starts[0].fingerprint()]
            raise ValueError(
                f"the cost model does not run the baseline, strategy {starts[0].name!r}: {reason}; "
                "put another one first"
            )
        pick, speedup = found.ranking[0].strategy, found.baseline.ms / found.ranking[0].ms
    else:
        candidates = [one for one in _promising(costs) if costs.fits(one)]
        timing = Rounds(clock, session, starts[0], seed=bounds.seed, first_seed=workload.seeds[0]).run(candidates)
        best = _best_that_fits(timing, costs)
        pick, speedup = best.strategy, 1 / best.ratio
    return TunePick(
        strategy=pick.replace(name="tuned"),
        baseline=starts[0],
        decided_by="simulated" if timing is None else "measured",
        speedup=speedup,
        choices=_choices_of(pick, space, costs),
        space=space,
        search=found,
        timing=timing,
        draws=_draws(costs, found, draw_seeds),
    )


def _promising(costs: Costs) -> list[Strategy]:
    """Returns strategies in the order in which to time them: some of the starts; then the fastest of each kind of
    sharding and overlap in turn, because a model that is wrong about a kind is wrong about all of it. Points that
    cannot be simulated are last of their kind.
    """
    kinds: dict[tuple[str, str], list[Strategy]] = {}
    refused = [strategy for strategy, _ in reversed(costs.refused.values())]
    looks = [costs.ranking(fidelity) for fidelity in reversed(ladder(costs.plans.workload))]
    for strategy in [*(one.strategy for look in looks for one in look), *refused]:
        kinds.setdefault(kinds_of(strategy), []).append(strategy)
    in_turn = [strategy for turn in zip_longest(*kinds.values()) for strategy in turn if strategy is not None]
    return [*costs.starts[1 : 1 + _STARTS_TIMED], *in_turn]


def _best_that_fits(timing: TimingResult, costs: Costs) -> TimedStrategy:
    # The baseline is timed whether it fits or not.
    if (best := next((timed for timed in timing.ranking if costs.fits(timed.strategy)), None)) is not None:
        return best
    example = next((f"such as {strategy.name}: {reason}" for strategy, reason in timing.failed), "nor begun")
    raise ValueError(
        f"nothing that fits into {costs.setting.cluster.memory_gb} GB was timed to the end, {example}; "
        "raise timed, or memory_gb"
    )


def _draws(costs: Costs, found: SearchResult, seeds: Sequence[int]) -> tuple[Draws, ...]:
    """Simulates the fastest strategies and the baseline on further seeds."""
    if found.baseline is None:
        return ()
    baseline, shown = found.baseline.strategy, [one.strategy for one in found.ranking[:_DRAWN]]
    if seeds:
        fidelity = Fidelity(tuple(seeds), min(_DRAWN_STEPS, costs.plans.workload.num_steps))
        costs.look([baseline, *shown], fidelity, "of the fastest and the baseline")
    drawn = [_draws_of(strategy, baseline, costs.steps_ms) for strategy in shown if strategy != baseline]
    return tuple(draws for draws in drawn if len(draws.own_ms) > 1)


def _draws_of(strategy: Strategy, baseline: Strategy, steps_ms: dict[str, dict[int, list[float]]]) -> Draws:
    """Returns the steps that both have been simulated on."""
    own, other = steps_ms[strategy.fingerprint()], steps_ms[baseline.fingerprint()]
    lengths = {seed: min(len(own[seed]), len(other[seed])) for seed in own if seed in other}
    own_ms, baseline_ms = ({seed: ms[seed][:most] for seed, most in lengths.items()} for ms in (own, other))
    if len(lengths) == 1:
        (seed,) = lengths
        own_ms, baseline_ms = ({step: [ms] for step, ms in enumerate(of[seed])} for of in (own_ms, baseline_ms))
    return Draws(strategy, own_ms, baseline_ms)


# --- the reasons ------------------------------------------------------------------------------------------------------


def _choices_of(pick: Strategy, space: Space, costs: Costs) -> tuple[Choice, ...]:
    """Returns a choice for every field that the space has values for."""
    paths = []
    for name in ("sharding", "overlap"):
        kind = getattr(pick, name).kind
        paths += [f"{name}.kind", *(f"{name}.{field}" for field in space.choices(name, kind))]
    paths += [name for name in PARTS if name not in ("sharding", "overlap")]
    looks = []
    for fidelity in reversed(ladder(costs.plans.workload)):
        if (own := costs.simulated.get(fidelity, {}).get(pick.fingerprint())) is not None:
            looks.append((own.ms, costs.ranking(fidelity)))
    return tuple(_choice_of(path, pick, looks) for path in paths)


def _choice_of(path: str, pick: Strategy, looks: Sequence[tuple[float, Sequence[CostedStrategy]]]) -> Choice:
    """Returns the choice of a field. ``looks``: the pick's milliseconds and the ranking in each look, longest first."""
    part, _, name = path.partition(".")
    own, is_field = getattr(pick, part), name not in ("", "kind")
    value = getattr(own, name) if name else own
    for pick_ms, ranking in looks:
        for one in ranking:
            other = getattr(one.strategy, part)
            if is_field and other.kind != own.kind:
                continue
            if (getattr(other, name) if name else other) != value:
                shown = value_words(getattr(other, name) if is_field else other)
                return Choice(path, value_words(value), shown, one.ms / pick_ms - 1)
    return Choice(path, value_words(value))


# One in this number of points gets the next longer look, and at least so many points.
_KEPT_ONE_IN, _KEPT = 4, 8


@dataclass(frozen=True)
class SearchResult:
    """The strategies that were simulated.

    ranking: the strategies that would run, fastest first. baseline: None where it cannot be simulated. refused: points
    that would not run, or that the cost model does not support, with the reason. num_points: points that were looked
    at. of: the part of the workload that all costs are the mean of.
    """

    ranking: tuple[CostedStrategy, ...]
    baseline: CostedStrategy | None
    refused: tuple[tuple[Strategy, str], ...]
    num_points: int
    of: Fidelity


def search(space: Space, costs: Costs, *, budget: int, seed: int) -> SearchResult:
    """Returns the best strategies found.

    The starts of ``costs`` get every look. budget: number of points that the first look begins with, starts included; a
    space with fewer points is searched whole.

    Raises ValueError where the space has no point, or where no point would run.
    """
    rungs, draws = ladder(costs.plans.workload), random.Random(seed)
    alive = _first_points(space, costs, budget, draws)
    for fidelity in rungs:
        costs.look(alive, fidelity, "points")
        if fidelity == rungs[0]:
            _climb(space, costs, fidelity, draws)
        ranking = costs.ranking(fidelity)
        kept = [one.strategy for one in ranking[: max(_KEPT, len(ranking) // _KEPT_ONE_IN)]]
        simulated = costs.simulated.get(fidelity, {})
        alive = [*(one for one in costs.starts if one.fingerprint() in simulated), *kept]
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


def _result(costs: Costs, fidelity: Fidelity) -> SearchResult:
    ranking, refused = costs.ranking(fidelity), tuple(costs.refused.values())
    if not ranking:
        reason = next((reason for _, reason in refused), "none is known to the cost model")
        raise ValueError(f"no point of the space would run: {reason}; widen space, or raise memory_gb")
    baseline = costs.simulated[fidelity].get(costs.starts[0].fingerprint())
    return SearchResult(tuple(ranking), baseline, refused, len(costs.looked_at), fidelity)
