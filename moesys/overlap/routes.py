"""Routes: which row goes where, as index tables for one rank and one micro-batch.

A *row* is one (token, k) of a source rank. Three orders of rows matter, all pure functions of the routing:

- *wire order* of a source: by (destination, slot there, token, k), what an all-to-all sends; it returns the same way.
- *arrival order* of a destination: by (source, slot, token, k), what an all-to-all delivers; by (gate, source, slot,
  token, k) where tokens cross to a node once (``node_routes``), sources of its own node before all others.
- *expert order* of a slot: by (source, token, k), what weight gradients sum over.

With several chunks, chunk c holds the tokens [c·T/C, (c+1)·T/C) of every source, and the first two orders exist once a
chunk. Expert order is one, whatever the chunks: that is what keeps weight gradients the same to the bit.

R ranks, E experts, C chunks, T tokens of this rank, K top-k. Indices are int64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moesys.kernels.host_copies import to_device
from moesys.layout import TokenPlan
from moesys.load import IntArray

# Slots with few rows share gathers and activations, up to so many rows: calls cost more than such rows do.
GROUP_ROWS = 2048


@dataclass(frozen=True)
class SlotRows:
    """One slot's rows in the expert buffers: [start, start + padded), the first ``valid`` of them real."""

    slot: int
    start: int
    valid: int
    padded: int


@dataclass(frozen=True)
class ChunkRows:
    """The rows of experts of one chunk. Rows and arrivals are numbered over all chunks.

    rows: the chunk's [first, last).
    slots: the slots with rows.
    gather_P: for each expert row of the chunk the arrival it is a copy of (padding repeats a slot's first row).
    return_M: for each arrival of the chunk its expert row, counted from the chunk's first.
    """

    rows: tuple[int, int]
    slots: tuple[SlotRows, ...]
    gather_P: Tensor
    return_M: Tensor

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    def groups(self) -> Iterator[tuple[Sequence[SlotRows], slice, slice]]:
        """Yields neighbouring slots that share gathers and activations, and the rows that they have together: among
        those of all chunks, and of this one.

        A row's bits do not depend on its group, so groups are free to change with the chunks.
        """
        first, offset = 0, self.rows[0]
        for last, slot in enumerate(self.slots, start=1):
            start, stop = self.slots[first].start, slot.start + slot.padded
            if stop - start >= GROUP_ROWS or last == len(self.slots):
                yield self.slots[first:last], slice(start, stop), slice(start - offset, stop - offset)
                first = last


@dataclass(frozen=True)
class ChunkRoutes(ChunkRows):
    """One chunk, and its way here and back.

    tokens, sent, arrivals: the chunk's [first, last) of this rank's tokens, of its rows in wire order, of its arrivals.
    send_counts_R, arrive_counts_R: rows to and from each rank.
    first_S1: the first row of each slot's and the end of the last's, int32, counted from the chunk's first; of padding
        only where it is none.
    home_TK: for each (token, k) of the chunk its place in the chunk's wire order, where its result comes home.
    combine_M: expert rows in the order in which they go home, those that are collected at gates last.
    """

    tokens: tuple[int, int]
    sent: tuple[int, int]
    arrivals: tuple[int, int]
    send_counts_R: tuple[int, ...]
    arrive_counts_R: tuple[int, ...]
    first_S1: Tensor
    home_TK: Tensor
    combine_M: Tensor


@dataclass(frozen=True)
class Routes:
    """All chunks, and the expert order of each slot over all of them.

    send_token_N, send_row_N: for each row in wire order its token and its index token·K + k.
    by_destination_N, by_source_M: rows in wire order and arrivals, sorted by the rank they go to and come from: what
        one all-to-all over all chunks sends and delivers.
    order: per slot with rows, (slot, expert rows, arrivals) in expert order; empty with one chunk, whose slots list
        their rows in that order, and where no host knows how many rows a slot has.
    order_row_P, order_arrival_P: those of all slots, one behind the other; not filled with one chunk.
    first_S1: where a slot's begin among these, and where the last one's end, int32.
    """

    chunks: tuple[ChunkRoutes, ...]
    send_token_N: Tensor
    send_row_N: Tensor
    by_destination_N: Tensor
    by_source_M: Tensor
    order: tuple[tuple[int, Tensor, Tensor], ...]
    order_row_P: Tensor
    order_arrival_P: Tensor
    first_S1: Tensor
    num_arrivals: int
    num_rows: int


def chunk_bounds(num_tokens: int, num_chunks: int) -> list[int]:
    """Returns the token boundaries of the chunks, C + 1 of them."""
    return [num_tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]


def chunk_counts(expert_TK: Tensor, num_experts: int, num_chunks: int) -> Tensor:
    """Counts the rows of each chunk for each expert, int64 [C, E]."""
    bounds = chunk_bounds(expert_TK.shape[0], num_chunks)
    return torch.stack([torch.bincount(expert_TK[a:b].reshape(-1), minlength=num_experts) for a, b in pairwise(bounds)])


def no_expert(found: str, num_experts: int | None = None, layer: int = -1) -> ValueError:
    """Returns the error of choices that name no expert. ``found``: what is wrong, and on which of several ranks.
    ``num_experts``: the experts of ``layer``; None where they are not known.
    """
    experts = f", and the {num_experts} experts of layer {layer} have ids from 0 to {(num_experts or 0) - 1}"
    known = "" if num_experts is None else experts
    return ValueError(f"{found}{known}; leave tokens that choose no expert out of the call")


def held_experts(experts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the distinct experts, in order, a slot of its own for each: a duplicate has no work of its own, and one
    rank alone has all, as masters lie.
    """
    return tuple(sorted(set(experts)))


def build_routes(
    expert_TK: Tensor,
    tokens_CRE: IntArray,
    plan: TokenPlan,
    rank: int,
    min_rows: int,
    gate_R: IntArray | None = None,
    *,
    collect: bool = False,
) -> Routes:
    """Builds the routes of ``rank``, whose routing is ``expert_TK``, by every rank's ``chunk_counts`` [C, R, E] and the
    plan.

    ``gate_R``: through which rank each source's rows come, -1 where they come at once (``node_routes.gates_of``);
    ``collect``: whether results go back to gates, and not to their sources. ``min_rows``: a slot's rows of a chunk are
    padded to at least so many (``kernels.cpu.row_invariant_gemm``); none stay none.
    """
    num_chunks, num_ranks, num_experts = tokens_CRE.shape
    num_tokens, top_k = expert_TK.shape
    expert_N = expert_TK.reshape(-1).cpu().numpy()
    slot_RE = _slot_table(plan, num_experts)
    source, expert, destination, tokens = plan.entries.T
    entry_CN = _entries_by_chunk(tokens_CRE, source, expert, tokens)

    outgoing = source == rank
    incoming = destination == rank
    wire = np.lexsort((slot_RE[destination[outgoing], expert[outgoing]], destination[outgoing]))
    arriving_source, arriving_slot = source[incoming], slot_RE[rank, expert[incoming]]
    gate = np.full(len(arriving_source), -1) if gate_R is None else gate_R[arriving_source]
    arrival = np.lexsort((arriving_slot, arriving_source, gate))
    by_gate = (gate >= 0) & collect
    going_home = np.lexsort((arriving_slot, arriving_source, np.where(by_gate, gate, arriving_source), by_gate))
    by_slot = np.lexsort((arriving_source, arriving_slot))

    device = expert_TK.device

    def first_rows(lengths: IntArray) -> Tensor:
        return to_device(np.append(0, np.cumsum(lengths)), device, torch.int32)

    bounds = chunk_bounds(num_tokens, num_chunks)
    held = held_experts(plan.layout.experts_of(rank))
    chunks: list[ChunkRoutes] = []
    send_rows: list[IntArray] = []
    destinations: list[IntArray] = []
    sources: list[IntArray] = []
    row_starts: list[IntArray] = []
    arrival_starts: list[IntArray] = []
    num_rows = num_arrivals = 0
    for chunk in range(num_chunks):
        first, last = bounds[chunk], bounds[chunk + 1]
        sorted_rows = np.argsort(expert_N[first * top_k : last * top_k], kind="stable") + first * top_k
        sent = entry_CN[chunk, outgoing]
        send_row = sorted_rows[ranges(exclusive(sent)[wire], sent[wire])]
        home = np.empty(len(send_row), dtype=np.int64)
        home[send_row - first * top_k] = np.arange(len(send_row))

        came = entry_CN[chunk, incoming]
        came_start = np.empty_like(came)
        came_start[arrival] = exclusive(came[arrival])
        valid = np.bincount(arriving_slot, weights=came, minlength=len(held)).astype(np.int64)
        padded = np.where(valid > 0, np.maximum(valid, min_rows), 0)
        slot_start = exclusive(padded)
        # A slot's blocks, one a source, follow one another from the slot's start.
        block_start = np.empty_like(came)
        block_start[by_slot] = exclusive(came[by_slot])
        block_start += (slot_start - exclusive(valid))[arriving_slot]
        real = ranges(came_start[by_slot], came[by_slot])
        place = ranges(block_start[by_slot], came[by_slot])
        gather = np.empty(int(padded.sum()), dtype=np.int64)
        for slot in np.flatnonzero(padded > valid):
            filler = real[exclusive(valid)[slot]]
            gather[slot_start[slot] + valid[slot] : slot_start[slot] + padded[slot]] = filler
        gather[place] = real
        returns = np.empty(len(real), dtype=np.int64)
        returns[real] = place

        chunks.append(
            ChunkRoutes(
                tokens=(first, last),
                sent=(first * top_k, last * top_k),
                arrivals=(num_arrivals, num_arrivals + len(real)),
                rows=(num_rows, num_rows + len(gather)),
                send_counts_R=totals(destination[outgoing], sent, num_ranks),
                arrive_counts_R=totals(arriving_source, came, num_ranks),
                slots=tuple(
                    SlotRows(slot, num_rows + int(slot_start[slot]), int(valid[slot]), int(padded[slot]))
                    for slot in np.flatnonzero(valid).tolist()
                ),
                first_S1=first_rows(padded),
                gather_P=to_device(gather + num_arrivals, device),
                return_M=to_device(returns, device),
                home_TK=to_device(home.reshape(last - first, top_k), device),
                combine_M=to_device(returns[ranges(came_start[going_home], came[going_home])], device),
            )
        )
        send_rows.append(send_row)
        destinations.append(np.repeat(destination[outgoing][wire], sent[wire]))
        sources.append(np.repeat(arriving_source[arrival], came[arrival]))
        row_starts.append(block_start + num_rows)
        arrival_starts.append(came_start + num_arrivals)
        num_rows += len(gather)
        num_arrivals += len(real)

    came_CN = entry_CN[:, incoming]
    order: tuple[tuple[int, Tensor, Tensor], ...] = ()
    order_row_P = order_arrival_P = torch.empty(0, dtype=torch.int64, device=device)
    if num_chunks > 1:
        slots, rows, arrivals = _expert_order(
            arriving_slot, by_slot, came_CN, np.array(row_starts), np.array(arrival_starts)
        )
        order_row_P, order_arrival_P = to_device(rows, device), to_device(arrivals, device)
        lengths = [length for _, length in slots]
        by_slots = zip(slots, order_row_P.split(lengths), order_arrival_P.split(lengths), strict=True)
        order = tuple((slot, rows, arrivals) for (slot, _), rows, arrivals in by_slots)
    send_row_N = np.concatenate(send_rows)
    return Routes(
        chunks=tuple(chunks),
        send_token_N=to_device(send_row_N // top_k, device),
        send_row_N=to_device(send_row_N, device),
        by_destination_N=to_device(np.argsort(np.concatenate(destinations), kind="stable"), device),
        by_source_M=to_device(np.argsort(np.concatenate(sources), kind="stable"), device),
        order=order,
        order_row_P=order_row_P,
        order_arrival_P=order_arrival_P,
        first_S1=first_rows(np.bincount(arriving_slot, weights=came_CN.sum(axis=0), minlength=len(held))),
        num_arrivals=num_arrivals,
        num_rows=num_rows,
    )


def rows_by_chunk(tokens_CRE: IntArray, plan: TokenPlan) -> IntArray:
    """Counts the rows of each chunk from each rank to each, int64 [C, R, R], by every rank's ``chunk_counts``."""
    source, expert, destination, tokens = plan.entries.T
    entry_CN = _entries_by_chunk(tokens_CRE, source, expert, tokens)
    num_chunks, num_ranks, _ = tokens_CRE.shape
    rows_CRR = np.zeros((num_chunks, num_ranks, num_ranks), dtype=np.int64)
    for rows_RR, entry_N in zip(rows_CRR, entry_CN, strict=True):
        np.add.at(rows_RR, (source, destination), entry_N)
    return rows_CRR


def _slot_table(plan: TokenPlan, num_experts: int) -> IntArray:
    """Slot index of each expert on each rank that holds it, [R, E], -1 elsewhere."""
    slot_RE = np.full((plan.layout.num_ranks, num_experts), -1, dtype=np.int64)
    for rank in range(plan.layout.num_ranks):
        held = list(held_experts(plan.layout.experts_of(rank)))
        slot_RE[rank, held] = np.arange(len(held))
    return slot_RE


def _entries_by_chunk(tokens_CRE: IntArray, source: IntArray, expert: IntArray, tokens: IntArray) -> IntArray:
    """Tokens of each plan entry in each chunk, [C, N].

    A source's rows for an expert form one line in (token, k) order. Chunks cut it by token, the plan cuts it by
    destination; an entry's share of a chunk is where the two intervals meet.
    """
    start_of_group = np.r_[True, (np.diff(source) != 0) | (np.diff(expert) != 0)] if len(source) else np.empty(0, bool)
    before = exclusive(tokens)
    start = before - before[np.flatnonzero(start_of_group)][np.cumsum(start_of_group) - 1]
    chunk_stop = np.cumsum(tokens_CRE[:, source, expert], axis=0)
    chunk_start = chunk_stop - tokens_CRE[:, source, expert]
    return np.maximum(0, np.minimum(start + tokens, chunk_stop) - np.maximum(start, chunk_start))


def _expert_order(
    slot_N: IntArray, by_slot: IntArray, came_CN: IntArray, row_CN: IntArray, arrival_CN: IntArray
) -> tuple[list[tuple[int, int]], IntArray, IntArray]:
    """The slots with rows, with how many; expert rows and arrivals by (slot, source, chunk): incoming entries in slot
    order, and the chunks of each in turn.
    """
    rows_S = np.bincount(slot_N, weights=came_CN.sum(axis=0)).astype(np.int64)
    lengths = came_CN[:, by_slot].T.reshape(-1)
    rows, arrivals = (ranges(starts_CN[:, by_slot].T.reshape(-1), lengths) for starts_CN in (row_CN, arrival_CN))
    return [(slot, int(rows_S[slot])) for slot in np.flatnonzero(rows_S).tolist()], rows, arrivals


def exclusive(lengths: IntArray) -> IntArray:
    """Returns where each of so many begins, one after another: [2, 3, 1] gives [0, 2, 5]."""
    return np.cumsum(lengths) - lengths


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Returns the concatenation of range(start, start + length) over all pairs: ([5, 0], [2, 1]) gives [5, 6, 0]."""
    return np.repeat(starts - exclusive(lengths), lengths) + np.arange(lengths.sum())


def totals(rank_N: IntArray, rows_N: IntArray, num_ranks: int) -> tuple[int, ...]:
    """Returns the rows of each rank, [R]: ranks [1, 1] with rows [5, 2] of 3 have (0, 7, 0)."""
    rows_R = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(rows_R, rank_N, rows_N)
    return tuple(rows_R.tolist())
