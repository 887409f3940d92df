"""What a training computes in a step: outputs of modules and their gradients, the contributions of micro-batches to
the gradients of parameters, and all that the optimizer changes. Records are files of the folder that worlds share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesys.torch_private import NO_BACKWARD, Float64Mode, current_backward
from moesys.verify.setup import (
    Batch,
    Build,
    CheckOptions,
    Setup,
    Situation,
    World,
    batch_of,
    clean_name,
    is_of_experts,
    local,
    whole,
)

T = TypeVar("T")
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


@dataclass
class StepRecord:
    """All that is compared of one step of one process.

    passes, output_gradients: per forward of the model, by ``module[place]``. repeats: outputs in which a recomputation
    differs from its forward. gradients: by parameter, after ``step``. absent: parameters whose gradient is None.
    squares: of this rank's own part of each gradient. contributions: per forward, the increase of each gradient up to
    the next one; only of a reference. evaluation: losses of ``evaluate``, by part. counted: buffers that it changed.
    """

    passes: list[Named] = field(default_factory=list)
    output_gradients: list[Named] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    squares: dict[str, float] = field(default_factory=dict)
    contributions: list[Named] = field(default_factory=list)
    norm: float | None = None
    clipped: Named = field(default_factory=dict)
    update: Named = field(default_factory=dict)
    buffer: Named = field(default_factory=dict)
    evaluation: dict[int, float] = field(default_factory=dict)
    counted: list[str] = field(default_factory=list)


@dataclass
class RunRecord:
    """A run of one process.

    initial, trained: parameters and buffers before the first and after the last step; ``trained`` before a step that
    is taken after a checkpoint. drawn_by: the first module whose forward draws random numbers; "" if none does.
    """

    part: int
    parts: int
    initial: Named
    trained: Named
    steps: list[StepRecord]
    drawn_by: str = ""


@dataclass(frozen=True)
class RecordingJob:
    """What a process records.

    parts: the parts whose micro-batches a reference computes, all of them; 0 on ranks. order: ``reordered`` has rows
    and micro-batches in another order, ``whole`` all micro-batches as one. without: the loss term that is switched off.
    resume: the training is loaded from the folder, and takes the step after the last one.
    """

    build: Build
    options: CheckOptions
    situation: Situation
    dtype: torch.dtype
    folder: Path
    parts: int = 0
    steps: int = 2
    order: str = ""
    without: str = ""
    resume: bool = False

    @property
    def name(self) -> str:
        words = ("reference" if self.parts else "rank", self.order, self.without, "resumed" * self.resume)
        return re.sub(r"\W+", "-", "-".join(filter(None, words)))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors of what a module returns; of a complex one its real and imaginary parts as one tensor."""
    if isinstance(output, Tensor):
        yield torch.view_as_real(output) if output.is_complex() else output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, list | tuple):
        for each in output:
            yield from tensors_in(each)


class TrainingRecorder:
    """Hooks on all modules of a model, which fill a ``StepRecord``, and its parameters under the reference's names."""

    def __init__(self, setup: Setup, *, contributions: bool) -> None:
        self._setup, self._contributes = setup, contributions
        self.is_on, self.drawn_by = True, ""
        self._random_state, self._snapshots = torch.get_rng_state(), list[Named]()
        self.step = StepRecord()
        ignored = [re.compile(pattern) for pattern in setup.ignore]
        setup.model.register_forward_pre_hook(self._begin_pass)
        for name, module in setup.model.named_modules():
            name = clean_name(name)
            # Modules inside of experts hold other tokens on ranks.
            if not is_of_experts(name) and not any(pattern.search(name) for pattern in ignored):
                module.register_forward_hook(self._seen_by(name or "model"))

    def begin_step(self) -> None:
        self.step, self._snapshots, self._random_state = StepRecord(), [], torch.get_rng_state()

    def end_step(self) -> None:
        """Takes the gradients, and the contributions of the passes to them."""
        self.step.gradients, self.step.absent = self.gradients()
        for before, after in pairwise([*self._snapshots, self.step.gradients]):
            self.step.contributions.append({n: g - before[n] if n in before else g for n, g in after.items()})
        self.step.squares = {
            clean_name(name): float(local(p.grad).double().square().sum())
            for name, p in self._setup.model.named_parameters()
            if p.grad is not None
        }
        self._watch_random_state("the step itself")

    @torch.no_grad()
    def put_together(self, tensors: Iterable[tuple[str, Tensor]]) -> Named:
        """Returns copies of whole tensors, by the reference's names. A collective."""
        found: Named = {}
        for name, tensor in tensors:
            whole = self._setup.full(clean_name(name), tensor.detach())
            found |= {key: each.detach().clone() for key, each in whole.items()}
        return found

    def gradients(self) -> tuple[Named, set[str]]:
        """Returns the gradients, put together, and the parameters that have none on this rank. A collective."""
        trained = {name: p for name, p in self._setup.model.named_parameters() if p.requires_grad}
        absent = {name for name, parameter in trained.items() if parameter.grad is None}
        # Other ranks may have a gradient, and putting a DTensor together takes them all.
        parts = {n: torch.zeros_like(p) if n in absent else p.grad for n, p in trained.items()}
        there = [(n, g) for n, g in parts.items() if g is not None and (n not in absent or isinstance(g, DTensor))]
        return self.put_together(there), {clean_name(name) for name in absent}

    def _begin_pass(self, *_: Any) -> None:
        if self.is_on and current_backward() == NO_BACKWARD:
            self.step.passes.append({})
            self.step.output_gradients.append({})
            if self._contributes:
                self._snapshots.append(self.gradients()[0])

    def _seen_by(self, name: str) -> Any:
        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.is_on and self.step.passes:
                self._watch_random_state(f"{name} ({type(module).__name__})")
                for place, tensor in enumerate(tensors_in(output)):
                    self._see(f"{name}[{place}]", tensor)

        return see

    def _watch_random_state(self, where: str) -> None:
        if not self.drawn_by and not torch.equal(self._random_state, torch.get_rng_state()):
            self.drawn_by = where

    @torch.no_grad()
    def _see(self, key: str, tensor: Tensor) -> None:
        outputs, gradients = self.step.passes[-1], self.step.output_gradients[-1]
        sharded = isinstance(tensor, DTensor)
        if current_backward() != NO_BACKWARD:
            # A recomputation must repeat the choices of one of the forwards.
            chosen = [each[key] for each in self.step.passes if key in each] if not sharded else []
            if chosen and not tensor.is_floating_point() and not any(torch.equal(tensor, each) for each in chosen):
                self.step.repeats.append(key)
            return
        while key in outputs:
            key += "'"
        outputs[key] = whole(tensor)
        if tensor.requires_grad and not sharded:
            tensor.register_hook(lambda gradient: gradients.__setitem__(key, gradient.detach().clone()))


def in_world(function: Callable[[RecordingJob], T], job: RecordingJob) -> T:
    """Calls a function with the default dtype and the random state with which a training begins."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(job.dtype)
    torch.manual_seed(0)
    try:
        with Float64Mode(grouped_product) if job.dtype == torch.float64 else nullcontext():
            return function(job)
    finally:
        torch.set_default_dtype(previous)


def prepare(job: RecordingJob) -> dict[str, bool]:
    """Builds the training, which may leave a checkpoint in the folder for other processes, and returns whether it has
    the functions that some situations need.
    """
    setup = _built(job)
    return {"evaluate": setup.evaluate is not None, "save": None not in (setup.save, setup.load)}


def _built(job: RecordingJob) -> Setup:
    size, rank = dist.get_world_size(), dist.get_rank()
    setup = job.build(World(size, rank, job.folder, job.dtype, job.situation, torch.device("cpu")))
    if not isinstance(setup, Setup):
        raise TypeError(f"the check returned {type(setup).__name__}; return a moesys.verify.Setup")
    setup.part, setup.parts = (b if a is None else a for a, b in ((setup.part, rank), (setup.parts, size)))
    return setup


def record(job: RecordingJob) -> tuple[int, int, list[str]]:
    """Runs a training in this process, a rank of the default group, and writes the record into the folder.

    Returns the part of this rank, the number of parts, and the loss terms that can be switched off.
    """
    setup, situation = _built(job), job.situation
    part, parts = setup.part or 0, setup.parts or 1
    for term, switch in setup.terms.items():
        switch(term != job.without)
    if job.resume and setup.load is not None:
        setup.load(job.folder / "checkpoint")
    recorder = TrainingRecorder(setup, contributions=job.parts > 0)
    before = recorder.put_together(setup.model.named_parameters())
    initial = trained = before | recorder.put_together(setup.model.named_buffers())
    first, steps = situation.steps * job.resume, []
    for step in range(first, first + job.steps):
        if setup.save is not None and step == situation.steps and not job.resume:
            setup.save(job.folder / "checkpoint")
        steps.append(_step(setup, recorder, _batches(job, part, step)))
        after = recorder.put_together(setup.model.named_parameters())
        steps[-1].update = {name: after[name] - before[name] for name in after}
        steps[-1].buffer, before = recorder.put_together(setup.model.named_buffers()), after
        trained = after | steps[-1].buffer if step < situation.steps else trained
        if situation.needs == "evaluate":
            _evaluate(job, setup, recorder, steps[-1], part)
    run = RunRecord(part, parts, initial, trained, steps, recorder.drawn_by)
    torch.save(run, job.folder / f"{job.name}-{dist.get_rank()}.pt")
    return part, parts, list(setup.terms)


def read_record(job: RecordingJob, rank: int = 0) -> RunRecord:
    """Returns the record of a rank, whose tensors are read from the file when they are used."""
    found: RunRecord = torch.load(job.folder / f"{job.name}-{rank}.pt", mmap=True, weights_only=False)
    return found


def _step(setup: Setup, recorder: TrainingRecorder, batches: list[Batch]) -> StepRecord:
    recorder.begin_step()
    logged = setup.step(batches)
    if not isinstance(logged, Mapping) or "loss" not in logged:
        raise ValueError(f"step returned {type(logged).__name__}, which has no 'loss'; return {{'loss': ...}}")
    record = recorder.step
    record.logged = {name: float(value) for name, value in logged.items()}
    recorder.end_step()
    if setup.clip is not None:
        record.norm = float(setup.clip())
        record.clipped, _ = recorder.gradients()
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return record


def _batches(job: RecordingJob, part: int, step: int) -> list[Batch]:
    """Returns the micro-batches of a step of this process, in the order in which it computes them."""
    places = [(p, m) for p in range(job.parts or 1) for m in range(job.situation.micro_batches)]
    batches = [batch_of(job.options, job.situation, p if job.parts else part, m, step) for p, m in places]
    if job.order.startswith("reordered"):
        batches = [{name: tensor.flip(0) for name, tensor in batch.items()} for batch in reversed(batches)]
    if job.order.endswith("whole"):
        batches = [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}]
    return batches


@torch.no_grad()
def _evaluate(job: RecordingJob, setup: Setup, recorder: TrainingRecorder, step: StepRecord, part: int) -> None:
    assert setup.evaluate is not None
    recorder.is_on = False
    for each in range(job.parts) if job.parts else (part,):
        step.evaluation[each] = float(setup.evaluate(batch_of(job.options, job.situation, each, 0, 1000)))
    recorder.is_on, after = True, recorder.put_together(setup.model.named_buffers())
    step.counted = [name for name, tensor in after.items() if not torch.equal(tensor, step.buffer[name])]
