"""What became of a check, as the page shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.doctor.checks import Check
from moesys.lab.ranks.outcomes import Outcome
from moesys.lab.show.sheets import Column

State = Literal["passed", "failed", "left out", "to come"]


@dataclass(frozen=True)
class Verdict:
    """says: what was seen, or why it failed or was left out. traces: of ranks that failed, for JSON and the page's end.

    means: what a failure here says; a later one may follow from it.
    """

    name: Annotated[str, Column("check")]
    layer: Annotated[str, Column("layer")]
    state: Annotated[State, Column("verdict", lambda state: "FAILED" if state == "failed" else state)]
    says: Annotated[str, Column("what was seen, or why not")]
    seconds: Annotated[float | None, Column("s", ".1f")]
    budget_s: Annotated[float, Column("at most, s", ".0f")]
    proves: Annotated[str, Column("what it proves")]
    traces: Mapping[str, str]


def verdict(check: Check, state: State, says: str, seconds: float | None = None, **traces: str) -> Verdict:
    return Verdict(check.name, check.layer, state, says, seconds, check.budget_s, check.proves, traces)


def verdict_of(check: Check, outcomes: Sequence[Outcome], seconds: float) -> Verdict:
    """Of what became of its ranks: one that failed fails it, one where it could not be made leaves it out."""
    if check.dies:
        outcomes = [outcome for outcome in outcomes if outcome.rank < len(outcomes) - 1]
    # Peers raise because of a death, and what raises is heard before what is silent.
    order = ("died", "raised", "silent")
    failed = sorted(
        (outcome for outcome in outcomes if outcome.kind != "returned"),
        key=lambda outcome: (order.index(outcome.kind), outcome.ended_s),
    )
    if failed:
        traces = {f"rank {outcome.rank}": outcome.trace for outcome in failed if outcome.trace}
        which = f"rank {failed[0].rank} " if len(outcomes) > 1 else ""
        others = f" ({len(failed)} of {len(outcomes)} ranks failed)" if len(failed) > 1 else ""
        return Verdict(
            check.name,
            check.layer,
            "failed",
            f"{which}{failed[0].reason}{others}",
            seconds,
            check.budget_s,
            check.proves,
            traces,
        )
    said = [outcome.result for outcome in outcomes]
    missing = [of_rank.line for of_rank in said if not of_rank.made]
    return verdict(check, "left out" if missing else "passed", (missing or [said[0].line])[0], seconds)


def why_not(check: Check, done: Mapping[str, Verdict]) -> str:
    """Why ``check`` would say nothing after what is ``done``; "" where it would.

    A check that was left out for want of something keeps none from being made that could do without it.
    """
    for name in check.after:
        if name in done and done[name].state == "failed":
            return f"needs what '{name}' proves, which failed"
        if name in done and done[name].seconds is None:
            return f"needs what '{name}' proves, which was left out: {done[name].says}"
    return ""
