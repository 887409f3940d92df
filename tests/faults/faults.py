"""The list of faults: each seed is a kind of fault, what it strikes, on how many ranks, and when.

The first 12 seeds have all kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY, NUM_LAYERS = 4, 2, 2
QUICK, ALL = 12, 200
NOT_FINITE = ("nan", "inf")
DAMAGES = ("torn file", "foreign file", "other version")
# What each kind strikes, one after another: the first of each are in every run of the tests.
TARGETS_OF = {
    "kill": ("saves", "run", "loop", "convert", "trainer", "tune", "run on ranks", "report"),
    "stop": ("loop", "tune", "trainer", "run", "saves", "convert", "report", "run on ranks"),
    "raise": ("tune", "loop", "run", "trainer"),
    "nan": ("loop",),
    "inf": ("loop",),
    "full disk": ("run", "saves", "tune", "convert", "trainer", "report", "run on ranks", "loop"),
    "torn file": ("report", "loop", "run", "tune", "convert", "trainer"),
    "foreign file": ("convert", "run", "trainer", "report", "tune", "loop"),
    "other version": ("run", "tune", "loop", "report", "trainer", "convert"),
    "removed folder": ("tune", "loop", "run", "convert", "saves", "trainer", "report", "run on ranks"),
    "sigterm": ("convert", "run", "tune", "loop", "run on ranks", "report", "trainer"),
    "ctrl-c": ("run", "loop", "report", "convert", "run on ranks", "tune", "trainer"),
}
KINDS = tuple(TARGETS_OF)
# Their processes are ranks, which train together.
TRAININGS = ("loop", "saves", "trainer")
STRATEGIES = {"trainer": ("ep", "lent", "fsep"), "loop": ("ep", "lent", "fsep", "linked")}


@dataclass(frozen=True)
class Strike:
    """What a process does to itself at a moment: at the tick ``moment`` of ``clock``, which counts from 1.

    size: the share of something that the kind draws. where: the part of a layer that NaN or infinity is put into.
    """

    kind: str
    rank: int
    clock: str
    moment: int
    size: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class Job:
    """One start of a target in ``folder``, over ``num_ranks`` ranks if it is a training.

    collective_s: the time-out of collectives. steps: after which a training stops, as if it had been told to.
    """

    target: str
    folder: Path
    num_ranks: int = 1
    strategy: str = "ep"
    collective_s: float = 60.0
    steps: int = STEPS
    strike: Strike | None = None

    @property
    def inputs(self) -> Path:
        return self.folder / "in"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def num_processes(self) -> int:
        return self.num_ranks if self.target in TRAININGS else 1


@dataclass(frozen=True)
class Fault:
    """A fault of the list. at: when, as a share of the ticks of a run without it. size: as in ``Strike``.

    lasts: whether a stopped rank stays so beyond the time-outs of the others.
    """

    seed: int
    kind: str
    target: str
    num_ranks: int
    strategy: str
    rank: int
    clock: str
    at: float
    size: float
    where: str
    lasts: bool

    @classmethod
    def of(cls, seed: int) -> Fault:
        draw, kind = Random(seed), KINDS[seed % len(KINDS)]
        targets = TARGETS_OF[kind]
        target = targets[seed // len(KINDS) % len(targets)]
        num_ranks = (2 if seed < QUICK else draw.choice((2, 2, 4))) if target in TRAININGS else 1
        strategy = draw.choice(STRATEGIES.get(target, STRATEGIES["loop"])) if target in TRAININGS else "ep"
        rank = draw.randrange(num_ranks)
        clock = "user" if kind == "raise" else draw.choice(("user", "file"))
        clock = "file" if target in ("saves", "convert", "report") else clock
        where = draw.choice(("input", "gradient", "weight"))
        at, size, lasts = draw.random(), draw.random(), draw.random() < 0.5
        return cls(seed, kind, target, num_ranks, strategy, rank, clock, at, size, where, lasts and num_ranks > 1)

    def __str__(self) -> str:
        ranks = f" of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{self.seed}: {self.kind} in {self.target}{ranks}"
