"""The harness of the benchmarks: contestants are checked first, and those that are right are timed, interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.stopwatch import Work, interleave, wall_ms


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a case.

    results: does the work and returns what is checked. works: the functions that are timed, by name, such as "forward".
    metrics: returns other measurements of a contestant that was timed; called after all repetitions.
    """

    results: Callable[[], Any]
    works: Mapping[str, Work]
    metrics: Callable[[], Any] = _nothing


@dataclass(frozen=True)
class Case:
    """The contestants of one table, on one rank or at once on all ranks of the default process group.

    setups: constructors of the contestants, by name, in the order in which they are checked.
    wrong: returns why a contestant of this name with these results is not timed, or "".
    before: runs before each check and each work and is not timed. after_check: runs after each check, to free memory.
    warm_up: runs once, between the checks and the times.
    all_or_none: whether no contestant is timed if one is wrong.
    """

    setups: Mapping[str, Callable[[], Contestant]]
    wrong: Callable[[str, Any], str]
    before: Work = _nothing
    after_check: Work = _nothing
    warm_up: Work = _nothing
    stopwatch: Callable[[Work], float] = wall_ms
    all_or_none: bool = False


@dataclass
class Outcome:
    """The result of one contestant. wrong: why it was not timed, or "". samples_ms: by work and repetition."""

    wrong: str = ""
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    metrics: Any = None


def hold(case: Case, repeats: int, tell: Callable[[str], None] = _nothing) -> dict[str, Outcome]:
    """Checks all contestants and times those that are right, by name; without ``repeats`` it only checks.

    A repetition runs all works once, in random order. A contestant that raises is wrong from then on, and the others
    continue. With several ranks the error is raised instead, and a contestant that is wrong on one rank is timed on
    none, because ranks wait for one another.
    """
    outcomes = {name: Outcome() for name in case.setups}
    ready: dict[str, Contestant] = {}

    def attempt(name: str, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            if dist.is_initialized():
                raise
            outcomes[name].wrong = in_a_line(error)
            return math.nan

    def check(name: str, setup: Callable[[], Contestant]) -> None:
        ready[name] = setup()
        case.before()
        outcomes[name].wrong = case.wrong(name, ready[name].results())

    for name, setup in case.setups.items():
        tell(f"check {name}")
        attempt(name, partial(check, name, setup))
        case.after_check()
    tell("time")
    is_wrong = _on_any_rank([bool(outcome.wrong) for outcome in outcomes.values()])
    if not repeats or (case.all_or_none and any(is_wrong)):
        return outcomes
    right = [name for name, wrong in zip(outcomes, is_wrong, strict=True) if not wrong]

    def timed(name: str, work: Work) -> float:
        if outcomes[name].wrong:
            return math.nan
        return float(attempt(name, partial(case.stopwatch, work)))

    case.warm_up()
    works = {(name, label): partial(timed, name, work) for name in right for label, work in ready[name].works.items()}
    samples_ms = interleave(works, repeats, before=case.before)
    for name in right:
        outcomes[name].metrics = attempt(name, ready[name].metrics)
    for (name, label), of_work_ms in samples_ms.items():
        if not outcomes[name].wrong:
            outcomes[name].samples_ms[label] = of_work_ms
    return outcomes


def of_all_ranks(by_rank: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """Merges the outcomes of all ranks: the slowest rank's time in each repetition, and the list of their metrics."""
    found = {}
    for name, first in by_rank[0].items():
        of_ranks = [outcomes[name] for outcomes in by_rank]
        samples_ms = {
            work: [max(times) for times in zip(*(outcome.samples_ms[work] for outcome in of_ranks), strict=True)]
            for work in first.samples_ms
        }
        wrong = "; ".join(outcome.wrong for outcome in of_ranks if outcome.wrong)
        found[name] = Outcome(wrong, samples_ms, [outcome.metrics for outcome in of_ranks])
    return found


class EqualBits:
    """A ``Case.wrong`` that wants the bits of the first contestant's results, which are tensors by name.

    names: the names of the results that are compared; all by default.
    """

    def __init__(self, *names: str) -> None:
        self._names: tuple[str, ...] = names
        self._expected: Mapping[str, Tensor] | None = None

    def __call__(self, name: str, results: Mapping[str, Tensor]) -> str:
        if self._expected is None:
            self._expected = results
        return in_words(differing(results, self._expected, self._names))


class Near:
    """A ``Case.wrong`` that wants a ``relative_difference`` of at most ``tolerance`` from the first one's results.

    first: the name of the first contestant, for messages.
    """

    def __init__(self, tolerance: float, first: str) -> None:
        self._tolerance, self._first = tolerance, first
        self._expected: Mapping[str, Tensor] | None = None

    def __call__(self, name: str, results: Mapping[str, Tensor]) -> str:
        if self._expected is None:
            self._expected = results
        errors = {part: relative_difference(results[part], wanted) for part, wanted in self._expected.items()}
        worst = max(errors, key=lambda part: errors[part])
        return "" if errors[worst] <= self._tolerance else f"{worst} differs from {self._first} by {errors[worst]:.1e}"


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Returns ‖actual - expected‖ / ‖expected‖; NaN counts as infinite."""
    difference = (actual.float() - expected.float()).norm() / expected.float().norm()
    return float(difference.nan_to_num(nan=torch.inf))


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], names: Sequence[str] = ()) -> list[str]:
    """Returns the names of results that differ or are missing, among ``names`` or all that are expected."""
    return [name for name in names or expected if name not in found or not torch.equal(found[name], expected[name])]


def in_words(names: Sequence[str]) -> str:
    """Returns ``y, dx differ``, or "" without names."""
    return f"{', '.join(names)} differ{'s' * (len(names) == 1)}" if names else ""


def in_a_line(error: BaseException) -> str:
    """Returns the class of an error and the first line of its message that is not blank."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next((line for line in lines if line), '')}"[:200]


def _on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Returns flags that are set on any rank. All ranks must time the same works, because they wait for one another."""
    if not dist.is_initialized():
        return list(flags)
    counted = torch.tensor(flags, dtype=torch.int64)
    dist.all_reduce(counted, dist.ReduceOp.MAX)
    return [bool(flag) for flag in counted.tolist()]
