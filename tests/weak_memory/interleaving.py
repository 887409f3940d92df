"""Greenlets that take turns as a seed says: any of them may be held up at any load, store or atomic, for any time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

# Steps until the next turn, in the mean: of these a schedule has one.
STEPS = (1, 3, 10, 40)
# How often one comes to its turn, beside another; turns until that is drawn anew.
WEIGHTS, TURNS = (1.0, 1.0, 1.0, 0.05, 0.002), 60
# More turns than any schedule has that goes on.
MOST_TURNS = 200_000


class DeadlockError(RuntimeError):
    """Everybody waits, and nothing is on its way."""


@dataclass(eq=False)
class Strand:
    """One greenlet. ``waits``: for what, and whether it may go on; None while it can."""

    name: str
    run: greenlet
    weight: float = 1.0
    waits: tuple[str, Callable[[], bool]] | None = None


class Interleaving:
    """Strands of one schedule. ``on_stall`` is asked when all wait: whether something can go on now."""

    def __init__(self, choices: random.Random, on_stall: Callable[[], bool]) -> None:
        self._choices, self._on_stall = choices, on_stall
        self._mean = choices.choice(STEPS)
        self._strands: list[Strand] = []
        self._hub = getcurrent()
        self._left = self._draw()
        self.turns = 0
        self.steps = 0
        self.current: Strand | None = None

    def begin(self, name: str, work: Callable[[], Any]) -> Strand:
        """A new strand, which ends with ``work``."""
        strand = Strand(name, greenlet(work, parent=self._hub), self._weight())
        self._strands.append(strand)
        return strand

    def run(self) -> None:
        """Until all strands have ended. Raises what one of them raises, and ``DeadlockError``."""
        try:
            while self._strands:
                self._turn()
        finally:
            for strand in self._strands:
                if not strand.run.dead:
                    strand.run.throw(GreenletExit)
            self._strands.clear()

    def step(self) -> None:
        """Of the strand that runs: it may be another's turn now."""
        self.steps += 1
        self._left -= 1
        if self._left <= 0:
            self._hub.switch()

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Of the strand that runs: until ``ready``."""
        strand = self.current
        assert strand is not None
        strand.waits = (what, ready)
        while not ready():
            self._hub.switch()
        strand.waits = None

    def _turn(self) -> None:
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise DeadlockError("it goes on and on: " + self._who())
        if self.turns % TURNS == 0:
            for strand in self._strands:
                strand.weight = self._weight()
        able = [strand for strand in self._strands if strand.waits is None or strand.waits[1]()]
        if not able:
            if self._on_stall():
                return
            raise DeadlockError("all wait: " + self._who())
        (strand,) = self._choices.choices(able, [each.weight for each in able])
        self._left = self._draw()
        self.current = strand
        strand.run.switch()
        if strand.run.dead:
            self._strands.remove(strand)

    def _who(self) -> str:
        return "; ".join(f"{each.name} for {each.waits[0] if each.waits else 'its turn'}" for each in self._strands)

    def _draw(self) -> int:
        return 1 + int(self._choices.expovariate(1.0) * (self._mean - 1))

    def _weight(self) -> float:
        return self._choices.choice(WEIGHTS)
