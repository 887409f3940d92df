"""Records the choices of routers, and replaces choices by recorded ones: only ids are replayed.

Scores stay those of the live router, weights are made from them at the replayed ids, and gradients flow as always.
A router's calls count: the n-th one outside of a recomputation is micro-batch n. Padding has the ids -1, and tokens
for which the live router chooses have the ids -2.

L routers, T tokens of this rank, K top-k, E experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesys.config import Oracle
from moesys.moe.call import Tape, current_tape
from moesys.moe.experts import Experts
from moesys.moe.router import Router
from moesys.torch_private import NO_BACKWARD, current_backward, unseen_by_selective_checkpoints

Ids = Tensor | NDArray[np.integer]
PADDING, LIVE = -1, -2


def checked(
    expert_LTK: Ids | Sequence[Ids], names: Sequence[str], num_experts: Sequence[int], top_k: int
) -> list[Tensor]:
    """Returns the ids [L, T, K] of each micro-batch, of whatever integer dtype they are.

    Raises TypeError for what is no tensor or array of integers, ValueError for another shape, for ids outside of
    [0, E), and for an expert twice for one token; the ids of a token may also be all -1 or all -2. ``names`` and
    ``num_experts`` are those of the L routers.
    """
    single = isinstance(expert_LTK, Tensor | np.ndarray)
    micro_batches = [expert_LTK] if single else expert_LTK
    return [
        _checked(ids, "expert_LTK" if single else f"expert_LTK[{index}]", names, num_experts, top_k)
        for index, ids in enumerate(micro_batches)
    ]


def _checked(ids: Ids, what: str, names: Sequence[str], num_experts: Sequence[int], top_k: int) -> Tensor:
    if isinstance(ids, np.ndarray):
        # torch takes only memory that can be written, which a received buffer is not.
        ids = torch.from_numpy(np.require(ids, requirements=["C", "W"]))
    if not isinstance(ids, Tensor):
        raise TypeError(f"{what} is a {type(ids).__name__}; give a tensor or an array [L, T, K], or a list of them")
    if ids.dtype == torch.bool or ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise TypeError(f"{what} has dtype {ids.dtype}; ids of experts are integers")
    if ids.dim() != 3 or ids.shape[0] != len(names) or ids.shape[2] != top_k:
        raise ValueError(
            f"{what} has shape {tuple(ids.shape)}; wanted [L, T, K] with L={len(names)} routers ({names[0]} to "
            f"{names[-1]}) and K={top_k}"
        )
    for layer, (name, experts) in enumerate(zip(names, num_experts, strict=True)):
        check_layer(ids[layer], partial("{}[{}, {}]".format, what, layer), name, experts)
    return ids


def check_layer(ids_TK: Tensor, place: Callable[[int], str], name: str, num_experts: int) -> None:
    """Raises ValueError for the ids of one layer. ``place`` names a token."""
    expert_TK = ids_TK.long()
    same_T1 = (expert_TK == expert_TK[:, :1]).all(dim=1, keepdim=True)
    no_route_T1 = same_T1 & ((expert_TK[:, :1] == PADDING) | (expert_TK[:, :1] == LIVE))
    outside_TK = ((expert_TK < 0) | (expert_TK >= num_experts)) & ~no_route_T1
    if outside_TK.any():
        token, k = outside_TK.nonzero()[0].tolist()
        raise ValueError(f"{place(token)} has {expert_TK[token, k]}; {name} has experts 0 to {num_experts - 1}")
    sorted_TK = expert_TK.sort(dim=1).values
    twice = ((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & ~no_route_T1).nonzero()
    if len(twice):
        token, k = twice[0].tolist()
        raise ValueError(
            f"{place(token)} has expert {sorted_TK[token, k]} twice, in {expert_TK[token].tolist()}; a token of "
            f"{name} has each expert at most once"
        )


class ForwardHook:
    """A function that changes what ``module.forward`` returns, until ``remove``.

    This is not a torch hook, because code that was compiled while a module had no hooks does not check for them.
    Compiled code does check whether a module has a ``forward`` of its own.
    """

    def __init__(self, module: nn.Module, change: Callable[[Any], Any]) -> None:
        forward = module.__dict__.get("forward")
        if not isinstance(forward, _HookedForward):
            forward = module.__dict__["forward"] = _HookedForward(module)
        forward.hooks.append(self)
        self.change, self._forward, self._module = change, forward, module

    def remove(self) -> None:
        self._forward.hooks.remove(self)
        # Another library may have put a forward around this one; without hooks this one changes nothing.
        if self._forward.hooks or self._module.__dict__.get("forward") is not self._forward:
            return
        if (before := self._forward.before) is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = before


class _HookedForward:
    """The forward of ``module``, whose output ``hooks`` change in their order.

    A copied or unpickled module gets the forward without hooks, which runs with the copy's own parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.hooks: list[ForwardHook] = []
        self.before = module.__dict__.get("forward")
        self._inner = module.forward

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._inner(*args, **kwargs)
        for hook in self.hooks.copy():
            output = hook.change(output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchanged, (self._inner,)


def _unchanged(forward: Any) -> Any:
    return forward


class ReplayableRouter(NamedTuple):
    """A router of a model by its ``name``. ``hook`` has a function called with every choice, int64 [T, K], that the
    router makes, -1 for padding, and puts what it returns in the place of that.
    """

    name: str
    num_experts: int
    top_k: int
    hook: Callable[[Callable[[Tensor], Tensor]], ForwardHook]

    @staticmethod
    def of(name: str, router: Router) -> ReplayableRouter:
        return ReplayableRouter(
            name, router.shape.num_experts, router.shape.top_k, lambda choose: ForwardHook(router.chooser, choose)
        )


@contextmanager
def recorded(routers: Sequence[ReplayableRouter]) -> Iterator[list[Tensor]]:
    """Gives a list that has [L, T, K] of each micro-batch once the context has ended without an error."""
    dtype = torch.uint8 if max(router.num_experts for router in routers) <= 256 else torch.int16
    chosen = [_ChoiceRecorder() for _ in routers]
    handles = [router.hook(recorder) for router, recorder in zip(routers, chosen, strict=True)]
    micro_batches: list[Tensor] = []
    try:
        yield micro_batches
    finally:
        for handle in handles:
            handle.remove()
    runs = [len(recorder.expert_TK) for recorder in chosen]
    if len(set(runs)) > 1:
        seen = ", ".join(f"{router.name} {times}" for router, times in zip(routers, runs, strict=True))
        raise RuntimeError(f"routers ran different numbers of times, so there are no whole micro-batches: {seen}")
    stacked = map(torch.stack, zip(*(recorder.expert_TK for recorder in chosen), strict=True))
    micro_batches += (ids if (ids < 0).any() else ids.to(dtype) for ids in stacked)


class _ChoiceRecorder:
    """Keeps one router's choices."""

    def __init__(self) -> None:
        self.expert_TK: list[Tensor] = []

    @unseen_by_selective_checkpoints
    def __call__(self, expert_TK: Tensor) -> Tensor:
        # A call inside a backward is a recomputation, which repeats a choice.
        if current_backward() == NO_BACKWARD:
            self.expert_TK.append(expert_TK.to(torch.int16))
        return expert_TK


@contextmanager
def replayed(
    routers: Sequence[ReplayableRouter], experts: Sequence[Experts], expert_LTK: Ids | Sequence[Ids]
) -> Iterator[None]:
    """Makes routers choose ``expert_LTK`` [L, T, K], a list with one tensor per micro-batch, or a single tensor for a
    single micro-batch. ``experts`` whose planner foresees loads (``Oracle``) learn theirs.

    Raises TypeError and ValueError for ids that cannot be replayed, and at the end if there were too many. Where ranks
    share the experts, all of them raise an error, in the first forward in which the rank with such ids has tokens.
    """
    names, top_k = [router.name for router in routers], routers[0].top_k
    hooks = _Hooks(shared=any(each.shards.num_ranks > 1 for each in experts))
    try:
        micro_batches = checked(expert_LTK, names, [router.num_experts for router in routers], top_k)
    except (TypeError, ValueError) as error:
        if not hooks.shared:
            raise
        # Other ranks go on to the experts, and foresee as many micro-batches.
        hooks.refusal = error
        count = len(expert_LTK) if isinstance(expert_LTK, list | tuple) else 1
        micro_batches = [torch.empty(len(names), 0, top_k, dtype=torch.int64)] * count
    foreseeing = _foreseeing(routers, experts)
    for layer, each in foreseeing:
        each.foresee([ids[layer] for ids in micro_batches])
    replayers = [_Replayer(name, [ids[layer] for ids in micro_batches], hooks) for layer, name in enumerate(names)]
    hooks.handles += [router.hook(replayer) for router, replayer in zip(routers, replayers, strict=True)]
    try:
        yield
    except ValueError:
        if hooks.refusal is None:
            raise
    finally:
        hooks.new_passes = False
        hooks.release()
        for _, each in foreseeing:
            each.schedule.foresee(None)
    if hooks.refusal is not None:
        raise hooks.refusal
    for replayer in replayers:
        replayer.check_end()


def _foreseeing(routers: Sequence[ReplayableRouter], experts: Sequence[Experts]) -> list[tuple[int, Experts]]:
    """Returns the layers whose plans are for loads that are still to come."""
    found = [(layer, each) for layer, each in enumerate(experts) if isinstance(each.strategy.predictor, Oracle)]
    if found and len(experts) != len(routers):
        raise ValueError(
            f"predictor=Oracle() needs a router for all experts, but there are {len(routers)} routers and "
            f"{len(experts)} layers of experts under a strategy; use predictor=Adaptive()"
        )
    return found


class _Hooks:
    """Hooks on routers, which stay until no context and no tape holds them: backward may run after the context has
    ended, and its recomputations need them.

    shared: whether other ranks share the experts, and would wait for this one. refusal: the error of this rank's ids,
    if all these ranks have to raise one.
    """

    def __init__(self, *, shared: bool) -> None:
        self.handles: list[ForwardHook] = []
        self.new_passes, self.shared = True, shared
        self.refusal: TypeError | ValueError | None = None
        self._holders = 1

    def hold_for(self, tape: Tape) -> None:
        self._holders += 1
        weakref.finalize(tape, self.release)

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            for handle in self.handles:
                handle.remove()


class _Replayer:
    """Replaces the choices of one router by those of the next micro-batch, in a recomputation of the first pass."""

    def __init__(self, name: str, micro_batches: Sequence[Tensor], hooks: _Hooks) -> None:
        self._name, self._micro_batches, self._hooks = name, micro_batches, hooks
        self._next_at = 0

    @unseen_by_selective_checkpoints
    def __call__(self, live_TK: Tensor) -> Tensor:
        tape = current_tape()
        if tape is not None and tape.mode == "replay":
            micro_batch = tape.next_choice(self)
            return live_TK if micro_batch is None else self._recorded(micro_batch, live_TK)
        if not self._hooks.new_passes:
            return live_TK
        try:
            if self._hooks.refusal is not None:
                raise self._hooks.refusal
            recorded_TK = self._recorded(self._next_at, live_TK)
            self._check_padding(live_TK)
        except (TypeError, ValueError) as error:
            if not self._hooks.shared:
                raise
            # Experts raise an error on all ranks that share them for ids that name no expert.
            self._hooks.refusal = error
            return torch.full_like(live_TK, -1)
        if tape is not None:
            tape.choices.append((self, self._next_at))
            self._hooks.hold_for(tape)
        self._next_at += 1
        return recorded_TK

    def _recorded(self, micro_batch: int, live_TK: Tensor) -> Tensor:
        given = len(self._micro_batches)
        if micro_batch == given:
            raise ValueError(
                f"{self._name} runs a micro-batch more than the {given} of expert_LTK; give a list with ids [L, T, K] "
                "of each"
            )
        recorded_TK = self._micro_batches[micro_batch]
        if len(recorded_TK) != len(live_TK):
            raise ValueError(
                f"expert_LTK has {len(recorded_TK)} tokens in micro-batch {micro_batch}, but {self._name} routes "
                f"{len(live_TK)}; give the ids of exactly this rank's tokens, padding included"
            )
        recorded_TK = recorded_TK.to(live_TK.device).long()
        return torch.where(recorded_TK == LIVE, live_TK, recorded_TK)

    def _check_padding(self, live_TK: Tensor) -> None:
        """Raises ValueError for ids of padding, -1, in the place of a token that the mask does not leave out."""
        # Ids are on the host, as a rule, which waits for a device only if there is padding.
        padding = (self._micro_batches[self._next_at][:, 0] == PADDING).nonzero().flatten()
        if len(padding) and len(real := padding[live_TK[:, 0].to(padding.device)[padding] >= 0]):
            raise ValueError(
                f"expert_LTK has -1 for token {int(real[0])} in micro-batch {self._next_at}, which "
                f"{self._name} routes; only padding may have -1, so give the ids of that token's experts or, for "
                "those of the live router, -2, or run the model with the mask that leaves it out"
            )

    def check_end(self) -> None:
        given = len(self._micro_batches)
        if self._next_at != given:
            raise ValueError(
                f"expert_LTK has {given} micro-batches, but {self._name} ran {self._next_at}; give those that are run"
            )
