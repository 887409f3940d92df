"""KeptCasts: experts in the dtype that they compute in, for all micro-batches of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moesys.overlap.held_experts import ExpertWeights


class KeptCasts:
    """The newest cast of masters, as long as nothing can have changed them: while gradients are collected, and no
    optimizer has made a step.

    A tensor's version tells too little: fused optimizers leave it as it is, and so do those that go through lists of
    DTensors. So nothing is kept of parameters that no optimizer of this process has stepped yet. A cast is dropped
    before a step of any optimizer, and made anew where parameters have no gradient yet, as at the beginning of a step,
    or where they, their storage or their versions are others (``state_of_masters``, that of ``Masters``). What writes
    through ``.data`` beside their optimizer, while they have gradients, goes unseen.
    """

    def __init__(self, state_of_masters: Callable[[], tuple[int, ...] | None]) -> None:
        self._state_of_masters = state_of_masters
        self._kept: tuple[tuple[int, ...], ExpertWeights] | None = None
        # The parameter, by its id, that an optimizer has stepped.
        self._stepped: int | None = None
        this = weakref.ref(self)

        def before(*_: object) -> None:
            if (kept := this()) is not None:
                kept.drop()

        def behind(optimizer: Optimizer, *_: object) -> None:
            if (kept := this()) is not None:
                kept.drop()
                kept._note(optimizer)

        for hook in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(behind)):
            weakref.finalize(self, hook.remove)

    def _note(self, optimizer: Optimizer) -> None:
        state = self._state_of_masters()
        if state is not None and any(id(of) == state[0] for group in optimizer.param_groups for of in group["params"]):
            self._stepped = state[0]

    def find(self, dtype: torch.dtype) -> ExpertWeights | None:
        """Returns the cast to ``dtype``, stacked; None where it is to be made."""
        state = self._state()
        if self._kept is None or state != self._kept[0] or self._kept[1].gate_up.dtype != dtype:
            return None
        return self._kept[1]

    def keep(self, cast: ExpertWeights) -> None:
        """Keeps what was cast now, if anybody will be able to tell whether it is still right."""
        state = self._state()
        self._kept = None if state is None else (state, cast)

    def drop(self) -> None:
        """Forgets it, and gives its memory back."""
        self._kept = None

    def _state(self) -> tuple[int, ...] | None:
        # What a graph has captured runs again when masters are others.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        state = self._state_of_masters()
        return state if state is not None and state[0] == self._stepped else None
