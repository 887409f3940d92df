"""What kernels promise to whoever trains: no wait for the host. One binary whatever the counts: test_aot.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from host_waits import host_waits_refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moesys.kernels.experts.experts import moe_experts
from moesys.kernels.routing import route
from moesys.moe.token_blocks import TokenBlocks
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder
from moesys.overlap.exact_sum import BlockSums
from moesys.overlap.executor import ExpertGradients
from moesys.overlap.experts_triton import SingleRankRun

T, H, I, E, K = 9, 32, 16, 4, 2


def layer(device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    expert_TK = torch.randint(0, E, (T, K), generator=generator).to(device)
    return normal(T, H), expert_TK, normal(T, K), normal(E, 2 * I, H), normal(E, H, I)


def forward_backward(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    y_TH = moe_experts(*inputs)
    learnt = [tensor for tensor in inputs if tensor.requires_grad]
    return y_TH, *torch.autograd.grad(y_TH, learnt, torch.ones_like(y_TH))


@pytest.fixture
def _host_unread() -> Iterator[None]:
    # Copies of tables go by pinned memory on a GPU, and the bounds of gradients are read on the CPU alone.
    allowed = "moesys.kernels.launch", "moesys.overlap.exact_sum"
    with host_waits_refused(lambda frame: frame.f_globals["__name__"] == allowed[frame.f_code.co_name == "agree"]):
        yield


@pytest.mark.usefixtures("_host_unread")
def test_forward_and_backward_wait_for_nobody() -> None:
    y_TH, *gradients = forward_backward(layer())
    assert all(tensor.isfinite().all() for tensor in (y_TH, *gradients))


@pytest.mark.usefixtures("_host_unread")
def test_nor_do_sums_that_show_no_layout() -> None:
    """Their grids follow from numbers on the device: of experts on one rank, and of what every token passes."""
    x_TH, expert_TK, weight_TK, gate_up, down = (tensor.detach() for tensor in layer())
    channel, routing = Channel(None, (0,), Recorder(0), Meter()), route(expert_TK, E)
    gradients = ExpertGradients(*(torch.empty_like(of, dtype=torch.float64) for of in (gate_up, down)))

    class Held:
        stacked, adapters = staticmethod(lambda: (gate_up, down)), None

    sums = BlockSums(16, tuple(range(E)), routing.first_G1.diff(), channel, pytest.fail)
    executor = SingleRankRun(routing, sums)
    y_TH, saved = executor.forward(x_TH, weight_TK, Held)
    executor.backward(y_TH, saved, Held, gradients)
    weight_EH = gate_up[0].clone().requires_grad_()
    TokenBlocks(32, channel, by_kernels=True).linear(x_TH, weight_EH).sum().backward()
    assert all(tensor.isfinite().all() for tensor in (*gradients[:2], weight_EH.grad))


@pytest.mark.usefixtures("_host_unread")
@pytest.mark.parametrize(
    "read", ["1 if tensor else 0", "int(tensor)", "tensor.tolist()", "tensor.cpu()", "range(tensor)"]
)
def test_the_guard_sees_a_wait(read: str) -> None:
    """In code that calls itself a part of moesys."""
    wait = eval(f"lambda tensor: {read}", {"__name__": "moesys.kernels.experts.experts"})
    with pytest.raises(RuntimeError, match=r"kernels.experts.experts, line 1, calls \w+, which waits for the device"):
        wait(torch.ones(1, dtype=torch.int64))


def test_shapes_need_no_numbers() -> None:
    """Fake tensors have none; what comes out has the shapes and dtypes of what is real."""
    real = forward_backward(layer())
    with FakeTensorMode():
        fake = forward_backward(layer())
    assert [(tensor.shape, tensor.dtype) for tensor in fake] == [(tensor.shape, tensor.dtype) for tensor in real]
