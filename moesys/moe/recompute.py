"""Activation checkpointing: plans are made once, in the first pass, and replayed when the forward runs again.

``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`` is enough. Regions inside each other need
``context_fn=moesys.recompute``, all of them.

The second pass must see the layouts, splits and routes of the first: the history has moved on since, and a collective
more on one rank would hang the others. So the second pass plans nothing, remembers nothing, and gathers nothing but
whether any rank reads a layer's output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Literal

from moesys.moe.call import LayerCall
from moesys.torch_private import NO_BACKWARD, checkpointed_region, current_backward


@dataclass
class Tape:
    """The calls of MoE layers inside one checkpointed region, in order, and the tapes of regions inside it.

    ``choices``: of routers that were told which experts to choose: who told them, and what it wants to know again.
    """

    calls: list[LayerCall] = field(default_factory=list)
    choices: list[tuple[object, int]] = field(default_factory=list)
    inner: list[Tape] = field(default_factory=list)
    mode: Literal["record", "replay"] = "record"
    next_call_at: int = 0
    next_choice_at: int = 0
    next_inner_at: int = 0
    backward: int = NO_BACKWARD

    def next_call(self, layer: int) -> LayerCall:
        """The recorded call that this forward repeats."""
        if self.next_call_at >= len(self.calls) or self.calls[self.next_call_at].store.layer_index != layer:
            recorded = [call.store.layer_index for call in self.calls]
            raise RuntimeError(
                f"recomputation reached MoE layer {layer} as call {self.next_call_at}, but the first pass recorded "
                f"layers {recorded}; a checkpointed region must run the same layers both times"
            )
        self.next_call_at += 1
        call = self.calls[self.next_call_at - 1]
        call.replayed = True
        return call

    def next_choice(self, teller: object) -> int | None:
        """What ``teller`` noted in the first pass; None where it told nothing."""
        if self.next_choice_at >= len(self.choices) or self.choices[self.next_choice_at][0] is not teller:
            return None
        self.next_choice_at += 1
        return self.choices[self.next_choice_at - 1][1]

    def rewind(self) -> None:
        """Goes back to the start, for another pass."""
        self.next_call_at = self.next_choice_at = self.next_inner_at = 0

    def inner_tape(self) -> Tape:
        """The tape of a region inside this one: a new one while recording, the recorded one while replaying."""
        if self.mode == "record":
            self.inner.append(Tape())
            return self.inner[-1]
        self.next_inner_at += 1
        return self.inner[self.next_inner_at - 1]


_tape: ContextVar[Tape | None] = ContextVar("moesys_recompute_tape", default=None)


def current_tape() -> Tape | None:
    """The tape of the checkpointed region that is running, if one is."""
    tape = _tape.get()
    if tape is None:
        tape = _tape_of_checkpoint()
    if tape is None and current_backward() != NO_BACKWARD:
        raise RuntimeError(
            "a MoE layer runs forward inside a backward pass, so activations are recomputed, but its plans were "
            "not recorded; pass use_reentrant=False to torch.utils.checkpoint, and to regions inside each other "
            "context_fn=moesys.recompute"
        )
    return tape


def _tape_of_checkpoint() -> Tape | None:
    """Returns the tape of a checkpoint without ``context_fn``, if one runs that is not inside another's second pass."""
    if (region := checkpointed_region()) is None:
        return None
    frame, again = region
    backward = current_backward()
    if not again:
        return frame.__dict__.setdefault("moesys_tape", Tape()) if backward == NO_BACKWARD else None
    # A new one where nothing of moesys ran in the first pass.
    tape = frame.__dict__.setdefault("moesys_tape", Tape())
    if tape.backward != backward:
        tape.mode, tape.backward = "replay", backward
        tape.rewind()
    return tape


def recompute() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` for ``torch.utils.checkpoint.checkpoint``: contexts for the first pass and for the second.

    Regions may be nested, if all of them use it.
    """
    outer = _tape.get()
    if outer is None:
        tape = Tape()
        return _TapeContext(tape, "record"), _TapeContext(tape, "replay")
    # When an outer region is recomputed, the first pass of an inner one is a repetition too.
    return _TapeContext(tape := outer.inner_tape(), outer.mode), _TapeContext(tape, "replay")


class _TapeContext(AbstractContextManager[None]):
    """Runs a region on its tape, from the start; may be entered again, for graphs that are kept."""

    def __init__(self, tape: Tape, mode: Literal["record", "replay"]) -> None:
        self._tape, self._mode = tape, mode
        self._tokens: list[Token[Tape | None]] = []

    def __enter__(self) -> None:
        self._tape.mode = self._mode
        self._tape.rewind()
        self._tokens.append(_tape.set(self._tape))

    def __exit__(self, *_: object) -> None:
        _tape.reset(self._tokens.pop())
