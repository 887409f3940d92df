"""What FSDP leaves behind or takes for granted under a model: gathered copies, rounded parameters, unused modules."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, on_ranks, refusal
from hf_models import SMALL, SPARSE, drawn, errors_on_ranks, loaded, loss_of, mean_gradients, text, whole
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import moesys as ms
from moesys.hf.expert_parallel import check_module
from moesys.lab.ranks.pool import LocalRanks

HALF = torch.bfloat16
TWO = {"fsdp_size": 2, "ep_size": 2}
EP = ms.Strategy(name="ep")
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4))


def far(found: Tensor, wanted: Tensor) -> bool:
    return not float((whole(found).float() - wanted.float()).norm()) <= 1e-4 * float(wanted.float().norm())


# --- after an evaluation ------------------------------------------------------------------------------------------


def evaluate(model: Any, how: str) -> None:
    if how == "generated":
        model.generate(text(7)[:1, :5], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return
    with torch.inference_mode() if how == "inferred" else torch.no_grad() if how != "with gradients" else nullcontext():
        if how == "raised":
            handle = model.model.layers[1].register_forward_pre_hook(lambda *_: [][0])
            with pytest.raises(IndexError):
                loss_of(model, 7)
            handle.remove()
        else:
            loss_of(model, 7)


def parameters_after(hows: list[str]) -> list[str]:
    """An optimizer is made, or gradients are clipped, after an evaluation; returns what is not as in one process."""
    base, wrong = drawn("qwen3_moe"), []
    gradients = mean_gradients(base)
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    for how in hows:
        model = copy.deepcopy(base)
        runtime = ms.parallelize(model, EP)
        loss_of(model, dist.get_rank()).backward()
        evaluate(model, how)
        if how != "with gradients":
            wrong += [f"{how}: {name}" for name, each in model.named_parameters() if not isinstance(each, DTensor)]
        if far(ms.clip_grad_norm_(model, 0.01), norm):
            wrong.append(f"{how}: norm")
        wrong += [
            f"{how}: clipped {name}"
            for name, each in model.named_parameters()
            if far(each.grad, gradients[name] * 0.01 / norm)
        ]
        model.zero_grad()
        evaluate(model, how)
        if how == "with gradients":
            model.reshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, dist.get_rank()).backward()
        evaluate(model, how)
        optimizer.step()
        for name, each in model.named_parameters():
            if far(each, base.get_parameter(name).detach() - 0.1 * gradients[name]):
                wrong.append(f"{how}: stepped {name}")
        # The next forward computes with what the step has changed.
        changed = copy.deepcopy(base)
        with torch.no_grad():
            for name, each in changed.named_parameters():
                each -= 0.1 * gradients[name]
            if far(loss_of(model, 5), loss_of(changed, 5)):
                wrong.append(f"{how}: next loss")
        runtime.close()
    return wrong


@pytest.mark.parametrize(
    "hows",
    [["evaluated", "raised", "with gradients"], pytest.param(["generated", "inferred"], marks=pytest.mark.slow)],
    ids=["forward", "generate"],
)
def test_an_evaluation_leaves_no_copies_of_parameters_behind(ranks: LocalRanks, hows: list[str]) -> None:
    assert ranks.run(parameters_after, hows, num_ranks=2, timeout_s=120.0) == [[], []]


def optimizers_of_copies(folder: Path, linked: bool) -> str:
    """An evaluation of a model that transformers has sharded, then an optimizer."""
    model = loaded(folder, EP, TWO)
    runtime = ms.link(model) if linked else None
    evaluate(model, "evaluated")
    assert linked == all(isinstance(each, DTensor) for each in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, dist.get_rank()).backward()
    ms.clip_grad_norm_(model, 1.0)
    found = refusal(optimizer.step)
    if linked:
        assert runtime is not None
        runtime.close()
        return found
    return f"{found}\n{refusal(ms.clip_grad_norm_, optimizer.param_groups[0]['params'], 1.0)}"


def test_an_optimizer_of_gathered_copies_is_refused_and_a_link_leaves_none(ranks: LocalRanks, tmp_path: Path) -> None:
    drawn("qwen3_moe").save_pretrained(tmp_path)
    for found in ranks.run(optimizers_of_copies, tmp_path, False, num_ranks=2, timeout_s=60.0):
        step, clip = found.split("\n")
        assert "parameters of SGD are not the model's" in step
        assert "before any evaluation of a model that is not linked" in step
        assert "or FSDP had gathered them for a forward and has freed them since" in clip
    assert ranks.run(optimizers_of_copies, tmp_path, True, num_ranks=2, timeout_s=60.0) == ["it was not refused"] * 2


def early_optimizers() -> list[str]:
    found = []
    for meta in (False, True):
        model = drawn("qwen3_moe").to("meta") if meta else drawn("qwen3_moe")
        before = [*model.parameters()]
        early = torch.optim.AdamW([{"params": [each]} for each in before], lr=1e-3)
        runtime = ms.parallelize(model, FSEP)
        late = torch.optim.AdamW(model.parameters(), lr=1e-3)
        other = nn.Linear(2, 2)
        others = torch.optim.SGD(other.parameters(), lr=0.1)
        if meta:
            model.to_empty(device="cpu")
            late = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for optimizer in (late, others):
            optimizer.step()
        # The same again, as a loop that catches errors goes on.
        found += [refusal(early.step), refusal(early.step)]
        late.add_param_group({"params": before[3:5]})
        found += [refusal(late.step), refusal(ms.clip_grad_norm_, before, 1.0)]
        runtime.close()
    return found


def test_parameters_from_before_parallelize_are_refused(ranks: LocalRanks) -> None:
    """By optimizers, also in groups that are added after the first step, and by clipping."""
    for found in ranks.run(early_optimizers, num_ranks=2, timeout_s=60.0):
        assert len(found) == 8
        for number, message in enumerate(found):
            if number % 4 == 3:
                assert message.startswith("ValueError: model has parameters that nothing trains, because ms.parallel")
                assert "give the module itself, or its parameters as model.parameters() has them now" in message
                continue
            count = "2 of the 27" if number % 4 == 2 else "25 of the 25"
            assert message.startswith(f"ValueError: {count} parameters of AdamW are not the model's"), message
            assert "make the optimizer behind ms.parallelize" in message


@on_ranks(2)
def test_optimizers_may_step_in_backward() -> None:
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    model = drawn("qwen3_moe")
    # Backward needs these weights of the model's own unit when the blocks' steps are done.
    model.model.embed_tokens = Branch(model.model.embed_tokens)
    alone, gradients = copy.deepcopy(model), mean_gradients(model)
    runtime = ms.parallelize(model, EP)
    for each in model.parameters():
        optimizer = torch.optim.SGD([each], lr=0.1)
        each.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    loss_of(model, dist.get_rank()).backward()
    with torch.no_grad():
        for name, each in alone.named_parameters():
            each -= 0.1 * gradients[name]
        assert not far(loss_of(model, 5), loss_of(alone, 5))
    runtime.close()
    assert not [name for name, each in model.named_parameters() if far(each, alone.get_parameter(name))]


# --- modules that one rank uses -----------------------------------------------------------------------------------


class Branch(nn.Module):
    """Adds a projection, in a dtype of its own, to what a module returns, where it is told to."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.branch, self.used = inner, nn.Linear(48, 48, bias=False, dtype=dtype), True
        nn.init.constant_(self.branch.weight, 0.01)

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.inner(hidden)
        return found + self.branch(found.to(self.branch.weight.dtype)).to(found.dtype) if self.used else found


@pytest.mark.parametrize(
    ("dtype", "of_branches"),
    [
        (torch.float32, torch.float32),
        (HALF, torch.float32),
        (torch.float64, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("used", [[True, False], [False, False]], ids=["on one rank", "on none"])
@on_ranks(2)
def test_ranks_may_use_different_modules(used: list[bool], dtype: torch.dtype, of_branches: torch.dtype) -> None:
    """Such as a vision tower, for an image on one rank, also where its dtype gives it an FSDP unit of its own. What no
    rank uses has a gradient of zero.
    """
    model = drawn("qwen3_moe", experts_implementation="eager").to(dtype)
    model.model.norm = Branch(model.model.norm, of_branches)
    model.model.embed_tokens = Branch(model.model.embed_tokens, of_branches)
    for layer in model.model.layers:
        layer.post_attention_layernorm = Branch(layer.post_attention_layernorm, of_branches)

    def loss(of: Any, rank: int) -> Tensor:
        for each in of.modules():
            if isinstance(each, Branch):
                each.used = used[rank]
        return loss_of(of, rank)

    # Units differ between the first pass and later ones.
    errors = errors_on_ranks(copy.deepcopy(model), model, EP, loss, passes=2)
    assert errors.keys() == {"loss", *dict(model.named_parameters())}
    assert max(errors.values()) <= (0.1 if dtype == HALF else 1e-4), errors


# --- dtypes -------------------------------------------------------------------------------------------------------


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if name.endswith(("correction_bias", "expert_bias"))}


def biases_in_use(family: str) -> list[str]:
    """Returns what of a float32 bias is lost where FSDP computes in bfloat16: in routers, steps, and checkpoints."""
    model, wrong = drawn(family), []
    for number, bias in enumerate(biases_of(model).values()):
        bias.data.copy_(7 + 0.1 * torch.rand(bias.shape, generator=torch.Generator().manual_seed(number)))
    wanted = {name: each.detach().clone() for name, each in biases_of(model).items()}
    assert wanted
    runtime = ms.parallelize(model, EP, policy=MixedPrecisionPolicy(param_dtype=HALF))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compare(name: str, *_: object) -> None:
        bias = biases_of(model)[name]
        if not isinstance(bias, DTensor) and not torch.equal(bias.detach().float(), wanted[name]):
            wrong.append(f"{name} {bias.dtype} differs in use by {(bias.float() - wanted[name]).abs().max()}")

    for name in wanted:
        model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(partial(compare, name))
    for _ in range(2):
        loss_of(model, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        ms.update_router_bias(model, rate=0.001)
        moved = {name: whole(each).clone() for name, each in biases_of(model).items()}
        wrong += [f"{name} did not move" for name, each in moved.items() if torch.equal(each, wanted[name])]
        wanted = moved
        both = [[torch.empty_like(each) for _ in range(2)] for each in moved.values()]
        for places, each in zip(both, moved.values(), strict=True):
            dist.all_gather(places, each.contiguous())
        wrong += [name for name, each in zip(moved, both, strict=True) if not torch.equal(*each)]
    whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = {name: each.clone() for name, each in whole_state.items()}
    wrong += [f"{name} is saved as another" for name, each in wanted.items() if not torch.equal(state[name], each)]
    for each in biases_of(model).values():
        whole(each).zero_()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    loaded = biases_of(model).items()
    wrong += [f"{name} is not loaded" for name, each in loaded if not torch.equal(whole(each), wanted[name])]
    runtime.close()
    return wrong


@pytest.mark.parametrize("family", ["ernie", pytest.param("afmoe", marks=pytest.mark.slow), "laguna"])
def test_biases_that_are_parameters_stay_in_float32(ranks: LocalRanks, family: str) -> None:
    assert ranks.run(biases_in_use, family, num_ranks=2, timeout_s=90.0) == [[], []]


def dtypes_in_use(family: str, dtype: torch.dtype, names: list[str]) -> dict[str, set[torch.dtype]]:
    """Returns the dtypes of weights in use where FSDP computes a model of float32 in ``dtype``."""
    model, found = drawn(family), {}
    runtime = ms.parallelize(model, EP, policy=MixedPrecisionPolicy(param_dtype=dtype))

    def see(name: str, module: nn.Module, *_: object) -> None:
        found.setdefault(name, set()).add(module.weight.dtype)

    for path, module in model.named_modules():
        for name in names:
            if path.endswith(name):
                module.register_forward_pre_hook(partial(see, name))
    loss_of(model, dist.get_rank()).backward()
    runtime.close()
    assert all(each.grad is None or each.grad.dtype == torch.float32 for each in model.parameters())
    return found


F32 = torch.float32


@pytest.mark.parametrize(
    ("family", "dtype", "wanted"),
    [
        ("deepseek_v3", HALF, {"mlp.gate": F32, "o_proj": HALF, "input_layernorm": HALF}),
        ("gpt_oss", torch.float16, {"o_proj": torch.float16, "input_layernorm": F32}),
        pytest.param("gpt_oss", HALF, {"o_proj": HALF, "input_layernorm": HALF}, marks=pytest.mark.slow),
    ],
)
def test_what_a_model_keeps_in_float32_is_not_rounded(
    ranks: LocalRanks, family: str, dtype: torch.dtype, wanted: dict[str, torch.dtype]
) -> None:
    """As transformers loads it: some in float16 and bfloat16, and some in float16 alone."""
    found = ranks.run(dtypes_in_use, family, dtype, [*wanted], num_ranks=2, timeout_s=60.0)
    assert found == [{name: {each} for name, each in wanted.items()}] * 2


# --- configurations and modules of other forms --------------------------------------------------------------------


def hunyuan(top_k: Any) -> Any:
    from transformers import HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM

    torch.manual_seed(1)
    config = HunYuanMoEV1Config(**{**SMALL, "head_dim": 12}, intermediate_size=24, num_experts=8, moe_topk=top_k)
    return HunYuanMoEV1ForCausalLM._from_config(config, attn_implementation="eager").train()


def gemma4() -> Any:
    """Its configuration has another name for how many experts a token has."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "vocab_size_per_layer_input": 96}
    return Gemma4ForCausalLM(Gemma4TextConfig(**SMALL, **SPARSE, **experts))


@on_ranks(2)
def test_configurations_say_how_many_experts_a_token_has() -> None:
    """By a name of their own, or in a list of layers, which must be equal."""
    ms.parallelize(gemma4(), EP).close()
    model = hunyuan([2, 2])
    wanted = loss_of(model, dist.get_rank()).item()
    runtime = ms.parallelize(model, EP)
    assert loss_of(model, dist.get_rank()).item() == pytest.approx(wanted, rel=1e-5)
    runtime.close()
    with pytest.raises(ValueError, match=r"HunYuanMoEV1Config has moe_topk=\[1, 2\], which differs by layer"):
        ms.parallelize(hunyuan([1, 2]), EP)


def test_experts_without_a_declaration_are_named() -> None:
    modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = modeling.Step3p7TextConfig(hidden_size=16, moe_intermediate_size=8, num_local_experts=4)
    with pytest.raises(ValueError, match=r'Step3p7Experts does not declare .* use ep_implementation="all_to_all"'):
        check_module(modeling.Step3p7Experts(config))


# --- calls of other libraries -------------------------------------------------------------------------------------


# Parts of a model: a module, a module that is no FSDP unit, a block, its experts, and the model inside.
PARTS = ("lm_head", "model.norm", "model.layers.0", "model.layers.1.mlp.experts", "model")


def part_of(model: Any, state: dict[str, Tensor], part: str) -> tuple[Any, dict[str, Tensor]]:
    """Returns a part of a model and its state."""
    named = {name.removeprefix(f"{part}."): each for name, each in state.items() if name.startswith(f"{part}.")}
    return model.get_submodule(part), named


def foreign_calls(folder: Path) -> list[str]:
    """Returns refusals of saving and loading whole tensors; what the messages name works."""
    model = drawn("qwen3_moe")
    plain = {name: each.detach() + 1 for name, each in model.state_dict().items()}
    runtime = ms.parallelize(model, FSEP)
    refused = [refusal(model.save_pretrained, folder), refusal(model.model.save_pretrained, folder)]
    refused.append(refusal(partial(model.save_pretrained, folder, state_dict=get_model_state_dict(model))))
    refused.append(refusal(partial(model.save_pretrained, save_directory=folder)))
    refused.append(refusal(partial(model.save_pretrained, save_directory=folder, state_dict={})))
    evaluate(model, "with gradients")
    refused.append(refusal(model.load_state_dict, plain))
    for part in PARTS:
        whole_part, of_part = part_of(model, plain, part)
        refused.append(refusal(partial(whole_part.load_state_dict, strict=False), of_part))
        set_model_state_dict(whole_part, {**of_part}, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(whole(each), of_part[name]) for name, each in whole_part.named_parameters())
    set_model_state_dict(model, {**plain}, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(whole(each), plain[name]) for name, each in model.named_parameters())
    model.load_state_dict(get_model_state_dict(model))
    averages = {name: each.detach().clone() for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        averages[name].lerp_(each.detach(), 0.1)
    model.load_state_dict(averages, strict=False)
    assert not any(folder.glob("*"))
    ms.hf.save_pretrained(model, folder)
    whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "theirs", state_dict=whole_state)
        again = AutoModelForCausalLM.from_pretrained(folder / "theirs").state_dict()
        assert_equal(again, whole_state)
    runtime.close()
    return refused


def test_calls_that_would_mix_whole_and_sharded_tensors_are_refused(ranks: LocalRanks, tmp_path: Path) -> None:
    for found in ranks.run(foreign_calls, tmp_path / "saved", num_ranks=2, timeout_s=60.0):
        saves, loads = found[:5], found[5:]
        for message in saves:
            assert message.startswith("ValueError: save_pretrained() does not gather what"), message
            assert "ms.hf.save_pretrained(model, folder) on every rank" in message
        names = ("model.embed_tokens.weight", "weight", "weight", "", "gate_up_proj", "embed_tokens.weight")
        assert len(loads) == len(names)
        for name, message in zip(names, loads, strict=True):
            assert f"{name} whole, and ms.parallelize has sharded it; call on every" in message, message
            assert "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))" in message


def adapters_saved(folder: Path) -> list[str]:
    """Returns refusals of PEFT's saving; what the message names works."""
    torch.manual_seed(0)
    model = get_peft_model(drawn("qwen3_moe"), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    wanted = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    ms.parallelize(model, FSEP).close()
    refused = [
        refusal(partial(model.save_pretrained, *given, **options))
        for given, options in (
            ([folder], {}),
            ([], {"save_directory": folder}),
            ([folder], {"state_dict": get_model_state_dict(model)}),
        )
    ]
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    else:
        refused.append(refusal(partial(model.save_pretrained, folder, state_dict=state)))
    dist.barrier()
    again = PeftModel.from_pretrained(drawn("qwen3_moe"), folder).state_dict()
    assert all(torch.equal(again[name], each) for name, each in wanted.items())
    return refused


def test_adapters_that_nobody_gathers_are_not_saved(ranks: LocalRanks, tmp_path: Path) -> None:
    found = ranks.run(adapters_saved, tmp_path / "saved", num_ranks=2, timeout_s=60.0)
    for messages, count in zip(found, (3, 4), strict=True):
        assert len(messages) == count
        for message in messages:
            assert message.startswith("ValueError: save_pretrained() does not gather what"), message
            assert "model.save_pretrained(folder, state_dict=state) on rank 0" in message
