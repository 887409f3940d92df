"""Small language models of transformers' own code, by family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.distributed import DistributedConfig

import moesys as ms

VOCABULARY = 96
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}

Model = Callable[[int], Any]


def mixtral(num_experts: int) -> Any:
    options = {"num_local_experts": num_experts, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM, MixtralConfig(**SMALL, intermediate_size=48, **options)


def qwen2_moe(num_experts: int) -> Any:
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = {**SMALL, "intermediate_size": 40, "shared_expert_intermediate_size": 32}
    return Qwen2MoeForCausalLM, Qwen2MoeConfig(**shape, **experts)


def qwen3_moe(num_experts: int) -> Any:
    experts = {"num_experts": num_experts, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **SMALL, intermediate_size=40, head_dim=12, norm_topk_prob=True, **experts
    )


def olmoe(num_experts: int) -> Any:
    options = {"num_experts": num_experts, "num_experts_per_tok": 4, "output_router_logits": True}
    return OlmoeForCausalLM, OlmoeConfig(**SMALL, intermediate_size=24, **options)


def deepseek_v2(num_experts: int) -> Any:
    routing = {"n_group": 2, "topk_group": 1, "n_routed_experts": num_experts, "num_experts_per_tok": 2}
    shape = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 24}
    options = {"n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"}
    return DeepseekV2ForCausalLM, DeepseekV2Config(**shape, **LATENT, **routing, **options)


def deepseek_v3(num_experts: int) -> Any:
    routing = {"n_group": 4, "topk_group": 2, "n_routed_experts": num_experts, "num_experts_per_tok": 3}
    shape = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 24}
    options = {"n_shared_experts": 1, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM, DeepseekV3Config(**shape, **LATENT, **routing, **options)


def gpt_oss(num_experts: int) -> Any:
    options = {"num_local_experts": num_experts, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    shape = {**SMALL, "head_dim": 12, "intermediate_size": 24}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return GptOssForCausalLM, GptOssConfig(**shape, rope_parameters=rope, **options)


def glm4_moe(num_experts: int) -> Any:
    routing = {"n_group": 1, "topk_group": 1, "n_routed_experts": num_experts, "num_experts_per_tok": 2}
    shape = {**SMALL, "head_dim": 12, "intermediate_size": 64, "moe_intermediate_size": 24}
    return Glm4MoeForCausalLM, Glm4MoeConfig(**shape, **routing, n_shared_experts=1, first_k_dense_replace=1)


def qwen3_vl_moe(num_experts: int) -> Any:
    """Its experts' matrices are square, so that their shape does not show whether they are transposed."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = {**SMALL, "head_dim": 12, "intermediate_size": 40, "pad_token_id": 0}
    vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "out_hidden_size": 48, **VISION}
    return Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig(
        text_config={**shape, **experts, "rope_parameters": rope}, vision_config=vision, image_token_id=90
    )


def ernie4_5_vl_moe(num_experts: int) -> Any:
    """Experts of text and of vision, which files number as one list."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    experts = {"moe_num_experts": num_experts, "moe_k": 2, "moe_intermediate_size": [24, 16]}
    shape = {**SMALL, "intermediate_size": 40, "moe_num_shared_experts": 1, "rope_parameters": rope}
    return Ernie4_5_VLMoeForConditionalGeneration, Ernie4_5_VLMoeConfig(
        text_config={**shape, **experts}, vision_config=VISION, image_token_id=90, tie_word_embeddings=False
    )


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "patch_size": 4}
MULTIMODAL: dict[str, Model] = {make.__name__: make for make in (qwen3_vl_moe, ernie4_5_vl_moe)}
FAMILIES: dict[str, Model] = {
    make.__name__: make for make in (mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, gpt_oss, glm4_moe)
}


def drawn(family: str, num_experts: int = 8, **options: Any) -> Any:
    """A model with weights that make routers choose unevenly."""
    kind, config = (FAMILIES | MULTIMODAL)[family](num_experts)
    model = kind._from_config(config, attn_implementation="eager", **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if "norm" not in name and "inv_freq" not in name:
                tensor.normal_(std=0.1, generator=generator)
    return model.train()


def saved_model(root: Path, num_experts: int, family: str) -> Path:
    """A folder with a model of a family, as transformers saves it; written when it is first asked for."""
    if not (root / family).exists():
        drawn(family, num_experts).save_pretrained(root / family)
    return root / family


def text(seed: int, num_rows: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (num_rows, 20), generator=torch.Generator().manual_seed(seed))


def lent(ranks: int, num_experts: int = 8, **options: Any) -> ms.Strategy:
    """Experts of owners lent for one micro-batch, a slot more on each rank than it needs."""
    sharding = ms.Ep(slots_per_rank=-(-num_experts // ranks) + 1)
    return ms.Strategy(name="lent", sharding=sharding, balance=ms.Greedy(), split=ms.FlowSplit(), **options)


def fsep(ranks: int, num_experts: int = 8, **sharding: Any) -> ms.Strategy:
    """Experts cut over all ranks, a slot more on each than it needs."""
    held = ms.Fsep(slots_per_rank=-(-num_experts // ranks) + 1, **sharding)
    return ms.Strategy(name="fsep", sharding=held, balance=ms.Greedy(), split=ms.FlowSplit())


def loaded(folder: Path, strategy: ms.Strategy | None, sizes: dict[str, int], **options: Any) -> Any:
    """A model in training on the ranks of a mesh, under a strategy; None is transformers' own all_to_all."""
    name = "all_to_all" if strategy is None else ms.hf.register(strategy)
    config = DistributedConfig(ep_implementation=name, **sizes, **options)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, attn_implementation="eager").train()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@contextmanager
def under_torchrun() -> Iterator[None]:
    """What torchrun tells a process, on local ranks: without it a Trainer takes itself for the only one, and each rank
    trains on the same rows.
    """
    told = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    told |= {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size(), "OMP_NUM_THREADS": 1}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in told.items():
                patch.setenv(name, str(value))
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
