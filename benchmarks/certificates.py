"""The command ``certificates``: how far the layers that ``Greedy`` plans are from their bounds, by model and cluster.

A layout is planned on one load and used on the next one, of the same popularity. ``certify_seconds`` says how many
seconds the planned layer takes, and how many any layout with as many slots takes at least. LAER-MoE's planner, with its
even split, is compared with both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from benchmarks.seconds_certificate import certify_seconds
from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.laer import Laer
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.balance.run_planner import plan_layout, warm_up
from moesys.config import ClusterSpec, Ep, Fsep, ModelShape, Strategy, presets
from moesys.config.overlap import Sequential
from moesys.config.workload import Generated
from moesys.lab.commands.options import Jobs, option, refusing
from moesys.lab.ranks.pool import Workers
from moesys.lab.runs.places import num_workers
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish
from moesys.load import IntArray, LoadMatrix
from moesys.simulator.step_program import simulate
from moesys.traces import draw_counts, generate

TOKENS_PER_RANK = 8192
ONCE = Sequential(node_dispatch="once", combine="per_node")


@dataclass(frozen=True)
class PlannedCase:
    """A layer of a preset model on nodes of 8 H100. hot_nodes: each node has its own hot experts, whose ranks share."""

    model_name: str
    num_ranks: int
    slots: int
    hot_nodes: bool = False

    @property
    def name(self) -> str:
        return f"{self.model_name}{', hot nodes' * self.hot_nodes}"

    @property
    def model(self) -> ModelShape:
        shape: ModelShape = getattr(presets, self.model_name)
        return shape

    @property
    def cluster(self) -> ClusterSpec:
        return presets.h100(self.num_ranks // 8)

    def loads(self, seed: int) -> IntArray:
        """Draws two loads of one popularity, int64 [2, R, E]; a pure function of ``seed``."""
        cluster, model = self.cluster, self.model
        routing = Generated(num_layers=1, tokens_per_rank=TOKENS_PER_RANK, warmup=0, steps=2, skew=1.0, drift=0.0)
        if not self.hot_nodes:
            return generate(routing, cluster.num_ranks, model.num_experts, model.top_k, seed).tokens_SLRE[:, 0]
        routing = routing.replace(tokens_per_rank=TOKENS_PER_RANK * cluster.ranks_per_node, spread=1.0)
        wanted_NE = generate(routing, cluster.num_nodes, model.num_experts, model.top_k, seed).tokens_SLRE[0, 0]
        log_RE = np.log(np.maximum(wanted_NE, 1))[list(cluster.node_of_rank)]
        rng, tokens_R = np.random.default_rng(seed), np.full(cluster.num_ranks, TOKENS_PER_RANK)
        return np.stack([draw_counts(rng, log_RE, tokens_R, model.top_k) for _ in range(2)])

    def strategies(self) -> dict[str, Strategy]:
        """Returns ``Greedy`` in each way that experts and rows travel, and LAER-MoE's planner, by fields of the row."""
        by_node = Fsep(slots_per_rank=self.slots, restore="hierarchical", reshard="hierarchical")
        sharded, pinned = Fsep(slots_per_rank=self.slots), Ep(slots_per_rank=self.slots)
        ours = Strategy(
            name="greedy", sharding=sharded, balance=Greedy(drift=0.0), split=FlowSplit(max_inter_node="seconds")
        )
        return {
            "direct": ours,
            "by_node": ours.replace(sharding=by_node),
            "once": ours.replace(overlap=ONCE),
            "pinned": ours.replace(sharding=pinned),
            "pinned_once": ours.replace(sharding=pinned, overlap=ONCE),
            "laer": ours.replace(balance=Laer(), split=EvenSplit()),
        }

    def plan_second_load(self, strategy: Strategy, tokens_2RE: IntArray) -> LayerPlan:
        """Plans the second load over a layout for the first."""
        model, cluster = self.model, self.cluster
        before, later = map(LoadMatrix, tokens_2RE)
        layout = plan_layout(before, cluster, strategy.balance, self.slots, model=model, strategy=strategy)
        return plan_layer(strategy, model, cluster, later, layout=layout)


def _cases(model: str, *sizes: tuple[int, int]) -> list[PlannedCase]:
    return [PlannedCase(model, num_ranks, slots) for num_ranks, slots in sizes]


CASES = (
    *_cases("QWEN3_30B_A3B", (16, 10), (32, 5), (32, 8), (64, 8), (128, 6)),
    PlannedCase("QWEN3_30B_A3B", 32, 8, hot_nodes=True),
    *_cases("DEEPSEEK_V3", (32, 10), (64, 6), (128, 3), (128, 6)),
    *_cases("MIXTRAL_8X7B", (8, 2), (32, 2), (128, 2)),
)


@dataclass(frozen=True)
class Distance:
    """Seconds divided by the bound: the median of the seeds, and the largest."""

    median: float
    largest: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.largest:.3f})"


@dataclass(frozen=True)
class CertificateRow:
    """over_laer: the simulated layer, divided by that with LAER-MoE's planner and split. least_over_laer: the bound,
    divided by the seconds of the latter. The rest are distances: experts fully sharded and rows direct; experts that
    reach a node once; tokens that do; and experts whole on their owners.
    """

    model: Annotated[str, Column("model", wraps=True)]
    ranks: Annotated[int, Column("ranks")]
    slots: Annotated[int, Column("slots")]
    over_laer: Annotated[float, Column("over laer, even", ".3f", kept=True)]
    least_over_laer: Annotated[float, Column("least", ".3f")]
    direct: Annotated[Distance, Column("rows direct", kept=True)]
    by_node: Annotated[Distance, Column("experts node by node")]
    once: Annotated[Distance, Column("once a node")]
    pinned: Annotated[Distance, Column("pinned")]
    pinned_once: Annotated[Distance, Column("pinned, once a node")]


@dataclass(frozen=True)
class CaseRatios:
    """Ratios of a case and a seed. over: seconds divided by the bound, by strategy; the others as in the row."""

    over: dict[str, float]
    over_laer: float
    least_over_laer: float


def certify_case(case: PlannedCase, seed: int) -> CaseRatios:
    loads, over, layer_us = case.loads(seed), {}, {}
    for name, strategy in case.strategies().items():
        plan = case.plan_second_load(strategy, loads)
        found = certify_seconds(plan.tokens, case.cluster, case.model, strategy)
        over[name] = float(found.plan_s / found.bound_s)
        if name in ("direct", "laer"):
            layer_us[name] = simulate(StepPlan(strategy, case.model, case.cluster, (plan,))).length_us
    return CaseRatios(over, layer_us["direct"] / layer_us["laer"], 1 / over.pop("laer"))


def row_of(case: PlannedCase, found: Sequence[CaseRatios]) -> CertificateRow:
    """Returns the row of a case from the ratios of its seeds."""
    distances = [[each.over[name] for each in found] for name in found[0].over]
    return CertificateRow(
        case.name,
        *(case.num_ranks, case.slots),
        *(statistics.median(getattr(each, name) for each in found) for name in ("over_laer", "least_over_laer")),
        *(Distance(statistics.median(each), max(each)) for each in distances),
    )


@refusing()
def bench_certificates(
    seeds: Annotated[int, option("N", "Number of drawn loads of each case.", min=1)] = 3,
    jobs: Jobs = None,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Plans, writes and prints."""
    drawn = [(case, seed) for case in CASES for seed in range(seeds)]
    # Cases of many ranks take longest.
    order = sorted(drawn, key=lambda one: -one[0].num_ranks)
    found: dict[tuple[PlannedCase, int], CaseRatios] = {}
    with (
        steps_told("certificates", len(drawn), output.quiet) as tell,
        closing(Workers(num_workers(jobs), warm_up)) as workers,
    ):
        answers = {workers.submit(certify_case, case, seed): (case, seed) for case, seed in order}
        for answer in as_completed(answers):
            case, seed = answers[answer]
            found[case, seed] = answer.result()
            tell(f"{case.name}, {case.num_ranks} ranks x {case.slots} slots, seed {seed}")
    rows = [row_of(case, [found[case, seed] for seed in range(seeds)]) for case in CASES]
    notes = [
        "Seconds of a planned layer, divided by the least that any layout with these slots and any split takes "
        f"(certify_seconds, without latencies, tiles and memory): the median of {seeds} seeds, and the largest.",
        "Layouts are planned on one load and used on the next one, of the same popularity: log-normal with skew 1, "
        "nearly equal on all ranks. Hot nodes: each node has its own hot experts. Greedy has drift=0.",
        f"A layer's forward and backward of {TOKENS_PER_RANK:,} tokens per rank on nodes of 8 H100, transfers exposed.",
        "over laer, even: the simulated layer, rows direct, divided by that with LAER-MoE's planner and even split. "
        "least: the bound, divided by the seconds of the latter as the bound counts them.",
        "once a node: a token crosses to a node once, and one sum per node returns. Pinned: experts whole on their "
        "owners; other slots are lent.",
    ]
    title = "SIMULATED: how far planned layers are from their bounds"
    publish(Report("certificates", title, "simulated", [Sheet(title, rows, notes)], data={"rows": rows}), output)
