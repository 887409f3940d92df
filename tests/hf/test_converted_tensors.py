"""The checkpoint, not the configuration, decides which tensors ``moesys convert`` writes and in which dtype; they are
those that transformers makes of a whole model at once.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from conftest import assert_equal
from hf_models import MULTIMODAL, drawn
from safetensors.torch import save_file
from test_convert import EXPERT, PROJECTIONS, changed, config_says, logits, quietly, tensors
from test_save_pretrained import save_own
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Interleave, WeightConverter, revert_weight_conversion

import moesys as ms
from moesys.hf.experts_module import is_experts
from moesys.hf.hub_files import HubNames, without_memory
from moesys.lab.ranks.pool import LocalRanks

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
IGNORES = r"has entries that a Qwen3MoeForCausalLM of its config\.json does not have: "


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    drawn("qwen3_moe").save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def there_and_back(tmp_path: Path) -> dict[str, Tensor]:
    quietly(tmp_path / "hub", tmp_path / "start")
    quietly(tmp_path / "start", tmp_path / "back")
    return tensors(tmp_path / "back")


def save(state: dict[str, Any], folder: Path) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def pop(name: str) -> Callable[[Path], None]:
    return changed(lambda state: state.pop(name))


# --- tied ---------------------------------------------------------------------------------------------------------


def test_a_head_that_is_not_tied_is_kept(hub: Path, tmp_path: Path) -> None:
    config_says(tie_word_embeddings=True)(hub)
    assert_equal(there_and_back(tmp_path), tensors(hub))
    torch.testing.assert_close(logits(tmp_path / "back"), logits(hub), rtol=0, atol=1e-6)


@pytest.mark.parametrize("missing", [HEAD, EMBEDDING])
def test_either_of_two_tied_tensors_may_be_the_one_in_the_files(hub: Path, tmp_path: Path, missing: str) -> None:
    """transformers loads either of them."""
    config_says(tie_word_embeddings=True)(hub)
    pop(missing)(hub)
    ms.hf.check_checkpoint(hub)
    found = there_and_back(tmp_path)
    names = dcp.FileSystemReader(tmp_path / "start").read_metadata().state_dict_metadata
    assert {f"model.{HEAD}", f"model.{EMBEDDING}"} <= set(names)
    kept = tensors(hub)[{HEAD: EMBEDDING, EMBEDDING: HEAD}[missing]]
    assert torch.equal(found[EMBEDDING], kept)
    assert HEAD not in found
    torch.testing.assert_close(logits(tmp_path / "back"), logits(hub), rtol=0, atol=1e-6)


@pytest.mark.parametrize("missing", [HEAD, EMBEDDING])
def test_neither_may_be_missing_where_they_are_not_tied(hub: Path, missing: str) -> None:
    pop(missing)(hub)
    with pytest.raises(ValueError, match=rf"{re.escape(missing)} is in no file"):
        ms.hf.check_checkpoint(hub)


@pytest.mark.parametrize("stored", [HEAD, EMBEDDING])
def test_a_loop_may_save_one_of_two_tied_tensors(hub: Path, tmp_path: Path, stored: str) -> None:
    config_says(tie_word_embeddings=True)(hub)
    state = AutoModelForCausalLM.from_pretrained(hub).state_dict()
    del state[{HEAD: EMBEDDING, EMBEDDING: HEAD}[stored]]
    save({"model": state}, tmp_path / "start")
    quietly(tmp_path / "start", tmp_path / "back", hub)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert torch.equal(found[HEAD], state[stored])
    assert torch.equal(found[EMBEDDING], state[stored])


# --- dtypes -------------------------------------------------------------------------------------------------------


def other_dtype(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[name] = (state[name].double() * (1 + 1e-3)).to(dtype)

    return changed(change)


@pytest.mark.parametrize(
    ("name", "dtype", "widest"),
    [
        (EXPERT.format(3, "down"), torch.float32, torch.float32),
        (EXPERT.format(0, "up"), torch.float16, torch.float32),
        (EXPERT.format(7, "gate"), torch.float64, torch.float64),
    ],
)
def test_no_expert_is_rounded_to_the_dtype_of_another(tmp_path: Path, name: str, dtype: Any, widest: Any) -> None:
    drawn("qwen3_moe").bfloat16().save_pretrained(tmp_path / "hub")
    other_dtype(name, dtype)(tmp_path / "hub")
    wanted, found = tensors(tmp_path / "hub"), there_and_back(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[each].double(), tensor.double()) for each, tensor in wanted.items())
    assert found[name].dtype == widest
    assert found["model.norm.weight"].dtype == torch.bfloat16
    # Otherwise from_pretrained would round here what is not rounded in the files.
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == str(widest).removeprefix("torch.")


def test_dtypes_without_a_common_one_are_refused(hub: Path, tmp_path: Path) -> None:
    other_dtype(EXPERT.format(3, "down"), torch.float8_e4m3fn)(hub)
    message = r"0\.down_proj\.weight has torch\.float32 and \S+experts\.3\.down_proj\.weight torch\.float8_e4m3fn"
    with pytest.raises(ValueError, match=message):
        quietly(hub, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


# --- what the model does not have ---------------------------------------------------------------------------------


def next_token_layer(state: dict[str, Tensor]) -> None:
    """Adds a layer for multi-token prediction, as files of DeepSeek-V3 have it behind the last one."""
    first = {name: each for name, each in state.items() if name.startswith("model.layers.1.")}
    state |= {name.replace("layers.1", "layers.2"): each + 1 for name, each in first.items()}
    state["model.layers.2.eh_proj.weight"] = torch.ones(48, 96)
    state["model.layers.2.scale"] = torch.tensor(2.0)


def test_what_transformers_ignores_goes_along(hub: Path, tmp_path: Path) -> None:
    changed(next_token_layer)(hub)
    with pytest.warns(UserWarning, match=IGNORES + r"model\.layers\.2\.\S+, .* and \d+ more; transformers ignores"):
        ms.hf.check_checkpoint(hub)
    with pytest.warns(UserWarning, match=IGNORES + r"model\.layers\.2\.\S+, .*; they are copied unchanged, and"):
        found = there_and_back(tmp_path)
    assert_equal(found, tensors(hub))
    torch.testing.assert_close(logits(tmp_path / "back"), logits(hub), rtol=0, atol=1e-6)


def test_what_transformers_ignores_does_not_decide_the_dtype(tmp_path: Path) -> None:
    drawn("qwen3_moe").bfloat16().save_pretrained(tmp_path / "hub")
    changed(lambda state: state.update({"model.layers.2.eh_proj.weight": torch.ones(48, 96)}))(tmp_path / "hub")
    with pytest.warns(UserWarning, match=IGNORES):
        found = there_and_back(tmp_path)
    assert found["model.layers.2.eh_proj.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_a_loop_saved_with_its_model_goes_along(hub: Path, tmp_path: Path) -> None:
    state: dict[str, Any] = AutoModelForCausalLM.from_pretrained(hub).state_dict()
    state |= {"value.weight": torch.ones(1, 48), "planning._extra_state": "text"}
    save({"model": state, "optimizer": {"step": torch.tensor(3)}}, tmp_path / "one")
    left_out, kept = r"planning\._extra_state; they are left out", r"value\.weight; they are copied unchanged"
    with pytest.warns(UserWarning, match=left_out), pytest.warns(UserWarning, match=kept):
        quietly(tmp_path / "one", tmp_path / "out", hub)
    assert_equal(tensors(tmp_path / "out"), tensors(hub) | {"value.weight": state["value.weight"]})
    # Without "model", convert cannot know that the tensor belongs to the model.
    del state["planning._extra_state"]
    save(state, tmp_path / "other")
    with pytest.warns(UserWarning, match="value.weight; they are left out, .*; save those under 'model'"):
        quietly(tmp_path / "other", tmp_path / "bare", hub)
    assert_equal(tensors(tmp_path / "bare"), tensors(hub))


def test_what_the_model_does_not_have_keeps_its_name(tmp_path: Path) -> None:
    """Names that transformers would change in a model's own tensors, and experts that it would split."""
    drawn("mixtral").save_pretrained(tmp_path / "hub")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "hub").state_dict()
    experts = "mlp.experts.gate_up_proj"
    others = {"value.mlp.weight": torch.ones(1, 48)}
    others[f"model.layers.2.{experts}"] = state[f"model.layers.1.{experts}"] + 1
    save({"model": state | others}, tmp_path / "start")
    with pytest.warns(UserWarning, match=r"value\.mlp\.weight; they are copied unchanged"):
        quietly(tmp_path / "start", tmp_path / "back", tmp_path / "hub")
    assert_equal(tensors(tmp_path / "back"), tensors(tmp_path / "hub") | others)
    taken = "model.layers.1.block_sparse_moe.gate.weight"
    save({"model": state | {taken: torch.ones(1)}}, tmp_path / "twice")
    message = rf"twice: {taken}, which MixtralForCausalLM does not have, is the name in files of one of its tensors"
    with pytest.warns(UserWarning, match=taken), pytest.raises(ValueError, match=message):
        quietly(tmp_path / "twice", tmp_path / "out", tmp_path / "hub")


# --- experts in two formats ---------------------------------------------------------------------------------------


def fuse(folder: Path, keep: bool) -> None:
    """Adds gate and up of one layer's experts as one tensor, beside theirs or instead of them."""
    fused = AutoModelForCausalLM.from_pretrained(folder).state_dict()[FUSED].clone()

    def change(state: dict[str, Tensor]) -> None:
        for expert in range(8) if not keep else ():
            for which in ("gate", "up"):
                del state[EXPERT.format(expert, which)]
        state[FUSED] = fused

    changed(change)(folder)


def without_prefix(experts: range) -> Callable[[dict[str, Tensor]], None]:
    """Removes "model." from the names of these experts."""

    def change(state: dict[str, Tensor]) -> None:
        for expert in experts:
            for which in PROJECTIONS:
                name = EXPERT.format(expert, which)
                state[name.removeprefix("model.")] = state.pop(name)

    return change


@pytest.mark.parametrize(
    "change", [partial(fuse, keep=False), changed(without_prefix(range(3)))], ids=["fused", "short"]
)
def test_layers_may_differ_in_format_and_experts_in_the_prefix_of_names(
    hub: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    wanted, before = tensors(hub), logits(hub)
    change(hub)
    ms.hf.check_checkpoint(hub)
    assert_equal(there_and_back(tmp_path), wanted)
    torch.testing.assert_close(logits(hub), before, rtol=0, atol=1e-6)


def twice(folder: Path) -> None:
    state = tensors(folder)
    state["norm.weight"] = state["model.norm.weight"] + 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def numbered_from_one(state: dict[str, Tensor]) -> None:
    for which in PROJECTIONS:
        for expert in reversed(range(8)):
            state[EXPERT.format(expert + 1, which)] = state.pop(EXPERT.format(expert, which))


def renamed(state: dict[str, Tensor]) -> None:
    for expert in range(8):
        state[f"model.layers.1.experts.{expert}.w2"] = state.pop(EXPERT.format(expert, "down"))


TWICE = r"hub/model.safetensors: .*experts.gate_up_proj gives .*gate_up_proj, and so does .*0.gate_proj.weight of .*"
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "fused and apart": (partial(fuse, keep=True), TWICE),
    "one name twice": (twice, r"norm.weight gives model.norm.weight, and so does (model.)?norm.weight of model.saf"),
    "numbered from one": (changed(numbered_from_one), "belongs to expert 1, and no file has expert 0: .*=8, which ar"),
    "another order": (changed(without_prefix(range(4, 8))), "expert 4, but transformers .* would make it expert 0; g"),
    "other names": (
        changed(renamed),
        r"0.down_proj.weight is in no file, and .* \[48, 24\] \(files have .*experts.0.w",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_parameter_that_is_there_twice_or_elsewhere_is_refused(hub: Path, tmp_path: Path, what: str) -> None:
    change, message = WRONG[what]
    change(hub)
    with pytest.raises(ValueError, match=message):
        ms.hf.check_checkpoint(hub)
    with pytest.raises(ValueError, match=message):
        quietly(hub, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


# --- what transformers makes of all tensors at once ---------------------------------------------------------------

ODD = ("qwen3_vl_moe", "ernie4_5_vl_moe", "kimi_k25", "inkling2_loop", "gpt_oss")


def families() -> list[str]:
    """The families of transformers whose experts moesys computes."""
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    return sorted(path.parent.name for path in sources if "@use_experts_implementation" in path.read_text())


def with_few_layers_and_experts(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            with_few_layers_and_experts(value)
        elif name in ("num_hidden_layers", "depth", "encoder_layers", "decoder_layers"):
            setattr(config, name, min(value, 5))
        elif name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") and value:
            setattr(config, name, min(value, 12))
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
            setattr(config, name, value[:5])
    return config


def models_of(family: str) -> Iterator[Any]:
    """The models of a family that have experts, without memory, of the sizes of its configurations."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in module.__all__:
        kind = getattr(module, name)
        if re.search(r"(?<!PreTrained)Model$|ForCausalLM$|ForConditionalGeneration$", name) and "_VL_Moe" not in name:
            # Some configurations make a model only with values that they do not have.
            with suppress(AttributeError, TypeError):
                model = without_memory(kind, with_few_layers_and_experts(kind.config_class()))
                if any(map(is_experts, model.modules())):
                    yield model


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in tensors.items()}


@pytest.mark.parametrize(
    "family", [*ODD, *(pytest.param(each, marks=pytest.mark.slow) for each in families() if each not in ODD)]
)
def test_names_and_shapes_of_each_expert_are_those_of_the_whole_model(family: str) -> None:
    for model in models_of(family):
        names, state = HubNames(model), model.state_dict()
        whole = shapes(revert_weight_conversion(model, state))
        assert shapes(names.layout(state)) == whole
        assert names.experts, "experts are not converted one by one"
        for group in names.groups(state):
            if names.experts.isdisjoint(group):
                continue
            E = len(state[group[0]])
            of_all = shapes(names.to_hub({name: state[name] for name in group}))
            of_each = [names.to_hub({name: state[name][e : e + 1] for name in group}, e) for e in range(E)]
            assert {name for each in of_each for name in each} == of_all.keys()
            for name, shape in [item for each in of_each for item in shapes(each).items()]:
                assert shape in (of_all[name], (1, *of_all[name][1:]))
            # Each tensor is of one expert alone, or has a row of each.
            assert sum(map(len, of_each)) in (len(of_all), E * len(of_all))


@pytest.mark.parametrize("family", MULTIMODAL)
def test_models_of_several_modalities_are_saved_and_converted(ranks: LocalRanks, tmp_path: Path, family: str) -> None:
    model = drawn(family)
    model.save_pretrained(tmp_path / "hub")
    ms.hf.check_checkpoint(tmp_path / "hub")
    ms.hf.save_pretrained(model, tmp_path / "alone")
    ranks.run(save_own, family, tmp_path, (2,), 8, num_ranks=2, timeout_s=100.0)
    assert_equal(there_and_back(tmp_path), tensors(tmp_path / "hub"))
    for folder in ("alone", "lent", "fsep"):
        assert_equal(tensors(tmp_path / folder), tensors(tmp_path / "hub"))
    state = dcp.FileSystemReader(tmp_path / "start").read_metadata().state_dict_metadata
    assert state.keys() == {f"model.{name}" for name in model.state_dict()}
    again = type(model).from_pretrained(tmp_path / "back").state_dict()
    assert_equal(again, dict(model.state_dict()))


@pytest.mark.parametrize(
    ("experts", "projections", "message"),
    [
        ([15], ["up"], r"experts.15.up_proj.weight is in no file: other tensors of \S+ have all,"),
        ([15], PROJECTIONS, r"experts.15.\w+_proj.weight is in no file: \S+ has 15 experts of 2 modules there, and co"),
        (range(16), ["up"], "experts.0.up_proj.weight is in no file, of none of the 8 experts"),
        (
            range(16),
            ["down"],
            r"experts.0.down_proj.weight is in no file, and config.json makes it a tensor of \[48, 2",
        ),
    ],
    ids=["one tensor", "one expert", "one projection", "a parameter"],
)
def test_missing_experts_of_modalities_are_named(tmp_path: Path, experts: Any, projections: Any, message: str) -> None:
    drawn("ernie4_5_vl_moe").save_pretrained(tmp_path / "hub")
    gone = [EXPERT.format(*each) for each in product(experts, projections)]
    changed(lambda state: [state.pop(name) for name in gone])(tmp_path / "hub")
    with pytest.raises(ValueError, match=message):
        ms.hf.check_checkpoint(tmp_path / "hub")


def test_experts_that_a_rule_mixes_are_converted_together(tmp_path: Path) -> None:
    """A rule by which no expert's tensor is one of the whole model's."""
    model = drawn("qwen3_vl_moe")
    rule = WeightConverter("mlp.experts.both", ["mlp.experts.gate_up_proj"], operations=[Interleave(dim=0)])
    model._weight_conversions = [rule]
    ms.hf.save_pretrained(model, tmp_path / "hub")
    expected = revert_weight_conversion(model, model.state_dict())
    assert_equal(tensors(tmp_path / "hub"), dict(expected))
