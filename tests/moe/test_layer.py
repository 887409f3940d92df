"""MoELayer as a module: what it accepts, what it refuses, what it tells."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, on_ranks, refusal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=12, num_experts=6, top_k=2)
EP = ms.Strategy(name="ep")
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4), balance=ms.Greedy(), split=ms.FlowSplit())


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def test_16_bit_experts_are_close_to_32_bit_ones() -> None:
    x = tokens(50)
    expected = ms.MoELayer(SHAPE, EP)(x)
    for dtype in ("bfloat16", "float16"):
        layer = ms.MoELayer(SHAPE.replace(dtype=dtype), EP)
        y = layer(x)
        assert (y - expected).norm() / expected.norm() < 2e-2
        y.sum().backward()
        assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("reduction", [ms.Ordered(), ms.LayoutInvariant()], ids=["ordered", "invariant"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_changes_nothing(reduction: ms.Ordered, dtype: str) -> None:
    layer = ms.MoELayer(SHAPE.replace(n_shared_experts=1, dtype=dtype), EP.replace(reduction=reduction))
    x = tokens(128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert torch.equal(y, layer(x))


def test_masters_changed_between_forward_and_backward_are_noticed() -> None:
    layer = ms.MoELayer(SHAPE, EP)
    y = layer(tokens(20)).sum()
    with torch.no_grad():
        layer.experts.masters.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_metrics_tell_load_and_starved_experts() -> None:
    layer = ms.MoELayer(SHAPE, EP)
    assert layer.metrics() is None
    assert layer.last_plan is None
    layer(tokens(1))
    metrics = layer.metrics()
    assert sum(metrics.tokens_E) == 2
    assert metrics.experts_without_tokens == 4
    assert (metrics.load_max_over_mean, metrics.restored_mib) == (1.0, 0.0)
    assert metrics.plan_ms > 0
    assert layer.metrics().plan_ms == 0.0
    assert "2 tokens, max/mean 1.000, turn 0" in str(layer.last_plan)
    assert ms.planning.LayerPlan.from_json(layer.last_plan.to_json()) == layer.last_plan


def initial_state(strategy: ms.Strategy) -> dict[str, Tensor]:
    layer = ms.MoELayer(SHAPE.replace(n_shared_experts=1), strategy, layer_index=3, seed=5)
    return layer.full_state_dict()


def test_initial_weights_do_not_depend_on_ranks_or_sharding(ranks: LocalRanks) -> None:
    alone = initial_state(EP)
    other = ms.MoELayer(SHAPE.replace(n_shared_experts=1), EP, layer_index=4, seed=5).full_state_dict()
    assert not torch.equal(alone["experts.down_proj"], other["experts.down_proj"])
    for num_ranks, strategy in [(4, EP), (4, FSEP), (3, FSEP), (2, EP)]:
        for state in ranks.run(initial_state, strategy, num_ranks=num_ranks):
            assert state.keys() == alone.keys()
            assert all(torch.equal(state[name], tensor) for name, tensor in alone.items())


@on_ranks(3)
def test_biases_count_tokens_once_whatever_their_group() -> None:
    """A group of two ranks and one of a single rank: the biases by all ranks' tokens, each counted once."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1] if rank < 2 else [2], use_local_synchronization=True)
    layer = ms.MoELayer(SHAPE.replace(scoring_func="sigmoid", router_bias_update_rate=0.01), EP, group)
    x_TH = tokens(60 if rank == 2 else 20, seed=rank) + 3 * tokens(1, seed=10 + rank // 2)
    layer(x_TH).sum().backward()
    with pytest.raises(ValueError, match=rf"the experts' group has {2 - rank // 2} of 3 ranks, .* copies of its"):
        ms.update_router_bias(layer)
    counted_E = layer.experts.counted_E * (rank != 1)
    dist.all_reduce(counted_E)
    ms.update_router_bias(layer, dist.group.WORLD)
    expected_E = (0.01 * (counted_E.double().mean() - counted_E).sign()).float()
    assert torch.equal(layer.router.e_score_correction_bias, expected_E)


WRONG_STATES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no router": (lambda state: state.pop("gate.weight"), "KeyError: .state has no gate.weight"),
    "a router of another shape": (lambda state: state.update(TWO_EXPERTS), "ValueError: gate.weight has shape"),
    "too many": (lambda state: state.update(more=torch.zeros(1)), r"ValueError: state has \['more'\]"),
    "experts of another width": (lambda state: state.update(WIDE), r"\(6, 32, 16\); this layer's is \(6, 24, 16\)"),
    "no experts": (lambda state: state.pop("experts.down_proj"), "KeyError: .state has no experts.down_proj"),
    "nor shared": (
        lambda state: state.pop("shared_experts.up_proj.weight"),
        "KeyError: .state has no shared_experts.up",
    ),
}
TWO_EXPERTS, WIDE = {"gate.weight": torch.zeros(2, 16)}, {"experts.gate_up_proj": torch.zeros(6, 32, 16)}


@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_a_state_that_does_not_fit_changes_nothing(wrong: str) -> None:
    change, words = WRONG_STATES[wrong]
    shape = SHAPE.replace(n_shared_experts=1)
    layer, state = ms.MoELayer(shape, EP), ms.MoELayer(shape, EP, seed=1).full_state_dict()
    before = layer.full_state_dict()
    change(state)
    assert re.search(words, refusal(layer.load_full_state_dict, state))
    assert_equal(layer.full_state_dict(), before)


def test_masters_are_float32_whatever_the_default_and_stay_so() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        layer = ms.MoELayer(SHAPE.replace(n_shared_experts=1), EP)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}
    with pytest.raises(TypeError, match="masters stay float32"):
        layer.bfloat16()
    assert layer.experts.masters.dtype == torch.float32
    layer.to("cpu")


def test_threads_may_change_after_construction() -> None:
    sequential = ms.MoELayer(SHAPE, EP)
    pipelined = ms.MoELayer(SHAPE, EP.replace(overlap=ms.Pipelined(chunks=7)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(sequential(tokens(50)), pipelined(tokens(50)))
    finally:
        torch.set_num_threads(threads)


def test_a_compiled_model_may_contain_the_layer() -> None:
    layer = ms.MoELayer(SHAPE, EP)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), layer)
    x = tokens(20)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


INVARIANT = EP.replace(reduction=ms.LayoutInvariant(token_block=32))
DELAYED = EP.replace(sharding=ms.Fsep(slots_per_rank=4, delay_reshard=True))


def penalty(layer: ms.MoELayer, head: Tensor, checkpointed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The squared norm of the gradient of an input, and what that depends on."""
    x = tokens(32).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    (dx,) = torch.autograd.grad((y @ head).sum(), x, create_graph=True)
    inputs = {"x": x, "router": layer.router.weight, "experts": layer.experts.masters}
    return dx.square().sum(), inputs | ({"head": head} if head.requires_grad else {})


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("learns", [False, True], ids=["frozen head", "head that learns"])
@pytest.mark.parametrize("strategy", [EP, INVARIANT], ids=["ordered", "invariant"])
def test_second_derivatives_are_refused(strategy: ms.Strategy, learns: bool, checkpointed: bool) -> None:
    """A backward to all inputs and one to each input are both refused."""
    layer = ms.MoELayer(SHAPE.replace(n_shared_experts=1), strategy)
    head = tokens(16, seed=1).requires_grad_(learns)
    squares, inputs = penalty(layer, head, checkpointed)
    with pytest.raises(RuntimeError, match="second derivatives through experts"):
        squares.backward(retain_graph=True)
    for each in inputs.values():
        with pytest.raises(RuntimeError, match="second derivatives through experts"):
            torch.autograd.grad(squares, each, retain_graph=True, allow_unused=True)


def test_second_derivatives_of_experts_alone_are_refused() -> None:
    """Only the tokens require a gradient, which takes another path in backward."""
    experts, x = ms.Experts(SHAPE, EP).requires_grad_(False), tokens(6).requires_grad_()
    y = experts(x, torch.tensor([[0, 1]] * 6), torch.full((6, 2), 0.5))
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives through experts"):
        torch.autograd.grad(dx.sum(), x, allow_unused=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives_of_other_parts_are_right() -> None:
    """``create_graph=True`` changes no gradient of a layer, and the rest of a model has its second derivatives."""
    layer, head = ms.MoELayer(SHAPE, EP), torch.nn.Linear(16, 16)

    def gradients(create_graph: bool) -> list[Tensor]:
        layer.zero_grad(set_to_none=False)
        (head(tokens(6)).pow(3).sum() + layer(tokens(6)).square().sum()).backward(create_graph=create_graph)
        return [each.grad.detach().clone() for each in layer.parameters()]

    assert_equal(gradients(False), gradients(True))
    of_head = head.weight.grad
    (found,) = torch.autograd.grad(of_head.square().sum(), head.weight)
    assert found.any()


@pytest.mark.parametrize("strategy", [EP, DELAYED], ids=["ep", "delayed"])
@on_ranks(4)
def test_second_derivatives_are_refused_on_ranks(strategy: ms.Strategy) -> None:
    """Also of gradients that arrive after backward."""
    layer = ms.MoELayer(SHAPE, strategy)
    model = torch.nn.ModuleList([layer])
    runtime = ms.link(model)
    layer(tokens(5)).sum().backward(create_graph=True)
    for each in layer.parameters():
        whole_or_local = each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad
        with pytest.raises(RuntimeError, match="second derivatives through experts"):
            whole_or_local.square().sum().backward(retain_graph=True)
    ms.sync_gradients(model)
    ms.clip_grad_norm_(model, 1.0)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    runtime.close()


# torch's own forward mode uses it
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_function_transforms_are_refused() -> None:
    """Forward mode is among them, because torch would lose tangents inside experts."""
    layer, x = ms.MoELayer(SHAPE, EP), tokens(5)
    ways: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
        "vmap": lambda: torch.vmap(layer)(torch.stack([x, x])),
        "no gradients": lambda: torch.no_grad()(torch.vmap(layer))(torch.stack([x, x])),
        "batched gradients": lambda: torch.autograd.functional.jacobian(layer, x, vectorize=True),
        "forward mode": lambda: torch.autograd.functional.jacobian(layer, x, vectorize=True, strategy="forward-mode"),
    }
    for way in ways.values():
        with pytest.raises(RuntimeError, match=r"transform of torch\.func"):
            way()


def test_no_two_parts_of_a_model_start_from_the_same_numbers() -> None:
    shape = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=3, top_k=1)
    strategy = ms.Strategy(name="ep")
    layers = [ms.MoELayer(shape, strategy, layer_index=index, seed=seed) for index in (0, 1) for seed in (0, 1)]
    starts = [tuple(layer.router.weight.flatten()[:8].tolist()) for layer in layers]
    starts += [tuple(expert_P[:8].tolist()) for layer in layers for expert_P in layer.experts.masters]
    assert len(set(starts)) == len(starts) == 16
