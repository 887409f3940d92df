"""The token plan of a micro-batch that every rank's device makes alike from all ranks' counts, and the routes by it.

The host launches all of it, and reads one thing: how many rows of each chunk go to each rank and come from each, as
messages of a process group need it. They are on their way while it goes on, and it waits when a message is sent.

R ranks, E experts, C chunks, T tokens of this rank, K top-k, P replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moesys.balance.planning_problem import levels_of, link_domains_of, nodes_of
from moesys.config import ClusterSpec, Split
from moesys.config.overlap import MegaKernel
from moesys.frames import Position, call_mismatch, choices_of, generation_of
from moesys.kernels.launch import HostCopy
from moesys.kernels.routing import route
from moesys.kernels.split.chunks import ChunkBlocks, OwnReplicas, SentRows, arrived_rows, cut, sent_rows
from moesys.kernels.split.tables import SplitTables, entries_of, keep_within, tables_of
from moesys.kernels.symmetric.counts import ReceivedCounts
from moesys.layout import ExpertLayout
from moesys.limits import too_many_words
from moesys.load import IntArray
from moesys.overlap.comm.channel import Channel
from moesys.overlap.routes import ChunkRoutes, Routes, chunk_bounds, no_expert


def own_replicas(layout: ExpertLayout, rank: int) -> OwnReplicas:
    """Returns the replicas of ``rank``; duplicates on one rank are one."""
    holds_RE = layout.replicas_RE > 0
    held_R, copies_E = holds_RE.sum(axis=1), holds_RE.sum(axis=0)
    return OwnReplicas(rank, int(held_R[:rank].sum()), int(held_R[rank]), int(held_R.max()), int(copies_E.max()))


def chunk_numbers(num_tokens: int, num_chunks: int, device: torch.device) -> Tensor:
    """Returns the chunk of each token (``chunk_bounds``), int64 [T, 1]."""
    last_T1 = torch.arange(num_chunks - 1, num_chunks * (num_tokens + 1) - 1, num_chunks, device=device)[:, None]
    return last_T1.div(num_tokens, rounding_mode="floor")


def route_on_device(
    expert_TK: Tensor,
    chunk_T1: Tensor | None,
    num_chunks: int,
    split: DeviceSplit,
    own: OwnReplicas,
    turn: int,
    at: Position,
    channel: Channel,
) -> PendingRoutes:
    """Launches all that is known without the host. ``chunk_T1``: ``chunk_numbers``, None where all are one. ``at``: the
    forward of ``expert_TK``. Collective, as all ranks split the same counts.
    """
    num_ranks, num_experts = channel.num_ranks, split.tables.replica_ER.shape[0]
    with channel.meter.planning():
        part_TK = expert_TK if chunk_T1 is None else torch.add(chunk_T1, expert_TK, alpha=num_chunks)
        routing = route(part_TK, num_experts * num_chunks)
    first_RL = channel.all_gather(routing.first_G1, lane="counts", at=at, read=False)
    assert channel.headers is not None
    with channel.meter.planning():
        sizes = (2 * num_chunks * num_ranks, num_ranks * num_experts)
        for_host = torch.empty(sum(sizes), dtype=torch.int64, device=expert_TK.device)
        sizes_2CR, tokens_RE = for_host.split(sizes)
        tokens_RE = tokens_RE.view(num_ranks, num_experts)
        torch.sub(first_RL[:, num_chunks::num_chunks], first_RL[:, :-1:num_chunks], out=tokens_RE)
        tokens_RP = split.tokens_RP(tokens_RE, turn)
        found = cut(first_RL, tokens_RP, split.tables, own, num_chunks, sizes_2CR.view(2, num_chunks, num_ranks))
        on_its_way = HostCopy(for_host)
        sent = sent_rows(routing.entry_P, found, split.tables, expert_TK.shape[1])
    plan = RoutedPlan(split, turn, tokens_RE, tokens_RP, on_its_way)
    return PendingRoutes(plan, found, sent, channel.tagged(channel.generation), channel.headers)


@dataclass(frozen=True)
class RoutedPlan:
    """The plan of a micro-batch, which is on the device. ``tokens_RE``, ``tokens_RP`` int64: what ranks want, and where
    it goes. ``for_host``: the sizes of messages, and what ranks want. Logs keep this of
    a micro-batch.
    """

    split: DeviceSplit
    turn: int
    tokens_RE: Tensor
    tokens_RP: Tensor
    for_host: HostCopy

    def counts_RE(self) -> IntArray:
        """Returns ``tokens_RE`` on the host, which has them when it has the sizes."""
        return self.for_host.read()[-self.tokens_RE.numel() :].reshape(self.tokens_RE.shape)

    def entries(self) -> Tensor:
        """Returns rows (source, expert, destination, tokens) int64 [N, 4] of a ``TokenPlan``, for which it waits."""
        return entries_of(self.tokens_RP, self.split.tables)


@dataclass(frozen=True)
class PendingRoutes:
    """Routes of a micro-batch, which are on the device, with its plan. ``channel``: the channel of its messages, whose
    generation ``routes`` takes from ``headers``, the headers of the message that brought the counts of each rank.
    """

    plan: RoutedPlan
    found: ChunkBlocks
    sent: SentRows
    channel: Channel
    headers: HostCopy

    @cached_property
    def routes(self) -> Routes:
        """The routes as ``build_routes`` returns them, without padding. The host waits for the sizes, once.

        Raises ``RankMismatchError`` on all ranks if they are in different calls, and ValueError on all ranks if a
        choice of any rank names no expert.
        """
        C, R, _ = self.found.arriving_CRG.shape
        self.channel.compare_calls()
        headers_RN = self.headers.read()
        # Ranks have counted their calls differently if each of them has caught the error of another layer.
        self.channel.generation = generation_of(headers_RN)
        send_CR, arrive_CR = self.plan.for_host.read()[: 2 * C * R].reshape(2, C, R).tolist()
        counted_R = self.plan.counts_RE().sum(axis=1).tolist()
        for rank, counted, choices in zip(self.channel.members, counted_R, choices_of(headers_RN), strict=True):
            if counted != choices:
                lost = f"{choices - counted} of {choices}"
                found = f"expert_TK of rank {rank} has choices that name no expert ({lost})"
                raise no_expert(found, self.plan.tokens_RE.shape[1], self.channel.identity.layer)
        sent = self.sent
        num_arrivals = sum(map(sum, arrive_CR))
        arrived = arrived_rows(self.found.arriving_CRG, num_arrivals)
        top_k = sent.wire_place_TK.shape[1]
        bounds = chunk_bounds(len(sent.wire_place_TK), C)
        ends = np.cumsum([0, *map(sum, arrive_CR)]).tolist()
        chunks = []
        for chunk, (first, last, begin, end) in enumerate(zip(bounds, bounds[1:], ends, ends[1:], strict=False)):
            return_M = arrived.return_M[begin:end]
            chunks.append(
                ChunkRoutes(
                    tokens=(first, last),
                    sent=(first * top_k, last * top_k),
                    arrivals=(begin, end),
                    rows=(begin, end),
                    send_counts_R=tuple(send_CR[chunk]),
                    arrive_counts_R=tuple(arrive_CR[chunk]),
                    slots=(),
                    first_S1=arrived.first_CG1[chunk],
                    gather_P=arrived.gather_M[begin:end],
                    return_M=return_M,
                    wire_place_TK=sent.wire_place_TK[first:last],
                    combine_M=return_M,
                )
            )
        return Routes(
            chunks=tuple(chunks),
            send_token_N=sent.token_N,
            send_row_N=sent.row_N,
            by_destination_N=sent.by_destination_N,
            by_source_M=arrived.by_source_M,
            order=(),
            order_row_P=arrived.order_row_M,
            order_arrival_P=arrived.order_arrival_M,
            first_S1=arrived.first_G1,
            num_arrivals=num_arrivals,
            num_rows=num_arrivals,
        )


def room_for_rows(overlap: MegaKernel, most_tokens: int, top_k: int, num_ranks: int) -> int:
    """Returns the number of rows for which a rank has memory where devices plan, at most all rows that there may be."""
    choices = most_tokens * top_k
    return min(int(overlap.rows_cap * choices), num_ranks * choices)


class RowLimit:
    """The limit of plans that a device makes. ``note``, ``look`` and ``wait`` report to the host, as those of
    ``kernels.symmetric.signals.TimeoutWatch`` do. ``members``: the ranks of the group, as errors name them.
    ``found_9``: the findings of ``keep_within``, which are zeros as long as there are none.
    """

    def __init__(self, device: torch.device, members: Sequence[int]) -> None:
        self.found_9 = torch.zeros(9, dtype=torch.int64, device=device)
        self._seen_9 = torch.zeros(9, dtype=torch.int64).pin_memory() if self.found_9.is_cuda else None
        self._members = members

    def note(self) -> torch.cuda.Event | None:
        """Records the findings at the end of a direction. On the CPU it raises the errors of ``wait`` at once. On a GPU
        it returns an event after which ``look`` knows of this direction, or None while a CUDA graph is captured.
        """
        if self._seen_9 is None:
            self._raise_if_found(self.found_9)
            return None
        self._seen_9.copy_(self.found_9, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            return None
        noted = torch.cuda.Event()
        noted.record()
        return noted

    def look(self) -> None:
        """Raises the errors of ``wait`` if a plan of a direction that has ended by now was refused."""
        if self._seen_9 is not None:
            self._raise_if_found(self._seen_9)

    def wait(self) -> None:
        """Raises ``RankMismatchError`` if any plan was refused because ranks were in different calls, and ValueError
        if one had too many rows or choices of no expert, when the device has made all of them.
        """
        self._raise_if_found(self.found_9.cpu())

    def _raise_if_found(self, found_9: Tensor) -> None:
        rank, num_rows, room, choices, stranger, its_call, loser, lost, call = found_9.tolist()
        if not (num_rows or stranger or loser):
            return
        # Later micro-batches are not concerned, if the error is caught.
        self.found_9.zero_()
        if self._seen_9 is not None:
            # Copies that are under way would restore the findings.
            torch.cuda.synchronize(self.found_9.device)
            self._seen_9.zero_()
        if stranger:
            raise call_mismatch(self._members[stranger - 1], its_call, call)
        if loser:
            found = f"expert_TK of rank {self._members[loser - 1]} has choices that name no expert ({lost})"
            raise no_expert(found)
        bound = f"the {room} that rows_cap allows for {choices} choices of a rank"
        raise ValueError(too_many_words(self._members[rank], num_rows, choices, bound))


@dataclass(frozen=True)
class DeviceSplit:
    """Makes the plans of a layout's split: ``tokens_RP(tokens_RE, turn)`` is what each source of ``tokens_RE`` int64
    [R, E] sends to each replica, int64 [R, P], as on the host.
    """

    tables: SplitTables
    tokens_RP: Callable[[Tensor, int], Tensor]


@dataclass
class PendingPlan:
    """The plan of a micro-batch, which is on the device once its forward has been launched.

    ``turn``: the micro-batch's number. ``room``: rows for which there is memory on a rank, of ``choices`` that one has
    at most. ``call``: the ``call_bits`` of the forward, 0 if none are compared. ``tokens_RE``, ``tokens_RP`` int64,
    once forward is launched: the tokens of each rank for each expert, and for each replica. ``noted``: an event at the
    end of forward on a GPU.
    """

    split: DeviceSplit
    turn: int
    limit: RowLimit
    room: int
    choices: int
    call: int = 0
    tokens_RE: Tensor = field(init=False, repr=False)
    tokens_RP: Tensor = field(init=False, repr=False)
    noted: torch.cuda.Event | None = field(default=None, init=False)

    def check(self) -> None:
        """Waits for forward, and raises the errors of ``RowLimit.wait`` if its plan was refused."""
        if self.noted is not None:
            self.noted.synchronize()
        self.limit.look()

    def make(self, counts: ReceivedCounts) -> Tensor:
        """Returns the plan to run, int64 [R, P]. It has no tokens if a rank would get too many rows, or if the
        ``counts`` do not belong together (``keep_within``).
        """
        self.tokens_RE, self.tokens_RP = counts.tokens_RE, self.split.tokens_RP(counts.tokens_RE, self.turn)
        bounds = (self.room, self.choices, counts.origin_R2, self.call)
        return keep_within(self.tokens_RP, self.split.tables, *bounds, self.limit.found_9)

    def counts_RE(self) -> IntArray:
        """Returns ``tokens_RE`` on the host, which waits for the device."""
        return self.tokens_RE.cpu().numpy()

    def entries(self) -> Tensor:
        """Returns rows (source, expert, destination, tokens) int64 [N, 4] of a ``TokenPlan``, for which it waits."""
        return entries_of(self.tokens_RP, self.split.tables)


def split_tables(layout: ExpertLayout, cluster: ClusterSpec, device: torch.device | str) -> SplitTables:
    """Returns index tables on ``device``, which follow from the layout alone, whatever splits over it.

    Raises ValueError when layout and cluster are not for the same ranks.
    """
    if layout.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"the layout is for {layout.num_ranks} ranks, the cluster has {cluster.num_ranks}; "
            "plan both for the same ranks"
        )
    level_LR = levels_of(cluster, nodes_of(cluster))
    return tables_of(layout.expert_RS, layout.num_experts, link_domains_of(cluster), level_LR, device)


def device_split(layout: ExpertLayout, cluster: ClusterSpec, config: Split, device: torch.device | str) -> DeviceSplit:
    """Returns what makes the plans of ``split_tokens`` on ``device``, once per layout, so that the host does not wait
    for counts.

    Raises ValueError as ``split_tables`` does, and for a split that only the host can make.
    """
    tables = split_tables(layout, cluster, device)
    return DeviceSplit(tables, config.device_split(tables, layout, cluster))
