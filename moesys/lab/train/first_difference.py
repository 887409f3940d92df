"""The first difference of two trainings: step by step in turns, up to the first tensor whose bits differ.

It compares, in the order in which a step computes them: outputs of all modules on each rank, gradients of these
outputs, gradients of parameters, the norm that clips, parameters, and the state of the optimizer. Sharded tensors are
compared as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesys.collectives import guarded
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import ModelTraining, Training
from moesys.lab.train.loop import Trainer
from moesys.verify.recording import Named, StepRecord, TrainingRecorder
from moesys.verify.setup import Setup, is_of_experts, local, whole

# What follows the name of a sharded tensor in that of this rank's part of it.
_PART = " (part)"


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
    trainers: list[_RecordedTrainer] = []
    try:
        trainers += (_RecordedTrainer(strategy, model, cluster, workload, seed, None) for strategy in strategies)
        for step in range(workload.warmup + workload.steps):
            first, second = (trainer.recorded(step) for trainer in trainers)
            if (difference := _first_difference(step, first, second)) is not None:
                return difference
        return None
    finally:
        for trainer in trainers:
            trainer.close()


class _RecordedTrainer(Trainer):
    """A training whose recorder takes the tensors of a step, and this rank's parts of those that are sharded."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorder = TrainingRecorder(Setup(self.model, lambda _: {}, None, full=_with_part), contributions=False)
        self._random_state = torch.get_rng_state()

    def recorded(self, step: int) -> Named:
        """Runs one optimizer step, and returns its tensors by name, in the order in which they are computed."""
        # Two trainings take turns, and each draws from where it stopped.
        torch.set_rng_state(self._random_state)
        self._recorder.begin_step()
        self.step(step)
        self._random_state = torch.get_rng_state()
        found = self._recorder.step
        # Backward computes the gradients of the last layer first.
        gradients = {f"gradient of {name}": each for name, each in reversed(found["gradient"].items())}
        return _outputs(found) | gradients | found["norm"] | found["update"]

    def clip(self) -> Tensor:
        self._recorder.step["gradient"] = self._recorder.gradients()
        norm = super().clip()
        self._recorder.step["norm"] = self._recorder.put_together([("norm of all gradients", norm)])
        return norm

    def optimize(self) -> None:
        super().optimize()
        self._recorder.step["update"] = self._recorder.put_together(self._state())

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter
            for of, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor):
                    yield f"{of} of {name}", state
        yield from self.model.named_buffers()


def _with_part(name: str, tensor: Tensor) -> Named:
    return {name: whole(tensor)} | ({f"{name}{_PART}": local(tensor)} if isinstance(tensor, DTensor) else {})


def _outputs(step: StepRecord) -> Named:
    """Returns the outputs of modules and their gradients, forward after forward."""
    found: Named = {}
    for m, outputs in step["passes"].items():
        gradients = step["output_gradients"][m]
        for kind, tensors in (("output", outputs), ("gradient of output", gradients)):
            for key, tensor in tensors.items():
                name, _, place = key.rstrip("'").removesuffix("]").rpartition("[")
                what = f"{kind} of {name}" if place == "0" else f"{kind} {place} of {name}"
                # A module runs several times, for example in several micro-batches.
                names = chain([what], (f"{what}, time {time}" for time in count(2)))
                found[next(each for each in names if each not in found)] = tensor
    return found


def _first_difference(step: int, first: Named, second: Named) -> FirstDifference | None:
    """Returns the first difference in this step. A collective."""
    names = [name for name in dict.fromkeys([*first, *second]) if not name.endswith(_PART)]
    differences = ((place, _difference(step, name, first, second)) for place, name in enumerate(names))
    mine = next((each for each in differences if each[1] is not None), (len(names), None))
    found: list[Any] = [None] * dist.get_world_size()
    guarded("bisect", dist.group.WORLD, partial(dist.all_gather_object, found, mine))
    earliest = min(place for place, _ in found)
    of_ranks = [of for place, of in found if place == earliest and of is not None and of.num_different]
    if not of_ranks:
        return None
    return replace(
        of_ranks[0],
        ranks=tuple(rank for of in of_ranks for rank in of.ranks),
        experts=tuple(sorted({expert for of in of_ranks for expert in of.experts})),
        largest=max(of.largest for of in of_ranks),
        num_different=sum(of.num_different for of in of_ranks),
        num_elements=sum(of.num_elements for of in of_ranks),
    )


def _difference(step: int, name: str, first: Named, second: Named) -> FirstDifference | None:
    """Returns the difference of one tensor on this rank; None if no bit differs."""
    there = FirstDifference(step, name, (dist.get_rank(),), dist.get_world_size(), (), math.inf, 0, 0)
    a, b = first.get(name), second.get(name)
    if a is None or b is None or a.shape != b.shape:
        elements = max(of.numel() for of in (a, b) if of is not None)
        return replace(there, num_different=elements, num_elements=elements)
    differs = _differs(a, b)
    if not differs.any():
        return None
    experts = ()
    if is_of_experts(name) and differs.dim() > 1:
        experts = tuple(differs.flatten(1).any(dim=1).nonzero().flatten().tolist())
    part, other = first.get(name + _PART), second.get(name + _PART)
    # If both are sharded alike, the parts show whose part differs.
    if part is not None and other is not None and part.shape == other.shape:
        a, b, differs = part, other, _differs(part, other)
    largest = (a.double() - b.double()).abs().flatten()[differs.flatten()].amax() if differs.any() else 0.0
    return replace(
        there, experts=experts, largest=float(largest), num_different=int(differs.sum()), num_elements=a.numel()
    )


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Returns whose bits differ: zeros have signs, and NaN equals nothing."""
    differs = torch.ne(*(of.contiguous().flatten().view(torch.uint8) for of in (a, b)))
    return differs.view(*a.shape, a.element_size()).any(dim=-1)
