"""Further faults, which were planted after the diagnosis was written, in the training of ``small_moe``."""

from __future__ import annotations

from typing import Any

import torch
from small_moe import E, small_moe

from moesys import verify

# The situation that shows each, a word of what names it, and of the first tensor.
HELD = {
    "never synchronised": ("uneven", "not reduced over the 2 data ranks", "all parameters"),
    "one rank's experts on all": ("plain", "starts from", "experts.up"),
    "bias by local counts": ("plain", "differs", "gate.bias"),
    "configured accumulation": ("uneven", "step divides by a configured number", "loss"),
    "no experts' gradient on a rank": ("plain", "0 × the reference on experts only: nothing", "experts.down"),
}


@verify.check()
def held(world: verify.World, fault: str = "") -> verify.Setup:
    """Builds the right training, and plants a fault on several ranks."""
    setup = small_moe(world, fault)
    model: Any = getattr(setup.model, "module", setup.model)
    if world.size == 1 and fault != "configured accumulation":
        return setup
    step, named = setup.step, dict(model.named_parameters())
    gates = [layer.gate for layer in model.layers]
    before = [gate.tokens.clone() for gate in gates]

    if fault == "one rank's experts on all":
        with torch.no_grad():
            for layer in model.layers:
                layer.experts.up[E // 2 :] = layer.experts.up[: E // 2].clone()
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
    elif fault == "configured accumulation":

        def configured(batches: list[verify.Batch]) -> Any:
            logged = step(batches)
            factor = len(batches) / 3
            for parameter in named.values():
                parameter.grad.mul_(factor)
            return {name: value * factor for name, value in logged.items()}

        setup.step = configured
    elif fault == "no experts' gradient on a rank":

        def without(batches: list[verify.Batch]) -> Any:
            logged = step(batches)
            named["layers.1.experts.down"].grad.mul_(1.0 - world.rank)
            return logged

        setup.step = without
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
