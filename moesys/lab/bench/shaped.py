"""``bench shaped``: steps of MoE layers between hosts with slow links, measured and simulated side by side.

Hosts are network namespaces of this machine with one rank each (``lab.shaped_links``). Three questions: what overlap
gains where communication is half of the step and elsewhere, whether an exact split pays that keeps tokens at home, and
how far the simulator is from a clock.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moesys.balance import warm_up
from moesys.config import Ep, EvenSplit, FlowSplit, ModelShape, Pipelined, Strategy
from moesys.lab.bench.shaped_calibration import Calibration, calibration, link_figures, slowest
from moesys.lab.bench.shaped_case import Case, Measured, compute_ms, measure
from moesys.lab.bench.steps import steps_told
from moesys.lab.bench.timing import Ratio, paired_ratio
from moesys.lab.namespaces import lacks
from moesys.lab.ranks import LocalRanks
from moesys.lab.shaped_links import Delay, shaped_links
from moesys.step import LayerPlan, StepPlan, simulation

MBIT_PER_S = (100.0, 2000.0)
LATENCY_US = 1000.0
_CHUNKS = (2, 4)
# Where a case's bandwidth is None it is chosen such that half of the first strategy's step is communication.
_HALF_FROM, _HALF_TO = 100.0, 2000.0
_PROBE_REPEATS = 3
_RUN_S = 1200.0

SEQUENTIAL = Strategy(name="sequential")
OVERLAPS = (
    SEQUENTIAL,
    *(SEQUENTIAL.replace(name=f"pipelined {chunks}", overlap=Pipelined(chunks=chunks)) for chunks in _CHUNKS),
)
EVEN = Strategy(name="even split", sharding=Ep(slots_per_rank=3), split=EvenSplit())


@dataclass(frozen=True)
class Setting:
    """One strategy of a case.

    samples_ms: the slowest rank's step, by repetition. exposed_ms: mean over ranks, median over repetitions.
    simulated_ms: by the cost model, on the calibrated cluster. max_over_mean, inter_node_share: of its plans.
    """

    strategy: Strategy
    samples_ms: list[float]
    exposed_ms: float
    simulated_ms: float
    max_over_mean: float
    inter_node_share: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def error(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulated_ms / self.median_ms - 1


@dataclass(frozen=True)
class CaseResult:
    """``settings`` in the order of the case's strategies; ``differing`` are those that were not timed because output or
    dx differ by a bit. ``half``: its bandwidth was chosen.
    """

    case: Case
    half: bool
    delay: Delay
    calibration: Calibration
    settings: list[Setting]
    differing: list[str]

    @property
    def communication_share(self) -> float:
        """Of the first strategy's step, as measured: blocked by messages or by another rank."""
        return self.settings[0].exposed_ms / self.settings[0].median_ms

    def speed_up(self, setting: Setting) -> Ratio:
        """The first strategy's time over this one's, paired by repetition: above 1 it is faster."""
        return paired_ratio(self.settings[0].samples_ms, setting.samples_ms)


@dataclass(frozen=True)
class Plan:
    """A case to be run; ``half``: its bandwidth is still to be chosen, from a probe over the bandwidth that it has."""

    case: Case
    half: bool = False


def plan(
    hosts: Sequence[int] = (2, 4), mbit_per_s: Sequence[float] = (), latency_us: float | None = None
) -> list[Plan]:
    """The cases: overlap over each bandwidth, where communication is half, and there once more with a latency; and
    splits of a skewed router's tokens. Given bandwidths, and a latency, replace the rest.

    Raises ValueError for hosts other than 2 or 4, and for bandwidths and latencies out of range.
    """
    if strange := [number for number in hosts if number not in (2, 4)]:
        raise ValueError(f"hosts={strange[0]} is not measured here; use 2 or 4")
    for mbit in mbit_per_s:
        if not 10 <= mbit <= 10_000:
            raise ValueError(f"mbit={mbit:g} must be between 10 and 10000")
    if latency_us is not None and not 0 <= latency_us <= 100_000:
        raise ValueError(f"latency_us={latency_us:g} must be between 0 and 100000")
    plans = []
    for number in hosts:
        chosen = [Plan(overlap_case(number, mbit, latency_us or 0.0)) for mbit in mbit_per_s or MBIT_PER_S]
        if not mbit_per_s:
            chosen.insert(1, Plan(overlap_case(number, 400.0, latency_us or 0.0), half=True))
            if latency_us is None:
                chosen.append(Plan(overlap_case(number, 400.0, LATENCY_US), half=True))
            chosen.append(Plan(split_case(number, 2000.0, latency_us or 0.0)))
        plans += sorted(chosen, key=lambda one: one.case.latency_us)
    return plans


def overlap_case(hosts: int, mbit_per_s: float, latency_us: float) -> Case:
    """Even tokens, two experts a rank, in one piece and in chunks."""
    shape = ModelShape(hidden_size=256, intermediate_size=1024, num_experts=2 * hosts, top_k=2)
    return Case("overlap", mbit_per_s, latency_us, (1536 // hosts,) * hosts, shape, OVERLAPS)


def split_case(hosts: int, mbit_per_s: float, latency_us: float) -> Case:
    """More than half of all tokens want one expert; every rank holds three of four, two of them lent.

    The even split keeps what it can at home and has the busiest rank compute 1.5 times the mean, or 1.27 with 4 hosts;
    the exact one sends as many tokens away as its cap allows.
    """
    shape = ModelShape(hidden_size=256, intermediate_size=1024, num_experts=4, top_k=1)
    cap = 0.45 if hosts == 2 else 0.3
    splits: tuple[Strategy, ...] = (EVEN, EVEN.replace(name=f"flow, cap {cap:g}", split=FlowSplit(max_inter_node=cap)))
    if hosts == 2:
        # With 4 a split without a cap would be the same.
        splits = (*splits, EVEN.replace(name="flow, no cap", split=FlowSplit()))
    popularity = (0.2, 0.2, 0.55, 0.05)
    return Case("split", mbit_per_s, latency_us, (5120 // hosts,) * hosts, shape, splits, popularity)


def bench_shaped(plans: Sequence[Plan], repeats: int = 7, seed: int = 0) -> list[CaseResult]:
    """Measure and simulate. Raises RuntimeError where this machine can make no such hosts."""
    results = []
    for strategy in {strategy for one in plans for strategy in one.case.strategies}:
        # Here, and not on all ranks at once.
        warm_up(strategy.balance, strategy.split)
    with steps_told("shaped links", len(plans)) as begin:
        for number, latency_us in dict.fromkeys((one.case.num_hosts, one.case.latency_us) for one in plans):
            together = [one for one in plans if (one.case.num_hosts, one.case.latency_us) == (number, latency_us)]
            with (
                shaped_links(number, MBIT_PER_S[0], latency_us) as links,
                LocalRanks(
                    number,
                    network=links.plan.network(1),
                    collective_timeout_s=300.0,
                    preload=("moesys.lab.bench.shaped_case",),
                ) as ranks,
            ):
                for one in together:
                    begin(
                        f"{number} hosts, {'half' if one.half else f'{one.case.mbit_per_s:g} Mbit/s'}, {one.case.name}"
                    )
                    case = one.case
                    if one.half:
                        links.reshape(case.mbit_per_s)
                        probed = _computed_ms(ranks.run(compute_ms, case, _PROBE_REPEATS, seed, timeout_s=_RUN_S))
                        probe = calibration(case, link_figures(ranks, case, _PROBE_REPEATS), probed)
                        case = replace(case, mbit_per_s=half_mbit_per_s(case, probe))
                    links.reshape(case.mbit_per_s)
                    figures = link_figures(ranks, case, repeats)
                    by_rank = ranks.run(measure, case, repeats, seed, timeout_s=_RUN_S)
                    calibrated = calibration(case, figures, _computed_ms([rank.computed_ms for rank in by_rank]))
                    settings = [
                        _setting(case, strategy, by_rank, calibrated)
                        for strategy in case.strategies
                        if by_rank[0].same_bits[strategy.name]
                    ]
                    differing = [name for name, same in by_rank[0].same_bits.items() if not same]
                    results.append(CaseResult(case, one.half, links.plan.delay, calibrated, settings, differing))
    return results


def half_mbit_per_s(case: Case, probe: Calibration) -> float:
    """The bandwidth over which messages of the first strategy's step take as long as its computing: by what was
    calibrated over the case's own, of which gloo gets a part.
    """
    shape, num_ranks = case.shape, case.num_hosts
    rows = max(case.num_tokens) * shape.top_k
    compute_s = rows * 18 * shape.hidden_size * shape.intermediate_size / (probe.cluster.expert_tflops * 1e12)
    # Dispatch and combine, forward and backward.
    num_bytes = 4 * rows * (num_ranks - 1) / num_ranks * shape.hidden_size * shape.bytes_per_element
    part = probe.cluster.inter_node_gb_per_s / case.cluster.inter_node_gb_per_s
    return float(f"{min(_HALF_TO, max(_HALF_FROM, num_bytes * 8e-6 / compute_s / part)):.2g}")


def _computed_ms(by_rank: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    return {name: slowest([rank[name] for rank in by_rank]) for name in by_rank[0]}


def _setting(case: Case, strategy: Strategy, by_rank: Sequence[Measured], calibrated: Calibration) -> Setting:
    name = strategy.name
    samples = zip(*(rank.samples_ms[name] for rank in by_rank), strict=True)
    layers = tuple(LayerPlan.from_json(text) for text in by_rank[0].plans[name])
    step = simulation([StepPlan(strategy, case.shape, calibrated.cluster, layers)], calibrated.rest)
    tokens = [layer.tokens for layer in layers]
    leaving = sum(plan.inter_node_tokens(calibrated.cluster.node_of_rank) for plan in tokens)
    return Setting(
        strategy=strategy,
        samples_ms=[max(of_ranks) for of_ranks in samples],
        exposed_ms=statistics.fmean(rank.exposed_ms[name] for rank in by_rank),
        simulated_ms=step.length_seconds * 1e3,
        max_over_mean=statistics.fmean(plan.max_over_mean for plan in tokens),
        inter_node_share=leaving / sum(plan.load.total for plan in tokens),
    )


def main(plans: Sequence[Plan], *, repeats: int = 7, out: Path | None = None, json_path: Path | None = None) -> int:
    """Measure, print, write; the exit code: 1 if a bit was wrong, 2 where no such hosts can be made."""
    if reason := lacks():
        print(f"error: shaped links cannot be made: {reason}", file=sys.stderr)
        return 2
    from moesys.lab.bench import shaped_report

    results = bench_shaped(plans, repeats)
    shaped_report.show(results)
    if out is not None:
        out.write_text(shaped_report.markdown(results))
    if json_path is not None:
        json_path.write_text(shaped_report.to_json(results))
    return int(any(result.differing for result in results))
