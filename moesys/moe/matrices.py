"""The matrices of a model: which views of its parameters are matrices that it multiplies by, and who has parts of them.

An expert's gate, up and down are three matrices, wherever their elements lie: in flat masters, in one tensor of all
experts, side by side or interleaved, transposed or not. Matrices are [out, in] here.

E experts, H hidden size, I expert width, P parameters of an expert, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from moesys.moe.experts import Experts, experts_of
from moesys.moe.masters import ExpertForm, local_part
from moesys.overlap.comm.channel import Channel

# The names of modules outside of blocks whose weights are heads.
_HEADS = ("lm_head", "output", "head", "embed_out", "unembed", "score", "classifier")

_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Returns the matrices [n, out, in] in a parameter of n experts, [n, ...], as views; 1 for one that has no experts.
Views = Callable[[Tensor], list[Tensor]]
# The part of each row of a parameter that a rank has, as an index of rows [n, ...].
Box = tuple[slice, ...]
# Returns whether Muon trains a parameter, by its name; None for the default.
Choice = Callable[[str, nn.Parameter], bool | None]


@dataclass(eq=False)
class Matrices:
    """The matrices of one parameter. A row holds those of one expert; a parameter that is not ``stacked`` is one row.

    ``channel``: of the ranks that have parts of each row, which ``boxes`` has by rank; None if this rank has whole
    rows. ``row``: one row, without values. ``by_owner``: gradient and momentum lie over these ranks by whole rows.
    """

    name: str
    parameter: nn.Parameter
    views: Views
    stacked: bool = False
    of_experts: bool = False
    labels: tuple[str, ...] = ()
    channel: Channel | None = None
    boxes: Sequence[Box] = field(default_factory=list)
    by_owner: bool = False

    def __post_init__(self) -> None:
        shape = self.parameter.shape
        self.row_shape = tuple(shape[1:] if self.stacked else shape)
        self.row = torch.empty(1, *self.row_shape, device="meta")
        of_row = self.views(self.row)
        self.shapes = [(each.shape[1], each.shape[2]) for each in of_row]
        self.num_matrices = sum(map(len, of_row)) * (shape[0] if self.stacked else 1)
        # The products of one step of the iteration, in multiplications.
        of_one = [min(of) ** 2 * (2 * max(of) + min(of)) for of in self.shapes]
        self.cost = sum(len(each) * cost for each, cost in zip(of_row, of_one, strict=True))

    @property
    def kinds(self) -> str:
        """A description of the matrices, with their shapes."""
        labels = self.labels or ("",) * len(self.shapes)
        each = [f"{label} [{out}, {inward}]".strip() for label, (out, inward) in zip(labels, self.shapes, strict=True)]
        count = self.num_matrices // len(self.shapes)
        return f"{count} × {', '.join(each)}" if count > 1 else ", ".join(each)

    def described(self) -> str:
        """Returns what must be the same on all ranks that have parts of it."""
        return f"{self.name} {[*self.parameter.shape]} by Muon: {self.kinds}"

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a tensor that lies as the parameter, [n, ...]."""
        local = local_part(tensor.detach())
        return local if self.stacked else local[None]

    def placed(self, tensor: Tensor) -> Tensor:
        """Returns a gradient or a state that lies over the ranks as Muon reads it. A collective if it does not yet."""
        if self.by_owner and isinstance(tensor, DTensor):
            return tensor.redistribute(placements=[Shard(0)])
        return tensor

    def own_part(self) -> list[tuple[int, int]]:
        """Returns where this rank's part of a parameter that is cut begins and ends, in each dimension."""
        assert isinstance(self.parameter, DTensor)
        if not local_part(self.parameter.detach()).numel():
            return [(0, 0)] * self.parameter.ndim
        chunk = self.parameter.__create_chunk_list__()[0]
        return [(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True)]

    def set_parts(self, of_ranks: Sequence[Sequence[Sequence[int]]]) -> None:
        """Takes what ``own_part`` returned on each rank. Raises ValueError where that is not one row after another."""
        in_row = [part[-len(self.row_shape) :] for part in of_ranks]
        self.boxes = [(slice(None), *(slice(*ends) for ends in part)) for part in in_row]
        sizes = [self.row[box].numel() for box in self.boxes]
        rows = {tuple(part[0]) for part, size in zip(of_ranks, sizes, strict=True) if size and self.stacked}
        if len(rows) > 1 or sum(sizes) != self.row.numel():
            raise ValueError(
                f"{self.name} {[*self.parameter.shape]} is sharded so that ranks have parts of other rows, or the same "
                "parts; shard it over one dimension of a mesh, or let muon= return False for it"
            )

    def add_(self, rows: slice, update: Tensor, group: Mapping[str, Any]) -> None:
        """Decays rows of the parameter, and adds this rank's part of the orthogonal update of each matrix, scaled by
        its own rows and columns.
        """
        place, lr = self.of(self.parameter)[rows], float(group["lr"])
        place.mul_(1 - lr * group["weight_decay"])
        scale = torch.empty_like(self.row, dtype=torch.float32, device=place.device)
        for view, (out, inward) in zip(self.views(scale), self.shapes, strict=True):
            as_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
            view.fill_(-lr * (0.2 * math.sqrt(max(out, inward)) if as_adamw else math.sqrt(max(1, out / inward))))
        if self.channel is not None:
            scale = scale[self.boxes[self.channel.rank]]
        # Two operations, as a fused one may round the last elements of a part otherwise than those before.
        place.add_(update.float().mul_(scale))


def matrices_of(
    model: nn.Module, names: Mapping[nn.Parameter, str], muon: Choice | None
) -> dict[nn.Parameter, Matrices]:
    """Returns the parameters that Muon trains, in the order of the model, and their matrices. ``muon``: the argument of
    ``Muon``.

    Raises ValueError for parameters whose matrices are not known, and for a model without any.
    """
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is sharded by FullyShardedDataParallel, which keeps no matrices; shard it by "
            "fully_shard (FSDP2) or ms.parallelize"
        )
    choices = {parameter: muon(name, parameter) if muon is not None else None for parameter, name in names.items()}
    for parameter, wanted in choices.items():
        if wanted is not None and not isinstance(wanted, bool):
            raise ValueError(
                f"muon returned {wanted!r} for {names[parameter]}; return True, False, or None for the default"
            )
    known, biases = _known_matrices(
        model, {parameter: names[parameter] for parameter, wanted in choices.items() if wanted is not False}
    )
    plain = _hidden_matrices(model, known.keys() | biases)
    found: dict[nn.Parameter, Matrices] = {}
    for parameter, name in names.items():
        wanted, matrices = choices[parameter], known.get(parameter)
        if wanted is None:
            wanted = matrices is not None or plain.get(parameter, False)
            if not wanted and parameter.requires_grad and parameter.ndim == 3 and parameter not in plain:
                raise ValueError(
                    f"{name} {[*parameter.shape]} has three dimensions, and is not of experts that run under a "
                    "strategy, so Muon does not know its matrices; run the model by ms.parallelize or with "
                    "OutsideExperts, or train it by AdamW with muon=, a function that returns False for it"
                )
        if not wanted:
            continue
        if matrices is None:
            if parameter.ndim != 2 or parameter in biases:
                what = "is of biases" if parameter in biases else f"has {parameter.ndim} dimensions"
                raise ValueError(
                    f"muon returned True for {name} {[*parameter.shape]}, which {what}, and Muon trains matrices; "
                    "return False or None for it"
                )
            if getattr(parameter, "tensor_model_parallel", False):
                raise ValueError(
                    f"{name} {[*parameter.shape]} is a part of a matrix (tensor_model_parallel), and Muon needs the "
                    "whole; shard it as a DTensor, or let muon= return False for it"
                )
            matrices = Matrices(name, parameter, lambda rows: [rows])
        found[parameter] = matrices
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no matrices for Muon: no experts under a strategy, and no other "
            "two-dimensional parameters but embeddings, heads and routers; use torch.optim.AdamW"
        )
    return found


def _known_matrices(
    model: nn.Module, names: Mapping[nn.Parameter, str]
) -> tuple[dict[nn.Parameter, Matrices], set[nn.Parameter]]:
    """Returns parameters whose matrices are declared: those of experts, and of modules that have ``moesys_matrices``
    (views by the name of a parameter); and the biases of experts.
    """
    by_id = {id(parameter): parameter for parameter in names}
    known: dict[nn.Parameter, Matrices] = {}
    biases: set[nn.Parameter] = set()
    for experts in experts_of(model):
        if (masters := experts.masters) is not None and masters in names:
            of_flat = partial(_of_flat, experts.shards.form)
            known[masters] = Matrices(names[masters], masters, of_flat, True, True, ("gate", "up", "down"))
        read = {} if experts.outside is None else experts.outside.read()
        for part in experts.shards.form.parts if read else ():
            kept = read[part.name]
            for tensor in [kept] if isinstance(kept, Tensor) else kept:
                turned = id(tensor) not in by_id and tensor._base is not None
                parameter = by_id.get(id(tensor._base if turned else tensor))
                if parameter is None:
                    # It is computed from parameters, such as those of an adapter, which are trained.
                    continue
                if part.name.endswith("_bias"):
                    biases.add(parameter)
                    continue
                if turned and (tensor.numel() != parameter.numel() or tensor.stride() != parameter.mT.stride()):
                    raise ValueError(
                        f"{names[parameter]} {[*parameter.shape]} is read as {part.name} {[*tensor.shape]}, a view "
                        "other than .mT, so Muon does not know its matrices; let muon= return False for it"
                    )
                views, labels = _views_of_part(experts, part.name, turned)
                stacked = isinstance(kept, Tensor)
                known[parameter] = Matrices(names[parameter], parameter, views, stacked, True, labels)
    for module in model.modules():
        for name, declared in module.__dict__.get("moesys_matrices", {}).items():
            parameter = module.get_parameter(name)
            known[parameter] = Matrices(names[parameter], parameter, declared)
    return known, biases


def _of_flat(form: ExpertForm, rows_NP: Tensor) -> list[Tensor]:
    """Returns gate, up and down of our own experts."""
    gate_up, down = form.views(rows_NP).values()
    return [*gate_up.chunk(2, dim=1), down]


def _views_of_part(experts: Experts, name: str, turned: bool) -> tuple[Views, tuple[str, ...]]:
    """Returns the matrices in a part of outside experts, and their names. ``turned``: parameters are ``.mT`` of it."""
    transposed = experts.function.transposed
    interleaved = name == "gate_up" and experts.outside is not None and _is_interleaved(experts)

    def views(rows: Tensor) -> list[Tensor]:
        part = rows.mT if turned != transposed else rows
        if name != "gate_up":
            return [part]
        # [n, 2I, H] now.
        return [part[:, 0::2], part[:, 1::2]] if interleaved else [*part.chunk(2, dim=1)]

    return views, ("gate", "up") if name == "gate_up" else (name,)


def _is_interleaved(experts: Experts) -> bool:
    """Returns whether the rows of gate and up take turns, from what the activation reads: an element that is NaN makes
    that output NaN which it belongs to. Raises ValueError where it makes others.
    """
    assert experts.outside is not None
    activation, width = experts.outside.activation, experts.shape.intermediate_size
    if activation is None or width == 1:
        return False
    device, found = experts.store.masters.device, []
    for element in (1, 2 * width - 2):
        row = torch.zeros(1, 2 * width, device=device)
        row[0, element] = torch.nan
        found.append(activation(row)[0].isnan().nonzero().flatten().tolist())
    if found not in ([[0], [width - 1]], [[1], [width - 2]]):
        raise ValueError(
            f"the activation of layer {experts.layer_index} reads its rows of gate_up neither as [gate | up] nor "
            "interleaved, so Muon does not know its matrices; let muon= return False for gate_up"
        )
    return found[0] == [0]


def _hidden_matrices(model: nn.Module, known: Set[nn.Parameter]) -> dict[nn.Parameter, bool]:
    """Returns parameters that are not ``known``, and whether Muon trains them by default: those of two dimensions do,
    but embeddings, heads, routers, biases of experts, single rows, and what is no matrix of a product. Kernels of
    convolutions are in it too.
    """
    modules = dict(model.named_modules())
    routers = {
        # PEFT wraps experts.
        (path.split(".base_layer")[0].rpartition(".")[0], experts.shape.num_experts, experts.shape.hidden_size)
        for path, module in modules.items()
        if isinstance(experts := module.__dict__.get("moesys_experts", module), Experts)
    }
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    found: dict[nn.Parameter, bool] = {}
    for path, module in modules.items():
        parts = path.split(".")
        in_blocks = any(part.isdecimal() for part in parts)
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in known:
                continue
            if "embed" in f"{path}.{name}".lower() or module is head or isinstance(module, _NO_MATRICES):
                # An embedding may be the weight of the head, too.
                found[parameter] = False
            elif parameter.ndim == 2 and parameter not in found:
                is_router = any(
                    [*parameter.shape] == [num_experts, hidden_size]
                    and f"{path}.".startswith(f"{around}." if around else "")
                    and not any(part.startswith("shared") for part in parts)
                    for around, num_experts, hidden_size in routers
                )
                is_head = not in_blocks and parts[-1] in _HEADS
                found[parameter] = min(parameter.shape) > 1 and name == "weight" and not is_router and not is_head
    return found
