"""Training steps of small models of transformers on one of several ranks, for benchmarks that time and compare them.

T tokens of a rank, B sequences, C their length, E experts, K top-k, L layers with experts.
"""

from __future__ import annotations

import importlib
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.plan import LayerPlan
from moesys.config import Ep, Fsep, Strategy
from moesys.config.overlap import Pipelined
from moesys.hf.routing_replay import replay_routing, routers_of
from moesys.moe.experts import experts_of

E, K = 8, 2
LENGTH = 256
HIDDEN = 256
VOCABULARY = 512
ROUTINGS = ("balanced", "skewed")
# The exponent of popularity: the n-th expert is chosen in proportion to 1 / n^ZIPF.
ZIPF = 1.2
# The largest ‖a - b‖ / ‖b‖ of loss and gradients from transformers' own at which a speed is shown.
TOLERANCE = 1e-5

_COMMON = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4}
_HEADS = {"num_key_value_heads": 2, "head_dim": 64}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64}
# The options that grow with the hidden size.
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")
# The prefix of transformers' classes, and the options of the config, of each model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 512, "num_experts": E}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_COMMON, **_HEADS, "moe_intermediate_size": 512, "num_experts": E, "norm_topk_prob": True},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **(_COMMON | _LATENT),
            **{"num_key_value_heads": 4, "intermediate_size": 512, "moe_intermediate_size": 512},
            **{"n_routed_experts": E, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1},
        },
    ),
}


def strategies(num_ranks: int, num_slots: int | None = None) -> list[Strategy]:
    """Returns the strategies that are compared: with and without balance, with and without overlap.

    num_slots: those of a rank where there is balance; by default for two more than its own of the ``E`` experts.
    """
    spare = E // num_ranks + 2 if num_slots is None else num_slots
    balanced: dict[str, Any] = {"balance": Greedy(), "split": FlowSplit()}
    ep = Strategy(name="ep")
    lent = Strategy(name="lent ep", sharding=Ep(slots_per_rank=spare), **balanced)
    return [
        ep,
        lent,
        lent.replace(name="lent ep, pipelined", overlap=Pipelined(chunks=2)),
        Strategy(name="fsep", sharding=Fsep(slots_per_rank=spare), **balanced),
    ]


def config_of(model: str, hidden_size: int = HIDDEN, **more: Any) -> Any:
    """Returns transformers' configuration of a model in ``MODELS``."""
    family, options = MODELS[model]
    options = options | {name: options[name] * hidden_size // HIDDEN for name in _WIDTHS if name in options}
    transformers: Any = importlib.import_module("transformers")
    # The default token ids exceed this small vocabulary.
    common = {"num_experts_per_tok": K, "max_position_embeddings": LENGTH, "eos_token_id": None}
    return getattr(transformers, f"{family}Config")(**(options | more), **common)


def new_model(model: str, hidden_size: int = HIDDEN, **more: Any) -> Any:
    """Returns a model in ``MODELS``, always with the same weights. ``more``: options that replace its own."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    return getattr(transformers, f"{MODELS[model][0]}ForCausalLM")(config_of(model, hidden_size, **more))


def tokens_of(sequences: int) -> Tensor:
    """Returns this rank's batch [B, C]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(VOCABULARY, (sequences, LENGTH), generator=generator)


def routing_of(routing: str, num_layers: int, num_tokens: int, num_experts: int = E, top_k: int = K) -> Tensor:
    """Returns this rank's experts [L, T, K]."""
    if routing == "balanced":
        return (torch.arange(num_tokens * top_k) % num_experts).view(1, num_tokens, top_k).expand(num_layers, -1, -1)
    popularity_E = torch.arange(1, num_experts + 1).double() ** -ZIPF
    layers = []
    for layer in range(num_layers):
        order_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(layer))
        generator = torch.Generator().manual_seed(1000 * layer + dist.get_rank())
        drawn = torch.multinomial(popularity_E.expand(num_tokens, num_experts), top_k, generator=generator)
        layers.append(order_E[drawn])
    return torch.stack(layers)


class ModelSteps:
    """Steps of a causal language model of transformers on this rank's batch [B, C].

    routing: one of ``ROUTINGS``, which replaces the choices of the model's routers.
    """

    def __init__(self, model: Any, tokens_BC: Tensor, routing: str) -> None:
        self.model, self.tokens_BC = model.train(), tokens_BC
        routers = routers_of(model)
        self.expert_LTK = routing_of(routing, len(routers), tokens_BC.numel(), routers[0].num_experts)
        # The default of transformers' Trainer.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def backward(self) -> Tensor:
        """Runs forward and backward; returns the loss."""
        with replay_routing(self.model, self.expert_LTK):
            loss: Tensor = self.model(input_ids=self.tokens_BC, labels=self.tokens_BC).loss
            loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def results(self) -> dict[str, Tensor]:
        """Returns the loss and whole gradients of the second of two passes; in the first one layouts settle."""
        self.backward()
        self.optimizer.zero_grad()
        loss = self.backward()
        grads = {of: whole(p.grad) for of, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        return {"loss": loss, **grads}


def plans_of(model: nn.Module) -> list[LayerPlan]:
    """Returns the last plan of each layer with experts of moesys."""
    return [plan for experts in experts_of(model) if (plan := experts.last_plan) is not None]


def max_over_mean_of(model: nn.Module) -> float | None:
    """Returns the tokens of the busiest rank over the mean, averaged over layers; None for experts of others."""
    plans = plans_of(model)
    return statistics.mean(plan.tokens.max_over_mean for plan in plans) if plans else None


def whole(grad: Tensor) -> Tensor:
    """Returns a copy of a gradient, gathered if ranks have shards of it."""
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
