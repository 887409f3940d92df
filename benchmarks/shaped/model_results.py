"""What the simulator makes of models between hosts (``model_cases``), and what simpler ways to tell a step's time do.

Nobody looks at a step that is predicted. All are told the links, measured by themselves, and the plans that the steps
had, so that it is known who sends what; how fast hosts compute they have from

- ``simulated``: what ``bench calibrate`` says of the hosts, of which no step of any model was looked at;
- ``fitted``: the same, with two constants fitted to even steps of fewer sequences (``host_models.PIECES``), interleaved
  with the steps that are predicted: how much slower a model's products and passes over memory are than those that
  calibration times, and what a message takes before its first byte, to hosts that have computed a while as to those
  that have not;
- ``closed form``: the line through the even steps, by tokens, at those of the busiest rank, and experts that travel at
  the links' rate. It has no simulator.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated

import numpy as np
from scipy.optimize import least_squares

from benchmarks.harness.model_steps import LENGTH
from benchmarks.shaped.cases import links_of
from benchmarks.shaped.host_models import ModelCase
from benchmarks.shaped.model_cases import MeasuredCase
from moesys.config import ClusterSpec, Parallelism, Strategy
from moesys.config.model_run import ModelRun
from moesys.cost import reshard_seconds, restore_seconds
from moesys.lab.calibrate.measurement import fit_line
from moesys.lab.runs.stopwatch import Spread
from moesys.lab.show.sheets import Column
from moesys.step import LayerPlan
from moesys.whole_model.simulate_model import simulate_model

# Of a cluster, how fast a rank computes.
_RATES = (
    *("expert_tflops", "backward_tflops", "attention_tflops", "attention_backward_tflops"),
    *("memory_gb_per_s", "elementwise_gb_per_s", "elementwise_backward_gb_per_s", "optimizer_gb_per_s"),
)
# Of what is fitted: a factor of those, and milliseconds of a message.
_FACTORS, _LATENCY_MS = (0.05, 20.0), (0.0, 100.0)
_FIRST_FACTORS = (0.6, 1.0)


@dataclass(frozen=True)
class ModelSetting:
    """One strategy of a case. samples_ms: the slowest rank's step, by repetition; empty where it computed something
    else. first_ms: of the case's first strategy, and first_simulated_ms.
    """

    links: Annotated[str, Column("links")]
    model: Annotated[str, Column("model")]
    strategy: Annotated[str, Column("strategy")]
    samples_ms: list[float]
    first_ms: list[float]
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")] = None
    simulated_ms: Annotated[float | None, Column("simulated ms", ".0f")] = None
    fitted_ms: float | None = None
    closed_ms: float | None = None
    first_simulated_ms: float | None = None
    wrong: Annotated[str, Column("wrong")] = ""

    @property
    def measured_ms(self) -> Annotated[Spread | None, Column("measured ms", ".0f", after="strategy")]:
        return Spread.of(self.samples_ms, method="nearest") if self.samples_ms else None

    @property
    def error(self) -> Annotated[float | None, Column("error", "+.0%", after="simulated_ms")]:
        """Simulated over measured, less 1."""
        return self._error(self.simulated_ms)

    @property
    def fitted_error(self) -> Annotated[float | None, Column("fitted", "+.0%", after="error")]:
        return self._error(self.fitted_ms)

    @property
    def closed_error(self) -> Annotated[float | None, Column("closed form", "+.0%", after="fitted_error")]:
        return self._error(self.closed_ms)

    @property
    def speed_up(self) -> Annotated[Spread | None, Column("speed-up", after="closed_error")]:
        """The first strategy's time over this one's, paired by repetition: above 1 it is faster."""
        return Spread.of_ratios(self.first_ms, self.samples_ms) if self.samples_ms and self.first_ms else None

    @property
    def simulated_speed_up(self) -> Annotated[float | None, Column("simulated", ".2f", after="speed_up")]:
        if self.first_simulated_ms is None or self.simulated_ms is None:
            return None
        return self.first_simulated_ms / self.simulated_ms

    def _error(self, told_ms: float | None) -> float | None:
        return None if told_ms is None or self.measured_ms is None else told_ms / self.measured_ms.median - 1


@dataclass(frozen=True)
class Told:
    """What the simulator was told of the hosts of a case. factor: by which products and passes over memory of a model
    are as fast as those of ``parts``. latency_ms: of its messages.
    """

    links: Annotated[str, Column("links")]
    model: Annotated[str, Column("model")]
    parts: Annotated[
        ClusterSpec,
        Column("GFLOP/s a rank", lambda of: f"{of.expert_tflops * 1e3:.1f}"),
        Column("memory GB/s", lambda of: f"{of.memory_gb_per_s:.1f}"),
        Column("launch us", lambda of: f"{of.launch_us:.0f}"),
        Column("Mbit/s each way", lambda of: f"{of.inter_node_gb_per_s * 8e3:.0f}"),
        Column("latency ms", lambda of: f"{of.inter_node_us / 1e3:.2f}"),
        Column("copy share", lambda of: f"{of.copy_share:.0%}"),
    ]
    factor: Annotated[float, Column("fitted: speed", ".2f")]
    latency_ms: Annotated[float, Column("fitted: latency ms", ".2f")]

    @property
    def fitted(self) -> ClusterSpec:
        return scaled(self.parts, self.factor, self.latency_ms)


@dataclass(frozen=True)
class ModelResult:
    """``settings`` in the order of the case's strategies."""

    measured: MeasuredCase
    told: Told
    settings: list[ModelSetting]

    @cached_property
    def timed(self) -> list[ModelSetting]:
        return [setting for setting in self.settings if setting.samples_ms]


def result_of(measured: MeasuredCase) -> ModelResult:
    case = measured.case
    told, settings = told_of(measured), list[ModelSetting]()
    first = case.strategies[0].name
    for strategy in case.strategies:
        place = (links_of(case.links, half=False), case.model, strategy.name)
        samples_ms = measured.samples_ms.get(strategy.name, [])
        if not samples_ms:
            settings.append(ModelSetting(*place, [], [], wrong=measured.wrong[strategy.name]))
            continue
        plans = plans_of(measured, strategy.name)
        found_ms = simulated_ms(case, strategy, case.sequences, plans, told.parts)
        settings.append(
            ModelSetting(
                *place,
                samples_ms,
                measured.samples_ms.get(first, []),
                max_over_mean=statistics.fmean(plan.tokens.max_over_mean for plan in plans),
                simulated_ms=found_ms,
                fitted_ms=simulated_ms(case, strategy, case.sequences, plans, told.fitted),
                closed_ms=_closed_ms(measured, strategy, plans, told.parts),
                first_simulated_ms=settings[0].simulated_ms if settings else found_ms,
            )
        )
    return ModelResult(measured, told, settings)


def plans_of(measured: MeasuredCase, name: str) -> list[LayerPlan]:
    return [LayerPlan.from_json(text) for text in measured.plans[name]]


def told_of(measured: MeasuredCase) -> Told:
    """Fits the factor and the latency to even steps of fewer sequences: of relative errors the least squares."""
    case, links = measured.case, measured.links
    parts = measured.parts.replace(
        inter_node_gb_per_s=1e-6 / links.ms_a_byte,
        inter_node_us=links.latency_ms * 1e3,
        copy_share=links.copy_share,
    )
    pieces = [(name, *piece, plans_of(measured, name)) for name, piece in case.pieces.items()]

    def errors(log_factor_and_latency: np.ndarray) -> list[float]:
        log_factor, latency_ms = log_factor_and_latency
        cluster = scaled(parts, float(np.exp(log_factor)), float(latency_ms))
        return [
            float(np.log(simulated_ms(case, strategy, sequences, plans, cluster) / _median_ms(measured, name)))
            for name, strategy, sequences, plans in pieces
        ]

    lower, upper = zip(np.log(_FACTORS), _LATENCY_MS, strict=True)
    # What ranks wait for changes on the way, so that a descent may end beside the best.
    found = min(
        (
            least_squares(errors, first, bounds=(lower, upper), x_scale=(0.1, 1.0), diff_step=1e-3)
            for first in product(np.log(_FIRST_FACTORS), (0.1, max(0.2, links.latency_ms)))
        ),
        key=lambda each: float(each.cost),
    )
    factor, latency_ms = float(np.exp(found.x[0])), float(found.x[1])
    return Told(links_of(case.links, half=False), case.model, parts, factor, latency_ms)


def scaled(parts: ClusterSpec, factor: float, latency_ms: float) -> ClusterSpec:
    """Returns hosts that compute ``factor`` times as fast, and whose messages take ``latency_ms``."""
    rates = {name: rate * factor for name in _RATES if (rate := getattr(parts, name)) is not None}
    return parts.replace(**rates, inter_node_us=latency_ms * 1e3)


def simulated_ms(
    case: ModelCase, strategy: Strategy, sequences: int, plans: list[LayerPlan], cluster: ClusterSpec
) -> float:
    """Of a step that has these plans."""
    run = ModelRun(
        model=case.spec,
        cluster=cluster,
        strategy=strategy,
        parallelism=Parallelism(dense="full"),
        seq_len=LENGTH,
        micro_batch=sequences,
        backend="gloo",
    )
    return 1e3 * simulate_model(run, plans).seconds


def _closed_ms(measured: MeasuredCase, strategy: Strategy, plans: list[LayerPlan], parts: ClusterSpec) -> float:
    """A line by tokens, at those of the busiest rank in each layer, and experts on their way."""
    case = measured.case
    even = {sequences: _median_ms(measured, name) for name in ("some", "most") for _, sequences in [case.pieces[name]]}
    fixed_ms, sequence_ms = fit_line(list(even), list(even.values()))
    busiest = statistics.fmean(plan.tokens.max_over_mean for plan in plans)
    shape = case.links.shape
    travel_s = sum(
        # Forward, once more for backward, and gradients.
        again * restore_seconds(plan.layout, shape, parts, strategy.sharding)
        + reshard_seconds(plan.layout, shape, parts, strategy.sharding)
        for again in [2 if strategy.sharding.kind == "fsep" else 1]
        for plan in plans
    )
    return fixed_ms + sequence_ms * case.sequences * busiest + 1e3 * travel_s


def _median_ms(measured: MeasuredCase, name: str) -> float:
    return statistics.median(measured.samples_ms[name])
