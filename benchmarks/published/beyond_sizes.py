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

from benchmarks.published.contenders import Contender
from benchmarks.published.drawn_steps import Drawn, Planning, Scenario, simulate
from benchmarks.published.waterfall import LAER_STAGE, UNIFIED_STAGE, Fall, waterfall
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
from moesys.config.workload import Generated
from moesys.cost import roofline_seconds
from moesys.lab.show.sheets import Sheet
from moesys.runnable import out_of_reach
from moesys.simulator.rest_of_step import RestOfStep

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

    def slots(self, num_ranks: int) -> int:
        """A quarter more than the experts need, at least 2 a rank."""
        return min(self.layer.num_experts, max(2, math.ceil(1.25 * self.layer.num_experts / num_ranks)))


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

# MegaKernels as programs come, with one pull for a token, with pulls before products where links are slow, and both,
# which run inside a domain; and what runs anywhere. Letters for tables.
OVERLAPS: dict[str, Overlap] = {
    "a": MegaKernel(),
    "b": MegaKernel(deduplicate=True),
    "c": MegaKernel(dispatch_share=1.0, combine_share=0.25),
    "d": MegaKernel(dispatch_share=1.0, deduplicate=True),
    "e": Sequential(),
    "f": Pipelined(chunks=2),
    "g": Pipelined(chunks=4),
    "h": Sequential(node_dispatch="once"),
    "i": Pipelined(chunks=2, node_dispatch="once"),
}
# They are compared on up to so many ranks; more take what those took.
COMPARED_RANKS = 128

_LAER, _SEQUENTIAL = Laer(candidates=("proportional",)), (Sequential(),)
_OURS = Contender(Greedy(), FlowSplit(), Adaptive())
# Stages of the waterfall: who plans, and overlaps of which the simulator takes the fastest. LAER's layouts are its
# proportional ones, as those of large sizes are.
STAGES: dict[str, tuple[Contender, Sequence[Overlap]]] = {
    "static": (Contender(Static(), EvenSplit(), Last()), _SEQUENTIAL),
    LAER_STAGE: (Contender(_LAER, EvenSplit(), WindowMean(steps=5)), _SEQUENTIAL),
    "flow split": (Contender(_LAER, FlowSplit(), WindowMean(steps=5)), _SEQUENTIAL),
    "our layout": (_OURS, _SEQUENTIAL),
    UNIFIED_STAGE: (_OURS, tuple(OVERLAPS.values())),
}


def beyond_sizes(
    models: Sequence[LargeModel] = MODELS, gpus: Sequence[str] = tuple(CLUSTERS), sizes: Sequence[int] = SIZES
) -> list[Fall]:
    """All stages of every model on every cluster, by model, GPU and size."""
    falls: dict[tuple[str, str, int], list[Fall]] = {}
    for model in models:
        best: dict[str, Overlap] = {}
        for num_ranks in sorted(sizes):
            scenarios = {
                (gpu, stage, overlap): _scenario(model, gpus[0], gpu, num_ranks, stage, contender, overlap)
                for stage, (contender, overlaps) in STAGES.items()
                for gpu in gpus
                for overlap in overlaps
                if stage != UNIFIED_STAGE or num_ranks <= COMPARED_RANKS or overlap == best[gpu]
            }
            scenarios = {key: of for key, of in scenarios.items() if not out_of_reach(of.strategy, of.cluster)}
            found = simulate(scenarios.values(), (SEED,), f"beyond, {model.name} on {num_ranks} GPUs")
            for gpu in gpus:
                fastest: dict[str, Sequence[Drawn]] = {}
                for (of_gpu, stage, overlap), scenario in scenarios.items():
                    faster = stage not in fastest or found[scenario][0].seconds.total < fastest[stage][0].seconds.total
                    if of_gpu == gpu and faster:
                        fastest[stage], best[gpu] = found[scenario], overlap
                of = {"model": model.name, "GPUs": f"{num_ranks} {gpu}", "slots": str(model.slots(num_ranks))}
                point = next(letter for letter, overlap in OVERLAPS.items() if overlap == best[gpu])
                falls[model.name, gpu, num_ranks] = waterfall(of, fastest, "ms", 1e3 / NUM_LAYERS, point)
    by_gpu = [(model.name, gpu, size) for model in models for gpu in gpus for size in sorted(sizes)]
    return [fall for case in by_gpu for fall in falls[case]]


def _scenario(
    model: LargeModel, planned_on: str, gpu: str, num_ranks: int, stage: str, contender: Contender, overlap: Overlap
) -> Scenario:
    """Plans know nodes and no GPUs, so GPUs share them: those ``planned_on`` one."""
    layer, slots, cluster = model.layer, model.slots(num_ranks), CLUSTERS[gpu](num_ranks // 8)
    routing = Generated(
        skew=1.0,
        drift=0.01,
        spread=0.0,
        concentration=2.4 * layer.num_experts,
        num_layers=NUM_LAYERS,
        tokens_per_rank=TOKENS,
    )
    told = CLUSTERS[planned_on](num_ranks // 8)
    return Scenario(
        name=model.name,
        planning=Planning(routing, layer.num_experts, layer.top_k, slots, told, contender),
        layer=layer,
        num_layers=NUM_LAYERS,
        steps=((WARMUP,),),
        strategy=Strategy(
            name=stage,
            sharding=Fsep(slots_per_rank=slots, prefetch_layers=1, delay_reshard=True),
            overlap=overlap,
        ),
        cluster=cluster,
        rest=RestOfStep(other_seconds=model.other_seconds(cluster)),
    )


def sizes_sheet(falls: Sequence[Fall]) -> Sheet:
    """Published models on 8 to 1,024 GPUs."""
    unified = {fall.of["model"] + " on " + fall.of["GPUs"]: fall for fall in falls if fall.stage == UNIFIED_STAGE}
    lost = [
        name for name, last in unified.items() if any(fall.of == last.of and fall.total < last.total for fall in falls)
    ]
    notes = [
        "Log-normal routing of skew 1, 8,192 tokens a rank, experts restored every pass, float32 gradients.",
        f"Where a stage before it is faster than unified: {', '.join(lost) or 'nowhere'}.",
        "Other stages have no search: LAER's as published.",
        f"point: which overlap the simulator finds fastest of those that run there, on up to {COMPARED_RANKS} GPUs, "
        "and the last of these on more. MegaKernels run in one domain, which is a node here.",
    ]
    for letter, point in OVERLAPS.items():
        fields = point.model_dump(exclude_defaults=True, exclude={"kind"})
        words = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        notes.append(f"{letter}: {type(point).__name__}({words}).")
    return Sheet(
        "SIMULATED: stage by stage, milliseconds of a layer's forward and backward", falls, notes, group_by="of"
    )
