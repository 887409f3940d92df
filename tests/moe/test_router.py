"""The router against transformers' routers and losses, and top-k with decided ties against numpy."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from conftest import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moesys.config import ModelShape
from moesys.moe.router import Router, mean_scores, router_loss, token_shares, topk_by_index, z_loss
from moesys.moe.router_bias import move_router_bias

T, H, E, K = 37, 24, 16, 3
SOFTMAX = ModelShape(hidden_size=H, intermediate_size=8, num_experts=E, top_k=K)
SIGMOID = SOFTMAX.replace(scoring_func="sigmoid", norm_topk_prob=True)
LOSSES = {"router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# --- topk_by_index ---


def oracle_topk(scores_TE, k):
    """Largest first, equal scores by the lower column: a stable sort of the negated scores."""
    return np.argsort(-scores_TE, axis=1, kind="stable")[:, :k]


# Few values, so that rows are full of ties; zeros of both signs, infinities, subnormals and neighbouring floats.
TIED = [0.0, -0.0, 1.0, -1.0, float(np.nextafter(np.float32(1), np.float32(2))), 1e-45, -1e-45, 3e38, np.inf, -np.inf]


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 20), st.data())
def test_topk_is_a_stable_sort(num_rows, num_columns, data):
    k = data.draw(st.integers(0, num_columns))
    values = st.sampled_from(TIED) | st.floats(width=32, allow_nan=False)
    row = st.lists(values, min_size=num_columns, max_size=num_columns)
    rows = data.draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    scores_TE = np.array(rows, dtype=np.float32).reshape(num_rows, num_columns)
    chosen = topk_by_index(torch.from_numpy(scores_TE), k)
    assert chosen.dtype == torch.int64
    assert np.array_equal(chosen.numpy(), oracle_topk(scores_TE, k))


def test_topk_is_a_stable_sort_for_many_experts():
    scores_TE = np.random.default_rng(0).integers(-3, 3, size=(500, 256)).astype(np.float32)
    assert np.array_equal(topk_by_index(torch.from_numpy(scores_TE), 8).numpy(), oracle_topk(scores_TE, 8))


def test_topk_of_nan_is_still_columns():
    chosen = topk_by_index(torch.tensor([[torch.nan, 1.0, -torch.nan, torch.inf]]), 4)
    assert sorted(chosen[0].tolist()) == [0, 1, 2, 3]


# --- Router against transformers ---


MIXTRAL = MixtralTopKRouter, MixtralConfig, "num_local_experts"
QWEN = Qwen3MoeTopKRouter, Qwen3MoeConfig, "num_experts"
OLMOE = OlmoeTopKRouter, OlmoeConfig, "num_experts"
DEEPSEEK = DeepseekV3TopkRouter, DeepseekV3Config, "n_routed_experts"
# Fields that shapes and configurations have by the same names.
USUAL = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
CASES = {
    "mixtral": (MIXTRAL, {}),
    "qwen3, normalised": (QWEN, {}),
    "qwen3, as they are": (QWEN, {"norm_topk_prob": False}),
    "olmoe, normalised": (OLMOE, {}),
    "olmoe, as they are": (OLMOE, {"norm_topk_prob": False}),
    "deepseek, no groups": (DEEPSEEK, {"routed_scaling_factor": 2.5}),
    "deepseek, half the groups": (DEEPSEEK, {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}),
    "deepseek, groups of two": (DEEPSEEK, {"n_group": 8, "topk_group": 3}),
    "deepseek, as they are": (DEEPSEEK, {"n_group": 4, "norm_topk_prob": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_routes_as_transformers_does(case):
    (kind, config, experts), fields = CASES[case]
    shape = (SIGMOID if kind is DeepseekV3TopkRouter else SOFTMAX).replace(**fields)
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden_size": H, "num_experts_per_tok": K, experts: E}
    ours, theirs = Router(shape, generator=generator), kind(config(**sizes, **USUAL | fields))
    with torch.no_grad():
        ours.weight.normal_(generator=generator)
        if shape.scoring_func == "sigmoid":
            ours.e_score_correction_bias.normal_(std=0.3, generator=generator)
    theirs.load_state_dict(ours.state_dict())
    x_TH = torch.randn(T, H, generator=generator)
    coefficient_TE = torch.randn(T, E, generator=generator)
    our_x_TH, their_x_TH = x_TH.clone().requires_grad_(), x_TH.clone().requires_grad_()

    routing = ours(our_x_TH)
    their_logits_TE, their_weight_TK, their_expert_TK = theirs(their_x_TH)
    assert [tensor.dtype for tensor in routing] == [torch.int64, torch.float32, torch.float32]
    assert torch.equal(routing.logits_TE, their_logits_TE)
    assert torch.equal(routing.expert_TK.sort(dim=1).values, their_expert_TK.sort(dim=1).values)
    ours_TE = torch.zeros(T, E).scatter(1, routing.expert_TK, routing.weight_TK)
    theirs_TE = torch.zeros(T, E).scatter(1, their_expert_TK, their_weight_TK)
    torch.testing.assert_close(ours_TE, theirs_TE, rtol=1e-6, atol=0)

    (ours_TE * coefficient_TE).sum().backward()
    (theirs_TE * coefficient_TE).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(our_x_TH.grad, their_x_TH.grad, rtol=1e-4, atol=1e-6)


def test_chosen_experts_are_in_order_of_their_score():
    router = Router(SIGMOID)
    nn.init.normal_(router.weight)
    nn.init.normal_(router.e_score_correction_bias, std=0.3)
    routing = router(torch.randn(T, H))
    choice_TE = routing.logits_TE.sigmoid() + router.e_score_correction_bias
    assert torch.equal(routing.expert_TK, choice_TE.argsort(dim=1, descending=True)[:, :K])


@pytest.mark.parametrize(
    ("shape", "experts"),
    [
        (SOFTMAX, [0, 1, 2]),
        (SIGMOID, [0, 1, 2]),
        (SIGMOID.replace(n_group=4, topk_group=2, top_k=6), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_equal_experts_and_groups_are_chosen_by_index(shape, experts):
    router = Router(shape)
    nn.init.zeros_(router.weight)
    assert router(torch.randn(2, H)).expert_TK.tolist() == [experts, experts]


def test_tied_groups_are_chosen_by_index():
    router = Router(SIGMOID.replace(n_group=4, topk_group=2, top_k=4))
    nn.init.zeros_(router.weight)
    # Groups 1 to 3 tie at 0.5 + 0.5 + 2; group 0 is worse, and expert 15 is the best of all but in the last group.
    router.e_score_correction_bias.copy_(torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 2.0]))
    assert router(torch.randn(1, H)).expert_TK.tolist() == [[4, 5, 8, 9]]


@pytest.mark.parametrize("shape", [SOFTMAX, SIGMOID.replace(n_group=4, topk_group=2)])
@pytest.mark.parametrize("coefficients", [{}, LOSSES])
def test_no_tokens_route_nowhere(shape, coefficients):
    router = Router(shape.replace(**coefficients))
    x_TH = torch.empty(0, H, requires_grad=True)
    routing = router(x_TH)
    assert [tuple(tensor.shape) for tensor in routing] == [(0, K), (0, K), (0, E)]
    (routing.weight_TK.sum() + router_loss(router)).backward()
    assert x_TH.grad.shape == (0, H)
    assert torch.equal(router.weight.grad, torch.zeros(E, H))
    assert router_loss(router).item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_for_any_tokens_and_under_autocast(dtype):
    router = Router(SOFTMAX)
    x_TH = torch.randn(T, H).to(dtype).requires_grad_()
    routing = router(x_TH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = router(x_TH)
    assert_equal(under_autocast, router(x_TH.float()))
    assert routing.logits_TE.dtype == routing.weight_TK.dtype == torch.float32
    routing.weight_TK.square().sum().backward()
    assert x_TH.grad.dtype == dtype


def test_initial_weights_come_from_the_generator():
    first, again = (Router(SIGMOID, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first.weight, again.weight)
    assert first.weight.std().item() == pytest.approx(SIGMOID.initializer_range, rel=0.1)
    late = Router(SIGMOID, device="meta").to_empty(device="cpu")
    late.reset_parameters(torch.Generator().manual_seed(7))
    assert torch.equal(first.weight, late.weight)
    assert torch.equal(late.e_score_correction_bias, torch.zeros(E))


# --- losses ---


def load_balancing_loss(logits_TE, expert_TK, scoring_func="softmax"):
    """The loss as routers have it, of all tokens."""
    share_E = token_shares(expert_TK.flatten().bincount(minlength=E), K, scoring_func)
    return E * (share_E * mean_scores(logits_TE, scoring_func)).sum()


def test_load_balancing_loss_is_that_of_transformers():
    logits_TE = torch.randn(T, E, requires_grad=True)
    expert_TK = topk_by_index(logits_TE.detach(), K)
    ours = load_balancing_loss(logits_TE, expert_TK)
    theirs = load_balancing_loss_func((logits_TE,), E, K)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (our_grad,) = torch.autograd.grad(ours, logits_TE)
    (their_grad,) = torch.autograd.grad(theirs, logits_TE)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-5, atol=1e-9)


def test_load_balancing_loss_of_sigmoid_is_that_of_deepseek():
    """Equations 17 to 20 of arXiv 2412.19437, symbol by symbol."""
    logits_TE = torch.randn(T, E)
    expert_TK = topk_by_index(logits_TE, K)
    s = logits_TE.double().sigmoid()
    f = [E / (K * T) * sum(i in chosen for chosen in expert_TK.tolist()) for i in range(E)]
    P = (s / s.sum(dim=1, keepdim=True)).mean(dim=0)
    expected = sum(f[i] * P[i].item() for i in range(E))
    loss = load_balancing_loss(logits_TE, expert_TK, "sigmoid")
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_z_loss_is_the_mean_square_of_logsumexp():
    logits_TE = torch.randn(T, E)
    expected = (logits_TE.double().exp().sum(dim=1).log() ** 2).mean()
    assert z_loss(logits_TE).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_model_sums_the_losses_of_its_routers():
    first, second = Router(SOFTMAX.replace(**LOSSES)), Router(SIGMOID.replace(**LOSSES))
    model = nn.ModuleDict({"first": first, "second": nn.Sequential(second), "free": Router(SOFTMAX)})
    assert router_loss(model).item() == 0
    x_TH = torch.randn(T, H)
    expected = 0.0
    for router in (first, second, model["free"]):
        routing = router(x_TH)
        if router is not model["free"]:
            kind = router.shape.scoring_func
            balance = load_balancing_loss(routing.logits_TE, routing.expert_TK, kind)
            expected += 0.01 * balance.item() + 0.001 * z_loss(routing.logits_TE).item()
    assert router_loss(model["free"]).item() == 0
    loss = router_loss(model)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert first.weight.grad.any()
    assert second.weight.grad.any()
    with pytest.raises(ValueError, match="Linear has no router of moesys, whose losses it would be"):
        router_loss(nn.Linear(1, 1))


def test_a_router_can_be_copied_after_training():
    router = Router(SOFTMAX.replace(**LOSSES))
    router(torch.randn(T, H))
    for twin in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert router_loss(twin).item() == 0
        assert torch.equal(twin.weight, router.weight)
    assert router_loss(router).item() != 0


def test_bias_moves_towards_balance():
    bias_E = torch.zeros(4)
    # Mean 5.5, which rounds neither down to 5 nor up to 6.
    move_router_bias(bias_E, torch.tensor([5, 6, 10, 1]), 0.25)
    assert bias_E.tolist() == [0.25, -0.25, -0.25, 0.25]
    # Mean 5: an expert with just that stays.
    move_router_bias(bias_E, torch.tensor([5, 5, 9, 1]), 0.25)
    assert bias_E.tolist() == [0.25, -0.25, -0.5, 0.5]
    # One token more than the mean of 2^24, which float32 does not tell from it.
    move_router_bias(bias_E.zero_(), torch.tensor([2**24 + 1, 2**24, 2**24, 2**24 - 1]), 0.25)
    assert bias_E.tolist() == [-0.25, 0, 0, 0.25]
    # Counts of which E times one is more than int32 has.
    move_router_bias(bias_E.zero_(), torch.tensor([2**30, 0, 0, 0], dtype=torch.int32), 0.25)
    assert bias_E.tolist() == [-0.25, 0.25, 0.25, 0.25]
