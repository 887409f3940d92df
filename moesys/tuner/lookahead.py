"""Lookahead: has other processes find out what a search will ask for next, while it decides point by point as ever.

What is found out ahead is a pure function of a point, and the search takes it over when it comes to that point. So its
answers, their order and its journal are those of a search without help; a point that is pruned by then was looked at in
vain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from moesys.config import Strategy
from moesys.tuner.deadline import Deadline
from moesys.tuner.step_costs import Fidelity, Seen, StepCosts
from moesys.tuner.workload import MOST_BYTES, Plans, Workload

# Looks that wait for a helper, for each that one works on: enough that none is idle, and few, as the best so far, which
# rules points out, is that of the moment at which they are asked for.
_WAITING = 1
# How often the search asks whether its time is over.
_POLL_S = 0.1


class Helpers(Protocol):
    """Processes that call module-level functions."""

    num_workers: int

    @property
    def are_due(self) -> bool:
        """Whether they shall be used by now."""

    def submit(self, function: Callable[..., Seen], /, *args: Any) -> Future[Seen]: ...


@dataclass(frozen=True)
class Look:
    """A point to find out. ``best_ms``: a bound above it spares the rest; None: nothing does. ``known``: is not found
    out again.
    """

    strategy: Strategy
    fidelity: Fidelity
    best_ms: float | None
    known: Seen


class Lookahead:
    """``helpers`` look at points of ``workload``, which can be pickled."""

    def __init__(self, helpers: Helpers, workload: Workload) -> None:
        self._helpers, self._workload = helpers, workload
        self._most_bytes = MOST_BYTES // helpers.num_workers
        self._to_come: deque[tuple[Strategy, Fidelity]] = deque()
        self._asked: dict[tuple[str, Fidelity], Future[Seen]] = {}
        # Begun, and not wanted any more.
        self._left: set[Future[Seen]] = set()

    def expect(self, points: Iterable[Strategy], fidelity: Fidelity) -> None:
        """These come next, in this order. What was expected and has not come is forgotten."""
        self._left = {answer for answer in self._left if not answer.done()}
        self._left |= {answer for answer in self._asked.values() if not answer.cancel()}
        self._asked.clear()
        self._to_come = deque((point, fidelity) for point in points)

    def rest(self, deadline: Deadline) -> None:
        """Forgets what was expected, and waits until no helper works, or all time is over: a clock is to run."""
        self.expect((), Fidelity((), 0))
        while wait(self._left, _POLL_S).not_done and not deadline.is_over:
            pass

    def take(
        self,
        strategy: Strategy,
        fidelity: Fidelity,
        look: Callable[[Strategy, Fidelity], Look | None],
        check: Callable[[], None],
    ) -> Seen | None:
        """What is known of a point by others; waits for it where one works on it. None: nobody was asked.

        look: what to ask of a point that is still to come; None for nothing. check: called while it waits; may raise.
        Raises ValueError where a helper died of it.
        """
        if not self._helpers.are_due:
            return None
        key = strategy.fingerprint(), fidelity
        self._ask(look)
        while (answer := self._asked.get(key)) is not None and not answer.done():
            check()
            wait(self._running(), _POLL_S, FIRST_COMPLETED)
            self._ask(look)
        if (answer := self._asked.pop(key, None)) is None:
            return None
        try:
            return answer.result()
        except BrokenExecutor as error:
            raise ValueError(
                f"strategy {strategy.name!r}, {fidelity}: {error}; the same call goes on from here"
            ) from None

    def _running(self) -> list[Future[Seen]]:
        return [answer for answer in self._asked.values() if not answer.done()]

    def _ask(self, look: Callable[[Strategy, Fidelity], Look | None]) -> None:
        room = (1 + _WAITING) * self._helpers.num_workers - len(self._running())
        while room > 0 and self._to_come:
            strategy, fidelity = self._to_come.popleft()
            key = strategy.fingerprint(), fidelity
            if key not in self._asked and (asked := look(strategy, fidelity)) is not None:
                self._asked[key] = self._helpers.submit(look_at, self._workload, self._most_bytes, asked)
                room -= 1


def look_at(workload: Workload, most_bytes: int, look: Look) -> Seen:
    """Called in a helper: the bounds, and the steps unless those rule the point out; as far as nothing is refused."""
    costs, strategy, fidelity = _costs_of(workload, most_bytes), look.strategy, look.fidelity
    costs.know(strategy, look.known)
    try:
        if look.best_ms is None or costs.bound_ms(strategy, fidelity) <= look.best_ms:
            costs.steps_ms(strategy, fidelity)
    except ValueError:
        # The search comes upon it by itself, and tells why.
        pass
    return costs.seen(strategy, fidelity.seeds)


@lru_cache(maxsize=1)
def _costs_of(workload: Workload, most_bytes: int) -> StepCosts:
    """Kept in a helper, so that what points have in common is planned once."""
    return StepCosts(Plans(workload, most_bytes), lambda: None)
