"""Routes that a device makes: of all ranks' counts, by the plan that every rank's device makes alike.

The host launches all of it, and reads one thing: how many rows of each chunk go to each rank and come from each, as
messages of a process group need it. They are on their way while it goes on, and it waits when a message is sent.

R ranks, E experts, C chunks, T tokens of this rank, K top-k, P replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moesys.frames import Position, choices_of, generation_of
from moesys.kernels.host_copies import HostCopy
from moesys.kernels.routing import route
from moesys.kernels.split.chunks import ChunkBlocks, OwnReplicas, SentRows, arrived_rows, cut, sent_rows
from moesys.kernels.split.tables import entries_of
from moesys.layout import ExpertLayout
from moesys.load import IntArray
from moesys.overlap.comm.channel import Channel
from moesys.overlap.device_split import DeviceSplit
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

    def wanted_RE(self) -> Tensor:
        """Returns ``tokens_RE``."""
        return self.tokens_RE

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
