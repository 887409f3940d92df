"""LAER-MoE's experiments as scenarios: published figures, models, hardware, planners and the work besides experts.

Source: scripts_ae/*_backup.csv of the artifact of arXiv 2602.11686: 4 nodes of 8 A100-80GB, 128 sequences of 8,192
tokens per iteration in 2 micro-batches, with activations recomputed. ``laer_rows.csv`` is figure 8: seconds of an
iteration, the mean of iterations 21 to 70. ``laer_breakdown.csv`` is figure 10(a): seconds of iteration 14, counted
from 0, under a profiler; means over ranks, for wikitext without an auxiliary loss.

The simulator runs the program of this project's layers. Four things differ in LAER-MoE's program, and the simulator has
an option for each: backward reads the rows that were kept and does not send them again (``recompute="computing"``),
gradients of experts travel in bfloat16, every slot has its own messages (``every_slot_travels``), and without its
communication optimizations FSDP gathers a layer's experts while that layer's attention runs, and reduces its gradients
behind the attention's backward (``travel_behind_rest``).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

import moesys as ms
from experiments.published.drawn_steps import Planning, Scenario
from experiments.published.laer_routing import LAER_E8K2_ROUTING, LAER_E16K4_ROUTING
from moesys.balance.layout_schedule import PlanOutcome, PlanRequest
from moesys.balance.run_planner import split_tokens
from moesys.config import Predictor
from moesys.config.workload import Generated
from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix
from moesys.simulator.rest_of_step import RestOfStep

METHODS = ("FSDP+EP", "FlexMoE", "LAER")
TOKENS, SEQUENCE, VOCABULARY, KEY_VALUE_WIDTH = 16_384, 8_192, 32_000, 1_024
BACKWARD_OVER_FORWARD, MICRO_BATCHES = 2, 2
# Two of the iterations 21 to 70 of the published rows, counted from 0, and the iteration of the breakdown.
ROW_ITERATIONS, BREAKDOWN_ITERATION = (20, 44), 14
# The shape whose rows and breakdown the constants are fitted to. It was chosen before any fit: more was published of it
# than of the three others, breakdown and ablation included.
FITTED_SHAPE = "8x7b-e8k2"


# --- published figures ----------------------------------------------------------------------------------------


class PublishedRow(BaseModel, frozen=True):
    """Seconds of an iteration of four methods."""

    dataset: str
    aux_loss: float
    model: str
    fsdp_ep_s: float
    flex_moe_s: float
    laer_s: float
    megatron_s: float

    @property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the ``METHODS``."""
        return dict(zip(METHODS, (self.fsdp_ep_s, self.flex_moe_s, self.laer_s), strict=True))


class PublishedBreakdown(BaseModel, frozen=True):
    """Seconds of an iteration's parts; the names mean the same as in ``SimulatedStep``."""

    model: str
    method: str
    all_to_all_s: float
    experts_s: float
    total_s: float
    spread: float

    @property
    def parts(self) -> dict[Literal["experts", "all_to_all", "rest", "total"], float]:
        rest_s = self.total_s - self.experts_s - self.all_to_all_s
        return {"experts": self.experts_s, "all_to_all": self.all_to_all_s, "rest": rest_s, "total": self.total_s}


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()))


ROWS = tuple(map(PublishedRow.model_validate, _read("laer_rows.csv")))
BREAKDOWN = tuple(map(PublishedBreakdown.model_validate, _read("laer_breakdown.csv")))
# The log of tokens of figure 10(b): load imbalance, the mean over layers and over micro-batches 1 to 9 of 8x7b-e8k2 and
# 1 to 29 of 8x7b-e16k4; and in the last two micro-batches of 8x7b-e16k4, which are those of iteration 14.
LOGGED_MAX_OVER_MEAN = {
    "e8k2": {"FSDP+EP": 1.659, "FlexMoE": 1.481, "LAER": 1.381},
    "e16k4": {"FSDP+EP": 1.729, "FlexMoE": 1.655, "LAER": 1.273},
}
LAST_LOGGED_MAX_OVER_MEAN = {"FSDP+EP": 1.892, "FlexMoE": 1.717, "LAER": 1.164}
# Figure 12: seconds of an iteration of mixtral-8x7b-e8k2, wikitext, without an auxiliary loss.
ABLATION_S = {"FSDP+EP": 35.66, "no_pq": 31.70, "no_comm_opt": 28.59, "no_even": 28.33, "LAER": 26.33}


# --- constants and models -------------------------------------------------------------------------------------

_PROFILE = "computation_profiling_bf16_mixtral-8x7b.json of LAER-MoE's artifact"
SOURCES = {
    "expert_tflops": f"{_PROFILE}: 6.0649 ms per 4,096 tokens at 16,384, the mean load of an expert of e8k2",
    "rest_tflops": f"{_PROFILE}: 5.065 ms for a layer's attention unit and 4,096 tokens, its norms included",
    "intra_node_gb_per_s": "network_config.json of the artifact, measured",
    "inter_node_gb_per_s": "network_config.json of the artifact, measured, per node",
    "memory_gb_per_s": "data sheet of the A100-SXM4-80GB",
    "dispatcher_ms": "router, dispatcher and host in a pass of a layer",
    "rows_slowdown": "time of a byte in an all-to-all of rows inside a node beyond that at the measured rate, over it",
    "skew_growth": "standard deviation of log-popularity over that of the published micro-batches",
    "unrest": "drift and straying of iterations 21 to 70 over those of the published micro-batches",
}
FITTED = ("dispatcher_ms", "rows_slowdown", "skew_growth", "unrest")


@dataclass(frozen=True)
class Constants:
    """All numbers of the reproduction besides shapes and the six of ``experiments.published.laer_routing``.

    The ``FITTED`` ones are fitted to one of four shapes; each may be 0, and other values fit about as well.
    """

    expert_tflops: float = 237.95
    rest_tflops: float = 95.0
    intra_node_gb_per_s: float = 216.269
    inter_node_gb_per_s: float = 88.9539
    memory_gb_per_s: float = 2039.0
    dispatcher_ms: float = 3.0
    rows_slowdown: float = 5.0
    skew_growth: float = 2.5
    unrest: float = 0.2

    @property
    def cluster(self) -> ms.ClusterSpec:
        """The cluster with slower links inside nodes; experts and gradients spend nearly all time between nodes."""
        return ms.ClusterSpec(
            name="4 x 8 A100-80GB",
            num_nodes=4,
            ranks_per_node=8,
            expert_tflops=self.expert_tflops,
            intra_node_gb_per_s=self.intra_node_gb_per_s / (1 + self.rows_slowdown),
            inter_node_gb_per_s=self.inter_node_gb_per_s,
            memory_gb_per_s=self.memory_gb_per_s,
        )


CONSTANTS = Constants()


@dataclass(frozen=True)
class LaerModel:
    """A model of LAER-MoE's table of configurations, on one of its two routings."""

    name: str
    num_layers: int
    layer: ms.ModelShape
    published_routing: Generated

    def routing(self, constants: Constants, iterations: Sequence[int]) -> Generated:
        """Returns routing whose log-popularity spreads ``skew_growth`` times as far as in the published micro-batches,
        and whose drift and straying are ``unrest`` times as large from iteration 21 on.

        The published micro-batches are 1 to 9 and 1 to 29, which end with the iteration of the breakdown; rows are
        means over later ones. There experts are less equal, and their popularity changes more slowly: in what is
        published of e16k4 the load imbalance under the static layout rises from 1.60 to 1.90, while LAER's falls from
        1.29 to 1.15. By how much both change was not published.
        """
        early = self.published_routing
        assert early.concentration is not None
        unrest = constants.unrest if min(iterations) > BREAKDOWN_ITERATION else 1.0
        return early.replace(
            skew=early.skew * constants.skew_growth,
            drift=early.drift * unrest,
            concentration=early.concentration / unrest if unrest else None,
        )

    @property
    def num_passes(self) -> int:
        """The passes of a layer in an iteration: forward, recomputation and twice backward per micro-batch."""
        return (2 + BACKWARD_OVER_FORWARD) * MICRO_BATCHES * self.num_layers

    def attention_flops(self, tokens: int) -> float:
        """Returns the flops of a layer's forward without its experts: projections and causal attention."""
        H = self.layer.hidden_size
        return 2.0 * tokens * (2 * H * H + 2 * H * KEY_VALUE_WIDTH + SEQUENCE * H)

    def rest_of_step(self, constants: Constants, communication_optimized: bool) -> RestOfStep:
        """Returns attention and projections by their flops, the work of the dispatcher, and the language head."""
        tflops = constants.rest_tflops * 1e12
        head = 2 * (1 + BACKWARD_OVER_FORWARD) * MICRO_BATCHES * TOKENS * VOCABULARY * self.layer.hidden_size
        return RestOfStep(
            other_seconds=self.attention_flops(TOKENS) / tflops + constants.dispatcher_ms * 1e-3,
            recompute="computing",
            optimizer_seconds=head / tflops,
            gradient_bytes=2,
            every_slot_travels=True,
            travel_behind_rest=not communication_optimized,
        )


_E8K2, _E16K4 = ms.presets.LAER_E8K2, ms.presets.LAER_E16K4
# meta_configs of LAER-MoE's artifact; its 8x22b has fewer layers than the published model.
MODELS = (
    LaerModel("8x7b-e8k2", 32, _E8K2, LAER_E8K2_ROUTING),
    LaerModel("8x7b-e16k4", 24, _E16K4, LAER_E16K4_ROUTING),
    LaerModel("8x22b-e8k2", 18, _E8K2.replace(hidden_size=6144, intermediate_size=16384), LAER_E8K2_ROUTING),
    LaerModel("8x22b-e16k4", 14, _E16K4.replace(hidden_size=6144, intermediate_size=8192), LAER_E16K4_ROUTING),
)


def model_of(name: str) -> LaerModel:
    """Returns the model of a published row. Qwen's variants differ from Mixtral's by a bias, which is not simulated."""
    return next(model for model in MODELS if name.endswith(model.name))


def published_rows(shape: str, rows: Sequence[PublishedRow] = ROWS) -> list[PublishedRow]:
    return [row for row in rows if row.model.endswith(shape)]


# --- planners and scenarios -----------------------------------------------------------------------------------

_EVEN, _WINDOW = ms.EvenSplit(), ms.WindowMean(steps=5)
PLANNERS: dict[str, tuple[ms.Balance, ms.Split, Predictor]] = {
    "FSDP+EP": (ms.Static(), _EVEN, ms.Last()),
    "FlexMoE": (ms.FlexMoe(), _EVEN, _WINDOW),
    "LAER": (ms.Laer(), _EVEN, _WINDOW),
    "no_pq": (ms.Laer(candidates=("even",)), _EVEN, _WINDOW),
    "no_even": (ms.Laer(candidates=("proportional",)), _EVEN, _WINDOW),
    "LAER, flow": (ms.Laer(), ms.FlowSplit(), _WINDOW),
    "greedy, flow": (ms.Greedy(), ms.FlowSplit(), ms.Adaptive()),
}


def planner_strategy(planner: str, slots: int) -> ms.Strategy:
    """Returns a strategy that plans for every micro-batch, with ``slots`` per rank."""
    balance, split, predictor = PLANNERS[planner]
    sharding = ms.Fsep(slots_per_rank=slots)
    return ms.Strategy(name=planner, sharding=sharding, balance=balance, split=split, predictor=predictor)


def scenario(
    model: LaerModel,
    planner: str,
    constants: Constants,
    iterations: Sequence[int] = ROW_ITERATIONS,
    communication_optimized: bool = True,
) -> Scenario:
    """Returns iterations under one of the ``PLANNERS``, which know the measured rates.

    As in the artifact, experts are gathered and gradients reduced while experts of other layers run.
    """
    top_k, optimized = model.layer.top_k, communication_optimized
    sharding = ms.Fsep(slots_per_rank=top_k, prefetch_layers=int(optimized), delay_reshard=optimized)
    return Scenario(
        name=model.name,
        planning=Planning(
            routing=model.routing(constants, iterations),
            num_experts=model.layer.num_experts,
            top_k=top_k,
            strategy=planner_strategy(planner, top_k),
            cluster=replace(constants, rows_slowdown=0.0).cluster,
            every_micro_batch=LaerFlexMoePlanner() if planner == "FlexMoE" else None,
        ),
        layer=model.layer,
        num_layers=model.num_layers,
        steps=tuple(tuple(range(MICRO_BATCHES * it, MICRO_BATCHES * (it + 1))) for it in iterations),
        strategy=ms.Strategy(name=planner, sharding=sharding),
        cluster=constants.cluster,
        rest=model.rest_of_step(constants, optimized),
    )


@dataclass(frozen=True)
class LaerFlexMoePlanner:
    """FlexMoE as LAER-MoE's artifact implements it, which plans after every micro-batch.

    This project's ``FlexMoe`` follows FlexMoE's own paper and ignores nodes; the artifact's rule moves replicas inside
    nodes and leaves other ranks the busiest.
    """

    def submit(self, request: PlanRequest) -> PlanOutcome:
        return PlanOutcome(laer_flex_moe_layout(request.load.tokens_RE, request.previous, request.cluster))


def laer_flex_moe_layout(tokens_RE: IntArray, previous: ExpertLayout, cluster: ms.ClusterSpec) -> ExpertLayout:
    """Plans at most 10 moves from ``previous``, each of them made in all nodes at once.

    A move takes a replica from the expert with the fewest tokens per replica that has more than one per node, and gives
    it to the one with the most. In each node the idlest rank that holds the former loses it; the first rank that holds
    the hot expert and something else gains a replica in place of its heaviest other expert, which goes to the losing
    rank; if there is no such rank, the losing rank gains the replica. A move is kept if the load of the busiest rank
    falls, or its ratio to that of the idlest; else the plan ends. Loads are those of an even split inside nodes, in
    whole tokens: a token more or less decides between layouts that are otherwise alike.
    """
    nodes = [np.flatnonzero(np.asarray(cluster.node_of_rank) == node) for node in range(cluster.num_nodes)]
    load, layout = LoadMatrix(tokens_RE), previous
    rows_R = split_tokens(load, layout, cluster, ms.EvenSplit()).tokens_R
    for _ in range(10):
        moved_RE = _moved(load.tokens_RE.sum(axis=0), layout.replicas_RE, rows_R, nodes, previous.num_slots)
        if moved_RE is None:
            break
        expert_RS = [np.repeat(np.arange(len(held_E)), held_E) for held_E in moved_RE]
        moved = ExpertLayout(np.stack(expert_RS), load.num_experts)
        moved_rows_R = split_tokens(load, moved, cluster, ms.EvenSplit()).tokens_R
        ratio, moved_ratio = (of_R.max() / max(of_R.min(), 1) for of_R in (rows_R, moved_rows_R))
        if not (moved_rows_R.max() < rows_R.max() or moved_ratio < ratio):
            break
        layout, rows_R = moved, moved_rows_R
    return layout


def _moved(
    tokens_E: IntArray, held_RE: IntArray, rows_R: IntArray, nodes: list[IntArray], slots: int
) -> IntArray | None:
    """Returns the replicas after one move; None where no expert has a replica to give."""
    replicas_E = held_RE.sum(axis=0)
    share_E = tokens_E // replicas_E
    hottest_first = np.argsort(-share_E, kind="stable")
    hot = hottest_first[0]
    cold = next((expert for expert in hottest_first[::-1] if replicas_E[expert] != len(nodes)), hot)
    if hot == cold:
        return None
    moved_RE = held_RE.copy()
    for ranks in nodes:
        holders = ranks[moved_RE[ranks, cold] > 0]
        if not len(holders):
            continue
        loser = holders[np.argmin(rows_R[holders])]
        gainers = ranks[(moved_RE[ranks, hot] > 0) & (moved_RE[ranks, hot] < slots)]
        moved_RE[loser, cold] -= 1
        if len(gainers) and (gainer := gainers[0]) != loser:
            others = np.flatnonzero(moved_RE[gainer])
            others = others[others != hot]
            exchanged = others[np.argmax(share_E[others])]
            moved_RE[gainer, exchanged] -= 1
            moved_RE[loser, exchanged] += 1
            moved_RE[gainer, hot] += 1
        else:
            moved_RE[loser, hot] += 1
    return moved_RE
