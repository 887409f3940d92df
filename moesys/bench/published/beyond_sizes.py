"""Strategies stage by stage on published models and clusters of 8 to 1,024 GPUs: where unified wins, and where not.

A few consecutive layers of a model stand for all of them: one micro-batch of 8,192 tokens a rank, forward and backward,
without recomputation, gradients in float32. Attention, shared experts and dense projections are flops at the experts'
rate. Routing is drawn: log-normal popularity of skew 1 that drifts slowly, with as much straying a micro-batch as
LAER-MoE's published routing has. Layouts are planned on the five micro-batches before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from moesys.bench.harness.sheets import Column, Sheet
from moesys.bench.planner.scored_layers import Contender
from moesys.bench.published.drawn_steps import Drawn, Planning, Scenario, simulate
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
from moesys.simulator.step_program import RestOfStep

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

# As programs come, one pull for a token, pulls before products where links are slow, and both; letters for tables.
MEGA_KERNELS = {
    "a": MegaKernel(),
    "b": MegaKernel(deduplicate=True),
    "c": MegaKernel(dispatch_share=1.0, combine_share=0.25),
    "d": MegaKernel(dispatch_share=1.0, deduplicate=True),
}
# They are compared on up to so many ranks; more take what those took.
COMPARED_RANKS = 128

_LAER, _SEQUENTIAL = Laer(candidates=("proportional",)), (Sequential(),)
_OURS = Contender(Greedy(), FlowSplit(), Adaptive())
# Stages of the waterfall: who plans, and overlaps of which the simulator takes the fastest. LAER's layouts are its
# proportional ones, as those of large sizes are.
STAGES: dict[str, tuple[Contender, Sequence[Overlap]]] = {
    "static": (Contender(Static(), EvenSplit(), Last()), _SEQUENTIAL),
    "LAER": (Contender(_LAER, EvenSplit(), WindowMean(steps=5)), _SEQUENTIAL),
    "flow split": (Contender(_LAER, FlowSplit(), WindowMean(steps=5)), _SEQUENTIAL),
    "our layout": (_OURS, _SEQUENTIAL),
    "4 chunks": (_OURS, (Pipelined(chunks=4),)),
    "unified": (_OURS, tuple(MEGA_KERNELS.values())),
}


@dataclass(frozen=True)
class LargeRow:
    """A model on a cluster. layer_ms: of a step, over its layers, by stage. exposed_ms: of that, not computing, the
    mean over ranks. inter_node_share: of the routed rows. best: unified's point of the search space.
    """

    model: Annotated[str, Column("model")]
    gpu: str
    num_ranks: int
    slots: Annotated[int, Column("slots")]
    layer_ms: Mapping[str, float]
    best: Overlap
    max_over_mean: Annotated[Mapping[str, float], Column("max/mean, {}", ".3f")]
    exposed_ms: Annotated[Mapping[str, float], Column("exposed ms, {}", ".1f")]
    inter_node_share: Annotated[Mapping[str, float], Column("inter-node %, {}", ".0f", 100)]

    @property
    def gpus(self) -> Annotated[str, Column("GPUs", after="model")]:
        return f"{self.num_ranks} {self.gpu}"

    @property
    def laer_ms(self) -> Annotated[float, Column("LAER ms", ".2f", after="slots")]:
        return self.layer_ms["LAER"]

    @property
    def over_laer(self) -> Annotated[Mapping[str, float], Column("{}", ".3f", after="laer_ms")]:
        """Times as fast as LAER's layout."""
        return {stage: self.laer_ms / ms for stage, ms in self.layer_ms.items() if stage != "LAER"}

    @property
    def by(self) -> Annotated[str, Column("by", after="over_laer")]:
        return next(letter for letter, point in MEGA_KERNELS.items() if point == self.best)


def large_rows(
    models: Sequence[LargeModel] = MODELS, gpus: Sequence[str] = tuple(CLUSTERS), sizes: Sequence[int] = SIZES
) -> list[LargeRow]:
    """Every model on every cluster, by model, GPU and size."""
    rows = []
    for model in models:
        best: dict[str, Overlap] = {}
        for num_ranks in sorted(sizes):
            searched = {gpu: MEGA_KERNELS.values() if num_ranks <= COMPARED_RANKS else (best[gpu],) for gpu in gpus}
            scenarios = {
                (gpu, stage, overlap): _scenario(model, gpus[0], gpu, num_ranks, stage, contender, overlap)
                for stage, (contender, overlaps) in STAGES.items()
                for gpu in gpus
                for overlap in (searched[gpu] if stage == "unified" else overlaps)
            }
            found = simulate(scenarios.values(), (SEED,), f"beyond, {model.name} on {num_ranks} GPUs")
            for gpu in gpus:
                drawn: dict[str, Drawn] = {}
                for (of_gpu, stage, overlap), scenario in scenarios.items():
                    (of,) = found[scenario]
                    if of_gpu == gpu and (stage not in drawn or of.seconds.total < drawn[stage].seconds.total):
                        drawn[stage], best[gpu] = of, overlap
                rows.append(_row(model, gpu, num_ranks, drawn, best[gpu]))
    return sorted(rows, key=lambda row: ([model.name for model in models].index(row.model), row.gpu, row.num_ranks))


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


def _row(model: LargeModel, gpu: str, num_ranks: int, drawn: Mapping[str, Drawn], best: Overlap) -> LargeRow:
    shown = {stage: drawn[stage] for stage in ("LAER", "unified")}
    return LargeRow(
        model=model.name,
        gpu=gpu,
        num_ranks=num_ranks,
        slots=model.slots(num_ranks),
        layer_ms={stage: 1e3 * of.seconds.total / NUM_LAYERS for stage, of in drawn.items()},
        best=best,
        max_over_mean={stage: statistics.fmean(of.max_over_mean_P) for stage, of in shown.items()},
        exposed_ms={stage: 1e3 * of.seconds.exposed / NUM_LAYERS for stage, of in shown.items()},
        inter_node_share={stage: of.inter_node_share for stage, of in shown.items()},
    )


def large_sheet(rows: Sequence[LargeRow]) -> Sheet:
    """Published models on 8 to 1,024 GPUs."""
    lost = [f"{row.model} on {row.gpus}" for row in rows if row.layer_ms["unified"] > min(row.layer_ms.values())]
    notes = [
        "Log-normal routing of skew 1, 8,192 tokens a rank, experts restored every pass, float32 gradients.",
        f"Where a stage before it is faster than unified: {', '.join(lost) or 'nowhere'}.",
        "Other stages have no search: LAER's as published, overlap in chunks by four of them.",
        "by: which of four points of MegaKernel's search space the simulator finds fastest on up to "
        f"{COMPARED_RANKS} GPUs, and the last of these on more.",
    ]
    for letter, point in MEGA_KERNELS.items():
        fields = point.model_dump(exclude_defaults=True)
        notes.append(f"{letter}: MegaKernel({', '.join(f'{name}={value}' for name, value in fields.items())}).")
    title = "SIMULATED: times as fast as LAER's layout, a layer's forward and backward"
    return Sheet(title, rows, notes, group_by="model")
