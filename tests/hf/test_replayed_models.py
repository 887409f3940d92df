"""Recorded and replayed routing of transformers' models, family by family."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from hf_cases import gradients_of, relative
from hf_models import SMALL, drawn, text
from torch import Tensor, nn
from transformers import JambaConfig, JambaForCausalLM

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

SCALE = 1.7
# Between routers in float32 and formulas in float64.
TOLERANCE = 2e-6


# --- weights [T, K] of one router from its logits [T, E], written one token and one choice after the other ---


def softmax_at(router: Any, logits: Tensor, experts: list[int]) -> Tensor:
    return torch.stack([logits[expert].exp() for expert in experts]) / logits.exp().sum()


def divided_softmax_at(router: Any, logits: Tensor, experts: list[int]) -> Tensor:
    numerators = [logits[expert].exp() for expert in experts]
    return torch.stack([numerator / sum(numerators) for numerator in numerators])


def scaled_softmax_at(router: Any, logits: Tensor, experts: list[int]) -> Tensor:
    return SCALE * softmax_at(router, logits, experts)


def scaled_sigmoid_at(router: Any, logits: Tensor, experts: list[int]) -> Tensor:
    scores = [1 / (1 + (-logits[expert]).exp()) for expert in experts]
    return torch.stack([SCALE * score / sum(scores) for score in scores])


FORMULAS: dict[str, Callable[[Any, Tensor, list[int]], Tensor]] = {
    "mixtral": divided_softmax_at,
    "qwen2_moe": softmax_at,
    "qwen3_moe": divided_softmax_at,
    "olmoe": softmax_at,
    "deepseek_v2": scaled_softmax_at,
    "deepseek_v3": scaled_sigmoid_at,
    "glm4_moe": scaled_sigmoid_at,
    # the softmax of the chosen is that of all, divided by its sum at the chosen
    "gpt_oss": divided_softmax_at,
}
every_family = pytest.mark.parametrize("family", FORMULAS)
# One of each function that has weights at other experts (``WEIGHTS_AT``); the others are slow.
ONE_EACH = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
every_function = pytest.mark.parametrize(
    "family", [name if name in ONE_EACH else pytest.param(name, marks=pytest.mark.slow) for name in FORMULAS]
)


def routers(model: nn.Module) -> list[Any]:
    found = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    assert found
    return found


def num_hooks(model: nn.Module) -> int:
    return sum(len(getattr(router.__dict__.get("forward"), "hooks", ())) for router in routers(model))


def other_experts(model: nn.Module, seed: int, num_tokens: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = routers(model)[0]
    drawn = torch.rand(len(routers(model)), num_tokens, first.num_experts, generator=generator)
    return drawn.argsort(dim=2)[:, :, : first.top_k]


def train(model: Any) -> dict[str, Tensor]:
    """Loss and gradients of two micro-batches, of which the second is shorter; backwards come in the other order."""
    model.zero_grad()
    batches = text(0), text(1)[:, :11]
    losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
    losses[1].backward()
    losses[0].backward()
    return {f"loss{index}": loss.detach() for index, loss in enumerate(losses)} | gradients_of(model)


@every_family
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_replaying_what_was_recorded_changes_no_bit(family: str, checkpointing: bool) -> None:
    model = drawn(family, experts_implementation="moesys")
    plain = train(model)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with ms.record_routing(model) as recorded:
        assert_equal(train(model), plain)
    layers, top_k = len(routers(model)), routers(model)[0].top_k
    assert [ids.shape for ids in recorded] == [(layers, num_tokens, top_k) for num_tokens in (60, 33)]
    assert {ids.dtype for ids in recorded} == {torch.uint8}
    with ms.replay_routing(model, recorded):
        assert_equal(train(model), plain)
    # Other experts reach each layer, also in evaluation.
    ids = other_experts(model, 1)
    for mode in (model.train(), model.eval()):
        with torch.no_grad(), ms.replay_routing(mode, ids), ms.record_routing(mode) as found:
            mode(input_ids=text(0))
        assert torch.equal(found[0], ids)


@every_family
def test_other_experts_have_the_weights_and_gradients_of_the_family(family: str) -> None:
    model = drawn(family, experts_implementation="moesys")
    expert_LTK = other_experts(model, 0)
    for layer, router in enumerate(routers(model)):
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.mul_(2)
        if hasattr(router, "routed_scaling_factor"):
            router.routed_scaling_factor = SCALE
        draw = torch.Generator().manual_seed(layer)
        x_TH, dweight_TK = (torch.randn(60, width, generator=draw) for width in (48, router.top_k))
        x_TH.requires_grad_()
        with ms.replay_routing(router, expert_LTK[layer : layer + 1]):
            logits_TE, weight_TK, chosen_TK = router(x_TH)
        assert torch.equal(chosen_TK, expert_LTK[layer])
        assert weight_TK.dtype == router(x_TH)[1].dtype
        (weight_TK * dweight_TK).sum().backward()

        exact = {name: p.detach().double().requires_grad_() for name, p in router.named_parameters()}
        x = x_TH.detach().double().requires_grad_()
        logits = x @ exact["weight"].T + exact.get("bias", 0)
        formula = FORMULAS[family]
        weights = torch.stack([formula(router, row, ids) for row, ids in zip(logits, chosen_TK.tolist(), strict=True)])
        (weights * dweight_TK).sum().backward()
        assert relative(logits_TE, logits) <= TOLERANCE
        assert relative(weight_TK, weights) <= TOLERANCE
        assert relative(x_TH.grad, x.grad) <= TOLERANCE
        for name, parameter in router.named_parameters():
            assert relative(parameter.grad, exact[name].grad) <= TOLERANCE, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow), "autocast"])
@every_function
def test_other_dtypes_replay_without_a_changed_bit(family: str, dtype: torch.dtype | str) -> None:
    model = drawn(family, experts_implementation="moesys")
    if isinstance(dtype, torch.dtype):
        model = model.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        plain = train(model)
        with ms.record_routing(model) as recorded:
            train(model)
        with ms.replay_routing(model, recorded):
            assert_equal(train(model), plain)


@every_function
@pytest.mark.parametrize("experts_implementation", ["moesys", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_recomputation_repeats_the_experts_of_its_first_pass(family: str, experts_implementation: str) -> None:
    """Inside of the context, and behind it, where another one is open."""
    model = drawn(family, experts_implementation=experts_implementation)
    ids = [other_experts(model, 0), other_experts(model, 1, 33)]
    with ms.replay_routing(model, ids):
        plain = train(model)
    assert num_hooks(model) == 0
    model.activation_checkpointing_enable({"use_reentrant": False})
    with ms.replay_routing(model, ids):
        assert_equal(train(model), plain)
    model.zero_grad()
    batches = text(0), text(1)[:, :11]
    with ms.replay_routing(model, ids):
        losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
    assert num_hooks(model) > 0
    with ms.replay_routing(model, other_experts(model, 2)):
        losses[1].backward()
        model(input_ids=text(0))
    losses[0].backward()
    assert_equal({f"loss{index}": loss for index, loss in enumerate(losses)} | gradients_of(model), plain)
    del losses
    gc.collect()
    assert num_hooks(model) == 0
    assert all("forward" not in router.__dict__ for router in routers(model))


def test_a_copy_made_inside_of_a_context_has_routers_of_its_own() -> None:
    """It is neither recorded nor replayed, and pickles as well."""

    def negated(model: Any) -> Any:
        with torch.no_grad():
            for router in routers(model):
                router.weight.neg_()
        return model

    model = drawn("qwen3_moe", experts_implementation="moesys")
    ids = other_experts(model, 1)
    wanted = train(negated(drawn("qwen3_moe", experts_implementation="moesys")))
    with ms.replay_routing(model, ids), ms.record_routing(model) as recorded:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in copies:
            assert_equal(train(negated(each)), wanted)
        model(input_ids=text(0))
    assert [torch.equal(each, ids) for each in recorded] == [True]
    for each in copies:
        with ms.record_routing(each) as chosen:
            assert_equal(train(each), wanted)
        assert len(chosen) == 2
        assert not torch.equal(chosen[0], ids)


# --- compiled models ----------------------------------------------------------------------------------------------


def compile_whole(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compile_wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in model.model.layers:
        block.compile(backend="eager")
    return model


COMPILED = {"whole": compile_whole, "wrapped": compile_wrapped, "blocks": compile_blocks}


def recorded_and_replayed(model: Any, ids: Tensor, first: str) -> dict[str, Tensor]:
    """Returns the choices of a compiled model in three contexts; a fourth forward runs without one.
    ``first``: whether it was compiled before the first context or inside of it.
    """
    with torch.no_grad():
        if first == "plain":
            model(input_ids=text(0))
        with ms.record_routing(model) as live:
            model(input_ids=text(0))
        with ms.replay_routing(model, ids), ms.record_routing(model) as replayed:
            model(input_ids=text(0))
        with ms.record_routing(model) as after:
            model(input_ids=text(0))
        model(input_ids=text(0))
    assert [len(each) for each in (live, replayed, after)] == [1, 1, 1]
    return {"live": live[0], "replayed": replayed[0], "after": after[0]}


@pytest.mark.parametrize("first", ["plain", "recorded"])
@pytest.mark.parametrize(
    "compiled", [name if name == "blocks" else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED]
)
def test_compiled_models_are_recorded_and_replayed(compiled: str, first: str) -> None:
    """Code that was compiled without hooks does not look for them; code that was compiled with some keeps them."""
    model = drawn("qwen3_moe", experts_implementation="moesys").eval()
    with torch.no_grad(), ms.record_routing(model) as live:
        model(input_ids=text(0))
    ids = other_experts(model, 1)
    found = recorded_and_replayed(COMPILED[compiled](model), ids, first)
    assert torch.equal(found["live"], live[0])
    assert torch.equal(found["replayed"], ids)
    assert torch.equal(found["after"], live[0])


def batch_of(rank: int, turn: int) -> Tensor:
    return text(10 * rank + turn)[:, : 20 - 3 * rank - turn]


def ids_of(model: nn.Module, rank: int) -> list[Tensor]:
    return [other_experts(model, 10 * rank + turn, batch_of(rank, turn).numel()) for turn in range(2)]


def replayed_on_ranks(family: str, strategy: ms.Strategy) -> dict[str, Tensor]:
    model, rank = drawn(family), dist.get_rank()
    ids = ids_of(model, rank)
    runtime = ms.parallelize(model, strategy)
    model.activation_checkpointing_enable({"use_reentrant": False})
    batches = [batch_of(rank, turn) for turn in range(2)]
    with ms.replay_routing(model, ids):
        losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
        losses[1].backward()
    losses[0].backward()
    runtime.close()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_ranks_under_a_strategy_replay_their_own(ranks: LocalRanks, family: str) -> None:
    """Gradients are those of one process with eager experts; backward comes within and after the context."""
    strategy = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5), balance=ms.Eplb(), split=ms.FlowSplit())
    found = ranks.run(replayed_on_ranks, family, strategy, timeout_s=100.0)
    model = drawn(family, experts_implementation="eager")
    with ms.replay_routing(model, [ids for rank in range(4) for ids in ids_of(model, rank)]):
        for rank in range(4):
            for turn in range(2):
                (model(input_ids=batch_of(rank, turn), labels=batch_of(rank, turn)).loss / 4).backward()
    for gradients in found:
        assert gradients.keys() == gradients_of(model).keys()
        for name, gradient in gradients_of(model).items():
            assert relative(gradients[name], gradient) <= 1e-5, name


def test_a_reentrant_checkpoint_is_refused() -> None:
    model = drawn("qwen3_moe", experts_implementation="eager")
    model.activation_checkpointing_enable({"use_reentrant": True})
    with ms.replay_routing(model, other_experts(model, 0)):
        loss = model(input_ids=text(0), labels=text(0)).loss
        with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
            loss.backward()


def test_generation_is_recorded_token_by_token() -> None:
    model = drawn("mixtral", experts_implementation="moesys").eval()
    with ms.record_routing(model) as recorded:
        model.generate(text(0)[:1, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [ids.shape[1] for ids in recorded] == [5, 1, 1, 1]


def test_a_router_that_is_not_known_is_named() -> None:
    sizes = {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 0}
    model = JambaForCausalLM(JambaConfig(**SMALL, intermediate_size=40, use_mamba_kernels=False, **sizes))
    with pytest.raises(ValueError, match="has experts, but") as error, ms.record_routing(model):
        pass
    assert str(error.value) == (
        "model.layers.1.feed_forward has experts, but no router that can be recorded or replayed (JambaTopKRouter); "
        "known are moesys' Router, MixtralTopKRouter, Qwen2MoeTopKRouter, Qwen3MoeTopKRouter, OlmoeTopKRouter, "
        "DeepseekV2TopkRouter, DeepseekV3TopkRouter, Glm4MoeTopkRouter, GptOssTopKRouter"
    )


@pytest.mark.parametrize(
    ("others", "found"), [({"gate": nn.Linear(4, 2)}, "Linear"), ({}, "neither gate nor router")], ids=["gate", "alone"]
)
def test_experts_with_a_router_of_ones_own_are_named(others: dict[str, nn.Module], found: str) -> None:
    shape = ms.ModelShape(hidden_size=4, intermediate_size=2, num_experts=2, top_k=1)
    block = nn.ModuleDict({"experts": ms.Experts(shape, ms.presets.ep()), **others})
    known = ms.MoELayer(shape, ms.presets.ep())
    with pytest.raises(ValueError, match=rf"1 has experts, but .* \({found}\)"):
        ms.record_routing(nn.Sequential(known, block)).__enter__()


def test_a_model_without_routers_is_named() -> None:
    with pytest.raises(ValueError, match="Linear has no router; known are moesys' Router"):
        ms.record_routing(nn.Linear(2, 2)).__enter__()


def test_dense_layers_have_no_place_in_the_ids() -> None:
    model = drawn("deepseek_v3", experts_implementation="moesys")
    with pytest.raises(ValueError) as error, ms.replay_routing(model, torch.zeros(2, 60, 3, dtype=torch.uint8)):  # noqa: PT011
        pass
    assert str(error.value) == (
        "expert_LTK has shape (2, 60, 3); wanted [L, T, K] with L=1 routers (model.layers.1.mlp.gate to "
        "model.layers.1.mlp.gate) and K=3"
    )
