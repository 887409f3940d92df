"""Activation checkpointing: plans are made once, in the first pass, and replayed when the forward runs again.

``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=moesys.recompute)``

The second pass must see the layouts, splits and routes of the first: the history has moved on since, and a collective
more on one rank would hang the others. So the second pass plans nothing, remembers nothing and gathers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from moesys.moe.call import LayerCall


NO_BACKWARD = -1


@dataclass
class Tape:
    """The calls of MoE layers inside one checkpointed region, in order."""

    calls: list[LayerCall] = field(default_factory=list)
    mode: Literal["record", "replay"] = "record"
    position: int = 0

    def next_call(self, layer: int) -> LayerCall:
        """The recorded call that this forward repeats."""
        if self.position >= len(self.calls) or self.calls[self.position].layer != layer:
            recorded = [call.layer for call in self.calls]
            raise RuntimeError(
                f"recomputation reached MoE layer {layer} as call {self.position}, but the first pass recorded "
                f"layers {recorded}; a checkpointed region must run the same layers both times"
            )
        self.position += 1
        return self.calls[self.position - 1]


_tape: ContextVar[Tape | None] = ContextVar("moesys_recompute_tape", default=None)


def current_tape() -> Tape | None:
    """The tape of the checkpointed region that is running, if one is."""
    tape = _tape.get()
    if tape is None and current_backward() != NO_BACKWARD:
        raise RuntimeError(
            "a MoE layer runs forward inside a backward pass, so activations are being recomputed, but its plans were "
            "not recorded; pass context_fn=moesys.recompute and use_reentrant=False to torch.utils.checkpoint.checkpoint"
        )
    return tape


def current_backward() -> int:
    """A number for the backward pass that is running, ``NO_BACKWARD`` outside of one."""
    return torch._C._current_graph_task_id()


def recompute() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` for ``torch.utils.checkpoint.checkpoint``: contexts for the first pass and for the second."""
    tape = Tape()
    return _playing(tape, "record"), _playing(tape, "replay")


@contextmanager
def _playing(tape: Tape, mode: Literal["record", "replay"]) -> Iterator[None]:
    tape.mode, tape.position = mode, 0
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)
