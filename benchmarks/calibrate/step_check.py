"""Does a calibration tell how long a step takes? One MoE layer, forward and backward, on the ranks that were measured,
beside the simulator's step on the ``ClusterSpec`` that they became.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from benchmarks.calibrate.calibrated_rows import RANGE, four_digits
from benchmarks.calibrate.grids import LayerCase
from benchmarks.calibrate.session import PART_TIMEOUT_S
from benchmarks.harness.contest import EqualBits, Outcome, of_all_ranks
from benchmarks.harness.layer_steps import LayerSteps, hold_steps, rank_generator
from moesys.config import ClusterSpec, Pipelined, Strategy
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.lab.runs.stopwatch import Spread
from moesys.lab.show.sheets import Column
from moesys.layout import TokenPlan
from moesys.moe.layer import MoELayer
from moesys.simulator.step_program import run_step

SEQUENTIAL = Strategy(name="sequential")
STRATEGIES = (SEQUENTIAL, SEQUENTIAL.replace(name="pipelined 4", overlap=Pipelined(chunks=4)))


@dataclass(frozen=True)
class StepCheck:
    """One strategy's step of one layer. measured_ms: of the slowest rank, by repetition."""

    case: Annotated[
        LayerCase,
        Column("H", lambda case: str(case.shape.hidden_size)),
        Column("I", lambda case: str(case.shape.intermediate_size)),
        Column("E", lambda case: str(case.shape.num_experts)),
        Column("K", lambda case: str(case.shape.top_k)),
        Column("tokens a rank", lambda case: str(case.num_tokens)),
    ]
    strategy: Annotated[str, Column("strategy")]
    measured_ms: Annotated[Spread, Column("measured, ms", lambda ms: four_digits(ms.median)), *RANGE]
    simulated_ms: Annotated[float, Column("simulated, ms", four_digits)]

    @property
    def error(self) -> Annotated[float, Column("error", "+.0%")]:
        """Simulated over measured, less 1."""
        return self.simulated_ms / self.measured_ms.median - 1


def check_steps(ranks: Ranks, cluster: ClusterSpec, cases: Sequence[LayerCase], repeats: int) -> list[StepCheck]:
    """Every case under ``STRATEGIES``, on CPU ranks; the simulator gets the tokens that the routers sent.

    Raises RuntimeError where these differ by a bit.
    """
    checks = []
    for case in cases:
        outcomes = of_all_ranks(ranks.run(measured_steps, case, cluster, repeats, timeout_s=PART_TIMEOUT_S))
        for strategy in STRATEGIES:
            outcome = outcomes[strategy.name]
            if outcome.wrong:
                raise RuntimeError(f"{strategy.name} computes something else than {SEQUENTIAL.name}: {outcome.wrong}")
            step = run_step(strategy, case.shape, cluster, [[outcome.metrics[0]]])
            measured_ms = Spread.of(outcome.samples_ms["step"])
            checks.append(StepCheck(case, strategy.name, measured_ms, step.length_seconds * 1e3))
    return checks


def measured_steps(case: LayerCase, cluster: ClusterSpec, repeats: int) -> dict[str, Outcome]:
    """Interleaved steps of all strategies, on every rank at once; ``Outcome.metrics`` is the newest token plan."""
    generator = rank_generator()
    x_TH, dy_TH = (torch.randn(case.num_tokens, case.shape.hidden_size, generator=generator) for _ in range(2))
    steps = {of.name: LayerSteps(MoELayer(case.shape, of, cluster=cluster), x_TH, dy_TH) for of in STRATEGIES}
    return hold_steps(steps, EqualBits(), _plan, repeats)


def _plan(steps: LayerSteps) -> TokenPlan:
    plan = steps.layers[0].last_plan
    assert plan is not None
    return plan.tokens
