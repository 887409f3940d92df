"""Published models: what decides sizes in their config.json, and what their authors print of them."""

from __future__ import annotations

from typing import Any, NamedTuple


class PublishedModel(NamedTuple):
    """``config``: of huggingface.co/``repository``, config.json. Billions of parameters as printed there or where the
    comment says; ``of_embeddings``: matrices of V·H, embedding and head, that the active ones count.
    """

    repository: str
    config: dict[str, Any]
    billions: str | None
    active_billions: str
    of_embeddings: int


def _model(
    repository: str, model_type: str, billions: str | None, active: str, of_embeddings: int, **config: Any
) -> PublishedModel:
    return PublishedModel(repository, {"model_type": model_type, **config}, billions, active, of_embeddings)


def _qwen3(repository: str, billions: str, active: str, **config: Any) -> PublishedModel:
    shared = {"vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True}
    experts = {"num_experts": 128, "num_experts_per_tok": 8}
    return _model(repository, "qwen3_moe", billions, active, 2, **shared, **experts, **config)


def _gpt_oss(repository: str, billions: str, active: str, **config: Any) -> PublishedModel:
    # arXiv 2508.10925, table 1, which counts the head and not the embedding.
    attention = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    widths = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4}
    return _model(repository, "gpt_oss", billions, active, 1, **attention, **widths, **config)


def _glm(repository: str, active: str, **config: Any) -> PublishedModel:
    # arXiv 2508.06471, table 1, which counts neither embedding nor head, and in the total an extra prediction layer.
    heads = {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
    experts = {"num_experts_per_tok": 8, "n_shared_experts": 1, "vocab_size": 151552}
    return _model(repository, "glm4_moe", None, active, 0, **heads, **experts, **config)


PUBLISHED = (
    _model(
        "mistralai/Mixtral-8x7B-v0.1",
        "mixtral",
        "46.7",
        "12.9",
        2,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    _model(
        "Qwen/Qwen1.5-MoE-A2.7B",
        "qwen2_moe",
        "14.3",
        "2.7",
        2,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
    ),
    _model(
        "Qwen/Qwen2-57B-A14B",
        "qwen2_moe",
        "57",
        "14",
        2,
        vocab_size=151936,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    _qwen3(
        "Qwen/Qwen3-30B-A3B",
        "30.5",
        "3.3",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        moe_intermediate_size=768,
    ),
    _qwen3(
        "Qwen/Qwen3-235B-A22B",
        "235",
        "22",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        moe_intermediate_size=1536,
    ),
    _model(
        "allenai/OLMoE-1B-7B-0924",
        "olmoe",
        "6.9",
        "1.3",
        2,
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    _model(
        "deepseek-ai/DeepSeek-V2",
        "deepseek_v2",
        "236",
        "21",
        1,
        vocab_size=102400,
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=60,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_shared_experts=2,
        n_routed_experts=160,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=1536,
        n_group=8,
        topk_group=3,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    ),
    _model(
        "deepseek-ai/DeepSeek-V2-Lite",
        "deepseek_v2",
        "15.7",
        "2.4",
        1,
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=None,
    ),
    _model(
        "deepseek-ai/DeepSeek-V3",
        "deepseek_v3",
        "671",
        "37",
        1,
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        n_group=8,
        topk_group=4,
    ),
    _model(
        "moonshotai/Kimi-K2-Instruct",
        "kimi_k2",
        None,  # "1 trillion" is not a figure to compare with
        "32",
        1,
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_shared_experts=1,
        n_routed_experts=384,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        q_lora_rank=1536,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
    ),
    _gpt_oss("openai/gpt-oss-20b", "20.91", "3.61", num_hidden_layers=24, num_local_experts=32),
    _gpt_oss("openai/gpt-oss-120b", "116.83", "5.13", num_hidden_layers=36, num_local_experts=128),
    _glm(
        "zai-org/GLM-4.5",
        "32",
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=92,
        n_routed_experts=160,
        first_k_dense_replace=3,
        use_qk_norm=True,
    ),
    _glm(
        "zai-org/GLM-4.5-Air",
        "12",
        hidden_size=4096,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=46,
        n_routed_experts=128,
        first_k_dense_replace=1,
        use_qk_norm=False,
    ),
)
