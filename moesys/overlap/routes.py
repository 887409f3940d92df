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
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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

    @property
    def routes(self) -> Routes:
        """These: hosts know them at once."""
        return self


@dataclass(frozen=True)
class SortedRoutes:
    """The rows of one rank alone, in one chunk, of which each choice t·K + k is an arrival."""

    chunk: ChunkRows
    tokens_E: IntArray
    top_k: int

    @property
    def num_rows(self) -> int:
        return self.chunk.num_rows

    @property
    def chunks(self) -> tuple[ChunkRows, ...]:
        return (self.chunk,)

    @property
    def order(self) -> tuple[()]:
        """Empty, as for routes with one chunk."""
        return ()


class PlannedRoutes(Protocol):
    """Routes that may be on their way to the host."""

    @property
    def routes(self) -> Routes:
        """Waits for the routes and returns them."""


def chunk_bounds(num_tokens: int, num_chunks: int) -> list[int]:
    """Returns the token boundaries of the chunks, C + 1 of them."""
    return [num_tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]


def chunk_counts(expert_TK: Tensor, num_experts: int, num_chunks: int) -> Tensor:
    """Counts the rows of each chunk for each expert, int64 [C, E]."""
    bounds = chunk_bounds(expert_TK.shape[0], num_chunks)
    return torch.stack([torch.bincount(expert_TK[a:b].reshape(-1), minlength=num_experts) for a, b in pairwise(bounds)])


def invalid_id(expert_TK: Tensor, num_experts: int) -> int | None:
    """Returns an id that names no expert; None if there is none."""
    if not expert_TK.numel():
        return None
    least, most = (int(each) for each in expert_TK.aminmax())
    return least if least < 0 else most if most >= num_experts else None


def no_expert(found: str, num_experts: int | None = None, layer: int = -1) -> ValueError:
    """Returns the error of choices that name no expert. ``found``: what is wrong, and on which of several ranks.
    ``num_experts``: the experts of ``layer``; None where they are not known.
    """
    experts = f", and the {num_experts} experts of layer {layer} have ids from 0 to {(num_experts or 0) - 1}"
    known = "" if num_experts is None else experts
    return ValueError(f"{found}{known}; leave tokens that choose no expert out of the call")


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
    num_chunks, num_ranks, _ = tokens_CRE.shape
    top_k, device = expert_TK.shape[1], expert_TK.device
    expert_N = expert_TK.reshape(-1).cpu().numpy()
    entries = _entries_of(plan, rank, gate_R, collect)
    entry_CN = _entries_by_chunk(tokens_CRE, *plan.entries[:, [0, 1, 3]].T)
    num_slots = len(plan.layout.held_by_rank[rank])
    bounds = chunk_bounds(len(expert_TK), num_chunks)
    chunks: list[ChunkRoutes] = []
    send_rows: list[IntArray] = []
    starts: list[tuple[IntArray, IntArray]] = []
    num_rows = num_arrivals = 0
    for chunk, (first, last) in enumerate(pairwise(bounds)):
        sent, came = entry_CN[chunk, entries.outgoing], entry_CN[chunk, entries.incoming]
        sorted_rows = np.argsort(expert_N[first * top_k : last * top_k], kind="stable") + first * top_k
        send_row = sorted_rows[ranges(exclusive(sent)[entries.wire], sent[entries.wire])]
        home = np.empty(len(send_row), dtype=np.int64)
        home[send_row - first * top_k] = np.arange(len(send_row))
        arrived = _arrived(entries, came, num_slots, min_rows)
        chunks.append(
            ChunkRoutes(
                tokens=(first, last),
                sent=(first * top_k, last * top_k),
                arrivals=(num_arrivals, num_arrivals + len(arrived.returns)),
                rows=(num_rows, num_rows + len(arrived.gather)),
                send_counts_R=totals(entries.destination_N, sent, num_ranks),
                arrive_counts_R=totals(entries.source_N, came, num_ranks),
                slots=tuple(
                    SlotRows(slot, num_rows + start, valid, padded)
                    for slot, (start, valid, padded) in enumerate(arrived.slots_S3.tolist())
                    if valid
                ),
                first_S1=_first_rows(arrived.slots_S3[:, 2], device),
                gather_P=_on(arrived.gather + num_arrivals, device),
                return_M=_on(arrived.returns, device),
                home_TK=_on(home.reshape(last - first, top_k), device),
                combine_M=_on(arrived.going_home, device),
            )
        )
        send_rows.append(send_row)
        starts.append((arrived.row_start_N + num_rows, arrived.start_N + num_arrivals))
        num_rows += len(arrived.gather)
        num_arrivals += len(arrived.returns)
    return _joined(entries, chunks, np.concatenate(send_rows), entry_CN, starts, num_slots)


@dataclass(frozen=True)
class _Entries:
    """The entries of a plan that one rank sends, [outgoing], and that it receives, [incoming], in the plan's order.

    wire: outgoing ones in wire order. arrival, going_home, by_slot: incoming ones as they arrive, as they go home, and
    by slot.
    """

    outgoing: NDArray[np.bool_]
    incoming: NDArray[np.bool_]
    destination_N: IntArray
    source_N: IntArray
    slot_N: IntArray
    wire: IntArray
    arrival: IntArray
    going_home: IntArray
    by_slot: IntArray


def _entries_of(plan: TokenPlan, rank: int, gate_R: IntArray | None, collect: bool) -> _Entries:
    source, expert, destination, _ = plan.entries.T
    slot_RE = plan.layout.held_slot_RE
    outgoing, incoming = source == rank, destination == rank
    destination_N, source_N = destination[outgoing], source[incoming]
    slot_N = slot_RE[rank, expert[incoming]]
    gate_N = np.full(len(source_N), -1) if gate_R is None else gate_R[source_N]
    by_gate_N = (gate_N >= 0) & collect
    return _Entries(
        outgoing,
        incoming,
        destination_N,
        source_N,
        slot_N,
        wire=np.lexsort((slot_RE[destination_N, expert[outgoing]], destination_N)),
        arrival=np.lexsort((slot_N, source_N, gate_N)),
        going_home=np.lexsort((slot_N, source_N, np.where(by_gate_N, gate_N, source_N), by_gate_N)),
        by_slot=np.lexsort((source_N, slot_N)),
    )


class _ChunkArrivals(NamedTuple):
    """What arrives of one chunk, rows and arrivals counted from the chunk's first. start_N, row_start_N: the first
    arrival and expert row of each incoming entry. slots_S3: each slot's first row, rows, and rows with padding.
    """

    start_N: IntArray
    row_start_N: IntArray
    slots_S3: IntArray
    gather: IntArray
    returns: IntArray
    going_home: IntArray


def _arrived(entries: _Entries, came: IntArray, num_slots: int, min_rows: int) -> _ChunkArrivals:
    """Returns what arrives of a chunk, of which ``came`` are the rows of each incoming entry."""
    by_slot, arrival, going_home = entries.by_slot, entries.arrival, entries.going_home
    start_N = np.empty_like(came)
    start_N[arrival] = exclusive(came[arrival])
    valid = np.bincount(entries.slot_N, weights=came, minlength=num_slots).astype(np.int64)
    padded = np.where(valid > 0, np.maximum(valid, min_rows), 0)
    slot_start, first_valid = exclusive(padded), exclusive(valid)
    # A slot's blocks, one a source, follow one another from the slot's start.
    row_start_N = np.empty_like(came)
    row_start_N[by_slot] = exclusive(came[by_slot])
    row_start_N += (slot_start - first_valid)[entries.slot_N]
    real, place = ranges(start_N[by_slot], came[by_slot]), ranges(row_start_N[by_slot], came[by_slot])
    gather = np.empty(int(padded.sum()), dtype=np.int64)
    for slot in np.flatnonzero(padded > valid):
        gather[slot_start[slot] + valid[slot] : slot_start[slot] + padded[slot]] = real[first_valid[slot]]
    gather[place] = real
    returns = np.empty(len(real), dtype=np.int64)
    returns[real] = place
    home = returns[ranges(start_N[going_home], came[going_home])]
    return _ChunkArrivals(start_N, row_start_N, np.stack([slot_start, valid, padded], axis=1), gather, returns, home)


def _joined(
    entries: _Entries,
    chunks: Sequence[ChunkRoutes],
    send_row_N: IntArray,
    entry_CN: IntArray,
    starts: Sequence[tuple[IntArray, IntArray]],
    num_slots: int,
) -> Routes:
    """Returns the routes of all chunks. ``starts``: the first rows and arrivals of each chunk's incoming entries."""
    device, top_k = chunks[0].gather_P.device, chunks[0].home_TK.shape[1]
    sent_CN, came_CN = entry_CN[:, entries.outgoing], entry_CN[:, entries.incoming]
    destinations = [np.repeat(entries.destination_N[entries.wire], sent[entries.wire]) for sent in sent_CN]
    sources = [np.repeat(entries.source_N[entries.arrival], came[entries.arrival]) for came in came_CN]
    order: tuple[tuple[int, Tensor, Tensor], ...] = ()
    order_row_P = order_arrival_P = torch.empty(0, dtype=torch.int64, device=device)
    if len(chunks) > 1:
        row_CN, arrival_CN = map(np.array, zip(*starts, strict=True))
        slots, rows, arrivals = _expert_order(entries.slot_N, entries.by_slot, came_CN, row_CN, arrival_CN)
        order_row_P, order_arrival_P = _on(rows, device), _on(arrivals, device)
        lengths = [length for _, length in slots]
        by_slots = zip(slots, order_row_P.split(lengths), order_arrival_P.split(lengths), strict=True)
        order = tuple((slot, rows, arrivals) for (slot, _), rows, arrivals in by_slots)
    rows_S = np.bincount(entries.slot_N, weights=came_CN.sum(axis=0), minlength=num_slots)
    return Routes(
        chunks=tuple(chunks),
        send_token_N=_on(send_row_N // top_k, device),
        send_row_N=_on(send_row_N, device),
        by_destination_N=_on(np.argsort(np.concatenate(destinations), kind="stable"), device),
        by_source_M=_on(np.argsort(np.concatenate(sources), kind="stable"), device),
        order=order,
        order_row_P=order_row_P,
        order_arrival_P=order_arrival_P,
        first_S1=_first_rows(rows_S, device),
        num_arrivals=chunks[-1].arrivals[1],
        num_rows=chunks[-1].rows[1],
    )


def _first_rows(lengths: IntArray, device: torch.device) -> Tensor:
    return _on(np.append(0, np.cumsum(lengths)), device, torch.int32)


def sort_rows(expert_TK: Tensor, num_experts: int, min_rows: int) -> SortedRoutes:
    """Returns the rows of one rank alone, whose choices are ``expert_TK``: what ``build_routes`` gives one rank, but
    that an arrival is a choice. ``min_rows``: as in ``build_routes``.
    """
    expert_N = expert_TK.reshape(-1).cpu().numpy()
    # Small integers are sorted by their digits.
    small_N = expert_N.astype(np.uint16) if num_experts <= 1 << 16 else expert_N
    sorted_N, valid_E = np.argsort(small_N, kind="stable"), np.bincount(expert_N, minlength=num_experts)
    padded_E = np.where(valid_E > 0, np.maximum(valid_E, min_rows), 0)
    start_E, first_E = exclusive(padded_E), exclusive(valid_E)
    gather, place = sorted_N, np.arange(len(sorted_N))
    if len(padding := np.flatnonzero(padded_E > valid_E)):
        place = ranges(start_E, valid_E)
        gather = np.empty(int(padded_E.sum()), dtype=np.int64)
        for expert in padding:
            end = start_E[expert] + padded_E[expert]
            gather[start_E[expert] + valid_E[expert] : end] = sorted_N[first_E[expert]]
        gather[place] = sorted_N
    returns = np.empty_like(sorted_N)
    returns[sorted_N] = place
    starts, valids, paddeds = start_E.tolist(), valid_E.tolist(), padded_E.tolist()
    chunk = ChunkRows(
        rows=(0, len(gather)),
        slots=tuple(SlotRows(e, starts[e], valids[e], paddeds[e]) for e in range(num_experts) if valids[e]),
        gather_P=torch.from_numpy(gather).to(expert_TK.device),
        return_M=torch.from_numpy(returns).to(expert_TK.device),
    )
    return SortedRoutes(chunk, valid_E, expert_TK.shape[1])


def rows_by_chunk(tokens_CRE: IntArray, plan: TokenPlan) -> IntArray:
    """Counts the rows of each chunk from each rank to each, int64 [C, R, R], by every rank's ``chunk_counts``."""
    source, expert, destination, tokens = plan.entries.T
    entry_CN = _entries_by_chunk(tokens_CRE, source, expert, tokens)
    num_chunks, num_ranks, _ = tokens_CRE.shape
    rows_CRR = np.zeros((num_chunks, num_ranks, num_ranks), dtype=np.int64)
    for rows_RR, entry_N in zip(rows_CRR, entry_CN, strict=True):
        np.add.at(rows_RR, (source, destination), entry_N)
    return rows_CRR


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


def _on(values: IntArray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns ``values`` on ``device``: on the CPU their own memory."""
    if device.type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(dtype)
    return to_device(values, device, dtype)
