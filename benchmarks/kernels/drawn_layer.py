"""The layers of the kernel benchmark: their sizes, their random tensors, and the results in float32.

T tokens, H hidden, I expert width, U = 2·I (gate above up), E experts, K choices per token, P = T·K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Size(NamedTuple):
    """The size of a layer: T tokens, H hidden, I expert width, E experts, K choices per token."""

    name: str
    T: int
    H: int
    I: int
    E: int
    K: int


# The published layers.
SIZES = (
    Size("qwen3-30b", 32768, 2048, 768, 128, 8),
    Size("olmoe", 32768, 2048, 1024, 64, 8),
    Size("mixtral", 16384, 4096, 14336, 8, 2),
    Size("deepseek-v3", 16384, 7168, 2048, 256, 8),
    Size("fine", 40960, 768, 256, 128, 8),
    Size("30b", 32768, 4096, 512, 128, 8),
)
ROUTINGS = ("uniform", "balanced", "zipf", "k-experts", "router")

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Convert = Callable[[Tensor], Tensor]


class Results(NamedTuple):
    """The results that are compared: y and dx [T, H], dweight [T, K], dgate_up [E, U, H], ddown [E, H, I]."""

    y: Tensor
    dx: Tensor
    dweight: Tensor
    dgate_up: Tensor
    ddown: Tensor


@dataclass(frozen=True)
class Layer:
    """Random inputs, all of one dtype but for ``weight_TK``, float32, and ``expert_TK``, int64.

    router_EH: the router that made the choices from x, if there is one; it is timed with the experts.
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
    """Returns a layer with activations of about 1; a seed always gives the same layer on the same device."""
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
    # Some implementations take the weights in 16 bits; these values are exact in 16 bits too.
    weight_TK = weight_TK.to(dtype).float()
    return Layer(size, x_TH, dy_TH, expert_TK, weight_TK, gate_up_EUH, down_EHI, router_EH)


def draw_routing(name: str, T: int, E: int, K: int, generator: torch.Generator) -> Tensor:
    """Returns choices, int64 [T, K] on the generator's device, distinct in each row.

    uniform: any K experts. balanced: all experts equally often, up to one. zipf: expert i of a random order with a
    probability proportional to 1 / i. k-experts: the same K for all tokens. Raises ValueError for another name.
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
    # The K largest of these keys are K draws without replacement (Gumbel-top-k).
    exponential_TE = torch.empty(T, E, device=device).exponential_(generator=generator)
    return (weight_E.log() - exponential_TE.log()).topk(K, dim=1).indices


def choose(x_TH: Tensor, router_EH: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Routes with plain torch: softmax in float32, the K largest scaled to sum to 1.

    Returns choices int64 and weights float32, both [T, K].
    """
    score_TE = torch.nn.functional.linear(x_TH, router_EH).float().softmax(dim=1)
    weight_TK, expert_TK = score_TE.topk(K, dim=1)
    return expert_TK, weight_TK / weight_TK.sum(dim=1, keepdim=True)


def _unchanged(gate_up_EUH: Tensor) -> Tensor:
    return gate_up_EUH


@dataclass(frozen=True)
class Implementation:
    """One way to compute experts.

    experts: (x_TH, expert_TK, weight_TK, gate_up, down_EHI) -> y [T, H], differentiable in all but the choices.
    to_own: converts gate_up [E, U, H] to the layout that ``experts`` takes. from_own: converts its gradient back.
    Neither is timed.
    """

    experts: Experts
    to_own: Convert = _unchanged
    from_own: Convert = _unchanged


class Run:
    """An implementation on a layer. Tensors are the layer's own if the implementation takes their layout."""

    def __init__(self, implementation: Implementation, layer: Layer) -> None:
        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_()

        self._implementation, self._layer = implementation, layer
        self._x, self._weight, self._down = leaf(layer.x_TH), leaf(layer.weight_TK), leaf(layer.down_EHI)
        self._gate_up = leaf(implementation.to_own(layer.gate_up_EUH))
        self._router = None if layer.router_EH is None else leaf(layer.router_EH)

    def forward(self) -> Tensor:
        """Returns y, with the graph for its backward; includes the router if the layer has one."""
        if self._router is None:
            return self._experts(self._layer.expert_TK, self._weight)
        return self._experts(*choose(self._x, self._router, self._layer.size.K))

    def backward_of(self, y_TH: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of all inputs."""
        routing = self._weight if self._router is None else self._router
        return torch.autograd.grad(y_TH, (self._x, routing, self._gate_up, self._down), self._layer.dy_TH)

    def forward_backward(self) -> tuple[Tensor, ...]:
        return self.backward_of(self.forward())

    def results(self) -> Results:
        """Returns the results for the layer's fixed choices and weights, without the router."""
        y_TH = self._experts(self._layer.expert_TK, self._weight)
        leaves = (self._x, self._weight, self._gate_up, self._down)
        dx, dweight, dgate_up, ddown = torch.autograd.grad(y_TH, leaves, self._layer.dy_TH)
        return Results(y_TH.detach(), dx, dweight, self._implementation.from_own(dgate_up), ddown)

    def _experts(self, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return self._implementation.experts(self._x, expert_TK, weight_TK, self._gate_up, self._down)


@torch.no_grad()
def relative_errors(layer: Layer, found: Results) -> dict[str, float]:
    """Returns ‖found - right‖ / ‖right‖ of each result: infinite if it has a NaN, and all infinite if a shape is wrong.

    ``right`` is computed from the layer's tensors in float32, without TF32, one expert at a time, so that it fits into
    memory beside any layer: gradients of matrices are compared expert by expert and not kept.
    """
    _, T, H, I, E, K = layer.size
    if [tuple(tensor.shape) for tensor in found] != [(T, H), (T, H), (T, K), (E, 2 * I, H), (E, H, I)]:
        return dict.fromkeys(Results._fields, float("inf"))
    squares = {name: torch.zeros(2, dtype=torch.float64, device=found.y.device) for name in Results._fields}

    def compare(name: str, tensor: Tensor, right: Tensor) -> None:
        for place, difference in enumerate((tensor.float() - right, right)):
            squares[name][place] += torch.linalg.vector_norm(difference, dtype=torch.float64).square()

    y_TH, dx_TH = (torch.zeros(T, H, device=found.y.device) for _ in range(2))
    dweight_TK = torch.zeros(T, K, device=found.y.device)
    # The choices t·K + k of each expert, in order.
    expert_P = layer.expert_TK.flatten()
    entries_E = expert_P.argsort(stable=True).split(torch.bincount(expert_P, minlength=E).tolist())
    with _without_tf32():
        for expert, entry_P in enumerate(entries_E):
            dgate_up_UH, ddown_HI = _expert(layer, expert, entry_P, y_TH, dx_TH, dweight_TK)
            compare("dgate_up", found.dgate_up[expert], dgate_up_UH)
            compare("ddown", found.ddown[expert], ddown_HI)
    for name, right in (("y", y_TH), ("dx", dx_TH), ("dweight", dweight_TK)):
        compare(name, getattr(found, name), right)
    return {name: _ratio(*pair.sqrt().tolist()) for name, pair in squares.items()}


def _expert(
    layer: Layer, expert: int, entry_P: Tensor, y_TH: Tensor, dx_TH: Tensor, dweight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds one expert's part to outputs and gradients of tokens; returns the gradients of its matrices."""
    token_P, weight_P1 = entry_P // layer.size.K, layer.weight_TK.flatten()[entry_P, None]
    x_PH, dy_PH = layer.x_TH[token_P].float(), layer.dy_TH[token_P].float()
    gate_up_UH, down_HI = layer.gate_up_EUH[expert].float(), layer.down_EHI[expert].float()
    gate_PI, up_PI = (x_PH @ gate_up_UH.t()).chunk(2, dim=1)
    sigmoid_PI = gate_PI.sigmoid()
    silu_PI = gate_PI * sigmoid_PI
    a_PI = silu_PI * up_PI
    # A token chooses an expert at most once, so no two rows add to the same element.
    y_TH.index_add_(0, token_P, weight_P1 * (a_PI @ down_HI.t()))
    da_PI = dy_PH @ down_HI
    dweight_TK.view(-1)[entry_P] = (da_PI * a_PI).sum(dim=1)
    da_PI *= weight_P1
    dgate_PI = da_PI * up_PI * (sigmoid_PI + silu_PI * (1 - sigmoid_PI))
    dh_PU = torch.cat([dgate_PI, da_PI * silu_PI], dim=1)
    dx_TH.index_add_(0, token_P, dh_PU @ gate_up_UH)
    return dh_PU.t() @ x_PH, dy_PH.t() @ (weight_P1 * a_PI)


def _ratio(difference: float, right: float) -> float:
    if difference == 0:
        return 0.0
    return difference / right if right > 0 and difference < float("inf") else float("inf")


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
