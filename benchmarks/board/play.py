"""Plays one planner of layouts in one setting: what each of its splits makes of micro-batches that it has not seen.

Layouts follow from history as in training, micro-batch by micro-batch; with ``lag=0`` they are planned on the counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.board.contests import Entry, Group, Setting
from benchmarks.board.workloads import WARM_UP
from benchmarks.planner.scored_layers import TimedPlanner
from moesys.balance.greedy.relabelling import num_moves
from moesys.balance.layout_schedule import PlanRequest, SolvedPlan
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.balance.predictors import measured_drift
from moesys.balance.replay import replay_layer
from moesys.config import BYTES_PER_GB, Greedy, ModelShape, Strategy
from moesys.cost import restore_bytes
from moesys.lab.runs.experiment_files import in_words
from moesys.layout import ExpertLayout
from moesys.limits import rank_memory
from moesys.load import IntArray, LoadMatrix
from moesys.simulator.step_program import simulate

# A step has two equal layers, whose time is halved: what lies between layers counts as within.
NUM_LAYERS = 2


@dataclass(frozen=True)
class Scores:
    """What an entry made of one sample: lists have an item for each scored micro-batch, ``planning_ms`` for each plan.

    layer_ms: forward and backward of a layer, simulated. max_over_mean: of tokens on ranks. crossing: share of routed
    tokens that leave their domain. copies: replicas that a plan brought to ranks that did not hold them; with ``Ep``
    experts that are lent. restored_gb: of all ranks, in a forward. memory_gb: at most, of the rank that holds most.
    planning_ms: of a layout, measured; with ``lag=0`` of the split too. cannot: why there is nothing of all that.
    """

    layer_ms: list[float] = field(default_factory=list)
    max_over_mean: list[float] = field(default_factory=list)
    crossing: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    restored_gb: list[float] = field(default_factory=list)
    memory_gb: list[float] = field(default_factory=list)
    planning_ms: list[float] = field(default_factory=list)
    cannot: str = ""


class ToldOfDrift(TimedPlanner):
    """Plans at once. ``Greedy`` is told how much the newest load differs from the one before, which is history too.

    ``all_ms``: of each plan but the first, which warms up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all_ms: list[float] = []
        self._before: LoadMatrix | None = None

    def submit(self, request: PlanRequest) -> SolvedPlan:
        begin_s = time.perf_counter()
        before, self._before, balance = self._before, request.load, request.strategy.balance
        if isinstance(balance, Greedy) and before is not None:
            told = balance.replace(drift=measured_drift(before, request.load))
            request = replace(request, strategy=request.strategy.replace(balance=told))
        solved = super().submit(request)
        if before is not None:
            self.all_ms.append(1e3 * (time.perf_counter() - begin_s))
        return solved


def play(setting: Setting, group: Group, entries: Sequence[Entry], sample: int) -> Iterator[tuple[Entry, Scores]]:
    """``entries`` share their balance, and so their layouts, planned once."""
    model, cluster = setting.model, setting.cluster
    tokens_SRE = setting.workload.tokens_SRE(model, cluster, sample)
    strategies: dict[Entry, Strategy] = {}
    for entry in entries:
        try:
            strategies[entry] = group.strategy(entry, model, cluster)
        except ValueError as error:
            yield entry, Scores(cannot=_reason(error))
    if not strategies:
        return
    if group.lag == 0:
        for entry, strategy in strategies.items():
            yield entry, _on_counts(setting, strategy, tokens_SRE)
        return
    try:
        yield from _from_history(setting, strategies, tokens_SRE)
    except ValueError as error:
        for entry in strategies:
            yield entry, Scores(cannot=_reason(error))


def _from_history(
    setting: Setting, strategies: dict[Entry, Strategy], tokens_SRE: IntArray
) -> Iterator[tuple[Entry, Scores]]:
    """Raises ValueError before it yields anything, where the balance makes no layout."""
    model, cluster = setting.model, setting.cluster
    planner, meter = ToldOfDrift(), _Meter(setting)
    walk = list(replay_layer(next(iter(strategies.values())), model, cluster, tokens_SRE, planner=planner))
    for entry, strategy in strategies.items():
        scores = Scores(planning_ms=planner.all_ms or [0.0])
        try:
            for before, one in zip(walk[WARM_UP - 1 :], walk[WARM_UP:], strict=False):
                plan = plan_layer(strategy, model, cluster, one.load, layout=one.layout, turn=one.micro_batch)
                meter.score(scores, strategy, plan)
                scores.copies.append(num_moves(before.layout.replicas_RE, one.layout.replicas_RE))
        except ValueError as error:
            scores = Scores(cannot=_reason(error))
        yield entry, scores


def _on_counts(setting: Setting, strategy: Strategy, tokens_SRE: IntArray) -> Scores:
    model, cluster = setting.model, setting.cluster
    scores, meter = Scores(), _Meter(setting)
    try:
        # compiled code is there, and memory is warm
        plan_layer(strategy, model, cluster, LoadMatrix(tokens_SRE[WARM_UP - 1]))
        for turn, tokens_RE in enumerate(tokens_SRE[WARM_UP:], start=WARM_UP):
            load, begin_s = LoadMatrix(tokens_RE), time.perf_counter()
            plan = plan_layer(strategy, model, cluster, load, turn=turn)
            scores.planning_ms.append(1e3 * (time.perf_counter() - begin_s))
            meter.score(scores, strategy, plan)
            scores.copies.append(round(scores.restored_gb[-1] * BYTES_PER_GB / _expert_bytes(model)))
    except ValueError as error:
        return Scores(cannot=_reason(error))
    return scores


class _Meter:
    """Scores plans of one setting; equal ones of several splits are simulated once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._layer_ms: dict[bytes, float] = {}

    def score(self, scores: Scores, strategy: Strategy, plan: LayerPlan) -> None:
        model, cluster = self._setting.model, self._setting.cluster
        key = plan.load.tokens_RE.tobytes() + plan.layout.expert_RS.tobytes() + plan.tokens.entries.tobytes()
        if key not in self._layer_ms:
            step = StepPlan(strategy, model, cluster, (plan,) * NUM_LAYERS)
            self._layer_ms[key] = simulate(step).length_us / 1e3 / NUM_LAYERS
        restored = restore_bytes(plan.layout, model, cluster, strategy.sharding)
        scores.layer_ms.append(self._layer_ms[key])
        scores.max_over_mean.append(plan.tokens.max_over_mean)
        scores.crossing.append(plan.tokens.inter_node_tokens(cluster.domain_of_rank) / plan.load.total)
        scores.restored_gb.append(sum(float(bytes_RR.sum()) for bytes_RR in restored) / BYTES_PER_GB)
        scores.memory_gb.append(self._memory_gb(strategy, plan.layout, int(plan.tokens.tokens_R.max())))

    def _memory_gb(self, strategy: Strategy, layout: ExpertLayout, most_rows: int) -> float:
        """Of a layer: as if the rank with most rows held most experts."""
        model, cluster = self._setting.model, self._setting.cluster
        filled = int((layout.expert_RS >= 0).sum(axis=1).max())
        held = strategy.replace(sharding=strategy.sharding.replace(slots_per_rank=filled), late_slots=0)
        return rank_memory(held, model, cluster, 1, -(-most_rows // model.top_k)).gb


def _expert_bytes(model: ModelShape) -> int:
    return model.bytes_per_element * model.expert_parameters


def _reason(error: ValueError) -> str:
    return " ".join(in_words(error).split())
