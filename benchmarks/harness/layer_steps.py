"""Forward and backward of MoE layers on one of several ranks, for benchmarks that time and compare them.

T tokens of a rank, H hidden.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.contest import Case, Contestant, Outcome, hold
from moesys.moe.layer import MoELayer
from moesys.moe.runtime import link


class ResidualLayers(nn.Module):
    """MoE layers with residuals; ``norm`` makes the module before each layer."""

    def __init__(self, layers: Sequence[MoELayer], norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.moe = nn.ModuleList(layers)
        self.norms = nn.ModuleList(norm() for _ in layers)

    def forward(self, x_TH: Tensor) -> Tensor:
        for norm, moe in zip(self.norms, self.moe, strict=True):
            x_TH = x_TH + moe(norm(x_TH))
        return x_TH


def rank_generator() -> torch.Generator:
    """Returns a generator whose seed is this rank."""
    return torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)


class LayerSteps:
    """Steps of ``model``, which holds ``MoELayer``s, on this rank's input and gradient of the output, both [T, H]."""

    def __init__(self, model: nn.Module, x_TH: Tensor, dy_TH: Tensor) -> None:
        self.model, self.x_TH, self.dy_TH = model, x_TH.requires_grad_(), dy_TH
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self._runtime = link(model)
        self._exposed_ms: list[dict[str, float]] = []

    def prepare(self) -> None:
        """Clears gradients and meters, and waits for the other ranks."""
        self.x_TH.grad = None
        self.model.zero_grad(set_to_none=True)
        for layer in self.layers:
            layer.experts.meter.clear()
        if dist.is_initialized():
            dist.barrier()

    def step(self) -> Tensor:
        y_TH: Tensor = self.model(self.x_TH)
        y_TH.backward(self.dy_TH)
        exposed_ms: dict[str, float] = {}
        for layer in self.layers:
            for lane, waited_ms in layer.experts.meter.exposed_ms.items():
                exposed_ms[lane] = exposed_ms.get(lane, 0.0) + waited_ms
        self._exposed_ms.append(exposed_ms)
        return y_TH

    def results(self) -> dict[str, Tensor]:
        """Returns output, dx and all gradients (this rank's shard of experts) of the second of two steps.

        In the first one layouts settle, and the runtime learns the order of the layers.
        """
        for _ in range(2):
            self.prepare()
            y_TH = self.step()
        grads = {"dx": self.x_TH.grad} | {name: parameter.grad for name, parameter in self.model.named_parameters()}
        results = {"output": y_TH.detach()}
        for name, grad in grads.items():
            assert grad is not None, name
            results[name] = (grad.to_local() if hasattr(grad, "to_local") else grad).clone()
        return results

    def blocked_ms(self, repeats: int) -> list[float]:
        """Returns the time that each of the last ``repeats`` steps waited for communication."""
        return [sum(exposed_ms.values()) for exposed_ms in self._exposed_ms[-repeats:]]

    def exposed_ms(self, repeats: int) -> dict[str, float]:
        """Returns the waiting time by lane, the median over the last ``repeats`` steps."""
        last = self._exposed_ms[-repeats:]
        return {lane: statistics.median(step.get(lane, 0.0) for step in last) for lane in last[-1]}

    def close(self) -> None:
        self._runtime.close()


def hold_steps(
    steps: Mapping[str, LayerSteps], wrong: Callable[[str, Any], str], metrics: Callable[[Any], Any], repeats: int
) -> dict[str, Outcome]:
    """Checks and times these steps, a collective of all ranks, and closes them.

    metrics: returns other measurements of steps, after all repetitions.
    """

    def prepare() -> None:
        for of in steps.values():
            of.prepare()

    setups = {
        name: partial(Contestant, of.results, {"step": of.step}, partial(metrics, of)) for name, of in steps.items()
    }
    outcomes = hold(Case(setups, wrong, before=prepare), repeats)
    if dist.is_initialized():
        dist.barrier()
    for of in steps.values():
        of.close()
    return outcomes
