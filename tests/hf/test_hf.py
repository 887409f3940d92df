"""``experts_implementation="moesys"`` computes what transformers' own eager experts do, and keeps our promises on bits.

transformers is the oracle: its models and its experts modules with ``experts_implementation="eager"``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AriaTextConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    GptOssConfig,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import moesys as ms
from moesys.hf import expert_rows, registration, routed_experts
from moesys.hf.experts_module import ExpertsModule
from moesys.kernels import row_functions
from moesys.kernels.memory import Memory
from moesys.kernels.rows import LARGEST_MINIMUM

ms.hf.register()

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"

# Relative norms of differences. Both sides round in their own order.
OUTPUT_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
STEPS_TOLERANCE = 1e-5


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


# --- whole models ---

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def mixtral() -> tuple[type, Any]:
    options = {"num_local_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM, MixtralConfig(**SMALL, intermediate_size=40, **options)


def qwen3_moe() -> tuple[type, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, intermediate_size=40, head_dim=12, **experts)


def olmoe() -> tuple[type, Any]:
    options = {"num_experts": 7, "num_experts_per_tok": 4, "output_router_logits": True}
    return OlmoeForCausalLM, OlmoeConfig(**SMALL, intermediate_size=32, **options)


def deepseek_v3() -> tuple[type, Any]:
    attention = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    routing = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1}
    shape = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 32}
    return DeepseekV3ForCausalLM, DeepseekV3Config(**shape, **attention, **routing, first_k_dense_replace=1)


MODELS = [mixtral, qwen3_moe, olmoe, deepseek_v3]


def language_model(make: Callable[[], tuple[type, Any]], experts_implementation: str) -> Any:
    kind, config = make()
    model = kind._from_config(config, experts_implementation=experts_implementation, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if "norm" not in name and "inv_freq" not in name:
                tensor.normal_(std=0.1, generator=generator)
    return model.train()


def text(seed: int) -> Tensor:
    return torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(seed))


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        # A single number is a sum of thousands that cancel.
        assert relative(actual[name], tensor) <= tolerance * (1 if tensor.numel() > 1 else 30), name


def assert_no_worse(actual: dict[str, Tensor], peer: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Errors are at most 1.5 times the peer's. That of a single number is a matter of luck."""
    assert actual.keys() == peer.keys() == exact.keys()
    for name, tensor in exact.items():
        assert actual[name].dtype == peer[name].dtype, name
        if tensor.numel() > 1:
            assert relative(actual[name], tensor) <= 1.5 * relative(peer[name], tensor), name


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("make", MODELS)
def test_a_model_trains_as_with_eager_experts(make: Callable[[], tuple[type, Any]]) -> None:
    """Logits, loss and every gradient of the first step, the next two steps, and what they make of the parameters."""
    models = {name: language_model(make, name) for name in ("moesys", "eager")}
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4) for model in models.values()]
    for step in range(3):
        ours, oracle = (model(input_ids=text(step), labels=text(step)) for model in models.values())
        for optimizer, output in zip(optimizers, (ours, oracle), strict=True):
            optimizer.zero_grad()
            output.loss.backward()
        assert relative(ours.logits, oracle.logits) <= OUTPUT_TOLERANCE
        assert relative(ours.loss, oracle.loss) <= OUTPUT_TOLERANCE
        actual, wanted = (gradients_of(model) for model in models.values())
        assert actual.keys() == wanted.keys() == dict(models["eager"].named_parameters()).keys()
        for name, gradient in wanted.items():
            assert relative(actual[name], gradient) <= GRADIENT_TOLERANCE, (step, name)
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in models["moesys"].named_parameters():
        assert relative(parameter, models["eager"].get_parameter(name)) <= OUTPUT_TOLERANCE, name


@pytest.mark.parametrize("make", MODELS)
def test_errors_of_a_model_in_bfloat16_are_those_of_transformers(make: Callable[[], tuple[type, Any]]) -> None:
    """Beside the same bfloat16 numbers in float32. Most of it are tokens that go to other experts."""
    results = {}
    for name, dtype in {
        "exact": torch.float32,
        **dict.fromkeys(("moesys", "grouped_mm", "eager"), torch.bfloat16),
    }.items():
        model = language_model(make, "eager" if name == "exact" else name).bfloat16().to(dtype)
        output = model(input_ids=text(0), labels=text(0))
        output.loss.backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        results[name] = (output.logits, gradient)
    errors = {name: list(map(relative, result, results["exact"])) for name, result in results.items()}
    for ours, *theirs in zip(errors["moesys"], errors["grouped_mm"], errors["eager"], strict=True):
        assert ours <= 1.5 * max(theirs)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_changes_no_bit(use_reentrant: bool) -> None:
    results, calls = [], []
    for checkpointing in (False, True):
        model = language_model(qwen3_moe, "moesys")
        if checkpointing:
            # its name before and since transformers 5.20 or so
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
        seen: list[str] = []
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(lambda *_, name=name, seen=seen: seen.append(name))
        output = model(input_ids=text(0), labels=text(0))
        output.loss.backward()
        results.append({"logits": output.logits, **gradients_of(model)})
        calls.append(len(seen))
    assert calls == [2, 4]
    assert_same_bits(*results)


def test_the_implementation_of_a_model_can_change() -> None:
    model = language_model(olmoe, "eager")
    with torch.no_grad():
        eager = model(input_ids=text(0)).logits
        model.set_experts_implementation("moesys")
        ours = model(input_ids=text(0)).logits
        model.set_experts_implementation("eager")
        again = model(input_ids=text(0)).logits
    assert torch.equal(eager, again)
    assert not torch.equal(eager, ours)
    assert relative(ours, eager) <= OUTPUT_TOLERANCE


# --- experts modules ---

H, I, E, K = 48, 40, 5, 2


def mixtral_experts(**options: Any) -> nn.Module:
    return MixtralExperts(
        MixtralConfig(**{"hidden_size": H, "intermediate_size": I, "num_local_experts": E, **options})
    )


def gpt_oss_experts() -> nn.Module:
    return GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E))


def aria_experts() -> nn.Module:
    module = AriaExperts(AriaTextConfig(hidden_size=H, intermediate_size=I, moe_num_experts=E, num_attention_heads=4))
    if not hasattr(module, "is_transposed"):
        pytest.skip("this transformers has its experts apart from the interface")
    return module


def nemotron_experts() -> nn.Module:
    config = NemotronHConfig(hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, mlp_hidden_act="relu2")
    return NemotronHExperts(config)


def deepseek_v4_experts() -> nn.Module:
    config = DeepseekV4Config(hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, swiglu_limit=1.0)
    return DeepseekV4Experts(config)


def muse_experts() -> nn.Module:
    muse = pytest.importorskip("transformers.models.muse_spark", reason="this transformers has no norm behind experts")
    config = muse.MuseSparkTextConfig(moe_hidden_size=H, moe_intermediate_size=I, num_local_experts=E)
    return muse.modeling_muse_spark.MuseSparkExperts(config)


# Each says what is different about it.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "SwiGLU": mixtral_experts,
    "another activation": partial(mixtral_experts, hidden_act="gelu_pytorch_tanh"),
    "an activation with parameters": partial(mixtral_experts, hidden_act="xielu"),
    "a gate of its own": deepseek_v4_experts,
    "transposed": aria_experts,
    "transposed, with biases and an interleaved gate of its own": gpt_oss_experts,
    "no gate": nemotron_experts,
    "a norm behind": muse_experts,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def experts(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    module = make()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 1))
    return module.to(dtype)


class Batch(NamedTuple):
    x: Tensor
    index: Tensor
    weight: Tensor
    dy: Tensor

    def __getitem__(self, tokens: Any) -> Batch:
        return Batch(*(tensor[tokens] for tensor in self))


def batch(num_tokens: int = 37, dtype: torch.dtype = torch.float32, num_experts: int = E) -> Batch:
    """Distinct experts for each token, and some experts much more often than others."""
    generator = torch.Generator().manual_seed(3)
    preference = torch.rand(num_tokens, num_experts, generator=generator) * torch.arange(1, num_experts + 1)
    index = preference.topk(K, dim=1).indices
    x, dy = (torch.randn(num_tokens, H, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(num_tokens, K, generator=generator)
    return Batch(x, index, weight.to(torch.promote_types(dtype, torch.float32)), dy)


def run(
    module: Any, batch: Batch, implementation: str = "moesys", autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and all gradients."""
    module.config._experts_implementation = implementation
    module.zero_grad()
    x, weight = batch.x.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = module(x, batch.index, weight)
    y.backward(batch.dy)
    return {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, **gradients_of(module)}


@every_kind
def test_experts_of_every_kind_agree_with_eager(kind: Callable[[], nn.Module]) -> None:
    module, tokens = experts(kind), batch()
    assert_agree(run(module, tokens), run(module, tokens, "eager"), 1e-6)


# transformers' own norm behind experts computes in float32 whatever it is given
@pytest.mark.parametrize("name", [name for name in KINDS if name != "a norm behind"])
def test_float64_is_computed_in_float64(name: str) -> None:
    module, tokens = experts(KINDS[name], torch.float64), batch(dtype=torch.float64)
    assert_agree(run(module, tokens), run(module, tokens, "eager"), 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_kind
def test_errors_of_16_bits_are_not_larger_than_those_of_transformers(
    kind: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """Beside what the same parameters and inputs give in float64."""
    module, tokens = experts(kind, dtype), batch(200, dtype)
    wide = Batch(tokens.x.double(), tokens.index, tokens.weight.double(), tokens.dy.double())
    exact = run(experts(kind, dtype).double(), wide, "eager")
    ours = run(module, tokens)
    for peer in ("grouped_mm", "eager"):
        assert_no_worse(ours, run(module, tokens, peer), exact)


@every_kind
def test_autocast_computes_products_in_its_dtype(kind: Callable[[], nn.Module]) -> None:
    module, tokens = experts(kind), batch(200)
    exact = run(module, tokens)
    ours, eager = (run(module, tokens, name, autocast=torch.bfloat16) for name in ("moesys", "eager"))
    assert_no_worse(ours, eager, exact)
    assert relative(ours["y"], exact["y"]) > 1e-4


def test_tokens_of_another_dtype_are_computed_in_that_of_the_experts() -> None:
    """Which is what grouped_mm does."""
    module, tokens = experts(mixtral_experts, torch.bfloat16), batch(dtype=torch.float32)
    ours, theirs = run(module, tokens), run(module, tokens, "grouped_mm")
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert relative(ours[name], tensor) <= 1e-2, name


# --- which tokens go where ---


@every_kind
@pytest.mark.parametrize("foreign", [E, -1, 1000])
def test_choices_of_experts_elsewhere_count_for_nothing(kind: Callable[[], nn.Module], foreign: int) -> None:
    """Not even where their weight is nothing that could be added."""
    module, tokens = experts(kind), batch()
    away = torch.rand(tokens.index.shape, generator=torch.Generator().manual_seed(4)) < 0.4
    away[0] = True
    index, weight = tokens.index.masked_fill(away, foreign), tokens.weight.masked_fill(away, torch.nan)
    ours = run(module, tokens._replace(index=index, weight=weight))
    # not by the sentinel, for which GPT-OSS' eager loop has no room
    expected = run(module, tokens._replace(weight=tokens.weight.masked_fill(away, 0)), "eager")
    expected["dweight"].masked_fill_(away, 0)
    assert_agree(ours, expected, 1e-6)
    assert (ours["y"][0] == 0).all()
    assert (ours["dx"][0] == 0).all()


def test_ranks_with_some_experts_each_add_up_to_the_whole() -> None:
    whole, tokens = experts(mixtral_experts), batch()
    parts, bounds = [], [0, 2, E]
    for first, last in pairwise(bounds):
        part = experts(mixtral_experts)
        for name, parameter in whole.named_parameters():
            setattr(part, name, nn.Parameter(parameter.detach()[first:last].clone()))
        part.num_experts, part._is_expert_parallel = last - first, True
        elsewhere = (tokens.index < first) | (tokens.index >= last)
        local = torch.where(elsewhere, last - first, tokens.index - first)
        parts.append(run(part, tokens._replace(index=local, weight=tokens.weight.masked_fill(elsewhere, 0))))
    together = {name: torch.cat([part[name] for part in parts]) for name in ("gate_up_proj", "down_proj")}
    for name in ("y", "dx", "dweight"):
        together[name] = parts[0][name] + parts[1][name]
    assert_agree(together, run(whole, tokens), 1e-6)


@every_kind
def test_experts_without_tokens_have_no_gradient(kind: Callable[[], nn.Module]) -> None:
    module, tokens = experts(kind), batch()
    tokens = tokens._replace(index=torch.tensor([3, 1]).expand(len(tokens.x), K))
    ours = run(module, tokens)
    assert_agree(ours, run(module, tokens, "eager"), 1e-6)
    for name in ours.keys() & {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}:
        assert (ours[name][[0, 2, 4]] == 0).all()


@pytest.mark.parametrize("num_tokens", [0, 5])
@every_kind
def test_without_any_rows_output_and_gradients_are_zeros(kind: Callable[[], nn.Module], num_tokens: int) -> None:
    module, tokens = experts(kind), batch(num_tokens)
    results = run(module, tokens._replace(index=torch.full((num_tokens, K), E)))
    assert results["y"].shape == (num_tokens, H)
    assert results.keys() == {"y", "dx", "dweight", *(name for name, _ in module.named_parameters())}
    assert all((tensor == 0).all() for tensor in results.values())


# --- bits ---


# On one thread all kinds, on two those that differ in their products or in what is done between them.
KINDS_AND_THREADS = [pytest.param(kind, 1, id=f"{name}, 1 thread") for name, kind in KINDS.items()] + [
    pytest.param(kind, 2, id=f"{name}, 2 threads") for name, kind in list(KINDS.items())[-3:]
]
NARROW = pytest.param(partial(mixtral_experts, intermediate_size=8), 1, id="too narrow for products of many rows")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "threads"), [*KINDS_AND_THREADS, NARROW], indirect=["threads"])
def test_a_token_does_not_depend_on_other_tokens(kind: Callable[[], nn.Module], threads: int) -> None:
    assert_tokens_are_alone(kind, torch.float32)


@every_kind
def test_nor_does_it_in_bfloat16(kind: Callable[[], nn.Module]) -> None:
    assert_tokens_are_alone(kind, torch.bfloat16)


def assert_tokens_are_alone(kind: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """One, a few, in the middle, at the end: the same output, gradient and weight's gradient to the bit."""
    num_tokens = 150
    module, tokens = experts(kind, dtype), batch(num_tokens, dtype)
    together = run(module, tokens)
    for some in ([0], [num_tokens - 1], [3, 77], list(range(5, 30)), list(range(1, num_tokens, 3))):
        apart = run(module, tokens[some])
        for name in ("y", "dx", "dweight"):
            assert torch.equal(apart[name], together[name][some]), (name, len(some))


@pytest.mark.parametrize(("kind", "threads"), KINDS_AND_THREADS, indirect=["threads"])
def test_the_same_bits_every_time(kind: Callable[[], nn.Module], threads: int) -> None:
    module, tokens = experts(kind), batch(150)
    first = run(module, tokens)
    for _ in range(3):
        assert_same_bits(run(module, tokens), first)
    with torch.inference_mode():
        assert torch.equal(module(tokens.x, tokens.index, tokens.weight), first["y"])


@every_kind
def test_blocks_change_no_bit(kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """But of what is summed over all rows without a product: gradients of an activation's and a norm's parameters."""
    module, tokens = experts(kind), batch(150)
    whole = run(module, tokens)
    monkeypatch.setattr(expert_rows, "GROUP_ROWS", 1)
    monkeypatch.setattr(routed_experts, "COMBINE_ELEMENTS", 5 * H)
    monkeypatch.setattr(row_functions, "THREADED_ELEMENTS", 700)
    cut = run(module, tokens)
    assert_agree(cut, whole, 1e-6)
    assert_same_bits(*({name: t for name, t in results.items() if "." not in name} for results in (cut, whole)))


def test_backward_leaves_what_was_saved_as_it_is() -> None:
    module, tokens = experts(mixtral_experts), batch()
    module.config._experts_implementation = "moesys"
    y = module(tokens.x, tokens.index, tokens.weight)
    first, again = (torch.autograd.grad(y, list(module.parameters()), tokens.dy, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))


@every_kind
def test_what_is_frozen_has_no_gradient_and_changes_no_other(kind: Callable[[], nn.Module]) -> None:
    module, tokens = experts(kind), batch()
    everything = run(module, tokens)
    module.requires_grad_(False)
    frozen = run(module, tokens)
    assert_same_bits(frozen, {name: everything[name] for name in ("y", "dx", "dweight")})
    module.requires_grad_(True)
    module(tokens.x, tokens.index, tokens.weight).backward(tokens.dy)
    assert_same_bits(gradients_of(module), {name: everything[name] for name, _ in module.named_parameters()})


# --- memory ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_kind
def test_backward_keeps_tokens_pre_activations_and_routing_alone(
    kind: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    T = 100
    module, tokens = experts(kind, dtype), batch(T, dtype)
    # Each expert has so many rows that they need no padding.
    index = torch.arange(T * K).view(T, K) % E
    assert T * K // E > LARGEST_MINIMUM
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    module.config._experts_implementation = "moesys"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(tokens.x.requires_grad_(), index, tokens.weight)
    parameters = {parameter.data_ptr() for parameter in module.parameters()}
    sizes = [tensor.numel() * tensor.itemsize for tensor in saved if tensor.data_ptr() not in parameters]
    width = I if hasattr(module, "up_proj") else 2 * I
    # The routing is a weight, a row and its inverse for each choice, of 4 bytes each.
    assert sorted(sizes) == sorted([T * H * dtype.itemsize, T * K * width * dtype.itemsize, *[T * K * 4] * 3])


# --- transformers ---


def test_registering_again_changes_nothing() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = ALL_EXPERTS_FUNCTIONS["moesys"]
    assert ms.hf.register() == "moesys"
    assert ALL_EXPERTS_FUNCTIONS["moesys"] is before


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "5.9.0.dev0"])
def test_transformers_that_is_too_old_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError) as error:
        ms.hf.register()
    assert str(error.value) == f"transformers {version} is too old for moesys.hf: pip install 'transformers>=5.17'"


def test_transformers_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError) as error:
        ms.hf.register()
    assert str(error.value) == "moesys.hf needs transformers: pip install 'transformers>=5.17'"


def test_quantized_experts_are_refused() -> None:
    module, tokens = experts(mixtral_experts), batch()
    module.config._experts_implementation = "moesys"
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError) as error:
        module(tokens.x, tokens.index, tokens.weight)
    assert str(error.value) == (
        'experts have dtype torch.float8_e4m3fn; experts_implementation="moesys" takes '
        "float16, bfloat16, float32, float64"
    )


def test_second_derivatives_are_refused() -> None:
    module, tokens = experts(mixtral_experts), batch()
    module.config._experts_implementation = "moesys"
    y = module(tokens.x.requires_grad_(), tokens.index, tokens.weight)
    (dx,) = torch.autograd.grad(y, tokens.x, tokens.dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, PAGE.name, "exec"), names)
    assert names["model"].config._experts_implementation == "moesys"
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def test_a_compiled_model_goes_round_the_experts() -> None:
    module, tokens = experts(mixtral_experts), batch()
    expected = run(module, tokens)
    module.compile(backend="eager")
    assert_same_bits(run(module, tokens), expected)


# --- kernels ---


def test_the_kernels_of_a_gpu_compute_the_same():
    """In Triton's interpreter, for no GPU is here; a foreign choice included."""
    config = MixtralConfig(hidden_size=48, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    module = MixtralExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    experts = ExpertsModule.of(module)
    assert experts.has_kernels
    x_TH, index_TK, weight_TK = torch.randn(9, 48), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    dy_TH = torch.randn(9, 48)
    found = []
    for forward in (registration._by_kernels, registration._by_rows):
        inputs = [x_TH.clone().requires_grad_(), weight_TK.clone().requires_grad_()]
        y_TH = forward(experts, Memory(), module, inputs[0], index_TK, inputs[1])
        found.append([y_TH, *torch.autograd.grad(y_TH, [*inputs, *module.parameters()], dy_TH)])
    for by_kernels, by_rows in zip(*found, strict=True):
        assert relative(by_kernels, by_rows) < OUTPUT_TOLERANCE
