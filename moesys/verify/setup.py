"""What a check declares: the training that it builds for a world of one rank or of several, and how it is checked.

R ranks, of which P parts read data of their own; A micro-batches of a part.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moesys.kinds import did_you_mean

# ``input_ids``, ``labels`` and ``attention_mask``, each [B, S]; labels are -100 where a token has no loss.
Batch = dict[str, Tensor]
NO_LABEL = -100


@dataclass(frozen=True)
class Situation:
    """The circumstances of a run, selected by ``name``. A check that reads a field lists ``needs`` in ``supports``.

    Args:
        name: the name.
        micro_batches: micro-batches of each part in a step, A.
        rows: sequences of a micro-batch.
        length: tokens of a sequence.
        steps: steps of the optimizer.
        uneven: 25 to 85 % of the tokens have a label, fewer on later parts.
        padding: every second micro-batch of all parts has padded ends.
        no_labels: part 1 has no label at all.
        repeated: a micro-batch repeats one token, so that all its tokens choose the same experts, and no others.
        sync: gradients are synchronised in each micro-batch; otherwise only in the last one.
        recomputation: ``full`` or ``selective`` activation checkpointing.
        frozen: what does not train: ``experts``, ``routers``, or ``all but routers``.
        tied: the embeddings and the head share their weight.
        two_forwards: two micro-batches run forward before the first runs backward.
        dropout: dropout is on. Parts then get the same data, and must draw different masks.
        needs: what the check must list in ``supports``, or ``evaluate`` or ``save`` of its setup.
        seed: seed of the batches.
    """

    name: str = "plain"
    micro_batches: int = 1
    rows: int = 2
    length: int = 24
    steps: int = 2
    uneven: bool = False
    padding: bool = False
    no_labels: bool = False
    repeated: bool = False
    sync: bool = True
    recomputation: str = ""
    frozen: str = ""
    tied: bool = False
    two_forwards: bool = False
    dropout: bool = False
    needs: str = ""
    seed: int = 0


_SITUATIONS = (
    Situation("plain"),
    Situation("uneven", 3, uneven=True),
    Situation("padding", 2, uneven=True, padding=True),
    Situation("recomputation", recomputation="full", needs="recomputation"),
    Situation("selective", recomputation="selective", needs="selective"),
    Situation("no_labels", uneven=True, no_labels=True),
    Situation("few_tokens", rows=1, length=3),
    Situation("one_expert", repeated=True),
    Situation("accumulation", 3, uneven=True, sync=False, needs="accumulation"),
    Situation("frozen", frozen="experts", needs="frozen"),
    Situation("frozen_routers", frozen="routers", needs="frozen"),
    Situation("routers_only", frozen="all but routers", needs="frozen"),
    Situation("tied", tied=True, needs="tied"),
    Situation("two_forwards", 2, two_forwards=True, needs="two_forwards"),
    Situation("evaluation", needs="evaluate"),
    Situation("checkpoint", needs="save"),
    Situation("dropout", steps=1, dropout=True, needs="dropout"),
)
SITUATIONS = {situation.name: situation for situation in _SITUATIONS}


@dataclass(frozen=True)
class World:
    """The ranks that a training is built for. A world of one rank builds the plain model, which is the reference.

    Args:
        size: the number of ranks, R.
        rank: the rank of this process.
        folder: a folder that all worlds of a check share; the world of one rank is built first.
        dtype: the dtype of parameters, which is torch's default dtype as well.
        situation: the circumstances of the run.
        device: the device of this rank.
    """

    size: int
    rank: int
    folder: Path
    dtype: torch.dtype
    situation: Situation
    device: torch.device


def whole(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor, put together from the parts of all ranks if it is a ``DTensor``. A collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's own part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Setup:
    """A training, as a check builds it for a ``World``.

    Args:
        model: the model, wrapped or not. Names are compared without those of wrappers.
        step: forward and backward of this rank's micro-batches, and whatever else comes before clipping. It takes the
            number of micro-batches from its argument, of which the reference gets P · A. Returns the numbers that the
            trainer logs, global ones, ``loss`` among them.
        optimizer: what moves parameters, biases and schedules, by ``step()``; it has ``zero_grad()`` too.
        clip: scales the gradients, and returns the norm that they had before.
        part: which of the data this rank reads; by default its rank.
        parts: the number of parts; by default the size of the world. Ranks that share a batch have the same part.
        terms: switches of loss terms beside the main loss, such as ``{"auxiliary loss": set_coefficient}``.
        full: puts a tensor of this rank together, given its name, and returns it under the names of the reference. A
            collective. By default DTensors are put together, and all others must be alike on all ranks of a part.
        evaluate: returns the loss of one batch alone.
        save: saves parameters, buffers and optimizer into a folder. A collective.
        load: loads them, also in a world of another size.
        ignore: regular expressions of modules whose outputs hold other tokens than the reference's.
    """

    model: nn.Module
    step: Callable[[list[Batch]], Mapping[str, Any]]
    optimizer: Any
    clip: Callable[[], Any] | None = None
    part: int | None = None
    parts: int | None = None
    terms: Mapping[str, Callable[[bool], object]] = field(default_factory=dict)
    full: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, tensor: {name: whole(tensor)}
    evaluate: Callable[[Batch], Any] | None = None
    save: Callable[[Path], object] | None = None
    load: Callable[[Path], object] | None = None
    ignore: Sequence[str] = ()


Build = Callable[[World], Setup]
B = TypeVar("B", bound=Callable[..., Setup])


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """A decorator that marks a function, which builds a training for a ``World``, as a check with these options.

    Args:
        ranks: the number of ranks.
        vocabulary: the number of token ids that batches are drawn from.
        supports: what the function reads of ``world.situation``: ``recomputation``, ``selective``, ``accumulation``,
            ``frozen``, ``tied``, ``two_forwards``, ``dropout``.
        dtype: float64, or float32 for models that refuse float64.
        expects: ``token_mean`` if every token of the global batch must have the same weight in the main loss.
        batches: returns the batch of (situation, part, micro-batch, step), always the same one.

    Raises ValueError for a value that is not allowed.
    """

    ranks: int = 2
    vocabulary: int = 64
    supports: Sequence[str] = ()
    dtype: torch.dtype = torch.float64
    expects: str = ""
    batches: Callable[[Situation, int, int, int], Batch] | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "vocabulary"):
            if (value := getattr(self, name)) < 2:
                raise ValueError(f"{name}={value} must be at least 2")
        known = {each.needs for each in SITUATIONS.values()} - {"", "evaluate", "save"}
        for each in self.supports:
            if each not in known:
                raise ValueError(f"supports has {each!r}, which is none of {sorted(known)}{did_you_mean(each, known)}")
        if self.dtype not in (torch.float64, torch.float32):
            raise ValueError(f"dtype={self.dtype} must be torch.float64 or torch.float32")
        if self.expects not in ("", "token_mean"):
            raise ValueError(f"expects={self.expects!r} must be 'token_mean', or left out")

    def __call__(self, build: B) -> B:
        build.check_options = self  # type: ignore[attr-defined]
        return build


check = CheckOptions


@dataclass(frozen=True)
class RecordingJob:
    """The choice of what a process records.

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

    def file(self, rank: int) -> Path:
        """Returns the file of a rank's record."""
        return self.folder / re.sub(r"\W+", "-", f"{self.parts} {self.order} {self.without} {self.resume} {rank}")


def batch_of(options: CheckOptions, situation: Situation, part: int, micro_batch: int, step: int) -> Batch:
    """Returns a micro-batch, which is a pure function of the arguments."""
    if options.batches is not None:
        return options.batches(situation, part, micro_batch, step)
    seed = zlib.crc32(f"{situation.seed} {0 if situation.dropout else part} {micro_batch} {step}".encode())
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(options.vocabulary, (situation.rows, situation.length), generator=random)
    ids = ids[:1, :1].expand_as(ids).clone() if situation.repeated else ids
    labels, mask = ids.clone(), torch.ones_like(ids)
    if situation.uneven:
        # The same numbers whatever the default dtype is.
        draws = torch.rand(ids.numel() + 1, generator=random, dtype=torch.float64)
        labels[draws[1:].view_as(ids) > 0.25 + 0.6 * draws[0] / (1 + part)] = NO_LABEL
        # A micro-batch without any label would be another situation.
        labels[0, 1] = ids[0, 1]
    if situation.padding and (part + micro_batch) % 2:
        mask[:, situation.length * 2 // 3 :] = 0
    labels[(mask == 0) | (situation.no_labels and part == 1)] = NO_LABEL
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@torch.no_grad()
def draw(model: nn.Module, seed: int = 0, deviation: float = 0.1) -> None:
    """Draws all parameters of a model by their names alone, in float64 and then cast, so that they do not depend on
    the dtype, the sharding or the number of ranks. Vectors are drawn around 1 if "norm" is in their names, or around 0.
    """
    for name, parameter in model.named_parameters():
        name = clean_name(name)
        random = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = deviation * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        values = (values + ("norm" in name)).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local(parameter).copy_(local(values))


_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def clean_name(name: str) -> str:
    """Returns the name of a module or parameter without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def count_labels(batch: Batch) -> int:
    """Returns how many tokens of a causal language model have a loss: each predicts the next one."""
    return int((batch["labels"][:, 1:] != NO_LABEL).sum())


def is_of_experts(name: str) -> bool:
    """Returns whether a module or parameter is inside of experts."""
    return ".experts." in f".{name}"
