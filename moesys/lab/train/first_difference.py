"""The first difference of two trainings: step by step in turns, up to the first tensor whose bits differ.

It compares, in the order in which a step computes them: outputs of all modules on each rank, gradients of these
outputs, gradients of parameters, the norm that clips, parameters, and the state of the optimizer. Sharded tensors are
compared as a whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesys.collectives import guarded
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import ModelTraining, Training
from moesys.lab.train.loop import Trainer
from moesys.torch_private import NO_BACKWARD, current_backward
from moesys.verify.recording import tensors_in


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of two trainings. ``step``: 0-based, warm-up included.

    tensor: the kind of tensor, with the name of its module or parameter. ranks: the ranks on which it differs, of
    ``num_ranks``; if both trainings shard it alike, those whose part differs. experts: the experts that differ, in a
    tensor of all experts. largest: the largest |a − b|; infinite if the shapes differ, or only one training has it.
    num_different: the different elements, of ``num_elements``, over these ranks.
    """

    step: int
    tensor: str
    ranks: tuple[int, ...]
    num_ranks: int
    experts: tuple[int, ...]
    largest: float
    num_different: int
    num_elements: int


def find_first_difference(
    strategies: tuple[Strategy, Strategy],
    model: ModelShape,
    cluster: ClusterSpec,
    workload: Training | ModelTraining,
    seed: int,
) -> FirstDifference | None:
    """Trains both on every rank of the default group, step by step in turns. A collective.

    Returns the first difference, on all ranks; None if no bit differs to the end. The tensors of a step of the first
    training are kept until the second has computed its own.
    """
    trainers: list[_CopyingTrainer] = []
    try:
        trainers += (_CopyingTrainer(strategy, model, cluster, workload, seed, None) for strategy in strategies)
        for step in range(workload.warmup + workload.steps):
            first, second = (trainer.watched(step) for trainer in trainers)
            if (difference := _first_difference(step, first, second)) is not None:
                return difference
        return None
    finally:
        for trainer in trainers:
            trainer.close()


class _TensorCopy(NamedTuple):
    """A tensor, and this rank's part of one that is sharded."""

    whole: Tensor
    part: Tensor | None


class _CopyingTrainer(Trainer):
    """A training that keeps copies of the tensors of a step, by name, in the order in which they are computed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._seen: dict[str, _TensorCopy] = {}
        self._times: Counter[str] = Counter()
        for name, module in self.model.named_modules():
            module.register_forward_hook(partial(self._see_outputs, name or "the model"))
        self._random_state = torch.get_rng_state()

    def watched(self, step: int) -> Mapping[str, _TensorCopy]:
        # Two trainings take turns, and each draws from where it stopped.
        torch.set_rng_state(self._random_state)
        self._seen, self._times = {}, Counter()
        self.step(step)
        self._random_state = torch.get_rng_state()
        return self._seen

    def clip(self) -> Tensor:
        # Backward computes the gradients of the last layer first.
        for name, parameter in reversed(list(self.model.named_parameters())):
            self._see(f"gradient of {name}", parameter.grad)
        norm = super().clip()
        self._see("norm of all gradients", norm)
        return norm

    def optimize(self) -> None:
        super().optimize()
        for name, parameter in self.model.named_parameters():
            self._see(name, parameter.detach())
            for of, state in self.optimizer.state.get(parameter, {}).items():
                self._see(f"{of} of {name}", state)
        for name, buffer in self.model.named_buffers():
            self._see(name, buffer)

    def _see_outputs(self, name: str, module: nn.Module, _inputs: Any, outputs: Any) -> None:
        # A recomputation may leave out what nobody reads.
        if current_backward() != NO_BACKWARD:
            return
        for place, output in enumerate(tensors_in(outputs)):
            what = f"output {place} of {name}" if place else f"output of {name}"
            self._see(what, output)
            if output.requires_grad:
                output.register_hook(partial(self._see, f"gradient of {what}"))

    @torch.no_grad()
    def _see(self, name: str, tensor: object) -> None:
        if isinstance(tensor, Tensor):
            self._times[name] += 1
            # A module runs several times, for example in several micro-batches.
            times = f", time {self._times[name]}" if self._times[name] > 1 else ""
            part = tensor.to_local().clone() if isinstance(tensor, DTensor) else None
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
            self._seen[f"{name}{times}"] = _TensorCopy(whole, part)


def _first_difference(
    step: int, first: Mapping[str, _TensorCopy], second: Mapping[str, _TensorCopy]
) -> FirstDifference | None:
    """Returns the first difference in this step. A collective."""
    names = list(dict.fromkeys([*first, *second]))
    differing = (n for n, name in enumerate(names) if not _alike(first.get(name), second.get(name)))
    mine: tuple[int, FirstDifference | None] = (len(names), None)
    if (place := next(differing, None)) is not None:
        mine = (place, _difference(step, names[place], first.get(names[place]), second.get(names[place])))
    found: list[Any] = [None] * dist.get_world_size()
    guarded("bisect", dist.group.WORLD, partial(dist.all_gather_object, found, mine))
    earliest = min(place for place, _ in found)
    differences = [of for place, of in found if place == earliest and of is not None and of.num_different]
    if not differences:
        return None
    return replace(
        differences[0],
        ranks=tuple(rank for of in differences for rank in of.ranks),
        experts=tuple(sorted({expert for of in differences for expert in of.experts})),
        largest=max(of.largest for of in differences),
        num_different=sum(of.num_different for of in differences),
        num_elements=sum(of.num_elements for of in differences),
    )


def _difference(step: int, name: str, first: _TensorCopy | None, second: _TensorCopy | None) -> FirstDifference:
    """Returns the difference of one tensor on this rank."""
    there = FirstDifference(step, name, (dist.get_rank(),), dist.get_world_size(), (), math.inf, 0, 0)
    if first is None or second is None or first.whole.shape != second.whole.shape:
        elements = max(of.whole.numel() for of in (first, second) if of is not None)
        return replace(there, num_different=elements, num_elements=elements)
    differs = _differs(first.whole, second.whole)
    experts = ()
    if ".experts." in name and differs.dim() > 1:
        experts = tuple(differs.flatten(1).any(dim=1).nonzero().flatten().tolist())
    a, b = first.whole, second.whole
    # If both are sharded alike, the parts show whose part differs.
    if first.part is not None and second.part is not None and first.part.shape == second.part.shape:
        a, b = first.part, second.part
        differs = _differs(a, b)
    largest = (a.double() - b.double()).abs().flatten()[differs.flatten()].amax() if differs.any() else 0.0
    return replace(
        there, experts=experts, largest=float(largest), num_different=int(differs.sum()), num_elements=a.numel()
    )


def _alike(first: _TensorCopy | None, second: _TensorCopy | None) -> bool:
    if first is None or second is None or first.whole.shape != second.whole.shape:
        return False
    return torch.equal(_bytes(first.whole), _bytes(second.whole))


def _differs(a: Tensor, b: Tensor) -> Tensor:
    return (_bytes(a) != _bytes(b)).view(*a.shape, -1).any(dim=-1)


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, whose equality is that of bits: zeros have signs, and NaN equals nothing."""
    return tensor.contiguous().flatten().view(torch.uint8)
