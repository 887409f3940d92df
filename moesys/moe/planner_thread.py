"""The planner thread: layouts are solved off the critical path, once for all ranks, and broadcast.

Every rank runs one such thread on a process group of its own, and all ask for the same plans in the same order. Plans
of layer l are solved by rank l mod R; the others receive the layout, and every rank checks that the plan was made from
the history that it saw itself.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import traceback

import numpy as np
import torch
import torch.distributed as dist

from moesys.layout import ExpertLayout
from moesys.moe.planning import PlanRequest


class ThreadTicket:
    """A plan in the making."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._layout: ExpertLayout | None = None
        self._error: str | None = None

    def fulfil(self, layout: ExpertLayout | None, error: str | None) -> None:
        self._layout, self._error = layout, error
        self._done.set()

    def ready(self, timeout_s: float) -> bool:
        if not self._done.wait(timeout_s):
            return False
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def layout(self) -> ExpertLayout:
        if self._layout is None:
            raise RuntimeError(self._error or "the plan is not ready; it was asked for its layout too early")
        return self._layout


class PlannerThread:
    """A ``PlanSource`` that solves in the background. ``close`` it, or let it end with the process (it is a daemon)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._num_ranks = dist.get_world_size(group) if group is not None else 1
        self._requests: queue.SimpleQueue[tuple[PlanRequest, ThreadTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moesys-planner", daemon=True)
        self._thread.start()

    def submit(self, request: PlanRequest) -> ThreadTicket:
        ticket = ThreadTicket()
        self._requests.put((request, ticket))
        return ticket

    def close(self) -> None:
        """Finish what was asked for, and stop."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            request, ticket = item
            try:
                ticket.fulfil(self._agree(request), None)
            except Exception:  # Whatever went wrong is raised where the plan is used.
                ticket.fulfil(None, f"the planner failed for layer {request.layer}:\n{traceback.format_exc()}")

    def _agree(self, request: PlanRequest) -> ExpertLayout:
        """The leader's plan, on every rank; the leader's failure, on every rank."""
        if self._group is None:
            return request.solve()
        leader = request.layer % self._num_ranks
        layout: ExpertLayout | None = None
        message = b""
        if self._rank == leader:
            try:
                layout = request.solve()
            except Exception:
                message = traceback.format_exc().encode()
        shape = layout.expert_RS.shape if layout is not None else (0, 0)
        header = torch.tensor([layout is not None, *shape, len(message)], dtype=torch.int64)
        self._broadcast(header, leader)
        ok, num_ranks, num_slots, message_bytes = header.tolist()
        if not ok:
            text = torch.frombuffer(bytearray(message or bytes(message_bytes)), dtype=torch.uint8)
            self._broadcast(text, leader)
            raise RuntimeError(f"rank {leader}, which plans this layer, says:\n{text.numpy().tobytes().decode()}")
        seen = torch.frombuffer(bytearray(history_digest(request)), dtype=torch.uint8)
        theirs = seen.clone()
        self._broadcast(theirs, leader)
        expert_RS = torch.empty(num_ranks, num_slots, dtype=torch.int64)
        if layout is not None:
            expert_RS.copy_(torch.from_numpy(layout.expert_RS.copy()))
        self._broadcast(expert_RS, leader)
        if not torch.equal(seen, theirs):
            raise RuntimeError(
                f"rank {self._rank} and rank {leader} saw different loads of layer {request.layer}; every rank "
                "must run the same micro-batches in the same order"
            )
        return ExpertLayout(expert_RS.numpy(), request.load.num_experts)

    def _broadcast(self, tensor: torch.Tensor, leader: int) -> None:
        assert self._group is not None
        dist.broadcast(tensor, dist.get_global_rank(self._group, leader), group=self._group)


def history_digest(request: PlanRequest) -> bytes:
    """32 bytes over what the plan is made from."""
    digest = hashlib.sha256(np.ascontiguousarray(request.load.tokens_RE, dtype="<i8").tobytes())
    digest.update(request.previous.fingerprint().encode())
    return digest.digest()
