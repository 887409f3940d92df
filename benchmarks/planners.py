"""The command ``planners``: a regression test of ``Greedy``, against the best fixed planner in hindsight, on drawn
sequences of loads.

A sequence has a model, a cluster, a sharding with slots, a lag, and the loads of 32 micro-batches, all drawn. Each
planner plans from history as in training, and the layouts that it uses are judged on the micro-batches that they serve:
the seconds of a layer by the closed form of ``balance.flow.step_cost``, under the split that it takes. ``Greedy``
judges its own candidates by this form, so the ratios show changes of ``Greedy``, and are no evidence against other
planners. Arrays are indexed by S micro-batches, R source ranks and E experts; D draws.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.harness.options import machine_line
from benchmarks.leaderboard.scores import TimedPlanner
from moesys.balance.eplb import Eplb
from moesys.balance.flex_moe import FlexMoe
from moesys.balance.flow.flow_split import FlowSplit, split_costs
from moesys.balance.flow.step_cost import prices_of, with_experts
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.laer import Laer
from moesys.balance.planning_problem import link_domains_of
from moesys.balance.replay import replay_layer
from moesys.balance.run_planner import warm_up
from moesys.balance.static import Static
from moesys.config import Balance, ClusterSpec, Ep, Fsep, ModelShape, Predictor, Sharding, Strategy, presets
from moesys.config.strategy import Ema, Last, Oracle, WindowMean
from moesys.config.workload import Generated
from moesys.display import counted
from moesys.files import FolderLock
from moesys.journal import Journal
from moesys.lab.commands.options import Jobs, option, refusing
from moesys.lab.ranks.pool import Workers
from moesys.lab.runs.environment import source_digest
from moesys.lab.runs.places import num_workers
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish
from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix
from moesys.traces import generate

SEED, NUM_SEQUENCES = 20261127, 300
MICRO_BATCHES, NOT_SCORED, TOKENS_PER_RANK = 32, 4, 8192
# Models by their names in ``presets``.
MODELS = ("QWEN3_30B_A3B", "DEEPSEEK_V3", "OLMOE_1B_7B", "MIXTRAL_8X7B", "LAER_E16K4")
# Slow: with NICs of a tenth.
NODES = (1, 2, 3, 4, 6, 8)
CLUSTERS = {
    **{f"{nodes} x 8 H100": presets.h100(nodes) for nodes in NODES},
    **{f"{nodes} x 8 H100, slow": presets.h100(nodes).replace(inter_node_gb_per_s=36.0) for nodes in NODES[1:]},
    "4 x 8 A100": presets.LAER_A100,
    "4 x 8 H100, domains of 4": presets.h100(4).replace(ranks_per_domain=4),
    "8 x 8 H100, domains of 16": presets.h100(8).replace(ranks_per_domain=16),
    "8 GB200, part of a rack": presets.gb200(2),
    "32 GB200, part of a rack": presets.gb200(8),
    "64 GB200, part of a rack": presets.gb200(16),
    "2 x 16 GB200, parts of racks": presets.gb200(8).replace(ranks_per_domain=16),
}
# Kinds of routing and how often each is drawn; micro-batches that are bursts; domains that take turns.
ROUTINGS = {"steady": 0.5, "node-local": 0.2, "bursts": 0.15, "domains": 0.15}
BURST_SHARE, DOMAINS = 0.25, 3

# Two files of results. LAER's planner is timed beside Greedy, in the same run.
PARTS, TIMED = ("fixed", "greedy"), "laer"
FIXED, PREDICTORS = (Laer(), Eplb(), FlexMoe()), (Last(), WindowMean(), Ema())
# The median, the worst and the share above ``SLOWER`` that Greedy's ratio should have at most, without and with drift.
SLOWER = 1.005
BARS = {False: (0.90, 1.03, 0.04), True: (0.95, 1.05, 0.08)}
# The files of moesys on which scores depend, without other planners. Those of fixed ones do not depend on Greedy's.
SHARED = ("balance/", "cost.py", "row_traffic.py", "traces.py", "layout.py")
OTHERS = (*("cp_sat", "certificate", "late_slots"), *("faster_moe", "llep", "moon_ep", "ultra_ep", "quotas"))
NO_LIMIT = 1 << 60


# --- sequences --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnSequence:
    """The settings of a sequence, a pure function of seed and index.

    extra_slots: of a rank, beyond experts over ranks. ahead: experts and gradients travel behind other layers. drift:
    share of the popularity that is drawn anew in a micro-batch. burst_skew: of other experts that are suddenly hot.
    domain_batches: micro-batches of a domain of prompts, until the next has its turn.
    """

    seed: int
    index: int
    model: str
    cluster: str
    sharding: str
    extra_slots: int
    ahead: bool
    lag: int
    routing: str
    skew: float
    drift: float
    burst_skew: float
    domain_batches: int

    @classmethod
    def draw(cls, seed: int, index: int) -> DrawnSequence:
        rng = np.random.default_rng((seed, index))
        model, cluster = str(rng.choice(MODELS)), str(rng.choice(list(CLUSTERS)))
        owned = -(-getattr(presets, model).num_experts // CLUSTERS[cluster].num_ranks)
        return cls(
            seed=seed,
            index=index,
            model=model,
            cluster=cluster,
            sharding=str(rng.choice(["fsep", "ep"])),
            extra_slots=int(rng.choice([1, max(1, owned // 4), max(1, owned // 2), owned])),
            ahead=bool(rng.integers(2)),
            lag=int(rng.choice([1, 1, 1, 2])),
            routing=str(rng.choice(list(ROUTINGS), p=list(ROUTINGS.values()))),
            skew=round(rng.uniform(0, 2), 2),
            drift=round(rng.uniform(0.01, 0.6), 2) * int(rng.integers(2)),
            burst_skew=round(rng.uniform(0.5, 2), 2),
            domain_batches=int(rng.integers(1, 5)),
        )

    @property
    def words(self) -> str:
        loads = f"{self.routing}, skew {self.skew}, drift {self.drift}"
        if self.routing == "bursts":
            loads += f", bursts of skew {self.burst_skew}"
        elif self.routing == "domains":
            loads += f", each for {counted(self.domain_batches, 'micro-batch')}"
        slots = f"{self.sharding} with {self.sharded.slots_per_rank} slots{', ahead' * self.ahead}, lag {self.lag}"
        return f"{self.model} on {self.cluster}; {slots}; {loads}"

    @property
    def moves(self) -> bool:
        """This is true if the popularity of experts changes from micro-batch to micro-batch."""
        return self.drift > 0 or self.routing in ("bursts", "domains")

    @property
    def shape(self) -> tuple[ModelShape, ClusterSpec]:
        return getattr(presets, self.model), CLUSTERS[self.cluster]

    @property
    def sharded(self) -> Sharding:
        model, cluster = self.shape
        slots = min(model.num_experts, -(-model.num_experts // cluster.num_ranks) + self.extra_slots)
        kind = Fsep if self.sharding == "fsep" else Ep
        return kind(slots_per_rank=slots, prefetch_layers=int(self.ahead), delay_reshard=self.ahead)

    def tokens_SRE(self, micro_batches: int) -> IntArray:
        """Draws the loads."""
        (model, cluster), routing = self.shape, self.routing
        by_node = routing == "node-local"
        sources = cluster.num_nodes if by_node else cluster.num_ranks
        draw = Generated(
            num_layers=1,
            tokens_per_rank=TOKENS_PER_RANK,
            warmup=0,
            steps=micro_batches,
            skew=self.skew,
            drift=self.drift,
            spread=1.0 if by_node else 0.1,
            concentration=300.0 if routing == "domains" else None,
        )
        step_S, rng = np.arange(micro_batches), np.random.default_rng((self.seed, self.index, 1))
        draws, turn_S = [draw], np.zeros_like(step_S)
        if routing == "bursts":
            draws = [draw, draw.replace(skew=self.burst_skew)]
            turn_S = (rng.random(micro_batches) < BURST_SHARE).astype(np.int64)
        elif routing == "domains":
            draws, turn_S = [draw] * DOMAINS, step_S // self.domain_batches % DOMAINS
        seeds = rng.integers(2**32, size=len(draws)).tolist()
        traces = [
            generate(one, sources, model.num_experts, model.top_k, seed) for one, seed in zip(draws, seeds, strict=True)
        ]
        tokens_DSRE = np.stack([trace.tokens_SLRE[:, 0] for trace in traces])
        tokens_SRE: IntArray = tokens_DSRE[turn_S, step_S]
        return tokens_SRE[:, list(cluster.node_of_rank)] if by_node else tokens_SRE


# --- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceScores:
    """A line of results. ``key``: a digest of all that they depend on. seconds: of a layer, summed over the scored
    micro-batches, by planner and predictor; planning_ms: processor time of a plan, their mean, of some planners.
    """

    key: str
    sequence: DrawnSequence
    seconds: dict[str, float]
    planning_ms: dict[str, float]


def layer_seconds(
    strategy: Strategy, model: ModelShape, cluster: ClusterSpec, load: LoadMatrix, layout: ExpertLayout
) -> float:
    """Returns the seconds of a layer, forward and backward, as ``Greedy`` judges its candidates afterwards."""
    prices = prices_of(model, cluster, load.total, strategy.overlap)
    beside, more = with_experts(prices, layout, model, cluster, strategy.sharding)
    rows = split_costs(load.tokens_RE[None], layout.expert_RS, link_domains_of(cluster), beside, NO_LIMIT)
    return float(prices.unit_s) * (int(rows) + more)


def strategies_of(sequence: DrawnSequence, part: str) -> dict[str, Strategy]:
    """Returns the strategies of a part of the results by name: "fixed", or "greedy" with the oracle and one of LAER's,
    which is only timed.
    """

    def strategy(balance: Balance, predictor: Predictor = PREDICTORS[0]) -> Strategy:
        how = {"sharding": sequence.sharded, "split": FlowSplit(max_inter_node="seconds"), "lag": sequence.lag}
        return Strategy(name="planned", balance=balance, predictor=predictor, **how)

    if part == "greedy":
        oracle = strategy(Greedy(drift=0.0), Oracle())
        return {"greedy": strategy(Greedy()), "oracle": oracle, TIMED: strategy(Laer())}
    pairs = {f"{one.kind}, {loads.kind}": strategy(one, loads) for one in FIXED for loads in PREDICTORS}
    return {"static": strategy(Static()), **pairs}


def score(part: str, sequence: DrawnSequence, micro_batches: int = MICRO_BATCHES) -> SequenceScores:
    """Plans a sequence by the strategies of a part, and judges the layouts that they use."""
    model, cluster = sequence.shape
    tokens_SRE, seconds, planning_ms = sequence.tokens_SRE(micro_batches), {}, {}
    for name, strategy in strategies_of(sequence, part).items():
        planner = TimedPlanner(time.process_time, alike=True)
        walk = list(replay_layer(strategy, model, cluster, tokens_SRE, planner=planner))[NOT_SCORED:]
        if name != TIMED:
            seconds[name] = sum(layer_seconds(strategy, model, cluster, one.load, one.layout) for one in walk)
        if part == "greedy" and name != "oracle":
            planning_ms[name] = statistics.fmean(planner.all_ms[NOT_SCORED:])
    return SequenceScores(key_of(part, sequence, micro_batches), sequence, seconds, planning_ms)


def key_of(part: str, sequence: DrawnSequence, micro_batches: int) -> str:
    """Returns a digest of all that the scores of a part depend on."""
    declared = (*sequence.shape, *strategies_of(sequence, part).values())
    rules = repr((part, sequence, micro_batches, NOT_SCORED, TOKENS_PER_RANK))
    words = (rules, *(one.fingerprint() for one in declared), _source(part))
    return sha256("\n".join(words).encode()).hexdigest()[:24]


@cache
def _source(part: str) -> str:
    own = "".join(inspect.getsource(each) for each in (DrawnSequence.tokens_SRE, layer_seconds, score))
    others = tuple(f"balance/{name}" for name in (OTHERS if part == "greedy" else (*OTHERS, "greedy")))
    return own + source_digest(lambda name: name.startswith(SHARED) and not name.startswith(others))


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceRatio:
    """The seconds of Greedy, and of Greedy that knows the next load, over those of the best fixed planner."""

    sequence: DrawnSequence
    best: Annotated[str, Column("best fixed planner", kept=True)]
    ratio: Annotated[float, Column("greedy / best", ".3f", kept=True)]
    oracle: Annotated[float, Column("oracle / best", ".3f")]
    planning_ms: dict[str, float]

    @property
    def number(self) -> Annotated[int, Column("sequence", after="sequence", kept=True)]:
        return self.sequence.index

    @property
    def settings(self) -> Annotated[str, Column("settings", after="number", wraps=True, kept=True)]:
        return self.sequence.words


@dataclass(frozen=True)
class RatioSummary:
    """Ratios of the sequences without or with drift, beside the bars, and medians of the processor time of a plan."""

    loads: Annotated[str, Column("loads", kept=True)]
    number: Annotated[int, Column("number", kept=True)]
    median: Annotated[float, Column("median", ".3f", kept=True)]
    median_bar: Annotated[float, Column("bar", ".2f")]
    mean: Annotated[float, Column("mean", ".3f", kept=True)]
    worst: Annotated[float, Column("worst", ".3f", kept=True)]
    worst_bar: Annotated[float, Column("bar", ".2f")]
    slower: Annotated[float, Column(f"above {SLOWER} %", ".1f", 100, kept=True)]
    slower_bar: Annotated[float, Column("bar", ".0f", 100)]
    oracle: Annotated[float, Column("oracle", ".3f")]
    greedy_ms: Annotated[float, Column("greedy's plan, ms", ".2f")]
    laer_ms: Annotated[float, Column("laer's, ms", ".2f")]


def all_scores(
    sequences: Sequence[DrawnSequence], folder: Path, jobs: int, micro_batches: int, quiet: bool
) -> list[tuple[SequenceScores, SequenceScores]]:
    """Returns the scores of fixed planners and of Greedy for each sequence. Those that ``folder`` has no line of are
    made by ``jobs`` processes, and appended as they come.

    Raises ValueError if another process writes into the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder) as lock:
        journals = {part: Journal(folder / f"{part}.jsonl", SequenceScores, "a score", lock=lock) for part in PARTS}
        known = {scores.key: scores for journal in journals.values() for scores in journal.read()}
        keys = {(one, part): key_of(part, one, micro_batches) for one in sequences for part in PARTS}
        missing = {key: (part, one) for (one, part), key in keys.items() if key not in known}
        begin_s = time.monotonic()
        with steps_told("planners", len(missing), quiet) as tell:
            for done, scores in enumerate(_made(list(missing.values()), jobs, micro_batches), start=1):
                part, known[scores.key] = missing[scores.key][0], scores
                journals[part].append(scores)
                left_min = (time.monotonic() - begin_s) / done * (len(missing) - done) / 60
                tell(f"sequence {scores.sequence.index}, {part}; about {left_min:.0f} min left")
    return [(known[keys[one, "fixed"]], known[keys[one, "greedy"]]) for one in sequences]


def _made(missing: Sequence[tuple[str, DrawnSequence]], jobs: int, micro_batches: int) -> Iterator[SequenceScores]:
    if jobs == 1:
        warm_up()
        for part, sequence in missing:
            yield score(part, sequence, micro_batches)
        return
    with closing(Workers(jobs, warm_up)) as workers:
        answers = [workers.submit(score, part, sequence, micro_batches) for part, sequence in missing]
        for answer in as_completed(answers):
            yield answer.result()


def ratios(scores: Sequence[tuple[SequenceScores, SequenceScores]]) -> list[SequenceRatio]:
    found = []
    for fixed, ours in scores:
        best = min(fixed.seconds, key=lambda name: fixed.seconds[name])
        greedy, oracle = (ours.seconds[name] / fixed.seconds[best] for name in ("greedy", "oracle"))
        found.append(SequenceRatio(fixed.sequence, best, greedy, oracle, ours.planning_ms))
    return found


def summary(found: Sequence[SequenceRatio], moves: bool) -> RatioSummary:
    chosen = [one for one in found if one.sequence.moves == moves]
    ratio, (median_bar, worst_bar, slower_bar) = [one.ratio for one in chosen], BARS[moves]
    rest = [(one.oracle, one.planning_ms["greedy"], one.planning_ms[TIMED]) for one in chosen]
    return RatioSummary(
        "with drift" if moves else "without drift",
        *(len(chosen), statistics.median(ratio), median_bar, statistics.fmean(ratio), max(ratio), worst_bar),
        *(statistics.fmean(one > SLOWER for one in ratio), slower_bar),
        *map(statistics.median, zip(*rest, strict=True)),
    )


@refusing()
def bench_planners(
    sequences: Annotated[int, option("N", "Number of sequences.", min=1)] = NUM_SEQUENCES,
    seed: Annotated[int, option("N", "Seed of the sequences.", min=0)] = SEED,
    jobs: Jobs = None,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Scores the sequences that the folder has no results of, writes the page there and prints the tables."""
    folder = output.folder or Path("planners")
    drawn = [DrawnSequence.draw(seed, index) for index in range(sequences)]
    found = ratios(all_scores(drawn, folder, num_workers(jobs), MICRO_BATCHES, output.quiet))
    title = f"SIMULATED: regression test of Greedy, {counted(sequences, 'sequence')}"
    notes = [
        "A regression test: the seconds are those of the closed form by which Greedy judges its own candidates.",
        f"Seed {seed}; {MICRO_BATCHES} micro-batches of {TOKENS_PER_RANK:,} tokens per rank, of which the first "
        f"{NOT_SCORED} are not scored. With drift: also bursts, and domains in turn.",
        "Ratio: the seconds of Greedy over those of the best of Static, LAER, EPLB and FlexMoE, each with the best of "
        "three predictors in hindsight, with the same slots, lag and sharding.",
        "Oracle: the median of Greedy without history that plans on the load that it will serve.",
        f"Plan: of one layer, processor time, measured on {machine_line(1, ('numpy', 'numba'))}.",
    ]
    sheets = [
        Sheet(title, [summary(found, moves) for moves in sorted({one.sequence.moves for one in found})], notes),
        Sheet("SIMULATED: the sequences with the largest ratios", sorted(found, key=lambda one: -one.ratio)[:10]),
    ]
    data = {"seed": seed, "summary": sheets[0].rows, "sequences": found}
    publish(Report("planners", title, "simulated", sheets, data=data), replace(output, folder=folder))
