"""MoERuntime: what the MoE layers of one model share.

It learns the order of the layers in their first forward. Then it restores the next layers' experts while the experts of
one layer compute, sends a layer's gradients to their owners while the layer before it computes backward, and plans
layouts in a thread. None of this changes a bit.

Every rank runs one such thread, which has a process group of its own, and all request the same plans in the same order.
Plans of layer l are solved by rank l mod R, the leader; the others receive the layout, and every rank checks that the
leader had the same history as itself.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moesys.balance.layout_schedule import PlanEvent, PlanOutcome, PlanRequest
from moesys.collectives import device_of
from moesys.config.base import python_value
from moesys.frames import ALIKE, Position, RankMismatchError
from moesys.layout import ExpertLayout
from moesys.moe.call import PLAN_TIMEOUT_S, LayerCall, Lookahead, Neighbours
from moesys.moe.experts import Experts, experts_of, require_own_indices
from moesys.moe.gradients import channel_of, require_equal_values, reshard_units
from moesys.moe.metrics import LayerMetrics
from moesys.moe.store import ExpertStore, Reshard
from moesys.overlap.comm.background import BackgroundThread, Heartbeat
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder
from moesys.timeline import Timeline
from moesys.torch_private import NO_BACKWARD, after_this_backward, current_backward


def link(model: nn.Module, *, plan_timeout_s: float | None = None, record_spans: bool = False) -> MoERuntime:
    """Joins the MoE layers of ``model`` under one runtime; a collective where they share a process group.

    Raises ``RankMismatchError`` on all ranks where they link other layers, or models that should be equal and are not.

    ``plan_timeout_s``: how long a rank waits for layouts that are due before all ranks keep the old ones; at most half
    of the group's time-out, so that waiting fails no collective. By default 60 s, or that half.
    ``record_spans``: keep a ``Timeline``.
    """
    return MoERuntime(model, plan_timeout_s, record_spans)


class MoERuntime(Lookahead):
    """One per model, made by ``link``. ``close`` stops the planner thread and unlinks the layers.

    It has no strong references to the layers, so that a model and a runtime that are dropped end their threads and
    connections at once.
    Experts travel on a process group of their own, so that they never queue behind tokens; plans on a third, by gloo.
    """

    def __init__(self, model: nn.Module, plan_timeout_s: float | None, record_spans: bool) -> None:
        (plan_timeout_s,) = python_value((plan_timeout_s,))
        layers = experts_of(model)
        channel = channel_of(layers)
        group = channel.group
        if any(layer.link.linked for layer in layers):
            raise ValueError("a layer of this model is linked already; close its runtime first")
        require_own_indices(layers)
        _compare_layers(layers, plan_timeout_s, channel)
        require_equal_values(model, channel, "link()", _device_of(layers, channel))
        # Layers have the runtime, and with strong references both ways they would wait for Python's collector.
        self._layers = [weakref.ref(layer) for layer in layers]
        self.recorder = Recorder(channel.rank, record_spans, channel.device_type)
        self._groups: list[dist.ProcessGroup] = []
        weight_group = planner_group = None
        if group is not None:
            most_s = channel.timeout_s / 2
            if plan_timeout_s is not None and plan_timeout_s > most_s:
                raise ValueError(
                    f"plan_timeout_s={plan_timeout_s} is more than half of the group's time-out, {most_s:g} s; a rank "
                    "that waits for a plan would fail the others' collectives, so lower it or raise the time-out"
                )
            plan_timeout_s = min(PLAN_TIMEOUT_S, most_s) if plan_timeout_s is None else plan_timeout_s
            # Layers wait for experts, so their kernels get multiprocessors before others that are ready.
            options = on_urgent_stream(dist.get_backend_config(group))
            weight_group = self._new_group(channel, dist.get_backend(group), options)
            planner_group = self._new_group(channel, "gloo", None)
        self._heartbeat = Heartbeat(dist.get_rank()) if group is not None else None
        plan_channel = Channel(planner_group, channel.node_of_rank, Recorder(0), Meter())
        plan_channel.heartbeat = self._heartbeat
        super().__init__(PLAN_TIMEOUT_S if plan_timeout_s is None else plan_timeout_s)
        self._planner = PlannerThread(plan_channel, self.plan_timeout_s)
        self._num_passes = 0
        self._order: list[ExpertStore] = []
        self._position = -1
        self._newest: LayerCall | None = None
        # Gradients on the way to their owners, in the order of backward.
        self._reshards: list[tuple[ExpertStore, Reshard]] = []
        self._arrived: dict[ExpertStore, tuple[Tensor, ...]] = {}
        self._flushing_backward = NO_BACKWARD
        # A runtime that is dropped without ``close`` leaves neither threads nor groups behind, except those of NCCL,
        # which all ranks destroy together. The exit of the process stops threads by itself, and waits for no group.
        self._drop = weakref.finalize(self, _release, self._planner, self._heartbeat, self._groups, "gloo")
        self._drop.atexit = False
        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._hooks = [model.register_forward_hook(_reshard_after_evaluation, always_call=True)] if sharded else []
        for layer in layers:
            like = layer.token_channel
            weight_channel = Channel(
                weight_group, like.node_of_rank, self.recorder, layer.meter, like.device_type, layer.identity
            )
            layer.join(self, layers[0], weight_channel, self._planner, self._heartbeat)

    @property
    def layers(self) -> list[Experts]:
        """The experts of the model, as long as they exist, in the order of its modules."""
        return [layer for each in self._layers if (layer := each()) is not None]

    def _new_group(self, channel: Channel, backend: str, options: object | None) -> dist.ProcessGroup:
        members = channel.members
        # Ranks outside the group do not come here, so only its members may take part in making the new one.
        subset = len(members) < dist.get_world_size()
        timeout = timedelta(seconds=channel.timeout_s)
        make = partial(dist.new_group, members, timeout, backend, options, use_local_synchronization=subset)
        new_group = channel.guard("link()", make)
        self._groups.append(new_group)
        return new_group

    # --- forward ------------------------------------------------------------------------------------------

    def enter(self, store: ExpertStore) -> Neighbours:
        """Begins a micro-batch of a layer. Learns the order of the layers, and returns the call of the layer before in
        the same pass, and the layers whose experts may be sent while this one computes; none while the order is being
        learnt.
        """
        known = store in self._order
        if not known:
            self._order.append(store)
        position = self._order.index(store)
        if position <= self._position:
            self._end_pass()
        previous = self._newest if position == self._position + 1 else None
        self._position = position
        # A forward inside of a backward is a reentrant recomputation, which goes on to the layer before.
        ahead = store.prefetch_layers if known and current_backward() == NO_BACKWARD else 0
        upcoming = self._order[position + 1 : position + 1 + ahead]
        return Neighbours(previous, tuple(upcoming), self._num_passes)

    def entered(self, call: LayerCall) -> None:
        """Notes the call that ``enter`` announced, for the backward of the next layer to restore its experts. A call
        without a backward, such as that of a frozen layer, would never use them.
        """
        self._newest = call if call.expects_backward else None

    def _end_pass(self) -> None:
        """Ends a forward pass: forgets which call was last, and lets no later pass use experts that were restored
        ahead. The next layer may run after an optimizer step, and ranks may differ in what they still hold: no
        collective may follow from either.
        """
        self._num_passes += 1
        self._position = -1
        self._newest = None

    # --- backward -----------------------------------------------------------------------------------------

    def behind_backward(self, call: LayerCall) -> None:
        """Starts the transfers that waited for the dispatch of a layer's output gradients: those of the experts of the
        layers before it, and of the gradients of the layer after it.
        """
        self._end_pass()
        self._forget_other_backward()
        before = call.previous
        for _ in range(call.store.prefetch_layers):
            if before is None:
                break
            before.restore_ahead()
            before = before.previous
        for _, transfer in self._reshards:
            transfer.start()

    def delay(self, store: ExpertStore, transfer: Reshard) -> bool:
        """Takes a transfer of gradients, which starts while the next layer computes, or at the end of this backward."""
        self._forget_other_backward()
        if self._flushing_backward == NO_BACKWARD:
            self._flushing_backward = current_backward()
            after_this_backward(self._flush)
        self._reshards.append((store, transfer))
        return True

    def _forget_other_backward(self) -> None:
        """Drops the transfers that are left of a backward that raised, as they belong to no step."""
        if self._flushing_backward != current_backward():
            self._reshards.clear()
            self._arrived.clear()
            self._flushing_backward = NO_BACKWARD

    def after_backward(self) -> None:
        """Takes the gradients that were sent while a layer computed backward, which has ended."""
        while self._reshards and self._reshards[0][1].started:
            store, transfer = self._reshards.pop(0)
            arrived = self._arrived.pop(store, None)
            gradients = transfer.finish()
            if arrived is not None:
                gradients = tuple(total.add_(each) for total, each in zip(arrived, gradients, strict=True))
            self._arrived[store] = gradients

    def _flush(self) -> None:
        self._flushing_backward = NO_BACKWARD
        for _, transfer in self._reshards:
            transfer.start()
        self.after_backward()
        # Autograd too adds up a layer's gradients of one backward before it adds them to ``.grad``.
        for store, gradients in self._arrived.items():
            store.masters.accumulate_gradient(gradients)
        self._arrived.clear()

    # --- for users -----------------------------------------------------------------------------------------

    def metrics(self) -> list[LayerMetrics]:
        """Returns the metrics of the newest micro-batch of every layer that has run."""
        return [metrics for layer in self.layers if (metrics := layer.metrics()) is not None]

    def check(self) -> None:
        """Calls ``Experts.check`` of every layer, which raises the errors of all that was computed until now."""
        for layer in self.layers:
            layer.check()

    @property
    def events(self) -> list[PlanEvent]:
        """Departures from the plan, on any layer; the same on every rank."""
        return [event for layer in self.layers for event in layer.schedule.events]

    def timeline(self) -> Timeline:
        """Returns this rank's spans since they were last cleared; empty unless ``record_spans``."""
        return self.recorder.timeline()

    def close(self) -> None:
        """Unlinks the layers, which then plan and restore on demand. A collective, as ``link`` is.

        Waits for the plans that were asked for, at most ``plan_timeout_s``, and keeps them, so that the layers go on
        with the same layouts. One that is not made by then is late on all ranks, which keep the old layout.
        """
        if not self._drop.detach():
            return
        for hook in self._hooks:
            hook.remove()
        self._planner.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
        for layer in self.layers:
            layer.schedule.keep_made_plans()
            layer.unlink()
        _release(self._planner, self._heartbeat, self._groups)
        self._groups = []


def _compare_layers(layers: Sequence[Experts], plan_timeout_s: float | None, channel: Channel) -> None:
    """Raises ``RankMismatchError`` on all ranks where they link other layers, or with another time-out."""
    linked = {f"layer {each.layer_index}": each.identity.digest for each in layers} | {"plan_timeout_s": plan_timeout_s}
    sent_R = channel.gather_bytes(json.dumps(linked).encode(), Position("link()"), _device_of(layers, channel))
    linked_R = [json.loads(sent) for sent in sent_R]
    first = channel.members[0]
    for rank, other in zip(channel.members, linked_R, strict=True):
        for name in linked_R[0] | other:
            mine, theirs = linked_R[0].get(name), other.get(name)
            if mine != theirs:
                values = f" ({mine} and {theirs})" if name == "plan_timeout_s" else ""
                raise RankMismatchError(f"ranks {first} and {rank} link models that differ in {name}{values}. {ALIKE}")


def _device_of(layers: Sequence[Experts], channel: Channel) -> torch.device:
    """Returns the device between which the group sends what belongs to the layers."""
    device = layers[0].store.masters.device
    # Experts on the meta device get their memory after this call.
    return device_of(channel.group) if device.type == "meta" else device


def on_urgent_stream(backends: str) -> object | None:
    """Returns options of a process group whose collectives go before other work that is ready on a GPU.

    ``backends``: by device, as in "cpu:gloo,cuda:nccl". Returns None if GPUs do not use NCCL.
    """
    if "cuda:nccl" not in backends.split(","):
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


@torch.compiler.disable
def _reshard_after_evaluation(model: nn.Module, _inputs: object, output: object) -> None:
    """Frees what FSDP keeps gathered after a forward for its backward, where none will follow: an optimizer that is
    made next would otherwise be given copies of parameters. ``output``: None where the forward raised.
    """
    if torch.is_grad_enabled():
        return
    if output is None and isinstance(model, FSDPModule):
        # A model that has not run yet, or that is inside of another, has nothing to reset.
        with suppress(AttributeError, RuntimeError):
            model.reset_iter_state()
    reshard_units(model)


def _release(
    planner: PlannerThread, heartbeat: Heartbeat | None, groups: list[dist.ProcessGroup], backend: str = ""
) -> None:
    """Stops the threads, and destroys the groups of ``backend``, by default all."""
    planner.stop()
    if heartbeat is not None:
        heartbeat.stop()
    for group in groups:
        # The group is gone already if all groups were destroyed before.
        with suppress(ValueError):
            if backend in ("", dist.get_backend(group)):
                dist.destroy_process_group(group)


class PlanningState:
    """Load history, layouts and plans on their way of all experts of ``model``, for ``torch.distributed.checkpoint``:
    ``dcp.save({"model": ..., "optimizer": ..., "planning": PlanningState(model)}, checkpoint_id=folder)``.

    With it a run that is resumed on the same ranks has the same bits as one that was not stopped; without it planning
    begins anew. Models with ``MoELayer``s have it in their own state already. Groups of experts keep what is theirs, so
    load it into as many groups of the same ranks.

    Raises ValueError where layers of the same ranks have one ``layer_index``, and RuntimeError for layers whose process
    group was destroyed.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = experts_of(model)
        self._experts = {_key(experts): experts for experts in layers}
        if len(self._experts) < len(layers):
            require_own_indices(layers)

    def state_dict(self) -> dict[str, str]:
        """Returns JSON text by layer and ranks."""
        return {key: experts.get_extra_state() for key, experts in self._experts.items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Raises KeyError where a layer or its ranks are not in ``state``."""
        for key, experts in self._experts.items():
            experts.set_extra_state(state[key])


def _key(experts: Experts) -> str:
    experts.require_group(learning=False)
    ranks = [0] if experts.group is None else dist.get_process_group_ranks(experts.group)
    return f"layer {experts.layer_index} on ranks {ranks[0]} to {ranks[-1]}"


# The thread waits inside torch for at most this long at a time.
_SLICE = timedelta(seconds=0.1)


class ThreadTicket:
    """A plan in the making."""

    def __init__(self) -> None:
        self._done, self._outcome = threading.Event(), PlanOutcome()
        self.cancelled = False

    def fulfil(self, outcome: PlanOutcome) -> None:
        self._outcome = outcome
        self._done.set()

    def cancel(self) -> None:
        self.cancelled = True

    def ready(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s) and self._outcome.ready(timeout_s)

    def layout(self) -> ExpertLayout:
        return self._outcome.layout()

    def memory(self) -> bytes:
        return self._outcome.memory()


class PlannerThread:
    """A ``PlanSource`` that solves in the background. ``close`` it, or let it end with the process.

    ``timeout_s``: how long ``close`` and the end of the process wait for the other ranks.
    """

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel, self._timeout_s, self._members = channel, timeout_s, channel.members
        self._requests: queue.SimpleQueue[tuple[PlanRequest, ThreadTicket] | None] = queue.SimpleQueue()
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._thread = BackgroundThread(
            "moesys-planner", self._run, stop=self.stop, abandon=self._abandon, patience_s=timeout_s
        )
        self._thread.start()

    def submit(self, request: PlanRequest) -> ThreadTicket:
        ticket = ThreadTicket()
        self._requests.put((request, ticket))
        return ticket

    def stop(self) -> None:
        """Makes no more plans: requested ones are dropped, on all ranks."""
        self._closing.set()
        self._requests.put(None)

    def close(self) -> None:
        """Waits until the requested plans are made, and makes no more. Drops plans that take too long."""
        self._requests.put(None)
        self._thread.join(self._timeout_s)
        self._closing.set()

    def _abandon(self) -> None:
        self._abandoned.set()
        # This gives the thread time to return from torch; one that is solving a plan is not waited for.
        self._thread.join(2 * _SLICE.total_seconds())

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            request, ticket = item
            try:
                ticket.fulfil(self._agree(request, ticket))
            except _ClosedError:
                ticket.fulfil(PlanOutcome())
            except Exception as error:  # It is raised where the plan is used.
                ticket.fulfil(PlanOutcome(error=error))

    def _unwanted(self, ticket: ThreadTicket) -> bool:
        return ticket.cancelled or self._closing.is_set()

    def _agree(self, request: PlanRequest, ticket: ThreadTicket) -> PlanOutcome:
        """Returns the leader's plan, or raises its failure, on every rank; no plan if the leader finds that it is no
        longer wanted, which is soon the case on the other ranks too, as all ranks drop a plan or none does.
        """
        if self._channel.group is None:
            return PlanOutcome() if self._unwanted(ticket) else request.solve()
        leader = request.layer % self._channel.num_ranks
        plan: PlanOutcome | None = None
        message = b""
        if self._channel.rank == leader and not self._unwanted(ticket):
            try:
                plan = request.solve()
            except Exception as error:
                # Some programs show only the first line of an error.
                message = f"{type(error).__name__}: {error}\n{traceback.format_exc()}".encode()
        shape = plan.layout().expert_RS.shape if plan is not None else (0, 0)
        memory = plan.memory() if plan is not None else b""
        header = torch.tensor([*shape, len(message), len(memory)], dtype=torch.int64)
        self._broadcast(header, leader, request.layer)
        num_ranks, num_slots, message_bytes, memory_bytes = header.tolist()
        leader_name = self._members[leader]
        if message_bytes:
            text = _bytes_tensor(message or bytes(message_bytes))
            self._broadcast(text, leader, request.layer)
            raise RuntimeError(
                f"planning layer {request.layer} failed on rank {leader_name}: {text.numpy().tobytes().decode()}"
            )
        if not num_ranks:
            return PlanOutcome()
        histories_R = self._gather(_bytes_tensor(history_digest(request)), request.layer)
        expert_RS = torch.zeros(num_ranks, num_slots, dtype=torch.int64)
        if plan is not None:
            expert_RS = torch.from_numpy(plan.layout().expert_RS.copy())
        self._broadcast(expert_RS, leader, request.layer)
        if memory_bytes:
            remembered = _bytes_tensor(memory or bytes(memory_bytes))
            self._broadcast(remembered, leader, request.layer)
            memory = remembered.numpy().tobytes()
        # Every rank compares all of them, so that none waits in the next micro-batch for one that raised.
        for rank, history in zip(self._members, histories_R, strict=True):
            if not torch.equal(history, histories_R[leader]):
                raise RuntimeError(
                    f"rank {rank} and rank {leader_name} saw different loads of layer {request.layer}; every rank must "
                    "run the same micro-batches in the same order"
                )
        return PlanOutcome(ExpertLayout(expert_RS.numpy(), request.load.num_experts), memory)

    def _broadcast(self, tensor: Tensor, leader: int, layer: int) -> None:
        # Calls the group itself, because it outlives ``dist.destroy_process_group``.
        group = self._channel.group
        assert group is not None
        self._channel.guard(f"plan of layer {layer}", lambda: self._wait(group.broadcast(tensor, leader)))

    def _gather(self, tensor: Tensor, layer: int) -> list[Tensor]:
        """Returns every rank's tensor."""
        group = self._channel.group
        assert group is not None
        gathered_R = [torch.empty_like(tensor) for _ in self._members]
        self._channel.guard(f"plan of layer {layer}", lambda: self._wait(group.allgather([gathered_R], [tensor])))
        return gathered_R

    def _wait(self, work: dist.Work) -> None:
        """Waits for ``work``, and comes back from torch now and then, so that the process may end meanwhile."""
        while not work.is_completed():
            # An error means that the slice is over, or that the work has failed and is completed.
            with suppress(RuntimeError):
                work.wait(_SLICE)
            if self._abandoned.is_set():
                # Blocks for ever, so that the group outlives Python: its destructor would wait for the other ranks.
                threading.Event().wait()
        try:
            work.wait()
        except RuntimeError as error:
            if self._closing.is_set():
                # The other ranks have ended too, which is no failure while this process ends.
                raise _ClosedError from error
            raise


class _ClosedError(Exception):
    """The error of a plan that is no longer needed."""


def history_digest(request: PlanRequest) -> bytes:
    """Returns a hash, 32 bytes, of what the plan is made from."""
    digest = hashlib.sha256(np.ascontiguousarray(request.load.tokens_RE, dtype="<i8").tobytes())
    digest.update(request.previous.fingerprint().encode())
    return digest.digest()


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
