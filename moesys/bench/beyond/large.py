"""Strategies stage by stage on published models and clusters of 8 to 1,024 GPUs: where unified wins, and where not.

A few consecutive layers of a model stand for all of them: one micro-batch of 8,192 tokens a rank, forward and backward,
without recomputation, gradients in float32. Attention, shared experts and dense projections are flops at the experts'
rate. Routing is drawn: log-normal popularity of skew 1 that drifts slowly, with as much straying a micro-batch as
LAER-MoE's published routing has. Layouts are planned on the five micro-batches before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moesys.bench.planner.scored_layers import Contender, layouts_of
from moesys.config import (
    Adaptive,
    ClusterSpec,
    EvenSplit,
    FlowSplit,
    Fsep,
    Greedy,
    Laer,
    Last,
    MegaKernel,
    ModelShape,
    Overlap,
    Pipelined,
    Sequential,
    Static,
    Strategy,
    WindowMean,
    presets,
)
from moesys.config.experiment import Generated
from moesys.cost import roofline_seconds
from moesys.layout import TokenPlan
from moesys.replay import Moment
from moesys.simulator.step_program import RestOfStep, run_step
from moesys.traces import generate

TOKENS, SEQUENCE, WARMUP, NUM_LAYERS, SEED = 8_192, 4_096, 5, 3, 0
SIZES = (8, 32, 128, 512, 1024)


@dataclass(frozen=True)
class LargeModel:
    """other_parameters: of a layer's attention and shared experts, of which each token uses all. attention_width: heads
    times the mean width of a head's keys and values. Source: the config.json of each model's publication.
    """

    name: str
    layer: ModelShape
    other_parameters: float
    attention_width: int

    def other_seconds(self, cluster: ClusterSpec) -> float:
        """Forward of the rest of a layer, causal attention included."""
        flops = 2 * TOKENS * self.other_parameters + 2 * TOKENS * SEQUENCE * self.attention_width
        return float(roofline_seconds(flops, 0.0, cluster))


QWEN3_30B = LargeModel("Qwen3-30B-A3B", presets.QWEN3_30B_A3B, 2 * 2048 * (4096 + 512), 4096)
MIXTRAL = LargeModel("Mixtral-8x7B", presets.MIXTRAL_8X7B, 2 * 4096 * (4096 + 1024), 4096)
# Latent attention: queries through 1,536, keys and values through 512 + 64, 128 heads of 128 + 64 and 128; one shared
# expert.
DEEPSEEK_V3 = LargeModel(
    "DeepSeek-V3",
    presets.DEEPSEEK_V3,
    7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 3 * 7168 * 2048,
    128 * 160,
)
MODELS = (QWEN3_30B, MIXTRAL, DEEPSEEK_V3)
CLUSTERS: dict[str, Callable[[int], ClusterSpec]] = {"H100": presets.h100, "H200": presets.h200}


_SEQUENTIAL = Sequential()
# As programs come, one pull for a token, pulls before products where links are slow, and both.
MEGA_KERNELS = (
    MegaKernel(),
    MegaKernel(deduplicate=True),
    MegaKernel(dispatch_share=1.0, combine_share=0.25),
    MegaKernel(dispatch_share=1.0, deduplicate=True),
)
# They are compared on up to so many ranks; more take what those took.
COMPARED_RANKS = 128


@dataclass(frozen=True)
class LargeStage:
    """A step of the waterfall; ``LAER's`` layouts are its proportional ones, as those of large sizes are.

    overlaps: of which the simulator takes the fastest.
    """

    name: str
    contender: Contender
    overlaps: tuple[Overlap, ...] = (_SEQUENTIAL,)


_LAER = Laer(candidates=("proportional",))
STAGES = (
    LargeStage("static", Contender(Static(), EvenSplit(), Last())),
    LargeStage("LAER's layout", Contender(_LAER, EvenSplit(), WindowMean(steps=5))),
    LargeStage("flow split", Contender(_LAER, FlowSplit(), WindowMean(steps=5))),
    LargeStage("our layout", Contender(Greedy(), FlowSplit(), Adaptive())),
    LargeStage("4 chunks", Contender(Greedy(), FlowSplit(), Adaptive()), (Pipelined(chunks=4),)),
    LargeStage("unified", Contender(Greedy(), FlowSplit(), Adaptive()), MEGA_KERNELS),
)
LAER_STAGE = 1


@dataclass(frozen=True)
class LargeFall:
    """A model on a cluster at a stage. layer_ms: of a step, over its layers. exposed_ms: of that, not computing, the
    mean over ranks. inter_node_share: of the routed rows.
    """

    overlap: Overlap
    model: str
    gpu: str
    num_ranks: int
    slots: int
    stage: str
    layer_ms: float
    exposed_ms: float
    max_over_mean: float
    inter_node_share: float


def large_falls(
    models: Sequence[LargeModel] = MODELS,
    gpus: Sequence[str] = tuple(CLUSTERS),
    sizes: Sequence[int] = SIZES,
    tell: Callable[[str], None] | None = None,
) -> list[LargeFall]:
    """All stages of every model on every cluster. Plans know nodes and no GPUs, so GPUs share them."""
    found: list[LargeFall] = []
    fastest: dict[tuple[LargeModel, str, LargeStage], Overlap] = {}
    for model in models:
        for num_ranks in sorted(sizes):
            if tell:
                tell(f"{model.name} on {num_ranks} GPUs")
            slots = slots_of(model.layer, num_ranks)
            clusters = {gpu: CLUSTERS[gpu](num_ranks // 8) for gpu in gpus}
            plans: dict[Contender, list[TokenPlan]] = {}
            first = clusters[gpus[0]]
            for stage in STAGES:
                if stage.contender not in plans:
                    plans[stage.contender] = _planned(stage.contender, model.layer, first, slots)
                of_stage = plans[stage.contender]
                for gpu, cluster in clusters.items():
                    taken = fastest.get((model, gpu, stage))
                    overlaps = (taken,) if taken and num_ranks > COMPARED_RANKS else stage.overlaps
                    falls = [_fall(model, gpu, cluster, slots, stage, overlap, of_stage) for overlap in overlaps]
                    found.append(min(falls, key=lambda fall: fall.layer_ms))
                    fastest[model, gpu, stage] = found[-1].overlap
    return found


def slots_of(layer: ModelShape, num_ranks: int) -> int:
    """A quarter more than the experts need, at least 2 a rank."""
    return min(layer.num_experts, max(2, math.ceil(1.25 * layer.num_experts / num_ranks)))


def _planned(contender: Contender, layer: ModelShape, cluster: ClusterSpec, slots: int) -> list[TokenPlan]:
    """Of one micro-batch, layer by layer."""
    routing = Generated(
        skew=1.0,
        drift=0.01,
        spread=0.0,
        concentration=2.4 * layer.num_experts,
        num_layers=NUM_LAYERS,
        tokens_per_rank=TOKENS,
        warmup=WARMUP,
        steps=1,
    )
    trace = generate(routing, cluster.num_ranks, layer.num_experts, layer.top_k, SEED)
    plans = []
    for number in range(NUM_LAYERS):
        [one] = layouts_of(contender, trace.tokens_SLRE[:, number], [Moment(WARMUP, WARMUP)], cluster, slots)
        plans.append(contender.split_over(one.load, one.layout, cluster, WARMUP))
    return plans


def _fall(
    model: LargeModel,
    gpu: str,
    cluster: ClusterSpec,
    slots: int,
    stage: LargeStage,
    overlap: Overlap,
    plans: Sequence[TokenPlan],
) -> LargeFall:
    sharding = Fsep(slots_per_rank=slots, prefetch_layers=1, delay_reshard=True)
    strategy = Strategy(name=stage.name, sharding=sharding, overlap=overlap)
    rest = RestOfStep(other_seconds=model.other_seconds(cluster))
    simulation = run_step(strategy, model.layer, cluster, [plans], rest)
    computed = float(sum(seconds_R.mean() for seconds_R in simulation.computed_R.values()))
    return LargeFall(
        overlap=overlap,
        model=model.name,
        gpu=gpu,
        num_ranks=cluster.num_ranks,
        slots=slots,
        stage=stage.name,
        layer_ms=1e3 * simulation.length_seconds / len(plans),
        exposed_ms=1e3 * (simulation.length_seconds - computed) / len(plans),
        max_over_mean=float(np.mean([plan.max_over_mean for plan in plans])),
        inter_node_share=float(
            np.mean([plan.inter_node_tokens(cluster.node_of_rank) / plan.load.total for plan in plans])
        ),
    )
