"""LAER-MoE's experiments as scenarios: its models, its hardware, its planners, and what is not its experts.

The simulator runs the program of this project's layers. Four things differ in LAER-MoE's, and are told to it: rows that
have travelled are kept for backward and not sent again (``recompute="computing"``), gradients of experts travel in
bfloat16, every slot has its own messages (``every_slot_travels``), and without its communication optimisations FSDP
brings a layer's experts while that layer's attention runs, and takes its gradients home behind the attention's backward
(``travel_behind_rest``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from benchmarks.published.contenders import Contender
from benchmarks.published.drawn_steps import Planning, Scenario
from benchmarks.published.laer_flex_moe import LaerFlexMoePlanner
from moesys.config import (
    Adaptive,
    ClusterSpec,
    EvenSplit,
    FlexMoe,
    FlowSplit,
    Fsep,
    Greedy,
    Laer,
    Last,
    ModelShape,
    Static,
    Strategy,
    WindowMean,
    presets,
)
from moesys.config.laer_routing import LAER_E8K2_ROUTING, LAER_E16K4_ROUTING
from moesys.config.workload import Generated
from moesys.simulator.rest_of_step import RestOfStep

TOKENS, SEQUENCE, VOCABULARY = 16_384, 8_192, 32_000
KEY_VALUE_WIDTH = 1_024
BACKWARD_OVER_FORWARD = 2
MICRO_BATCHES = 2
# Iterations 21 to 70 of the rows, counted from 0 and thinned out; 14 is that of the breakdown.
ROW_ITERATIONS = (20, 44)
BREAKDOWN_ITERATION = 14

PROFILE = "computation_profiling_bf16_mixtral-8x7b.json of LAER-MoE's artifact"
# The constants below are fitted on this shape's rows and breakdown. It was chosen before any fit: of the four it has
# most of what was published, breakdown and ablation among it.
FITTED_SHAPE = "8x7b-e8k2"
FITTED = f"fitted on {FITTED_SHAPE}"


def _from(source: str, value: float) -> float:
    """A field with its value and where that is from."""
    found: float = field(default=value, metadata={"source": source})
    return found


@dataclass(frozen=True)
class Constants:
    """All numbers that the reproduction rests on, beside shapes and the six of ``moesys.config.laer_routing``. The
    last four are fitted, on one of four shapes; each may be 0, and others fit about as well (``fit.as_good``).
    """

    expert_tflops: float = _from(
        f"{PROFILE}: 6.0649 ms a 4,096 tokens at 16,384, what an expert of e8k2 gets on average", 237.95
    )
    rest_tflops: float = _from(
        f"{PROFILE}: 5.065 ms for a layer's attention unit and 4,096 tokens, its norms included", 95.0
    )
    intra_node_gb_per_s: float = _from("network_config.json of the artifact, measured", 216.269)
    inter_node_gb_per_s: float = _from("network_config.json of the artifact, measured; of a node", 88.9539)
    memory_gb_per_s: float = _from("data sheet of the A100-SXM4-80GB", 2039.0)
    dispatcher_ms: float = _from(f"router, dispatcher and host in a pass of a layer; {FITTED}", 3.0)
    rows_slowdown: float = _from(
        f"time of a byte in an all-to-all of rows inside a node, beyond that of the measured rate, over it; {FITTED}",
        5.0,
    )
    skew_growth: float = _from(
        f"standard deviation of log-popularity over that of the published micro-batches; {FITTED}", 2.5
    )
    unrest: float = _from(
        f"drift and straying of iterations 21 to 70 over those of the published micro-batches; {FITTED}", 0.2
    )

    @property
    def cluster(self) -> ClusterSpec:
        """Of experts and gradients almost all time is between nodes, which ``rows_slowdown`` leaves as measured."""
        return ClusterSpec(
            name="4 x 8 A100-80GB",
            num_nodes=4,
            ranks_per_node=8,
            expert_tflops=self.expert_tflops,
            intra_node_gb_per_s=self.intra_node_gb_per_s / (1 + self.rows_slowdown),
            inter_node_gb_per_s=self.inter_node_gb_per_s,
            memory_gb_per_s=self.memory_gb_per_s,
        )


CONSTANTS = Constants()
SOURCES: dict[str, str] = {of.name: of.metadata["source"] for of in fields(Constants)}


@dataclass(frozen=True)
class LaerModel:
    """A model of LAER-MoE's table of configurations, on one of its two routings."""

    name: str
    num_layers: int
    layer: ModelShape
    published_routing: Generated

    def routing(self, constants: Constants, iterations: Sequence[int]) -> Generated:
        """Experts ``skew_growth`` times as unequal in logarithms as in the published micro-batches; from iteration 21
        on with ``unrest`` times their drift and straying.

        The published micro-batches are 1 to 9, and 1 to 29, which end with the breakdown's iteration; rows are means
        over later ones. There experts are more unequal, and that changes more slowly: in what is published of e16k4 the
        busiest rank under the static layout rises from 1.60 to 1.90 times the mean, while LAER's falls from 1.29 to
        1.15. How much more, and how much more slowly, nobody published.
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
        """Of a layer in an iteration: forward, recomputation and twice backward of every micro-batch."""
        return (2 + BACKWARD_OVER_FORWARD) * MICRO_BATCHES * self.num_layers

    def attention_flops(self, tokens: int) -> float:
        """A layer's forward but for its experts: projections and causal attention."""
        H = self.layer.hidden_size
        return 2.0 * tokens * (2 * H * H + 2 * H * KEY_VALUE_WIDTH + SEQUENCE * H)

    def rest_of_step(self, constants: Constants, communication_optimised: bool) -> RestOfStep:
        """A layer's attention and projections by their flops, the work of the dispatcher, and the language head."""
        tflops = constants.rest_tflops * 1e12
        head = 2 * (1 + BACKWARD_OVER_FORWARD) * MICRO_BATCHES * TOKENS * VOCABULARY * self.layer.hidden_size
        return RestOfStep(
            other_seconds=self.attention_flops(TOKENS) / tflops + constants.dispatcher_ms * 1e-3,
            recompute="computing",
            optimizer_seconds=head / tflops,
            gradient_bytes=2,
            every_slot_travels=True,
            travel_behind_rest=not communication_optimised,
        )


_E8K2, _E16K4 = presets.LAER_E8K2, presets.LAER_E16K4
# 8x22b of LAER-MoE's artifact, meta_configs: fewer layers than the published model.
LAER_MODELS = (
    LaerModel("8x7b-e8k2", 32, _E8K2, LAER_E8K2_ROUTING),
    LaerModel("8x7b-e16k4", 24, _E16K4, LAER_E16K4_ROUTING),
    LaerModel("8x22b-e8k2", 18, _E8K2.replace(hidden_size=6144, intermediate_size=16384), LAER_E8K2_ROUTING),
    LaerModel("8x22b-e16k4", 14, _E16K4.replace(hidden_size=6144, intermediate_size=8192), LAER_E16K4_ROUTING),
)

_EVEN, _WINDOW = EvenSplit(), WindowMean(steps=5)
PLANNERS = {
    "FSDP+EP": Contender(Static(), _EVEN, Last()),
    "FlexMoE": Contender(FlexMoe(), _EVEN, _WINDOW),
    "LAER": Contender(Laer(), _EVEN, _WINDOW),
    "no_pq": Contender(Laer(candidates=("even",)), _EVEN, _WINDOW),
    "no_even": Contender(Laer(candidates=("proportional",)), _EVEN, _WINDOW),
    "LAER, flow": Contender(Laer(), FlowSplit(), _WINDOW),
    "greedy, flow": Contender(Greedy(), FlowSplit(), Adaptive()),
}


def laer_model(name: str) -> LaerModel:
    """Of a published row. Its Qwen variants differ from Mixtral's by a bias only, which a simulation does not know."""
    return next(model for model in LAER_MODELS if name.endswith(model.name))


def laer_scenario(
    model: LaerModel,
    planner: str,
    constants: Constants,
    iterations: Sequence[int] = ROW_ITERATIONS,
    communication_optimised: bool = True,
) -> Scenario:
    """Iterations of one of the ``PLANNERS``, as the artifact runs all its methods: experts come and gradients go behind
    the experts of other layers. Planners know the measured rates.
    """
    top_k, optimised = model.layer.top_k, communication_optimised
    sharding = Fsep(slots_per_rank=top_k, prefetch_layers=int(optimised), delay_reshard=optimised)
    return Scenario(
        name=model.name,
        planning=Planning(
            routing=model.routing(constants, iterations),
            num_experts=model.layer.num_experts,
            top_k=top_k,
            slots=top_k,
            cluster=replace(constants, rows_slowdown=0.0).cluster,
            contender=PLANNERS[planner],
            every_micro_batch=LaerFlexMoePlanner() if planner == "FlexMoE" else None,
        ),
        layer=model.layer,
        num_layers=model.num_layers,
        steps=tuple(tuple(range(MICRO_BATCHES * it, MICRO_BATCHES * (it + 1))) for it in iterations),
        strategy=Strategy(name=planner, sharding=sharding),
        cluster=constants.cluster,
        rest=model.rest_of_step(constants, optimised),
    )
