"""Scores planners in one setting: simulated seconds, balance and more on micro-batches that the planners have not seen.

Layouts follow from history as in training, micro-batch by micro-batch; with ``lag=0`` they are planned on the counts.
Results are kept as one line of JSON per planner, setting and seed, and a crash loses those that are being scored.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

from benchmarks.leaderboard.planners import PlannerGroup, PlannerPair
from benchmarks.leaderboard.workloads import SCORED, RoutingSetting, balanced_tokens
from moesys.balance.greedy.numbering import num_moves
from moesys.balance.layout_schedule import PlanOutcome, PlanRequest
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.balance.replay import replay_layer
from moesys.config import BYTES_PER_GB, ClusterSpec, Ep, ModelShape, Strategy
from moesys.config.base import in_words
from moesys.cost import restore_bytes
from moesys.display import counted
from moesys.files import FolderLock
from moesys.journal import Journal
from moesys.lab.runs.environment import source_digest
from moesys.lab.runs.places import num_workers, simulating_workers
from moesys.lab.show.progress import steps_told
from moesys.layout import ExpertLayout, owner_of_experts
from moesys.limits import rank_memory
from moesys.load import LoadMatrix
from moesys.simulator.step_program import simulate

FILE = "results.jsonl"
# Packages of moesys on which no planned or simulated number depends, and files beside this one on which they do.
_WITHOUT_INFLUENCE = {"kernels", "overlap", "moe", "hf", "tuner", "lab"}
_WITH_INFLUENCE = ("planners.py", "scores.py")
# A step has two equal layers and its time is halved, so that waits between layers are included.
NUM_LAYERS = 2


@dataclass(frozen=True)
class PlannerScores:
    """The scores of one pair in one sample: each list has an item per scored micro-batch, ``planning_ms`` per plan.

    layer_ms: forward and backward of a layer, simulated. max_over_mean: tokens of the busiest rank over the mean.
    crossing: share of the routed tokens that leave their domain. copies: replicas that a plan brings to ranks that did
    not hold them; with ``Ep``, experts that are lent. restored_gb: all ranks in a forward. memory_gb: an upper bound
    for the rank that holds most. planning_ms: of a layout, measured; with ``lag=0``, the split included. forced_ms: as
    ``layer_ms``, of plain ``Ep`` on the same tokens in forced balance; none if a rank would own no expert. cannot: the
    reason why there are no scores.
    """

    layer_ms: list[float] = field(default_factory=list)
    max_over_mean: list[float] = field(default_factory=list)
    crossing: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    restored_gb: list[float] = field(default_factory=list)
    memory_gb: list[float] = field(default_factory=list)
    planning_ms: list[float] = field(default_factory=list)
    forced_ms: list[float] = field(default_factory=list)
    cannot: str = ""


@dataclass
class TimedPlanner:
    """A plan source that plans at once. ``all_ms`` has the time of each plan by ``clock``; the first one warms up."""

    clock: Callable[[], float] = time.perf_counter
    alike: bool = False
    all_ms: list[float] = field(default_factory=list)

    def submit(self, request: PlanRequest) -> PlanOutcome:
        begin_s = self.clock()
        plan = request.solve(alike=self.alike)
        self.all_ms.append(1e3 * (self.clock() - begin_s))
        return plan


def score(
    setting: RoutingSetting, group: PlannerGroup, pairs: Sequence[PlannerPair], sample: int
) -> Iterator[tuple[PlannerPair, PlannerScores]]:
    """Scores pairs that share their layout planner, whose layouts are planned once for all of them."""
    strategies: dict[PlannerPair, Strategy] = {}
    for pair in pairs:
        try:
            strategies[pair] = group.strategy(pair, setting.model, setting.cluster)
        except ValueError as error:
            yield pair, _refused(error)
    if not strategies:
        return
    meter = _Meter(setting, sample)
    try:
        planned = meter.planned(next(iter(strategies.values()))) if group.lag else None
    except ValueError as error:
        yield from ((pair, _refused(error)) for pair in strategies)
        return
    for pair, strategy in strategies.items():
        try:
            yield pair, meter.on_history(strategy, *planned) if planned else meter.on_counts(strategy)
        except ValueError as error:
            yield pair, _refused(error)


def _refused(error: ValueError) -> PlannerScores:
    return PlannerScores(cannot=" ".join(in_words(error).split()))


class _Meter:
    """Scores strategies in one setting; equal plans of several splits are simulated once."""

    def __init__(self, setting: RoutingSetting, sample: int) -> None:
        self._setting, self._model, self._cluster = setting, setting.model, setting.cluster
        self._tokens_SRE = setting.tokens_SRE(sample)
        self._layer_ms: dict[bytes, float] = {}

    def planned(self, strategy: Strategy) -> tuple[list[ExpertLayout], list[float]]:
        """Returns each micro-batch's layout, planned on history, and the milliseconds of each plan."""
        planner = TimedPlanner()
        walk = replay_layer(strategy, self._model, self._cluster, self._tokens_SRE, planner=planner)
        return [one.layout for one in walk], planner.all_ms[1:] or [0.0]

    def on_history(
        self, strategy: Strategy, layouts: Sequence[ExpertLayout], planning_ms: list[float]
    ) -> PlannerScores:
        """Scores the micro-batches after the warm-up on layouts that were ``planned``."""
        scores, first = PlannerScores(planning_ms=planning_ms), self._setting.warm_up
        for turn in range(first, len(self._tokens_SRE)):
            load, layout = LoadMatrix(self._tokens_SRE[turn]), layouts[turn]
            self._add(
                scores, strategy, plan_layer(strategy, self._model, self._cluster, load, layout=layout, turn=turn)
            )
            scores.copies.append(float(num_moves(layouts[turn - 1].replicas_RE, layout.replicas_RE)))
        return scores

    def on_counts(self, strategy: Strategy) -> PlannerScores:
        """Scores the same micro-batches on layouts of their own counts."""
        scores, first, model = PlannerScores(), self._setting.warm_up, self._model
        # The plan before the first scored one compiles code and is not timed.
        for turn in range(first - 1, len(self._tokens_SRE)):
            load, begin_s = LoadMatrix(self._tokens_SRE[turn]), time.perf_counter()
            plan = plan_layer(strategy, model, self._cluster, load, turn=turn)
            if turn >= first:
                scores.planning_ms.append(1e3 * (time.perf_counter() - begin_s))
                self._add(scores, strategy, plan)
                expert_gb = model.bytes_per_element * model.expert_parameters / BYTES_PER_GB
                scores.copies.append(float(round(scores.restored_gb[-1] / expert_gb)))
        return scores

    def _add(self, scores: PlannerScores, strategy: Strategy, plan: LayerPlan) -> None:
        model, cluster = self._model, self._cluster
        key = plan.load.tokens_RE.tobytes() + plan.layout.expert_RS.tobytes() + plan.tokens.entries.tobytes()
        if key not in self._layer_ms:
            self._layer_ms[key] = _simulated_ms(strategy, model, cluster, plan)
        restored = restore_bytes(plan.layout, model, cluster, strategy.sharding)
        scores.layer_ms.append(self._layer_ms[key])
        scores.max_over_mean.append(float(plan.tokens.max_over_mean))
        scores.crossing.append(float(plan.tokens.inter_node_tokens(cluster.domain_of_rank) / plan.load.total))
        scores.restored_gb.append(sum(float(bytes_RR.sum()) for bytes_RR in restored) / BYTES_PER_GB)
        # An upper bound: as if the rank with most rows also held most experts.
        filled = int((plan.layout.expert_RS >= 0).sum(axis=1).max())
        held = strategy.replace(sharding=strategy.sharding.replace(slots_per_rank=filled), late_slots=0)
        most_tokens = -(-int(plan.tokens.tokens_R.max()) // model.top_k)
        scores.memory_gb.append(rank_memory(held, model, cluster, 1, most_tokens).gb)
        if owner_of_experts(model.num_experts, cluster.num_ranks)[-1] == cluster.num_ranks - 1:
            scores.forced_ms.append(forced_balance_ms(model, cluster, plan.load.total))


@cache
def forced_balance_ms(model: ModelShape, cluster: ClusterSpec, num_routed: int) -> float:
    """Returns the simulated time of a layer with plain ``Ep`` if each expert got as many tokens of each rank."""
    load = LoadMatrix(balanced_tokens(num_routed, cluster.num_ranks, model.num_experts))
    strategy = Strategy(name="forced balance", sharding=Ep())
    return _simulated_ms(strategy, model, cluster, plan_layer(strategy, model, cluster, load))


def _simulated_ms(strategy: Strategy, model: ModelShape, cluster: ClusterSpec, plan: LayerPlan) -> float:
    step = StepPlan(strategy, model, cluster, (plan,) * NUM_LAYERS)
    return float(simulate(step).length_us) / 1e3 / NUM_LAYERS


# --- results that are kept ---


@dataclass(frozen=True)
class PlannerResult:
    """A line: one pair of planners in one group, setting and sample. ``key`` is a digest of all that the scores depend
    on. lag: 0 if a layer waits for its plan.
    """

    key: str
    group: str
    workload: str
    model: str
    cluster: str
    slots: int
    planner: str
    sample: int
    scores: PlannerScores
    lag: int = 1

    @property
    def setting(self) -> tuple[str, str, str]:
        return self.workload, self.model, self.cluster


def results(
    settings: Sequence[RoutingSetting],
    groups: Sequence[PlannerGroup],
    num_samples: int,
    folder: Path,
    *,
    jobs: int | None = 1,
    quiet: bool = False,
) -> list[PlannerResult]:
    """Returns the results of all planners in all settings, and scores those that ``folder`` has no line of, on ``jobs``
    processes. It goes sample by sample, so that an unfinished leaderboard has all settings, but plans for which a layer
    waits are made and timed at the end, by this process alone.

    Raises ValueError, before anything is scored, for a sample that a trace does not have, and if another process
    writes into the folder.
    """
    with FolderLock(folder) as lock:
        journal = replace(result_journal(folder), lock=lock)
        known = {result.key: result for result in journal.read()}
        if known and not quiet:
            print(f"{folder} has {counted(len(known), 'result')} already, which are not scored again.", file=sys.stderr)
        wanted: list[str] = []
        tasks: list[_Task] = []
        for sample in range(num_samples):
            for setting in settings:
                routing = _digest(setting, sample)
                for group in groups:
                    keys = {pair: _key(setting, group, pair, routing) for pair in group.pairs}
                    wanted += keys.values()
                    missing = [pair for pair, key in keys.items() if key not in known]
                    for balance in dict.fromkeys(pair.balance for pair in missing):
                        its = {pair: keys[pair] for pair in missing if pair.balance == balance}
                        tasks.append(_Task(setting, group, sample, its))
        with steps_told("leaderboard", len(tasks), quiet) as tell, closing(_scored_tasks(tasks, jobs)) as scored:
            for task, found in scored:
                tell(f"{task.setting.name}, seed {task.sample}, {found[0].planner.split(' + ')[0]}")
                for result in found:
                    journal.append(result)
                    known[result.key] = result
    return [known[key] for key in wanted]


@dataclass(frozen=True)
class _Task:
    """A process scores one task at a time: pairs of a group that share their layout planner, each with its key."""

    setting: RoutingSetting
    group: PlannerGroup
    sample: int
    keys: dict[PlannerPair, str]

    def results(self) -> list[PlannerResult]:
        setting, group, sample = self.setting, self.group, self.sample
        names = setting.routing.name, setting.model_name, setting.cluster_name
        slots = group.slots(setting.model, setting.cluster)
        return [
            PlannerResult(self.keys[pair], group.name, *names, slots, pair.name, sample, scores, group.lag)
            for pair, scores in score(setting, group, list(self.keys), sample)
        ]


def _scored_tasks(tasks: Sequence[_Task], jobs: int | None) -> Generator[tuple[_Task, list[PlannerResult]], None, None]:
    """Yields each task with its results. Workers take over after the first seconds, and yield those that are done.

    Where a layer waits for its plan, the time of planning counts: these tasks are last, and nothing runs beside them.
    """
    workers, left = simulating_workers(num_workers(jobs), lambda: None), [task for task in tasks if task.group.lag]
    with closing(workers):
        while left and (workers.num_workers == 1 or not workers.are_due):
            task = left.pop(0)
            yield task, task.results()
        answers = {workers.submit(_Task.results, task): task for task in left}
        for answer in as_completed(answers):
            yield answers[answer], answer.result()
    yield from ((task, task.results()) for task in tasks if not task.group.lag)


def result_journal(folder: Path) -> Journal[PlannerResult]:
    """Returns the journal of a leaderboard's folder."""
    repair = "delete the line to score it again, or use another folder"
    return Journal(folder / FILE, PlannerResult, "a result", repair, schema=1)


def _digest(setting: RoutingSetting, sample: int) -> str:
    tokens_SRE = setting.tokens_SRE(sample)
    routing = sha256(repr(tokens_SRE.shape).encode() + tokens_SRE.astype("<i8").tobytes()).hexdigest()
    return f"{setting.name}, {sample}: {routing}"


def _key(setting: RoutingSetting, group: PlannerGroup, pair: PlannerPair, routing: str) -> str:
    """Covers the source of a user's planner, and of the parts of moesys that numbers depend on."""
    parts = setting.model, setting.cluster, pair.balance, pair.split
    slots = group.slots(setting.model, setting.cluster)
    rules = repr((group.name, slots, group.lag, group.late_slots, group.predictor, setting.warm_up, SCORED))
    words = (routing, rules, *(part.fingerprint() for part in parts), _digest_of_moesys())
    return sha256("\n".join(words).encode()).hexdigest()[:24]


@cache
def _digest_of_moesys() -> str:
    package = source_digest(lambda name: name.split("/")[0] not in _WITHOUT_INFLUENCE)
    here = b"".join(Path(__file__).with_name(name).read_bytes() for name in _WITH_INFLUENCE)
    return sha256(package.encode() + here).hexdigest()[:12]
