"""The parameters of a layer's experts: which tensors an expert is made of, its first values, where they are kept, and
their casts.

On the wire, and where gradients are collected, an expert is one vector of P elements: its parts one after another,
``gate_up`` or ``gate`` and ``up``, then ``down``, then their biases, if there are any. Masters may lie so too, [E, P],
or part by part, as other libraries keep them (``outside.py``).

R ranks, E experts, P elements of an expert (P_e = 3·I·H of our own), D experts held by a rank.
"""

from __future__ import annotations

import inspect
import math
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moesys.config import ModelShape
from moesys.overlap.executor import ExpertGradients, ExpertWeights
from moesys.torch_private import hide_backward, hooks_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The names of optimizers that take a parameter of two dimensions for a matrix, or of the functions that they call.
_ON_MATRICES = re.compile(
    "muon|shampoo|soap|dion|scion|galore|kron|adafactor|newton_?schulz|^ns_?[0-9]+$|zeropower|orthogonal|polar"
    "|^(svd|svd_lowrank|qr|eigh|cholesky)$",
    re.IGNORECASE,
)
_BY_ELEMENT = ("adam", "adamw", "lion", "sgd")


def initial_generator(seed: int, layer_index: int, expert: int | None) -> torch.Generator:
    """Returns the generator of an expert's first values, or, for None, of those of a layer's replicated weights."""
    # Distinct streams for distinct triples: a linear congruence of each part, of which torch takes 32 bits.
    part = 0 if expert is None else expert + 1
    key = (int(seed) * 0x9E3779B97F4A7C15 + int(layer_index) * 0xC2B2AE3D27D4EB4F + part * 0x165667B19E3779F9) % (
        1 << 63
    )
    return torch.Generator().manual_seed(key)


def initial_expert(shape: ModelShape, seed: int, layer_index: int, expert: int) -> Tensor:
    """Returns the first values of an expert, float32 [P_e]: normal, and determined by (seed, layer, expert) alone."""
    generator = initial_generator(seed, layer_index, expert)
    return torch.randn(shape.expert_parameters, generator=generator, dtype=torch.float32).mul_(shape.initializer_range)


@dataclass(frozen=True)
class Part:
    """One tensor of an expert.

    name: that of an ``ExpertWeights`` tensor, or ``gate`` or ``up``, with ``_bias`` or not. shape: of one expert. dim:
    where FSEP cuts it over ranks.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def joined_name(self) -> str:
        """The name of the ``ExpertWeights`` tensor that it is in."""
        return self.name if self.name in ExpertWeights._fields else f"gate_up{'_bias' * self.name.endswith('_bias')}"

    def sliced_shape(self, num_ranks: int) -> tuple[int, ...]:
        """Returns a rank's slice. Raises ValueError where ranks do not divide it."""
        size = self.shape[self.dim]
        if size % num_ranks:
            raise ValueError(
                f"an expert's tensor of {self.shape} is cut by Fsep in dimension {self.dim} over {num_ranks} ranks, "
                f"which do not divide {size}; use ranks that do, or Ep"
            )
        return (*self.shape[: self.dim], size // num_ranks, *self.shape[self.dim + 1 :])


# The masters of one part: all experts of this rank in one tensor, or one tensor for each.
Master = Tensor | Sequence[Tensor]
# One expert: in the form in which it is computed, or its masters, of which some have to be joined or copied first.
Expert = ExpertWeights | Sequence[Tensor]


@dataclass(frozen=True)
class ExpertForm:
    """The parts of an expert in the order in which they are sent: in that of the ``ExpertWeights`` tensors, and those
    of one tensor one after another.
    """

    parts: tuple[Part, ...]

    @staticmethod
    def of(shape: ModelShape) -> ExpertForm:
        """Returns the form of our own experts: SwiGLU without biases, laid out as in transformers."""
        H, I = shape.hidden_size, shape.intermediate_size
        return ExpertForm((Part("gate_up", (2 * I, H)), Part("down", (H, I))))

    @cached_property
    def num_elements(self) -> int:
        """P, the elements of an expert."""
        return sum(part.num_elements for part in self.parts)

    @cached_property
    def joined(self) -> ExpertForm:
        """The form in which experts are computed, where gate and up are one."""
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self.parts:
            rows = shapes.get(part.joined_name, (0,))[0] + part.shape[0]
            shapes[part.joined_name] = (rows, *part.shape[1:])
        return ExpertForm(tuple(Part(name, shape) for name, shape in shapes.items()))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the parts of experts [..., at least P] as views, by name."""
        sizes = [part.num_elements for part in self.parts]
        flats = flat[..., : self.num_elements].split(sizes, dim=-1)
        return {part.name: each.unflatten(-1, part.shape) for part, each in zip(self.parts, flats, strict=True)}

    def weights(self, flat: Tensor) -> ExpertWeights:
        """Returns experts [..., at least P] in the form in which they are computed, as views."""
        return ExpertWeights(**self.joined.views(flat))

    def gradients(self, flat_DP: Tensor) -> ExpertGradients:
        return ExpertGradients(**self.joined.views(flat_DP))

    def pieces(self, expert: Expert) -> dict[str, list[Tensor]]:
        """Returns the tensors that lie one after another in each ``ExpertWeights`` tensor."""
        if isinstance(expert, ExpertWeights):
            return {name: [tensor] for name, tensor in expert._asdict().items() if tensor is not None}
        found: dict[str, list[Tensor]] = {part.name: [] for part in self.joined.parts}
        for part, master in zip(self.parts, expert, strict=True):
            found[part.joined_name].append(master)
        return found


class Masters(ABC):
    """This rank's masters: one flat tensor, or one or more tensors for each part of an expert (``ExpertForm``)."""

    @property
    def at_hand(self) -> bool:
        """True if ``local`` can return them now, outside of the layer's own forward and backward."""
        return True

    @property
    def computed(self) -> bool:
        """True if the tensors that ``differentiable`` returned last are computed from parameters."""
        return False

    @abstractmethod
    def differentiable(self) -> tuple[Tensor, ...]:
        """Returns the tensors for which backward computes gradients."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the masters."""

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype that ``gradients_of`` takes; None is that of the masters."""
        return None

    @property
    def keeps_casts(self) -> bool:
        """True if the casts that a forward has made stay for its backward."""
        return True

    @abstractmethod
    def accumulate_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to ``.grad`` that autograd does not add, because it is past the layer."""

    def local(self) -> tuple[Master, ...]:
        """Returns the masters part by part, without their graph."""
        return self.by_part(self.differentiable())

    def by_part(self, masters: Sequence[Tensor]) -> tuple[Master, ...]:
        """Returns tensors of ``differentiable`` in the form of ``local``."""
        return tuple(master.detach() for master in masters)

    def gradients_of(self, by_part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the gradients of the tensors of ``differentiable``, from those of each part of all experts here."""
        return tuple(by_part)

    def expect_gradient(self, *, late: bool) -> None:  # noqa: B027
        """Announces a gradient in backward; with ``late`` it comes by ``accumulate_gradient``, after the layer."""

    def find_cast(self, dtype: torch.dtype) -> ExpertWeights | None:
        """Returns the newest cast of all experts here to ``dtype``, stacked; None where it is to be made."""
        return None

    def keep_cast(self, cast: ExpertWeights) -> None:  # noqa: B027
        """Keeps a new cast for other micro-batches, if it will be known whether it is still right."""


class OwnMasters(Masters):
    """One parameter of logical shape [E, P_e], float32, of which this rank has a part.

    ``keep``: writes this rank's part of an expert, whose parameters are [P_e], into its part of the masters.
    ``distributed``: returns the ``DTensor`` whose local part is given. ``parameters``: the layer's table of parameters;
    ``name``: the parameter's name in it. The parameter is looked up at every use, because moves between devices and
    ``load_state_dict(assign=True)`` may replace it. A reference to the layer instead would be a circle, and a layer
    that is dropped would keep its memory until Python collects it.

    The newest cast is kept as long as nothing can have changed the parameter: while gradients are collected, and no
    optimizer has made a step. A tensor's version is not enough: fused optimizers leave it as it is, and so do those
    that go through lists of DTensors. So nothing is kept of a parameter that no optimizer of this process has stepped
    yet. A cast is dropped before and after a step of any optimizer, and made anew where the parameter has no gradient
    yet, as at the beginning of a step, or where it, its storage or its version is another. Values that are written
    through ``.data`` by other code than its optimizer, while it has a gradient, go unnoticed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        name: str,
        keep: Callable[[Tensor, int, Tensor], None],
        distributed: Callable[[Tensor], Tensor],
    ) -> None:
        self._parameters, self._name, self._keep, self._distributed = parameters, name, keep, distributed
        # The newest cast, and the state of the parameter that it was made of.
        self._cast: tuple[tuple[int, ...], ExpertWeights] | None = None
        # The parameter, by its id, that an optimizer has stepped.
        self._stepped: int | None = None
        this = weakref.ref(self)

        def before(optimizer: Optimizer, *_: object) -> None:
            if (masters := this()) is not None:
                masters.drop_cast()
                masters._prepare(optimizer)

        def after(optimizer: Optimizer, *_: object) -> None:
            if (masters := this()) is not None:
                masters.drop_cast()
                masters._note_step(optimizer)

        for hook in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            weakref.finalize(self, hook.remove)

    def _prepare(self, optimizer: Optimizer) -> None:
        """Gives an optimizer that works by element a gradient that lies as the parameter does. Raises TypeError for one
        that would take all experts together for one matrix.
        """
        parameter = self._parameter
        groups = [group for group in optimizer.param_groups if any(each is parameter for each in group["params"])]
        if not groups or getattr(optimizer, "knows_matrices", False):
            return
        by_element = (group.get("algorithm") in _BY_ELEMENT or not group.get("use_muon", True) for group in groups)
        if _works_on_matrices(type(optimizer)) and not all(by_element):  # type: ignore[arg-type]  # mypy: hash of instances
            raise TypeError(
                f"{type(optimizer).__name__} takes {self._name} {list(parameter.shape)} for one matrix, and would "
                "mix the experts with one another, as each of its rows holds all matrices of an expert; use "
                f"ms.Muon(model), which knows them, or give the parameters whose names end in {self._name!r} to an "
                "optimizer that works by element, such as AdamW"
            )
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    @property
    def device(self) -> torch.device:
        return self._parameter.device

    def differentiable(self) -> tuple[Tensor, ...]:
        return (local_part(self._parameter),)

    def local(self) -> tuple[Master, ...]:
        return (local_part(self._parameter.detach()),)

    def find_cast(self, dtype: torch.dtype) -> ExpertWeights | None:
        state = self._state()
        if self._cast is None or state != self._cast[0] or self._cast[1].gate_up.dtype != dtype:
            return None
        return self._cast[1]

    def keep_cast(self, cast: ExpertWeights) -> None:
        state = self._state()
        self._cast = None if state is None else (state, cast)

    def drop_cast(self) -> None:
        """Drops the cast that is kept, and frees its memory."""
        self._cast = None

    @torch.no_grad()
    def _state(self) -> tuple[int, ...] | None:
        """Returns the parameter's id, and what differs where its values may have changed beside steps of optimizers;
        None where nothing would show that.
        """
        parameter = self._parameter
        # A parameter that is not trained never has a gradient, and nothing shows that it was written.
        if parameter.grad is None or parameter.is_inference() or id(parameter) != self._stepped:
            return None
        # A captured graph runs again when the parameter has other values.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        local = local_part(parameter)
        return id(parameter), local.data_ptr(), parameter._version, local._version

    def _note_step(self, optimizer: Optimizer) -> None:
        parameter = self._parameter
        in_groups = any(each is parameter for group in optimizer.param_groups for each in group["params"])
        if in_groups and parameter.grad is not None:
            self._stepped = id(parameter)

    def full(self) -> Tensor:
        """Returns all experts [E, P_e] on every rank. A collective."""
        masters = self._parameter.detach()
        return masters.full_tensor() if isinstance(masters, DTensor) else masters

    @torch.no_grad()
    def load(self, expert: int, flat_P: Tensor) -> None:
        """Writes this rank's part of an expert, whose parameters are ``flat_P`` [P_e]."""
        self._keep(local_part(self._parameter.detach()), expert, flat_P)

    def expect_gradient(self, *, late: bool) -> None:
        hide_backward(self._parameter, hide=late)

    def accumulate_gradient(self, gradients: Sequence[Tensor]) -> None:
        parameter, gradient = self._parameter, gradients[0]
        if gradient.shape == local_part(parameter).shape:
            gradient = self._distributed(gradient)
        elif isinstance(parameter, DTensor):
            # It is of whole experts, where all ranks have slices.
            gradient = part_of(parameter, gradient, (Shard(0),))
        accumulate(parameter, gradient)

    @property
    def _parameter(self) -> nn.Parameter:
        parameter = self._parameters[self._name]
        assert parameter is not None
        return parameter


@torch.no_grad()
def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient that autograd does not add to a leaf, and calls the leaf's hooks, as autograd would."""
    hide_backward(parameter, hide=False)
    # Autograd calls hooks in the same way. A rank that alone has hooks sends its gradient as late as the others.
    for hook in hooks_of(parameter):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        if isinstance(gradient, DTensor) and isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=gradient.placements)
        local_part(parameter.grad).add_(local_part(gradient))
    for hook in hooks_of(parameter, behind=True):
        hook(parameter)


@cache
def _works_on_matrices(kind: type) -> bool:
    """Returns whether the name of an optimizer, or of a function that it calls, says that it works on matrices."""
    methods = (method for each in kind.__mro__[:-2] for method in vars(each).values())
    names = {each.__name__ for each in kind.__mro__}
    left = [inspect.unwrap(method) for method in methods if inspect.isfunction(method)]
    seen: set[object] = set()
    # Helpers in the optimizer's own module, and functions within functions, count too.
    while left:
        function = left.pop()
        code = getattr(function, "__code__", function)
        if not inspect.iscode(code) or code in seen:
            continue
        seen.add(code)
        names |= {code.co_name, *code.co_names}
        left += filter(inspect.iscode, code.co_consts)
        known = getattr(function, "__globals__", {})
        helpers = (inspect.unwrap(known[name]) for name in code.co_names if inspect.isfunction(known.get(name)))
        left += (each for each in helpers if each.__module__ == kind.__module__)
    return any(map(_ON_MATRICES.search, names))


def distributed(local: Tensor, shape: ModelShape, shard_dim: int, mesh: DeviceMesh | None) -> Tensor:
    """Returns a tensor of logical shape [E, P_e] of which ``local`` is this rank's part; without a mesh that is all."""
    if mesh is None:
        return local
    size = torch.Size((shape.num_experts, shape.expert_parameters))
    return DTensor.from_local(local, mesh, [Shard(shard_dim)], run_check=False, shape=size, stride=(size[1], 1))


def part_of(parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> DTensor:
    """Returns a tensor of the shape of ``parameter``, which lies over its ranks by ``placements``, from this rank's
    part.
    """
    size, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=size, stride=stride)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a ``DTensor``; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
