"""Collectives of one process group: bytes counted, spans recorded, dead ranks named.

Every byte that moesys sends goes through a ``Channel``; a channel without a group is one rank talking to itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moesys.overlap.comm.heartbeat import Heartbeat
from moesys.overlap.comm.messages import Messages, exchange
from moesys.overlap.comm.paced_link import PacedLink, PacedTransfer
from moesys.overlap.comm.record import Meter, Recorder
from moesys.torch_private import default_store, group_timeout_s

FAILURE_GRACE_S = 5.0

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """A collective failed. ``silent_ranks`` neither failed with it nor have a heartbeat: dead, hung, or gone."""

    def __init__(self, message: str, silent_ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.silent_ranks = silent_ranks


class Transfer:
    """A collective in flight. ``wait`` blocks until it is done, and counts how long that took as exposed time."""

    def __init__(
        self, channel: Channel, lane: str, detail: str, work: dist.Work | Messages | PacedTransfer | None
    ) -> None:
        self._channel, self._lane, self._detail, self._work = channel, lane, detail, work
        self._start = channel.recorder.clock.now() if channel.recorder.enabled else None
        self._unrecorded = threading.Lock()
        if work is not None and channel.recorder.enabled:
            # Of what travels between GPUs torch calls back at once, on a stream that waits for its end.
            work.get_future().add_done_callback(lambda _: self._record())

    def wait(self) -> None:
        if self._work is not None:
            with self._channel.exposed(self._lane):
                self._channel.guard(self._lane, self._work.wait)
            self._work = None
            self._record()

    def _record(self) -> None:
        """Once, by whoever learns it first: callbacks may come later than the waiting thread goes on."""
        if self._unrecorded.acquire(blocking=False):
            recorder = self._channel.recorder
            if recorder.enabled:
                recorder.add_between(self._lane, self._lane, self._start, recorder.clock.now(), self._detail)


class Channel:
    """All-to-all, all-gather and all-reduce of one group, on tensors of any dtype; ``group=None`` is one rank alone.

    ``node_of_rank`` [R] tells links apart: bytes within a node, bytes between nodes. Spans go to ``recorder``, which
    the layers of a model share, counts to ``meter``, which belongs to one layer.

    ``link``: over which all-to-alls travel at its pace; they take as long as the machine needs without one.

    A collective that fails raises ``CollectiveError``, which names the ranks that are gone: with a ``heartbeat`` after
    ``failure_grace_s`` seconds, without one when all others have failed, at the latest after the group's time-out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        node_of_rank: Sequence[int],
        recorder: Recorder,
        meter: Meter,
        device_type: str = "cpu",
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.node_of_rank = tuple(node_of_rank)
        self.num_nodes = len(set(self.node_of_rank))
        self.recorder = recorder
        self.meter = meter
        self.device_type = device_type
        self.failure_grace_s = FAILURE_GRACE_S
        self.heartbeat: Heartbeat | None = None
        self.link: PacedLink | None = None

    @property
    def timeout_s(self) -> float:
        """After how long collectives give up."""
        return group_timeout_s(self.group, self.device_type)

    def all_to_all(
        self,
        rows_out: Tensor,
        rows_in: Tensor,
        out_counts: Sequence[int],
        in_counts: Sequence[int],
        *,
        lane: str,
        detail: str = "",
    ) -> Transfer:
        """Start sending rows of ``rows_in`` to each rank, ``in_counts`` [R] in rank order; ``rows_out`` gets
        ``out_counts`` [R] by source. Rows may have any trailing shape and dtype: they travel as bytes.
        """
        if self.group is None:
            rows_out.copy_(rows_in)
            return Transfer(self, lane, detail, None)
        row_bytes = torch.Size(rows_in.shape[1:]).numel() * rows_in.element_size()
        for source, count in enumerate(out_counts):
            if source != self.rank and count:
                same_node = self.node_of_rank[source] == self.node_of_rank[self.rank]
                self.meter.wire_bytes[lane, "intra_node" if same_node else "inter_node"] += count * row_bytes
        group, received, sent = self.group, _as_bytes(rows_out), _as_bytes(rows_in)
        out_bytes, in_bytes = ([count * row_bytes for count in counts] for counts in (out_counts, in_counts))
        work = self.guard(lane, lambda: exchange(received, sent, out_bytes, in_bytes, group))
        if self.link is None:
            return Transfer(self, lane, detail, work)
        away_bytes = max(sum(of) - of[self.rank] for of in (out_bytes, in_bytes))
        return Transfer(self, lane, detail, self.link.carry(work, away_bytes))

    def all_gather(self, values_N: Tensor, *, lane: str) -> Tensor:
        """Every rank's ``values`` stacked, [R, N]; blocks."""
        if self.group is None:
            return values_N[None]
        gathered_RN = values_N.new_empty(self.num_ranks, *values_N.shape)
        with self.recorder.span(lane, lane), self.exposed(lane):
            self.guard(lane, lambda: dist.all_gather(list(gathered_RN.unbind()), values_N, group=self.group))
        return gathered_RN

    def all_reduce(self, values: Tensor, *, lane: str) -> Tensor:
        """Returns the sum of every rank's ``values``, which it takes the place of; blocks."""
        if self.group is not None:
            with self.recorder.span(lane, lane), self.exposed(lane):
                self.guard(lane, lambda: dist.all_reduce(values, group=self.group))
        return values

    def exposed(self, lane: str) -> AbstractContextManager[None]:
        """Count the time inside as exposed communication."""
        return self.meter.exposed(lane)

    def guard(self, kind: str, call: Callable[[], T]) -> T:
        """Run a collective call; where it fails, find out which ranks are gone and say so."""
        try:
            return call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._failure(kind, error) from error

    def _failure(self, kind: str, error: RuntimeError) -> CollectiveError:
        """Sign as a survivor, and find out who neither signs nor has a heartbeat."""
        assert self.group is not None
        members = dist.get_process_group_ranks(self.group)
        me = members[self.rank]
        reason = ""
        try:
            store = default_store()
            store.set(f"moesys/survivor/{me}", kind)
            if self.heartbeat is not None:
                silent = self._unsigned(store, self.heartbeat.silent_ranks(members, self.failure_grace_s))
            else:
                silent = self._missing_from_roll_call(store, members)
        except RuntimeError:
            silent = {0}
            reason = " (the rendezvous store, which rank 0 hosts unless a launcher does, is gone)"
        names = tuple(sorted(silent))
        if names:
            who = f"rank{'s' * (len(names) > 1)} {', '.join(map(str, names))} did not answer{reason}: dead or hung"
        else:
            who = "every rank is alive, so the network or a time-out failed it"
        first_line = str(error).strip().splitlines()[0]
        return CollectiveError(f"rank {me}: {kind} failed; {who}. First error: {first_line}", names)

    def _missing_from_roll_call(self, store: dist.Store, members: Sequence[int]) -> set[int]:
        """Who does not sign. Whoever is alive fails in a collective too, but some not before the group's time-out."""
        assert self.group is not None
        deadline = time.monotonic() + self.timeout_s + self.failure_grace_s
        silent = self._unsigned(store, members)
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = self._unsigned(store, silent)
        return silent

    @staticmethod
    def _unsigned(store: dist.Store, ranks: Collection[int]) -> set[int]:
        return {rank for rank in ranks if not store.check([f"moesys/survivor/{rank}"])}


def _as_bytes(rows: Tensor) -> Tensor:
    assert rows.is_contiguous()
    # numpy gives what is empty strides that torch does not take.
    return rows.view(-1).view(torch.uint8) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
