"""Does a calibration tell how long a step takes? One MoE layer, forward and backward, on the ranks that were measured,
beside the simulator's step on the ``ClusterSpec`` that they became.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moesys.bench.calibrate.fit import Spread
from moesys.bench.calibrate.measurement import PART_TIMEOUT_S, LayerCase, Ranks
from moesys.bench.harness.stopwatch import interleave
from moesys.config import ClusterSpec, Pipelined, Strategy
from moesys.layout import TokenPlan
from moesys.moe.layer import MoELayer
from moesys.moe.runtime import link
from moesys.simulator.step_program import run_step

SEQUENTIAL = Strategy(name="sequential")
STRATEGIES = (SEQUENTIAL, SEQUENTIAL.replace(name="pipelined 4", overlap=Pipelined(chunks=4)))


@dataclass(frozen=True)
class StepCheck:
    """One strategy's step of one layer. measured_ms: of the slowest rank, by repetition."""

    case: LayerCase
    strategy: str
    measured_ms: Spread
    simulated_ms: float

    @property
    def error(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulated_ms / self.measured_ms.median - 1


def check_steps(ranks: Ranks, cluster: ClusterSpec, cases: Sequence[LayerCase], repeats: int) -> list[StepCheck]:
    """Every case under ``STRATEGIES``, on CPU ranks; the simulator gets the tokens that the routers sent."""
    checks = []
    for case in cases:
        by_rank = ranks.run(measured_steps, case, cluster, repeats, timeout_s=PART_TIMEOUT_S)
        for strategy in STRATEGIES:
            slowest_ms = np.max([rank.samples_ms[strategy.name] for rank in by_rank], axis=0)
            step = run_step(strategy, case.shape, cluster, [[by_rank[0].plans[strategy.name]]])
            checks.append(StepCheck(case, strategy.name, Spread.of(slowest_ms.tolist()), step.length_seconds * 1e3))
    return checks


@dataclass(frozen=True)
class MeasuredSteps:
    """Of one rank, by strategy; ``plans`` of the newest step."""

    samples_ms: dict[str, list[float]]
    plans: dict[str, TokenPlan]


def measured_steps(case: LayerCase, cluster: ClusterSpec, repeats: int) -> MeasuredSteps:
    """Interleaved steps of all strategies; on every rank at once."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    x_TH, dy_TH = (torch.randn(case.num_tokens, case.shape.hidden_size, generator=generator) for _ in range(2))
    layers = {strategy.name: MoELayer(case.shape, strategy, cluster=cluster) for strategy in STRATEGIES}
    runtimes = [link(layer) for layer in layers.values()]

    def prepare() -> None:
        for layer in layers.values():
            layer.zero_grad(set_to_none=True)
        if dist.is_initialized():
            dist.barrier()

    def step_of(layer: MoELayer) -> Callable[[], object]:
        # Its input needs a gradient, as that of a layer inside a model.
        return lambda: layer(x_TH.clone().requires_grad_()).backward(dy_TH)

    steps = {name: step_of(layer) for name, layer in layers.items()}
    samples_ms = interleave(steps, repeats, before=prepare)
    plans = {}
    for name, layer in layers.items():
        assert layer.last_plan is not None
        plans[name] = layer.last_plan.tokens
    for runtime in runtimes:
        runtime.close()
    return MeasuredSteps(samples_ms, plans)
