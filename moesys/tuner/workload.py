"""Plans a workload for many strategies: those that plan alike share their plans.

Layouts and splits depend on slots, balance, predictor and split, and neither on how experts travel nor on what runs
beside what. Planning takes most of the time, so each placement is walked once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from moesys.balance.plan import LayerPlan, StepPlan
from moesys.config import ClusterSpec, Fsep, ModelShape, Sequential, Strategy
from moesys.load import LoadMatrix

# Plans of so many bytes are remembered, those used last.
MOST_BYTES = 2**30


# The plans of a step's micro-batches.
Step = tuple[StepPlan, ...]


class Workload(Protocol):
    """What the lab knows of an experiment."""

    def __hash__(self) -> int: ...

    @property
    def model(self) -> ModelShape: ...

    @property
    def cluster(self) -> ClusterSpec: ...

    @property
    def recompute(self) -> bool:
        """Whether forward is computed again, so that only one layer's rows are kept for backward."""

    @property
    def seeds(self) -> tuple[int, ...]: ...

    @property
    def num_steps(self) -> int:
        """Timed steps that each seed has."""

    def walk(self, strategy: Strategy, seed: int) -> Iterator[Step]:
        """The timed steps, planned from history as in training. Raises ValueError where that cannot be."""

    def step_ms(self, step: Step) -> float:
        """Simulated. Raises ValueError for what the cost model does not know."""


def layers_of(step: Step) -> list[LayerPlan]:
    """All layers of all micro-batches."""
    return [plan for micro_batch in step for plan in micro_batch.layers]


@dataclass
class _Walk:
    """Steps of one placement and seed as far as anybody has asked for them."""

    rest: Iterator[Step]
    steps: list[Step] = field(default_factory=list)
    num_bytes: int = 0

    def first(self, num_steps: int) -> list[Step]:
        while len(self.steps) < num_steps:
            # What comes before does not change a step's time, and would be kept with it.
            step = tuple(replace(micro_batch, previous=None) for micro_batch in next(self.rest))
            self.steps.append(step)
            self.num_bytes += sum(plan.tokens.entries.nbytes + plan.load.tokens_RE.nbytes for plan in layers_of(step))
        return self.steps[:num_steps]


class Plans:
    """Steps of ``workload`` under any strategy."""

    def __init__(self, workload: Workload, most_bytes: int = MOST_BYTES) -> None:
        self.workload, self._most_bytes = workload, most_bytes
        self._walks: OrderedDict[tuple[str, int], _Walk] = OrderedDict()
        self._loads: dict[int, list[tuple[LoadMatrix, ...]]] = {}

    def steps(self, strategy: Strategy, seed: int, num_steps: int) -> list[Step]:
        """The first timed steps. Raises ValueError where they cannot be planned."""
        placement = self.placement(strategy)
        key = (placement.fingerprint(), seed)
        walk = self._walks.pop(key, None) or _Walk(self.workload.walk(placement, seed))
        steps = walk.first(num_steps)
        self._walks[key] = walk
        while len(self._walks) > 1 and sum(walk.num_bytes for walk in self._walks.values()) > self._most_bytes:
            self._walks.popitem(last=False)
        return [tuple(replace(micro_batch, strategy=strategy) for micro_batch in step) for step in steps]

    def loads(self, like: Strategy, seed: int, num_steps: int) -> list[tuple[LoadMatrix, ...]]:
        """What routers want in those steps, by micro-batch and layer: the same under every strategy, so any will do."""
        if len(self._loads.get(seed, ())) < num_steps:
            steps = self.steps(like, seed, num_steps)
            self._loads[seed] = [tuple(plan.load for plan in layers_of(step)) for step in steps]
        return self._loads[seed][:num_steps]

    def placement(self, strategy: Strategy) -> Strategy:
        """The strategy that plans as this one does and is plain in all else."""
        slots_R = strategy.slots(self.workload.model, self.workload.cluster)
        return strategy.replace(name="placement", sharding=Fsep(slots_per_rank=slots_R), overlap=Sequential())
