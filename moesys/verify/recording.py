"""What a training computes in a step: outputs of modules and their gradients, the contributions of micro-batches to
the gradients of parameters, and all that the optimizer changes. Records are files of the folder that worlds share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesys.torch_private import NO_BACKWARD, Float64Mode, current_backward
from moesys.verify.setup import Batch, RecordingJob, Setup, World, batch_of, clean_name, is_of_experts, local, whole

Named = dict[str, Tensor]


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Returns what ``torch._grouped_mm`` does: [M, K] × [G, K, N] for rows in groups that end at ``ends``, or [M, K] ×
    [K, N] → [G, M, N] for groups of the inner dimension. Rows behind the last group are NaN, where the kernel leaves
    memory as it was, so that an operator that reads them is found.
    """
    bounds = [0, *ends.tolist()]
    if b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(bounds)])
    rows = [a[i:j] @ b[group] for group, (i, j) in enumerate(pairwise(bounds))]
    return torch.cat([*rows, a.new_full((len(a) - bounds[-1], b.shape[-1]), math.nan)])


class StepRecord(dict[str, dict[Any, Any]]):
    """All that is compared of one step of one process, by kind, and then by name.

    passes, output_gradients: of each forward of the model the tensors, by ``module[place]``. broken: the first tensor
    that breaks a rule, by the rule: choices that a recomputation does not repeat, buffers that an evaluation changes.
    logged. gradient: by parameter, after ``step``. absent: parameters whose gradient is None. squares: of this rank's
    own part of each gradient. contributions: of each forward the increase of each gradient up to the next one; only of
    a reference. norm, clipped, update, buffer. evaluation: losses of ``evaluate``, by part.
    """

    def __missing__(self, kind: str) -> dict[Any, Any]:
        return self.setdefault(kind, {})


@dataclass
class RunRecord:
    """A run of one process.

    initial, trained: parameters and buffers before the first and after the last step; ``trained`` before a step that
    is taken after a checkpoint. drawn_by: the first module whose forward draws random numbers; "" if none does. terms:
    those that can be switched off. able: whether it has what some situations need.
    """

    part: int
    parts: int
    initial: Named
    trained: Named
    steps: list[StepRecord]
    drawn_by: str
    terms: list[str]
    able: dict[str, bool]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors of what a module returns; of a complex one its real and imaginary parts as one tensor."""
    if isinstance(output, Tensor):
        yield torch.view_as_real(output) if output.is_complex() else output
    elif isinstance(output, Mapping | list | tuple):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(each)


class TrainingRecorder:
    """Hooks on all modules of a model, which fill a ``StepRecord``, and its parameters under the reference's names."""

    def __init__(self, setup: Setup, *, contributions: bool) -> None:
        self._setup, self._contributes, self.is_on, self.drawn_by = setup, contributions, True, ""
        self.begin_step()
        setup.model.register_forward_pre_hook(self._begin_pass)
        for name, module in setup.model.named_modules():
            name = clean_name(name)
            # Modules inside of experts hold other tokens on ranks.
            if not is_of_experts(name) and not any(re.search(pattern, name) for pattern in setup.ignore):
                module.register_forward_hook(partial(self._see, name or "the model"))

    def begin_step(self) -> None:
        self.step, self._snapshots, self._random_state = StepRecord(), list[Named](), torch.get_rng_state()

    def end_step(self) -> None:
        """Takes the gradients, and the contributions of the passes to them."""
        self.step["gradient"] = self.gradients()
        for m, (before, after) in enumerate(pairwise([*self._snapshots, self.step["gradient"]])):
            self.step["contributions"][m] = {n: g - before[n] if n in before else g for n, g in after.items()}
        for name, parameter in self._setup.model.named_parameters():
            if (gradient := _gradient_of(parameter)) is not None:
                self.step["squares"][clean_name(name)] = float(local(gradient).double().square().sum())
            elif parameter.requires_grad:
                self.step["absent"][clean_name(name)] = True
        self._watch_random_state("the step itself")

    @torch.no_grad()
    def put_together(self, tensors: Iterable[tuple[str, Tensor]]) -> Named:
        """Returns copies of whole tensors, by the reference's names. A collective."""
        found: Named = {}
        for name, tensor in tensors:
            found |= self._setup.full(clean_name(name), tensor.detach())
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def gradients(self) -> Named:
        """Returns the gradients, put together. A collective."""
        trained = [(n, p, _gradient_of(p)) for n, p in self._setup.model.named_parameters() if p.requires_grad]
        # Other ranks may have a gradient, and putting a DTensor together takes them all.
        present = [(n, p, g) for n, p, g in trained if g is not None or isinstance(p, DTensor)]
        return self.put_together((n, torch.zeros_like(p) if g is None else g) for n, p, g in present)

    def _begin_pass(self, *_: Any) -> None:
        if self.is_on and current_backward() == NO_BACKWARD:
            for kind in ("passes", "output_gradients"):
                self.step[kind][len(self.step[kind])] = {}
            if self._contributes:
                self._snapshots.append(self.gradients())

    def _watch_random_state(self, where: str) -> None:
        if not self.drawn_by and not torch.equal(self._random_state, torch.get_rng_state()):
            self.drawn_by = where

    @torch.no_grad()
    def _see(self, name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not self.is_on or not self.step["passes"]:
            return
        self._watch_random_state(f"{name} ({type(module).__name__})")
        passes = self.step["passes"]
        outputs, gradients = passes[len(passes) - 1], self.step["output_gradients"][len(passes) - 1]
        for place, tensor in enumerate(tensors_in(output)):
            key, sharded = f"{name}[{place}]", isinstance(tensor, DTensor)
            if current_backward() != NO_BACKWARD:
                # A recomputation must repeat the choices of one of the forwards.
                chosen = [each[key] for each in passes.values() if key in each] if not sharded else []
                if chosen and not tensor.is_floating_point() and not any(torch.equal(tensor, each) for each in chosen):
                    self.step["broken"].setdefault("choices", key)
                continue
            while key in outputs:
                key += "'"
            outputs[key] = whole(tensor)
            if tensor.requires_grad and not sharded:
                tensor.register_hook(lambda gradient, key=key: gradients.__setitem__(key, gradient.detach().clone()))


def record(job: RecordingJob) -> None:
    """Runs a training in this process, a rank of the default group, and writes the record into the folder."""
    torch.set_default_dtype(job.dtype)
    torch.manual_seed(0)
    with Float64Mode(grouped_product) if job.dtype == torch.float64 else nullcontext():
        torch.save(_run(job), job.file(dist.get_rank()))


def _run(job: RecordingJob) -> RunRecord:
    size, rank, situation = dist.get_world_size(), dist.get_rank(), job.situation
    setup = job.build(World(size, rank, job.folder, job.dtype, situation, torch.device("cpu")))
    if not isinstance(setup, Setup):
        raise TypeError(f"the check returned {type(setup).__name__}; return a moesys.verify.Setup")
    part, parts = rank if setup.part is None else setup.part, size if setup.parts is None else setup.parts
    for term, switch in setup.terms.items():
        switch(term != job.without)
    if job.resume and setup.load is not None:
        setup.load(job.folder / "checkpoint")
    if job.order.startswith("reordered"):
        _round_anew(setup.model, job.dtype)
    recorder, model = TrainingRecorder(setup, contributions=job.parts > 0), setup.model
    before = recorder.put_together(model.named_parameters())
    initial = trained = before | recorder.put_together(model.named_buffers())
    first, steps = situation.steps * job.resume, list[StepRecord]()
    for step in range(first, first + job.steps):
        if setup.save is not None and step == situation.steps and not job.resume:
            setup.save(job.folder / "checkpoint")
        recorder.begin_step()
        logged, found = setup.step(_batches(job, part, step)), recorder.step
        if not isinstance(logged, Mapping) or "loss" not in logged:
            raise ValueError(f"step returned {type(logged).__name__}, which has no 'loss'; return {{'loss': ...}}")
        found["logged"] = {name: _number(value) for name, value in logged.items()}
        recorder.end_step()
        if setup.clip is not None:
            found["norm"], found["clipped"] = {"norm that clips": _number(setup.clip())}, recorder.gradients()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        after, found["buffer"] = map(recorder.put_together, (model.named_parameters(), model.named_buffers()))
        found["update"], before = {name: after[name] - before[name] for name in after}, after
        trained = after | found["buffer"] if step < situation.steps else trained
        if situation.needs == "evaluate":
            _evaluate(job, setup, recorder, part)
        steps.append(found)
    able = {"evaluate": setup.evaluate is not None, "save": None not in (setup.save, setup.load)}
    return RunRecord(part, parts, initial, trained, steps, recorder.drawn_by, list(setup.terms), able)


@torch.no_grad()
def _round_anew(model: nn.Module, dtype: torch.dtype) -> None:
    """Moves each parameter by about one unit in its last place, up or down: the rows of a batch in another order do not
    change the order of sums over its width, as tensor parallelism does.
    """
    random = torch.Generator().manual_seed(1)
    for parameter in map(local, model.parameters()):
        signs = torch.randint(0, 2, parameter.shape, generator=random) * 2 - 1
        parameter.mul_(1 + signs * torch.finfo(dtype).eps)


def _batches(job: RecordingJob, part: int, step: int) -> list[Batch]:
    """Returns the micro-batches of a step of this process, in the order in which it computes them."""
    places = product(range(job.parts) or (part,), range(job.situation.micro_batches))
    batches = [batch_of(job.options, job.situation, *place, step) for place in places]
    if job.order.startswith("reordered"):
        batches = [{name: tensor.flip(0) for name, tensor in batch.items()} for batch in reversed(batches)]
    if job.order.endswith("whole"):
        batches = [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}]
    return batches


@torch.no_grad()
def _evaluate(job: RecordingJob, setup: Setup, recorder: TrainingRecorder, part: int) -> None:
    assert setup.evaluate is not None
    recorder.is_on, step = False, recorder.step
    for each in range(job.parts) or (part,):
        loss = setup.evaluate(batch_of(job.options, job.situation, each, 0, 1000))
        step["evaluation"][f"loss of evaluate, part {each}"] = _number(loss)
    recorder.is_on, after = True, recorder.put_together(setup.model.named_buffers())
    for name in [name for name, tensor in after.items() if not torch.equal(tensor, step["buffer"][name])]:
        step["broken"].setdefault("evaluation", name)


def _gradient_of(parameter: Tensor) -> Tensor | None:
    """Returns a parameter's gradient, which Megatron-Core adds up in ``main_grad``."""
    return getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad


def _number(value: Any) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
