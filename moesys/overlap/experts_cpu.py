"""Experts on the CPU: a GEMM a slot, called so that a row's bits do not depend on how many rows share the call.

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, P expert rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import Scratch
from moesys.kernels.cpu.row_invariant_gemm import RowRule, aligned, matmul_rows
from moesys.kernels.experts.swiglu import swiglu, swiglu_backward
from moesys.overlap.expert_compute import Arrivals, SavedRows, Workplace
from moesys.overlap.held_experts import ExpertGradients, HeldExperts
from moesys.overlap.routes import ChunkRoutes, Routes, groups_of

# Combine works on blocks of so many elements, which stay in a core's cache.
COMBINE_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class CpuExperts:
    """``ExpertCompute`` by torch's GEMMs. ``rule``: how they are called so that chunks change no bit."""

    rule: RowRule

    @property
    def min_rows(self) -> int:
        return self.rule.min_rows

    def alone(self, expert_TK: Tensor, num_experts: int) -> None:
        """A GEMM a slot is called with the counts that routes have."""

    def forward(self, routes: Routes, x: Arrivals, weights: HeldExperts, at: Workplace) -> CpuForward:
        return CpuForward(self.rule, routes, x, weights, at)

    def backward(
        self,
        routes: Routes,
        dy: Arrivals,
        saved: SavedRows,
        weight_M: Tensor,
        weights: HeldExperts,
        gradients: ExpertGradients | None,
        at: Workplace,
    ) -> CpuBackward:
        return CpuBackward(self.rule, routes, dy, saved, weight_M, weights, gradients, at)

    def combine(
        self, rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, out_TH: Tensor, scratch: Scratch
    ) -> None:
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


class CpuForward:
    """``ForwardPass``, slot by slot."""

    def __init__(self, rule: RowRule, routes: Routes, x: Arrivals, weights: HeldExperts, at: Workplace) -> None:
        self.rule, self.x, self.weights, self.at = rule, x, weights, at
        width = weights[0].gate_up.shape[0] if len(weights) else 0
        self.h_P2I = at.memory.empty((routes.num_rows, width), x.rows.dtype, x.rows.device)

    def experts(self, chunk: ChunkRoutes) -> Tensor:
        rows_MH, scratch = self.x.rows, self.at.scratch
        dtype = rows_MH.dtype
        y_PH = self.at.memory.empty((chunk.num_rows, rows_MH.shape[1]), dtype, rows_MH.device)
        for slots, rows in groups_of(chunk.slots):
            here = slice(rows.start - chunk.rows[0], rows.stop - chunk.rows[0])
            sizes = [slot.padded for slot in slots]
            x_NH = self.x.take(chunk.gather_P[here], scratch, "x")
            h_N2I = self.h_P2I[rows]
            a_NI = scratch("a", (len(h_N2I), h_N2I.shape[1] // 2), dtype)
            for slot, x, h in zip(slots, x_NH.split(sizes), h_N2I.split(sizes), strict=True):
                matmul_rows(x, scratch.cast("weight", self.weights[slot.slot].gate_up, dtype), h, self.rule)
            swiglu(h_N2I, a_NI)
            for slot, a, y in zip(slots, a_NI.split(sizes), y_PH[here].split(sizes), strict=True):
                matmul_rows(a, scratch.cast("weight", self.weights[slot.slot].down, dtype), y, self.rule)
        return y_PH

    def pre_activations(self) -> Tensor:
        return self.h_P2I


class CpuBackward:
    """``BackwardPass``, slot by slot."""

    def __init__(
        self,
        rule: RowRule,
        routes: Routes,
        dy: Arrivals,
        saved: SavedRows,
        weight_M: Tensor,
        weights: HeldExperts,
        gradients: ExpertGradients | None,
        at: Workplace,
    ) -> None:
        self.rule, self.routes, self.dy, (self.x, self.h_P2I) = rule, routes, dy, saved
        self.weight_M, self.weights, self.gradients, self.at = weight_M, weights, gradients, at
        # With one chunk an expert's rows are all there at once, and nothing is kept for later.
        self.one_chunk = len(routes.chunks) == 1
        kept_rows = 0 if self.one_chunk else routes.num_rows
        width, dtype, device = self.h_P2I.shape[1], dy.rows.dtype, dy.rows.device
        self.dh_P2I = at.memory.empty((kept_rows, width), dtype, device)
        self.wa_PI = at.memory.empty((kept_rows, width // 2), dtype, device)

    def experts(self, chunk: ChunkRoutes) -> tuple[Tensor, Tensor]:
        rows_MH, scratch, one_chunk, weights = self.dy.rows, self.at.scratch, self.one_chunk, self.weights
        dtype, I = rows_MH.dtype, self.h_P2I.shape[1] // 2
        dx_PH = self.at.memory.empty((chunk.num_rows, rows_MH.shape[1]), dtype, rows_MH.device)
        dweight_P = self.weight_M.new_empty(chunk.num_rows)
        for slots, rows in groups_of(chunk.slots):
            here = slice(rows.start - chunk.rows[0], rows.stop - chunk.rows[0])
            sizes = [slot.padded for slot in slots]
            gather_N = chunk.gather_P[here]
            dy_NH = self.dy.take(gather_N, scratch, "dy")
            h_N2I = self.h_P2I[rows]
            da_NI = scratch("a", (len(h_N2I), I), dtype)
            dh_N2I = scratch("dh", h_N2I.shape, dtype) if one_chunk else self.dh_P2I[rows]
            wa_NI = scratch("wa", da_NI.shape, dtype) if one_chunk else self.wa_PI[rows]
            for slot, dy, da in zip(slots, dy_NH.split(sizes), da_NI.split(sizes), strict=True):
                matmul_rows(dy, scratch.cast("weight", weights[slot.slot].down, dtype).t(), da, self.rule)
            dweight_P[here] = swiglu_backward(h_N2I, da_NI, self.weight_M[gather_N], dh_N2I, wa_NI)
            for slot, dh, dx in zip(slots, dh_N2I.split(sizes), dx_PH[here].split(sizes), strict=True):
                matmul_rows(dh, scratch.cast("weight", weights[slot.slot].gate_up, dtype).t(), dx, self.rule)
            if one_chunk and self.gradients is not None:
                x_NH = self.x.take(gather_N, scratch, "x")
                operands = (tensor.split(sizes) for tensor in (dh_N2I, x_NH, dy_NH, wa_NI))
                for slot, *rows_of_slot in zip(slots, *operands, strict=True):
                    self._of_slot(self.gradients.of(slot.slot), *(tensor[: slot.valid] for tensor in rows_of_slot))
        return dx_PH, dweight_P[chunk.return_M]

    def weight_gradients(self, gradients: ExpertGradients) -> None:
        scratch = self.at.scratch
        for slot, rows, places in self.routes.order:
            x_NH = self.x.take(places, scratch, "x")
            dy_NH = self.dy.take(places, scratch, "dy")
            dh_N2I, wa_NI = self.dh_P2I.index_select(0, rows), self.wa_PI.index_select(0, rows)
            self._of_slot(gradients.of(slot), dh_N2I, x_NH, dy_NH, wa_NI)
        used = {slot.slot for chunk in self.routes.chunks for slot in chunk.slots}
        for slot in set(range(len(gradients.gate_up))) - used:
            gradients.gate_up[slot].zero_()
            gradients.down[slot].zero_()

    def _of_slot(self, gradients: ExpertGradients, dh_N2I: Tensor, x_NH: Tensor, dy_NH: Tensor, wa_NI: Tensor) -> None:
        _gradient_mm(aligned(dh_N2I), aligned(x_NH), gradients.gate_up, self.at.scratch)
        _gradient_mm(aligned(dy_NH), aligned(wa_NI), gradients.down, self.at.scratch)


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
