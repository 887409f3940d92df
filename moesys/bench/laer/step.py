"""One iteration of LAER-MoE's experiments on the simulator: its models, its hardware, and what is not its experts.

The simulator runs the program of this project's layers. Four things differ in LAER-MoE's, and are told to it: rows that
have travelled are kept for backward and not sent again (``recompute="computing"``), gradients of experts travel in
bfloat16, every slot has its own messages (``every_slot_travels``), and without its communication optimisations FSDP
brings a layer's experts while that layer's attention runs, and takes its gradients home behind the attention's backward
(``travel_behind_rest``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesys.config import ClusterSpec, Fsep, ModelShape, Strategy, presets
from moesys.layout import TokenPlan
from moesys.simulator.step_program import RestOfStep, run_step

TOKENS, SEQUENCE, VOCABULARY = 16_384, 8_192, 32_000
KEY_VALUE_WIDTH = 1_024
BACKWARD_OVER_FORWARD = 2


@dataclass(frozen=True)
class Constants:
    """All numbers that the reproduction rests on, beside shapes: ``laer_constants.SOURCES`` says where each is from."""

    expert_tflops: float
    rest_tflops: float
    intra_node_gb_per_s: float
    inter_node_gb_per_s: float
    memory_gb_per_s: float
    dispatcher_ms: float
    skew_growth: float
    calm: float

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec(
            name="4 x 8 A100-80GB",
            num_nodes=4,
            ranks_per_node=8,
            expert_tflops=self.expert_tflops,
            intra_node_gb_per_s=self.intra_node_gb_per_s,
            inter_node_gb_per_s=self.inter_node_gb_per_s,
            memory_gb_per_s=self.memory_gb_per_s,
        )


@dataclass(frozen=True)
class LaerModel:
    """A model of LAER-MoE's table of configurations. Its Qwen variants differ from Mixtral's by a bias only.

    gradient_bytes: of an element of an expert's gradient on its way home, bfloat16.
    """

    setting: Literal["e8k2", "e16k4"]
    num_layers: int
    layer: ModelShape
    gradient_bytes: int = 2

    def rest_of_step(self, constants: Constants, communication_optimised: bool = True) -> RestOfStep:
        """A layer's attention and projections by their flops, the work of the dispatcher, and the language head."""
        H, tflops = self.layer.hidden_size, constants.rest_tflops * 1e12
        projections = 2 * TOKENS * (2 * H * H + 2 * H * KEY_VALUE_WIDTH)
        attention = 2 * TOKENS * SEQUENCE * H
        head = 2 * (1 + BACKWARD_OVER_FORWARD) * 2 * TOKENS * VOCABULARY * H
        return RestOfStep(
            other_seconds=(projections + attention) / tflops + constants.dispatcher_ms * 1e-3,
            recompute="computing",
            optimizer_seconds=head / tflops,
            gradient_bytes=self.gradient_bytes,
            every_slot_travels=True,
            travel_behind_rest=not communication_optimised,
        )


E8K2_8X7B = LaerModel("e8k2", 32, presets.LAER_E8K2)
E16K4_8X7B = LaerModel("e16k4", 24, presets.LAER_E16K4)
# mixtral-8x22b of LAER-MoE's artifact, meta_configs: fewer layers than the published model.
E8K2_8X22B = LaerModel("e8k2", 18, presets.LAER_E8K2.replace(hidden_size=6144, intermediate_size=16384))
E16K4_8X22B = LaerModel("e16k4", 14, presets.LAER_E16K4.replace(hidden_size=6144, intermediate_size=8192))

MODELS = {
    "mixtral-8x7b-e8k2": E8K2_8X7B,
    "qwen-8x7b-e8k2": E8K2_8X7B,
    "mixtral-8x7b-e16k4": E16K4_8X7B,
    "qwen-8x7b-e16k4": E16K4_8X7B,
    "mixtral-8x22b-e8k2": E8K2_8X22B,
    "mixtral-8x22b-e16k4": E16K4_8X22B,
}


def laer_strategy(model: LaerModel, communication_optimised: bool = True) -> Strategy:
    """How the artifact runs all its methods: experts come and gradients go behind the experts of other layers."""
    prefetch = int(communication_optimised)
    sharding = Fsep(slots_per_rank=model.layer.top_k, prefetch_layers=prefetch, delay_reshard=communication_optimised)
    return Strategy(name="laer", sharding=sharding)


@dataclass(frozen=True)
class Seconds:
    """An iteration, in the parts of the published breakdown: means over ranks.

    experts: twice forward and recomputation, as published. all_to_all: of rows, with the waiting for slower ranks.
    rest: all else, of which ``experts_late`` is waiting for experts and gradients on their way.
    """

    total: float
    experts: float
    all_to_all: float
    experts_late: float

    @property
    def rest(self) -> float:
        return self.total - self.experts - self.all_to_all


def iteration_seconds(
    model: LaerModel,
    constants: Constants,
    micro_batches: Sequence[Sequence[TokenPlan]],
    strategy: Strategy | None = None,
    communication_optimised: bool = True,
    cluster: ClusterSpec | None = None,
) -> Seconds:
    """Of an iteration of ``micro_batches``, whose first ``num_layers`` plans are the model's layers."""
    rest = model.rest_of_step(constants, communication_optimised)
    used = strategy or laer_strategy(model, communication_optimised)
    plans = [part[: model.num_layers] for part in micro_batches]
    simulation = run_step(used, model.layer, cluster or constants.cluster, plans, rest)
    computed, waited = simulation.computed_R, simulation.waited_R
    late = sum(float(waited.get(lane, np.zeros(1)).mean()) for lane in ("restore", "reshard"))
    return Seconds(
        total=simulation.length_seconds,
        experts=float((computed["experts"] + computed["weight_gradients"]).mean()),
        all_to_all=sum(float(seconds_R.mean()) for seconds_R in waited.values()) - late,
        experts_late=late,
    )
