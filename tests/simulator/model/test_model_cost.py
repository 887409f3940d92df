"""What a model costs: flops are those that torch counts of transformers' own models, bytes those of a list by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_models import forward_flops, meta_model, step_flops
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from transformers.masking_utils import sliding_window_causal_mask_function

import moesys as ms
from moesys.config.model_run import LayerRecompute
from moesys.config.model_spec import published_names, read_config
from moesys.simulator.model.model_cost import ModelCost, Operations, count_model, model_flops_per_token

RECOMPUTES: tuple[LayerRecompute, ...] = ("none", "selective", "full")
# Latent attention and sigmoids, biases and sinks, and a gate of the shared expert.
SOME = ("deepseek_v3", "gpt_oss", "qwen2_moe")
every_small = pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
some_small = pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)


def flops_by_part(cost: ModelCost) -> dict[str, int]:
    """Forward's, of the parts that have any."""
    found: dict[str, int] = {}
    for each in (*cost.layers, cost.head):
        for part in each.parts:
            found[part] = found.get(part, 0) + each.of(part).flops
    return {part: flops for part, flops in found.items() if flops}


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", published_names())
@pytest.mark.parametrize("num_layers", [4, pytest.param(None, marks=pytest.mark.slow)])
def test_published_models_are_transformers_at_their_full_width(name: str, num_layers: int | None) -> None:
    config = read_config(name)
    if num_layers is not None:
        config |= {"num_hidden_layers": num_layers}
    cost = count_model(ms.models.ModelSpec.from_config(config), 6, scores="eager")
    assert flops_by_part(cost) == +forward_flops(meta_model(config), 6)


@every_small
def test_each_part_has_the_flops_that_torch_counts(config: dict[str, Any]) -> None:
    cost = count_model(ms.models.ModelSpec.from_config(config), 10, scores="eager")
    assert flops_by_part(cost) == +forward_flops(meta_model(config), 10)


@some_small
def test_backward_has_the_flops_that_torch_counts(name: str) -> None:
    config = SMALL[name]
    cost = count_model(ms.models.ModelSpec.from_config(config), 7, scores="eager")
    assert cost.flops + cost.backward_flops == step_flops(meta_model(config), 7)


def _checkpoint_halves(layer: nn.Module, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
    def attention(rows: torch.Tensor) -> torch.Tensor:
        return layer.self_attn(hidden_states=layer.input_layernorm(rows), **given)[0]

    def mlp(rows: torch.Tensor) -> torch.Tensor:
        result = layer.mlp(layer.post_attention_layernorm(rows))
        return result[0] if isinstance(result, tuple) else result

    hidden = hidden + checkpoint(attention, hidden, use_reentrant=False)
    return hidden + checkpoint(mlp, hidden, use_reentrant=False)


def _checkpoint_layer(forward: Callable[..., torch.Tensor], hidden: torch.Tensor, **given: Any) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(forward, hidden, use_reentrant=False, **given)


@some_small
def test_what_runs_again_is_what_torch_runs_again(name: str) -> None:
    """Checkpoints of both halves of a layer stop where all is there that backward reads. In transformers that is the
    output of the experts too, as it is what routing weights scale.
    """
    config = SMALL[name]
    cost = count_model(ms.models.ModelSpec.from_config(config), 7, scores="eager")
    step = cost.flops + cost.backward_flops
    down = sum(each.flops for layer in cost.layers for each in layer.operations if each.name == "expert_down")
    for recompute, more in (("selective", down), ("full", 0)):
        expected = sum(layer.again(recompute).flops for layer in cost.layers) + more
        made = meta_model(config)
        for layer in made.model.layers:
            layer.forward = partial(
                *((_checkpoint_halves, layer) if recompute == "selective" else (_checkpoint_layer, layer.forward))
            )
        assert step_flops(made, 7) - step == expected


@given(st.integers(1, 40), st.integers(1, 50))
def test_pairs_are_those_that_the_mask_of_transformers_lets_through(seq_len: int, window: int) -> None:
    allowed = sliding_window_causal_mask_function(window)
    at = torch.arange(seq_len)
    pairs = int(allowed(0, 0, at[:, None], at[None, :]).sum())
    scores = {}
    for kind in ("flash", "eager"):
        model = ms.models.ModelSpec.from_config(SMALL["gpt_oss"] | {"sliding_window": window})
        scores[kind] = count_model(model, seq_len, scores=kind).layers[0].of("attention_scores").flops
    assert scores["flash"] * seq_len**2 == scores["eager"] * pairs


@given(st.integers(1, 64), st.sampled_from(["deepseek_v3", "olmoe", "qwen3_moe"]))
def test_a_pair_costs_what_torch_counts_of_a_flash_kernel(seq_len: int, name: str) -> None:
    model = ms.models.ModelSpec.from_config(SMALL[name])
    attention = model.layers[0].attention
    query = key = (1, attention.num_heads, seq_len, attention.qk_head_dim)
    value = (1, attention.num_heads, seq_len, attention.v_head_dim)
    scores = count_model(model, seq_len).layers[0].of("attention_scores")
    pairs = seq_len * (seq_len + 1) // 2
    assert scores.flops * seq_len**2 == sdpa_flop_count(query, key, value) * pairs
    backward = sdpa_backward_flop_count(value, query, key, value)
    assert scores.backward_flops * seq_len**2 == backward * pairs


# --- against figures of others --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        # GFLOP a token at 4096 tokens, TFLOP/s over tokens/s: Megatron-Bridge's docs/performance-summary.md and its
        # archive (releases 25.09 to 26.08), and NeMo Automodel's for DeepSeek-V3 without its extra prediction layer.
        ("qwen3-30b-a3b", 22.8, 23.1),
        ("qwen3-235b-a22b", 147.7, 148.3),
        ("kimi-k2", 204.2, 204.6),
        ("deepseek-v3", 249.1, 250.0),
        ("gpt-oss-120b", 32.6, 32.6),
    ],
)
def test_flops_of_a_token_are_those_that_others_divide_by(name: str, least: float, most: float) -> None:
    model = ms.models.ModelSpec.from_config(name)
    counted = model_flops_per_token(model, 4096) / 1e9
    assert 0.99 * least < counted < 1.01 * most
    # They leave the router out.
    routers = sum(layer.of("router").flops for layer in count_model(model, 4096).layers)
    assert 0.997 * least < counted - 3 * routers / 4096 / 1e9 < 1.003 * most


# --- by hand --------------------------------------------------------------------------------------------------------

BY_HAND = ms.models.ModelSpec(
    hidden_size=64,
    vocab_size=96,
    layers=(
        ms.models.LayerSpec(
            attention=ms.models.Gqa(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm="head"),
            mlp=ms.models.MoeMlp(
                shape=ms.ModelShape(
                    hidden_size=64, intermediate_size=40, num_experts=6, top_k=3, dtype="bfloat16", n_shared_experts=1
                )
            ),
        ),
    ),
)


def test_a_layer_keeps_these_tensors() -> None:
    layer = count_model(BY_HAND, 1).layers[0]
    assert layer.saved() == {
        "layer_input": 2 * 64,
        "attention_norm_statistics": 4,
        "attention_rows": 2 * 64,
        "unnormed_queries_keys": 2 * (4 + 2) * 32,
        "qk_norm_statistics": 4 * (4 + 2),
        "queries": 2 * 4 * 32,
        "keys": 2 * 2 * 32,
        "values": 2 * 2 * 32,
        "attention_output": 2 * 4 * 32,
        "attention_statistics": 4 * 4,
        "mlp_input": 2 * 64,
        "mlp_norm_statistics": 4,
        "mlp_rows": 2 * 64,
        "router_probabilities": 4 * 6,
        "choices": 3 * 4 * 3,
        "expert_rows": 2 * 3 * 64,
        "expert_up": 2 * 3 * 2 * 40,
        "expert_activated": 2 * 3 * 40,
        "shared_up": 2 * 2 * 40,
        "shared_activated": 2 * 40,
    }
    assert layer.saved("selective") == {"layer_input": 2 * 64, "mlp_input": 2 * 64}
    assert layer.saved("full") == {"layer_input": 2 * 64}


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.float().square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(rows, scale)
        return (rows * scale).to(rows.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


def test_torch_keeps_the_same_of_a_layer_of_fused_kernels() -> None:
    H, heads, width, I, S = 64, 4, 16, 96, 5
    attention = ms.models.Gqa(num_heads=heads, num_kv_heads=heads, head_dim=width)
    layer = ms.models.LayerSpec(attention=attention, mlp=ms.models.DenseMlp(intermediate_size=I))
    expected = count_model(ms.models.ModelSpec(hidden_size=H, vocab_size=8, layers=(layer,)), S).layers[0].saved_bytes()
    products = (*attention.products(H).values(), *layer.mlp.products(H).values())
    qkv, output, up, down = (torch.randn(each.outputs, each.inputs, dtype=torch.bfloat16) for each in products)
    weights = [each.requires_grad_() for each in (qkv, output, up, down)]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if all(tensor.data_ptr() != weight.data_ptr() for weight in weights):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rows = torch.randn(1, S, H, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads_rows = functional.linear(_RmsNorm.apply(rows), qkv).view(1, S, 3 * heads, width).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(*heads_rows.split(heads, dim=1), is_causal=True)
        hidden = rows + functional.linear(seen.transpose(1, 2).reshape(1, S, heads * width), output)
        result = hidden + functional.linear(_SwiGlu.apply(functional.linear(_RmsNorm.apply(hidden), up)), down)
    assert result.requires_grad
    assert sum(kept.values()) == expected


def test_float8_keeps_operands_with_their_scales_beside_what_else_is_read() -> None:
    wide, narrow = (count_model(BY_HAND, 1, fp8=fp8).layers[0].saved() for fp8 in (False, True))
    assert {name: num_bytes for name, num_bytes in narrow.items() if name.endswith("_fp8")} == {
        "attention_rows_fp8": 64 + 2,
        "attention_output_fp8": 4 * (32 + 1),
        "expert_rows_fp8": 3 * (64 + 2),
        "expert_activated_fp8": 3 * (40 + 2),
        "mlp_rows_fp8": 64 + 2,
        "shared_activated_fp8": 40 + 2,
    }
    # The router and the scores read the model's dtype.
    assert narrow["mlp_rows"] == wide["mlp_rows"]
    assert narrow["attention_output"] == wide["attention_output"]


def test_bytes_that_move() -> None:
    layer = count_model(BY_HAND, 1).layers[0]
    moved = {part: (layer.of(part).forward_bytes, layer.of(part).backward_bytes) for part in layer.parts}
    assert moved == {
        "norms": (2 * 2 * (64 + 64 + 6 * 32), 2 * 3 * (64 + 64 + 6 * 32)),
        "attention_projections": (0, 0),
        "rotary": (2 * 2 * 6 * 32, 2 * 2 * 6 * 32),
        "attention_scores": (0, 0),
        "router": (4 * (2 * 6 + 3 * 3), 4 * (2 * 6 + 2 * 3)),
        "dispatch": (2 * 2 * 3 * 64, 2 * 4 * 64),
        "experts": (2 * 3 * 3 * 40, 2 * 3 * 5 * 40),
        "combine": (2 * (4 + 1) * 64, 2 * 4 * 64),
        "shared_experts": (2 * 3 * 40, 2 * 5 * 40),
        "residuals": (2 * 2 * 3 * 64, 2 * 2 * 3 * 64),
    }
    assert [(each.name, each.sent_bytes) for each in layer.operations if each.sent_bytes] == [
        ("dispatch", 2 * 3 * 64),
        ("combine", 2 * 3 * 64),
    ]
    narrow = count_model(BY_HAND, 1, fp8=True, fp8_rows=True).layers[0]
    assert [(each.name, each.sent_bytes) for each in narrow.operations if each.sent_bytes] == [
        ("dispatch", 3 * (64 + 2)),
        ("combine", 2 * 3 * 64),
    ]
    assert narrow.of("dispatch").forward_bytes == 3 * (2 * 64 + 64 + 2)


def test_each_operand_is_narrowed_along_rows_and_along_columns() -> None:
    """By hand: an operand of w elements is 2 w bytes wide; narrow it has w, and a byte for every 32 of them."""
    products = {each.name: each for each in count_model(BY_HAND, 1, fp8=True).layers[0].operations if each.flops}

    def moved(rows: int, width: int) -> int:
        return rows * (2 * width + 2 * (width + -(-width // 32)))

    assert products["expert_up"].forward_bytes == moved(3, 64)
    assert products["expert_up"].backward_bytes == moved(3, 80)
    assert products["expert_down"].forward_bytes == moved(3, 40)
    assert products["expert_down"].backward_bytes == moved(3, 64)
    assert products["output"].forward_bytes == moved(1, 4 * 32)
    assert products["router"].forward_bytes == products["scores"].forward_bytes == 0
    # What has travelled narrow is read narrow, and written along columns.
    came = {each.name: each for each in count_model(BY_HAND, 1, fp8=True, fp8_rows=True).layers[0].operations}
    assert came["expert_up"].forward_bytes == came["expert_down"].backward_bytes == 2 * 3 * (64 + 2)
    assert came["expert_up"].backward_bytes == products["expert_up"].backward_bytes
    assert came["output"] == products["output"]
    assert all(each.forward_bytes == 0 for each in count_model(BY_HAND, 1).layers[0].operations if each.flops)


def test_what_runs_again_has_no_product_of_which_backward_reads_nothing() -> None:
    layer = count_model(BY_HAND, 1).layers[0]
    skipped = {each.name for each in layer.operations} - {each.name for each in layer.again("selective").operations}
    assert skipped == {"output", "attention_residual", "expert_down", "shared_down", "combine", "mlp_residual"}
    assert layer.again("none").operations == ()


def test_the_page_names_every_tensor_that_is_kept() -> None:
    costs = [count_model(ms.models.ModelSpec.from_config(config), 1) for config in SMALL.values()]
    kept = {name for cost in costs for each in (cost.embedding, *cost.layers, cost.head) for name in each.saved()}
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text(encoding="utf-8")
    table = page.partition("| tensor |")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) == kept


# --- always ---------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> ms.models.ModelSpec:
    size = st.integers(1, 48)
    hidden_size = draw(size)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))

    def attention() -> ms.models.Gqa | ms.models.Mla:
        if draw(st.booleans()):
            widths = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            latent = {name: draw(size) for name in widths}
            return ms.models.Mla(q_lora_rank=draw(st.none() | size), bias=draw(st.booleans()), **latent)
        kv_heads = draw(st.integers(1, 4))
        return ms.models.Gqa(
            num_heads=kv_heads * draw(st.integers(1, 4)),
            num_kv_heads=kv_heads,
            head_dim=draw(size),
            window=draw(st.none() | size),
            qkv_bias=draw(st.booleans()),
            output_bias=draw(st.booleans()),
            qk_norm=draw(st.sampled_from(["head", "row", None])),
            sinks=draw(st.booleans()),
        )

    def mlp() -> ms.models.DenseMlp | ms.models.MoeMlp:
        if draw(st.booleans()):
            return ms.models.DenseMlp(intermediate_size=draw(size), gated=draw(st.booleans()))
        num_experts = draw(st.integers(1, 8))
        shape = ms.ModelShape(
            hidden_size=hidden_size,
            intermediate_size=draw(size),
            num_experts=num_experts,
            top_k=draw(st.integers(1, num_experts)),
            dtype=dtype,
        )
        shared = draw(st.none() | size)
        return ms.models.MoeMlp(
            shape=shape,
            shared_intermediate_size=shared,
            shared_gate=shared is not None and draw(st.booleans()),
            expert_bias=draw(st.booleans()),
            router_bias=draw(st.booleans()),
        )

    layers = [ms.models.LayerSpec(attention=attention(), mlp=mlp()) for _ in range(draw(st.integers(1, 3)))]
    return ms.models.ModelSpec(
        hidden_size=hidden_size,
        vocab_size=draw(size),
        tied_embeddings=draw(st.booleans()),
        layers=tuple(draw(st.lists(st.sampled_from(layers), min_size=1, max_size=6))),
        dtype=dtype,
    )


@given(models(), st.integers(1, 64), st.booleans())
def test_what_always_holds(model: ms.models.ModelSpec, seq_len: int, fp8: bool) -> None:
    cost = count_model(model, seq_len, fp8=fp8)
    assert cost.parameters == model.num_parameters
    assert model.active_parameters <= model.num_parameters + model.tied_embeddings * model.embedding_parameters
    assert cost.flops <= count_model(model, seq_len, fp8=fp8, scores="eager").flops
    # Each weight of a product, but not a bias, norm or sink, is two flops of a token.
    products = sum(layer.flops - layer.of("attention_scores").flops for layer in cost.layers) + cost.head.flops
    assert products <= 2 * seq_len * model.active_parameters
    for layer in cost.layers:
        _layer_holds(layer, model)
    distinct = {id(layer) for layer in cost.layers}
    assert len(distinct) == len(model.layer_counts)


def _layer_holds(layer: Operations, model: ms.models.ModelSpec) -> None:
    assert sum(layer.of(part).parameters for part in layer.parts) == layer.parameters
    kept = [layer.saved(recompute) for recompute in RECOMPUTES]
    assert kept[2].items() < kept[1].items() < kept[0].items()
    assert layer.saved_bytes("full") == layer.seq_len * model.hidden_size * model.bytes_per_element
    again = [layer.again(recompute).flops for recompute in RECOMPUTES]
    assert 0 == again[0] < again[1] < again[2] == layer.flops
    products = layer.of("attention_projections", "router", "experts", "shared_experts", "dense_mlp")
    assert products.backward_flops == 2 * products.flops
    # All but scores is as much for every token.
    assert all(num_bytes % layer.seq_len == 0 for num_bytes in kept[0].values())


@given(models(), st.integers(1, 32))
def test_all_but_scores_is_as_much_for_every_token(model: ms.models.ModelSpec, seq_len: int) -> None:
    one, many = count_model(model, 1), count_model(model, seq_len)
    for each, several in zip(
        (one.embedding, *one.layers, one.head), (many.embedding, *many.layers, many.head), strict=True
    ):
        assert several.saved() == {name: seq_len * num_bytes for name, num_bytes in each.saved().items()}
        for field in ("forward_bytes", "backward_bytes"):
            assert getattr(several, field) == seq_len * getattr(each, field)
        scores = (several.of("attention_scores").flops, each.of("attention_scores").flops)
        assert several.flops - scores[0] == seq_len * (each.flops - scores[1])


@given(models(), st.integers(1, 32), st.integers(0, 8))
def test_a_window_as_long_as_the_sequence_is_none(model: ms.models.ModelSpec, seq_len: int, more: int) -> None:
    def with_window(window: int | None) -> ms.models.ModelSpec:
        return model.replace(
            layers=tuple(
                layer.replace(attention=layer.attention.replace(window=window))
                if isinstance(layer.attention, ms.models.Gqa)
                else layer
                for layer in model.layers
            )
        )

    assert count_model(with_window(seq_len + more), seq_len) == count_model(with_window(None), seq_len)
