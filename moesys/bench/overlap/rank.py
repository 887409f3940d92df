"""What a rank measures of overlap: steps of models whose links are paced, and how fast these are to be."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesys.bench.harness.stopwatch import interleave
from moesys.bench.paced_group import make_paced_group
from moesys.config import ModelShape, Strategy
from moesys.moe.layer import MoELayer
from moesys.moe.runtime import link

# So fast that only gloo's own time is left.
_UNPACED_GB_PER_S = 1e3


@dataclass(frozen=True)
class Part:
    """Strategies that do the same work, the first of them without overlap, on a model of ``num_layers`` layers."""

    name: str
    num_layers: int
    num_tokens: int
    shape: ModelShape
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class RankResult:
    """What one rank measured; dictionaries are by strategy."""

    gb_per_s: float
    compute_ms: float
    link_mb: float
    same_bits: dict[str, bool]
    samples_ms: dict[str, list[float]]
    exposed_ms: dict[str, dict[str, float]]


def measure(part: Part, repeats: int, communication_share: float, seed: int) -> RankResult:
    """All strategies of ``part``, called on all ranks at once: their bits first, then those that have the bits of the
    first on every rank in turns, over links at a pace by which ``communication_share`` of its step is communication.
    """
    gb_per_s, compute_ms, link_mb = _calibrate(part, communication_share, seed)
    links = _Links(gb_per_s)
    runs = {strategy.name: _Run(part, strategy, links, seed) for strategy in part.strategies}

    expected: dict[str, Tensor] | None = None
    same_bits = {}
    for name, run in runs.items():
        actual = run.results()
        expected = expected or actual
        same_bits[name] = actual.keys() == expected.keys() and all(
            torch.equal(tensor, expected[key]) for key, tensor in actual.items()
        )
    # All ranks time the same strategies, or they would wait for one another for ever.
    verdicts = torch.tensor([same_bits[name] for name in runs], dtype=torch.int64)
    dist.all_reduce(verdicts, dist.ReduceOp.MIN)
    timed = {name: run for (name, run), same in zip(runs.items(), verdicts.tolist(), strict=True) if same}

    def prepare() -> None:
        for run in timed.values():
            run.prepare()

    contestants: dict[str, Callable[[], object]] = {name: run.step for name, run in timed.items()}
    samples_ms: dict[str, list[float]] = {name: [] for name in runs}
    samples_ms |= interleave(contestants, repeats, before=prepare, seed=seed)
    exposed_ms = {name: run.exposed_ms(repeats) if name in timed else {} for name, run in runs.items()}
    for run in runs.values():
        run.close()
    dist.barrier()
    return RankResult(gb_per_s, compute_ms, link_mb, same_bits, samples_ms, exposed_ms)


class _Links:
    """Two paced groups of all ranks: tokens travel on one, experts on the other."""

    def __init__(self, gb_per_s: float) -> None:
        assert dist.group.WORLD is not None
        self.tokens = make_paced_group(dist.group.WORLD, gb_per_s)
        self.experts = make_paced_group(dist.group.WORLD, gb_per_s)


class _Layers(nn.Module):
    """MoE layers with residuals and norms."""

    def __init__(self, part: Part, strategy: Strategy, group: dist.ProcessGroup, seed: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(part.shape.hidden_size) for _ in range(part.num_layers))
        self.moe = nn.ModuleList(
            MoELayer(part.shape, strategy, group, layer_index=index, seed=seed) for index in range(part.num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, moe in zip(self.norms, self.moe, strict=True):
            x = x + moe(norm(x))
        return x


class _Run:
    """One strategy: its model, and the input and the gradient that all strategies share."""

    def __init__(self, part: Part, strategy: Strategy, links: _Links, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
        size = (part.num_tokens, part.shape.hidden_size)
        self.x, self.dy = (torch.randn(size, generator=generator) for _ in range(2))
        self.x.requires_grad_()
        self.model = _Layers(part, strategy, links.tokens, seed)
        self.layers = [module for module in self.model.modules() if isinstance(module, MoELayer)]
        self._runtime = link(self.model, weight_group=links.experts)
        self._exposed_ms: list[dict[str, float]] = []

    def prepare(self) -> None:
        """Forget the last step, and line up with the other ranks."""
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        for layer in self.layers:
            layer.meter.clear()
        dist.barrier()

    def warm_up(self) -> None:
        """A step that teaches the runtime the order of the layers."""
        self.prepare()
        self.step()

    def step(self) -> Tensor:
        y: Tensor = self.model(self.x)
        y.backward(self.dy)
        exposed_ms: dict[str, float] = {}
        for layer in self.layers:
            for lane, waited_ms in layer.meter.exposed_ms.items():
                exposed_ms[lane] = exposed_ms.get(lane, 0.0) + waited_ms
        self._exposed_ms.append(exposed_ms)
        return y

    def results(self) -> dict[str, Tensor]:
        """Output and gradients; of experts this rank's part."""
        self.warm_up()
        self.prepare()
        y = self.step()
        assert self.x.grad is not None
        results = {"output": y.detach(), "dx": self.x.grad.clone()}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad
            results[name] = (grad.to_local() if hasattr(grad, "to_local") else grad).clone()
        return results

    @property
    def received_bytes(self) -> int:
        """Since ``prepare``, from other ranks."""
        return sum(sum(layer.meter.wire_bytes.values()) for layer in self.layers)

    @property
    def waits_ms(self) -> list[float]:
        """How long each step was blocked by communication."""
        return [sum(exposed_ms.values()) for exposed_ms in self._exposed_ms]

    def exposed_ms(self, repeats: int) -> dict[str, float]:
        """By lane, the median over the last steps."""
        last = self._exposed_ms[-repeats:]
        return {lane: statistics.median(step.get(lane, 0.0) for step in last) for lane in last[-1]}

    def close(self) -> None:
        self._runtime.close()


def _calibrate(part: Part, communication_share: float, seed: int, repeats: int = 5) -> tuple[float, float, float]:
    """(GB/s, ms of computing, MB received) of the first strategy's step; the same numbers on every rank.

    The first pace follows from the bytes and a step over links as fast as gloo, the second from a step at the first
    pace: beside a slow link a rank computes faster than beside gloo's threads. Of ``repeats`` steps the quickest
    counts, as whatever else runs on the machine only adds.
    """
    gb_per_s, received_mb = _UNPACED_GB_PER_S, 0.0
    agreed = torch.zeros(3, dtype=torch.float64)
    for paced in (False, True):
        run = _Run(part, part.strategies[0], _Links(gb_per_s), seed)
        run.warm_up()
        steps_ms = interleave({"step": run.step}, repeats, before=run.prepare)["step"]
        waits_ms = run.waits_ms[-repeats:]
        computes_ms = [step_ms - waited_ms for step_ms, waited_ms in zip(steps_ms, waits_ms, strict=True)]
        agreed[:] = torch.tensor([min(computes_ms), min(waits_ms), run.received_bytes / 1e6])
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        run.close()
        compute_ms, waited_ms, received_mb = agreed.tolist()
        wanted_ms = compute_ms * communication_share / (1 - communication_share)
        gb_per_s = gb_per_s * waited_ms / wanted_ms if paced else received_mb / wanted_ms
    return gb_per_s, compute_ms, received_mb
