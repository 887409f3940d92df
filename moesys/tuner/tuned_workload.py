"""The workload that a tuner plans and simulates, and the setting that decides which strategies can be told apart.

Layouts and splits depend on slots, balance, predictor and split, but neither on how experts travel nor on the overlap.
Planning takes most of the time, so all strategies that plan alike share one placement, which is planned once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from moesys.balance.even_split import EvenSplit
from moesys.balance.plan import LayerPlan, StepPlan
from moesys.balance.replay import routing_of
from moesys.balance.static import Static
from moesys.config import ClusterSpec, Declaration, Ep, Fsep, Last, ModelShape, Strategy
from moesys.config.base import LONGEST_NAME
from moesys.config.overlap import Sequential
from moesys.config.workload import Generated, Replay
from moesys.limits import rank_memory
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.step_program import simulated_steps, simulation

# Bytes of plans that are kept; the plans that were used last stay.
MOST_BYTES = 2**30
# The first look simulates this number of steps in all, and each further look this multiple of the look before.
_FIRST_STEPS, _MORE = 2, 4

# The plans of a step's micro-batches.
Step = tuple[StepPlan, ...]


@dataclass(frozen=True)
class SimulatedWorkload:
    """Drawn or recorded routing in the cost model. ``num_steps``: timed steps of each seed."""

    model: ModelShape
    cluster: ClusterSpec
    workload: Replay | Generated
    seeds: tuple[int, ...]
    num_steps: int

    @classmethod
    def of(cls, model: ModelShape, cluster: ClusterSpec, workload: Replay | Generated, seeds: tuple[int, ...]) -> Self:
        """Raises ValueError for a trace that is missing or does not fit."""
        lengths = [routing_of(workload, model, cluster, seed).num_micro_batches for seed in seeds]
        return cls(model, cluster, workload, seeds, (min(lengths) - workload.warmup) // workload.micro_batches)

    def walk(self, strategy: Strategy, seed: int) -> Iterator[Step]:
        """Yields the timed steps, planned from history as in training. Raises ValueError where that is impossible."""
        steps = simulated_steps(strategy, self.model, self.cluster, self.workload, seed)
        return (step.plans for step in steps)

    def step_ms(self, step: Step) -> float:
        """Simulates a step. Raises ValueError for a step that the cost model does not support."""
        return 1000 * simulation(step, RestOfStep.of(self.workload)).length_seconds


@dataclass(frozen=True)
class Fidelity:
    """The part of a workload that a cost is the mean of: the first ``num_steps`` timed steps of ``seeds``."""

    seeds: tuple[int, ...]
    num_steps: int

    def __str__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        return f"{self.num_steps} step{'s' * (self.num_steps > 1)} of seed{'s' * (len(self.seeds) > 1)} {seeds}"


def ladder(workload: SimulatedWorkload) -> tuple[Fidelity, ...]:
    """Returns the looks of a search: from two steps, or one of each seed, to all timed steps. All looks have all seeds,
    because the steps of one seed are alike.
    """
    looks, num_steps = [], -(-_FIRST_STEPS // len(workload.seeds))
    while num_steps < workload.num_steps:
        looks.append(Fidelity(workload.seeds, num_steps))
        num_steps *= _MORE
    return (*looks, Fidelity(workload.seeds, workload.num_steps))


def layers_of(step: Step) -> list[LayerPlan]:
    """Returns the plans of all layers of all micro-batches."""
    return [plan for micro_batch in step for plan in micro_batch.layers]


@dataclass
class _Walk:
    """The steps of one placement and seed that have been planned so far."""

    rest: Iterator[Step]
    steps: list[Step] = field(default_factory=list)
    num_bytes: int = 0


class Plans:
    """Steps of ``workload`` under any strategy."""

    def __init__(self, workload: SimulatedWorkload, most_bytes: int = MOST_BYTES) -> None:
        self.workload, self._most_bytes = workload, most_bytes
        self._walks: OrderedDict[tuple[str, int], _Walk] = OrderedDict()

    def steps(self, strategy: Strategy, seed: int, num_steps: int) -> list[Step]:
        """Returns the first timed steps. Raises ValueError where they cannot be planned."""
        slots_R = strategy.slots(self.workload.model, self.workload.cluster)
        placement = strategy.replace(name="placement", sharding=Fsep(slots_per_rank=slots_R), overlap=Sequential())
        key = (placement.fingerprint(), seed)
        walk = self._walks.pop(key, None) or _Walk(self.workload.walk(placement, seed))
        while len(walk.steps) < num_steps:
            step = next(walk.rest)
            walk.steps.append(step)
            walk.num_bytes += sum(plan.tokens.entries.nbytes + plan.load.tokens_RE.nbytes for plan in layers_of(step))
        self._walks[key] = walk
        while len(self._walks) > 1 and sum(walk.num_bytes for walk in self._walks.values()) > self._most_bytes:
            self._walks.popitem(last=False)
        return [
            tuple(replace(micro_batch, strategy=strategy) for micro_batch in step) for step in walk.steps[:num_steps]
        ]

    def first_layers(self, strategy: Strategy) -> tuple[LayerPlan, ...]:
        """Returns the layers of the first micro-batch."""
        return self.steps(strategy, self.workload.seeds[0], 1)[0][0].layers


@dataclass(frozen=True)
class Setting:
    """The model, cluster and number of layers, which decide which strategies differ and which would run.

    model_layers: layers of the whole model, whose memory counts; None: ``num_layers``. recompute: only one layer's rows
    are kept for backward.
    """

    model: ModelShape
    cluster: ClusterSpec
    num_layers: int
    model_layers: int | None = None
    recompute: bool = False

    def out_of_memory(self, strategy: Strategy, tokens_per_rank: int) -> str:
        """Returns why a rank cannot hold what the strategy needs, or "" if no reason is known."""
        of_model = self.model, self.cluster, self.model_layers or self.num_layers
        memory = rank_memory(strategy, *of_model, tokens_per_rank, recompute=self.recompute)
        return memory.shortage(*of_model[1:])

    def point(self, **parts: Any) -> Strategy | None:
        """Returns the plainest strategy with these fields, named after them, or None where there is none."""
        try:
            strategy = Strategy(name="point", **parts)
            strategy.early_slots(self.model, self.cluster)
        except ValueError:
            return None
        return self.plainest(strategy)

    def plainest(self, strategy: Strategy) -> Strategy:
        """Resets fields that have no effect in this setting, so that equal computations are equal strategies."""
        changes: dict[str, Any] = {}
        sharding, overlap = strategy.sharding, strategy.overlap
        if isinstance(strategy.balance, Static):
            changes |= {"predictor": Last(), "replan_every": 1, "lag": 1}
        if sum(strategy.slots(self.model, self.cluster)) == self.model.num_experts:
            # Every expert has one holder, and all splits send its rows there.
            changes["split"] = EvenSplit()
        one_node = self.cluster.num_nodes == 1 or max(self.cluster.node_sizes) == 1
        flat: dict[str, Any] = {}
        if one_node:
            flat = {"lend": "flat"} if isinstance(sharding, Ep) else {"restore": "flat", "reshard": "flat"}
        ahead = min(sharding.prefetch_layers, self.num_layers - 1)
        changes["sharding"] = sharding.replace(prefetch_layers=ahead, **flat)
        if self.cluster.num_nodes == 1 and not overlap.reaches_memory:
            # No row crosses to another node.
            changes["overlap"] = overlap.replace(node_dispatch="direct", combine="ordered")
        plain = strategy.replace(**changes)
        return plain.replace(name=_name_of(plain)[:LONGEST_NAME])


def _name_of(strategy: Strategy) -> str:
    """Returns a name that lists the fields whose value is not the default."""
    predictor = [] if isinstance(strategy.balance, Static) else [strategy.predictor]
    parts = [strategy.sharding, strategy.balance, *predictor, strategy.split, strategy.overlap]
    shown = [value_words(part) for part in parts]
    shown += [f"replan {strategy.replan_every}"] * (strategy.replan_every > 1)
    shown += [f"lag {strategy.lag}"] * (strategy.lag != 1)
    shown += [f"late {strategy.late_slots}"] * (strategy.late_slots > 0)
    return " + ".join(shown)


def value_words(value: Any) -> str:
    """Returns a field's value as tables and comments show it."""
    if not isinstance(value, Declaration):
        return "none" if value is None else str(value)
    fields = {name: info for name, info in type(value).model_fields.items() if name != "kind"}
    changed = [
        f"{name}={given}" for name, info in fields.items() if (given := getattr(value, name)) != info.get_default()
    ]
    kind: str = getattr(value, "kind", "")
    return f"{kind}({', '.join(changed)})" if changed else kind
