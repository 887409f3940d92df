"""Tunes from end to end: prune, simulate, time, and say why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest

from moesys.config import Strategy
from moesys.tuner.costs import Costs, Told
from moesys.tuner.deadline import Deadline, OutOfTimeError
from moesys.tuner.default_space import default_space
from moesys.tuner.journal import Journal
from moesys.tuner.lookahead import Lookahead
from moesys.tuner.result import Draws, Tuned, choices_of
from moesys.tuner.search import Search, SearchResult
from moesys.tuner.search_bounds import SearchBounds
from moesys.tuner.setting import Setting
from moesys.tuner.space import Space
from moesys.tuner.step_costs import Fidelity
from moesys.tuner.timing import Clock, Rounds
from moesys.tuner.workload import Plans, Workload

# Strategies of the recipe that are timed whatever the cost model thinks of them, the baseline aside.
_STARTS_TIMED = 3
# Of the time, how much the search has where clocks follow, and where only further draws of the fastest do.
_SEARCH_SHARE_BEFORE_CLOCKS, _SEARCH_SHARE = 0.4, 0.85
# How many of the fastest are drawn again, and how many steps a seed.
_DRAWN, _DRAWN_STEPS = 3, 2


def tune_workload(
    workload: Workload,
    strategies: Sequence[Strategy],
    *,
    journal: Journal,
    told: Told,
    space: Space | None = None,
    bounds: SearchBounds | None = None,
    mega_kernels: bool = True,
    clock: Clock | None = None,
    draw_seeds: Sequence[int] = (),
    deadline: Deadline | None = None,
    lookahead: Lookahead | None = None,
) -> Tuned:
    """The fastest strategy found. ``strategies``: where the search starts, the baseline first. ``workload`` is of the
    seeds that the cost model looks at.

    space: None for ``default_space``, with ``MegaKernel`` if ``mega_kernels``. clock: with one, the best are timed at
    last, and clocks decide; simulated and measured times are never in one ranking. draw_seeds: on which the fastest are
    simulated once more, for intervals. deadline: of all of it; the search has the part that those do not need.
    lookahead: of the same workload; what is found does not depend on it.

    Raises ValueError where the space has no point or nothing of it can be simulated, where the baseline cannot, or its
    trials fail.
    """
    bounds, deadline = bounds or SearchBounds(), deadline or Deadline()
    plans, model, cluster = Plans(workload), workload.model, workload.cluster
    memory_gb = bounds.memory_gb or cluster.memory_gb
    layers = plans.steps(strategies[0], workload.seeds[0], 1)[0][0].layers
    setting = Setting(model, cluster.replace(memory_gb=memory_gb), len(layers), bounds.model_layers, workload.recompute)
    starts = [setting.plainest(strategy).replace(name=strategy.name) for strategy in strategies]
    if space is None:
        tokens_per_rank = layers[0].load.total // (model.top_k * cluster.num_ranks)
        space = default_space(setting, tokens_per_rank, mega_kernels=mega_kernels)
    until = deadline.part(_SEARCH_SHARE if clock is None else _SEARCH_SHARE_BEFORE_CLOCKS)
    costs = Costs(plans, journal, setting, like=starts[0], told=told, deadline=until, lookahead=lookahead)
    search = Search(space, starts, costs, budget=bounds.budget, seed=bounds.seed)
    found = search.run()
    if clock is None:
        if found.baseline is None:
            raise ValueError(
                f"the cost model does not run the baseline, strategy {starts[0].name!r}: "
                f"{search.refused[starts[0].fingerprint()][1]}; put another one first"
                if starts[0].fingerprint() in search.refused
                else f"the time was over while {found.not_seen}, before the baseline was simulated; give more minutes"
            )
        pick, speedup, timing = found.ranking[0].strategy, found.baseline.ms / found.ranking[0].ms, None
    else:
        if lookahead:
            lookahead.rest(deadline)
        rounds = Rounds(
            clock,
            journal,
            starts[0],
            [one for one in promising(found, starts) if costs.fits(one)],
            search.by_glance,
            seed=bounds.seed,
            first_seed=workload.seeds[0],
            told=told,
        )
        timing = rounds.run()
        # The baseline is timed whether it fits or not.
        best = next((timed for timed in timing.ranking if costs.fits(timed.strategy)), None)
        if best is None:
            raise ValueError(
                f"nothing that fits into {memory_gb} GB was timed to the end, "
                f"{next((f'such as {strategy.name}: {reason}' for strategy, reason in timing.failed), 'nor begun')}; "
                "raise timed, or memory_gb"
            )
        pick, speedup = best.strategy, 1 / best.ratio
        costs.deadline = deadline
        with suppress(OutOfTimeError):
            found = search.around(pick, found)
    pick_ms = next((one.ms for one in found.ranking if one.strategy.fingerprint() == pick.fingerprint()), None)
    costs.deadline = deadline
    return Tuned(
        strategy=pick.replace(name="tuned"),
        baseline=starts[0],
        decided_by="simulated" if timing is None else "measured",
        speedup=speedup,
        choices=choices_of(pick, space, found, pick_ms),
        space=space,
        search=found,
        timing=timing,
        draws=_draws(costs, found, draw_seeds),
        not_seen=found.not_seen,
    )


def _draws(costs: Costs, found: SearchResult, seeds: Sequence[int]) -> tuple[Draws, ...]:
    """Of the fastest and the baseline, on further seeds as far as there is time."""
    if found.baseline is None:
        return ()
    fidelity = Fidelity(tuple(seeds), min(_DRAWN_STEPS, costs.plans.workload.num_steps))
    baseline, shown = found.baseline.strategy, [one.strategy for one in found.ranking[:_DRAWN]]
    if seeds:
        costs.told.stage(f"drawing {len(seeds)} seeds for the fastest {len(shown)} and the baseline", 1 + len(shown))
        with suppress(OutOfTimeError):
            drawn_again = _distinct([baseline, *shown])
            costs.expect(drawn_again, fidelity, never_pruned={one.fingerprint() for one in drawn_again})
            for strategy in drawn_again:
                costs.of(strategy, fidelity, prune=False)
    of_baseline = costs.steps.all_steps_ms(baseline)
    drawn = [
        Draws.of(strategy, costs.steps.all_steps_ms(strategy), of_baseline)
        for strategy in shown
        if strategy != baseline
    ]
    return tuple(draws for draws in drawn if len(draws.own_ms) > 1)


def promising(found: SearchResult, starts: Sequence[Strategy]) -> list[Strategy]:
    """In which order to time: some of the starts; then the fastest of each kind of sharding and overlap by turns, as a
    model that is wrong about a kind is wrong about all of it; points that cannot be simulated last of their kind.
    """
    kinds: dict[tuple[str, str], list[Strategy]] = {}
    # Neighbours of the pick were refused last.
    refused = [strategy for strategy, _ in reversed(found.refused)]
    for strategy in [*(one.strategy for one in found.ranking), *refused]:
        kinds.setdefault((strategy.sharding.kind, strategy.overlap.kind), []).append(strategy)
    by_turns = [strategy for turn in zip_longest(*kinds.values()) for strategy in turn if strategy is not None]
    return _distinct([*starts[1 : 1 + _STARTS_TIMED], *by_turns])


def _distinct(strategies: Iterable[Strategy]) -> list[Strategy]:
    by_fingerprint: dict[str, Strategy] = {}
    for strategy in strategies:
        by_fingerprint.setdefault(strategy.fingerprint(), strategy)
    return list(by_fingerprint.values())
