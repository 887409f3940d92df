"""transformers' models on ``experts_implementation="moesys"`` train as they do with transformers' own eager experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_equal
from hf_cases import OUTPUT_TOLERANCE, gradients_of, relative
from hf_models import drawn, text

GRADIENT_TOLERANCE = 1e-5

# Families, and how many experts each has here: also a number that nothing divides.
NUM_EXPERTS = {"mixtral": 6, "qwen3_moe": 8, "olmoe": 7, "deepseek_v3": 8}


def language_model(family: str, experts_implementation: str) -> Any:
    return drawn(family, NUM_EXPERTS[family], experts_implementation=experts_implementation)


@pytest.mark.parametrize("family", NUM_EXPERTS)
def test_a_model_trains_as_with_eager_experts(family: str) -> None:
    """Logits, loss and every gradient of the first step, the next two steps, and what they make of the parameters."""
    models = {name: language_model(family, name) for name in ("moesys", "eager")}
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


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_changes_no_bit(use_reentrant: bool) -> None:
    results, calls = [], []
    for checkpointing in (False, True):
        model = language_model("qwen3_moe", "moesys")
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
    assert_equal(*results)


def test_the_implementation_of_a_model_can_change() -> None:
    model = language_model("olmoe", "eager")
    with torch.no_grad():
        eager = model(input_ids=text(0)).logits
        model.set_experts_implementation("moesys")
        ours = model(input_ids=text(0)).logits
        model.set_experts_implementation("eager")
        again = model(input_ids=text(0)).logits
    assert torch.equal(eager, again)
    assert not torch.equal(eager, ours)
    assert relative(ours, eager) <= OUTPUT_TOLERANCE
