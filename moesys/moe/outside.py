"""OutsideExperts: experts whose parameters another library keeps, declared in the form in which it keeps them.

Nothing is copied where a view of these parameters will do. What is sent is an expert's parts one behind the other,
where gate and up are the one matrix that they are computed as, so that a received expert is views for products, and the
gradients of all parts are views of what is collected. A rank's own experts are computed where they lie; only those that
have gate and up apart are joined in a copy, expert by expert, for as long as one pass of their layer runs.

R ranks, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moesys.config import Fsep, ModelShape, Strategy
from moesys.kernels.cpu.row_invariant_ops import ParameterGradients, row_function
from moesys.moe.arguments import check_order
from moesys.moe.masters import ExpertForm, Master, Masters, Part, local_part
from moesys.moe.store import ExpertShards
from moesys.overlap.experts_cpu import SWIGLU, ExpertFunction

# The names of parts, in the order of the wire, and those that an expert may have beside ``down``.
NAMES = ("gate_up", "gate", "up", "down", "gate_up_bias", "gate_bias", "up_bias", "down_bias")
KINDS = (("gate_up",), ("gate", "up"), ("up",))

Parts = Mapping[str, Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class OutsideExperts:
    """The parameters of somebody else, as ``Experts`` use them.

    read: gives this rank's parts of experts by name, whenever it is asked: ``down`` [H, I], and ``gate_up`` [2I, H], or
        ``gate`` and ``up`` [I, H], or ``up`` alone; with biases ``gate_up_bias`` [2I], ``gate_bias``, ``up_bias`` [I]
        and ``down_bias`` [H], where there are any. A part is one tensor of all experts here or a sequence of one for
        each; a parameter, ``DTensor`` or not, or computed from parameters by autograd; all of one floating dtype. With
        ``Ep`` a rank has whole experts, E/R of them; with ``Fsep`` its slice of all, cut in dimension 0 of an expert's
        tensor, but dimension 1 of ``gate_up`` [2I, H]. Parts are read where they lie, and their gradients, summed over
        the ranks of the group, come back in their dtype.
    transposed: matrices are [in, out]: ``gate_up`` [H, 2I], ``gate`` and ``up`` [H, I], ``down`` [I, H].
    activation: returns [N, I] of pre-activations [N, 2I], which are as ``gate_up`` has its rows, side by side or
        interleaved, or [gate | up]; without a gate of [N, I]. Any torch code that works on each row by itself; None is
        SwiGLU of [gate | up].
    weights_on: what the keeper multiplies by routing weights: outputs of experts, or activations, with the bias of
        ``down``, which is the same function.
    add_gradients: adds gradients, in the form of what ``read`` gives, to those parameters' own when backward is past
        the layer, as ``Fsep(delay_reshard=True)`` asks for; None where nobody can, as with computed parts.

    Raises ValueError, where ``Experts`` are made or parts are read, for parts that do not fit.
    """

    read: Callable[[], Parts]
    transposed: bool = False
    activation: Callable[[Tensor], Tensor] | None = None
    weights_on: Literal["outputs", "activations"] = "outputs"
    add_gradients: Callable[[Parts], None] | None = None

    @torch.no_grad()
    def form(self, shape: ModelShape) -> ExpertForm:
        """Returns the parts of an expert of ``shape``."""
        found = self.read()
        names = [name for name in NAMES if name in found]
        matrices = tuple(name for name in names if name != "down" and not name.endswith("_bias"))
        biases = [f"{name}_bias" for name in matrices]
        unknown = [name for name in found if name not in (*matrices, *biases, "down", "down_bias")]
        wanted = ["down", *(biases if any(name in found for name in biases) else [])]
        missing = [name for name in wanted if name not in found]
        if matrices not in KINDS or unknown or missing:
            wrong = f"cannot have {unknown[0]!r}" if unknown else "miss " + repr(missing[0] if missing else "up")
            raise ValueError(
                f"outside experts have the parts {[*found]} and {wrong}; read() gives down and either gate_up, or gate "
                "and up, or up alone, and biases by the same names with _bias"
            )
        if self.activation is None and matrices == ("up",):
            raise ValueError("outside experts have no gate, which SwiGLU needs; give OutsideExperts(activation=...)")
        H, I = shape.hidden_size, shape.intermediate_size
        outward = {"gate_up": 2 * I, "gate": I, "up": I, "down": H}
        return ExpertForm(tuple(self._part(name, outward, I if name == "down" else H, matrices) for name in names))

    def _part(self, name: str, outward: Mapping[str, int], inward: int, matrices: Sequence[str]) -> Part:
        if name.endswith("_bias"):
            return Part(name, (outward[name.removesuffix("_bias")],))
        if not self.transposed:
            return Part(name, (outward[name], inward), dim=int(name == "gate_up"))
        # Two matrices [in, out], one behind the other, are not one: these are turned where they are read.
        if len(matrices) > 1:
            return Part(name, (outward[name], inward), dim=1, turned=True)
        return Part(name, (inward, outward[name]))

    def function(self, form: ExpertForm) -> ExpertFunction:
        """Returns what an expert computes."""
        activation, gated = SWIGLU, form.parts[0].name != "up"
        if self.activation is not None:
            activation = row_function(self.activation, ParameterGradients((), ()), 1 + gated)
        turned = any(part.turned for part in form.parts)
        return ExpertFunction(
            activation, self.transposed and not turned, any(part.name.endswith("_bias") for part in form.parts)
        )

    def check(self, strategy: Strategy) -> None:
        """Raises ValueError where these experts cannot run under ``strategy``."""
        sharding = strategy.sharding
        if self.weights_on not in ("outputs", "activations"):
            raise ValueError(
                f"weights_on={self.weights_on!r}: routing weights that multiply the inputs of experts make another "
                'function, which moesys does not run; multiply "outputs" or "activations", or with one expert per '
                "token multiply tokens before Experts and give weights of one"
            )
        if strategy.overlap.reaches_memory:
            raise ValueError(
                f"strategy {strategy.name!r} has overlap={type(strategy.overlap).__name__}, which "
                "runs no experts whose parameters are kept outside; use Sequential() or Pipelined(chunks=...)"
            )
        if isinstance(sharding, Fsep) and sharding.delay_reshard and self.add_gradients is None:
            raise ValueError(
                f"strategy {strategy.name!r} has delay_reshard=True, and who keeps these parameters takes no gradient "
                "later than from backward; use delay_reshard=False, or give OutsideExperts(add_gradients=...)"
            )


class OutsideMasters(Masters):
    """Masters that are somebody else's parameters, of which this rank has what ``shards`` say.

    They are read at every use, and never kept: FSDP frees them after forward and brings them again for backward, in the
    same storage, of which no version says so.

    Raises ValueError for parts that can never be this rank's: those of another number of experts, dtype or shape than
    any that sharding gives them.
    """

    def __init__(self, outside: OutsideExperts, shards: ExpertShards, num_experts: int) -> None:
        self._outside, self._form, self._shapes = outside, shards.form, shards.master_shapes
        self._checked_mesh: DeviceMesh | None = None
        with torch.no_grad():
            read = outside.read()
            kept = [read[part.name] for part in self._form.parts]
            # How many tensors each part has; None where it is one of all experts.
            self._counts = [None if isinstance(each, Tensor) else len(each) for each in kept]
            self._check_read(read, whole=num_experts)

    @property
    def may_delay(self) -> bool:
        return self._outside.add_gradients is not None

    def differentiable(self) -> tuple[Tensor, ...]:
        read = self._outside.read()
        self._check_read(read)
        return tuple(
            local_part(tensor).mT if part.turned else local_part(tensor)
            for part in self._form.parts
            for tensor in _tensors(read[part.name])
        )

    def by_part(self, masters: Sequence[Tensor]) -> tuple[Master, ...]:
        left = iter([master.detach() for master in masters])
        return tuple(next(left) if count is None else tuple(next(left) for _ in range(count)) for count in self._counts)

    def gradients_of(self, by_part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = zip(by_part, self._counts, strict=True)
        return tuple(
            each for gradient, count in parts for each in ((gradient,) if count is None else gradient.unbind())
        )

    @property
    def device(self) -> torch.device:
        return next(iter(_tensors(self._outside.read()["down"]))).device

    @property
    def at_hand(self) -> bool:
        read = self._outside.read()
        return not any(True for _ in self._misfits(read))

    def accumulate_gradient(self, gradients: Sequence[Tensor]) -> None:
        assert self._outside.add_gradients is not None
        kept = {}
        for part, gradient, count in zip(self._form.parts, gradients, self._counts, strict=True):
            lies = gradient.mT if part.turned else gradient
            kept[part.name] = lies if count is None else lies.unbind()
        self._outside.add_gradients(kept)

    def _check_read(self, read: Parts, whole: int | None = None) -> None:
        names = [part.name for part in self._form.parts]
        if sorted(read) != sorted(names):
            raise ValueError(f"outside experts had parts {names} when they were made, and now {list(read)}; keep them")
        for part, found, wanted in self._misfits(read, whole):
            way = "shard them over exactly the ranks of the group, as the strategy's sharding does"
            if found[1:] != wanted[1:]:
                way = f"give {wanted[1:]} of each expert, sharded over exactly the ranks of the group"
                if found[1:] == wanted[:0:-1]:
                    way = f"declare OutsideExperts(transposed={not self._outside.transposed}), if its matrices lie so"
            raise ValueError(
                f"outside experts have {part.name!r} of shape {found}, which is not this rank's part of the experts, "
                f"{wanted}; {way}"
            )
        dtypes = {name: next(iter(_tensors(read[name]))).dtype for name in names}
        for name in names:
            for tensor in _tensors(read[name]):
                if tensor.dtype != dtypes[names[0]] or not tensor.is_floating_point():
                    kept = ", ".join(f"{each} of {dtype}" for each, dtype in dtypes.items())
                    raise ValueError(f"outside experts have parts {kept}; give all parts one floating dtype")
                if isinstance(tensor, DTensor) and tensor.device_mesh is not self._checked_mesh:
                    check_order(tensor.device_mesh)
                    self._checked_mesh = tensor.device_mesh

    def _misfits(self, read: Parts, whole: int | None = None) -> Iterator[tuple[Part, list[int], list[int]]]:
        """Yields parts of which a tensor has another shape than this rank's, with this shape and that one. ``whole``:
        the number of all experts, where what they keep may still be whole or be sharded otherwise.
        """
        for part, (num_here, *size), count in zip(self._form.parts, self._shapes, self._counts, strict=True):
            kept, whole_size = read[part.name], list(part.shape)
            if part.turned:
                size, whole_size = size[::-1], whole_size[::-1]
            allowed = [[num_here, *size]] if whole is None else [[num_here, *size], [whole, *whole_size]]
            rows = [] if isinstance(kept, Tensor) else [len(kept)]
            for tensor in _tensors(kept) or [torch.empty(0)]:
                shapes = [[*rows, *local_part(tensor).shape]]
                if whole is not None:
                    shapes.append([*rows, *tensor.shape])
                if (count is None) != isinstance(kept, Tensor) or not any(shape in allowed for shape in shapes):
                    yield part, shapes[0], allowed[0]
                    break


def _tensors(kept: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [kept] if isinstance(kept, Tensor) else kept
