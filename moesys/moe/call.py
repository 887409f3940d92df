"""LayerCall, the state of one micro-batch in one layer, and RoutedExperts, the autograd.Function that computes it.

From ``Experts.forward`` to the first product a micro-batch is handed over as four objects where rows are sent in chunks
(``overlap.chunked``): its ``LayerCall``, which ``Planner`` fills in; the ``ChunkedRun``, which runs the schedule; the
``RowMessages`` of a direction, which send rows; and the ``ForwardPass``, which computes expert rows. One rank alone and
MegaKernels have no ``RowMessages``.

``Lookahead`` is the interface to the other layers of a linked model, which ``MoERuntime`` implements; the class itself
is that of a layer that is not linked.

Activation checkpointing: ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`` is enough; regions inside
each other need ``context_fn=moesys.recompute``, all of them. Plans are made in the first pass and replayed when the
forward runs again: the history has moved on since, and one more collective on one rank would hang the others. The
second pass therefore neither plans nor updates the history; it sends rows again, restores released experts, and, where
rows are chunked, gathers whether any rank reads the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moesys.config import LayoutInvariant
from moesys.frames import BACKWARD, LEARNING
from moesys.kernels.first_derivatives import InputGradients, first_derivatives_only
from moesys.kernels.launch import on_its_device
from moesys.layout import ExpertLayout
from moesys.moe.masters import Expert
from moesys.moe.store import ExpertStore, Reshard, Restore, RestoredExperts
from moesys.overlap.executor import (
    NUM_FACTORS,
    Adapters,
    ExpertGradients,
    Factors,
    MicroBatchRun,
    SavedTensors,
    SharedMemory,
    zeros_like_factors,
)
from moesys.torch_private import NO_BACKWARD, after_this_backward, checkpointed_region, current_backward, will_execute

PLAN_TIMEOUT_S = 60.0


class Neighbours(NamedTuple):
    """The layers before and after a call in its forward pass; there are none if layers are not linked.

    ``previous``: the call of the layer before, whose experts backward restores ahead. ``upcoming``: the next layers,
    whose experts are restored ahead in forward. ``pass_number``: the number of the forward pass.
    """

    previous: LayerCall | None = None
    upcoming: tuple[ExpertStore, ...] = ()
    pass_number: int = 0


class LayerCall:
    """The state that planning, forward, recomputation and backward of one micro-batch share.

    ``flags``: those of the forward (``frames.Position``). ``num_tokens``: T of this rank, with padding. ``real_N``: the
    real tokens of T, int64, where others are padding; a recomputation leaves out the same. ``timeout_s``: how long to
    wait for layouts that are due. ``dtype``: what experts compute in.

    ``Planner.plan`` sets these:

    - ``layout``: the layout of this micro-batch, with late slots, so that each backward finds the experts where its
      own forward had them, however many micro-batches have begun and in whatever order their backwards run.
    - ``run``: runs the micro-batch.
    - ``counts``: called once, after forward has been launched; returns the choices of each expert on all ranks, int64
      [E], and, where devices plan, requests the next layout if it is time. None if the schedule does not learn from the
      micro-batch.
    - ``check``: waits for the device, and raises the errors that the host did not know of when forward was launched;
      None if it knows all of them.
    """

    layout: ExpertLayout
    run: MicroBatchRun
    counts: Callable[[], Tensor] | None
    check: Callable[[], None] | None

    def __init__(
        self,
        store: ExpertStore,
        neighbours: Neighbours,
        dtype: torch.dtype,
        flags: int,
        num_tokens: int,
        real_N: Tensor | None,
        timeout_s: float,
    ) -> None:
        self.store, self.dtype, self.flags, self.num_tokens = store, dtype, flags, num_tokens
        # ``learning``: layouts may change, and the schedule learns. ``expects_backward``: a backward will follow.
        self.learning, self.expects_backward = bool(flags & LEARNING), bool(flags & BACKWARD)
        self.previous, self.upcoming, self._pass_number = neighbours
        self._real_N, self.timeout_s = real_N, timeout_s
        # ``replayed``: a recomputation runs this forward again. ``output_read``: something may read its output.
        self.replayed, self.output_read = False, True
        # ``runs_again``: activation checkpointing will run this forward again. If masters are computed and experts are
        # kept after forward, a rank that computes with experts of its own keeps only those received from others until
        # then, by slot.
        self.runs_again = False
        self._lent: dict[int, Expert] | None = None

    def begin(self, generation: int) -> None:
        """Takes the transfer that was started ahead, once the call is planned. ``generation``: that of its messages
        (``Channel.tagged``). A collective if layouts have late slots.
        """
        self.generation, self.store.dtype = generation, self.dtype
        # True if forward has read masters that are computed, and may have other values later.
        self._computed = self.store.masters.computed
        self._restore = self.store.take_prefetched(self._pass_number, self.layout, generation)

    def without_padding(self, rows_T: Tensor) -> Tensor:
        """Returns the rows of the real tokens."""
        return rows_T if self._real_N is None else rows_T.index_select(0, self._real_N)

    def with_padding(self, rows_N: Tensor, num_tokens: int) -> Tensor:
        """Returns the rows of all tokens, which are zeros for padding."""
        if self._real_N is None:
            return rows_N
        return rows_N.new_zeros(num_tokens, *rows_N.shape[1:]).index_copy_(0, self._real_N, rows_N)

    def restore(self, masters: Sequence[Tensor] | None = None) -> Restore:
        """Returns the transfer of this call's experts, which it starts if that was not done ahead. ``masters``: those
        that autograd has, if they were read already.
        """
        if self._lent is not None and masters is not None:
            self._restore, self._lent = self.store.rejoin(self.layout, self.dtype, masters, self._lent), None
        if self._restore is None:
            self._restore = self.store.start_restore(self.layout, self.dtype, self.generation, masters)
        return self._restore

    def restore_ahead(self) -> None:
        """Starts the transfer of this call's experts for its backward, if the masters of its forward are at hand."""
        if not self._computed and self.store.masters.at_hand:
            self.restore()

    def wait_for_experts(self, adapters: Adapters | None) -> RestoredExperts:
        """Waits for the experts of forward, and returns them with ``adapters``. Starts the transfers of the next
        layers' experts.

        With chunked rows it is called once the first chunk has arrived, which those transfers can no longer delay.
        """
        transfer, store = self.restore(), self.store
        transfer.start()
        for upcoming in self.upcoming:
            upcoming.prefetch(self._pass_number, self.generation)
        self.upcoming = ()
        experts = transfer.finish()
        experts.adapters = adapters
        stay = self.expects_backward and not store.reshard_after_forward and store.masters.keeps_casts
        experts.keeper = store.masters if stay else None
        return experts

    def end_forward(self) -> None:
        """Frees the experts that backward does not need, or will restore again."""
        store, experts = self.store, self.restore().finish()
        experts.drop_copies()
        experts.adapters = None
        if store.reshard_after_forward:
            self.release()
        elif self.runs_again and self._computed and (own := store.shards.own_rows(self.layout.held_by_rank)):
            self._lent = {slot: each for slot, each in enumerate(experts.masters) if slot not in own}
            self.release()

    def adapters(self, factors: Factors, dfactors: Factors = (None,) * NUM_FACTORS) -> Adapters | None:
        """Returns LoRA on the experts in the slots of this rank; None if there is none."""
        if all(each is None for each in factors):
            return None
        return Adapters.of(self.layout.held_by_rank[self.store.shards.rank], factors, dfactors)

    def release(self) -> None:
        """Frees the experts, which may be restored again."""
        self._restore = None


class Lookahead:
    """The interface of a layer's call to the layers before and after it. Forward calls ``enter`` and ``entered``,
    backward ``behind_backward``, ``delay`` and ``after_backward``, in this order. A layer that is not linked plans and
    restores on demand, and sends nothing while other layers compute: all of these methods do nothing.

    ``plan_timeout_s``: how long a rank waits for layouts that are due. ``generation``: that of the newest call.
    ``shared_memory``: that of the layers' executors (``LayerContext``).
    """

    def __init__(self, plan_timeout_s: float = PLAN_TIMEOUT_S) -> None:
        self.plan_timeout_s, self.generation = plan_timeout_s, 0
        self.shared_memory: dict[str, SharedMemory] = {}

    def enter(self, store: ExpertStore) -> Neighbours:
        """Begins a micro-batch of a layer, and returns its neighbours."""
        return Neighbours()

    def entered(self, call: LayerCall) -> None:
        """Notes the call of the layer that has begun."""

    def behind_backward(self, call: LayerCall) -> None:
        """Starts the transfers that waited for the dispatch of a layer's output gradients, while its experts
        compute.
        """

    def delay(self, store: ExpertStore, transfer: Reshard) -> bool:
        """Returns whether this object takes the transfer of a gradient, to start it later and to add it to
        ``.grad``.
        """
        return False

    def after_backward(self) -> None:
        """Ends a layer's backward."""


@dataclass
class Link:
    """The current lookahead of a layer. A graph keeps the link, and backward reads the lookahead from it: a graph that
    kept a closed runtime would keep all of its layers, in circles that Python's collector cannot see.
    """

    lookahead: Lookahead = field(default_factory=Lookahead)

    @property
    def linked(self) -> bool:
        return type(self.lookahead) is not Lookahead


# Tensors of a layer that are saved for backward, beside its masters.
NUM_SAVED = 3


class RoutedExperts(torch.autograd.Function):
    """y [T, H] from x [T, H], routing weights float32 [T, K], this rank's masters and the factors of LoRA on all
    experts (``NUM_FACTORS``); N of the T tokens are real.

    Saves routing weights, the arrived rows of x, pre-activations and masters. ``ctx.call`` also keeps the restored
    experts that ``LayerCall.end_forward`` has not released.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_TK: Tensor, call: LayerCall, link: Link, *learnt: Any) -> Tensor:
        masters, factors = learnt[:-NUM_FACTORS], learnt[-NUM_FACTORS:]
        with torch.autocast(x_TH.device.type, enabled=False):
            # Steps 3 to 5 of ``Experts.forward``.
            call.restore(masters)
            wait = partial(call.wait_for_experts, call.adapters(factors))
            inputs = call.without_padding(x_TH), call.without_padding(weight_TK), wait
            if call.replayed:
                y_NH, saved = call.run.recompute(*inputs, read=call.output_read)
            else:
                y_NH, saved = call.run.forward(*inputs)
            # Without an output the recomputation stops before anything reads these values.
            y_TH = x_TH.new_full((), math.nan).expand_as(x_TH) if y_NH is None else call.with_padding(y_NH, len(x_TH))
        ctx.call, ctx.link = call, link
        # Gradients are functions of x, which backward does not read; an empty slice says so without keeping x.
        with torch.enable_grad():
            ctx.x_0H = x_TH[:0].clone()
        ctx.save_for_backward(weight_TK, saved.arrivals_MH, saved.h_P2I, *learnt)
        # The experts that a recomputation restores are used by the backward that follows it.
        if not call.replayed:
            call.end_forward()
        return y_TH

    @staticmethod
    @first_derivatives_only
    @on_its_device
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[InputGradients, Sequence[Tensor]]:
        call: LayerCall = ctx.call
        lookahead, store = ctx.link.lookahead, call.store
        weight_TK, arrivals_MH, h_P2I, *learnt = ctx.saved_tensors
        masters, factors = learnt[:-NUM_FACTORS], learnt[-NUM_FACTORS:]
        wanted, adapts = ctx.needs_input_grad[4:-NUM_FACTORS], any(ctx.needs_input_grad[-NUM_FACTORS:])
        invariant = isinstance(store.schedule.strategy.reduction, LayoutInvariant)
        least = torch.float64 if invariant else torch.float32
        dfactors = zeros_like_factors(factors, least) if adapts else [None] * NUM_FACTORS
        dy_TH = grad_outputs[0]
        dy_NH = call.without_padding(dy_TH).contiguous()
        grads = gradients = None
        if any(wanted):
            dtype = store.masters.gradient_dtype or masters[0].dtype
            grads = store.new_gradients(call.layout, dy_TH.device, dtype)
            gradients = grads if isinstance(grads, ExpertGradients) else store.shards.form.gradients(grads)
        elif adapts:
            # Only gradients of LoRA are computed.
            gradients = ExpertGradients(None, None)  # type: ignore[arg-type]

        def wait_for_experts() -> RestoredExperts:
            # While they arrive and compute, earlier layers restore theirs, and delayed gradients are sent.
            transfer = call.restore()
            transfer.start()
            lookahead.behind_backward(call)
            experts = transfer.finish()
            experts.adapters = call.adapters(factors, dfactors)
            return experts

        with torch.autocast(dy_TH.device.type, enabled=False):
            call.restore(masters)
            saved = SavedTensors(arrivals_MH, h_P2I, call.without_padding(weight_TK))
            of_tokens = call.run.backward(dy_NH, saved, wait_for_experts, gradients)
            dx_TH, dweight_TK = (call.with_padding(each, len(dy_TH)) for each in of_tokens)
        call.release()
        for dfactor in dfactors if invariant else ():
            # Exact in any order; then the sum of this on one rank and zeros on the others is, too.
            if dfactor is not None:
                store.channel.all_reduce(dfactor, lane="reshard").mul_(store.shards.rank == 0)
        dmasters: list[Tensor | None] = [None] * len(masters)
        if grads is not None:
            leaves = [node for (node, _), want in zip(ctx.next_functions[2:], wanted, strict=False) if want]
            # Delayed and whole gradients are in no graph, so there are none where gradients may be differentiated.
            may_delay = (store.delay_reshard or store.whole_gradients) and not ctx.creates_graph
            may_delay = may_delay and all(map(_reaches_grad, leaves))
            whole = may_delay and store.whole_gradients
            transfer = store.start_reshard(grads, call.layout, call.generation, dtype, whole)
            late = may_delay and store.delay_reshard and lookahead.delay(store, transfer)
            if whole and not late:
                store.masters.accumulate_gradient(transfer.finish())
            store.masters.expect_gradient(late=late or whole)
            if not (late or whole):
                gradients_of_masters = store.masters.gradients_of(transfer.finish())
                dmasters = [each if want else None for each, want in zip(gradients_of_masters, wanted, strict=True)]
        if store.schedule.has_request:
            # Where hosts plan without a planner thread, a request that forward has deferred is solved here.
            with store.channel.meter.planning():
                store.schedule.request()
        lookahead.after_backward()
        # The whole backward is launched by then, so the device has work while the host waits for a part of forward.
        if call.check is not None:
            after_this_backward(call.check)
        return (dx_TH, dweight_TK, None, None, *dmasters, *dfactors), (ctx.x_0H, weight_TK, *learnt)


def _reaches_grad(node: Any) -> bool:
    """Returns whether this backward ends in the ``.grad`` of the leaf behind ``node``, which it does not for
    ``torch.autograd.grad``, nor for other ``inputs`` of ``backward``.
    """
    while len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    # More than one leaf, where masters are computed, and none that a gradient of theirs could be added to.
    return not node.next_functions and will_execute(node)


@dataclass
class Tape:
    """The calls of MoE layers inside one checkpointed region, in order, and the tapes of regions inside it.

    ``choices``: the choices that routers were given (``moe.routing_replay``): who gave them, and the micro-batch.
    ``mask_T``: the real tokens of the model's call that runs the region.
    """

    calls: list[LayerCall] = field(default_factory=list)
    choices: list[tuple[object, int]] = field(default_factory=list)
    inner: list[Tape] = field(default_factory=list)
    mask_T: Tensor | None = None
    mode: Literal["record", "replay"] = "record"
    next_call_at: int = 0
    next_choice_at: int = 0
    next_inner_at: int = 0
    backward: int = NO_BACKWARD

    def next_call(self, store: ExpertStore) -> LayerCall:
        """Returns the recorded call that this forward repeats."""
        if self.next_call_at >= len(self.calls) or self.calls[self.next_call_at].store is not store:
            recorded = [call.store.layer_index for call in self.calls]
            raise RuntimeError(
                f"recomputation reached MoE layer {store.layer_index} as call {self.next_call_at}, but the first pass "
                f"recorded layers {recorded}; a checkpointed region must run the same layers both times"
            )
        self.next_call_at += 1
        call = self.calls[self.next_call_at - 1]
        call.replayed = True
        return call

    def next_choice(self, replayer: object) -> int | None:
        """Returns the micro-batch that ``replayer`` noted in the first pass; None if it noted none."""
        if self.next_choice_at >= len(self.choices) or self.choices[self.next_choice_at][0] is not replayer:
            return None
        self.next_choice_at += 1
        return self.choices[self.next_choice_at - 1][1]

    def rewind(self) -> None:
        """Goes back to the start, for another pass."""
        self.next_call_at = self.next_choice_at = self.next_inner_at = 0

    def inner_tape(self) -> Tape:
        """Returns the tape of a region inside this one: a new one while recording, the recorded one while replaying."""
        if self.mode == "record":
            self.inner.append(Tape())
            return self.inner[-1]
        self.next_inner_at += 1
        return self.inner[self.next_inner_at - 1]


_tape: ContextVar[Tape | None] = ContextVar("moesys_recompute_tape", default=None)


def current_tape() -> Tape | None:
    """Returns the tape of the checkpointed region that is running; None outside of one."""
    tape = running_tape()
    if tape is None and current_backward() != NO_BACKWARD:
        raise RuntimeError(
            "a MoE layer runs forward inside a backward pass, so activations are recomputed, but its plans were "
            "not recorded; pass use_reentrant=False to torch.utils.checkpoint, and to regions inside each other "
            "context_fn=moesys.recompute"
        )
    return tape


def running_tape() -> Tape | None:
    """Returns the same, but None in a recomputation without a tape, which ``current_tape`` refuses."""
    tape = _tape.get()
    return _tape_of_checkpoint() if tape is None else tape


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
    """Returns contexts for the first and the second pass of ``torch.utils.checkpoint.checkpoint``, whose ``context_fn``
    this is. Regions may be nested if all of them use it.
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
