"""ModelSpec: sizes are those of transformers' own models, and what is not known is said."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from counted_models import meta_model
from published_models import PUBLISHED
from small_models import SMALL
from transformers import AutoConfig

import moesys as ms
from moesys.config.model_spec import family_defaults, family_names, model_names, published_names, read_config

every_small = pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)


def num_parameters(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


@every_small
def test_parameters_and_windows_of_small_models_are_those_of_transformers(config: dict[str, Any]) -> None:
    model = ms.models.ModelSpec.from_config(config, dtype="float32", name="mine")
    assert (model.name, model.num_parameters) == ("mine", num_parameters(config))
    assert ms.models.ModelSpec.from_json(model.to_json()) == ms.models.ModelSpec.from_toml(model.to_toml()) == model
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    # A family that has no kinds of layers has one window, if its attention knows any.
    kinds = getattr(made, "layer_types", None) or ["sliding_attention"] * made.num_hidden_layers
    expected = [getattr(made, "sliding_window", None) if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.attention.window for layer in model.layers] == expected


@pytest.mark.parametrize("model_type", family_names())
def test_what_a_file_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    made, defaults = type(AutoConfig.for_model(model_type)), family_defaults(model_type)
    assert {name: getattr(made, name) for name in defaults} == defaults
    # Of DeepSeek-V2 the choices of a token have no default.
    config = {"model_type": model_type, "num_hidden_layers": 5, "num_experts_per_tok": 2}
    assert ms.models.ModelSpec.from_config(config).num_parameters == num_parameters(config)


@pytest.mark.parametrize("name", [*model_names(), *published_names()])
def test_parameters_of_packaged_models_are_those_of_transformers(name: str) -> None:
    model = ms.models.ModelSpec.from_config(name)
    assert model.name == name
    assert model.num_parameters == num_parameters(read_config(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_printed_parameters_are_counted(name: str) -> None:
    """Some figures are rounded and some are cut: less than one of the last printed digit apart."""
    model, (billions, active_billions, of_embeddings) = ms.models.ModelSpec.from_config(name), PUBLISHED[name]
    active = model.active_parameters + (of_embeddings - 1) * model.embedding_parameters
    for printed, counted in ((billions, model.num_parameters), (active_billions, active)):
        if printed is not None:
            digit = Decimal(1).scaleb(int(Decimal(printed).as_tuple().exponent))
            assert abs(Decimal(counted) / 10**9 - Decimal(printed)) < digit


def test_a_folder_a_file_and_their_content_are_one_model(tmp_path: Path) -> None:
    config = SMALL["deepseek_v3"]
    folder = tmp_path / "my-model-1.5b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    models = [ms.models.ModelSpec.from_config(each) for each in (folder, str(folder / "config.json"), config)]
    assert [model.name for model in models] == ["my-model-1.5b", "my-model-1.5b", "deepseek_v3"]
    assert len({model.fingerprint() for model in models}) == 1


def test_layers_are_of_the_kinds_that_the_file_says() -> None:
    model = ms.models.ModelSpec.from_config(SMALL["gpt_oss"])
    assert [layer.attention.window for layer in model.layers] == [4, None, 4]
    assert list(model.layer_counts.values()) == [2, 1]
    assert ms.models.ModelSpec.from_config(SMALL["glm4_moe"]).moe_layers == (2,)
    assert ms.models.ModelSpec.from_config(SMALL["qwen2_moe every other"]).moe_layers == (1,)
    grouped = ms.models.ModelSpec.from_config(SMALL["deepseek_v3"]).layers[1].mlp
    assert isinstance(grouped, ms.models.MoeMlp)
    assert (grouped.shape.scoring_func, grouped.shape.n_group, grouped.shape.topk_group) == ("sigmoid", 2, 1)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (ms.presets.MIXTRAL_8X7B, "mixtral-8x7b"),
        (ms.presets.QWEN3_30B_A3B, "qwen3-30b-a3b"),
        (ms.presets.OLMOE_1B_7B, "olmoe-1b-7b"),
        (ms.presets.DEEPSEEK_V3, "deepseek-v3"),
    ],
)
def test_experts_are_those_of_the_presets(shape: ms.ModelShape, name: str) -> None:
    mlp = ms.models.ModelSpec.from_config(name).layers[-1].mlp
    assert isinstance(mlp, ms.models.MoeMlp)
    # How a model is trained is not read.
    assert mlp.shape == shape.replace(router_aux_loss_coef=0.0, router_bias_update_rate=0.0)
