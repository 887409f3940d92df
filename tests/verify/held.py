"""Twelve further faults, which were planted after the diagnosis was written, in the training of ``small_moe``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_moe import E, small_moe

from moesys import verify

# The situation that shows each, a word of what names it, and of the first tensor.
HELD = {
    "never synchronised": ("uneven", "not reduced over the 2 data ranks", "all parameters"),
    "one rank's experts on all": ("plain", "starts from", "experts.up"),
    "layers exchanged on a rank": ("plain", "starts from other values", "layers.0"),
    "bias by local counts": ("plain", "differs", "gate.bias"),
    "half of the limit": ("plain", "1/2 × the reference", "embed.weight"),
    "norm without a root": ("plain", "× the reference", "norm that clips"),
    "padding counts as tokens": ("padding", "a constant factor", "loss"),
    "configured accumulation": ("uneven", "step divides by a configured number", "loss"),
    "no experts' gradient on a rank": (
        "plain",
        "0 × the reference on experts only: nothing",
        "experts.down",
    ),
    "experts prescaled": ("plain", "3/2 × the reference on experts only", "experts.up"),
    "other betas": ("plain", "differs", "embed.weight"),
    "last micro-batch of a rank twice": ("uneven", "reads the data of part 1 micro-batch 2", "embed[0]"),
}


@verify.check()
def held(world: verify.World, fault: str = "") -> verify.Setup:
    """Builds the right training, and plants a fault on several ranks."""
    setup = small_moe(world, fault)
    model: Any = getattr(setup.model, "module", setup.model)
    if world.size == 1 and fault != "configured accumulation":
        return setup
    step, clip, named = setup.step, setup.clip, dict(model.named_parameters())
    gates = [layer.gate for layer in model.layers]
    before = [gate.tokens.clone() for gate in gates]

    def on_gradients(words: str, change: Callable[[torch.Tensor], object]) -> None:
        def changed(batches: list[verify.Batch]) -> Any:
            logged = step(batches)
            for name, parameter in named.items():
                if words in name:
                    change(parameter.grad)
            return logged

        setup.step = changed

    if fault == "one rank's experts on all":
        with torch.no_grad():
            for layer in model.layers:
                layer.experts.up[E // 2 :] = layer.experts.up[: E // 2].clone()
    elif fault == "layers exchanged on a rank" and world.rank == 1:
        with torch.no_grad():
            first, second = (dict(layer.named_parameters()) for layer in model.layers)
            for name, parameter in first.items():
                kept = parameter.clone()
                parameter.copy_(second[name])
                second[name].copy_(kept)
    elif fault == "bias by local counts":
        optimizer = setup.optimizer

        class Local:
            def step(self) -> None:
                counts = [gate.tokens - old for gate, old in zip(gates, before, strict=True)]
                biases = [gate.bias.clone() for gate in gates]
                optimizer.step()
                for gate, bias, count in zip(gates, biases, counts, strict=True):
                    gate.bias.copy_(bias + 1e-4 * (count.mean() - count).sign())

            def zero_grad(self) -> None:
                optimizer.zero_grad()

        setup.optimizer = Local()
    elif fault == "half of the limit":
        setup.clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    elif fault == "norm without a root":
        setup.clip = lambda: clip() ** 2
    elif fault == "padding counts as tokens":

        def counted(batches: list[verify.Batch]) -> Any:
            logged = step(batches)
            sizes = torch.tensor([float(sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)), 0.0])
            sizes[1] = float(sum(b["labels"][:, 1:].numel() for b in batches))
            dist.all_reduce(sizes)
            for parameter in named.values():
                parameter.grad.mul_(sizes[0] / sizes[1])
            return {name: value * sizes[0] / sizes[1] for name, value in logged.items()}

        setup.step = counted
    elif fault == "configured accumulation":

        def configured(batches: list[verify.Batch]) -> Any:
            logged = step(batches)
            factor = len(batches) / 3
            for parameter in named.values():
                parameter.grad.mul_(factor)
            return {name: value * factor for name, value in logged.items()}

        setup.step = configured
    elif fault == "no experts' gradient on a rank":
        on_gradients("layers.1.experts.down", lambda gradient: gradient.mul_(1.0 - world.rank))
    elif fault == "experts prescaled":
        on_gradients(".experts.", lambda gradient: gradient.mul_(1.5))
    elif fault == "other betas":
        setup.optimizer = type("Both", (), {})()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.5, 0.999), eps=1e-3, foreach=False)
        setup.optimizer.step, setup.optimizer.zero_grad = optimizer.step, optimizer.zero_grad
    elif fault == "last micro-batch of a rank twice" and world.rank == 1:
        setup.step = lambda batches: step([*batches[:-2], batches[-1], batches[-1]])
    return setup


@verify.check(expects="token_mean")
def means(world: verify.World) -> verify.Setup:
    """Builds a training whose own definition averages the means of micro-batches."""
    setup = small_moe(world)
    step = setup.step

    def each(batches: list[verify.Batch]) -> Any:
        logged = [step([batch]) for batch in batches]
        return {name: sum(found[name] for found in logged) for name in logged[0]}

    setup.step = each
    return setup
