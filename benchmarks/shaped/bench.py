"""Runs the cases between hosts with slow links, simulates the same steps, and reports both side by side.

Each host has a share of the processor, so that a host that waits does not speed the others up, as on machines of their
own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated

import numpy as np
import numpy.typing as npt
from scipy.stats import wilcoxon

from benchmarks.harness.contest import Outcome, of_all_ranks
from benchmarks.harness.model_steps import LENGTH, TOLERANCE, ZIPF
from benchmarks.harness.options import Repeats, machine_line
from benchmarks.shaped import layers, models
from benchmarks.shaped.calibration import Calibration, calibration, computed_ms, late_ms, link_figures, with_links
from benchmarks.shaped.cases import NOT_TIMED, ShapedCase, asked_for, model_spec
from benchmarks.shaped.hosts import lacks_hosts, linked_hosts, ranks_on, run_commands
from benchmarks.shaped.processor_shares import lacks_shares
from moesys.balance.plan import LayerPlan, StepPlan
from moesys.balance.run_planner import warm_up
from moesys.config import ClusterSpec, Parallelism, Strategy
from moesys.config.model_run import ModelRun
from moesys.lab.calibrate.measurement import calibrate
from moesys.lab.commands.options import flag, option, refusing
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish
from moesys.simulator.model.simulate_model import simulate_model
from moesys.simulator.step_program import simulation

# The part of the cores that hosts share; the rest is for the kernel's and a relay's work for the links.
SHARED_OUT = 0.9
# The repetitions of link measurements per repetition of a model's step: they are short, and vary more.
_OF_LINKS = 5
_RUN_S = 1800.0
_BAR, _SIGNIFICANT = 0.15, 0.05
_LAYER_NOTES = (
    "Measured: forward and backward of one layer. Blocked: by communication, or by waiting for another rank, mean over "
    "ranks. Output and dx have the bits of the first strategy; where nodes send sums, they differ by at most 1e-5.",
    "Simulated: by the cost model, on hosts and links that were calibrated in the same run: links by all-to-alls of "
    "the same size, computing by even steps of fewer tokens, interleaved with the measured ones.",
)
_MODEL_NOTES = (
    "Measured: forward, backward and AdamW of transformers' small models under FSDP2 (`ms.parallelize`), float32, "
    f"sequences of {LENGTH} tokens. Routing is replayed: experts are drawn by 1 / n^{ZIPF}, in an order that differs "
    f"by layer. Loss and all gradients are those of transformers' own code on each rank, to {TOLERANCE:g}.",
    "Simulated: `ms.models.simulate_model` with the plans of the steps, the bandwidth of all-to-alls, the latency of "
    "all-to-alls of a byte behind products, and the computing speed by `moesys calibrate`.",
)


@dataclass(frozen=True)
class Setting:
    """One strategy of a case.

    Attributes:
        samples_ms: the slowest rank's step, by repetition; empty if the strategy computed something else (``wrong``).
        first_ms: the same for the case's baseline.
        exposed_ms: the time for which communication blocked a step, mean over ranks, median over repetitions.
        max_over_mean, inter_node_share: the load imbalance, and the share of tokens between hosts, of its plans.
        simulated_samples_ms: by repetition where loads move; otherwise one.
    """

    links: Annotated[str, Column("links")]
    case: Annotated[str, Column("case")]
    strategy: Annotated[Strategy, Column("strategy", lambda strategy: strategy.name)]
    samples_ms: Sequence[float] = ()
    first_ms: Sequence[float] = ()
    exposed_ms: Annotated[float | None, Column("blocked ms", ".0f")] = None
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")] = None
    inter_node_share: Annotated[float | None, Column("between hosts", ".0%")] = None
    simulated_samples_ms: Sequence[float] = ()
    wrong: Annotated[str, Column("wrong", wraps=True)] = ""

    @property
    def measured_ms(self) -> Annotated[Quantiles | None, Column("measured ms", ".0f", after="samples_ms")]:
        return Quantiles.of(self.samples_ms, method="nearest") if self.samples_ms else None

    @property
    def speed_up(self) -> Annotated[Quantiles | None, Column("speed-up", after="first_ms")]:
        """The baseline's time divided by this one's, paired by repetition."""
        return Quantiles.of_ratios(self.first_ms, self.samples_ms) if self.samples_ms and self.first_ms else None

    @property
    def simulated_ms(self) -> Annotated[float | None, Column("simulated ms", ".0f", after="simulated_samples_ms")]:
        return float(np.median(self.simulated_samples_ms)) if self.simulated_samples_ms else None

    @property
    def error(self) -> Annotated[float | None, Column("error", "+.0%", after="simulated_ms")]:
        """Simulated divided by measured, less 1."""
        return self.simulated_ms / self.measured_ms.median - 1 if self.simulated_ms and self.measured_ms else None


@dataclass(frozen=True)
class CaseResult:
    """A measured case. settings: in the order of its strategies. cpus_per_host: None if hosts competed
    for the cores.
    """

    links: Annotated[str, Column("links")]
    case: Annotated[ShapedCase, Column("case", lambda case: case.name)]
    cpus_per_host: float | None
    calibration: Annotated[
        Calibration,
        Column("Mbit/s each way", lambda of: f"{of.cluster.inter_node_gb_per_s * 8e3:.0f}"),
        Column("latency ms", lambda of: f"{of.cluster.inter_node_us / 1e3:.2f}"),
        Column("GFLOP/s a rank", lambda of: f"{of.cluster.expert_tflops * 1e3:.1f}"),
        Column("memory GB/s", lambda of: "" if of.rest else f"{of.cluster.memory_gb_per_s:.1f}"),
        Column("launch us", lambda of: f"{of.cluster.launch_us:.0f}"),
        Column("rest of a layer ms", lambda of: f"{of.rest.other_seconds * 3e3:.1f}" if of.rest else ""),
        Column("copy share", lambda of: f"{of.cluster.copy_share:.0%}"),
    ]
    settings: list[Setting]

    @property
    def timed(self) -> list[Setting]:
        """The settings that computed what they had to, the baseline first."""
        return [setting for setting in self.settings if setting.samples_ms]


def run_cases(
    cases: Sequence[ShapedCase], repeats: int = 7, *, shares: bool = True, quiet: bool = False
) -> list[CaseResult]:
    """Measures and simulates. ``shares``: whether each host has a share of the processor, or hosts compete for it."""
    results = []
    for strategy in {strategy for case in cases for strategy in case.strategies}:
        # Planners are compiled once here, and not on all ranks at once.
        warm_up(strategy.balance, strategy.split, late_slots=bool(strategy.late_slots))
    with steps_told("shaped links", len(cases), quiet) as begin:
        for number, each, latency_us in dict.fromkeys(case.hosts for case in cases):
            first, *_ = together = [case for case in cases if case.hosts == (number, each, latency_us)]
            cpus = SHARED_OUT * available_cores() / number if shares else None
            with (
                linked_hosts(number, first.mbit_per_s, latency_us, cpus_per_host=cpus) as hosts,
                ranks_on(hosts, each) as ranks,
            ):
                told = any(case.is_model or case.routing for case in together)
                parts = calibrate(ranks, first.cluster).cluster if told else None
                for case in together:
                    begin(f"{case.links}, {case.name}")
                    run_commands(hosts.shape_commands(case.mbit_per_s))
                    calibrated, outcomes = _measured(case, ranks, parts, repeats)
                    settings = [_setting(case, strategy, outcomes, calibrated) for strategy in case.strategies]
                    results.append(CaseResult(case.links, case, cpus, calibrated, settings))
    return results


def _measured(
    case: ShapedCase, ranks: Ranks, parts: ClusterSpec | None, repeats: int
) -> tuple[Calibration, dict[str, Outcome]]:
    """Measures the case. parts: the computing speed of the hosts, which models and planners for moving loads need."""
    if parts is not None and case.is_model:
        figures = link_figures(ranks, case, repeats * _OF_LINKS)
        figures = replace(figures, latency_ms=max(figures.latency_ms, late_ms(ranks, case, repeats)))
        by_rank = ranks.run(models.measure, case, repeats, timeout_s=_RUN_S)
        return Calibration(with_links(parts, figures), figures), of_all_ranks(by_rank)
    figures = link_figures(ranks, case, repeats)
    if parts is not None and case.routing:
        case = replace(case, calibrated=with_links(parts, figures, case.ranks_per_host))
    by_rank = ranks.run(layers.measure, case, repeats, timeout_s=_RUN_S)
    return calibration(case, figures, computed_ms(by_rank)), of_all_ranks(by_rank)


def _setting(case: ShapedCase, strategy: Strategy, outcomes: Mapping[str, Outcome], calibrated: Calibration) -> Setting:
    place, outcome = (case.links, case.name, strategy), outcomes[strategy.name]
    if not outcome.samples_ms:
        return Setting(*place, wrong=outcome.wrong)
    steps = [[LayerPlan.from_json(text) for text in layers] for layers in outcome.metrics[0].plans]
    tokens = [plan.tokens for plans in steps for plan in plans]
    leaving = sum(plan.inter_node_tokens(calibrated.cluster.node_of_rank) for plan in tokens)
    blocked_ms = [statistics.median(of_rank.blocked_ms) for of_rank in outcome.metrics if of_rank.blocked_ms]
    return Setting(
        *place,
        outcome.samples_ms["step"],
        outcomes[case.strategies[0].name].samples_ms.get("step", []),
        exposed_ms=statistics.fmean(blocked_ms) if blocked_ms else None,
        max_over_mean=statistics.fmean(plan.max_over_mean for plan in tokens),
        inter_node_share=leaving / sum(plan.load.total for plan in tokens),
        simulated_samples_ms=[1e3 * simulated_seconds(case, strategy, plans, calibrated) for plans in steps],
    )


def simulated_seconds(
    case: ShapedCase, strategy: Strategy, plans: Sequence[LayerPlan], calibrated: Calibration
) -> float:
    """Returns the simulated time of a step with these plans, in seconds."""
    if calibrated.rest is not None:
        step = StepPlan(strategy, case.shape, calibrated.cluster, tuple(plans))
        return simulation([step], calibrated.rest).length_seconds
    model, batch = model_spec(case.name, case.shape.hidden_size), case.num_tokens[0] // LENGTH
    run = ModelRun(model=model, cluster=calibrated.cluster, strategy=strategy, seq_len=LENGTH, micro_batch=batch)
    run = run.replace(parallelism=Parallelism(dense="full"), backend="gloo")
    return simulate_model(run, list(plans)).seconds


def ranked_pairs(results: Sequence[CaseResult]) -> tuple[int, int]:
    """Returns how many pairs of strategies of one case are simulated in the order in which they were measured, and how
    many differ significantly, by Wilcoxon's signed-rank test over repetitions.
    """
    right = differ = 0
    for result in results:
        for one, other in combinations(result.timed, 2):
            longer_ms = np.subtract(one.samples_ms, other.samples_ms)
            if _differ(longer_ms):
                differ += 1
                simulated_ms = np.subtract(one.simulated_samples_ms, other.simulated_samples_ms)
                right += bool((np.median(longer_ms) > 0) == (np.median(simulated_ms) > 0))
    return right, differ


def _differ(longer_ms: npt.NDArray[np.float64]) -> bool:
    return bool(longer_ms.any() and wilcoxon(longer_ms).pvalue < _SIGNIFICANT)


def against_fixed(result: CaseResult) -> str:
    """Returns how the last strategy of a case, ``Greedy``, compares with the best of the others in hindsight."""
    *fixed, last = result.timed
    best = min(fixed, key=lambda setting: sum(setting.samples_ms))
    longer_ms = np.subtract(last.samples_ms, best.samples_ms)
    verdict = "faster" if np.median(longer_ms) < 0 else "slower"
    verdict = verdict if _differ(longer_ms) else "not significant"
    ratio = sum(last.samples_ms) / sum(best.samples_ms)
    return f"{result.links}, {result.case.name}: {ratio:.3f} of {best.strategy.name} ({verdict})"


def notes(results: Sequence[CaseResult]) -> list[str]:
    """Returns how the tables were made, and how near and how well ordered the simulated times are."""
    settings = [setting for result in results for setting in result.timed]
    errors = [abs(setting.error) for setting in settings if setting.error is not None]
    within = sum(error <= _BAR for error in errors)
    shares = {result.case.num_hosts: result.cpus_per_host for result in results}
    cpus = "; ".join(f"{each:.2g} of a processor for each of {hosts} hosts" for hosts, each in shares.items() if each)
    delay = "; a relay adds the latency" if any(result.case.latency_us for result in results) else ""
    right, differ = ranked_pairs(results)
    return [
        f"{_machine(results)}. Hosts are network namespaces of this machine: {cpus or 'they compete for its cores'}. "
        f"tbf shapes the links in both directions{delay}.",
        *(_MODEL_NOTES if results[0].case.is_model else _LAYER_NOTES),
        "Measured ms: the slowest rank, median [p20, p80] of all repetitions, interleaved in shuffled order within a "
        "case. Speed-up: over the case's first strategy, paired by repetition.",
        f"Simulated within {_BAR:.0%} of measured: {within} of {len(errors)} settings; median error "
        f"{np.median(errors or [0]):.1%}, worst {max(errors, default=0):.1%}. Pairs of strategies of one case that "
        f"differ significantly (Wilcoxon signed-rank, paired by repetition, p < {_SIGNIFICANT}) and are simulated in "
        f"their order: {right} of {differ}.",
        *_of_planners(
            [result for result in results if result.case.routing and result.settings[-1] in result.timed[1:]]
        ),
    ]


def _of_planners(moving: Sequence[CaseResult]) -> list[str]:
    """Returns the notes on loads that move."""
    if not moving:
        return []
    return [
        "Planners: a workload of the leaderboard, scaled to fewer tokens; planners know the micro-batches before, and "
        "the hosts and links by `moesys calibrate` and the same all-to-alls. "
        f"Each micro-batch is a repetition, and the first {NOT_TIMED} are not timed. Time of `Greedy` over that of the "
        f"best fixed planner in hindsight, summed, and the same test: {'; '.join(map(against_fixed, moving))}."
    ]


def _machine(results: Sequence[CaseResult]) -> str:
    return machine_line(1, ("torch", "transformers") if results[0].case.is_model else ("torch",))


def report(results: Sequence[CaseResult]) -> Report:
    settings = [setting for result in results for setting in result.settings]
    sheets = [
        Sheet("MEASURED beside SIMULATED: steps between hosts with slow links", settings, group_by="links"),
        Sheet("MEASURED: the input of the simulator", results),
    ]
    introduction = ["`python -m benchmarks shaped`: MEASURED, and beside it SIMULATED."]
    data = {"machine": _machine(results), "cases": results}
    return Report("shaped", "Slow links on one machine", "measured", sheets, notes(results), introduction, data)


@refusing()
def bench_shaped(
    hosts: Annotated[list[int] | None, option("N", "Number of hosts, 2 or 4; may be repeated (default: both).")] = None,
    case: Annotated[
        list[str] | None,
        option("NAME", "overlap, split, nodes or planners; may be repeated (default: all of these). Or models, alone."),
    ] = None,
    mbit: Annotated[
        list[float] | None, option("MBIT", "Mbit/s of each link; may be repeated (default: by case).")
    ] = None,
    latency_us: Annotated[float | None, option("US", "Microseconds between hosts, one way (default: by case).")] = None,
    repeats: Repeats = 7,
    shares: Annotated[
        bool, flag("Whether each host has its own share of the processor, or hosts compete for it.")
    ] = True,
    output: CommandOutput = AS_TABLES,
) -> int:
    """Measures, writes and prints; returns the exit code: 1 if a result was wrong."""
    cases = asked_for(hosts or (2, 4), mbit or (), latency_us, case or ())
    if lacks := lacks_hosts():
        raise ValueError(f"shaped links cannot be made: {lacks}")
    if shares and (lacks := lacks_shares()):
        raise ValueError(f"hosts cannot have a share of the processor: {lacks}; or use --no-shares")
    results = run_cases(cases, repeats, shares=shares, quiet=output.quiet)
    publish(report(results), output)
    return int(any(result.timed != result.settings for result in results))
