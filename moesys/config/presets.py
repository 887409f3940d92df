"""Named models, clusters and strategies, each with its source.

Change one with ``replace``: ``presets.MIXTRAL_8X7B.replace(dtype="float32")``.
"""

from __future__ import annotations

from typing import Any

from moesys.config.cluster import ClusterSpec
from moesys.config.model import ModelShape, MoeMlp
from moesys.config.model_spec import hub_model, read_config
from moesys.config.sharding import Fsep, SlotCount
from moesys.config.strategy import Strategy, WindowMean
from moesys.kinds import did_you_mean


def _layer(model: str, **losses: float) -> ModelShape:
    """Returns the layer with experts of a packaged model (its config.json), with the losses of its training."""
    mlp: MoeMlp = hub_model(read_config(model), "bfloat16")["layers"][-1].mlp
    return mlp.shape.replace(**losses)


MIXTRAL_8X7B = _layer("mixtral-8x7b", router_aux_loss_coef=0.02)
QWEN3_30B_A3B = _layer("qwen3-30b-a3b", router_aux_loss_coef=0.001)
# Its config.json does not record the z-loss of its training.
OLMOE_1B_7B = _layer("olmoe-1b-7b", router_aux_loss_coef=0.01)
# Bias rate and balance loss: arXiv 2412.19437, section 4.2.
DEEPSEEK_V3 = _layer("deepseek-v3", router_aux_loss_coef=0.0001, router_bias_update_rate=0.001)

# LAER-MoE's mixtral-8x7b e8k2 (arXiv 2602.11686, evaluation): Mixtral's layer without an auxiliary loss.
LAER_E8K2 = MIXTRAL_8X7B.replace(router_aux_loss_coef=0.0)

# LAER-MoE's mixtral-8x7b e16k4: twice the experts, each of half the width.
LAER_E16K4 = LAER_E8K2.replace(intermediate_size=7168, num_experts=16, top_k=4)

# --- clusters ---------------------------------------------------------------------------------------------------------
#
# Nodes of 8 GPUs, and NVL72 racks. Every number is one of: [sheet], its maker's data sheet; [measured], published
# by who measured it; [derived], from such numbers, as said. Read on 2026-11-22, racks on 2026-11-23.
# `moesys calibrate` measures your own.
#
# Data sheets: NVIDIA A100 80GB (2021), H100 (2023), H200 (2023), HGX B200 (2024): memory, multiprocessors, and NVLink
# of 300, 450, 450 and 900 GB/s one way. H800 is H100 with NVLink of 200. Streams reach nine tenths of a memory's rate.
#
# memory_gb [sheet]: the same sheets, 1,440 GB of 8 for HGX B200; GB200 NVL72 (2025): 372 GB of 2; GB300 NVL72 (2025):
# 20 TB of 72, which are 279 GB a GPU (verda.com/blog/gb300-nvl72-architecture).
#
# expert_tflops [measured]: the best published forward of a whole MoE layer, not of one dense product, of which H100 and
# H200 reach 794.5 and B200 1745 (github.com/stas00/ml-engineering, "Maximum Achievable Matmul FLOPS").
#
# peak_tflops [sheet]. fp8_tflops [measured]: grouped products of DeepGEMM on H800, the slower of its two shapes
# (github.com/deepseek-ai/DeepGEMM pull 73, 2025); MXFP8 of Transformer Engine on GB200, the mean over shapes of its
# slower direction, backward (github.com/AMD-AGI/Primus-Turbo pull 274, 2026).
#
# inter_node_gb_per_s [derived]: DeepEP V2's README (2026) has 90 GB/s for each GPU of 2 nodes with a ConnectX-7 of
# 400 Gb/s each, and counts rows that stay in their node, which are half: 45 of 50 GB/s, for 8 GPUs.
#
# intra_node_us, inter_node_us, flag_us [measured]: what NCCL's own model expects of one hop of a ring
# (src/graph/tuning.cc, commit 01afd20): Simple over NVLink and over network; LL, whose flags travel with the data, over
# NVLink.
#
# launch_us [measured]: NVIDIA's blog "Getting Started with CUDA Graphs" (2019), on V100: kernels of 2.9 us in a stream
# follow one another every 3.8 us. No newer figure was found.
#
# copy_share [derived]: the multiprocessors that DeepEP takes for its copies, 24 (V1's own choice; B200: V2's README).


def _nodes_of_8(num_nodes: int, name: str, **fields: float) -> ClusterSpec:
    hops = {"intra_node_us": 3.4, "inter_node_us": 9.6, "flag_us": 0.47, "launch_us": 0.9}
    shape = {"num_nodes": num_nodes, "ranks_per_node": 8, "name": f"{num_nodes} x 8 {name}"}
    return ClusterSpec.model_validate(shape | hops | fields)


def a100(num_nodes: int = 1) -> ClusterSpec:
    """Returns nodes of 8 A100-80GB SXM with 4 NICs of 200 Gb/s, as LAER-MoE measured them (arXiv 2602.11686)."""
    return _nodes_of_8(
        num_nodes,
        "A100-80GB",
        # [measured] network_config.json of LAER-MoE's artifact (2026); 300 and 100 GB/s by data sheet.
        intra_node_gb_per_s=216.269,
        inter_node_gb_per_s=88.9539,
        # [measured] the 1.484375 us of its planner for a token in one of Mixtral's experts, 6 x 4096 x 14336 flops.
        expert_tflops=237.0,
        peak_tflops=312.0,
        memory_gb_per_s=2039.0,
        memory_gb=80.0,
        multiprocessors=108,
        # MegaBlocks' tiles, chosen on A100 (arXiv 2211.15841).
        tile_rows=128,
        tile_columns=128,
        # What NCCL's copies take of an A100 is not published.
        copy_share=0.0,
    )


def _hopper(num_nodes: int, name: str, **fields: float) -> ClusterSpec:
    # Tiles: most of SonicMoE's (arXiv 2512.14080).
    shared = {
        "inter_node_gb_per_s": 360.0,
        "fp8_tflops": 1262.0,
        "peak_tflops": 989.5,
        "memory_gb_per_s": 3350.0,
        "memory_gb": 80.0,
        "multiprocessors": 132,
        "tile_rows": 128,
        "tile_columns": 256,
        "copy_share": 24 / 132,
    }
    return _nodes_of_8(num_nodes, name, **(shared | fields))


def h800(num_nodes: int = 1) -> ClusterSpec:
    """Returns nodes of 8 H800 SXM with 8 NICs of 400 Gb/s."""
    # [derived] DeepEP V1's 153 GB/s (docs/legacy.md, 2025) count rows that stay on their GPU, which are one in 8.
    return _hopper(num_nodes, "H800", intra_node_gb_per_s=134.0, expert_tflops=594.0)


def h100(num_nodes: int = 1) -> ClusterSpec:
    """Returns nodes of 8 H100 SXM with 8 NICs of 400 Gb/s."""
    # [measured] 370 of 450 GB/s: NCCL's developers (github.com/NVIDIA/nccl-tests issue 212, 2024). 594: SonicMoE (arXiv
    # 2512.14080, 2025), figure 14, 32768 tokens of 4096, 64 experts of 2048, top 4.
    return _hopper(num_nodes, "H100", intra_node_gb_per_s=370.0, expert_tflops=594.0)


def h200(num_nodes: int = 1) -> ClusterSpec:
    """Returns nodes of 8 H200 SXM with 8 NICs of 400 Gb/s: H100 with faster memory."""
    # [measured] 613: Liger-Kernel's expert-parallel MoE (README of liger_cute_kernels, 2026), Mixtral's layer, one GPU.
    memory = {"memory_gb_per_s": 4800.0, "memory_gb": 141.0}
    return _hopper(num_nodes, "H200", intra_node_gb_per_s=370.0, expert_tflops=613.0, **memory)


_BLACKWELL = {
    # [derived] DeepEP V2's README (2026): 643 GB/s with 24 multiprocessors, of which one row in 8 stays on its GPU.
    "intra_node_gb_per_s": 563.0,
    "inter_node_gb_per_s": 360.0,
    # [derived] 1745 of a dense product, times 594 / 794.5 of H100: no rate of a MoE layer was found.
    "expert_tflops": 1305.0,
    "fp8_tflops": 1864.0,
    "peak_tflops": 2250.0,
    # [measured] what the driver says of the bus (github.com/pytorch/ao pull 4002, 2026); 8000 by data sheet.
    "memory_gb_per_s": 7672.0,
    "memory_gb": 180.0,
    "multiprocessors": 148,
    # A pair of multiprocessors shares a tile of 256 rows (CUTLASS's Blackwell kernels).
    "tile_rows": 128,
    "tile_columns": 256,
    "copy_share": 24 / 148,
}


def b200(num_nodes: int = 1) -> ClusterSpec:
    """Returns nodes of 8 B200 SXM with 8 NICs of 400 Gb/s."""
    return _nodes_of_8(num_nodes, "B200", **_BLACKWELL)


def _nvl72(num_nodes: int, name: str, nics_gb_per_s: float, memory_gb: float) -> ClusterSpec:
    # Compute trays of 4 GPUs, of which a rack's 18 are one NVLink domain (docs.nvidia.com, Enterprise Reference
    # Architectures, NVL72 AI Factory). [derived] No other figures of these GPUs were found than those of B200.
    domains = tuple(4 * min(18, num_nodes - first) for first in range(0, num_nodes, 18))
    trays = _nodes_of_8(num_nodes, name, **_BLACKWELL)
    return trays.replace(
        ranks_per_node=4,
        ranks_per_domain=domains,
        name=f"{num_nodes} x 4 {name}",
        inter_node_gb_per_s=nics_gb_per_s,
        memory_gb=memory_gb,
    )


def gb200(num_nodes: int = 1) -> ClusterSpec:
    """Returns trays of 4 GPUs with 4 NICs of 400 Gb/s, 18 in a rack, whose 72 GPUs NVLink joins: GB200 NVL72."""
    # [derived] as of the nodes of 8, for half as many NICs.
    return _nvl72(num_nodes, "GB200", nics_gb_per_s=180.0, memory_gb=186.0)


def gb300(num_nodes: int = 1) -> ClusterSpec:
    """Returns trays of 4 GPUs with 4 NICs of 800 Gb/s, 18 in a rack, whose 72 GPUs NVLink joins: GB300 NVL72."""
    # [derived] the same nine tenths of 4 ConnectX-8 (docs.nvidia.com, the same page).
    return _nvl72(num_nodes, "GB300", nics_gb_per_s=360.0, memory_gb=279.0)


# LAER-MoE's testbed.
LAER_A100 = a100(num_nodes=4)


def __getattr__(name: str) -> Any:
    public = [each for each in globals() if not each.startswith("_")]
    raise AttributeError(f"ms.presets has no {name!r}{did_you_mean(name, public)}", name=name, obj=None)


Slots = SlotCount | tuple[SlotCount, ...]


def cpu(ranks_per_node: int | tuple[int, ...], num_nodes: int = 1) -> ClusterSpec:
    """Returns ranks that are processes with one core each and communicate by gloo. The rates are rough, for planners
    that weigh rows against experts; ``moesys calibrate`` measures them.
    """
    # [measured] 20 GFLOP/s on a part of a core of an EPYC (docs/measured/shaped-nodes_epyc-2-cores_2026-11-23.md).
    rates = {"intra_node_gb_per_s": 1.0, "inter_node_gb_per_s": 1.0, "expert_tflops": 0.05}
    return ClusterSpec(num_nodes=num_nodes, ranks_per_node=ranks_per_node, name="CPU ranks, roughly", **rates)


def ep() -> Strategy:
    """Returns classic expert parallelism: experts stay on their owners, nothing overlaps (GShard, arXiv 2006.16668)."""
    return Strategy(name="ep")


def fsep(slots_per_rank: Slots) -> Strategy:
    """Returns fully sharded experts under a fixed layout (arXiv 2602.11686, section 4), LAER-MoE's FSDP+EP baseline."""
    return Strategy(name="fsep", sharding=Fsep(slots_per_rank=slots_per_rank))


def laer(slots_per_rank: Slots) -> Strategy:
    """Returns LAER-MoE as published (arXiv 2602.11686): its planner on the last five micro-batches, even split, FSEP.

    Its experiments have 2 slots per rank for e8k2 and 4 for e16k4.
    """
    return fsep(slots_per_rank).replace(
        name="laer", balance={"kind": "laer"}, predictor=WindowMean(steps=5), split={"kind": "even"}
    )
