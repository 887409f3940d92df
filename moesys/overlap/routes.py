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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesys.kernels.launch import to_device
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
    """The rows of one chunk, as this rank sends and receives them.

    tokens, sent, arrivals: the chunk's [first, last) of this rank's tokens, of its rows in wire order, of its arrivals.
    send_counts_R, arrive_counts_R: rows to and from each rank.
    first_S1: the first row of each slot and the end of the last one, with padding, int32, counted from the chunk's
        first row.
    wire_place_TK: for each (token, k) of the chunk its place in the chunk's wire order, where its result arrives.
    combine_M: expert rows in the order in which they return, those that are collected at gates last.
    """

    tokens: tuple[int, int]
    sent: tuple[int, int]
    arrivals: tuple[int, int]
    send_counts_R: tuple[int, ...]
    arrive_counts_R: tuple[int, ...]
    first_S1: Tensor
    wire_place_TK: Tensor
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
    first_S1: the place among these at which each slot begins, and the end of the last one, int32.
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


def chunk_bounds(num_tokens: int, num_chunks: int) -> list[int]:
    """Returns the token boundaries of the chunks, C + 1 of them."""
    return [num_tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]


def chunk_counts(expert_TK: Tensor, num_experts: int, num_chunks: int) -> Tensor:
    """Returns the number of rows of each chunk for each expert, int64 [C, E]."""
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
    num_chunks, num_ranks, num_experts = tokens_CRE.shape
    (num_tokens, top_k), device = expert_TK.shape, expert_TK.device
    source, expert, destination, tokens = plan.entries.T
    entry_CN, slot_RE = _entries_by_chunk(tokens_CRE, source, expert, tokens), plan.layout.held_slot_RE
    out, here = source == rank, destination == rank
    gate_N = np.full(np.count_nonzero(here), -1) if gate_R is None else gate_R[source[here]]
    sent = _Blocks(entry_CN[:, out], rank=destination[out], slot=slot_RE[destination[out], expert[out]])
    came = _Blocks(entry_CN[:, here], rank=source[here], slot=slot_RE[rank, expert[here]], gate=gate_N)
    num_slots = len(plan.layout.held_by_rank[rank])

    bounds = chunk_bounds(num_tokens, num_chunks)
    send_row_N, wire_place_N, by_destination_N = _sent_rows(expert_TK, num_experts, bounds, sent)
    arrived = _arrived_rows(came, num_slots, min_rows, collect)
    send_CR, arrive_CR = (blocks.totals("rank", num_ranks) for blocks in (sent, came))
    chunks = _chunks(bounds, send_CR, arrive_CR, arrived, _on(wire_place_N, device).view(num_tokens, top_k))
    order_row_P, order_arrival_P = _on(arrived.order_row_P, device), _on(arrived.order_arrival_P, device)
    rows_S = arrived.valid_CS.sum(axis=0)
    order: tuple[tuple[int, Tensor, Tensor], ...] = ()
    if num_chunks > 1:
        slots, lengths = np.flatnonzero(rows_S).tolist(), rows_S[rows_S > 0].tolist()
        order = tuple(zip(slots, order_row_P.split(lengths), order_arrival_P.split(lengths), strict=True))
    return Routes(
        chunks=chunks,
        send_token_N=_on(send_row_N // top_k, device),
        send_row_N=_on(send_row_N, device),
        by_destination_N=_on(by_destination_N, device),
        by_source_M=_on(arrived.by_source_M, device),
        order=order,
        order_row_P=order_row_P,
        order_arrival_P=order_arrival_P,
        first_S1=_on(np.append(0, np.cumsum(rows_S)), device, torch.int32),
        num_arrivals=chunks[-1].arrivals[1],
        num_rows=chunks[-1].rows[1],
    )


def _chunks(
    bounds: Sequence[int], send_CR: IntArray, arrive_CR: IntArray, arrived: _ArrivedRows, wire_place_NK: Tensor
) -> tuple[ChunkRoutes, ...]:
    """Returns the routes of each chunk. ``bounds``: the first token of each, and the end of the last;
    ``wire_place_NK``: the place of each choice in the wire order of its chunk.
    """
    top_k, device = wire_place_NK.shape[1], wire_place_NK.device
    gather_P, return_M, combine_M = (_on(of, device) for of in (arrived.gather_P, arrived.return_M, arrived.combine_M))
    first_CS1 = _on(np.pad(np.cumsum(arrived.padded_CS, axis=1), ((0, 0), (1, 0))), device, torch.int32)
    first_row, first_arrival = ([0, *np.cumsum(of.sum(axis=1)).tolist()] for of in (arrived.padded_CS, arrive_CR))
    slots_CS3 = np.stack([arrived.start_CS, arrived.valid_CS, arrived.padded_CS], axis=2).tolist()
    return tuple(
        ChunkRoutes(
            tokens=tokens_2,
            sent=(tokens_2[0] * top_k, tokens_2[1] * top_k),
            arrivals=arrivals_2,
            rows=rows_2,
            send_counts_R=tuple(send_CR[chunk].tolist()),
            arrive_counts_R=tuple(arrive_CR[chunk].tolist()),
            slots=_slots(slots_CS3[chunk]),
            first_S1=first_CS1[chunk],
            gather_P=gather_P[slice(*rows_2)],
            return_M=return_M[slice(*arrivals_2)],
            wire_place_TK=wire_place_NK[slice(*tokens_2)],
            combine_M=combine_M[slice(*arrivals_2)],
        )
        for chunk, (tokens_2, arrivals_2, rows_2) in enumerate(
            zip(pairwise(bounds), pairwise(first_arrival), pairwise(first_row), strict=True)
        )
    )


class _Blocks:
    """The blocks of rows that one rank sends or receives: one for each chunk and entry of the plan, chunk by chunk.

    ``num_B``: the rows of each. ``keys``: by what blocks are ordered: their chunk, and what the entries are given with.
    """

    def __init__(self, num_CN: IntArray, **keys_N: IntArray) -> None:
        num_chunks, num_entries = num_CN.shape
        self.num_chunks, self.num_B = num_chunks, num_CN.reshape(-1)
        self.keys = {name: np.tile(key_N, num_chunks) for name, key_N in keys_N.items()}
        self.keys["chunk"] = np.repeat(np.arange(num_chunks), num_entries)

    def order(self, *names: str) -> IntArray:
        """Returns the blocks in the order of these keys, the first one first."""
        return np.lexsort([self.keys[name] for name in reversed(names)])

    def starts(self, order: IntArray) -> IntArray:
        """Returns the first row of each block where blocks lie in ``order``."""
        start_B = np.empty_like(self.num_B)
        start_B[order] = exclusive(self.num_B[order])
        return start_B

    def rows(self, start_B: IntArray, order: IntArray) -> IntArray:
        """Returns the rows of all blocks, which begin at ``start_B``, in ``order``."""
        return ranges(start_B[order], self.num_B[order])

    def totals(self, name: str, number: int) -> IntArray:
        """Returns the rows of each chunk for each value of a key, [C, number]."""
        total_CX = np.zeros((self.num_chunks, number), dtype=np.int64)
        np.add.at(total_CX, (self.keys["chunk"], self.keys[name]), self.num_B)
        return total_CX


def _sent_rows(
    expert_TK: Tensor, num_experts: int, bounds: Sequence[int], sent: _Blocks
) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the rows t·K + k in wire order, the place of each row in the wire order of its chunk, and rows in wire
    order sorted by destination.
    """
    first_C, num_C = np.array(bounds[:-1]) * expert_TK.shape[1], np.diff(bounds) * expert_TK.shape[1]
    # A rank's list is in order of (chunk, expert, token, k), as its blocks are.
    chunk_N, expert_N = np.repeat(np.arange(len(num_C)), num_C), expert_TK.reshape(-1).cpu().numpy()
    listed_N = _stable_order(chunk_N * num_experts + expert_N, len(num_C) * num_experts)
    wire = sent.order("chunk", "rank", "slot")
    send_row_N = listed_N[sent.rows(exclusive(sent.num_B), wire)]
    wire_place_N = np.empty_like(send_row_N)
    wire_place_N[send_row_N] = np.arange(len(send_row_N)) - np.repeat(first_C, num_C)
    return send_row_N, wire_place_N, sent.rows(sent.starts(wire), sent.order("rank", "chunk", "slot"))


class _ArrivedRows(NamedTuple):
    """The rows that arrive, as ``ChunkRoutes`` and ``Routes`` have them. start_CS, valid_CS, padded_CS: the first row
    of each slot in each chunk, its rows, and those with padding.
    """

    start_CS: IntArray
    valid_CS: IntArray
    padded_CS: IntArray
    gather_P: IntArray
    return_M: IntArray
    combine_M: IntArray
    by_source_M: IntArray
    order_row_P: IntArray
    order_arrival_P: IntArray


def _arrived_rows(came: _Blocks, num_slots: int, min_rows: int, collect: bool) -> _ArrivedRows:
    """Returns what arrives. ``min_rows``, ``collect``: as in ``build_routes``."""
    valid_CS = came.totals("slot", num_slots)
    arrival_B = came.starts(came.order("chunk", "gate", "rank", "slot"))
    by_slot = came.order("chunk", "slot", "rank")
    rows = _padded(came.rows(arrival_B, by_slot), valid_CS.reshape(-1), min_rows)
    start_CS, padded_CS = (of.reshape(valid_CS.shape) for of in (rows.start, rows.padded))
    # A slot's blocks, one for each source, follow one another from the slot's start.
    shift_CS = start_CS - exclusive(valid_CS.reshape(-1)).reshape(valid_CS.shape)
    row_B = came.starts(by_slot) + shift_CS[came.keys["chunk"], came.keys["slot"]]
    return_M = rows.place - np.repeat(exclusive(padded_CS.sum(axis=1)), valid_CS.sum(axis=1))
    by_gate = (came.keys["gate"] >= 0) & collect
    came.keys["by gate"] = by_gate.astype(np.int64)
    came.keys["toward"] = np.where(by_gate, came.keys["gate"], came.keys["rank"])
    returning = came.order("chunk", "by gate", "toward", "rank", "slot")
    # Expert rows of one chunk are in expert order as they lie.
    expert_order = came.order("slot", "rank", "chunk") if came.num_chunks > 1 else by_slot[:0]
    return _ArrivedRows(
        start_CS,
        valid_CS,
        padded_CS,
        gather_P=rows.gather,
        return_M=return_M,
        combine_M=return_M[came.rows(arrival_B, returning)],
        by_source_M=came.rows(arrival_B, np.lexsort((arrival_B, came.keys["rank"]))),
        order_row_P=came.rows(row_B, expert_order),
        order_arrival_P=came.rows(arrival_B, expert_order),
    )


class _PaddedRows(NamedTuple):
    """Rows of groups that are padded. start, padded: the first row of each group, and how many it has with padding.
    gather: the arrival that each row is a copy of (padding repeats a group's first row); place: the row of each.
    """

    start: IntArray
    padded: IntArray
    gather: IntArray
    place: IntArray


def _padded(arrivals: IntArray, valid: IntArray, min_rows: int) -> _PaddedRows:
    """Pads groups of ``valid`` rows, whose ``arrivals`` lie one behind the other, to ``min_rows``; none stay none."""
    padded = np.where(valid > 0, np.maximum(valid, min_rows), 0)
    start, place = exclusive(padded), np.empty_like(arrivals)
    place[arrivals] = here = ranges(start, valid)
    gather = np.empty(int(padded.sum()), dtype=np.int64)
    gather[here] = arrivals
    short = np.flatnonzero(padded > valid)
    missing = (padded - valid)[short]
    gather[ranges((start + valid)[short], missing)] = np.repeat(arrivals[exclusive(valid)[short]], missing)
    return _PaddedRows(start, padded, gather, place)


def _stable_order(values_N: IntArray, most: int) -> IntArray:
    """Returns the order of values below ``most``, equal ones by their places."""
    # Small integers are sorted by their digits.
    return np.argsort(values_N.astype(np.uint16) if most <= 1 << 16 else values_N, kind="stable")


def sort_rows(expert_TK: Tensor, num_experts: int, min_rows: int) -> SortedRoutes:
    """Returns the rows of one rank alone, whose choices are ``expert_TK``: what ``build_routes`` gives one rank, but
    that an arrival is a choice. ``min_rows``: as in ``build_routes``.
    """
    expert_N = expert_TK.reshape(-1).cpu().numpy()
    valid_E = np.bincount(expert_N, minlength=num_experts)
    rows = _padded(_stable_order(expert_N, num_experts), valid_E, min_rows)
    slots_E3 = np.stack([rows.start, valid_E, rows.padded], axis=1).tolist()
    chunk = ChunkRows(
        rows=(0, len(rows.gather)),
        slots=_slots(slots_E3),
        gather_P=torch.from_numpy(rows.gather).to(expert_TK.device),
        return_M=torch.from_numpy(rows.place).to(expert_TK.device),
    )
    return SortedRoutes(chunk, valid_E, expert_TK.shape[1])


def _slots(rows_S3: Sequence[Sequence[int]]) -> tuple[SlotRows, ...]:
    """Returns the slots with rows: first row, rows, and rows with padding of each."""
    return tuple(SlotRows(slot, *rows_3) for slot, rows_3 in enumerate(rows_S3) if rows_3[1])


def rows_by_chunk(tokens_CRE: IntArray, plan: TokenPlan) -> IntArray:
    """Returns the number of rows of each chunk from each rank to each, int64 [C, R, R], from every rank's
    ``chunk_counts``.
    """
    source, expert, destination, tokens = plan.entries.T
    entry_CN = _entries_by_chunk(tokens_CRE, source, expert, tokens)
    num_chunks, num_ranks, _ = tokens_CRE.shape
    rows_CRR = np.zeros((num_chunks, num_ranks, num_ranks), dtype=np.int64)
    for rows_RR, entry_N in zip(rows_CRR, entry_CN, strict=True):
        np.add.at(rows_RR, (source, destination), entry_N)
    return rows_CRR


def _entries_by_chunk(tokens_CRE: IntArray, source: IntArray, expert: IntArray, tokens: IntArray) -> IntArray:
    """Returns the tokens of each plan entry in each chunk, [C, N].

    A source's rows for an expert form one line in (token, k) order. Chunks cut it by token, the plan cuts it by
    destination; an entry's share of a chunk is where the two intervals meet.
    """
    start_of_group = np.r_[True, (np.diff(source) != 0) | (np.diff(expert) != 0)] if len(source) else np.empty(0, bool)
    before = exclusive(tokens)
    start = before - before[np.flatnonzero(start_of_group)][np.cumsum(start_of_group) - 1]
    chunk_stop = np.cumsum(tokens_CRE[:, source, expert], axis=0)
    chunk_start = chunk_stop - tokens_CRE[:, source, expert]
    return np.maximum(0, np.minimum(start + tokens, chunk_stop) - np.maximum(start, chunk_start))


def exclusive(lengths: IntArray) -> IntArray:
    """Returns the sums of all lengths before each one: [2, 3, 1] gives [0, 2, 5]."""
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
