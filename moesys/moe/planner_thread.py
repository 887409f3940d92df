"""The planner thread: layouts are solved off the critical path, once for all ranks, and broadcast.

Every rank runs one such thread, which has a process group of its own, and all request the same plans in the same order.
Plans of layer l are solved by rank l mod R, the leader; the others receive the layout, and every rank checks that the
leader had the same history as itself.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import traceback
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesys.balance.layout_schedule import PlanRequest, SolvedPlan
from moesys.layout import ExpertLayout
from moesys.overlap.comm.background import BackgroundThread
from moesys.overlap.comm.channel import Channel

# The thread waits inside torch for at most this long at a time.
_SLICE = timedelta(seconds=0.1)


class ThreadTicket:
    """A plan in the making."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._plan: SolvedPlan | None = None
        self._error: Exception | None = None
        self.cancelled = False

    def fulfil(self, plan: SolvedPlan | None, error: Exception | None = None) -> None:
        """Sets the plan, or the error of the planner, or neither if the plan is no longer wanted."""
        self._plan, self._error = plan, error
        self._done.set()

    def cancel(self) -> None:
        self.cancelled = True

    def ready(self, timeout_s: float) -> bool:
        if not self._done.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return self._plan is not None

    def layout(self) -> ExpertLayout:
        assert self._plan is not None, "a ticket was asked for its layout before it was ready"
        return self._plan.layout()

    def memory(self) -> bytes:
        return b"" if self._plan is None else self._plan.memory()


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
                ticket.fulfil(None)
            except Exception as error:  # It is raised where the plan is used.
                ticket.fulfil(None, error)

    def _unwanted(self, ticket: ThreadTicket) -> bool:
        return ticket.cancelled or self._closing.is_set()

    def _agree(self, request: PlanRequest, ticket: ThreadTicket) -> SolvedPlan | None:
        """Returns the leader's plan, or raises its failure, on every rank; None if the leader finds that the plan is no
        longer wanted, which is soon the case on the other ranks too, as all ranks drop a plan or none does.
        """
        if self._channel.group is None:
            return None if self._unwanted(ticket) else request.solve()
        leader = request.layer % self._channel.num_ranks
        plan: SolvedPlan | None = None
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
            return None
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
        return SolvedPlan(ExpertLayout(expert_RS.numpy(), request.load.num_experts), memory)

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
