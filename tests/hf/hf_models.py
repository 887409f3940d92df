"""Small language models of transformers' own code, by family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM
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
LOCAL = "num_local_experts"
SPARSE = {"head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 24}
DENSE = {"experts": "n_routed_experts", "n_shared_experts": 1, "first_k_dense_replace": 1}
DENSE |= {"intermediate_size": 64, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"num_key_value_heads": 4}
ERNIE = {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_interval": 1}
ROPE, FULL = {"rope_type": "default", "rope_theta": 1e4}, ["full_attention"] * 2

Model = Callable[[int], Any]


def family(name: str, experts: str = "num_experts", top_k: str = "num_experts_per_tok", **fields: Any) -> Model:
    """Returns what gives class and configuration; ``experts`` and ``top_k`` are the names of these numbers."""

    def made(num_experts: int) -> Any:
        config = getattr(transformers, f"{name}Config")(**{**SMALL, experts: num_experts, top_k: 2, **fields})
        return getattr(transformers, f"{name}ForCausalLM"), config

    return made


FAMILIES: dict[str, Model] = {
    "mixtral": family("Mixtral", LOCAL, intermediate_size=48, output_router_logits=True),
    "qwen2_moe": family("Qwen2Moe", intermediate_size=40, moe_intermediate_size=24, shared_expert_intermediate_size=32),
    "qwen3_moe": family("Qwen3Moe", num_experts_per_tok=3, norm_topk_prob=True, **SPARSE),
    "olmoe": family("Olmoe", num_experts_per_tok=4, intermediate_size=24, output_router_logits=True),
    "deepseek_v2": family("DeepseekV2", n_group=2, topk_group=1, topk_method="group_limited_greedy", **DENSE, **LATENT),
    "deepseek_v3": family("DeepseekV3", n_group=4, topk_group=2, num_experts_per_tok=3, **DENSE, **LATENT),
    "gpt_oss": family("GptOss", LOCAL, head_dim=12, intermediate_size=24, layer_types=FULL, rope_parameters=ROPE),
    "glm4_moe": family("Glm4Moe", n_group=1, topk_group=1, head_dim=12, **DENSE),
}
# Others, each for what is special about it.
OTHERS: dict[str, Model] = {
    "ernie": family("Ernie4_5_Moe", "moe_num_experts", "moe_k", **ERNIE, **SPARSE),
    "laguna": family("Laguna", shared_expert_intermediate_size=24, mlp_layer_types=["sparse"] * 2, **SPARSE),
    "afmoe": family("Afmoe", num_dense_layers=0, num_shared_experts=1, **SPARSE),
    "minimax_m2": family("MiniMaxM2", LOCAL, head_dim=12, intermediate_size=24),
}


def qwen3_vl_moe(num_experts: int) -> Any:
    """Its experts' matrices are square, so that their shape does not show whether they are transposed."""
    rope = ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True}
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2}
    shape = {**SMALL, **SPARSE, "pad_token_id": 0}
    vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "out_hidden_size": 48, **VISION}
    return transformers.Qwen3VLMoeForConditionalGeneration, transformers.Qwen3VLMoeConfig(
        text_config={**shape, **experts, "rope_parameters": rope}, vision_config=vision, image_token_id=90
    )


def ernie4_5_vl_moe(num_experts: int) -> Any:
    """Experts of text and of vision, which files number as one list."""
    rope = ROPE | {"mrope_section": [2, 2, 2]}
    experts = {"moe_num_experts": num_experts, "moe_k": 2, "moe_intermediate_size": [24, 16]}
    shape = {**SMALL, "intermediate_size": 40, "moe_num_shared_experts": 1, "rope_parameters": rope}
    return transformers.Ernie4_5_VLMoeForConditionalGeneration, transformers.Ernie4_5_VLMoeConfig(
        text_config={**shape, **experts}, vision_config=VISION, image_token_id=90, tie_word_embeddings=False
    )


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "patch_size": 4}
MULTIMODAL: dict[str, Model] = {make.__name__: make for make in (qwen3_vl_moe, ernie4_5_vl_moe)}


def drawn(family: str, num_experts: int = 8, **options: Any) -> Any:
    """A model with weights that make routers choose unevenly."""
    kind, config = (FAMILIES | OTHERS | MULTIMODAL)[family](num_experts)
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


class Rows(Dataset[dict[str, Any]]):
    """Rows of text, each its own."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids = text(row, num_rows=1)[0]
        return {"input_ids": ids, "labels": ids}


def loss_of(model: Any, seed: int) -> Tensor:
    return model(input_ids=text(seed), labels=text(seed), use_cache=False).loss


def mean_gradients(model: Any, num_ranks: int | None = None) -> dict[str, Tensor]:
    """What one process makes of all ranks' batches."""
    model, num_ranks = copy.deepcopy(model), num_ranks or dist.get_world_size()
    (sum(loss_of(model, rank) for rank in range(num_ranks)) / num_ranks).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def errors_on_ranks(
    alone: Any,
    model: Any,
    strategy: ms.Strategy,
    loss: Callable[..., Tensor] = loss_of,
    passes: int = 1,
    **options: Any,
) -> dict[str, float]:
    """Parallelizes a model. Returns the relative errors of this rank's loss and of each gradient of its last pass,
    against the same model in one process.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    losses = [loss(alone, each) for each in range(num_ranks)]
    (sum(losses) / num_ranks).backward()
    dtypes = {name: each.dtype for name, each in model.named_parameters()}
    runtime = ms.parallelize(model, strategy, **options)
    for _ in range(passes):
        model.zero_grad()
        found = loss(model, rank)
        found.backward()
    runtime.close()
    errors = {"loss": abs(found.item() / losses[rank].item() - 1)}
    for name, parameter in model.named_parameters():
        wanted = alone.get_parameter(name).grad
        if parameter.grad is None:
            assert wanted is None, name
            continue
        gradient = whole(parameter.grad)
        assert gradient.dtype == dtypes[name], name
        # The gradient of a parameter that no rank has used is zero.
        expected = torch.zeros_like(gradient) if wanted is None else wanted
        errors[name] = float((gradient - expected).double().norm() / expected.double().norm().clamp(min=1e-30))
    return errors


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
    given = {"attn_implementation": "eager"} | {each: options.pop(each) for each in ("dtype",) if each in options}
    config = DistributedConfig(ep_implementation=name, **sizes, **options)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **given).train()


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
