"""``router_loss`` is the sum over the passes of a step, whatever ran before it and whatever runs beside it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moesys.config import ModelShape
from moesys.moe.router import Router, router_loss

T, H = 37, 24
LOSSES = {"router_aux_loss_coef": 1.0, "router_z_loss_coef": 0.1}
SHAPE = ModelShape(hidden_size=H, intermediate_size=8, num_experts=16, top_k=3, **LOSSES)


class Stack(nn.Module):
    """Two routers behind each other, of which a forward may skip or repeat some. It ends in an error where asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(Router(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def forward(self, x_TH, *which, fails=False):
        for index in which:
            x_TH = x_TH + self.routers[index](x_TH).weight_TK[:, :1]
        if fails:
            raise KeyError("behind all routers")
        return x_TH


X_TH = [torch.randn(T, H, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def alone(batch, *which):
    """The losses of one pass of a model that has run nothing else, with the gradients of a step."""
    model = Stack()
    y_TH = model(X_TH[batch], *which)
    loss = router_loss(model)
    (y_TH.square().mean() + loss).backward()
    return loss.item(), [router.weight.grad for router in model.routers]


def assert_step(model, y_TH, batch, *which):
    """The rest of a step has the loss and the gradients of the same step of a model that has run nothing else."""
    loss = router_loss(model)
    assert loss.item() == alone(batch, *which)[0]
    model.zero_grad()
    (y_TH.square().mean() + loss).backward()
    for router, expected in zip(model.routers, alone(batch, *which)[1], strict=True):
        assert router.weight.grad is expected is None or torch.equal(router.weight.grad, expected)


@pytest.mark.parametrize("read", [False, True], ids=["never read", "read"])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 0), (1, 0, 1)], ids=str)
def test_a_step_has_the_losses_of_its_own_passes(which, read):
    """An earlier step ran all routers, and its losses were read or not."""
    model = Stack()
    y_TH = model(X_TH[0], 0, 1)
    (y_TH.square().mean() + (router_loss(model) if read else 0)).backward()
    assert_step(model, model(X_TH[1], *which), 1, *which)


def test_a_loss_may_be_read_again():
    """One router's loss may be read too, also without gradients, between forward and backward."""
    model = Stack()
    y_TH = model(X_TH[0], 0, 1)
    of_each = [router_loss(router).item() for router in model.routers]
    with torch.no_grad():
        assert router_loss(model).item() == pytest.approx(sum(of_each))
    assert_step(model, y_TH, 0, 0, 1)


def test_micro_batches_that_overlap_have_losses_of_their_own():
    """Two forwards before two backwards, as in a pipeline, with a call behind each forward."""
    model = Stack()
    steps = []
    for x_TH in X_TH[:2]:
        y_TH = model(x_TH, 0, 1)
        steps.append((y_TH, router_loss(model)))
    for batch, (y_TH, loss) in enumerate(steps):
        assert loss.item() == alone(batch, 0, 1)[0]
        model.zero_grad()
        (y_TH.square().mean() + loss).backward()
        for router, expected in zip(model.routers, alone(batch, 0, 1)[1], strict=True):
            assert torch.equal(router.weight.grad, expected)


def test_micro_batches_may_share_one_loss():
    model = Stack()
    outputs = [model(x_TH, 0, 1) for x_TH in X_TH]
    loss = router_loss(model)
    assert loss.item() == pytest.approx(sum(alone(batch, 0, 1)[0] for batch in range(3)), rel=1e-6)
    (sum(y_TH.square().mean() for y_TH in outputs) + loss).backward()
    for index, router in enumerate(model.routers):
        expected = sum(alone(batch, 0, 1)[1][index] for batch in range(3))
        torch.testing.assert_close(router.weight.grad, expected, rtol=1e-4, atol=1e-6)
    loss = router_loss(model)
    assert (loss.item(), loss.requires_grad) == (0, False)


def test_a_loss_read_behind_the_main_backward_has_its_gradient():
    model = Stack()
    model(X_TH[0], 0, 1).square().mean().backward(retain_graph=True)
    router_loss(model).backward()
    for router, expected in zip(model.routers, alone(0, 0, 1)[1], strict=True):
        torch.testing.assert_close(router.weight.grad, expected, rtol=1e-4, atol=1e-6)


def test_evaluation_adds_nothing_and_leaves_the_step():
    """Evaluation, and passes without gradients, between the forward and the backward of a step."""
    model = Stack()
    y_TH = model(X_TH[0], 0, 1)
    model.eval()
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            model(X_TH[1], 0, 1)
            loss = router_loss(model)
        assert (loss.item(), loss.requires_grad) == (0, False)
    model.train()
    with torch.no_grad():
        model(X_TH[2], 0, 1)
    assert_step(model, y_TH, 0, 0, 1)


@pytest.mark.parametrize("which", [(0, 1), (0,), (0, 0, 1)], ids=str)
def test_a_forward_that_raised_counts_no_more(which):
    model = Stack()
    with pytest.raises(KeyError):
        model(X_TH[0], 0, 1, fails=True)
    assert_step(model, model(X_TH[1], *which), 1, *which)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputation_is_no_pass(early_stop):
    model = Stack()
    with set_checkpoint_early_stop(early_stop):
        y_TH = checkpoint(model, X_TH[0].clone().requires_grad_(), 0, 1, use_reentrant=False)
        assert_step(model, y_TH, 0, 0, 1)
    assert router_loss(model).item() == 0


def test_losses_keep_no_graph():
    """Graphs of finished steps are freed, and of unread passes only the newest is kept, until the model
    is freed.
    """
    model, first = Stack(), []

    class Owned:
        """Something that a graph owns."""

    def run():
        x_TH = X_TH[0].clone().requires_grad_() * 1
        owned = Owned()
        x_TH.grad_fn.metadata["owned"] = owned
        first.append(weakref.ref(owned))
        return model(x_TH, 0, 1)

    for _ in range(4):
        run()
    assert [each() is not None for each in first] == [False, False, False, True]
    (run().square().mean() + router_loss(model)).backward()
    assert first[-1]() is None
    run()
    assert first[-1]() is not None
    model = None
    assert first[-1]() is None


def test_reading_the_loss_of_one_router_takes_nothing_from_that_of_its_model():
    """And a router that a step skips adds nothing of the step before, whose loss was read without a backward."""
    model = Stack()
    before = model(X_TH[0], 0, 1)
    router_loss(model)
    y_TH = model(X_TH[1], 0)
    assert router_loss(model.routers[0]).item() == alone(1, 0)[0]
    assert_step(model, y_TH, 1, 0)
    del before


def test_a_router_without_gradients_has_the_losses_of_its_newest_pass():
    model = Stack().requires_grad_(False)
    for batch in range(2):
        model(X_TH[batch], 0, 1)
    assert router_loss(model).item() == alone(1, 0, 1)[0]
