"""Saving modules around a model of transformers, or unlike one: the model inside is saved, or every rank refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_models import FAMILIES, drawn, lent
from test_save_pretrained import EXPERTS, assert_same, large, tensors
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel, Qwen3MoePreTrainedModel

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks


class Around(nn.Module):
    """A module around a model, with a head of its own or without."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.lm = drawn("qwen3_moe", EXPERTS)
        self.value = nn.Linear(48, 1) if head else nn.Identity()


class WithScore(Qwen3MoeForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = nn.Linear(48, 1)


class OwnModel(Qwen3MoePreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen3MoeModel(config)
        self.post_init()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(drawn("qwen3_moe", EXPERTS), LoraConfig(r=2, target_modules=["q_proj"]))


def injected() -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), drawn("qwen3_moe", EXPERTS))


def changed(change: Callable[[Any], object]) -> Callable[[], Any]:
    def make() -> Any:
        model = drawn("qwen3_moe", EXPERTS)
        change(model)
        return model

    return make


def smaller_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(90, 48))


def bottleneck(model: Any) -> None:
    model.lm_head = nn.Sequential(nn.Linear(48, 8), nn.Linear(8, 96))


def complex_parameter(model: Any) -> None:
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def invalid_generation(model: Any) -> None:
    model.generation_config.temperature = 0.5


def generation_in_configuration(model: Any) -> None:
    model.config.temperature = 0.7


def other_dtype_on_a_rank(model: Any) -> None:
    if dist.get_rank() == 1:
        model.model.norm.double()


def adapters_on_a_rank() -> Any:
    return injected() if dist.get_rank() == 1 else drawn("qwen3_moe", EXPERTS)


def parallel(make: Callable[[], Any], wrap: Callable[[Any], Any] = lambda model: model) -> Callable[[], Any]:
    def made() -> Any:
        model = make()
        ms.parallelize(model, lent(2, EXPERTS)).close()
        return wrap(model)

    return made


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def plain() -> Any:
    return drawn("qwen3_moe", EXPERTS)


def by_fsdp() -> Any:
    return FullyShardedDataParallel(plain(), device_id=torch.device("cpu"))


def layer_compiled(model: Any) -> None:
    model.model.layers[0] = compiled(model.model.layers[0])


SAVED: dict[str, Callable[[], Any]] = {
    "compiled": parallel(plain, compiled),
    "a layer compiled": parallel(changed(layer_compiled)),
    "DDP": lambda: DistributedDataParallel(plain()),
    "DDP in compiled": lambda: compiled(DistributedDataParallel(plain())),
    "around": parallel(lambda: Around(head=False)),
}
SHAPES = r"makes lm_head\.weight a .*\[96, 48\], and the model has "
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "value head": (parallel(lambda: Around(head=True)), r"^ValueError: Around has value\.weight, .*\(model\.lm, "),
    "PEFT": (parallel(adapted), r"ValueError: PeftModel has adapters of PEFT.* call state = get_model_state_dict"),
    "compiled PEFT": (lambda: compiled(adapted()), "ValueError: OptimizedModule has adapters of PEFT"),
    "injected": (injected, r"ValueError: Qwen3MoeForCausalLM has adapters of PEFT, as in model\.layers\.0\.self_attn"),
    "two models": (lambda: nn.ModuleList([plain(), plain()]), "TypeError: .*ModuleList, with 2 models of transformers"),
    "none": (lambda: nn.Linear(2, 2), "TypeError: model is of type Linear, with 0 models of transformers in it"),
    "experts": (lambda: plain().model.layers[0].mlp.experts, "TypeError: .*Qwen3MoeExperts, with 0 models"),
    "a state dict": (lambda: plain().state_dict(), "TypeError: model is a OrderedDict; give the torch.nn.Module"),
    "own": (lambda: OwnModel(FAMILIES["qwen3_moe"](4)[1]), "TypeError: OwnModel is no architecture of transformers"),
    "another head": (changed(bottleneck), SHAPES + "no such tensor"),
    "another shape": (changed(smaller_head), SHAPES + r"shape \[90, 48\]"),
    "no values": (changed(lambda model: model.to("meta")), r"ValueError: .*embed_tokens\.weight is on the meta device"),
    "complex": (changed(complex_parameter), r"ValueError: phase has torch\.complex64; safetensors files store BOOL, "),
    "FSDP1": (by_fsdp, "TypeError: FullyShardedDataParallel is sharded by FullyShardedDataParallel, .*; shard it by"),
    "generation": (changed(invalid_generation), r"^ValueError: GenerationConfig is invalid"),
    "configuration": (changed(generation_in_configuration), r"^ValueError: Some generation parameters are set in the"),
    "ranks": (changed(other_dtype_on_a_rank), r"rank 1 has model\.norm\.weight as .*float64.* rank 0 as .*float32"),
    "one rank": (adapters_on_a_rank, r"adapters of PEFT"),
}


def save_each(out: Path, names: list[str]) -> list[str]:
    found = []
    for name in names:
        make = SAVED[name] if name in SAVED else REFUSED[name][0]
        try:
            ms.hf.save_pretrained(make(), out / name)
            found.append("saved")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_the_model_inside_is_saved(ranks: LocalRanks, tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path / "plain")
    for messages in ranks.run(save_each, tmp_path, list(SAVED), num_ranks=2, timeout_s=100.0):
        assert messages == ["saved"] * len(SAVED)
    for name in SAVED:
        assert_same(tmp_path / name, tmp_path / "plain")


def test_what_is_no_whole_model_is_refused_on_every_rank(ranks: LocalRanks, tmp_path: Path) -> None:
    """Before anything is written."""
    for messages in ranks.run(save_each, tmp_path, list(REFUSED), num_ranks=2, timeout_s=100.0):
        for (_, wanted), message in zip(REFUSED.values(), messages, strict=True):
            assert re.search(wanted, message), message
    assert not any(tmp_path.iterdir())


def test_parameters_that_a_class_of_ones_own_adds_are_saved(tmp_path: Path) -> None:
    model = WithScore(large(4, 1).config)
    model.score.register_buffer("steps", torch.tensor(3))
    model.score.register_buffer("scratch", torch.zeros(2), persistent=False)
    ms.hf.save_pretrained(model, tmp_path / "out")
    found = tensors(tmp_path / "out")
    for name in ("score.weight", "score.bias", "score.steps"):
        assert torch.equal(found[name], model.state_dict()[name])
    assert "score.scratch" not in found
