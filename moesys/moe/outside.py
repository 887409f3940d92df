"""OutsideExperts: experts whose parameters another library keeps, declared in the form in which it keeps them.

Nothing is copied where a view of these parameters will do. An expert is sent as its parts one after another, with gate
and up as one matrix, as they are computed: products read views of a received expert, and gradients of parts are views
of what is collected. A rank's own experts are computed where they lie; only those that have gate and up apart are
joined in a copy, expert by expert, for as long as one pass of their layer runs.

R ranks, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moesys.config import ModelShape, Strategy
from moesys.kernels.cpu.row_invariant_ops import ParameterGradients, row_function
from moesys.moe.arguments import check_order
from moesys.moe.masters import ExpertForm, Master, Masters, Part, accumulate, local_part, part_of
from moesys.moe.store import ExpertShards
from moesys.overlap.experts_cpu import SWIGLU, ExpertFunction
from moesys.torch_private import hide_backward

# The names of parts, in the order of the wire, and those that an expert may have beside ``down``.
NAMES = ("gate_up", "gate", "up", "down", "gate_up_bias", "gate_bias", "up_bias", "down_bias")
KINDS = (("gate_up",), ("gate", "up"), ("up",))

Parts = Mapping[str, Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class OutsideExperts:
    """The parameters of another library, as ``Experts`` use them.

    read: gives this rank's parts of experts by name, whenever it is asked: ``down`` [H, I], and ``gate_up`` [2I, H], or
        ``gate`` and ``up`` [I, H], or ``up`` alone; with biases ``gate_up_bias`` [2I], ``gate_bias``, ``up_bias`` [I]
        and ``down_bias`` [H], where there are any. A part is one tensor of all experts here or a sequence of one for
        each; a parameter, ``DTensor`` or not, or computed from parameters by autograd; all of one floating dtype. With
        ``Ep`` a rank has whole experts, E/R of them; with ``Fsep`` its slice of all, cut in dimension 0 of an expert's
        tensor, but dimension 1 of ``gate_up`` [2I, H]. Parts are read where they lie, and their gradients, summed over
        the ranks of the group, come back in their dtype.
    transposed: matrices are [in, out]: ``gate_up`` [H, 2I] or ``up`` [H, I], and ``down`` [I, H]. Where gate and up are
        apart, or kernels are to compute, ``read`` gives the views ``.mT`` instead, of which a pass makes copies.
    activation: returns [N, I] of pre-activations [N, 2I], which are as ``gate_up`` has its rows, side by side or
        interleaved, or [gate | up]; without a gate of [N, I]. Any torch code that works on each row by itself; None is
        SwiGLU of [gate | up].
    weights_on: what the keeper multiplies by routing weights: outputs of experts, or activations, with the bias of
        ``down``, which is the same function.
    add_gradients: adds gradients, in the form of what ``read`` gives, to those parameters' own when backward is past
        the layer, as ``delay_reshard=True`` asks for; None if that is impossible, as with computed parts.
    adapters: LoRA on the experts, whenever it is asked: of ``gate_up`` or ``up`` [E, r, in] and [E, out, r], then of
        ``down``, in [out, in] whichever way matrices lie, all experts on each rank; None for a matrix without. Their
        product is added to the matrix by two products of rank r, a multiple of 16. Gradients are those of the experts
        that this rank computes: the sum over all ranks is whole.
    mean_over: gradients of parameters, which are ``DTensor``s that FSDP does not hold, are divided by it. As under
        FSDP, casts are made anew for backward.

    Raises ValueError, where ``Experts`` are made or parts are read, for parts that do not fit.
    """

    read: Callable[[], Parts]
    transposed: bool = False
    activation: Callable[[Tensor], Tensor] | None = None
    weights_on: Literal["outputs", "activations"] = "outputs"
    add_gradients: Callable[[Parts], None] | None = None
    adapters: Callable[[], Sequence[Tensor | None]] | None = None
    collect: Callable[[Parts], Parts] | None = None
    mean_over: int | None = None

    @torch.no_grad()
    def form(self, shape: ModelShape) -> ExpertForm:
        """Returns the parts of an expert of ``shape``."""
        found = self.read()
        names = [name for name in NAMES if name in found]
        matrices = tuple(name for name in names if name != "down" and not name.endswith("_bias"))
        biases = [f"{name}_bias" for name in matrices]
        unknown = [name for name in found if name not in (*matrices, *biases, "down", "down_bias")]
        unknown += matrices[1:] if matrices[:1] == ("gate_up",) else ()
        wanted = ["down", *(biases if any(name in found for name in biases) else [])]
        missing = [name for name in wanted if name not in found]
        if matrices not in KINDS or unknown or missing:
            wrong = f"cannot have {unknown[0]!r}" if unknown else "miss " + repr(missing[0] if missing else "up")
            raise ValueError(
                f"outside experts have the parts {[*found]} and {wrong}; read() gives down and either gate_up, or gate "
                "and up, or up alone, and biases by the same names with _bias"
            )
        if self.transposed and matrices == ("gate", "up"):
            raise ValueError(
                "outside experts have gate and up apart and transposed=True, and are computed as [gate | up] of "
                "[out, in]; let read() give .mT of each matrix, which is a view, and leave transposed out"
            )
        if self.activation is None and matrices == ("up",):
            raise ValueError("outside experts have no gate, which SwiGLU needs; give OutsideExperts(activation=...)")
        H, I = shape.hidden_size, shape.intermediate_size
        outward = {"gate_up": 2 * I, "gate": I, "up": I, "down": H}
        parts = []
        for name in names:
            size: tuple[int, ...] = (outward[name.removesuffix("_bias")],)
            if name in outward:
                inward = I if name == "down" else H
                size = (inward, *size) if self.transposed else (*size, inward)
            parts.append(Part(name, size, dim=int(name == "gate_up" and not self.transposed)))
        return ExpertForm(tuple(parts))

    def declared(self, form: ExpertForm) -> dict[str, Any]:
        """Returns what must be the same on all ranks that share experts of ``form``, as JSON values."""
        parts = {part.name: part.shape for part in form.parts}
        activation = None if self.activation is None else _name(self.activation)
        return {"parts": parts, "transposed": self.transposed, "activation": activation, "weights_on": self.weights_on}

    def function(self, form: ExpertForm) -> ExpertFunction:
        """Returns what an expert of ``form`` computes."""
        names = {part.name for part in form.parts}
        activation = SWIGLU
        if self.activation is not None:
            halves = 2 if names & {"gate", "gate_up"} else 1
            activation = row_function(self.activation, ParameterGradients((), ()), halves)
        return ExpertFunction(activation, self.transposed, biases=any(name.endswith("_bias") for name in names))

    def check(self, strategy: Strategy, function: ExpertFunction) -> None:
        """Raises ValueError where these experts, which compute ``function``, cannot run under ``strategy``."""
        if self.weights_on not in ("outputs", "activations"):
            raise ValueError(
                f"weights_on={self.weights_on!r}: routing weights that multiply the inputs of experts make another "
                'function, which moesys does not run; multiply "outputs" or "activations", or with one expert per '
                "token multiply tokens before Experts and give weights of one"
            )
        if strategy.overlap.reaches_memory and not function.has_kernels:
            way = "use Sequential() or Pipelined(chunks=...)"
            what = "biases" if function.biases else "another activation"
            if function.transposed:
                what, way = "matrices [in, out]", f"let read() give .mT of each and leave transposed out, or {way}"
            raise ValueError(
                f"strategy {strategy.name!r} has overlap={type(strategy.overlap).__name__}, whose kernels compute "
                f"SwiGLU without biases by matrices [out, in], and these experts have {what}; {way}"
            )
        if strategy.sharding.delay_reshard and self.add_gradients is None:
            raise ValueError(
                f"strategy {strategy.name!r} has delay_reshard=True, and who keeps these parameters takes no gradient "
                "later than from backward; use delay_reshard=False, or give OutsideExperts(add_gradients=...)"
            )


class OutsideMasters(Masters):
    """Masters that are the parameters of another library, of which this rank has the part that ``shards`` declares.

    They are read at every use, and never kept: FSDP frees them after forward and gathers them again for backward
    into the same storage, which no version shows.

    Raises ValueError for parts that this rank will never have: of another dtype or another shape than when they are
    whole or sharded.
    """

    def __init__(self, outside: OutsideExperts, shards: ExpertShards) -> None:
        self._outside, self._shards = outside, shards
        self._checked_mesh: DeviceMesh | None = None
        self._computed = False
        # This is where parts were in the newest forward; None before the first.
        self._device: torch.device | None = None
        with torch.no_grad():
            read = outside.read()
        kept = [read[part.name] for part in shards.form.parts]
        # How many tensors each part has; None where it is one of all experts.
        self._counts = [None if isinstance(each, Tensor) else len(each) for each in kept]
        self._tensors(read, made=True)

    @property
    def computed(self) -> bool:
        return self._computed

    def differentiable(self) -> tuple[Tensor, ...]:
        tensors = self._tensors(self._outside.read())
        self._computed, self._device = _are_computed(tensors), tensors[0].device
        local = tuple(map(local_part, tensors))
        if (number := self._outside.mean_over) is not None:
            for part, kept in zip(local, tensors, strict=True):
                if part.requires_grad and isinstance(kept, nn.Parameter):
                    part.register_hook(partial(mean_of, number))
        return local

    def by_part(self, masters: Sequence[Tensor]) -> tuple[Master, ...]:
        left = iter([master.detach() for master in masters])
        return tuple(next(left) if count is None else tuple(next(left) for _ in range(count)) for count in self._counts)

    def gradients_of(self, by_part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        kept = self._as_kept(by_part)
        if self._outside.collect is not None:
            kept = self._outside.collect(kept)
        return tuple(tensor for part in self._shards.form.parts for tensor in _each(kept[part.name]))

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        return None if self._outside.collect is None else torch.float32

    @property
    def keeps_casts(self) -> bool:
        return self._outside.mean_over is None

    @property
    def device(self) -> torch.device:
        # Parts that are computed would be computed for it.
        return self._device or _each(self._outside.read()["down"])[0].device

    @property
    def at_hand(self) -> bool:
        # Computed experts may have other values later, so backward uses those that its forward has read.
        if self._computed:
            return False
        read = self._outside.read()
        tensors = [tensor for kept in read.values() for tensor in _each(kept)]
        return not _are_computed(tensors) and not self._misfit(read, made=False)

    def expect_gradient(self, *, late: bool) -> None:
        # FSDP, where it holds parameters, has hooks of its own in the place of autograd's.
        if self._outside.mean_over is not None:
            for parameter in chain.from_iterable(map(_each, self._outside.read().values())):
                hide_backward(parameter, hide=late)

    def accumulate_gradient(self, gradients: Sequence[Tensor]) -> None:
        if (number := self._outside.mean_over) is None:
            assert self._outside.add_gradients is not None
            self._outside.add_gradients(self._as_kept(gradients))
            return
        # Gradients of whole experts have fewer rows than slices of all.
        is_whole = len(gradients[0]) != self._shards.master_shapes[0][0]
        for parameter, gradient in zip(self._tensors(self._outside.read()), gradients, strict=True):
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                assert isinstance(parameter, nn.Parameter)
                placements = (Shard(0),) if is_whole else parameter.placements
                accumulate(parameter, part_of(parameter, gradient.contiguous() / number, placements))

    def _as_kept(self, by_part: Sequence[Tensor]) -> Parts:
        parts = zip(self._shards.form.parts, by_part, self._counts, strict=True)
        return {part.name: tensor if count is None else tensor.unbind() for part, tensor, count in parts}

    def _tensors(self, read: Parts, *, made: bool = False) -> list[Tensor]:
        """Returns the tensors of all parts, once they are checked. ``made``: when experts are made."""
        names = [part.name for part in self._shards.form.parts]
        if sorted(read) != sorted(names):
            raise ValueError(f"outside experts have the parts {[*read]} now, and were made of {names}; give the same")
        if wrong := self._misfit(read, made=made):
            raise ValueError(f"outside experts have {wrong}")
        tensors = [tensor for name in names for tensor in _each(read[name])]
        if len({tensor.dtype for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
            dtypes = ", ".join(f"{name} of {_each(read[name])[0].dtype}" for name in names)
            raise ValueError(f"outside experts have parts of several dtypes, {dtypes}; give all one floating dtype")
        for tensor in tensors:
            if isinstance(tensor, DTensor) and tensor.device_mesh is not self._checked_mesh:
                check_order(tensor.device_mesh)
                self._checked_mesh = tensor.device_mesh
        return tensors

    def _misfit(self, read: Parts, *, made: bool) -> str:
        """Returns which part is not this rank's, and why; nothing if all are. ``made``: when experts are made, and
        parts may still be whole, or be sharded in more ways.
        """
        for part, wanted in zip(self._shards.form.parts, self._shards.master_shapes, strict=True):
            kept = read[part.name]
            rows = () if isinstance(kept, Tensor) else (len(kept),)
            allowed = {wanted, (self._shards.shape.num_experts, *part.shape)} if made else {wanted}
            for tensor in _each(kept):
                found = (*rows, *local_part(tensor).shape)
                if found in allowed or (made and (*rows, *tensor.shape) in allowed):
                    continue
                way = "shard them over exactly the ranks of the group, as the strategy's sharding does"
                if found[1:] == wanted[:0:-1]:
                    way = f"declare OutsideExperts(transposed={not self._outside.transposed}), if all matrices lie so"
                elif found[1:] != wanted[1:]:
                    way = f"give tensors of {part.shape} for each expert, and {way}"
                return f"{part.name!r} of shape {found}, not this rank's part of the experts, {wanted}; {way}"
            if not _each(kept):
                return f"no tensor of {part.name!r} on this rank; use fewer ranks in a group, or stack experts"
        return ""


def _are_computed(tensors: Sequence[Tensor]) -> bool:
    """Returns whether tensors may be computed anew whenever they are read, with or without gradients."""
    return not all(isinstance(tensor, nn.Parameter) for tensor in tensors)


def mean_of(number: int, gradient: Tensor | None) -> Tensor | None:
    """Returns a gradient divided by ``number``, in its own memory if it lies as ``.grad`` does, which it becomes; None
    if it comes later.
    """
    if gradient is None or (number == 1 and gradient.is_contiguous()):
        return gradient
    return gradient.div_(number) if gradient.is_contiguous() else gradient / number


def _name(function: Any) -> str:
    """Returns the name of a function, or of the class of a callable object, as far as it is the same on all ranks."""
    if isinstance(function, partial):
        options = {name: each for name, each in function.keywords.items() if isinstance(each, int | float | str)}
        return f"{_name(function.func)} {options}"
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def _each(kept: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [kept] if isinstance(kept, Tensor) else kept
