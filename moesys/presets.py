"""Named models, clusters and strategies, each with its source.

Change one with ``replace``: ``presets.MIXTRAL_8X7B.replace(dtype="float32")``.
"""

from __future__ import annotations

from moesys.config import ClusterSpec, EvenSplit, Fsep, Laer, ModelShape, SlotCount, Strategy, WindowMean

# huggingface.co/mistralai/Mixtral-8x7B-v0.1, config.json.
MIXTRAL_8X7B = ModelShape(
    hidden_size=4096,
    intermediate_size=14336,
    num_experts=8,
    top_k=2,
    dtype="bfloat16",
    router_aux_loss_coef=0.02,
)

# huggingface.co/Qwen/Qwen3-30B-A3B, config.json.
QWEN3_30B_A3B = ModelShape(
    hidden_size=2048,
    intermediate_size=768,
    num_experts=128,
    top_k=8,
    dtype="bfloat16",
    router_aux_loss_coef=0.001,
)

# huggingface.co/allenai/OLMoE-1B-7B-0924, config.json, which does not record the z-loss of its training.
OLMOE_1B_7B = ModelShape(
    hidden_size=2048,
    intermediate_size=1024,
    num_experts=64,
    top_k=8,
    dtype="bfloat16",
    norm_topk_prob=False,
    router_aux_loss_coef=0.01,
)

# huggingface.co/deepseek-ai/DeepSeek-V3, config.json; bias rate and balance loss: arXiv 2412.19437, section 4.2.
DEEPSEEK_V3 = ModelShape(
    hidden_size=7168,
    intermediate_size=2048,
    num_experts=256,
    top_k=8,
    dtype="bfloat16",
    scoring_func="sigmoid",
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    n_shared_experts=1,
    router_aux_loss_coef=0.0001,
    router_bias_update_rate=0.001,
)

# LAER-MoE's mixtral-8x7b e8k2 (arXiv 2602.11686, evaluation): Mixtral's layer without an auxiliary loss.
LAER_E8K2 = MIXTRAL_8X7B.replace(router_aux_loss_coef=0.0)

# LAER-MoE's mixtral-8x7b e16k4: twice the experts, each of half the width.
LAER_E16K4 = LAER_E8K2.replace(intermediate_size=7168, num_experts=16, top_k=4)

# LAER-MoE's testbed, 4 nodes of 8 A100-80GB. Bandwidths: network_config.json of its artifact. Matmul rate: the 1.484375
# us that its planner allows one token in one of Mixtral's experts, 6 x 4096 x 14336 flops.
LAER_A100 = ClusterSpec(
    name="4 x 8 A100-80GB",
    num_nodes=4,
    ranks_per_node=8,
    intra_node_gb_per_s=216.269,
    inter_node_gb_per_s=88.9539,
    expert_tflops=237.0,
)

Slots = SlotCount | tuple[SlotCount, ...]


def ep() -> Strategy:
    """Classic expert parallelism: experts stay on their owners, nothing overlaps (GShard, arXiv 2006.16668)."""
    return Strategy(name="ep")


def fsep(slots_per_rank: Slots) -> Strategy:
    """Fully sharded experts under a fixed layout (arXiv 2602.11686, section 4): LAER-MoE's own FSDP+EP baseline."""
    return Strategy(name="fsep", sharding=Fsep(slots_per_rank=slots_per_rank))


def laer(slots_per_rank: Slots) -> Strategy:
    """LAER-MoE as published (arXiv 2602.11686): its planner on the last five micro-batches, even split, FSEP.

    Its experiments have 2 slots a rank for e8k2 and 4 for e16k4.
    """
    return fsep(slots_per_rank).replace(name="laer", balance=Laer(), predictor=WindowMean(steps=5), split=EvenSplit())
