"""``LayoutInvariant``: no bit of a training shows layout, split, sharding, overlap, or how many ranks there are."""

from __future__ import annotations

import os

import pytest
import torch
from harness import plain_experts
from layout_cases import differing
from layout_mutants import MUTANTS

import moesys as ms
from moesys.balance.layout_schedule import PlanEvent
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.masters import DTYPES, ExpertForm
from moesys.moe.store import ExpertTransfer, _in_dtype, without_messages
from moesys.overlap.experts_triton import TritonExperts

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
# Some of those among which each mutant shows; the sweep tries more. MOESYS_LAYOUT_CASES=200:10000 are others.
QUICK = "0:200" if SWEEP else "0:2"
FIRST, LAST = map(int, os.environ.get("MOESYS_LAYOUT_CASES", QUICK).split(":"))
SLICE = 50
# Cases in which a mutant shows, if it does.
TRIED = range(24)
# Of kernels, in the interpreter, which is slow. Others, in slices: MOESYS_KERNEL_CASES=4:300.
FIRST_OF_KERNELS, LAST_OF_KERNELS = map(
    int, os.environ.get("MOESYS_KERNEL_CASES", "0:4" if SWEEP else "0:1").split(":")
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(FIRST, LAST, SLICE))
def test_no_bit_differs(ranks: LocalRanks, first: int) -> None:
    assert not differing(ranks, range(first, min(first + SLICE, LAST)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_broken_shows(ranks: LocalRanks, mutant: str) -> None:
    assert differing(ranks, TRIED, mutant)


# Kernels by themselves do so always: tests/kernels/experts/test_block_gradient.py.
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_bit_differs_on_kernels(ranks: LocalRanks) -> None:
    assert not differing(ranks, range(FIRST_OF_KERNELS, LAST_OF_KERNELS), kernels=True)


SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
INVARIANT = ms.Strategy(name="invariant", reduction=ms.LayoutInvariant())


def layer_of(computed_by: str) -> ms.MoELayer:
    layer = ms.MoELayer(SHAPE, INVARIANT)
    layer.experts.expert_compute = TritonExperts() if computed_by == "kernels" else None
    return layer


HOMES = pytest.mark.parametrize("home", ["cpu", "kernels"])
# The interpreter computes by numpy, which warns of what a GPU does in silence.
NUMPY_MAY_WARN = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@HOMES
def test_tokens_that_are_no_blocks_are_refused_in_training_only(home: str) -> None:
    layer = layer_of(home)
    with torch.no_grad():
        assert layer(torch.randn(33, 16)).shape == (33, 16)
    with pytest.raises(ValueError, match="token_block=32 does not divide the 33 tokens of rank 0"):
        layer(torch.randn(33, 16))
    y_TH = layer.eval()(torch.randn(33, 16))
    with pytest.raises(ValueError, match="token_block=32 does not divide the 33 tokens of rank 0"):
        y_TH.sum().backward()


def test_a_plan_refuses_experts_without_kernels_on_a_gpu() -> None:
    """Any device that is no CPU has torch's products for them, whose rows may show their company."""
    experts = ms.Experts(SHAPE, INVARIANT)
    with pytest.raises(ValueError, match=r"have no kernels on meta; use reduction=Ordered\(\) there"):
        # A device that is there, and that no layer takes tokens from.
        experts._plan(torch.empty(64, 2, dtype=torch.int64, device="meta"), None, torch.float32, 0)


@HOMES
@NUMPY_MAY_WARN
def test_what_is_not_finite_makes_its_experts_nan(home: str) -> None:
    layer = layer_of(home)
    x_TH = torch.randn(64, 16)
    x_TH[5, 3] = torch.inf
    layer.experts(x_TH, torch.arange(128).view(64, 2) % 4, torch.ones(64, 2)).sum().backward()
    # The token has chosen the last two.
    assert layer.experts.masters.grad[2:].isnan().all()
    assert layer.experts.masters.grad[:2].isfinite().all()
    lost = PlanEvent(0, 0, "gradients of experts 2, 3 are NaN: what they are products of is not finite")
    assert layer.experts.schedule.events == [lost]
    assert not ms.clip_grad_norm_(layer, 1.0).isfinite()


@pytest.mark.parametrize("worst", [torch.inf, -torch.inf, torch.nan])
def test_a_norm_of_what_is_not_finite_is_that_of_torch(worst: float) -> None:
    layer = ms.MoELayer(SHAPE, INVARIANT)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer.router.weight.grad[0, 0] = worst
    wanted = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
    torch.testing.assert_close(ms.clip_grad_norm_(layer, 1.0), wanted, equal_nan=True)


@HOMES
@NUMPY_MAY_WARN
def test_a_token_far_from_all_others_takes_nothing_from_experts_that_it_does_not_reach(home: str) -> None:
    found = []
    for size in (1.0, 1e20):
        layer = layer_of(home)
        x_TH = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        x_TH[5] *= size
        layer.experts(x_TH, torch.arange(128).view(64, 2) % 4, torch.ones(64, 2)).sum().backward()
        found.append(layer.experts.masters.grad[:2])
    assert torch.equal(*found)


def test_masters_of_any_dtype_get_what_float32_holds() -> None:
    """As some layouts add gradients up in float64, and others have them in float32 at once."""
    gradient = torch.tensor([1 + 2**-8 + 2**-30, 1 / 3], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        (found,) = ExpertTransfer(_in_dtype(without_messages((gradient,)), dtype)).finish()
        assert torch.equal(found, gradient.float().to(dtype))


@HOMES
def test_gradients_are_those_of_ordered_sums(home: str) -> None:
    """Of the CPU's."""
    gradients = []
    for reduction in (ms.Ordered(), ms.LayoutInvariant(block_rows=16)):
        layer = ms.MoELayer(SHAPE.replace(n_shared_experts=1), INVARIANT.replace(reduction=reduction))
        if reduction.kind == "layout_invariant" and home == "kernels":
            layer.experts.expert_compute = TritonExperts()
        layer(torch.randn(96, 16, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "tokens"),
    [(16, 16, 640), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((64, 48, 1024), (128, 256, 512)))],
)
def test_gradients_are_as_near_to_those_of_float64_as_ordered_ones(
    dtype: str, hidden: int, intermediate: int, tokens: int
) -> None:
    """Errors of weight gradients, over seeds, of experts with many blocks; the oracle has the same rounded inputs."""
    errors = {"ordered": 0.0, "layout_invariant": 0.0}
    shape = ms.ModelShape(
        hidden_size=hidden, intermediate_size=intermediate, num_experts=4, top_k=2, dtype=dtype, initializer_range=0.2
    )
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x_TH, dy_TH = (torch.randn(tokens, hidden, generator=generator).to(DTYPES[dtype]) for _ in range(2))
        expert_TK = torch.rand(tokens, 4, generator=generator).topk(2).indices
        weight_TK = torch.rand(tokens, 2, generator=generator)
        for reduction in (ms.Ordered(), ms.LayoutInvariant(block_rows=32)):
            experts = ms.Experts(shape, INVARIANT.replace(reduction=reduction), seed=seed)
            with torch.no_grad():
                experts.masters.copy_(experts.masters.to(DTYPES[dtype]))
            experts(x_TH, expert_TK, weight_TK).backward(dy_TH)
            masters_EP = experts.masters.detach().double().requires_grad_()
            parts = ExpertForm.of(shape).views(masters_EP).values()
            plain_experts(x_TH.double(), expert_TK, weight_TK.double(), *parts).backward(dy_TH.double())
            error = (experts.masters.grad.double() - masters_EP.grad).norm() / masters_EP.grad.norm()
            errors[reduction.kind] += float(error) / 4
    # In bfloat16 a block's product is rounded to 16 bits, as that of all rows is: errors of n blocks add up to √n of
    # one, and so do blocks, so that either may be a little nearer.
    assert errors["layout_invariant"] < errors["ordered"] * (1.0 if dtype == "float32" else 1.01)
    assert errors["ordered"] < (1e-6 if dtype == "float32" else 1e-2)
