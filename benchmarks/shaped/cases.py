"""``bench shaped``: steps of MoE layers between hosts with slow links, measured and simulated side by side.

Hosts are network namespaces of this machine with one rank and a share of its processor each (``lab.shaped_links``), so
that a host that waits does not speed the others up, as on machines of their own. Three questions: what overlap
gains where communication is half of the step and elsewhere, whether an exact split pays that keeps tokens at home, and
how far the simulator is from a clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from benchmarks.harness.contest import Outcome, of_all_ranks
from benchmarks.shaped.calibration import Calibration, calibration, exchanges_ms, link_figures, slowest
from benchmarks.shaped.host_steps import (
    MOST_TOKENS,
    PIECES,
    SOME_TOKENS,
    ShapedCase,
    computed_ms,
    measure,
    measure_pieces,
)
from moesys.balance.plan import LayerPlan, StepPlan
from moesys.balance.warm_up import warm_up
from moesys.config import (
    Balance,
    Ep,
    Eplb,
    EvenSplit,
    FlexMoe,
    FlowSplit,
    Fsep,
    Greedy,
    Laer,
    ModelShape,
    Pipelined,
    Sequential,
    Split,
    Static,
    Strategy,
)
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.stopwatch import Spread
from moesys.lab.show.sheets import Column
from moesys.lab.show.steps import steps_told
from moesys.lab.slow_links.shaped_links import Delay, ShapedLinks, shaped_links
from moesys.simulator.step_program import simulation

MBIT_PER_S = (100.0, 2000.0)
LATENCY_US = 1000.0
# Of the cores that hosts share out; the rest is for what the kernel and a relay do for their links.
SHARED_OUT = 0.9
# Tokens of a rank: steps so long that a few milliseconds of waking up, for each of their messages, are little.
_OVERLAP_TOKENS = 1024
_SPLIT_TOKENS = 2048
_CHUNKS = (2, 4)
_SPLIT_MBIT = 2000.0
_NODES_TOKENS, _NODES_MBIT = 1024, 200.0
_PLANNERS_MBIT = (200.0, 1000.0)
KINDS = ("overlap", "split", "nodes", "planners")
_SUMS = Sequential(node_dispatch="once", combine="per_node")
# Where a case's bandwidth is None it is chosen such that half of the first strategy's step is communication.
_HALF_FROM, _PROBED_MBIT, _HALF_TO = 100.0, 200.0, 2000.0
_PROBE_REPEATS = 3
# Links do not get faster quite as their bandwidth does, so the second looks from nearby.
_PROBES = 2
_RUN_S = 1200.0
# Of ranks: memory that is freed is kept, or a step now and then would wait for pages of it.
KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}

SEQUENTIAL = Strategy(name="sequential")
OVERLAPS = (
    SEQUENTIAL,
    *(SEQUENTIAL.replace(name=f"pipelined {chunks}", overlap=Pipelined(chunks=chunks)) for chunks in _CHUNKS),
)
EVEN = Strategy(name="even split", sharding=Ep(slots_per_rank=3), split=EvenSplit())


@dataclass(frozen=True)
class Setting:
    """One strategy of a case; of one that differs by a bit nothing else is known.

    samples_ms: the slowest rank's step, by repetition; first_ms: of the case's first strategy. exposed_ms: mean over
    ranks, median over repetitions. max_over_mean, inter_node_share: of its plans. simulated_ms: by the cost model, on
    the calibrated cluster.
    """

    links: Annotated[str, Column("links")]
    strategy: Annotated[Strategy, Column("strategy", lambda strategy: strategy.name)]
    samples_ms: Sequence[float] = ()
    first_ms: Sequence[float] = ()
    exposed_ms: Annotated[float | None, Column("blocked ms", ".0f")] = None
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")] = None
    inter_node_share: Annotated[float | None, Column("between hosts", ".0%")] = None
    simulated_ms: Annotated[float | None, Column("simulated ms", ".0f")] = None

    @property
    def measured_ms(self) -> Annotated[Spread | None, Column("measured ms", ".0f", after="samples_ms")]:
        return Spread.of(self.samples_ms, method="nearest") if self.samples_ms else None

    @property
    def speed_up(self) -> Annotated[Spread | None, Column("speed-up", after="first_ms")]:
        """The first strategy's time over this one's, paired by repetition: above 1 it is faster."""
        return Spread.of_ratios(self.first_ms, self.samples_ms) if self.samples_ms else None

    @property
    def error(self) -> Annotated[float | None, Column("error", "+.0%")]:
        """Simulated over measured, less 1."""
        return self.simulated_ms / self.measured_ms.median - 1 if self.simulated_ms and self.measured_ms else None

    @property
    def bits(self) -> Annotated[str, Column("bits")]:
        return "" if self.samples_ms else "differs by a bit"


@dataclass(frozen=True)
class CaseResult:
    """``settings`` in the order of the case's strategies. ``half``: its bandwidth was chosen. ``cpus_per_host``: None
    where hosts competed for the cores.
    """

    links: Annotated[str, Column("links")]
    case: Annotated[ShapedCase, Column("case", lambda case: case.name)]
    half: bool
    delay: Delay
    cpus_per_host: float | None
    calibration: Annotated[
        Calibration,
        Column("Mbit/s each way", lambda of: f"{of.cluster.inter_node_gb_per_s * 8e3:.0f}"),
        Column("latency ms", lambda of: f"{of.cluster.inter_node_us / 1e3:.2f}"),
        Column("GFLOP/s a rank", lambda of: f"{of.cluster.expert_tflops * 1e3:.1f}"),
        Column("launch us", lambda of: f"{of.cluster.launch_us:.0f}"),
        Column("rest of a layer ms", lambda of: f"{of.rest.other_seconds * 3e3:.1f}"),
        Column("copy share", lambda of: f"{of.cluster.copy_share:.0%}"),
    ]
    settings: list[Setting]

    @property
    def timed(self) -> list[Setting]:
        """All settings with equal bits, the first strategy's first."""
        return [setting for setting in self.settings if setting.samples_ms]


@dataclass(frozen=True)
class Asked:
    """A case to be run; ``half``: its bandwidth is still to be chosen, from a probe over the bandwidth that it has."""

    case: ShapedCase
    half: bool = False


def asked_for(
    hosts: Sequence[int] = (2, 4),
    mbit_per_s: Sequence[float] = (),
    latency_us: float | None = None,
    kinds: Sequence[str] = (),
) -> list[Asked]:
    """The cases: overlap over each bandwidth, where communication is half, and there once more with a latency; splits
    of a skewed router's tokens; layouts of hosts with several ranks; and planners, to be ranked. Given bandwidths, and
    a latency, replace the rest. ``kinds``: only these.

    Raises ValueError for hosts other than 2 or 4, for bandwidths and latencies out of range, and for unknown kinds.
    """
    if strange_kinds := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"case={strange_kinds[0]!r} is none of them; use {', '.join(KINDS)}, or models")
    check_links(hosts, mbit_per_s, latency_us)
    latency = latency_us or 0.0
    plans = []
    for number in hosts:
        chosen = [Asked(split_case(number, mbit, latency)) for mbit in mbit_per_s or (_SPLIT_MBIT,)]
        chosen += [Asked(node_case(number, mbit, latency)) for mbit in mbit_per_s or (_NODES_MBIT,)]
        chosen += [Asked(planner_case(number, mbit, latency)) for mbit in mbit_per_s or _PLANNERS_MBIT]
        chosen += [Asked(overlap_case(number, mbit, latency)) for mbit in mbit_per_s or MBIT_PER_S]
        if not mbit_per_s:
            chosen.append(Asked(overlap_case(number, _PROBED_MBIT, latency), half=True))
            if latency_us is None:
                chosen.append(Asked(overlap_case(number, _PROBED_MBIT, LATENCY_US), half=True))
        plans += sorted(chosen, key=lambda one: (one.case.latency_us, KINDS.index(one.case.name)))
    return [one for one in plans if not kinds or one.case.name in kinds]


def check_links(hosts: Sequence[int], mbit_per_s: Sequence[float], latency_us: float | None) -> None:
    """Raises ValueError for hosts other than 2 or 4, and for bandwidths and latencies out of range."""
    if strange := [number for number in hosts if number not in (2, 4)]:
        raise ValueError(f"hosts={strange[0]} is not measured here; use 2 or 4")
    for mbit in mbit_per_s:
        if not 10 <= mbit <= 10_000:
            raise ValueError(f"mbit={mbit:g} must be between 10 and 10000")
    if latency_us is not None and not 0 <= latency_us <= 100_000:
        raise ValueError(f"latency_us={latency_us:g} must be between 0 and 100000")


def overlap_case(hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """Even tokens, four experts, in one piece and in chunks.

    H and I are such that communication is half of a step near 200 Mbit/s, with 2 hosts as with 4: there bytes are few
    for the computing, and moving them costs a host little of its processor. An expert has hundreds of rows in the
    smallest chunk, so that reading its weights once more for each chunk costs little as well.
    """
    shape = ModelShape(hidden_size=256, intermediate_size=1024, num_experts=4, top_k=2)
    return ShapedCase("overlap", mbit_per_s, latency_us, (_OVERLAP_TOKENS,) * hosts, shape, OVERLAPS)


def split_case(hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """A skewed router, and ranks that hold some experts more than they own, so that tokens have a choice.

    2 hosts: more than half of all tokens want one expert; every rank holds three of four, two of them lent. The even
    split keeps what it can at home and has the busiest rank compute 1.5 times the mean; the exact one sends as many
    tokens away as its cap allows, 1.2 times, and without one 1.1.
    4 hosts: each of eight experts is half as popular as the one before, and every rank has one more than its own two.
    The busiest rank computes 1.76 times the mean by the even split and 1.22 by the exact one, which may not send more
    tokens between hosts than that does. One expert a rank travels, so that balance matters more than the links.
    """
    popularity: tuple[float, ...] = (0.2, 0.2, 0.55, 0.05)
    cap = 0.45
    if hosts == 4:
        halves = [0.5**expert for expert in range(8)]
        popularity, cap = tuple(half / sum(halves) for half in halves), 0.52
    shape = ModelShape(hidden_size=256, intermediate_size=1024, num_experts=len(popularity), top_k=1)
    splits = (
        EVEN,
        EVEN.replace(name=f"flow, cap {cap:g}", split=FlowSplit(max_inter_node=cap)),
        EVEN.replace(name="flow, no cap", split=FlowSplit()),
    )
    return ShapedCase("split", mbit_per_s, latency_us, (_SPLIT_TOKENS,) * hosts, shape, splits, popularity)


def node_case(hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """Two ranks a host, and fine-grained experts of unequal popularity: layouts for balance alone with a row a choice,
    and layouts that put first what a host's own ranks want, with a row a token and host.

    A host has slots for five eighths of the experts, or three eighths with 4 hosts.
    """
    laer = Strategy(name="laer, direct", sharding=_fine_grained_slots(hosts), balance=Laer(), split=EvenSplit())
    # Every step has the same tokens: nothing drifts.
    ours = laer.replace(name="node first, direct", balance=Greedy(drift=0), split=FlowSplit())
    strategies = (
        laer,
        laer.replace(name="laer, sums a node", overlap=_SUMS),
        ours,
        ours.replace(name="node first, once a node", overlap=Sequential(node_dispatch="once")),
        ours.replace(name="node first, sums a node", overlap=_SUMS),
    )
    return _fine_grained("nodes", hosts, mbit_per_s, latency_us, strategies)


def planner_case(hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """As ``node_case``, rows direct: planners that balance tokens, or seconds, or nothing, with the splits that they
    are used with.
    """
    planners: tuple[tuple[str, Balance, Split], ...] = (
        ("laer, even", Laer(), EvenSplit()),
        ("laer, flow", Laer(), FlowSplit()),
        ("static, even", Static(), EvenSplit()),
        ("eplb, flow", Eplb(), FlowSplit()),
        ("flex_moe, flow", FlexMoe(), FlowSplit()),
        ("greedy, flow", Greedy(drift=0), FlowSplit()),
        ("greedy, even", Greedy(drift=0), EvenSplit()),
    )
    sharding = _fine_grained_slots(hosts)
    strategies = [Strategy(name=name, sharding=sharding, balance=b, split=split) for name, b, split in planners]
    return _fine_grained("planners", hosts, mbit_per_s, latency_us, tuple(strategies))


def _fine_grained_slots(hosts: int) -> Fsep:
    return Fsep(slots_per_rank=10 if hosts == 2 else 6)


def _fine_grained(
    name: str, hosts: int, mbit_per_s: float, latency_us: float, strategies: tuple[Strategy, ...]
) -> ShapedCase:
    popularity = tuple(torch.randn(32, generator=torch.Generator().manual_seed(0)).exp().tolist())
    shape = ModelShape(hidden_size=256, intermediate_size=64, num_experts=32, top_k=6)
    tokens = (_NODES_TOKENS,) * (2 * hosts)
    return ShapedCase(name, mbit_per_s, latency_us, tokens, shape, strategies, popularity, ranks_per_host=2)


def share_of_cores(hosts: int) -> float:
    """Processors of each host, such that all of them can have theirs at once."""
    return SHARED_OUT * available_cores() / hosts


def bench_shaped(plans: Sequence[Asked], repeats: int = 7, *, shares: bool = True) -> list[CaseResult]:
    """Measure and simulate. ``shares``: whether hosts have a share of the processor, or compete for it. Raises
    RuntimeError where this machine can make no such hosts.
    """
    results = []
    for strategy in {strategy for one in plans for strategy in one.case.strategies}:
        # Here, and not on all ranks at once.
        warm_up(strategy.balance, strategy.split, late_slots=bool(strategy.late_slots))
    with steps_told("shaped links", len(plans)) as begin:
        for number, each, latency_us in dict.fromkeys(_hosts(one.case) for one in plans):
            cpus = share_of_cores(number) if shares else None
            together = [one for one in plans if _hosts(one.case) == (number, each, latency_us)]
            with (
                shaped_links(number, MBIT_PER_S[0], latency_us, cpus_per_host=cpus) as links,
                LocalRanks(
                    number * each,
                    network=links.plan.network(each),
                    timeouts=RankTimeouts(collective_s=300.0),
                    environment=KEEPING_MEMORY,
                    preload=("benchmarks.shaped.host_steps",),
                ) as ranks,
            ):
                for one in together:
                    begin(
                        f"{number} hosts, {'half' if one.half else f'{one.case.mbit_per_s:g} Mbit/s'}, {one.case.name}"
                    )
                    results.append(_run(one, links, ranks, cpus, repeats))
    return results


def _hosts(case: ShapedCase) -> tuple[int, int, float]:
    return case.num_hosts, case.ranks_per_host, case.latency_us


def _run(one: Asked, links: ShapedLinks, ranks: LocalRanks, cpus: float | None, repeats: int) -> CaseResult:
    case = one.case
    if one.half:
        probed = _slowest_ms(ranks.run(measure_pieces, case, _PROBE_REPEATS, timeout_s=_RUN_S))
        for _ in range(_PROBES):
            links.reshape(case.mbit_per_s)
            moved = exchanges_ms(ranks, case, _PROBE_REPEATS)
            case = replace(case, mbit_per_s=half_mbit_per_s(case.mbit_per_s, moved, probed))
    links.reshape(case.mbit_per_s)
    figures = link_figures(ranks, case, repeats)
    by_rank = ranks.run(measure, case, repeats, timeout_s=_RUN_S)
    calibrated, words = calibration(case, figures, _slowest_ms(by_rank)), links_of(case, one.half)
    settings = _settings(case, words, of_all_ranks(by_rank), calibrated)
    return CaseResult(words, case, one.half, links.plan.delay, cpus, calibrated, settings)


def half_mbit_per_s(mbit_per_s: float, moved_ms: Mapping[int, float], computed_ms: Mapping[str, float]) -> float:
    """The bandwidth over which messages of a sequential step take as long as its computing.

    moved_ms: all-to-alls over ``mbit_per_s``, by bytes; the largest moves all rows once. computed_ms: of ``PIECES``.
    """
    a_token_ms = (computed_ms["most"] - computed_ms["some"]) / (MOST_TOKENS - SOME_TOKENS)
    step_ms = computed_ms["most"] + (1 - MOST_TOKENS) * a_token_ms
    # Dispatch and combine, forward and backward.
    all_moved_ms = 4 * moved_ms[max(moved_ms)]
    return float(f"{min(_HALF_TO, max(_HALF_FROM, mbit_per_s * all_moved_ms / step_ms)):.2g}")


def _slowest_ms(by_rank: Sequence[Mapping[str, Outcome]]) -> dict[str, float]:
    of_ranks = [computed_ms(outcomes) for outcomes in by_rank]
    return {name: slowest([of_rank[name] for of_rank in of_ranks]) for name in PIECES}


def links_of(case: ShapedCase, half: bool) -> str:
    """In words, for tables."""
    latency = f", {case.latency_us:g} us" if case.latency_us else ""
    ranks = f" of {case.ranks_per_host} ranks" if case.ranks_per_host > 1 else ""
    return f"{case.num_hosts}{ranks} x {case.mbit_per_s:g} Mbit/s{latency}{' (half)' if half else ''}"


def _settings(case: ShapedCase, links: str, outcomes: Mapping[str, Outcome], calibrated: Calibration) -> list[Setting]:
    settings = []
    for strategy in case.strategies:
        outcome = outcomes[strategy.name]
        if not outcome.samples_ms:
            settings.append(Setting(links, strategy))
            continue
        layers = tuple(LayerPlan.from_json(text) for text in outcome.metrics[0].plans)
        step = simulation([StepPlan(strategy, case.shape, calibrated.cluster, layers)], calibrated.rest)
        tokens = [layer.tokens for layer in layers]
        leaving = sum(plan.inter_node_tokens(calibrated.cluster.node_of_rank) for plan in tokens)
        settings.append(
            Setting(
                links,
                strategy,
                outcome.samples_ms["step"],
                outcomes[case.strategies[0].name].samples_ms["step"],
                exposed_ms=statistics.fmean(statistics.median(of_rank.blocked_ms) for of_rank in outcome.metrics),
                max_over_mean=statistics.fmean(plan.max_over_mean for plan in tokens),
                inter_node_share=leaving / sum(plan.load.total for plan in tokens),
                simulated_ms=step.length_seconds * 1e3,
            )
        )
    return settings
