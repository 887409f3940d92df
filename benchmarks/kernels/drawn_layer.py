"""The layer that implementations of the kernels' bench compute: its tensors, drawn once, and what must come out.

T tokens, H hidden, I expert width, U = 2·I (gate above up), E experts, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.aot import Size

ROUTINGS = ("uniform", "balanced", "zipf", "k-experts", "router")

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Convert = Callable[[Tensor], Tensor]


class Results(NamedTuple):
    """What is compared: y and dx [T, H], dweight [T, K], dgate_up [E, U, H], ddown [E, H, I]."""

    y: Tensor
    dx: Tensor
    dweight: Tensor
    dgate_up: Tensor
    ddown: Tensor


@dataclass(frozen=True)
class Layer:
    """Random inputs, all of one dtype but for ``weight_TK``, float32, and ``expert_TK``, int64.

    ``router_EH``: where the choices are this router's on x, which may be timed with the experts.
    """

    size: Size
    x_TH: Tensor
    dy_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    gate_up_EUH: Tensor
    down_EHI: Tensor
    router_EH: Tensor | None = None


def draw_layer(size: Size, routing: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Layer:
    """A layer whose activations are about 1 everywhere; the same seed gives the same layer on the same device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(scale)

    _, T, H, I, E, K = size
    x_TH, dy_TH = normal(T, H), normal(T, H)
    gate_up_EUH, down_EHI = normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
    router_EH = normal(E, H, scale=H**-0.5) if routing == "router" else None
    if router_EH is None:
        expert_TK = draw_routing(routing, T, E, K, generator)
        weight_TK = torch.rand(T, K, device=device, generator=generator)
        weight_TK /= weight_TK.sum(dim=1, keepdim=True)
    else:
        expert_TK, weight_TK = choose(x_TH, router_EH, K)
    # Some implementations want these in 16 bits: what all are given is exact there.
    weight_TK = weight_TK.to(dtype).float()
    return Layer(size, x_TH, dy_TH, expert_TK, weight_TK, gate_up_EUH, down_EHI, router_EH)


def draw_routing(name: str, T: int, E: int, K: int, generator: torch.Generator) -> Tensor:
    """int64 [T, K] on the generator's device, distinct in a row.

    uniform: any K experts. balanced: every expert as often as every other, but for one. zipf: expert i of a random
    order with a probability like 1 / i. k-experts: all tokens the same K. Raises ValueError for another name.
    """
    device = generator.device
    if name == "balanced":
        expert_TK = (torch.arange(T * K, device=device) % E).view(T, K)
        order_E, order_T = (torch.randperm(n, generator=generator, device=device) for n in (E, T))
        return order_E[expert_TK][order_T]
    if name == "k-experts":
        return torch.randperm(E, generator=generator, device=device)[:K].expand(T, K).contiguous()
    weight_E = torch.ones(E, device=device)
    if name == "zipf":
        weight_E /= 1 + torch.randperm(E, generator=generator, device=device)
    elif name != "uniform":
        raise ValueError(f"routing={name!r} cannot be drawn; use uniform, balanced, zipf or k-experts")
    # The K largest of these keys are K draws without putting back (Gumbel-top-k).
    exponential_TE = torch.empty(T, E, device=device).exponential_(generator=generator)
    return (weight_E.log() - exponential_TE.log()).topk(K, dim=1).indices


def choose(x_TH: Tensor, router_EH: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """A usual router in plain torch: softmax in float32, the K largest scaled to sum to 1.

    Returns choices int64 and weights float32, both [T, K].
    """
    score_TE = torch.nn.functional.linear(x_TH, router_EH).float().softmax(dim=1)
    weight_TK, expert_TK = score_TE.topk(K, dim=1)
    return expert_TK, weight_TK / weight_TK.sum(dim=1, keepdim=True)


def _as_it_is(gate_up_EUH: Tensor) -> Tensor:
    return gate_up_EUH


@dataclass(frozen=True)
class Implementation:
    """One way to compute experts.

    experts: (x_TH, expert_TK, weight_TK, gate_up, down_EHI) -> y [T, H], differentiable in all but the choices.
    to_own: gate_up [E, U, H] in the layout that ``experts`` takes; from_own: its gradient back in ours. Both are done
    outside of the timing.
    """

    experts: Experts
    to_own: Convert = _as_it_is
    from_own: Convert = _as_it_is


class Run:
    """An implementation on a layer. Tensors are the layer's own where the layout is."""

    def __init__(self, implementation: Implementation, layer: Layer) -> None:
        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_()

        self._implementation, self._layer = implementation, layer
        self._x, self._weight, self._down = leaf(layer.x_TH), leaf(layer.weight_TK), leaf(layer.down_EHI)
        self._gate_up = leaf(implementation.to_own(layer.gate_up_EUH))
        self._router = None if layer.router_EH is None else leaf(layer.router_EH)

    def forward(self) -> Tensor:
        """y, with what its backward needs; with the router where the layer has one."""
        if self._router is None:
            return self._experts(self._layer.expert_TK, self._weight)
        return self._experts(*choose(self._x, self._router, self._layer.size.K))

    def backward_of(self, y_TH: Tensor) -> tuple[Tensor, ...]:
        """The gradients of all inputs."""
        routing = self._weight if self._router is None else self._router
        return torch.autograd.grad(y_TH, (self._x, routing, self._gate_up, self._down), self._layer.dy_TH)

    def forward_backward(self) -> tuple[Tensor, ...]:
        return self.backward_of(self.forward())

    def results(self) -> Results:
        """On the fixed choices and weights, without the router."""
        y_TH = self._experts(self._layer.expert_TK, self._weight)
        leaves = (self._x, self._weight, self._gate_up, self._down)
        dx, dweight, dgate_up, ddown = torch.autograd.grad(y_TH, leaves, self._layer.dy_TH)
        return Results(y_TH.detach(), dx, dweight, self._implementation.from_own(dgate_up), ddown)

    def _experts(self, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return self._implementation.experts(self._x, expert_TK, weight_TK, self._gate_up, self._down)
