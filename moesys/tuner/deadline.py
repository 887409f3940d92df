"""A limit of minutes: who works asks between two pieces of work whether it is over."""

from __future__ import annotations

import math
import time


class OutOfTimeError(Exception):
    """The limit is over; what was found out until then is in the journal."""


class Deadline:
    """``minutes`` from now on; None: no limit."""

    def __init__(self, minutes: float | None = None) -> None:
        self.minutes = minutes
        self._until_s = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def part(self, share: float) -> Deadline:
        """One that is over when so much of the time that is left is."""
        sooner = Deadline()
        if self.minutes is not None:
            now_s = time.monotonic()
            sooner.minutes, sooner._until_s = self.minutes, now_s + share * (self._until_s - now_s)
        return sooner

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    def check(self) -> None:
        """Raises OutOfTimeError when it is over."""
        if self.is_over:
            raise OutOfTimeError
