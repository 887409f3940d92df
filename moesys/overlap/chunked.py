"""Dispatch, experts and combine, chunk by chunk; sequential is one chunk.

While chunk i is computed, chunk i+1 is on its way to the experts and chunk i-1 on its way home. Chunks change when
things happen and never what is computed: rows are multiplied by kernels that treat a row the same in any company
(``kernels.rows``), and weight gradients sum over all rows at once in expert order (``routes``). Backward runs the same
schedule on the output's gradient, and computes weight gradients while the last chunk travels home.

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, P expert rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesys.kernels.rows import matmul_rows
from moesys.kernels.swiglu import swiglu, swiglu_backward
from moesys.overlap.channel import Channel, Transfer
from moesys.overlap.routes import ChunkRoutes, Routes


class ExpertWeights(NamedTuple):
    """One expert in the compute dtype: ``gate_up`` [2I, H], ``down`` [H, I]."""

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

    ``tiled``: no safe number of rows was found for this numerics class (``kernels.rows``).
    """

    routes: Routes
    channel: Channel
    tiled: bool = False

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Output [T, H] in x's dtype. ``wait_for_experts`` is called once, when the first chunk has arrived."""
        routes = self.routes
        arrivals = self._arrivals(x_TH, routes.send_token_N)
        h_P2I: Tensor | None = None
        weights: Sequence[ExpertWeights] = ()
        y_TH = torch.empty_like(x_TH)

        def experts(index: int, chunk: ChunkRoutes) -> Tensor:
            nonlocal h_P2I, weights
            if index == 0:
                weights = wait_for_experts()
                width = weights[0].gate_up.shape[0] if weights else 0
                h_P2I = x_TH.new_empty(routes.num_rows, width)
            assert h_P2I is not None
            y_PH = x_TH.new_empty(chunk.rows[1] - chunk.rows[0], x_TH.shape[1])
            for slot in chunk.slots:
                here = slice(slot.start - chunk.rows[0], slot.start - chunk.rows[0] + slot.padded)
                x_NH = arrivals.take(chunk.gather_P[here])
                h_N2I = h_P2I[slot.start : slot.start + slot.padded]
                matmul_rows(x_NH, weights[slot.slot].gate_up.t(), h_N2I, tiled=self.tiled)
                a_NI = h_N2I.new_empty(slot.padded, h_N2I.shape[1] // 2)
                swiglu(h_N2I, a_NI)
                matmul_rows(a_NI, weights[slot.slot].down.t(), y_PH[here], tiled=self.tiled)
            return y_PH

        def combine(index: int, chunk: ChunkRoutes, home_NH: Tensor, home_TK: Tensor) -> None:
            first, last = chunk.tokens
            y_TH[first:last] = _weighted_sum(home_NH, home_TK, weight_TK[first:last])

        self._run([arrivals], experts, combine, "forward")
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
        routes = self.routes
        arrivals = self._arrivals(dy_TH, routes.send_token_N)
        weight_arrivals = self._arrivals(weight_TK.reshape(-1, 1), routes.send_row_N)
        dh_P2I = torch.empty_like(saved.h_P2I)
        wa_PI = dh_P2I.new_empty(routes.num_rows, dh_P2I.shape[1] // 2)
        weights: Sequence[ExpertWeights] = ()
        dx_TH = torch.empty_like(dy_TH)
        dweight_TK = torch.empty_like(weight_TK)
        dweight_home: dict[int, tuple[Tensor, Transfer | None]] = {}

        def experts(index: int, chunk: ChunkRoutes) -> Tensor:
            nonlocal weights
            if index == 0:
                weights = wait_for_experts()
            dx_PH = dy_TH.new_empty(chunk.rows[1] - chunk.rows[0], dy_TH.shape[1])
            dweight_P = weight_TK.new_empty(len(dx_PH), 1)
            for slot in chunk.slots:
                here = slice(slot.start - chunk.rows[0], slot.start - chunk.rows[0] + slot.padded)
                rows = slice(slot.start, slot.start + slot.padded)
                gather = chunk.gather_P[here]
                da_NI = dh_P2I.new_empty(slot.padded, wa_PI.shape[1])
                matmul_rows(arrivals.take(gather), weights[slot.slot].down, da_NI, tiled=self.tiled)
                dweight_P[here, 0] = swiglu_backward(
                    saved.h_P2I[rows], da_NI, weight_arrivals.take(gather)[:, 0], dh_P2I[rows], wa_PI[rows]
                )
                matmul_rows(dh_P2I[rows], weights[slot.slot].gate_up, dx_PH[here], tiled=self.tiled)
            dweight_home[index] = self._send_home(chunk, dweight_P, f"dweight {index}")
            return dx_PH

        def combine(index: int, chunk: ChunkRoutes, home_NH: Tensor, home_TK: Tensor) -> None:
            first, last = chunk.tokens
            dx_TH[first:last] = _weighted_sum(home_NH, home_TK, None, weight_TK.shape[1])
            rows, transfer = dweight_home.pop(index)
            if transfer is not None:
                transfer.wait()
            dweight_TK[first:last] = rows[home_TK, 0].view(-1, weight_TK.shape[1])

        def weight_gradients() -> None:
            if gradients is None:
                return
            saved_arrivals = _Arrivals(saved.arrivals_MH, arrivals.index)
            touched = set()
            for slot, rows, places in routes.order:
                touched.add(slot)
                # Contiguous where one chunk holds all rows; the same numbers in the same order either way.
                one_chunk = len(routes.chunks) == 1
                start = int(rows[0])
                dh_N2I = dh_P2I[start : start + len(rows)] if one_chunk else dh_P2I.index_select(0, rows)
                wa_NI = wa_PI[start : start + len(rows)] if one_chunk else wa_PI.index_select(0, rows)
                _gradient_mm(dh_N2I, saved_arrivals.take(places), gradients[slot].gate_up)
                _gradient_mm(arrivals.take(places), wa_NI, gradients[slot].down)
            for slot, gradient in enumerate(gradients):
                if slot not in touched:
                    gradient.gate_up.zero_()
                    gradient.down.zero_()

        self._run([arrivals, weight_arrivals], experts, combine, "backward", weight_gradients)
        return dx_TH, dweight_TK

    def _run(
        self,
        inputs: Sequence[_Arrivals],
        experts: Callable[[int, ChunkRoutes], Tensor],
        combine: Callable[[int, ChunkRoutes, Tensor, Tensor], None],
        direction: str,
        weight_gradients: Callable[[], None] | None = None,
    ) -> None:
        """The schedule: experts of a chunk run while the next chunk arrives and the last one goes home."""
        chunks, recorder = self.routes.chunks, self.channel.recorder
        dispatched = [self._dispatch(0, inputs)]
        going_home: list[tuple[int, ChunkRoutes, Tensor, Transfer | None]] = []

        def finish() -> None:
            index, chunk, rows, transfer = going_home.pop(0)
            home_TK = chunk.home_TK
            if transfer is None:
                home_TK = chunk.return_M[home_TK]
            else:
                transfer.wait()
            with recorder.span("compute", "combine", direction):
                combine(index, chunk, rows, home_TK)

        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                dispatched.append(self._dispatch(index + 1, inputs))
            for transfer in dispatched.pop(0):
                transfer.wait()
            with recorder.span("compute", "experts", f"{direction} {index}"):
                rows = experts(index, chunk)
            going_home.append((index, chunk, *self._send_home(chunk, rows, f"{direction} {index}")))
            if index:
                finish()
        if len(chunks) == 1:
            finish()
        if weight_gradients is not None:
            with recorder.span("compute", "weight_gradients", direction):
                weight_gradients()
        if len(chunks) > 1:
            finish()

    def _arrivals(self, source: Tensor, send_index: Tensor) -> _Arrivals:
        if self.channel.num_ranks == 1:
            return _Arrivals(source, send_index)
        received = source.new_empty(self.routes.num_arrivals, *source.shape[1:])
        return _Arrivals(received, None, source, send_index)

    def _dispatch(self, index: int, inputs: Sequence[_Arrivals]) -> list[Transfer]:
        chunk = self.routes.chunks[index]
        return [
            self.channel.all_to_all(
                arrivals.rows[slice(*chunk.arrivals)],
                arrivals.source.index_select(0, arrivals.send_index[slice(*chunk.sent)]),
                chunk.arrive_counts_R,
                chunk.send_counts_R,
                lane="dispatch",
                detail=str(index),
            )
            for arrivals in inputs
            if arrivals.source is not None and arrivals.send_index is not None
        ]

    def _send_home(self, chunk: ChunkRoutes, rows: Tensor, detail: str) -> tuple[Tensor, Transfer | None]:
        """Rows in wire order at their source and the transfer to wait for; on one rank the rows themselves."""
        if self.channel.num_ranks == 1:
            return rows, None
        home = rows.new_empty(chunk.sent[1] - chunk.sent[0], *rows.shape[1:])
        transfer = self.channel.all_to_all(
            home,
            rows.index_select(0, chunk.return_M),
            chunk.send_counts_R,
            chunk.arrive_counts_R,
            lane="combine",
            detail=detail,
        )
        return home, transfer


@dataclass(frozen=True)
class _Arrivals:
    """Rows by arrival. On one rank nothing travels: arrivals are the source's rows themselves, through ``index``."""

    rows: Tensor
    index: Tensor | None
    source: Tensor | None = None
    send_index: Tensor | None = None

    def take(self, arrival_N: Tensor) -> Tensor:
        return self.rows.index_select(0, arrival_N if self.index is None else self.index[arrival_N])


def _weighted_sum(rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, top_k: int = 0) -> Tensor:
    """Sum over k = 0..K-1, in that order, of each token's rows times its weights, float32 [T, H]."""
    top_k = weight_TK.shape[1] if weight_TK is not None else top_k
    place_TK = place_TK.view(-1, top_k)
    total_TH = rows_NH.new_zeros(place_TK.shape[0], rows_NH.shape[1], dtype=torch.float32)
    for k in range(top_k):
        row_TH = rows_NH.index_select(0, place_TK[:, k]).float()
        total_TH += row_TH if weight_TK is None else row_TH.mul_(weight_TK[:, k, None])
    return total_TH


def _gradient_mm(left_NA: Tensor, right_NB: Tensor, out_AB: Tensor) -> None:
    """``out = leftᵀ @ right`` summed over rows in order; ``out`` is float32."""
    if left_NA.dtype == torch.float32:
        torch.mm(left_NA.t(), right_NB, out=out_AB)
    elif left_NA.is_cuda:
        out_AB.copy_(torch.mm(left_NA.t(), right_NB, out_dtype=torch.float32))
    else:
        # torch's CPU GEMM accumulates in float32 but has no float32 output for 16-bit operands: one rounding more.
        out_AB.copy_(left_NA.t() @ right_NB)
