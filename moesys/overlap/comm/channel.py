"""Collectives of one process group: bytes counted, spans recorded, dead ranks named.

Every byte that moesys sends goes through a ``Channel``; a channel without a group is that of one rank alone.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol, Self, TypeVar
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parameter import is_lazy

from moesys import frames
from moesys.collectives import EXPLAINED, FAILURE_GRACE_S, failure_of, group_destroyed
from moesys.frames import NO_LAYER, VALUES, Header, Identity, Position
from moesys.kernels.launch import HostCopy, to_device
from moesys.overlap.comm.background import BackgroundThread, Heartbeat, silent_ranks
from moesys.overlap.comm.record import Meter, Recorder
from moesys.torch_private import group_timeout_s, is_registered


class Messages:
    """Messages under way: a ``dist.Work`` as far as channels need one.

    ``get_future`` has a thread wait for them, so that their end is known when it comes; ``is_completed`` is for those
    who have called it. Either gives the first error of any message.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self._future: Future[None] | None = None

    def wait(self) -> bool:
        if self._future is not None:
            self._future.wait()
        else:
            self._wait_for_all()
        return True

    def get_future(self) -> Future[None]:
        if self._future is None:
            self._future = Future()
            BackgroundThread("moesys-messages", partial(self._settle, self._future)).start()
        return self._future

    def is_completed(self) -> bool:
        return self._future is not None and self._future.done()

    def _wait_for_all(self) -> None:
        for work in self._works:
            work.wait()

    def _settle(self, future: Future[None]) -> None:
        try:
            self._wait_for_all()
        except RuntimeError as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(None)


def exchange(
    received: Tensor,
    sent: Tensor,
    out_counts: Sequence[int],
    in_counts: Sequence[int],
    group: dist.ProcessGroup,
    tag: int = 1 << 30,
) -> dist.Work | Messages:
    """Starts an all-to-all: ``in_counts`` [R] rows of ``sent`` go to each rank in rank order, and ``received`` gets
    ``out_counts`` [R] by source. By messages where gloo moves what lies on the CPU, else by the backend's own.

    Messages with the same ``tag`` keep their order between two ranks, and never match messages with another tag. Each
    rank turns to its peers in an order of its own, so that no rank is everyone's first; ranks that have nothing for
    each other do not wait for each other.
    """
    # Gloo moves memory of a GPU in collectives only.
    if dist.get_backend(group) != "gloo" or sent.device.type != "cpu":
        work = dist.all_to_all_single(received, sent, list(out_counts), list(in_counts), group=group, async_op=True)
        assert work is not None
        return work
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received_R, sent_R = received.split(list(out_counts)), sent.split(list(in_counts))
    others = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
    works = [
        dist.irecv(received_R[peer], group=group, group_src=peer, tag=tag)
        for peer in reversed(others)
        if out_counts[peer]
    ]
    works += [dist.isend(sent_R[peer], group=group, group_dst=peer, tag=tag) for peer in others if in_counts[peer]]
    received_R[rank].copy_(sent_R[rank])
    return Messages([work for work in works if work is not None])


# Messages that nobody has waited for are kept for this many calls: the call that failed, and the call after it.
KEPT_CALLS = 2
# A digest is computed in pieces of so many integers of eight bytes.
_DIGESTED_AT_ONCE = 1 << 18
# The golden section of 2^64, as a signed integer.
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)

T = TypeVar("T")


class AsyncWork(Protocol):
    """A ``dist.Work`` as far as channels need one."""

    def wait(self) -> Any:
        """Blocks until it is done."""

    def get_future(self) -> Any:
        """Returns a future that ends when it does."""


class PacingLink(Protocol):
    """A link over which all-to-alls travel at its pace, for benchmarks."""

    def carry(self, work: AsyncWork, num_bytes: int) -> AsyncWork:
        """Returns ``work``, which is under way, as it is over this link."""


class Transfer:
    """A collective in flight. ``wait`` blocks until it is done, and counts how long that took as exposed time."""

    def __init__(self, channel: Channel, lane: str, detail: str, work: AsyncWork | None) -> None:
        self._channel, self._lane, self._detail, self._work = channel, lane, detail, work
        self._start = channel.recorder.clock.now() if channel.recorder.enabled else None
        self._unrecorded = threading.Lock()
        if isinstance(work, Messages):
            self._kept = channel.kept_messages()
            self._kept.add(work)
        if work is not None and channel.recorder.enabled:
            # Torch calls back at once for messages between GPUs, on a stream that waits for their end.
            work.get_future().add_done_callback(lambda _: self._record())

    def wait(self) -> None:
        if self._work is not None:
            with self._channel.meter.exposed(self._lane):
                self._channel.guard(f"{self._lane} ({self._detail})" if self._detail else self._lane, self._work.wait)
            if isinstance(self._work, Messages):
                self._kept.discard(self._work)
            self._work = None
            self._record()

    def _record(self) -> None:
        """Records the span once: a callback may come later than the waiting thread goes on."""
        if self._unrecorded.acquire(blocking=False):
            recorder = self._channel.recorder
            if recorder.enabled:
                recorder.add_between(self._lane, self._lane, self._start, recorder.clock.now(), self._detail)


class Channel:
    """All-to-all, all-gather and all-reduce of one group, on tensors of any dtype; ``group=None`` is one rank alone.

    ``node_of_rank`` [R]: bytes within a node and bytes between nodes are counted apart. Spans go to ``recorder``, which
    the layers of a model share, counts to ``meter``, which belongs to one layer.

    ``link``: over which all-to-alls travel at its pace; they take as long as the machine needs without one.
    ``identity``: the layer whose data travel.

    An all-gather in which ranks turn out to be in different calls, or to have declared the layer differently, raises
    ``RankMismatchError`` on all of them. Messages of an all-to-all carry the ``generation`` of the call that they
    belong to (``tagged``), so that messages of a failed pass are not taken for later ones; only gloo can do that.

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
        identity: Identity = NO_LAYER,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.node_of_rank = tuple(node_of_rank)
        self.num_nodes = len(set(self.node_of_rank))
        self.recorder = recorder
        self.meter = meter
        self.device_type = device_type
        self.identity = identity
        self.generation = 0
        # Messages that nobody has waited for, by their generation. They are kept also where a failed pass has dropped
        # its transfers: a connection of gloo stands still for good when data come for a buffer that is gone.
        self._posted: dict[int, set[Messages]] = {}
        # The names of tensors whose values the ranks have compared, by the call that compared them.
        self.compared: dict[str, set[str]] = {}
        # The headers of the newest all-gather for which the host did not wait, [R, N], and all that it has not compared
        # yet, each with its device.
        self.headers: HostCopy | None = None
        self._unread: deque[tuple[HostCopy, torch.device]] = deque()
        self.failure_grace_s = FAILURE_GRACE_S
        self.heartbeat: Heartbeat | None = None
        self.link: PacingLink | None = None

    def tagged(self, generation: int) -> Self:
        """Returns a channel whose messages belong to one call; it shares everything else with this channel."""
        if self.group is None:
            return self
        # A shallow copy, without the cost of copy.copy: layers make one for every call.
        channel = object.__new__(type(self))
        channel.__dict__.update(self.__dict__)
        channel.generation = generation
        return channel

    def kept_messages(self) -> set[Messages]:
        """Returns the messages of this call that are kept; those of older calls than ``KEPT_CALLS`` are no longer."""
        kept = self._posted.get(self.generation)
        if kept is None:
            kept = self._posted[self.generation] = set()
            if len(self._posted) > KEPT_CALLS:
                del self._posted[next(iter(self._posted))]
        return kept

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
        """Starts sending rows of ``rows_in`` to each rank, ``in_counts`` [R] in rank order; ``rows_out`` gets
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
        # 31 bits for one call of a layer; tags below 2**30 are left to user code.
        tag = 1 << 30 | (self.identity.layer & 0x3FF) << 20 | self.generation & 0xFFFFF
        work = self.guard(lane, lambda: exchange(received, sent, out_bytes, in_bytes, group, tag))
        if self.link is None:
            return Transfer(self, lane, detail, work)
        away_bytes = max(sum(of) - of[self.rank] for of in (out_bytes, in_bytes))
        return Transfer(self, lane, detail, self.link.carry(work, away_bytes))

    def all_gather(self, values: Tensor, *, lane: str, at: Position = VALUES, read: bool = True) -> Tensor:
        """Returns every rank's ``values`` stacked, [R, ...]; blocks. ``at``: the call that this rank is in.

        ``read``: whether the host reads the values next; if not it does not wait for them, and the ranks' calls are
        compared in ``compare_calls``, or behind the next values that it reads.

        Raises ``RankMismatchError`` on all ranks where they are in different calls, have values of different sizes, or
        have declared the layer differently.
        """
        if self.group is None:
            return values[None]
        payload_N = _as_bytes(values.contiguous())
        if read:
            gathered_RN, sizes = self._gather(payload_N, lane, at)
            if len(set(sizes)) > 1:
                raise frames.size_mismatch(sizes, at, self.identity.layer, self.members)
        else:
            gathered_RN = self._gather_unread(payload_N, lane, at)
        return gathered_RN.view(-1).view(values.dtype).view(self.num_ranks, *values.shape)

    def gather_bytes(self, payload: bytes, at: Position, device: torch.device) -> list[bytes]:
        """Returns every rank's ``payload``, of any length, which travels between tensors on ``device``; blocks. Raises
        as ``all_gather`` does.
        """
        if self.group is None:
            return [payload]
        sent_N = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy()).to(device)
        gathered_RN, sizes = self._gather(sent_N, "counts", at)
        return [row[:size].tobytes() for row, size in zip(gathered_RN.cpu().numpy(), sizes, strict=True)]

    def differing(
        self, tensors: Mapping[str, Tensor], at: Position, device: torch.device
    ) -> tuple[tuple[str, int, int] | None, set[str]]:
        """Returns the name of a tensor of which two ranks have other bits, shapes or dtypes, or, unless it is a
        ``DTensor``, that one of them lacks, and these ranks; None if there is none. Returns also the names of the
        tensors that have no values on some rank. The same on all ranks; a collective. Raises as ``all_gather`` does.

        Shards of a ``DTensor`` differ by right: ranks compare those shards only of which several have a copy. Tensors
        without values, and parameters that Megatron's ``tensor_model_parallel`` marks as parts, are left out.
        """
        if self.group is None:
            return None, set()
        shared = {name: each for name, each in tensors.items() if is_shared(each)}
        # The host waits once for all of them.
        digests = [_digest(each).to(device) for each in shared.values()]
        numbers = torch.stack(digests).tolist() if digests else []
        mine: dict[str, tuple[str, int] | bool] = {name: has_values(each) for name, each in tensors.items()}
        for (name, each), number in zip(shared.items(), numbers, strict=True):
            mine[name] = _shard_of(each), number ^ crc32(f"{[*each.shape]} {each.dtype}".encode())
        found_R = [json.loads(said) for said in self.gather_bytes(json.dumps(mine).encode(), at, device)]
        without = {name for found in found_R for name, said in found.items() if said is False}
        for name in dict.fromkeys(chain.from_iterable(found_R)):
            first: dict[str, tuple[int, int | None]] = {}
            for rank, found in zip(self.members, found_R, strict=True):
                if not isinstance(said := found.get(name, ("", None)), bool):
                    other, digest = first.setdefault(said[0], (rank, said[1]))
                    if digest != said[1]:
                        return (name, other, rank), without
        return None, without

    def compare_calls(self) -> None:
        """Compares the calls of gathers that the host has not waited for. Raises as ``all_gather`` does."""
        while self._unread:
            headers, device = self._unread.popleft()
            self._compare(headers.read(), device)

    def _gather(self, payload_N: Tensor, lane: str, at: Position) -> tuple[Tensor, list[int]]:
        """Returns every rank's payload, padded to the longest, uint8 [R, N], and their sizes."""
        header = frames.header(self.identity, at, self.generation, len(payload_N))
        first_RF = self._all_gather(_framed(header, payload_N), lane, at.what)
        headers_RN = _headers(first_RF).cpu().numpy()
        self.compare_calls()
        self._compare(headers_RN, payload_N.device)
        if at.what == "forward":
            self.generation = frames.generation_of(headers_RN)
        sizes = frames.payload_bytes_of(headers_RN)
        return self._with_rest(first_RF, payload_N, max(sizes), lane, at), sizes

    def _gather_unread(self, payload_N: Tensor, lane: str, at: Position) -> Tensor:
        """Returns payloads of one size, uint8 [R, N], for which the host does not wait."""
        header = frames.header(self.identity, at, self.generation, len(payload_N))
        first_RF = self._all_gather(_framed(header, payload_N), lane, at.what)
        self.headers = HostCopy(_headers(first_RF))
        self._unread.append((self.headers, payload_N.device))
        if at.what == "forward":
            self.generation += 1
        return self._with_rest(first_RF, payload_N, len(payload_N), lane, at)

    def _with_rest(self, first_RF: Tensor, payload_N: Tensor, most_bytes: int, lane: str, at: Position) -> Tensor:
        """Returns whole payloads of up to ``most_bytes``; the frames hold only their beginnings."""
        begun_RN = first_RF[:, frames.HEADER_BYTES :][:, :most_bytes]
        if most_bytes <= frames.PAYLOAD_BYTES:
            return begun_RN.contiguous()
        rest_N = payload_N.new_zeros(most_bytes - frames.PAYLOAD_BYTES)
        rest_N[: max(0, len(payload_N) - frames.PAYLOAD_BYTES)] = payload_N[frames.PAYLOAD_BYTES :]
        return torch.cat([begun_RN, self._all_gather(rest_N, lane, at.what)], dim=1)

    def _all_gather(self, values_N: Tensor, lane: str, what: str) -> Tensor:
        gathered_RN = values_N.new_empty(self.num_ranks, len(values_N))
        with self.recorder.span(lane, lane), self.meter.exposed(lane):
            self.guard(what, lambda: dist.all_gather(list(gathered_RN.unbind()), values_N, group=self.group))
        return gathered_RN

    def _compare(self, headers_RN: Header, device: torch.device) -> None:
        """Raises ``RankMismatchError``, on all ranks alike, where the ranks' headers do not fit together. ``device``:
        the device of the gather that brought them.
        """
        if frames.alike(headers_RN):
            return
        if not frames.same_position(headers_RN):
            # The gathers behind it are those of a pass that ends here, and would fail later passes.
            self._unread.clear()
            raise frames.position_mismatch(headers_RN, self.members)
        self._unread.clear()
        text_N = torch.zeros(frames.text_bytes_of(headers_RN), dtype=torch.uint8)
        text_N[: len(self.identity.text)] = torch.from_numpy(np.frombuffer(self.identity.text, np.uint8).copy())
        texts_RN = self._all_gather(text_N.to(device), "counts", "comparison of declarations")
        texts = [row.tobytes().rstrip(b"\0") for row in texts_RN.cpu().numpy()]
        raise frames.declaration_mismatch(texts, self.identity.layer, self.members)

    @property
    def members(self) -> list[int]:
        """The ranks of the group, as the default group numbers them."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def all_reduce(self, values: Tensor, *, lane: str) -> Tensor:
        """Returns the sum of every rank's ``values``, which it takes the place of; blocks."""
        if self.group is not None:
            with self.recorder.span(lane, lane), self.meter.exposed(lane):
                self.guard(lane, lambda: dist.all_reduce(values, group=self.group))
        return values

    def require_group(self) -> None:
        """Raises RuntimeError where the process group was destroyed."""
        if self.group is not None and not is_registered(self.group):
            raise group_destroyed("these layers" if self.identity.layer < 0 else f"layer {self.identity.layer}")

    def guard(self, what: str, call: Callable[[], T]) -> T:
        """Returns ``call()``, a collective; where it fails ``CollectiveError`` names it and the ranks that are gone."""
        try:
            return call()
        except EXPLAINED:
            raise
        except (KeyError, RuntimeError, ValueError) as error:
            self.require_group()
            if not isinstance(error, RuntimeError):
                raise
            layer, grace_s = self.identity.layer, self.failure_grace_s
            named = what if layer < 0 or what.endswith("()") else f"{what} of layer {layer}"
            without_heartbeat = None if self.heartbeat is None else partial(silent_ranks, grace_s)
            raise failure_of(named, self.group, error, self.device_type, grace_s, without_heartbeat) from error


def has_values(tensor: Tensor) -> bool:
    """Returns False for a tensor on the meta device, and for a lazy parameter."""
    return not (tensor.is_meta or is_lazy(tensor))


def is_shared(tensor: Tensor) -> bool:
    """Returns whether other ranks have the same part of a tensor, and it has values."""
    if not has_values(tensor):
        return False
    if not isinstance(tensor, DTensor):
        return not getattr(tensor, "tensor_model_parallel", False)
    return any(each.is_replicate() and tensor.device_mesh.size(dim) > 1 for dim, each in enumerate(tensor.placements))


def _shard_of(tensor: Tensor) -> str:
    """Returns which part of a ``DTensor`` this rank has."""
    if not isinstance(tensor, DTensor):
        return ""
    place = tensor.device_mesh.get_coordinate() or ()
    return str([at for at, placement in zip(place, tensor.placements, strict=True) if not placement.is_replicate()])


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor:
    """Returns a number, int64 [], that depends on the bits of all elements and on their order."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    # Sparse tensors are digested as dense ones.
    bytes_N = local.to_dense().contiguous().view(-1).view(torch.uint8)
    if len(bytes_N) % 8 or bytes_N.storage_offset() % 8:
        bytes_N = nn.functional.pad(bytes_N, (0, -len(bytes_N) % 8))
    integers_N = bytes_N.view(torch.int64)
    odd_N = torch.arange(1, 2 * min(len(integers_N), _DIGESTED_AT_ONCE) + 1, 2, device=local.device)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for piece_N in integers_N.split(_DIGESTED_AT_ONCE):
        # Both steps map integers one to one. They detect signs that change in pairs.
        mixed_N = piece_N * _MULTIPLIER
        mixed_N ^= mixed_N >> 32 & 0xFFFFFFFF
        # The factor detects two pieces that change places.
        total.mul_(3).add_((mixed_N * odd_N[: len(piece_N)]).sum())
    return total


def _headers(frames_RF: Tensor) -> Tensor:
    return frames_RF[:, : frames.HEADER_BYTES].contiguous().view(torch.int64)


def _framed(header: Header, payload_N: Tensor) -> Tensor:
    """Returns a frame, uint8 [FRAME_BYTES], on the device of the payload."""
    frame = payload_N.new_empty(frames.FRAME_BYTES)
    on_cpu = payload_N.device.type == "cpu"
    header_N = torch.from_numpy(header) if on_cpu else to_device(header, payload_N.device)
    frame[: frames.HEADER_BYTES] = header_N.view(torch.uint8)
    begun_N = payload_N[: frames.PAYLOAD_BYTES]
    frame[frames.HEADER_BYTES :][: len(begun_N)] = begun_N
    return frame


def _as_bytes(rows: Tensor) -> Tensor:
    assert rows.is_contiguous()
    # numpy gives what is empty strides that torch does not take.
    return rows.view(-1).view(torch.uint8) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
