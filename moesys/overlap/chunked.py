"""Dispatch, experts and combine, chunk by chunk; sequential is one chunk.

While chunk i is computed, chunk i+1 is on its way to the experts and chunk i-1 on its way home. Chunks change when
things happen and never what is computed: rows are multiplied by kernels that treat a row the same in any company
(``kernels.rows``), and weight gradients sum over all rows at once in expert order (``routes``). Backward runs the same
schedule on the output's gradient, and computes weight gradients while the last chunk travels home.

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, P expert rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesys.kernels.memory import Memory, Scratch
from moesys.kernels.rows import RowRule, matmul_rows
from moesys.kernels.swiglu import swiglu, swiglu_backward
from moesys.overlap.channel import Channel, Transfer
from moesys.overlap.routes import ChunkRoutes, Routes, SlotRows

# Slots with few rows share gathers and activations, up to so many rows: calls cost more than such rows do.
GROUP_ROWS = 2048
ALIGNMENT_BYTES = 64
# Combine works on blocks of so many elements, which stay in a core's cache.
COMBINE_ELEMENTS = 1 << 18


class ExpertWeights(NamedTuple):
    """One expert: ``gate_up`` [2I, H], ``down`` [H, I]; float32 masters are cast just before each use."""

    gate_up: Tensor
    down: Tensor


class ExpertGradients(NamedTuple):
    """Where one expert's weight gradients are written, float32, in the shapes of the weights."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Saved:
    """What backward needs: arrived rows of x [M, H] (x itself on one rank) and pre-activations h [P, 2I]."""

    arrivals_MH: Tensor
    h_P2I: Tensor


WaitForExperts = Callable[[], Sequence[ExpertWeights]]


@dataclass(frozen=True)
class ChunkedExecutor:
    """Runs one micro-batch of one layer on one rank.

    ``rule``: how GEMMs are called so that chunks change no bit; ``routes`` are padded by it. ``memory``: where large
    tensors lie.
    """

    routes: Routes
    channel: Channel
    rule: RowRule
    memory: Memory

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Output [T, H] in x's dtype. ``wait_for_experts`` is called once, when the first chunk has arrived."""
        routes, dtype, H = self.routes, x_TH.dtype, x_TH.shape[1]
        arrivals = self._arrivals(x_TH, routes.send_token_N)
        memory, scratch = self.memory, Scratch(self.memory, x_TH.device)
        weights: Sequence[ExpertWeights] = ()
        h_P2I: Tensor | None = None
        y_TH = memory.empty_like(x_TH)

        def ready() -> None:
            nonlocal h_P2I, weights
            weights = wait_for_experts()
            width = weights[0].gate_up.shape[0] if weights else 0
            h_P2I = memory.empty((routes.num_rows, width), dtype, x_TH.device)

        def experts(chunk: ChunkRoutes) -> Tensor:
            assert h_P2I is not None
            y_PH = memory.empty((chunk.num_rows, H), dtype, x_TH.device)
            for slots, rows, here in _groups(chunk):
                sizes = [slot.padded for slot in slots]
                x_NH = arrivals.take(chunk.gather_P[here], scratch, "x")
                h_N2I = h_P2I[rows]
                a_NI = scratch("a", (len(h_N2I), h_N2I.shape[1] // 2), dtype)
                for slot, x, h in zip(slots, x_NH.split(sizes), h_N2I.split(sizes), strict=True):
                    matmul_rows(x, _cast(weights[slot.slot].gate_up, dtype, scratch), h, self.rule)
                swiglu(h_N2I, a_NI)
                for slot, a, y in zip(slots, a_NI.split(sizes), y_PH[here].split(sizes), strict=True):
                    matmul_rows(a, _cast(weights[slot.slot].down, dtype, scratch), y, self.rule)
            return y_PH

        def combine(chunk: ChunkRoutes, home_NH: Tensor, home_TK: Tensor) -> None:
            tokens = slice(*chunk.tokens)
            _weighted_sum(home_NH, home_TK.view_as(weight_TK[tokens]), weight_TK[tokens], y_TH[tokens], scratch)

        self._run(arrivals, ready, experts, combine, "forward")
        assert h_P2I is not None
        return y_TH, Saved(arrivals.rows, h_P2I)

    def backward(
        self,
        dy_TH: Tensor,
        weight_TK: Tensor,
        saved: Saved,
        wait_for_experts: WaitForExperts,
        gradients: Sequence[ExpertGradients] | None,
    ) -> tuple[Tensor, Tensor]:
        """(dx [T, H], dweight float32 [T, K]); each held expert's weight gradients are written into ``gradients``,
        or not computed where that is None.
        """
        routes, dtype, device = self.routes, dy_TH.dtype, dy_TH.device
        arrivals = self._arrivals(dy_TH, routes.send_token_N)
        saved_arrivals = _Arrivals(saved.arrivals_MH, arrivals.index)
        memory, scratch = self.memory, Scratch(self.memory, device)
        I = saved.h_P2I.shape[1] // 2
        # With one chunk an expert's rows are all there at once, and nothing is kept for later.
        one_chunk = len(routes.chunks) == 1
        kept_rows = 0 if one_chunk else routes.num_rows
        dh_P2I = memory.empty((kept_rows, 2 * I), dtype, device)
        wa_PI = memory.empty((kept_rows, I), dtype, device)
        weights: Sequence[ExpertWeights] = ()
        dx_TH = memory.empty_like(dy_TH)
        # Routing weights and their gradients travel in one message each: chunks of them would be all latency.
        weight_M, weights_here = self._weights_to_experts(weight_TK.reshape(-1)[routes.send_row_N])
        dweight_M = torch.empty_like(weight_M)

        def ready() -> None:
            nonlocal weights
            weights_here()
            weights = wait_for_experts()

        def experts(chunk: ChunkRoutes) -> Tensor:
            dx_PH = memory.empty((chunk.num_rows, dy_TH.shape[1]), dtype, device)
            dweight_P = weight_TK.new_empty(chunk.num_rows)
            for slots, rows, here in _groups(chunk):
                sizes = [slot.padded for slot in slots]
                gather_N = chunk.gather_P[here]
                dy_NH = arrivals.take(gather_N, scratch, "dy")
                h_N2I = saved.h_P2I[rows]
                da_NI = scratch("a", (len(h_N2I), I), dtype)
                dh_N2I = scratch("dh", h_N2I.shape, dtype) if one_chunk else dh_P2I[rows]
                wa_NI = scratch("wa", da_NI.shape, dtype) if one_chunk else wa_PI[rows]
                for slot, dy, da in zip(slots, dy_NH.split(sizes), da_NI.split(sizes), strict=True):
                    matmul_rows(dy, _cast(weights[slot.slot].down, dtype, scratch).t(), da, self.rule)
                weight_N = weight_M[gather_N]
                dweight_P[here] = swiglu_backward(h_N2I, da_NI, weight_N, dh_N2I, wa_NI)
                for slot, dh, dx in zip(slots, dh_N2I.split(sizes), dx_PH[here].split(sizes), strict=True):
                    matmul_rows(dh, _cast(weights[slot.slot].gate_up, dtype, scratch).t(), dx, self.rule)
                if one_chunk and gradients is not None:
                    x_NH = saved_arrivals.take(gather_N, scratch, "x")
                    operands = (tensor.split(sizes) for tensor in (dh_N2I, x_NH, dy_NH, wa_NI))
                    for slot, *rows_of_slot in zip(slots, *operands, strict=True):
                        weight_gradient(slot.slot, *(tensor[: slot.valid] for tensor in rows_of_slot))
            dweight_M[slice(*chunk.arrivals)] = dweight_P[chunk.return_M]
            return dx_PH

        def combine(chunk: ChunkRoutes, home_NH: Tensor, home_TK: Tensor) -> None:
            tokens = slice(*chunk.tokens)
            _weighted_sum(home_NH, home_TK.view_as(weight_TK[tokens]), None, dx_TH[tokens], scratch)

        def weight_gradient(slot: int, dh_N2I: Tensor, x_NH: Tensor, dy_NH: Tensor, wa_NI: Tensor) -> None:
            assert gradients is not None
            _gradient_mm(_aligned(dh_N2I), _aligned(x_NH), gradients[slot].gate_up, scratch)
            _gradient_mm(_aligned(dy_NH), _aligned(wa_NI), gradients[slot].down, scratch)

        dweights_home: Callable[[], Tensor] | None = None

        def after_experts() -> None:
            nonlocal dweights_home
            dweights_home = self._dweights_home(dweight_M)
            if gradients is None:
                return
            for slot, rows, places in routes.order:
                x_NH = saved_arrivals.take(places, scratch, "x")
                dy_NH = arrivals.take(places, scratch, "dy")
                weight_gradient(slot, dh_P2I.index_select(0, rows), x_NH, dy_NH, wa_PI.index_select(0, rows))
            used = {slot.slot for chunk in routes.chunks for slot in chunk.slots}
            for slot in set(range(len(gradients))) - used:
                gradients[slot].gate_up.zero_()
                gradients[slot].down.zero_()

        self._run(arrivals, ready, experts, combine, "backward", after_experts)
        assert dweights_home is not None
        dweight_TK = torch.empty_like(weight_TK)
        dweight_TK.view(-1)[routes.send_row_N] = dweights_home()
        return dx_TH, dweight_TK

    def _run(
        self,
        arrivals: _Arrivals,
        ready: Callable[[], None],
        experts: Callable[[ChunkRoutes], Tensor],
        combine: Callable[[ChunkRoutes, Tensor, Tensor], None],
        direction: str,
        after_experts: Callable[[], None] | None = None,
    ) -> None:
        """The schedule: experts of a chunk run while the next chunk arrives and the last one goes home."""
        chunks, recorder = self.routes.chunks, self.channel.recorder
        dispatched = [self._dispatch(0, arrivals, direction)]
        going_home: list[tuple[int, Tensor, Transfer | None]] = []

        def finish() -> None:
            index, home, transfer = going_home.pop(0)
            chunk = chunks[index]
            if transfer is None:
                # On one rank nothing has put the rows in wire order.
                home_TK = chunk.return_M[chunk.home_TK]
            else:
                transfer.wait()
                home_TK = chunk.home_TK
            with recorder.span("compute", "combine", f"{direction} {index}"):
                combine(chunk, home, home_TK)

        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                dispatched.append(self._dispatch(index + 1, arrivals, direction))
            if (arriving := dispatched.pop(0)) is not None:
                arriving.wait()
            if index == 0:
                ready()
            with recorder.span("compute", "experts", f"{direction} {index}"):
                rows = experts(chunk)
            going_home.append((index, *self._send_home(chunk, rows, f"{direction} {index}")))
            if index:
                finish()
        if len(chunks) == 1:
            finish()
        if after_experts is not None:
            with recorder.span("compute", "weight_gradients", direction):
                after_experts()
        if len(chunks) > 1:
            finish()

    def _arrivals(self, source: Tensor, send_index: Tensor) -> _Arrivals:
        if self.channel.num_ranks == 1:
            return _Arrivals(source, send_index)
        received = self.memory.empty((self.routes.num_arrivals, *source.shape[1:]), source.dtype, source.device)
        return _Arrivals(received, None, source, send_index)

    def _dispatch(self, index: int, arrivals: _Arrivals, direction: str) -> Transfer | None:
        if arrivals.source is None or arrivals.send_index is None:
            return None
        chunk = self.routes.chunks[index]
        return self.channel.all_to_all(
            arrivals.rows[slice(*chunk.arrivals)],
            arrivals.source.index_select(0, arrivals.send_index[slice(*chunk.sent)]),
            chunk.arrive_counts_R,
            chunk.send_counts_R,
            lane="dispatch",
            detail=f"{direction} {index}",
        )

    def _send_home(self, chunk: ChunkRoutes, rows: Tensor, detail: str) -> tuple[Tensor, Transfer | None]:
        """Rows in wire order at their source and the transfer to wait for; on one rank the rows themselves."""
        if self.channel.num_ranks == 1:
            return rows, None
        home = self.memory.empty((chunk.sent[1] - chunk.sent[0], *rows.shape[1:]), rows.dtype, rows.device)
        transfer = self.channel.all_to_all(
            home,
            rows.index_select(0, chunk.return_M),
            chunk.send_counts_R,
            chunk.arrive_counts_R,
            lane="combine",
            detail=detail,
        )
        return home, transfer

    def _weights_to_experts(self, weight_N: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Routing weights in wire order go to their experts: a buffer by arrival, and what fills it when called."""
        if self.channel.num_ranks == 1:
            return weight_N, lambda: None
        received, transfer = self._exchange_all(weight_N[self.routes.by_destination_N], "dispatch", home=False)
        weight_M = torch.empty_like(received)

        def finish() -> None:
            transfer.wait()
            weight_M[self.routes.by_source_M] = received

        return weight_M, finish

    def _dweights_home(self, dweight_M: Tensor) -> Callable[[], Tensor]:
        """Gradients of routing weights by arrival go home: when called, they are there in wire order."""
        if self.channel.num_ranks == 1:
            return lambda: dweight_M
        received, transfer = self._exchange_all(dweight_M[self.routes.by_source_M], "combine", home=True)

        def finish() -> Tensor:
            transfer.wait()
            dweight_N = torch.empty_like(received)
            dweight_N[self.routes.by_destination_N] = received
            return dweight_N

        return finish

    def _exchange_all(self, values: Tensor, lane: str, *, home: bool) -> tuple[Tensor, Transfer]:
        """One number a row, of all chunks at once, to the experts or home."""
        sent_R = [sum(counts) for counts in zip(*(c.send_counts_R for c in self.routes.chunks), strict=True)]
        arrived_R = [sum(counts) for counts in zip(*(c.arrive_counts_R for c in self.routes.chunks), strict=True)]
        out_R, in_R = (sent_R, arrived_R) if home else (arrived_R, sent_R)
        received = values.new_empty(sum(out_R))
        return received, self.channel.all_to_all(received, values, out_R, in_R, lane=lane, detail="weights")


@dataclass(frozen=True)
class _Arrivals:
    """Rows by arrival. On one rank nothing travels: arrivals are the source's rows themselves, through ``index``."""

    rows: Tensor
    index: Tensor | None
    source: Tensor | None = None
    send_index: Tensor | None = None

    def take(self, arrival_N: Tensor, scratch: Scratch, name: str) -> Tensor:
        """Copies of these arrivals in ``scratch``, where they last until the next ones of that name."""
        index = arrival_N if self.index is None else self.index[arrival_N]
        taken = scratch(name, (len(index), *self.rows.shape[1:]), self.rows.dtype)
        return torch.index_select(self.rows, 0, index, out=taken)


def _groups(chunk: ChunkRoutes) -> Iterator[tuple[tuple[SlotRows, ...], slice, slice]]:
    """Neighbouring slots that share gathers and activations, with their rows counted over all chunks and in this one.

    A row's bits do not depend on its group, so groups are free to change with the chunks.
    """
    first = 0
    for last, slot in enumerate(chunk.slots, start=1):
        start, stop = chunk.slots[first].start, slot.start + slot.padded
        if stop - start >= GROUP_ROWS or last == len(chunk.slots):
            yield chunk.slots[first:last], slice(start, stop), slice(start - chunk.rows[0], stop - chunk.rows[0])
            first = last


def _cast(weight: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """``weight`` in ``dtype``; a cast one lasts until the next is cast, so that it is still in cache for its GEMM."""
    if weight.dtype == dtype:
        return weight
    return scratch("weight", tuple(weight.shape), dtype).copy_(weight)


def _weighted_sum(
    rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, out_TH: Tensor, scratch: Scratch
) -> None:
    """``out`` = the sum over k = 0..K-1, in that order, of each token's rows times its weights, in float32."""
    top_k, H = place_TK.shape[1], rows_NH.shape[1]
    block = max(1, COMBINE_ELEMENTS // (top_k * H))
    for first in range(0, len(place_TK), block):
        tokens = slice(first, first + block)
        place_N = place_TK[tokens].reshape(-1)
        taken = scratch("rows", (len(place_N), H), rows_NH.dtype)
        torch.index_select(rows_NH, 0, place_N, out=taken)
        if taken.dtype != torch.float32:
            taken = scratch("float rows", (len(place_N), H), torch.float32).copy_(taken)
        row_TKH = taken.view(-1, top_k, H)
        if weight_TK is not None:
            row_TKH.mul_(weight_TK[tokens, :, None])
        total_TH = row_TKH[:, 0]
        for k in range(1, top_k):
            total_TH += row_TKH[:, k]
        out_TH[tokens] = total_TH


def _aligned(rows: Tensor) -> Tensor:
    """The rows, at an address as allocations have it: BLAS sums narrow matrices in an order that depends on that."""
    return rows if rows.data_ptr() % ALIGNMENT_BYTES == 0 else rows.clone()


def _gradient_mm(left_NA: Tensor, right_NB: Tensor, out_AB: Tensor, scratch: Scratch) -> None:
    """``out = leftᵀ @ right`` summed over rows in order; ``out`` is float32."""
    if left_NA.dtype == torch.float32:
        torch.mm(left_NA.t(), right_NB, out=out_AB)
    elif left_NA.is_cuda:
        out_AB.copy_(torch.mm(left_NA.t(), right_NB, out_dtype=torch.float32))
    else:
        # torch's CPU GEMM accumulates in float32 but has no float32 output for 16-bit operands: one rounding more.
        rounded = scratch("gradient", tuple(out_AB.shape), left_NA.dtype)
        out_AB.copy_(torch.mm(left_NA.t(), right_NB, out=rounded))
