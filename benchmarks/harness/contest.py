"""The contest that benches hold: contestants are checked first, and those that are right take turns at the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesys.lab.runs.stopwatch import Work, interleave, wall_ms


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a case.

    results: does it and gives what is checked. works: what is timed, by name, such as "forward" and "backward".
    metrics: whatever else is to be known of one that was timed; read when all repetitions are over.
    """

    results: Callable[[], Any]
    works: Mapping[str, Work]
    metrics: Callable[[], Any] = _nothing


@dataclass(frozen=True)
class Case:
    """What contestants compete in, on one rank or at once on all ranks of the default process group.

    setups: what makes each contestant, by name, in the order in which they are checked.
    wrong: told a name and its results, why that contestant may not be timed; "" where it may.
    before: runs before each check and each work and is not timed; after_check: after each check, as to free memory.
    all_or_none: one that is wrong leaves all others untimed too.
    """

    setups: Mapping[str, Callable[[], Contestant]]
    wrong: Callable[[str, Any], str]
    before: Work = _nothing
    after_check: Work = _nothing
    stopwatch: Callable[[Work], float] = wall_ms
    all_or_none: bool = False


@dataclass
class Outcome:
    """Of one contestant. wrong: why it was not timed, "" where it was. samples_ms: by work and repetition."""

    wrong: str = ""
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    metrics: Any = None


def hold(case: Case, repeats: int, tell: Callable[[str], None] = _nothing) -> dict[str, Outcome]:
    """Checks all contestants and times those that are right, by name; no repetition only checks.

    All works take turns within a repetition. A contestant that raises is wrong from then on, and the rest goes on; with
    ranks that wait for one another the error is raised. There, who is wrong on one rank is timed on none.
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

    works = {(name, label): partial(timed, name, work) for name in right for label, work in ready[name].works.items()}
    samples_ms = interleave(works, repeats, before=case.before)
    for name in right:
        outcomes[name].metrics = attempt(name, ready[name].metrics)
    for (name, label), of_work_ms in samples_ms.items():
        if not outcomes[name].wrong:
            outcomes[name].samples_ms[label] = of_work_ms
    return outcomes


def of_all_ranks(by_rank: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """Of contests that ranks held together: in each repetition the slowest rank's time, and a list of all metrics."""
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
    """``Case.wrong`` of contestants whose results, tensors by name, must have the bits of the first one's.

    names: of the results that are compared; all by default.
    """

    def __init__(self, *names: str) -> None:
        self._names: tuple[str, ...] = names
        self._expected: Mapping[str, Tensor] | None = None

    def __call__(self, name: str, results: Mapping[str, Tensor]) -> str:
        if self._expected is None:
            self._expected = results
        return in_words(differing(results, self._expected, self._names))


class Near:
    """``Case.wrong`` of contestants whose results, tensors by name, must be those of the first: none farther from it
    than ``tolerance``, by ``relative_difference``. ``first``: its name, in words.
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
    """The names of results whose bits differ, or that are missing; of ``names``, or of all that are expected."""
    return [name for name in names or expected if name not in found or not torch.equal(found[name], expected[name])]


def in_words(names: Sequence[str]) -> str:
    """``y, dx differ``; nothing for none."""
    return f"{', '.join(names)} differ{'s' * (len(names) == 1)}" if names else ""


def in_a_line(error: BaseException) -> str:
    """What an error is and the first line that says something."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next((line for line in lines if line), '')}"[:200]


def _on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """The same on every rank: whoever timed what another does not would wait for it for ever."""
    if not dist.is_initialized():
        return list(flags)
    counted = torch.tensor(flags, dtype=torch.int64)
    dist.all_reduce(counted, dist.ReduceOp.MAX)
    return [bool(flag) for flag in counted.tolist()]
