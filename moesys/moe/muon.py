"""Muon: the optimizer that orthogonalises the update of each matrix, for whole models with experts under any strategy.

The arithmetic is that of ``torch.optim.Muon`` (momentum, Newton–Schulz iteration, decoupled weight decay). A matrix is
one that the model multiplies by: gate, up and down of each expert are three, wherever their elements lie. A rank that
has all of a matrix orthogonalises it. Where ranks have parts of matrices (``Fsep``, FSDP2), each matrix has an owner:
parts of the update before the iteration travel to it, and parts of the result travel back, each by one all-to-all.
Parameters, gradients and momentum stay where they are; but of experts under ``Fsep`` whose matrices are ``by_owner``,
backward sends gradients of whole experts to their owners, where momentum lies too, and only results travel.

E experts, P parameters of an expert, R ranks; matrices are [out, in].
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from moesys.collectives import device_of
from moesys.frames import Position
from moesys.moe.arguments import require_module
from moesys.moe.experts import experts_of
from moesys.moe.gradients import channels_of, raise_mismatch, reshard_units
from moesys.moe.matrices import Choice, Matrices, matrices_of
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder

# A rank orthogonalises so many experts, or other matrices, between two messages. Products of experts on a GPU have
# always so many matrices, so that no bit of one depends on which others there are.
_AT_ONCE = 4
# From so many rows on, products of a matrix with its own transpose are computed by halves on CPUs.
_HALVED_ROWS = 512
# Devices on which experts are made orthogonal one by one.
_ONE_BY_ONE = ("cpu",)


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
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        options |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        _check(ns_dtype=ns_dtype, **options)
        if muon is not None and not callable(muon):
            raise TypeError(f"muon is a {type(muon).__name__}; give a function of a parameter's name and the parameter")
        reshard_units(model)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._matrices = matrices = matrices_of(model, self._names, muon)
        groups: list[dict[str, Any]] = []
        for trains in ("experts", "matrices"):
            if found := [each.parameter for each in matrices.values() if each.of_experts == (trains == "experts")]:
                groups.append({"params": found, **options, "algorithm": "muon", "trains": trains})
        others = [parameter for parameter in self._names if parameter not in matrices]
        of_adamw = ({"lr": lr} if adjust_lr_fn == "match_rms_adamw" else {}) | dict(adamw or {})
        if len({getattr(each, "device_mesh", None) for each in others}) > 1:
            # Lists of tensors must be of one mesh.
            of_adamw.setdefault("foreach", False)
        self._adamw = AdamW([{"params": others}], **of_adamw)
        if others:
            groups.append({**self._adamw.param_groups[0], "algorithm": "adamw", "trains": "others"})
        super().__init__(groups, {})
        self._ns_dtype = ns_dtype
        described = [f"{each.name} {[*each.parameter.shape]} by Muon: {each.kinds}" for each in matrices.values()]
        described += [f"{options} {of_adamw} {ns_dtype}", *(f"{self._names[each]} by AdamW" for each in others)]
        self._rounds = _rounds_of([*matrices.values()], _connect(model, matrices.values()), "\n".join(described))
        for experts in experts_of(model):
            kept = experts.masters if experts.outside is None else experts.outside.read()["down"]
            experts.store.whole_gradients = (
                isinstance(kept, nn.Parameter) and kept in matrices and matrices[kept].by_owner
            )

    def summary(self) -> str:
        """Returns what is trained by what: a line for each group, and below it one for each of its parameters."""
        lines = []
        for group in self.param_groups:
            parameters = group["params"]
            title = {"experts": "Muon, experts", "matrices": "Muon, other matrices", "others": "AdamW"}[group["trains"]]
            lines.append(f"{title}: {len(parameters):,} parameter{'s' * (len(parameters) != 1)}")
            if group["algorithm"] == "muon":
                number = sum(self._matrices[each].num_matrices for each in parameters)
                lines[-1] += f", {number:,} {'matrix' if number == 1 else 'matrices'}"
            lines[-1] += f", lr={float(group['lr']):g}, weight_decay={group['weight_decay']:g}"
            for parameter in parameters:
                what = self._matrices[parameter].kinds if parameter in self._matrices else [*parameter.shape]
                lines.append(f"  {self._names[parameter]}: {what}{'' if parameter.requires_grad else ' (frozen)'}")
        return "\n".join(lines)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step, with the gradients that parameters have; those without one stay as they are. Returns what
        ``closure`` returns. A collective of ranks that have parts of a matrix; a gradient that only some of them have
        is zero on the others.

        Raises ValueError for parameters that were not in the model when the optimizer was made.
        """
        group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        if new := [each for each in group_of if each not in self._names]:
            raise ValueError(f"Muon does not know the matrices of a new parameter {[*new[0].shape]}; make it again")
        self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        self._adamw.state = self.state
        loss = self._adamw.step(closure)
        rounds = [self._train(shares, group_of) for shares in self._with_gradients()]
        # While a round is computed, the messages of the next one are on their way, and those of the one before return.
        done: Iterator[None] = iter(())
        for of_three in zip([*rounds, done, done], [done, *rounds, done], [done, done, *rounds], strict=True):
            for each in of_three:
                next(each, None)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` has returned. Raises ValueError for the state of an optimizer that trained other
        parameters by Muon, such as AdamW; nothing is changed then.
        """
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        states = {each: state_dict["state"].get(of, {}) for each, of in zip(parameters, ids, strict=False)}
        for parameter, state in states.items():
            wanted = "momentum_buffer" if parameter in self._matrices else "exp_avg"
            if state and wanted not in state:
                raise ValueError(
                    f"the state of {self._names[parameter]} has {', '.join(map(str, state))} and no {wanted}: it is of "
                    "another optimizer or other groups; load that of a ms.Muon of the same groups, or only the model"
                )
        super().load_state_dict(state_dict)
        for parameter, matrices in self._matrices.items():
            if state := states.get(parameter):
                # Optimizers cast state to the dtype of its parameter.
                momentum = state["momentum_buffer"].to(parameter.device, torch.float32)
                self.state[parameter]["momentum_buffer"] = matrices.placed(momentum)

    def _with_gradients(self) -> list[list[Share]]:
        """Returns the rounds of those parameters that have a gradient on any of the ranks that have parts of matrices,
        with their momentum in the state.
        """
        all_matrices = self._matrices.values()
        found = [each.parameter.grad is not None for each in all_matrices]
        for channel in dict.fromkeys(each.channel for each in all_matrices):
            of_ranks = channel.gather_bytes(bytes(found), Position("Muon.step()"), device_of(channel.group))
            found = [any(has) for has in zip(*of_ranks, strict=True)]
        active = dict.fromkeys(compress(all_matrices, found))
        for each in active:
            state, parameter = self.state[each.parameter], each.parameter
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = each.placed(torch.zeros_like(parameter, dtype=torch.float32))
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(state["momentum_buffer"], dtype=parameter.dtype)
            parameter.grad = each.placed(parameter.grad)
        return [[share for share in shares if share.matrices in active] for shares in self._rounds]

    def _train(self, shares: Sequence[Share], group_of: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
        """Trains the shares of one round: sends what others own, and yields; receives what this rank owns, makes it
        orthogonal and sends it back, and yields; receives its own parts and adds them. Of whole rows, one share
        after another.
        """
        if not shares:
            return
        groups, first = [group_of[share.matrices.parameter] for share in shares], shares[0].matrices
        if (channel := first.channel).group is None:
            yield
            for share, group in zip(shares, groups, strict=True):
                update = self._update(share, group)
                orthogonalize_(first.views(update).values(), group)
                first.add_(share.rows, update, group)
            return
        updates = wholes = [*map(self._update, shares, groups)]
        if first.by_owner:
            part = first.row[first.boxes[channel.rank]].shape[1:]
            updates = [whole.new_empty(sum(share.counts), *part) for share, whole in zip(shares, wholes, strict=True)]
        else:
            whole_rows = ((share.counts[channel.rank], *share.matrices.row.shape[1:]) for share in shares)
            wholes = [*map(updates[0].new_empty, whole_rows)]
        # By share and rank: what this rank has of the rows of the other, and the other of those of this rank.
        mine = [update.split(share.counts) for share, update in zip(shares, updates, strict=True)]
        theirs = [[whole[box] for box in share.matrices.boxes] for share, whole in zip(shares, wholes, strict=True)]
        receive = (lambda: None) if first.by_owner else _exchange(channel, mine, theirs)
        yield
        receive()
        for share, group in zip(shares, groups, strict=True):
            orthogonalize_(share.matrices.views(wholes.pop(0)).values(), group)
        receive = _exchange(channel, theirs, mine)
        del theirs
        yield
        receive()
        for share, update, group in zip(shares, updates, groups, strict=True):
            share.matrices.add_(share.rows, update, group)

    def _update(self, share: Share, group: Mapping[str, Any]) -> Tensor:
        """Returns this rank's part of the update before it is made orthogonal, in the dtype of the iteration."""
        matrices, momentum = share.matrices, group["momentum"]
        buffer = matrices.of(self.state[matrices.parameter]["momentum_buffer"])[share.rows]
        assert matrices.parameter.grad is not None
        grad = matrices.of(matrices.parameter.grad)[share.rows].float()
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        dtype = self._ns_dtype or (torch.float32 if buffer.device.type == "cpu" else torch.bfloat16)
        # A copy, as the iteration works in place.
        return update.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _exchange(
    channel: Channel, sent: Sequence[Sequence[Tensor]], places: Sequence[Sequence[Tensor]]
) -> Callable[[], None]:
    """Starts sending tensors, by share and rank. Returns what waits for those that come, and writes them into their
    places.
    """
    sent_R, places_R = ([*zip(*of, strict=True)] for of in (sent, places))
    in_counts, out_counts = ([sum(each.numel() for each in of) for of in by_rank] for by_rank in (sent_R, places_R))
    flat = torch.cat([each.reshape(-1) for each in chain.from_iterable(sent_R)])
    received = flat.new_empty(sum(out_counts))
    transfer = channel.all_to_all(received, flat, out_counts, in_counts, lane="optimizer")

    def receive() -> None:
        transfer.wait()
        by_rank = [*chain.from_iterable(places_R)]
        for place, part in zip(by_rank, received.split([each.numel() for each in by_rank]), strict=True):
            place.copy_(part.view(place.shape))

    return receive


def orthogonalize_(views: Iterable[Tensor], group: Mapping[str, Any]) -> None:
    """Replaces each matrix of ``views`` [n, out, in] by its orthogonal factor, as nearly as the Newton–Schulz iteration
    finds it with the settings of a parameter ``group``. The bits of a matrix depend on no other.

    The iteration is that of ``torch.optim.Muon``, from https://kellerjordan.github.io/posts/muon.
    """
    for view in views:
        batched = view.device.type not in _ONE_BY_ONE and group["trains"] == "experts" and len(view)
        for part in view.split(_AT_ONCE) if batched else view:
            # One matrix is laid out as torch's own Muon lays it out, so that sums are in the same order.
            laid_out = nn.functional.pad(part, (0, 0, 0, 0, 0, _AT_ONCE - len(part))) if batched else part.contiguous()
            part.copy_(_orthogonal(laid_out, group)[: len(part)])


def _orthogonal(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns the orthogonal factor of one matrix [out, in], or of several."""
    a, b, c = group["ns_coefficients"]
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    turned = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if turned else matrix
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    # In bfloat16, rounding the square before it is scaled would lose digits.
    halved = wide.ndim == 2 and wide.device.type == "cpu" and wide.dtype == torch.float32 and len(wide) >= _HALVED_ROWS
    for _ in range(group["ns_steps"]):
        gram = _gram(wide, halved)
        if halved:
            polynomial = _gram(gram, halved).mul_(c).add_(gram, alpha=b)
        else:
            polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        wide = add_product(wide, polynomial, wide, beta=a)
    return wide.mT if turned else wide


def _gram(matrix: Tensor, halved: bool) -> Tensor:
    """Returns the product of a matrix and its transpose, of which nearly one half may be copied from the other."""
    if not halved:
        return matrix @ matrix.mT
    product, half = matrix.new_empty(len(matrix), len(matrix)), len(matrix) // 2
    for rows in (slice(half), slice(half, None)):
        product[rows, rows] = _gram(matrix[rows], half >= _HALVED_ROWS)
    torch.mm(matrix[half:], matrix[:half].mT, out=product[half:, :half])
    product[:half, half:] = product[half:, :half].mT
    return product


# --- which rank trains what -------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """Rows of one parameter that are trained together. ``counts`` [R]: of how many rows each rank of the channel is the
    owner, in the order of ranks. Of a parameter ``by_owner``, ``rows`` are those of each rank's own.
    """

    matrices: Matrices
    rows: slice
    counts: list[int]


def _connect(model: nn.Module, all_matrices: Iterable[Matrices]) -> list[Channel]:
    """Returns a channel for each group of ranks that share experts or have parts of matrices, and gives it to these."""
    channels: dict[tuple[int, ...], Channel] = {(): Channel(None, [0], Recorder(0), Meter())}
    groups: list[Any] = [(None, channel.group, channel.device_type) for channel in channels_of(experts_of(model))]
    groups += [(each, each.cut_over(), each.parameter.device.type) for each in all_matrices]
    for matrices, group, device_type in groups:
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        if ranks not in channels:
            channels[ranks] = Channel(group, [0] * len(ranks), Recorder(0), Meter(device_type), device_type)
        if matrices is not None:
            matrices.channel = channels[ranks]
    return [*channels.values()]


def _rounds_of(all_matrices: Sequence[Matrices], channels: Iterable[Channel], described: str) -> list[list[Share]]:
    """Returns what is trained when, in the order of the model; shares of one round travel together, if they travel.
    Each row of a parameter that is cut goes to the rank with the least work so far, costly rows first. A collective.

    Raises ``RankMismatchError`` on all ranks where they would train other parameters than ``described``, or otherwise.
    """
    shares: dict[Matrices, list[Share]] = {}
    at, text, mine = Position("Muon()"), described.encode(), 0
    for channel in channels:
        of_channel, device = [each for each in all_matrices if each.channel is channel], device_of(channel.group)
        said = json.dumps([hashlib.sha256(text).hexdigest(), mine, [each.own_part() for each in of_channel]]).encode()
        digests, loads, parts_R = zip(*map(json.loads, channel.gather_bytes(said, at, device)), strict=True)
        if len({*digests}) > 1:
            words = "would train differently: {}, and {}; give all ranks the same model and the same arguments"
            raise_mismatch(text, channel, at, device, words)
        for each, of_ranks in zip(of_channel, zip(*parts_R, strict=True), strict=True):
            each.boxes = [(slice(None), *(slice(*ends) for ends in part)) for part in of_ranks]
        work = [*loads]
        for each in sorted(of_channel, key=lambda each: -each.cost):
            shares[each], num_rows, at_once = [], len(each.of(each.parameter)), _AT_ONCE * channel.num_ranks
            for row in range(0, num_rows, at_once):
                stop, counts = min(num_rows, row + at_once), [0] * channel.num_ranks
                if each.by_owner:
                    # Gradients of whole rows are on their owners already, as many on each.
                    row, stop = row // channel.num_ranks, stop // channel.num_ranks
                    counts = [stop - row] * channel.num_ranks
                else:
                    for _ in range(row, stop):
                        owner = work.index(min(work))
                        work[owner] += each.cost
                        counts[owner] += 1
                shares[each].append(Share(each, slice(row, stop), counts))
        mine = work[channel.rank]
    rounds: list[list[Share]] = []
    waiting: dict[Channel, list[Share]] = {}
    for each in all_matrices:
        if (of := each.channel).group is None:
            # One round for each parameter, as ranks may have other numbers of rows, and must have the same rounds.
            rounds.append(shares[each])
        elif each.stacked:
            rounds += [[share] for share in shares[each]]
        else:
            waiting.setdefault(of, []).extend(shares[each])
            if len(waiting[of]) == of.num_ranks:
                rounds.append(waiting.pop(of))
    return [*rounds, *waiting.values()]


def _check(**given: Any) -> None:
    """Raises ValueError for arguments that are out of range."""
    for name, most in (("lr", math.inf), ("weight_decay", math.inf), ("momentum", 1), ("eps", math.inf)):
        value = given[name]
        if torch.as_tensor(value).numel() != 1 or not 0 <= value < most:
            raise ValueError(f"{name}={value} must be a number that is at least 0 and less than {most:g}")
    steps, of_lr, dtype = given["ns_steps"], given["adjust_lr_fn"], given["ns_dtype"]
    for name, fits, wanted in (
        ("ns_steps", isinstance(steps, int) and 1 <= steps < 100, "an integer from 1 to 99; 5 is usual"),
        ("ns_coefficients", len(given["ns_coefficients"]) == 3, "three numbers"),
        ("adjust_lr_fn", of_lr in (None, "original", "match_rms_adamw"), "None, 'original' or 'match_rms_adamw'"),
        ("ns_dtype", dtype in (None, torch.float32, torch.bfloat16), "torch.float32, torch.bfloat16 or None"),
    ):
        if not fits:
            raise ValueError(f"{name}={given[name]!r} must be {wanted}")
