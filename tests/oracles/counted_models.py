"""transformers' own models on the meta device, where nothing is computed and torch's counter sees every product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from moesys.config.model_spec import SAME_AS

# Products of a module's name.
_PART_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention_projections"),
    **dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "attention_projections"),
    **dict.fromkeys(("gate", "router"), "router"),
    "experts": "experts",
    **dict.fromkeys(("shared_expert", "shared_experts", "shared_expert_gate"), "shared_experts"),
    "lm_head": "head",
}


def meta_model(config: Mapping[str, Any]) -> nn.Module:
    """Returns transformers' model with eager attention. Its experts are products of all K·S rows, as the counter knows
    no grouped product, and eager experts need to see which are chosen.
    """
    fields = dict(config)
    model_type = fields.pop("model_type")
    with torch.device("meta"):
        made = AutoConfig.for_model(SAME_AS.get(model_type, model_type), **fields)
        made._attn_implementation, made._experts_implementation = "eager", "batched_mm"
        return AutoModelForCausalLM.from_config(made)


def logits_of(model: nn.Module, seq_len: int) -> torch.Tensor:
    """Returns the logits of one sequence. The mask is given, as making one looks at positions."""
    with torch.device("meta"):
        tokens, mask = torch.zeros(1, seq_len, dtype=torch.long), torch.zeros(1, 1, seq_len, seq_len)
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


def forward_flops(model: nn.Module, seq_len: int) -> Counter[str]:
    """Returns forward's flops by part, as ``moesys.simulator.model.model_cost`` names parts."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits_of(model, seq_len)
    flops: Counter[str] = Counter()
    for module, counts in counter.get_flop_counts().items():
        name, total = module.rpartition(".")[2], sum(counts.values())
        if name in _PART_OF:
            flops[_PART_OF[name]] += total
        elif name == "self_attn":
            flops["attention"] += total
        elif name == "mlp":
            flops["mlp"] += total
    flops["attention_scores"] = flops.pop("attention") - flops["attention_projections"]
    flops["dense_mlp"] = flops.pop("mlp") - sum(flops[part] for part in ("router", "experts", "shared_experts"))
    assert sum(flops.values()) == counter.get_total_flops()
    return flops


def step_flops(model: nn.Module, seq_len: int) -> int:
    """Returns the flops of forward and backward together."""
    with FlopCounterMode(display=False) as counter:
        logits_of(model, seq_len).sum().backward()
    return counter.get_total_flops()
