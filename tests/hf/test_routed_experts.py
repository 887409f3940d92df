"""Experts compute what transformers' own eager ones do, and keep our promises on bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
from conftest import assert_equal
from hf_cases import (
    KINDS,
    Batch,
    E,
    H,
    I,
    K,
    assert_agree,
    assert_no_worse,
    batch,
    every_kind,
    experts,
    gradients_of,
    mixtral_experts,
    relative,
    run,
)
from torch import Tensor, nn

from moesys.kernels.cpu import row_invariant_ops
from moesys.kernels.cpu.row_invariant_gemm import LARGEST_MINIMUM
from moesys.overlap import experts_cpu, routes


@every_kind
def test_experts_of_every_kind_agree_with_eager(kind: Callable[[], nn.Module]) -> None:
    module, tokens = experts(kind), batch()
    assert_agree(run(module, tokens), run(module, tokens, "eager"), 1e-6)


# transformers' own norm behind experts computes in float32 whatever it is given
@pytest.mark.parametrize("name", [name for name in KINDS if name != "a norm behind"])
def test_float64_is_computed_in_float64(name: str) -> None:
    module, tokens = experts(KINDS[name], torch.float64), batch(dtype=torch.float64)
    assert_agree(run(module, tokens), run(module, tokens, "eager"), 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@every_kind
def test_errors_of_16_bits_are_no_larger_than_theirs(kind: Callable[[], nn.Module], dtype: torch.dtype) -> None:
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


# On one thread all kinds, on two those that differ in their products or in what is done between them, of which one runs
# always.
KINDS_AND_THREADS = [pytest.param(kind, 1, id=f"{name}, 1 thread") for name, kind in KINDS.items()] + [
    pytest.param(kind, 2, id=f"{name}, 2 threads", marks=[] if "norm" in name else pytest.mark.slow)
    for name, kind in list(KINDS.items())[-3:]
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
        assert_equal(run(module, tokens), first)
    with torch.inference_mode():
        assert torch.equal(module(tokens.x, tokens.index, tokens.weight), first["y"])


@every_kind
def test_blocks_change_no_bit(kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """But of what is summed over all rows without a product: gradients of an activation's and a norm's parameters."""
    module, tokens = experts(kind), batch(150)
    whole = run(module, tokens)
    monkeypatch.setattr(routes, "GROUP_ROWS", 1)
    monkeypatch.setattr(experts_cpu, "COMBINE_ELEMENTS", 5 * H)
    monkeypatch.setattr(row_invariant_ops, "THREADED_ELEMENTS", 700)
    cut = run(module, tokens)
    assert_agree(cut, whole, 1e-6)
    assert_equal(*({name: t for name, t in results.items() if "." not in name} for results in (cut, whole)))


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
    assert_equal(frozen, {name: everything[name] for name in ("y", "dx", "dweight")})
    module.requires_grad_(True)
    module(tokens.x, tokens.index, tokens.weight).backward(tokens.dy)
    assert_equal(gradients_of(module), {name: everything[name] for name, _ in module.named_parameters()})


# --- memory ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_kind
def test_backward_keeps_tokens_and_pre_activations_alone(kind: Callable[[], nn.Module], dtype: torch.dtype) -> None:
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
    # The routing is a weight for each choice; the order of rows is no tensor of autograd's.
    assert sorted(sizes) == sorted([T * H * dtype.itemsize, T * K * width * dtype.itemsize, T * K * 4])


@pytest.mark.parametrize("learns", [False, True], ids=["incoming gradient is a constant", "it requires a gradient"])
def test_second_derivatives_are_refused(learns: bool) -> None:
    module, tokens = experts(mixtral_experts), batch()
    module.config._experts_implementation = "moesys"
    y = module(tokens.x.requires_grad_(), tokens.index, tokens.weight.requires_grad_())
    (dx,) = torch.autograd.grad(y, tokens.x, tokens.dy.requires_grad_(learns), create_graph=True)
    inputs = [tokens.x, tokens.weight, *module.parameters(), *([tokens.dy] if learns else [])]
    for each in inputs:
        with pytest.raises(RuntimeError, match="second derivatives through experts"):
            torch.autograd.grad(dx.sum(), each, retain_graph=True, allow_unused=True)


def test_function_transforms_are_refused() -> None:
    module, tokens = experts(mixtral_experts), batch()
    module.config._experts_implementation = "moesys"
    with pytest.raises(RuntimeError, match=r"transform of torch\.func"):
        torch.func.grad(lambda x: module(x, tokens.index, tokens.weight).sum())(tokens.x)
