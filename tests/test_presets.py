"""Presets: the published numbers, and strategies that fit the models and the cluster they are for."""

from __future__ import annotations

import pytest

from moesys import presets
from moesys.config import ClusterSpec, Declared, Ep, EvenSplit, Fsep, Laer, Sequential, Static, Strategy, WindowMean

CONSTANTS = {name: value for name, value in vars(presets).items() if isinstance(value, Declared)}


@pytest.mark.parametrize("name", CONSTANTS)
def test_presets_survive_toml(name):
    preset = CONSTANTS[name]
    assert type(preset).from_toml(preset.to_toml()) == preset


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        # Sizes that LAER-MoE's artifact reports.
        (presets.LAER_E8K2, 176.2),
        (presets.LAER_E16K4, 88.1),
        # 3 x width x hidden size of the models' configuration files.
        (presets.MIXTRAL_8X7B, 176.2),
        (presets.DEEPSEEK_V3, 44.0),
        (presets.QWEN3_30B_A3B, 4.7),
        (presets.OLMOE_1B_7B, 6.3),
    ],
)
def test_experts_have_their_published_size(model, millions):
    assert model.expert_parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_models_agree_with_transformers():
    from transformers import DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

    mixtral, qwen, olmoe, deepseek = MixtralConfig(), Qwen3MoeConfig(), OlmoeConfig(), DeepseekV3Config()
    for model, published, intermediate_size, num_experts in [
        (presets.MIXTRAL_8X7B, mixtral, mixtral.intermediate_size, mixtral.num_local_experts),
        (presets.QWEN3_30B_A3B, qwen, qwen.moe_intermediate_size, qwen.num_experts),
        # The library's default width is not that of the 1B-7B model, which has 1024.
        (presets.OLMOE_1B_7B, olmoe, 1024, olmoe.num_experts),
        (presets.DEEPSEEK_V3, deepseek, deepseek.moe_intermediate_size, deepseek.n_routed_experts),
    ]:
        assert model.hidden_size == published.hidden_size
        assert model.intermediate_size == intermediate_size
        assert model.num_experts == num_experts
        assert model.top_k == published.num_experts_per_tok
        assert model.initializer_range == published.initializer_range
    for field in ("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "norm_topk_prob"):
        assert getattr(presets.DEEPSEEK_V3, field) == getattr(deepseek, field)
    assert presets.OLMOE_1B_7B.norm_topk_prob == olmoe.norm_topk_prob
    assert presets.OLMOE_1B_7B.router_aux_loss_coef == olmoe.router_aux_loss_coef
    assert presets.QWEN3_30B_A3B.router_aux_loss_coef == qwen.router_aux_loss_coef


def test_laers_cluster_is_the_one_the_defaults_are_for():
    assert ClusterSpec(name=presets.LAER_A100.name, num_nodes=4, ranks_per_node=8) == presets.LAER_A100
    assert presets.LAER_A100.num_ranks == 32


def test_strategies_are_what_they_are_called():
    assert presets.ep() == Strategy(name="ep", sharding=Ep(), balance=Static(), split=EvenSplit(), overlap=Sequential())
    assert presets.fsep(3) == presets.ep().replace(name="fsep", sharding=Fsep(slots_per_rank=3))
    laer = presets.laer((2, 3))
    assert laer.name == "laer"
    assert (laer.sharding, laer.balance) == (Fsep(slots_per_rank=(2, 3)), Laer())
    assert (laer.predictor, laer.split) == (WindowMean(steps=5), EvenSplit())


def test_laers_strategy_fits_its_models():
    assert presets.laer(2).slots(presets.LAER_E8K2, presets.LAER_A100) == (2,) * 32
    assert presets.laer(4).slots(presets.LAER_E16K4, presets.LAER_A100) == (4,) * 32
