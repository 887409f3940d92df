"""Models whose parameters differ in dtype, are shared or are frozen, under ``ms.parallelize``: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hf_models import drawn, errors_on_ranks, fsep, lent, text
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

HALF, FULL = torch.bfloat16, torch.float32


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Has the parameters of a module and its inputs in ``dtype``."""
    module.to(dtype)
    module.register_forward_pre_hook(lambda _, inputs: tuple(each.to(dtype) for each in inputs))


def router(model: Any) -> Any:
    model.to(HALF)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.float()
        layer.mlp.gate.e_score_correction_bias.data = layer.mlp.gate.e_score_correction_bias.data.float()
    return model


class Shifting(nn.Module):
    """Adds to the inputs of a router what the router subtracts again, in float32: bfloat16 would round them."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        gate.register_forward_pre_hook(lambda _, inputs: (inputs[0] - 1024.0,))

    def forward(self, hidden: Tensor) -> Any:
        return self.gate(hidden.float() + 1024.0)


def shifted_router(model: Any) -> Any:
    for layer in router(model).model.layers[1:]:
        layer.mlp.gate = Shifting(layer.mlp.gate)
    return model


def experts(model: Any) -> Any:
    model.to(HALF)
    for layer in model.model.layers:
        layer.mlp.experts.to(FULL)
    return model


def anything(model: Any) -> Any:
    """Every module in a random dtype, for autocast."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        own = [*module.named_parameters(recurse=False)]
        if own and torch.rand((), generator=generator) < 0.5:
            for name, parameter in own:
                module._parameters[name] = nn.Parameter(parameter.detach().to(HALF))
    return model


def some_frozen(model: Any) -> Any:
    """Freezes random parameters of a model with two dtypes."""
    generator = torch.Generator().manual_seed(6)
    for parameter in anything(model).parameters():
        parameter.requires_grad_(bool(torch.rand((), generator=generator) < 0.6))
    return model


def tied_head(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def tied_head_in_half(model: Any) -> Any:
    """All other parameters outside of blocks are float32."""
    model.lm_head.weight = model.model.embed_tokens.weight = nn.Parameter(model.lm_head.weight.detach().to(HALF))
    model.model.norm.register_parameter("unused", nn.Parameter(torch.zeros(100, 96)))
    return model


def tied_blocks(model: Any) -> Any:
    """A parameter, and a whole module, that two layers share."""
    first, second = model.model.layers
    second.input_layernorm.weight = first.input_layernorm.weight
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    second.post_attention_layernorm = first.post_attention_layernorm
    return model


def blocks_in_a_part(model: Any) -> Any:
    """The module around the blocks has a parameter of another dtype."""
    model.model.scale = nn.Parameter(torch.zeros(8, dtype=HALF))
    return model


def part_in_shared(model: Any) -> Any:
    """The two attentions share a parameter, and a norm in the first has another dtype."""
    first, second = (layer.self_attn for layer in model.model.layers)
    first.scale = second.scale = nn.Parameter(torch.zeros(8))
    first.q_norm.to(HALF)
    return model


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2.0


def parametrized_router(model: Any) -> Any:
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.mlp.gate, "weight", Doubled())
    return model


class Reading(nn.Module):
    """Reads the parameter of a module that it does not call, as blocks of hybrid models do with convolutions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.LayerNorm(48, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.inner(hidden).float() * self.scale.weight).to(hidden.dtype)


def read_without_a_call(model: Any) -> Any:
    """A module in float32 in a block of bfloat16, and one at the end of the model."""
    cast(model, HALF)
    for owner, name in ((model.model.layers[1], "input_layernorm"), (model.model, "norm")):
        setattr(owner, name, Reading(getattr(owner, name)))
    return model


def half_experts_frozen(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.requires_grad_(False)
    return model


# Each kind has a family, whether it runs under autocast, and the tolerances of its loss and gradients.
EXACT, ROUNDED = (1e-5, 1e-4), (2e-2, 0.1)
KINDS: dict[Callable[[Any], Any], tuple[str, bool, tuple[float, float]]] = {
    router: ("deepseek_v3", False, ROUNDED),
    shifted_router: ("deepseek_v3", False, ROUNDED),
    experts: ("qwen3_moe", False, ROUNDED),
    anything: ("qwen3_moe", True, ROUNDED),
    some_frozen: ("qwen3_moe", True, ROUNDED),
    tied_head: ("qwen3_moe", False, EXACT),
    tied_head_in_half: ("qwen3_moe", True, ROUNDED),
    tied_blocks: ("qwen3_moe", False, EXACT),
    blocks_in_a_part: ("qwen3_moe", False, EXACT),
    part_in_shared: ("qwen3_moe", False, (1e-5, 1e-2)),
    parametrized_router: ("qwen3_moe", False, EXACT),
    half_experts_frozen: ("qwen3_moe", False, EXACT),
    read_without_a_call: ("qwen3_moe", False, ROUNDED),
}
POLICIES = {shifted_router: MixedPrecisionPolicy(param_dtype=HALF)}


def loss_of(model: Any, rank: int, autocast: bool) -> Tensor:
    with torch.autocast("cpu", HALF) if autocast else nullcontext():
        return model(input_ids=text(rank), labels=text(rank)).loss


def compared(kinds: list[Callable[[Any], Any]], strategy: ms.Strategy) -> list[str]:
    """Returns the differences from one process, for each kind of model."""
    ms.hf.register()
    wrong = []
    for kind in kinds:
        family, autocast, (loss_bound, bound) = KINDS[kind]
        models = [kind(drawn(family, experts_implementation="moesys")) for _ in range(2)]
        loss = partial(loss_of, autocast=autocast)
        # The model runs twice, because units differ between the first pass and later ones.
        errors = errors_on_ranks(*models, strategy, loss, passes=2, policy=POLICIES.get(kind))
        wrong += [
            f"{kind.__name__}: {name} is wrong by {error}"
            for name, error in errors.items()
            if not error <= (loss_bound if name == "loss" else bound)
        ]
    return wrong


# Units are of what lies beside experts, so that how these are sharded shows where they themselves are what is special.
OF_EXPERTS = [router, experts, half_experts_frozen]
# One of each: another dtype, frozen parameters, what is shared, also in another dtype, and units that lie in others.
SOME = [shifted_router, some_frozen, tied_head_in_half, tied_blocks, part_in_shared, read_without_a_call]


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        pytest.param(lent(2), OF_EXPERTS, marks=pytest.mark.slow),
        (fsep(2), SOME),
        pytest.param(fsep(2), list(KINDS), marks=pytest.mark.slow),
    ],
    ids=["lent", "fsep", "fsep, all"],
)
def test_dtypes_shared_and_frozen_parameters_train_as_in_one_process(
    ranks: LocalRanks, strategy: ms.Strategy, kinds: list[Callable[[Any], Any]]
) -> None:
    assert ranks.run(compared, kinds, strategy, num_ranks=2, timeout_s=200.0) == [[], []]


def refusals() -> dict[str, str]:
    """Returns the refusal of each model; nothing is sharded by then."""
    found = {}
    for kind in ("router", "block", "around", "experts", "tied experts"):
        model = drawn("qwen3_moe")
        first, second = model.model.layers
        if kind == "router":
            second.mlp.gate.scale = nn.Parameter(torch.zeros(3, dtype=HALF))
        elif kind == "block":
            first.scale = second.scale = nn.Parameter(torch.zeros(3))
        elif kind == "around":
            model.model.scale = first.mlp.gate.scale = nn.Parameter(torch.zeros(3))
        elif kind == "experts":
            second.mlp.experts.down_proj.data = second.mlp.experts.down_proj.data.to(HALF)
        else:
            second.mlp.experts.down_proj = first.mlp.experts.down_proj
        with pytest.raises(ValueError) as error:  # noqa: PT011
            ms.parallelize(model, lent(2))
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        found[kind] = str(error.value)
    return found


def test_what_one_unit_cannot_have_is_refused_before_anything_is_sharded(ranks: LocalRanks) -> None:
    for found in ranks.run(refusals, num_ranks=2, timeout_s=60.0):
        assert "mlp.gate has trainable parameters of several dtypes, weight of torch.float32 and" in found["router"]
        assert "model.layers.1 has a parameter that another block has too, scale, which" in found["block"]
        assert "model, model.layers.0.mlp.gate, model.layers.0 share parameters so that some" in found["around"]
        assert "several dtypes, gate_up_proj of torch.float32, down_proj of torch.bfloat16; give" in found["experts"]
        assert "model.layers.1.mlp.experts.down_proj is a parameter of model.layers.0.mlp.exp" in found["tied experts"]
