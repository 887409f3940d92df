"""Small models of every family, as config.json: among them all fields that change which weights there are."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
}
_WIDE_EXPERTS = {"moe_intermediate_size": 40, "num_experts": 6}


def _small(model_type: str, *fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    small: dict[str, Any] = {"model_type": model_type} | _SIZES
    for each in (*fields, more):
        small |= each
    return small


SMALL = {
    "mixtral": _small("mixtral", num_local_experts=4, tie_word_embeddings=True),
    "mixtral window": _small("mixtral", num_local_experts=4, sliding_window=5, head_dim=24),
    "qwen2_moe": _small("qwen2_moe", _WIDE_EXPERTS, shared_expert_intermediate_size=56, mlp_only_layers=[1]),
    "qwen2_moe every other": _small(
        "qwen2_moe",
        _WIDE_EXPERTS,
        shared_expert_intermediate_size=56,
        decoder_sparse_step=2,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "qwen3_moe": _small("qwen3_moe", _WIDE_EXPERTS, head_dim=24, attention_bias=True, mlp_only_layers=[0]),
    # As transformers 5 writes it.
    "qwen3_moe window": _small(
        "qwen3_moe", moe_intermediate_size=40, num_local_experts=6, use_sliding_window=True, sliding_window=4
    ),
    "olmoe": _small("olmoe", num_experts=6),
    "olmoe bias": _small("olmoe", num_experts=6, num_key_value_heads=None, attention_bias=True),
    "deepseek_v2": _small("deepseek_v2", _LATENT, q_lora_rank=None, n_shared_experts=2),
    "deepseek_v3": _small("deepseek_v3", _LATENT, q_lora_rank=24, n_group=2, topk_group=1, tie_word_embeddings=True),
    "deepseek_v3 bias": _small(
        "deepseek_v3", _LATENT, q_lora_rank=24, n_group=1, topk_group=1, attention_bias=True, first_k_dense_replace=3
    ),
    "gpt_oss": _small("gpt_oss", num_local_experts=6, head_dim=24, sliding_window=4),
    "gpt_oss full": _small(
        "gpt_oss", num_local_experts=6, head_dim=16, attention_bias=False, layer_types=["full_attention"] * 3
    ),
    "glm4_moe": _small(
        "glm4_moe",
        moe_intermediate_size=40,
        n_routed_experts=6,
        n_shared_experts=2,
        first_k_dense_replace=2,
        attention_bias=True,
        use_qk_norm=True,
    ),
}
