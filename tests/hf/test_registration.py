"""What transformers gets by ``register``, what is refused, and which way a call takes."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import assert_equal
from hf_cases import OUTPUT_TOLERANCE, batch, experts, mixtral_experts, relative, run
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import moesys as ms
from moesys.hf import registration
from moesys.hf.experts_module import ExpertsModule
from moesys.kernels.cpu.page_pool import PagePool


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
    assert str(error.value) == f"transformers {version} is too old for moesys.hf: pip install 'transformers>=5.23'"


def test_transformers_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError) as error:
        ms.hf.register()
    assert str(error.value) == "moesys.hf needs transformers: pip install 'transformers>=5.23'"


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


def test_a_compiled_model_goes_round_the_experts() -> None:
    module, tokens = experts(mixtral_experts), batch()
    expected = run(module, tokens)
    module.compile(backend="eager")
    assert_equal(run(module, tokens), expected)


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
        y_TH = forward(experts, PagePool(), module, inputs[0], index_TK, inputs[1])
        found.append([y_TH, *torch.autograd.grad(y_TH, [*inputs, *module.parameters()], dy_TH)])
    for by_kernels, by_rows in zip(*found, strict=True):
        assert relative(by_kernels, by_rows) < OUTPUT_TOLERANCE
