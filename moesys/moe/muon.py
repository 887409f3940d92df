"""Muon: the optimizer that orthogonalises the update of each matrix, for whole models with experts under any strategy.

The arithmetic is that of ``torch.optim.Muon`` (momentum, Newton–Schulz iteration, decoupled weight decay). A matrix is
one that the model multiplies by: gate, up and down of each expert are three, wherever their elements lie. A rank that
has all of a matrix orthogonalises it. Where ranks have parts of matrices (``Fsep``, FSDP2), each matrix has an owner:
parts of the update before the iteration travel to it, and parts of the result travel back, each by one all-to-all.
Parameters, gradients and momentum stay where they are; but of our own masters under ``Fsep``, backward sends gradients
of whole experts to their owners, where momentum lies too, and only results travel.

E experts, P parameters of an expert, R ranks; matrices are [out, in].
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from moesys.collectives import device_of
from moesys.frames import Position
from moesys.moe.arguments import require_module
from moesys.moe.experts import experts_of
from moesys.moe.gradients import channels_of, raise_mismatch, reshard_units
from moesys.moe.matrices import Choice, Matrices, matrices_of
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder

# A rank orthogonalises so many experts, or other matrices, between two messages.
_ROWS_AT_ONCE = 4
# A product of experts on a GPU has always so many, so that no bit of one depends on which others there are.
_MATRICES_AT_ONCE = 4
# From so many rows on, products of a matrix with its own transpose are computed by halves on CPUs.
_HALVED_ROWS = 512
# The name under which a channel counts the bytes of messages.
_LANE = "optimizer"


class Muon(Optimizer):
    """Trains the matrices of ``model`` by Muon, and all of its other parameters by AdamW.

    Muon trains gate, up and down of each expert, each by itself, and other matrices (two-dimensional parameters) except
    embeddings, the head, routers, biases, and single rows or columns. ``summary`` returns what is trained by what.
    ``muon(name, parameter)`` returns True or False for a parameter that is to be trained by Muon or by AdamW in any
    case, and None for others.

    ``lr``, ``weight_decay``, ``momentum``, ``nesterov``, ``ns_coefficients``, ``eps``, ``ns_steps`` and
    ``adjust_lr_fn`` mean what they mean in ``torch.optim.Muon``; rows and columns are those of each matrix as
    [out, in]. ``adamw``: arguments of ``torch.optim.AdamW``; its ``lr`` is by default that of Muon with
    ``adjust_lr_fn="match_rms_adamw"``, and otherwise AdamW's own. ``ns_dtype``: the dtype of the iteration, and of what
    ranks send each other; by default bfloat16 on GPUs, and float32 on CPUs. Momentum is float32.

    Make it after the model is sharded. Its construction and ``step`` are collectives of the ranks that share it.

    Raises ValueError for arguments out of range, a model without matrices, and a parameter that has matrices which are
    not known; TypeError for a ``muon`` that is not callable; and ``RankMismatchError`` on all ranks where they would
    train other matrices, or otherwise.
    """

    # ``OwnMasters`` asks this of optimizers that work on matrices.
    knows_matrices = True

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        adamw: Mapping[str, Any] | None = None,
        muon: Choice | None = None,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        require_module(model)
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        _check(options, ns_dtype)
        if muon is not None and not callable(muon):
            raise TypeError(f"muon is a {type(muon).__name__}; give a function of a parameter's name and the parameter")
        of_adamw = ({"lr": lr} if adjust_lr_fn == "match_rms_adamw" else {}) | dict(adamw or {})
        reshard_units(model)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._matrices = matrices = matrices_of(model, self._names, muon)
        groups: list[dict[str, Any]] = []
        for trains in ("experts", "matrices"):
            if found := [each.parameter for each in matrices.values() if each.of_experts == (trains == "experts")]:
                groups.append({"params": found, **options, "algorithm": "muon", "trains": trains})
        self._adamw: AdamW | None = None
        if others := [parameter for parameter in self._names if parameter not in matrices]:
            if len({each.device_mesh if isinstance(each, DTensor) else None for each in others}) > 1:
                # Lists of tensors must be of one mesh.
                of_adamw.setdefault("foreach", False)
            self._adamw = AdamW(others, **of_adamw)
            groups.append({**self._adamw.param_groups[0], "algorithm": "adamw", "trains": "others"})
        super().__init__(groups, {})
        self._ns_dtype = ns_dtype
        channels = _connect(model, [*matrices.values()]).values()
        described = [each.described() for each in matrices.values()]
        described += [f"{options} {of_adamw} {ns_dtype}", *(f"{self._names[each]} by AdamW" for each in others)]
        for channel in channels:
            _require_alike(channel, described)
        for experts in experts_of(model):
            owned = None if experts.masters is None else matrices.get(experts.masters)
            if owned is not None and owned.channel is not None and experts.shards.can_send_whole():
                owned.by_owner = experts.store.whole_gradients = True
        self._rounds = _rounds_of([*matrices.values()], channels)

    def summary(self) -> str:
        """Returns what is trained by what: a line for each group, and below it one for each of its parameters."""
        lines = []
        for group in self.param_groups:
            by, parameters = group["algorithm"], group["params"]
            title = {"experts": "Muon, experts", "matrices": "Muon, other matrices", "others": "AdamW"}[group["trains"]]
            lines.append(f"{title}: {_count(len(parameters), 'parameter')}")
            if by == "muon":
                lines[-1] += f", {_count(sum(self._matrices[each].num_matrices for each in parameters), 'matrix')}"
            lines[-1] += f", lr={float(group['lr']):g}, weight_decay={group['weight_decay']:g}"
            for parameter in parameters:
                what = self._matrices[parameter].kinds if by == "muon" else f"{[*parameter.shape]}"
                frozen = "" if parameter.requires_grad else " (frozen)"
                lines.append(f"  {self._names[parameter]}: {what}{frozen}")
        return "\n".join(lines)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step, with the gradients that parameters have; those without one stay as they are. Returns what
        ``closure`` returns. A collective of ranks that have parts of a matrix; a gradient that only some of them have
        is zero on the others.

        Raises ValueError for parameters that were not in the model when the optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group_of: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            group_of |= dict.fromkeys(group["params"], group)
        if new := [each for each in group_of if each not in self._names]:
            raise ValueError(
                f"a parameter of shape {[*new[0].shape]} was added to Muon, which does not know its matrices; make the "
                "optimizer again"
            )
        if self._adamw is not None:
            self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
            self._adamw.state = self.state
            self._adamw.step()
        self._train_matrices(group_of)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` has returned. Raises ValueError for the state of an optimizer that trained other
        parameters by Muon, such as AdamW; nothing is changed then.
        """
        parameters = [each for group in self.param_groups for each in group["params"]]
        ids = [each for group in state_dict["param_groups"] for each in group["params"]]
        states = [
            (parameter, state_dict["state"].get(each, {})) for parameter, each in zip(parameters, ids, strict=False)
        ]
        for parameter, state in states:
            wanted = "momentum_buffer" if parameter in self._matrices else "exp_avg"
            if state and wanted not in state:
                raise ValueError(
                    f"the state of {self._names[parameter]} has {', '.join(map(str, state))} and no {wanted}: it is of "
                    "another optimizer, or one with other groups; load the state of a ms.Muon that trains the same "
                    "parameters, or begin with a new state and load only the model"
                )
        super().load_state_dict(state_dict)
        for parameter, state in states:
            # Optimizers cast state to the dtype of its parameter.
            if parameter in self._matrices and state:
                momentum = state["momentum_buffer"].to(parameter.device, torch.float32)
                self.state[parameter]["momentum_buffer"] = self._matrices[parameter].placed(momentum)

    def _train_matrices(self, group_of: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Makes a step of Muon. The messages of a round travel while the round before is computed."""
        groups = {each: group_of[each.parameter] for each in self._matrices.values()}
        active = self._with_gradients()
        for each in active:
            state = self.state[each.parameter]
            if "momentum_buffer" not in state:
                momentum = torch.zeros_like(each.parameter, dtype=torch.float32)
                state["momentum_buffer"] = each.placed(momentum)
            if each.parameter.grad is not None:
                each.parameter.grad = each.placed(each.parameter.grad)
        found = set(active)
        rounds = [
            self._train([share for share in shares if share.matrices in found], groups) for shares in self._rounds
        ]
        # While a round is computed, the messages of the next one are on their way, and those of the one before return.
        for first in range(len(rounds) + 2):
            for index in (first, first - 1, first - 2):
                if 0 <= index < len(rounds):
                    next(rounds[index], None)

    def _with_gradients(self) -> list[Matrices]:
        """Returns the parameters that have a gradient on any of the ranks that have parts of their matrices."""
        found = {each: each.parameter.grad is not None for each in self._matrices.values()}
        by_channel: dict[Channel, list[Matrices]] = {}
        for each in self._matrices.values():
            if each.channel is not None:
                by_channel.setdefault(each.channel, []).append(each)
        for channel, cut in by_channel.items():
            mine = bytes(found[each] for each in cut)
            of_ranks = channel.gather_bytes(mine, Position("Muon.step()"), device_of(channel.group))
            found |= {each: any(has) for each, has in zip(cut, zip(*of_ranks, strict=True), strict=True)}
        return [each for each, has in found.items() if has]

    def _train(self, shares: Sequence[Share], groups: Mapping[Matrices, Mapping[str, Any]]) -> Iterator[None]:
        """Trains the shares of one round: sends what others own, and yields; receives what this rank owns, makes it
        orthogonal and sends it back, and yields; receives its own parts and adds them. Without a channel, one share
        after another.
        """
        if not shares:
            return
        first = shares[0].matrices
        if (channel := first.channel) is None:
            yield
            for share in shares:
                update = self._update(share, groups[first])
                self._orthogonalize([share], [update], groups)
                first.add_(share.rows, update, groups[first])
            return
        updates = [self._update(share, groups[share.matrices]) for share in shares]
        wholes, by_owner = updates, first.by_owner
        if by_owner:
            part = first.row[first.boxes[channel.rank]].shape[1:]
            updates = [wholes[0].new_empty(sum(share.counts), *part) for share in shares]
        else:
            wholes = [updates[0].new_empty(share.counts[channel.rank], *share.matrices.row_shape) for share in shares]
        # By rank: what this rank has of the rows that the other owns, and what the other has of the rows that it owns.
        mine_R, theirs_R = [], []
        for rank in range(channel.num_ranks):
            mine_R.append([update[share.owned_by(rank)] for share, update in zip(shares, updates, strict=True)])
            theirs_R.append([row[share.matrices.boxes[rank]] for share, row in zip(shares, wholes, strict=True)])
        receive = None if by_owner else _exchange(channel, mine_R, theirs_R)
        yield
        if receive is not None:
            receive()
        self._orthogonalize(shares, wholes, groups)
        receive = _exchange(channel, theirs_R, mine_R)
        del wholes, theirs_R
        yield
        receive()
        for share, update in zip(shares, updates, strict=True):
            for rows, of_rows in share.places():
                share.matrices.add_(rows, update[of_rows], groups[share.matrices])

    def _orthogonalize(
        self, shares: Sequence[Share], wholes: Sequence[Tensor], groups: Mapping[Matrices, Mapping[str, Any]]
    ) -> None:
        """Makes all matrices in whole rows orthogonal, in place, those of one group together."""
        by_group: dict[int, tuple[Mapping[str, Any], list[Tensor]]] = {}
        for share, whole in zip(shares, wholes, strict=True):
            group = groups[share.matrices]
            by_group.setdefault(id(group), (group, []))[1].extend(share.matrices.views(whole))
        for group, views in by_group.values():
            orthogonalize_(views, group)

    def _update(self, share: Share, group: Mapping[str, Any]) -> Tensor:
        """Returns this rank's part of the update before it is made orthogonal, in the dtype of the iteration."""
        matrices, momentum = share.matrices, group["momentum"]
        buffer = matrices.of(self.state[matrices.parameter]["momentum_buffer"])[share.rows]
        gradient = matrices.parameter.grad
        grad = torch.zeros_like(buffer) if gradient is None else matrices.of(gradient)[share.rows]
        grad = grad.float()
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        dtype = self._ns_dtype or (torch.float32 if buffer.device.type == "cpu" else torch.bfloat16)
        # A copy, as the iteration works in place.
        return update.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _exchange(
    channel: Channel, sent_R: Sequence[Sequence[Tensor]], places_R: Sequence[Sequence[Tensor]]
) -> Callable[[], None]:
    """Starts sending tensors to each rank. Returns what waits for those that come from each, and writes them into
    their places.
    """
    sent, places = [*chain.from_iterable(sent_R)], [*chain.from_iterable(places_R)]
    in_counts, out_counts = ([sum(each.numel() for each in of) for of in by_rank] for by_rank in (sent_R, places_R))
    received = sent[0].new_empty(sum(out_counts))
    flat = torch.cat([each.reshape(-1) for each in sent])
    transfer = channel.all_to_all(received, flat, out_counts, in_counts, lane=_LANE)

    def receive() -> None:
        transfer.wait()
        for place, part in zip(places, received.split([place.numel() for place in places]), strict=True):
            place.copy_(part.view(place.shape))

    return receive


def orthogonalize_(views: Iterable[Tensor], group: Mapping[str, Any]) -> None:
    """Replaces each matrix of ``views`` [n, out, in] by its orthogonal factor, as nearly as the Newton–Schulz iteration
    finds it with the settings of a parameter ``group``. The bits of a matrix depend on no other.

    The iteration is that of ``torch.optim.Muon``, from https://kellerjordan.github.io/posts/muon.
    """
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for view in views:
        wide = view if view.shape[1] <= view.shape[2] else view.mT
        if view.device.type != "cpu" and group["trains"] == "experts" and len(view):
            by_shape.setdefault(wide.shape[1:], []).append(wide)
            continue
        for matrix, place in zip(view, wide, strict=True):
            # Laid out as torch's own Muon lays it out, so that sums are in the same order.
            copied = matrix.clone(memory_format=torch.contiguous_format)
            place.copy_(_iterated(copied if wide is view else copied.mT, group))
    for wides in by_shape.values():
        _in_batches(wides, group)


def _in_batches(wides: Sequence[Tensor], group: Mapping[str, Any]) -> None:
    """Replaces matrices [n, out, in] of one shape, with no more rows than columns, by their orthogonal factors."""
    stacked = torch.cat([*wides])
    for part in stacked.split(_MATRICES_AT_ONCE):
        missing = _MATRICES_AT_ONCE - len(part)
        padded = torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
        part.copy_(_iterated(padded, group)[: len(part)])
    for wide, part in zip(wides, stacked.split([len(wide) for wide in wides]), strict=True):
        wide.copy_(part)


def _iterated(wide: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns the orthogonal factor of one matrix [out, in], or of several, with no more rows than columns."""
    a, b, c = group["ns_coefficients"]
    add_product = torch.addmm if wide.ndim == 2 else torch.baddbmm
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    # In bfloat16, rounding the square before it is scaled would lose digits.
    halved = wide.ndim == 2 and wide.device.type == "cpu" and wide.dtype == torch.float32 and len(wide) >= _HALVED_ROWS
    gram, square = (wide.new_empty(len(wide), len(wide)) for _ in range(2)) if halved else (wide, wide)
    for _ in range(group["ns_steps"]):
        if halved:
            _multiply_by_transpose(wide, gram)
            _multiply_by_transpose(gram, square)
            polynomial = square.mul_(c).add_(gram, alpha=b)
        else:
            gram = wide @ wide.mT
            polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        wide = add_product(wide, polynomial, wide, beta=a)
    return wide


def _multiply_by_transpose(matrix: Tensor, out: Tensor) -> None:
    """Writes the product of a matrix and its transpose, of which nearly one half is copied from the other."""
    if len(matrix) < _HALVED_ROWS:
        torch.mm(matrix, matrix.mT, out=out)
        return
    half = len(matrix) // 2
    first, second = matrix[:half], matrix[half:]
    _multiply_by_transpose(first, out[:half, :half])
    _multiply_by_transpose(second, out[half:, half:])
    torch.mm(second, first.mT, out=out[half:, :half])
    out[:half, half:] = out[half:, :half].mT


# --- which rank trains what -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """Rows of one parameter that are trained together. ``counts`` [R]: of how many rows each rank of the channel is the
    owner, in the order of ranks; empty where this rank has whole rows. Of a parameter ``by_owner``, ``rows`` are those
    of each rank's own.
    """

    matrices: Matrices
    rows: slice
    counts: tuple[int, ...] = ()

    def owned_by(self, rank: int) -> slice:
        """Returns which of these rows belong to a rank."""
        first = sum(self.counts[:rank])
        return slice(first, first + self.counts[rank])

    def places(self) -> Iterator[tuple[slice, slice]]:
        """Yields rows of the parameter, and where in this share they are."""
        if not self.matrices.by_owner:
            yield self.rows, slice(None)
            return
        own = len(self.matrices.of(self.matrices.parameter)) // len(self.counts)
        for rank in range(len(self.counts)):
            yield slice(rank * own + self.rows.start, rank * own + self.rows.stop), self.owned_by(rank)


def _connect(model: nn.Module, all_matrices: Sequence[Matrices]) -> dict[tuple[int, ...], Channel]:
    """Returns a channel for each group of ranks that share experts or have parts of matrices, and gives it to these."""
    channels: dict[tuple[int, ...], Channel] = {}

    def channel_of(group: dist.ProcessGroup, device_type: str) -> Channel:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in channels:
            channels[ranks] = Channel(group, [0] * len(ranks), Recorder(0), Meter(device_type), device_type)
        return channels[ranks]

    for channel in channels_of(experts_of(model)):
        if channel.group is not None and channel.num_ranks > 1:
            channel_of(channel.group, channel.device_type)
    for matrices in all_matrices:
        parameter = matrices.parameter
        if not isinstance(parameter, DTensor):
            continue
        mesh, first = parameter.device_mesh, int(matrices.stacked)
        cut = [
            dim
            for dim, each in enumerate(parameter.placements)
            if mesh.size(dim) > 1 and not each.is_replicate() and getattr(each, "dim", first) >= first
        ]
        if not cut:
            continue
        group = mesh.get_group(cut[0]) if len(cut) == 1 else dist.group.WORLD
        assert group is not None
        if len(cut) > 1 and mesh.size() != dist.get_world_size():
            raise ValueError(
                f"{matrices.name} {[*parameter.shape]} is sharded over {len(cut)} dimensions of a mesh of "
                f"{mesh.size()} ranks, and there are {dist.get_world_size()}; shard it over one, or let muon= return "
                "False for it"
            )
        matrices.channel = channel_of(group, mesh.device_type)
    return channels


def _require_alike(channel: Channel, described: Sequence[str]) -> None:
    """Raises ``RankMismatchError`` on all ranks where they would train other parameters, or otherwise."""
    text, at, device = "\n".join(described).encode(), Position("Muon()"), device_of(channel.group)
    if len(set(channel.gather_bytes(hashlib.sha256(text).digest(), at, device))) > 1:
        words = "would train differently: {}, and {}; give all ranks the same model and the same arguments"
        raise_mismatch(text, channel, at, device, words)


def _rounds_of(all_matrices: Sequence[Matrices], channels: Iterable[Channel]) -> list[list[Share]]:
    """Returns what is trained when, in the order of the model; shares of one round travel together, if they travel.
    Each row of a parameter that is cut goes to the rank with the least work so far, costly rows first. A collective.
    """
    num_rows = {each: len(each.of(each.parameter)) for each in all_matrices}
    shares: dict[Matrices, list[Share]] = {}
    for each in all_matrices:
        starts = range(0, num_rows[each], _ROWS_AT_ONCE)
        shares[each] = [Share(each, slice(row, row + _ROWS_AT_ONCE)) for row in starts]
    mine = sum(num_rows[each] * each.cost for each in all_matrices if each.channel is None)
    for channel in channels:
        cut = [each for each in all_matrices if each.channel is channel]
        said = json.dumps([mine, [each.own_part() for each in cut]]).encode()
        of_ranks = [*map(json.loads, channel.gather_bytes(said, Position("Muon()"), device_of(channel.group)))]
        work = [(load, rank) for rank, (load, _) in enumerate(of_ranks)]
        for index, each in enumerate(cut):
            each.set_parts([parts[index] for _, parts in of_ranks])
        for each in sorted(cut, key=lambda each: -each.cost):
            at_once, shares[each] = _ROWS_AT_ONCE * channel.num_ranks, []
            for row in range(0, num_rows[each], at_once):
                stop, counts = min(num_rows[each], row + at_once), [0] * channel.num_ranks
                if each.by_owner:
                    # Gradients of whole rows are on their owners already, as many on each.
                    own = slice(row // channel.num_ranks, stop // channel.num_ranks)
                    shares[each].append(Share(each, own, (own.stop - own.start,) * channel.num_ranks))
                    continue
                for _ in range(row, stop):
                    rank = min(work)[1]
                    work[rank] = (work[rank][0] + each.cost, rank)
                    counts[rank] += 1
                shares[each].append(Share(each, slice(row, stop), tuple(counts)))
        mine = work[channel.rank][0]
    rounds: list[list[Share]] = []
    waiting: dict[Channel, list[Share]] = {}
    for each in all_matrices:
        if (of := each.channel) is None:
            # One round for each parameter, as ranks may have other numbers of rows, and must have the same rounds.
            rounds.append(shares[each])
        elif each.stacked:
            rounds += [[share] for share in shares[each]]
        else:
            together = waiting.setdefault(of, [])
            together += shares[each]
            if len(together) == of.num_ranks:
                rounds.append(waiting.pop(of))
    return [*rounds, *waiting.values()]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else {'matrix': 'matrices'}.get(noun, noun + 's')}"


def _check(options: Mapping[str, Any], ns_dtype: torch.dtype | None) -> None:
    """Raises ValueError for arguments that are out of range."""
    for name, most in (("lr", math.inf), ("weight_decay", math.inf), ("momentum", 1.0), ("eps", math.inf)):
        value = options[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} has {value.numel()} elements; give a number, or a tensor of one")
        if not 0 <= float(value) < most:
            raise ValueError(f"{name}={float(value):g} must be at least 0 and less than {most:g}")
    steps = options["ns_steps"]
    if not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps={steps!r} must be an integer from 1 to 99; 5 is usual")
    if len(options["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients={options['ns_coefficients']} must be three numbers")
    if options["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn={options['adjust_lr_fn']!r} must be None, 'original' or 'match_rms_adamw'")
    if ns_dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"ns_dtype={ns_dtype} must be torch.float32, torch.bfloat16, or None for that of the device")
