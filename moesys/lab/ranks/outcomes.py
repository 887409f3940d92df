"""Tells what became of the ranks of one run: each one's outcome, and the error that tells of those that failed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Outcome:
    """What became of one rank in one run.

    Attributes:
        rank: the rank.
        kind: "returned"; "raised" an exception; "died" (it exited or was killed); "silent" (no answer in time).
        seconds: what the function took on the rank; for "died" and "silent", from the start of the run to the end.
        ended_s: `time.monotonic()` at the end, comparable between ranks.
        result: what the function returned; None for every other kind.
        reason: one line that continues "rank 2 …", such as "was killed by signal 9"; empty for "returned".
        trace: the traceback of "raised", the stacks of a "silent" rank where it could tell them, else empty.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "silent"]
    seconds: float
    ended_s: float
    result: Any = None
    reason: str = ""
    trace: str = ""


class RankError(RuntimeError):
    """Some ranks of a run failed; the message holds every one's reason and traceback.

    Attributes:
        failures: rank to traceback, or to the reason where there is none; the first to fail comes first, where a
            death counts as earlier than an exception (peers raise because of it), and silence as later.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        order = ("died", "raised", "silent")
        failed = sorted(
            (outcome for outcome in outcomes if outcome.kind != "returned"),
            key=lambda outcome: (order.index(outcome.kind), outcome.ended_s),
        )
        self.failures = {outcome.rank: _failure_text(outcome) for outcome in failed}
        ranks_by_reason: dict[str, list[str]] = {}
        for outcome in failed:
            ranks_by_reason.setdefault(outcome.reason, []).append(str(outcome.rank))
        reasons = "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} {reason}"
            for reason, ranks in ranks_by_reason.items()
        )
        traces = [f"\n\nrank {outcome.rank}:\n{outcome.trace.rstrip()}" for outcome in failed if outcome.trace]
        super().__init__(f"{len(failed)} of {len(outcomes)} ranks failed: {reasons}{''.join(traces)}")


def _failure_text(outcome: Outcome) -> str:
    if outcome.kind == "silent" and outcome.trace:
        return f"{outcome.reason}; it was in:\n{outcome.trace}"
    return outcome.trace or outcome.reason
