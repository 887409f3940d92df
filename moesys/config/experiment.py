"""What people declare to compare strategies: a workload, and an experiment that runs strategies on it.

The workload is the same for every strategy, seed by seed, so that trials can be paired. Nothing here imports torch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import Declared
from moesys.config.cluster import ClusterSpec
from moesys.config.model import ModelShape
from moesys.config.predictor import Oracle
from moesys.config.strategy import Strategy

Source = Literal["measured", "simulated"]

# 100 Gbit/s: more than the memory of one machine moves between processes.
MAX_SHAPED_GB_PER_S = 12.5


class Training(Declared):
    """Real training on real ranks: a byte-level language model on the source code of Python's standard library.

    Every rank is a data-parallel replica of embedding, attention and router; the ranks share the experts of each block.
    """

    kind: Literal["training"] = "training"
    num_layers: int = Field(2, ge=1, description="blocks of attention and experts")
    num_heads: int = Field(4, ge=1)
    context: int = Field(128, ge=2, description="bytes of a sequence")
    batch: int = Field(4, ge=1, description="sequences of a rank in a micro-batch")
    micro_batches: int = Field(1, ge=1, description="forward and backward passes of a step")
    warmup: int = Field(3, ge=0, description="first steps, which are trained and recorded but not timed")
    steps: int = Field(30, ge=1, description="timed steps after the warm-up")
    learning_rate: float = Field(1e-3, gt=0, description="of Adam")
    max_grad_norm: float = Field(1.0, gt=0)
    recompute: bool = Field(False, description="activation checkpointing of every block")
    interpret: bool = Field(
        False, description="experts by the GPU's kernels, on the CPU in Triton's interpreter; its times mean nothing"
    )
    shaped_links: bool = Field(
        False,
        description="nodes are network namespaces of this machine, as far apart as the cluster declares",
    )
    cpus_per_host: float | None = Field(
        None,
        ge=0.01,
        le=1000,
        description="of shaped_links: processors that the ranks of a node have together; None: as many as they can get",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where ranks compute; cuda: each on a GPU of its host")

    @model_validator(mode="after")
    def _shares_are_of_hosts(self) -> Self:
        if self.cpus_per_host is not None and not self.shaped_links:
            raise ValueError(
                f"cpus_per_host={self.cpus_per_host:g} is of hosts with shaped links; use shaped_links=True or leave "
                "cpus_per_host out"
            )
        return self

    @model_validator(mode="after")
    def _interprets_on_the_cpu(self) -> Self:
        if self.interpret and self.device != "cpu":
            raise ValueError(f"interpret=True runs kernels on the CPU, so device={self.device!r} is not used; drop one")
        return self


class Simulated(Declared):
    """What a workload of the cost model says of the rest of a step, which moves and computes the same under every
    strategy.
    """

    micro_batches: int = Field(1, ge=1, description="forward and backward passes of a step, each with its own plans")
    other_ms: float = Field(
        0.0, ge=0, description="forward of the rest of a layer, such as attention; backward takes twice that"
    )
    recompute: Literal["none", "layers", "computing"] = Field(
        "none", description="in backward run layers forward again: whole, or computing alone, keeping what travelled"
    )
    optimizer_ms: float = Field(0.0, ge=0, description="at the end of a step")


class Replay(Simulated):
    """Recorded routing through the cost model: trace files of ``moesys.traces``.

    A trace of fewer ranks than the cluster has is folded: consecutive micro-batches become further source ranks.
    """

    kind: Literal["replay"] = "replay"
    trace: str = Field(min_length=1, description="path of the trace file; {seed} in it becomes the trial's seed")
    warmup: int = Field(0, ge=0, description="first micro-batches, which planners see and nobody times")
    tokens_per_rank: int | None = Field(None, ge=1, description="scale every rank to so many tokens; None: as recorded")


class Generated(Simulated):
    """Drawn routing through the cost model, with a declared skew.

    ``skew`` is the standard deviation of the logarithm of expert popularity (log-normal), or the exponent (Zipf).
    ``drift`` is the share of an expert's log-popularity that is drawn anew at each step; ``spread`` the standard
    deviation of each source rank's own log-preference around it, which drifts as slowly. ``concentration``: tokens of a
    document are alike, so a rank's shares in one micro-batch stray as if it had only so many tokens.
    """

    kind: Literal["generated"] = "generated"
    distribution: Literal["uniform", "log_normal", "zipf"] = "log_normal"
    skew: float = Field(1.0, ge=0, le=100)
    drift: float = Field(0.05, ge=0, le=1)
    spread: float = Field(0.1, ge=0)
    concentration: float | None = Field(
        None, gt=0, description="of a Dirichlet distribution around the shares; None: no straying"
    )
    num_layers: int = Field(2, ge=1)
    tokens_per_rank: int = Field(16384, ge=1)
    warmup: int = Field(5, ge=0, description="first micro-batches, which planners see and nobody times")
    steps: int = Field(20, ge=1, description="timed steps after the warm-up")


Workload = Annotated[Training | Replay | Generated, Field(discriminator="kind")]


@dataclass(frozen=True)
class Trial:
    """One strategy under one seed. ``repeat`` counts the further runs of the baseline, which show drift."""

    strategy: Strategy
    seed: int
    identity: str
    repeat: int = 0


class Experiment(Declared):
    """Strategies on one workload, seed by seed. The first strategy is the baseline.

    ``seeds`` is the total: an experiment that is run again adds nothing to seeds that are done.
    """

    display_fields: ClassVar[frozenset[str]] = frozenset({"name", "description"})

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, description="names the run folder")
    description: str = ""
    model: ModelShape
    cluster: ClusterSpec
    strategies: tuple[Strategy, ...] = Field(min_length=1)
    workload: Workload
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(tuple(range(8)), min_length=1)
    repeat_baseline: bool = Field(False, description="run the baseline twice a seed; the second is a row of its own")

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
            if isinstance(self.workload, Training) and isinstance(strategy.predictor, Oracle):
                raise ValueError(
                    f"strategy {strategy.name!r}: predictor=Oracle() plans for loads that are still to come, and "
                    "workload=Training() knows none before they do; use workload=Replay(...) or Generated(...), or "
                    "predictor=Adaptive()"
                )
        if isinstance(self.workload, Training) and self.workload.shaped_links:
            self._check_links()
        if isinstance(self.workload, Training) and self.model.hidden_size % self.workload.num_heads:
            raise ValueError(
                f"num_heads={self.workload.num_heads} does not divide hidden_size={self.model.hidden_size}; "
                "choose a divisor"
            )
        return self

    def _check_links(self) -> None:
        nodes, gb_per_s = self.cluster.num_nodes, self.cluster.inter_node_gb_per_s
        if nodes < 2:
            raise ValueError(
                f"shaped_links=True shapes the links between nodes, and num_nodes={nodes}; "
                "use ClusterSpec(num_nodes=2, ...) or shaped_links=False"
            )
        if gb_per_s > MAX_SHAPED_GB_PER_S:
            raise ValueError(
                f"shaped_links=True makes links of inter_node_gb_per_s={gb_per_s}, which no machine fills; "
                f"declare at most {MAX_SHAPED_GB_PER_S}, such as 0.0625 for 500 Mbit/s"
            )

    @property
    def source(self) -> Source:
        """Whether its numbers come from a clock or from the cost model."""
        return "measured" if isinstance(self.workload, Training) else "simulated"

    @property
    def baseline(self) -> Strategy:
        return self.strategies[0]

    def trial(self, strategy: Strategy, seed: int, repeat: int = 0) -> Trial:
        """A trial, whose identity is everything it computes and no display name."""
        parts = (strategy, self.model, self.cluster, self.workload)
        identity = "-".join([*(part.fingerprint()[:12] for part in parts), str(seed), *([f"r{repeat}"] * (repeat > 0))])
        return Trial(strategy, seed, identity, repeat)

    def trials(self) -> tuple[Trial, ...]:
        """All trials in the order they run: seed by seed, strategies shuffled by the seed."""
        trials: list[Trial] = []
        for seed in self.seeds:
            of_seed = [self.trial(strategy, seed) for strategy in self.strategies]
            if self.repeat_baseline:
                of_seed.append(self.trial(self.baseline, seed, repeat=1))
            random.Random(seed).shuffle(of_seed)
            trials += of_seed
        return tuple(trials)
