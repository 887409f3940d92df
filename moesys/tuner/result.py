"""Says what a tuning decided and why: the strategy, which kind of time chose it, what every other choice would cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from moesys.config import Declared, Strategy
from moesys.config.experiment import Source
from moesys.tuner.search import Alternative, SearchResult
from moesys.tuner.setting import value_words
from moesys.tuner.space import Space
from moesys.tuner.timing import TimingResult


@dataclass(frozen=True)
class Choice:
    """One field of the strategy, a dotted path as in TOML.

    ``next_best``: the best other value of the space, and ``costs``: how much longer a simulated step is with it, 0.02
    for 2 %; at least so much where ``at_least``. Both None where the space or the cost model has no other that goes
    with the other fields, or ``not_seen``, where the time was over before others were looked at.
    """

    field: str
    value: str
    next_best: str | None = None
    costs: float | None = None
    at_least: bool = False
    not_seen: bool = False

    def __str__(self) -> str:
        if self.not_seen:
            return "others were not looked at: the time was over"
        if self.next_best is None or self.costs is None:
            return "no other value goes with the rest"
        if abs(self.costs) < 5e-5:
            return f"{self.next_best} is as fast, simulated"
        if self.costs < 0:
            return f"{self.next_best} would save {-100 * self.costs:.2f} %, simulated; the clock chose otherwise"
        least = "at least " if self.at_least else ""
        return f"{self.next_best} would cost {least}{100 * self.costs:.2f} %, simulated"


@dataclass(frozen=True)
class Draws:
    """Simulated milliseconds of the same steps under a strategy and under the baseline, by draw: a seed, or where there
    is one seed alone, a step of it.
    """

    strategy: Strategy
    own_ms: dict[int, list[float]] = field(hash=False)
    baseline_ms: dict[int, list[float]] = field(hash=False)

    @classmethod
    def of(cls, strategy: Strategy, own_ms: dict[int, list[float]], baseline_ms: dict[int, list[float]]) -> Self:
        """Of what is known of both."""
        lengths = {seed: min(len(own_ms[seed]), len(baseline_ms[seed])) for seed in own_ms if seed in baseline_ms}
        own, baseline = ({seed: ms[seed][:most] for seed, most in lengths.items()} for ms in (own_ms, baseline_ms))
        if len(lengths) == 1:
            own, baseline = ({step: [ms] for step, ms in enumerate(next(iter(of.values())))} for of in (own, baseline))
        return cls(strategy, own, baseline)


@dataclass(frozen=True)
class Tuned:
    """``strategy``: the pick, called ``tuned``. ``decided_by``: which kind of time it is the fastest by; the other kind
    only said where to look. ``speedup``: the baseline's time over its own, both of that kind.

    ``num_combinations`` of the space; ``timing``: None where nothing was timed. ``draws``: of the fastest points in the
    cost model, what tells them from the baseline. ``not_seen``: what the time did not suffice for; "" where it did.
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
    not_seen: str = ""

    def to_toml(self) -> str:
        """The strategy as a file, the reasons beside its fields as comments."""
        counted = f"{self.search.num_points} of {self.space.num_combinations} combinations looked at"
        trials = f", {self.timing.num_trials} timed trials" if self.timing else ""
        head = (
            f"# Found by moesys tune: {counted}{trials}.\n"
            f"# Decided by {self.decided_by} times: {self.speedup:.3f} x as fast as {self.baseline.name!r}.\n"
            "# Beside a field: the best other value that was tried, and what it would cost.\n"
        )
        head += f"# Stopped when the time was over, while {self.not_seen}.\n" if self.not_seen else ""
        reasons = {choice.field: str(choice) for choice in self.choices}
        return head + "\n".join(_commented(self.strategy.to_toml(), reasons)) + "\n"


def choices_of(strategy: Strategy, space: Space, search: SearchResult, step_ms: float | None) -> tuple[Choice, ...]:
    """Every field that the space has values for. ``step_ms``: of ``strategy``, simulated; None if that cannot be."""
    found = []
    for path, value in _fields(strategy, space):
        alternative: Alternative | None = search.alternatives.get(path)
        if alternative is None or step_ms is None:
            found.append(Choice(path, value_words(value), not_seen=bool(search.not_seen)))
            continue
        costs = alternative.ms / step_ms - 1
        found.append(
            Choice(path, value_words(value), value_words(alternative.neighbour.value), costs, alternative.at_least)
        )
    return tuple(found)


def _fields(strategy: Strategy, space: Space) -> Iterator[tuple[str, Any]]:
    """Dotted paths and values, of sharding and overlap field by field."""
    for name in ("sharding", "overlap"):
        part: Declared = getattr(strategy, name)
        kind = getattr(part, "kind", "")
        yield f"{name}.kind", kind
        yield from ((f"{name}.{field}", getattr(part, field)) for field in space.searched_fields(name, kind))
    for name in ("balance", "predictor", "split", "replan_every", "lag", "late_slots"):
        yield name, getattr(strategy, name)


def _commented(toml: str, reasons: dict[str, str]) -> Iterator[str]:
    """Lines of TOML; reasons behind the line of their field, or of the table of their name. A field that is none, for
    which TOML has no word, has a line of its own in its table.
    """
    lines = list(_paths(toml))
    unsaid = reasons.keys() - {path for _, path in lines}
    for line, path in lines:
        yield f"{line}  # {reasons[path]}" if path in reasons else line
        if line.startswith("["):
            yield from (
                f"# {field} is none: {reasons[field]}" for field in sorted(unsaid) if field.startswith(f"{path}.")
            )


def _paths(toml: str) -> Iterator[tuple[str, str]]:
    """Each line, and the dotted path of what it declares."""
    table = ""
    for line in toml.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
            yield line, table
        else:
            yield line, f"{table}.".lstrip(".") + line.partition("=")[0].strip()
