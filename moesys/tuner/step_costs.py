"""Finds out what single steps take, each once: bounds of their plans, and simulated milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moesys.balance.plan import out_of_rows
from moesys.config import Strategy
from moesys.tuner.bounds import plan_bound_ms
from moesys.tuner.workload import Plans, Step, layers_of


@dataclass(frozen=True)
class Fidelity:
    """How much of the workload a cost is the mean of: the first ``num_steps`` timed steps of ``seeds``."""

    seeds: tuple[int, ...]
    num_steps: int

    def __str__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        return f"{self.num_steps} steps of seed{'s' * (len(self.seeds) > 1)} {seeds}"


@dataclass(frozen=True)
class Seen:
    """What is known of a strategy's first steps, in milliseconds, by seed."""

    bounds_ms: Mapping[int, list[float]]
    steps_ms: Mapping[int, list[float]]


class StepCosts:
    """Costs of the steps of ``plans``. ``check`` is called before each is found out; may raise."""

    def __init__(self, plans: Plans, check: Callable[[], None]) -> None:
        self.plans, self._check = plans, check
        self._bounds_ms: dict[tuple[str, int], list[float]] = {}
        self._steps_ms: dict[tuple[str, int], list[float]] = {}

    def bound_ms(self, strategy: Strategy, fidelity: Fidelity) -> float:
        """The mean of bounds. Raises ValueError where a step cannot be planned."""
        bounds = (self._first(self._bounds_ms, plan_bound_ms, strategy, seed, fidelity) for seed in fidelity.seeds)
        return mean([ms for of_seed in bounds for ms in of_seed])

    def steps_ms(self, strategy: Strategy, fidelity: Fidelity) -> dict[int, list[float]]:
        """Simulated, by seed. Raises ValueError where a step is refused."""
        return {
            seed: self._first(self._steps_ms, self._simulated_ms, strategy, seed, fidelity) for seed in fidelity.seeds
        }

    def seen(self, strategy: Strategy, seeds: Sequence[int]) -> Seen:
        of = strategy.fingerprint()
        return Seen(
            *({seed: list(known.get((of, seed), ())) for seed in seeds} for known in (self._bounds_ms, self._steps_ms))
        )

    def know(self, strategy: Strategy, seen: Seen) -> None:
        """Takes over what somebody else has found out."""
        of = strategy.fingerprint()
        for known, more in ((self._bounds_ms, seen.bounds_ms), (self._steps_ms, seen.steps_ms)):
            for seed, values in more.items():
                there = known.setdefault((of, seed), [])
                there += values[len(there) :]

    def all_steps_ms(self, strategy: Strategy) -> dict[int, list[float]]:
        """Of all steps that are simulated by now, by seed."""
        of = strategy.fingerprint()
        return {seed: ms for (fingerprint, seed), ms in self._steps_ms.items() if fingerprint == of and ms}

    def _first(
        self,
        known: dict[tuple[str, int], list[float]],
        find_out: Callable[[Step], float],
        strategy: Strategy,
        seed: int,
        fidelity: Fidelity,
    ) -> list[float]:
        """What ``find_out`` says of the first steps of a seed, each of which is asked for once."""
        values = known.setdefault((strategy.fingerprint(), seed), [])
        if len(values) < fidelity.num_steps:
            self._check()
            for step in self.plans.steps(strategy, seed, fidelity.num_steps)[len(values) :]:
                self._check()
                values.append(find_out(step))
        return values[: fidelity.num_steps]

    def _simulated_ms(self, step: Step) -> float:
        if reason := out_of_rows(step[0].strategy, self.plans.workload.model, layers_of(step)):
            raise ValueError(reason)
        return self.plans.workload.step_ms(step)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
