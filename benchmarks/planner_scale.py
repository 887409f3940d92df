"""Planning times over sizes: layouts and splits for 8 to 1,024 ranks and up to 58 layers, on generated loads.

First plans of one load, for which DeepSeek's own EPLB takes part where a checkout of deepseek-ai/EPLB is given (it is
never a dependency); then plans from history, as training makes them after each micro-batch. S micro-batches, L layers.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from benchmarks.harness.options import Repeats, machine_line
from benchmarks.harness.stopwatch import interleave, repeated_ms, wall_ms
from moesys.balance.eplb import Eplb
from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.greedy.leader import FIRST_PLANS, search_period
from moesys.balance.laer import Laer
from moesys.balance.replay import ReplayBatch, replay_layer
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import Balance, ClusterSpec, Fsep, ModelRun, ModelSpec, Split, Strategy, presets
from moesys.config.workload import Generated
from moesys.lab.commands.options import option, refusing
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.simulator.model.simulate_model import simulate_model
from moesys.traces import Trace, generate

TOKENS_PER_RANK, TOP_K = 8192, 8
# Layers are planned in parallel.
THREADS = 2
# Plans from history are timed over so many repetitions of each search.
SEARCHED = 2
PLANNERS: dict[str, tuple[Balance, Split]] = {
    "greedy + flow": (Greedy(), FlowSplit()),
    "greedy, effort 0 + flow": (Greedy(effort=0), FlowSplit()),
    "eplb + even": (Eplb(), EvenSplit()),
    "laer + even": (Laer(), EvenSplit()),
}
PEER = "EPLB's own code"
# EPLB's own code takes minutes for one plan on 1,024 ranks.
MOST_PEER_RANKS = 256


@dataclass(frozen=True)
class SizeCase:
    """Loads of some layers on nodes of 8 ranks.

    zipf: the exponent of the experts' popularity, whose order is shuffled; a rank's choices are independent of one
    another, so a hot expert may be chosen more often than there are tokens. None: uniform counts of 0 to 999, with
    which LAER-MoE times its own planner.
    """

    num_experts: int
    num_ranks: int
    slots: int
    zipf: float | None = 1.0
    num_layers: int = 1

    @property
    def name(self) -> str:
        routing = "uniform" if self.zipf is None else f"Zipf {self.zipf}"
        layers = f", {self.num_layers} layers" if self.num_layers > 1 else ""
        return f"{self.num_experts} experts, {self.num_ranks} ranks x {self.slots} slots{layers}, {routing}"

    @property
    def cluster(self) -> ClusterSpec:
        in_node = min(8, self.num_ranks)
        return ClusterSpec(num_nodes=self.num_ranks // in_node, ranks_per_node=in_node)

    def loads(self, seed: int) -> list[LoadMatrix]:
        """Returns the load of each layer, a pure function of ``seed``."""
        R, E = self.num_ranks, self.num_experts
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, E, R))))
        if self.zipf is None:
            return [LoadMatrix(rng.integers(0, 1000, (R, E))) for _ in range(self.num_layers)]
        weight_E = np.arange(1, E + 1) ** -self.zipf
        shares = [rng.permutation(weight_E) / weight_E.sum() for _ in range(self.num_layers)]
        return [LoadMatrix(rng.multinomial(TOKENS_PER_RANK * TOP_K, share_E, size=R)) for share_E in shares]


CASES = (
    *(
        SizeCase(num_experts, num_ranks, num_experts // num_ranks + 1, zipf)
        for num_experts, num_ranks in ((64, 8), (128, 32), (256, 64), (512, 256))
        for zipf in (0.5, 1.0, 1.5)
    ),
    SizeCase(32, 1024, 16, zipf=None),
    SizeCase(256, 1024, 2, zipf=None),
    SizeCase(256, 32, 9, num_layers=58),
)


@dataclass(frozen=True)
class SizeRow:
    """One planner in one case: medians of times, means of the balance over layers and seeds, and the worst of them.

    layout_ms: of all layers. split_ms: of one. gap: the busiest rank's tokens over the min-cut bound of the layout.
    """

    case: Annotated[str, Column("case")]
    planner: Annotated[str, Column("planner + split", wraps=True)]
    layout_ms: Annotated[float, Column("layout ms", ".3f")]
    split_ms: Annotated[float, Column("split ms", ".3f")]
    max_over_mean: Annotated[float, Column("max/mean", ".4f")]
    worst: Annotated[float, Column("worst", ".4f")]
    gap: Annotated[float, Column("gap %", ".2f", 100)]


@dataclass(frozen=True)
class TrainingCase:
    """Layers of a model on nodes of 8 H100, fully sharded, that are planned anew after each micro-batch.

    drift: share of the experts' log-popularity that a micro-batch draws anew. whole: all layers with experts, which
    ``THREADS`` threads plan, are compared with a step of the model; otherwise one layer is planned.
    """

    model_name: str
    num_ranks: int
    slots: int
    drift: float
    whole: bool = False

    @cached_property
    def run(self) -> ModelRun:
        """The whole model with ``Greedy``, two sequences of 4,096 tokens per rank."""
        model, cluster = ModelSpec.from_config(self.model_name), presets.h100(self.num_ranks // 8)
        return ModelRun(model=model, cluster=cluster, strategy=self.strategy(Greedy()), micro_batch=2)

    @property
    def num_layers(self) -> int:
        return len(self.run.model.moe_layers) if self.whole else 1

    @property
    def name(self) -> str:
        layers = f"{self.num_layers} layers on {THREADS} threads, " if self.whole else ""
        experts = self.run.shape.num_experts
        return f"{experts} experts, {self.num_ranks} ranks x {self.slots} slots, {layers}drift {self.drift}"

    @property
    def micro_batches(self) -> int:
        """The first plans, and those in which each of ``Greedy``'s searches is repeated ``SEARCHED`` times."""
        return 1 + FIRST_PLANS + SEARCHED * search_period(self.num_ranks * self.slots)

    def strategy(self, balance: Balance) -> Strategy:
        split = FlowSplit(max_inter_node="seconds")
        return Strategy(name="planned", sharding=Fsep(slots_per_rank=self.slots), balance=balance, split=split)

    def trace(self, micro_batches: int) -> Trace:
        routing = Generated(
            num_layers=self.num_layers, tokens_per_rank=TOKENS_PER_RANK, warmup=0, steps=micro_batches, drift=self.drift
        )
        return generate(routing, self.num_ranks, self.run.shape.num_experts, self.run.shape.top_k, 0)

    def walks(self) -> dict[str, list[Iterator[ReplayBatch]]]:
        """Returns what goes through each layer's micro-batches, planning for each, by planner."""
        shape, cluster = self.run.shape, self.run.cluster
        tokens_SLRE = self.trace(self.micro_batches).tokens_SLRE
        return {
            balance.kind: [
                replay_layer(self.strategy(balance), shape, cluster, tokens_SLRE[:, layer], layer=layer)
                for layer in range(self.num_layers)
            ]
            for balance in (Greedy(), Laer())
        }

    def step_ms(self) -> float:
        """Returns the simulated time of a step of the whole model with ``Greedy``, after its first plans."""
        return 1e3 * simulate_model(self.run, self.trace(FIRST_PLANS + 4), draws=1).seconds


TRAINING_CASES = (
    TrainingCase("qwen3-30b-a3b", 32, 5, 0.3),
    TrainingCase("qwen3-30b-a3b", 64, 4, 0.3),
    TrainingCase("qwen3-30b-a3b", 64, 5, 0.3),
    TrainingCase("deepseek-v3", 128, 3, 0.3),
    TrainingCase("qwen3-30b-a3b", 64, 4, 0.3, whole=True),
    TrainingCase("qwen3-30b-a3b", 64, 4, 0.0, whole=True),
)


@dataclass(frozen=True)
class TrainingRow:
    """One planner in one case: the time from the counts of a micro-batch to all layouts, over micro-batches.

    over_laer: mean divided by LAER's mean. of_step: mean divided by the simulated step, if the case is a whole model.
    """

    case: Annotated[str, Column("case", wraps=True)]
    planner: Annotated[str, Column("planner", kept=True)]
    plan_ms: Annotated[Quantiles, Column("plan ms [p20, p80]", ".2f", kept=True)]
    mean_ms: Annotated[float, Column("mean", ".2f")]
    worst_ms: Annotated[float, Column("worst", ".2f")]
    over_laer: Annotated[float, Column("over laer", ".2f", kept=True)]
    of_step: Annotated[float | None, Column("of the step %", ".1f", 100)]


def load_peer(path: Path) -> Callable[..., Any]:
    """Returns ``rebalance_experts`` of a checkout of deepseek-ai/EPLB: its folder, or its eplb.py. Runs that file.

    Raises ValueError if there is none.
    """
    file = path / "eplb.py" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"peer_eplb={path} has no eplb.py; give a folder that deepseek-ai/EPLB was checked out to")
    names = runpy.run_path(str(file))
    if "rebalance_experts" not in names:
        raise ValueError(f"{file} has no rebalance_experts; give the eplb.py of deepseek-ai/EPLB")
    rebalance: Callable[..., Any] = names["rebalance_experts"]
    return rebalance


def measure(
    case: SizeCase, planner: str, num_seeds: int, repeats: int, peer: Callable[..., Any] | None = None
) -> SizeRow:
    """Times one of ``PLANNERS``, or with ``peer`` EPLB's own code in its global form."""
    cluster, slots = case.cluster, case.slots
    balance, split = PLANNERS.get(planner, PLANNERS["eplb + even"])
    # EPLB's even split is over all replicas alike; LAER-MoE's prefers those on the source's node.
    split_on = ClusterSpec(ranks_per_node=case.num_ranks) if isinstance(balance, Eplb) else cluster

    def plan(loads: Sequence[LoadMatrix]) -> list[ExpertLayout]:
        if peer is None:
            with ThreadPoolExecutor(THREADS) as pool:
                return list(pool.map(lambda load: plan_layout(load, cluster, balance, slots), loads))
        loads_LE = torch.from_numpy(np.stack([load.tokens_E for load in loads]))
        expert_LP = peer(loads_LE, slots * case.num_ranks, 1, 1, case.num_ranks)[0].numpy().astype(np.int64)
        return [ExpertLayout(expert_P.reshape(-1, slots), case.num_experts) for expert_P in expert_LP]

    layout_ms, split_ms, ratios, gaps = [], [], [], []
    for loads in map(case.loads, range(num_seeds)):
        layout_ms += repeated_ms(partial(plan, loads), repeats)
        for load, layout in zip(loads, plan(loads), strict=True):
            divide = partial(split_tokens, load, layout, split_on, split)
            split_ms += repeated_ms(divide, repeats)
            tokens = divide()
            ratios.append(tokens.max_over_mean)
            gaps.append(tokens.tokens_R.max() / min_max_load(load, layout) - 1)
    return SizeRow(
        case=case.name,
        planner=planner,
        layout_ms=float(np.median(layout_ms)),
        split_ms=float(np.median(split_ms)),
        max_over_mean=float(np.mean(ratios)),
        worst=max(ratios),
        gap=float(np.mean(gaps)),
    )


def measure_training(case: TrainingCase) -> list[TrainingRow]:
    """Times the planners' plans after ``Greedy``'s first ones, one planner beside the other."""
    walks = case.walks()
    with ThreadPoolExecutor(THREADS) as pool:
        at_once: Callable[..., Iterator[ReplayBatch]] = pool.map if case.whole else map

        def advance(name: str) -> float:
            return wall_ms(lambda: list(at_once(next, walks[name])))

        all_ms = interleave({name: partial(advance, name) for name in walks}, case.micro_batches - 1)
    ms = {name: each[FIRST_PLANS:] for name, each in all_ms.items()}
    mean_ms = {name: float(np.mean(each)) for name, each in ms.items()}
    step_ms = case.step_ms() if case.whole else None
    return [
        TrainingRow(
            *(case.name, name, Quantiles.of(ms[name]), mean_ms[name], max(ms[name]), mean_ms[name] / mean_ms["laer"]),
            None if step_ms is None else mean_ms[name] / step_ms,
        )
        for name in ms
    ]


@refusing()
def bench_planner_scale(
    peer_eplb: Annotated[
        Path | None, option("DIR", "Time this checkout of deepseek-ai/EPLB as well.", exists=True, file_okay=False)
    ] = None,
    seeds: Annotated[int, option("N", "Number of generated loads of each case.", min=1)] = 3,
    repeats: Repeats = 9,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Measures, writes and prints."""
    rebalance = load_peer(peer_eplb) if peer_eplb else None
    runs = [(case, planner) for case in CASES for planner in PLANNERS]
    if rebalance:
        runs += [(case, PEER) for case in CASES if case.num_ranks <= MOST_PEER_RANKS]
    rows, in_training = [], []
    with steps_told("planner-scale", len(runs) + len(TRAINING_CASES), output.quiet) as tell:
        for case, planner in sorted(runs, key=lambda run: CASES.index(run[0])):
            tell(f"{case.name}, {planner}")
            rows.append(measure(case, planner, seeds, repeats, rebalance if planner == PEER else None))
        for trained in TRAINING_CASES:
            tell(trained.name)
            in_training += measure_training(trained)
    machine = machine_line(THREADS, ("numpy", "numba", "ortools", "torch"))
    notes = [
        f"{machine}; {TOKENS_PER_RANK:,} tokens per rank, top-{TOP_K}, nodes of 8 ranks; {seeds} seeds",
        f"ms: medians of {repeats} calls per seed, after one of warm-up; layout: all layers; split: one layer.",
        "gap: the busiest rank's tokens over the min-cut bound of the layout.",
        "even: over the replicas on the source's node, if it has any; EPLB's: over all replicas alike.",
    ]
    title = "MEASURED: planning times over sizes"
    training_notes = [
        f"{TOKENS_PER_RANK:,} tokens per rank, skew 1; drift: share of the experts' log-popularity that a micro-batch "
        f"draws anew. The first {FIRST_PLANS} plans are not timed; the others repeat each of Greedy's searches "
        f"{SEARCHED} times.",
        "plan: from the counts of a micro-batch to the layouts of all layers, on one host; ranks that train divide the "
        "layers among them.",
        "laer: moesys' own implementation, in Python; where slots are a multiple of experts, it compares two layouts.",
        "of the step: the mean, divided by the simulated step of the whole model with Greedy (two sequences of 4,096 "
        "tokens per rank).",
    ]
    sheets = [
        Sheet(title, rows, notes, group_by="case"),
        Sheet("MEASURED: plans from history", in_training, training_notes, group_by="case"),
    ]
    data = {"machine": machine, "rows": rows, "from_history": in_training}
    publish(Report("planner-scale", title, "measured", sheets, data=data), output)
