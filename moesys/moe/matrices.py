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
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from moesys.moe.experts import Experts, experts_of
from moesys.moe.masters import ExpertForm, local_part
from moesys.overlap.comm.channel import Channel

# The names of modules outside of blocks whose weights are heads.
_HEADS = ("lm_head", "output", "head", "embed_out", "unembed", "score", "classifier")

_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Returns the matrices [n, out, in] in a parameter of n experts, [n, ...], as views by name; n = 1 without experts.
Views = Callable[[Tensor], dict[str, Tensor]]
# Returns whether Muon trains a parameter, by its name; None for the default.
Choice = Callable[[str, nn.Parameter], bool | None]


@dataclass(eq=False)
class Matrices:
    """The matrices of one parameter. A row holds those of one expert; a parameter that is not ``stacked`` is one row.

    ``channel``: of the ranks that have parts of each row, or of none, if this rank has whole rows. ``boxes``: the part
    of each row [n, ...] that a rank of it has, by rank. ``by_owner``: gradient and momentum lie over these ranks by
    whole rows. ``row``: one row, without values. ``kinds``: a description of the matrices, with their ``shapes``.
    """

    name: str
    parameter: nn.Parameter
    views: Views
    stacked: bool = False
    of_experts: bool = False
    by_owner: bool = False
    channel: Channel = field(init=False)
    boxes: Sequence[tuple[slice, ...]] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.parameter.shape
        self.row = torch.empty(1, *(shape[1:] if self.stacked else shape), device="meta")
        of_row = self.views(self.row)
        self.shapes = [(view.shape[1], view.shape[2]) for view in of_row.values()]
        self.num_matrices = sum(map(len, of_row.values())) * (shape[0] if self.stacked else 1)
        # The products of one step of the iteration, in multiplications.
        of_one = [min(of) ** 2 * (2 * max(of) + min(of)) for of in self.shapes]
        self.cost = sum(len(view) * cost for view, cost in zip(of_row.values(), of_one, strict=True))
        count = self.num_matrices // len(self.shapes)
        self.kinds = f"{count} × " if count > 1 else ""
        self.kinds += ", ".join(f"{name} {[*view.shape[1:]]}".strip() for name, view in of_row.items())

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a tensor that lies as the parameter, [n, ...]."""
        local = local_part(tensor.detach())
        return local if self.stacked else local[None]

    def placed(self, tensor: Any) -> Any:
        """Returns a gradient or a state that lies over the ranks as Muon reads it. A collective if it does not yet."""
        parameter: Any = self.parameter
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.redistribute(placements=[Shard(0)] if self.by_owner else parameter.placements)

    def cut_over(self) -> dist.ProcessGroup | None:
        """Returns the group of the ranks that have parts of each row; None if this rank has whole rows. Raises
        ValueError where they are not all ranks, and not those of one dimension of a mesh.
        """
        if not isinstance(self.parameter, DTensor):
            return None
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        over = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        cut = [dim for dim in over if getattr(placements[dim], "dim", -1) >= self.stacked]
        if len(cut) > 1 and (cut != over or mesh.size() != dist.get_world_size()):
            raise ValueError(
                f"{self.name} {[*self.parameter.shape]} is sharded over {len(cut)} dimensions of a mesh, which are not "
                "all ranks; shard it over one, or let muon= return False for it"
            )
        return mesh.get_group(cut[0]) if len(cut) == 1 else dist.group.WORLD if cut else None

    def own_part(self) -> list[tuple[int, int]]:
        """Returns where this rank's part of each row begins and ends, in each dimension."""
        parameter: Any = self.parameter
        local = local_part(parameter.detach())
        is_cut = isinstance(parameter, DTensor) and local.numel()
        begins = parameter.__create_chunk_list__()[0].offsets if is_cut else [0] * local.ndim
        return [(begin, begin + size) for begin, size in zip(begins, local.shape, strict=True)][int(self.stacked) :]

    def add_(self, rows: slice, update: Tensor, group: Mapping[str, Any]) -> None:
        """Decays rows of the parameter, and adds this rank's part of the orthogonal update of each matrix, scaled by
        its own rows and columns. Of a parameter ``by_owner``, these are ``rows`` of each rank's own.
        """
        place, lr = self.of(self.parameter), float(group["lr"])
        scale = torch.empty_like(self.row, dtype=torch.float32, device=place.device)
        for view, (out, inward) in zip(self.views(scale).values(), self.shapes, strict=True):
            as_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
            view.fill_(-lr * (0.2 * math.sqrt(max(out, inward)) if as_adamw else math.sqrt(max(1, out / inward))))
        scale = scale[self.boxes[self.channel.rank]]
        place = place.unflatten(0, (len(self.boxes), -1))[:, rows] if self.by_owner else place[rows]
        place.mul_(1 - lr * group["weight_decay"])
        # Two operations, as a fused one may round the last elements of a part otherwise than those before.
        place.add_(update.float().mul_(scale).view_as(place))


def matrices_of(
    model: nn.Module, names: Mapping[nn.Parameter, str], muon: Choice | None
) -> dict[nn.Parameter, Matrices]:
    """Returns the parameters that Muon trains, in the order of the model, and their matrices. ``muon``: the argument of
    ``Muon``.

    Raises ValueError for parameters whose matrices are not known, and for a model without any.
    """
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise ValueError("FullyShardedDataParallel keeps no matrices; shard the model by fully_shard or ms.parallelize")
    choices = {parameter: muon(name, parameter) if muon is not None else None for parameter, name in names.items()}
    known, biases = _known_matrices(model, {each: name for each, name in names.items() if choices[each] is not False})
    plain = _hidden_matrices(model, biases)
    found: dict[nn.Parameter, Matrices] = {}
    for parameter, name in names.items():
        wanted, ndim = choices[parameter], parameter.ndim
        if not isinstance(wanted, bool | None):
            raise ValueError(f"muon returned {wanted!r} for {name}; return True, False, or None for the default")
        if wanted is None:
            # A parameter of three dimensions that nothing declares is refused below.
            wanted = parameter in known or plain.get(parameter, ndim == 3 and parameter.requires_grad)
        if not wanted:
            continue
        reasons = {
            "holds biases of experts": parameter in biases,
            "has three dimensions and no experts under a strategy (ms.parallelize, OutsideExperts)": ndim == 3,
            "does not have two dimensions": ndim != 2,
            "is a part of a matrix (tensor_model_parallel)": getattr(parameter, "tensor_model_parallel", False),
        }
        if parameter not in known and any(reasons.values()):
            raise ValueError(
                f"{name} {[*parameter.shape]} {next(compress(reasons, reasons.values()))}, so Muon does not know its "
                "matrices; let muon= return False for it"
            )
        found[parameter] = known.get(parameter) or Matrices(name, parameter, lambda rows: {"": rows})
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no matrices for Muon but embeddings, heads and routers; use torch.optim.AdamW"
        )
    return found


def _known_matrices(
    model: nn.Module, names: Mapping[nn.Parameter, str]
) -> tuple[dict[nn.Parameter, Matrices], set[nn.Parameter]]:
    """Returns parameters whose matrices are declared: those of experts, and of modules that have ``moesys_matrices``
    (views by the name of a parameter); and the biases of experts.
    """
    known: dict[nn.Parameter, Matrices] = {}
    biases: set[nn.Parameter] = set()
    for experts in experts_of(model):
        shards, outside = experts.shards, experts.outside
        if (masters := experts.masters) is not None and masters in names:
            of_flat = partial(_of_flat, shards.form)
            known[masters] = Matrices(names[masters], masters, of_flat, True, True, shards.can_send_whole())
        read = {} if outside is None else outside.read()
        # FSDP, where it holds parameters, and AdamW of biases take gradients that lie as parameters do.
        by_owner = (
            outside is not None
            and outside.mean_over is not None
            and shards.can_send_whole()
            and not any(name.endswith("_bias") for name in read)
            and all(isinstance(each, nn.Parameter) and each in names for each in read.values())
        )
        for name, kept in read.items():
            for tensor in [kept] if isinstance(kept, Tensor) else kept:
                turned = tensor not in names and tensor._base is not None
                parameter: Any = tensor._base if turned else tensor
                # One that is computed from parameters, such as those of an adapter, is not in ``names``.
                if parameter in names and name.endswith("_bias"):
                    biases.add(parameter)
                elif parameter in names:
                    if turned and (tensor.numel() != parameter.numel() or tensor.stride() != parameter.mT.stride()):
                        raise ValueError(
                            f"{names[parameter]} {[*parameter.shape]} is read as {name} {[*tensor.shape]}, a view "
                            "other than .mT, so Muon does not know its matrices; let muon= return False for it"
                        )
                    interleaved = name == "gate_up" and _is_interleaved(experts)
                    views = partial(_of_part, name, turned != experts.function.transposed, interleaved)
                    stacked = isinstance(kept, Tensor)
                    known[parameter] = Matrices(names[parameter], parameter, views, stacked, True, by_owner)
    for module in model.modules():
        for name, views in module.__dict__.get("moesys_matrices", {}).items():
            if (parameter := module.get_parameter(name)) in names:
                known[parameter] = Matrices(names[parameter], parameter, views)
    return known, biases


def _of_flat(form: ExpertForm, rows_NP: Tensor) -> dict[str, Tensor]:
    """Returns the matrices of our own experts, by name."""
    gate_up, down = form.views(rows_NP).values()
    return {**_of_part("gate_up", False, False, gate_up), "down": down}


def _of_part(name: str, turned: bool, interleaved: bool, rows: Tensor) -> dict[str, Tensor]:
    """Returns the matrices in a part of experts, by name."""
    part = rows.mT if turned else rows
    if name != "gate_up":
        return {name: part}
    gate, up = (part[:, 0::2], part[:, 1::2]) if interleaved else part.chunk(2, dim=1)
    return {"gate": gate, "up": up}


def _is_interleaved(experts: Experts) -> bool:
    """Returns whether the rows of gate and up take turns, from what the activation reads: an element that is NaN makes
    that output NaN which it belongs to. Raises ValueError where it makes others.
    """
    assert experts.outside is not None
    activation, width = experts.outside.activation, experts.shape.intermediate_size
    if activation is None or width == 1:
        return False
    rows = torch.zeros(2, 2 * width, device=experts.store.masters.device)
    rows[[0, 1], [1, -2]] = torch.nan
    found = activation(rows).isnan().nonzero().tolist()
    if found not in ([[0, 0], [1, width - 1]], [[0, 1], [1, width - 2]]):
        raise ValueError(
            f"layer {experts.layer_index}: its activation reads its rows of gate_up neither as [gate | up] nor "
            "interleaved, so Muon does not know its matrices; let muon= return False for gate_up"
        )
    return found == [[0, 0], [1, width - 1]]


def _hidden_matrices(model: nn.Module, biases: Set[nn.Parameter]) -> dict[nn.Parameter, bool]:
    """Returns parameters, and whether Muon trains them by default, if their matrices are not declared: those of two
    dimensions do, but embeddings, heads, routers, ``biases`` of experts, single rows, and what is no matrix of a
    product. Kernels of convolutions are in it too.
    """
    routers = []
    for path, module in model.named_modules():
        if isinstance(experts := module.__dict__.get("moesys_experts", module), Experts):
            # PEFT wraps experts.
            around = "".join(path.split(".base_layer")[0].rpartition(".")[:2])
            routers.append((around, [experts.shape.num_experts, experts.shape.hidden_size]))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found = dict.fromkeys(biases, False)
    for path, module in model.named_modules():
        parts = path.split(".")
        # Blocks have numbers.
        is_head = module is head or (parts[-1] in _HEADS and not any(map(str.isdecimal, parts)))
        is_shared = any(part.startswith("shared") for part in parts)
        of_routers = [sizes for around, sizes in routers if f"{path}.".startswith(around) and not is_shared]
        for name, parameter in module.named_parameters(recurse=False):
            if "embed" in f"{path}.{name}".lower() or isinstance(module, _NO_MATRICES):
                # An embedding may be the weight of the head, too.
                found[parameter] = False
            elif parameter.ndim == 2 and parameter not in found:
                is_plain = name == "weight" and min(parameter.shape) > 1
                found[parameter] = is_plain and not is_head and [*parameter.shape] not in of_routers
    return found
