"""Experiments: strategies that run on one workload to be compared.

The workload is the same for every strategy, seed by seed, so that trials can be paired. Nothing here imports torch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import Declaration, Seed
from moesys.config.cluster import ClusterSpec
from moesys.config.model import ModelShape
from moesys.config.strategy import Oracle, Strategy
from moesys.config.workload import ModelTraining, RealTraining, Replay, Training, Workload

Source = Literal["measured", "simulated"]


@dataclass(frozen=True)
class Trial:
    """One strategy under one seed. ``repeat`` counts the further runs of the baseline, which show drift."""

    strategy: Strategy
    seed: int
    identity: str
    repeat: int = 0


class Experiment(Declaration):
    """Strategies on one workload, seed by seed. The first strategy is the baseline.

    ``model`` may be left out where ``workload=ms.models.ModelTraining(...)`` says it. ``seeds`` is the total: an
    experiment that is run again adds nothing to seeds that are done.
    """

    display_fields: ClassVar[frozenset[str]] = frozenset({"name", "description"})

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, description="names the run folder")
    description: str = Field("", description="the question, in a line; not part of the fingerprint")
    # None is never the value: an experiment without it is refused or filled in before.
    model: ModelShape = Field(default=None, validate_default=True)
    """The layer that is computed; left out with `ModelTraining`."""
    cluster: ClusterSpec = Field(description="where strategies run, or are simulated")
    strategies: tuple[Strategy, ...] = Field(min_length=1)
    """Strategies that are compared; the first is the baseline."""
    workload: Workload = Field(description="what is trained, generated or replayed")
    seeds: tuple[Seed, ...] = Field(tuple(range(8)), min_length=1)
    """Seeds of trials; strategies are paired by seed."""
    repeat_baseline: bool = Field(False, description="run the baseline twice per seed; the second is a row of its own")

    @model_validator(mode="before")
    @classmethod
    def _with_model(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or "model" in fields:
            return fields
        workload = fields.get("workload")
        if isinstance(workload, dict) and workload.get("kind") == "model_training":
            workload = ModelTraining.model_validate(workload)
        if not isinstance(workload, ModelTraining):
            raise ValueError(
                "model is missing; declare model=ModelShape(...), as only ms.models.ModelTraining says it by itself"
            )
        return fields | {"model": workload.shape, "workload": workload}

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [strategy.name for strategy in self.strategies]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"strategies share the name {repeated[0]!r}; a table needs a name for each")
        named: dict[str, str] = {}
        for strategy in self.strategies:
            if (other := named.setdefault(strategy.fingerprint(), strategy.name)) != strategy.name:
                raise ValueError(
                    f"strategies {other!r} and {strategy.name!r} are one strategy under two names, with the same "
                    "trials; leave one out, or see noise and drift with repeat_baseline=True"
                )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)} repeats a seed, which would add nothing; give each once")
        if isinstance(self.workload, Replay) and "{seed}" not in self.workload.trace and len(self.seeds) > 1:
            raise ValueError(
                f"trace={self.workload.trace!r} is one routing for {len(self.seeds)} seeds, so their trials are equal; "
                "use seeds=(0,), or a file a seed and {seed} in the path"
            )
        for strategy in self.strategies:
            try:
                strategy.slots(self.model, self.cluster)
            except ValueError as error:
                raise ValueError(f"strategy {strategy.name!r}: {error}") from None
            if isinstance(self.workload, RealTraining):
                self._check_trains(strategy)
        if isinstance(self.workload, Training) and self.model.hidden_size % self.workload.num_heads:
            raise ValueError(
                f"num_heads={self.workload.num_heads} does not divide hidden_size={self.model.hidden_size}; "
                "choose a divisor"
            )
        if isinstance(self.workload, ModelTraining) and self.model != self.workload.shape:
            trained = self.workload.shape
            name = next(name for name, value in self.model if value != getattr(trained, name))
            raise ValueError(
                f"model has {name}={getattr(self.model, name)!r}, and {self.workload.model!r}, which the workload "
                f"trains, has {getattr(trained, name)!r}; leave model out, or use model=workload.shape"
            )
        return self

    def _check_trains(self, strategy: Strategy) -> None:
        if isinstance(strategy.predictor, Oracle):
            raise ValueError(
                f"strategy {strategy.name!r}: predictor=Oracle() plans for loads that are still to come, and "
                f"workload={type(self.workload).__name__}() knows none before they do; use workload=Replay(...) or "
                "Generated(...), or predictor=Adaptive()"
            )
        if isinstance(self.workload, ModelTraining) and strategy.overlap.reaches_memory:
            raise ValueError(
                f"strategy {strategy.name!r}: overlap=MegaKernel() is not for transformers' experts yet; use "
                "Sequential() or Pipelined(chunks=...), or workload=Training(...)"
            )

    @property
    def source(self) -> Source:
        """The source of its numbers: the clock or the cost model."""
        return "measured" if isinstance(self.workload, RealTraining) else "simulated"

    @property
    def baseline(self) -> Strategy:
        return self.strategies[0]

    def trial(self, strategy: Strategy, seed: int, repeat: int = 0) -> Trial:
        """Returns a trial. Its identity is made of everything that it computes, and of no display name."""
        parts = (strategy, self.model, self.cluster, self.workload)
        identity = "-".join([*(part.fingerprint()[:12] for part in parts), str(seed), *([f"r{repeat}"] * (repeat > 0))])
        return Trial(strategy, seed, identity, repeat)

    def trials(self) -> tuple[Trial, ...]:
        """Returns all trials in the order in which they run: seed by seed, strategies shuffled by the seed."""
        trials: list[Trial] = []
        for seed in self.seeds:
            of_seed = [self.trial(strategy, seed) for strategy in self.strategies]
            if self.repeat_baseline:
                of_seed.append(self.trial(self.baseline, seed, repeat=1))
            random.Random(seed).shuffle(of_seed)
            trials += of_seed
        return tuple(trials)
