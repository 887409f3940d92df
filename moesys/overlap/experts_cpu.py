"""Experts on the CPU: a GEMM a slot, called so that a row's bits do not depend on how many rows share the call.

Our own experts are SwiGLU without biases; those of transformers (``hf``) have other activations, biases and norms.

T tokens of this rank, H hidden, I expert width, U rows of the up projection (2I with a gate), K top-k, S slots, M
arrivals, P expert rows, N of neighbouring slots; A and B any widths. *Wide* is the dtype of activations and sums:
float32, or float64 where products are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesys.config import ModelShape
from moesys.kernels.cpu.page_pool import Scratch
from moesys.kernels.cpu.row_invariant_gemm import (
    NARROW,
    RowRule,
    aligned,
    is_aligned,
    matmul_rows,
    projection_rule,
    row_rule,
)
from moesys.kernels.cpu.row_invariant_ops import RowFunction, swiglu, swiglu_backward
from moesys.overlap.exact_sum import BlockSums, add_on_grid, largest_size, row_sizes
from moesys.overlap.executor import (
    Adapters,
    Arrivals,
    BackwardInputs,
    ExpertCompute,
    ExpertGradients,
    ExpertWeights,
    HeldExperts,
    LowRank,
)
from moesys.overlap.routes import ChunkRows, Routes, SlotRows, SortedRoutes

# Combine works on blocks of so many elements, which stay in a core's cache.
COMBINE_ELEMENTS = 1 << 18

# Weight gradients, in the order of ``BlockSums.agree``.
FACTORS = ("up inward", "up outward", "down inward", "down outward")
KINDS = ("up", "down", "up bias", "down bias", *FACTORS)

SWIGLU = RowFunction(swiglu, swiglu_backward, halves=2)


@dataclass(frozen=True)
class Projection:
    """One projection of the held experts, ``x @ weightᵀ + bias``.

    weight: gives a slot's [out, in], or [in, out] where ``transposed``; products cast it to their dtype.
    bias: gives a slot's [out], if there are any.
    gradient, bias_gradient: where the gradients of weight and bias are written, [S, ...]; None if they are not
        computed.
    low_rank: what LoRA adds to each slot's weight, if there is any; low_rank_gradient: where its gradients are
        written, if they are computed.
    """

    weight: Callable[[int], Tensor]
    bias: Callable[[int], Tensor] | None
    transposed: bool
    gradient: Tensor | None
    bias_gradient: Tensor | None
    low_rank: Sequence[LowRank] | None = None
    low_rank_gradient: Sequence[LowRank] | None = None

    @property
    def rank(self) -> int:
        """Returns the rank of LoRA's factors, 0 without LoRA."""
        return self.low_rank[0].inward.shape[0] if self.low_rank else 0


@dataclass(frozen=True)
class CpuExperts:
    """``ExpertCompute`` by torch's GEMMs. ``rule``: how they are called so that chunks change no bit. ``activation``:
    between the projections; ``norm``: of an expert's output, before the routing weight. ``transposed``: as
    ``Projection``'s.
    """

    rule: RowRule
    activation: RowFunction = SWIGLU
    norm: RowFunction | None = None
    transposed: bool = False
    by_tables = False

    @property
    def min_rows(self) -> int:
        return self.rule.min_rows

    def forward(self, routes: Routes | SortedRoutes, x: Arrivals, weights: HeldExperts, scratch: Scratch) -> CpuForward:
        experts = weights.by_slot()
        width = experts[0].gate_up.shape[int(self.transposed)] if len(experts) else 0
        h_P2I = scratch.memory.empty((routes.num_rows, width), x.rows.dtype, x.rows.device)
        return CpuForward(self, *_projections(experts, weights.adapters, None, self.transposed), scratch, x, h_P2I)

    def backward(
        self, routes: Routes | SortedRoutes, inputs: BackwardInputs, weights: HeldExperts, scratch: Scratch
    ) -> CpuBackward:
        projections = _projections(weights.by_slot(), weights.adapters, inputs.gradients, self.transposed)
        order: Sequence[tuple[int, Tensor | slice, Tensor]] = routes.order
        sums = inputs.sums
        later = frozenset(slot for slot, _, _ in order)
        if sums is not None and not order:
            order = _order_of_one(routes.chunks[0])
            later = frozenset(slot for slot, _, _ in order if not sums.is_one_block(slot))
        return CpuBackward(self, *projections, scratch, inputs, order, later, weights.adapters)

    def combine(
        self, rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, out_TH: Tensor, scratch: Scratch
    ) -> None:
        top_k, H = place_TK.shape[1], rows_NH.shape[1]
        block = max(1, COMBINE_ELEMENTS // (top_k * H))
        wide = torch.promote_types(rows_NH.dtype, torch.float32)
        for first in range(0, len(place_TK), block):
            tokens = slice(first, first + block)
            place_N = place_TK[tokens].reshape(-1)
            taken = scratch("rows", (len(place_N), H), rows_NH.dtype)
            torch.index_select(rows_NH, 0, place_N, out=taken)
            row_TKH = scratch.cast("wide rows", taken, wide).view(-1, top_k, H)
            if weight_TK is not None:
                row_TKH.mul_(weight_TK[tokens, :, None])
            total_TH = row_TKH[:, 0]
            for k in range(1, top_k):
                total_TH += row_TKH[:, k]
            out_TH[tokens] = total_TH


class _Pass:
    """The steps of both directions on the rows of neighbouring slots. Products have the dtype of pre-activations, h."""

    def __init__(self, experts: CpuExperts, up: Projection, down: Projection, scratch: Scratch, h_PU: Tensor) -> None:
        self.rule, self.activation, self.norm = experts.rule, experts.activation, experts.norm
        self.up, self.down, self.scratch, self.h_PU = up, down, scratch, h_PU

    def _take(self, arrivals: Arrivals, arrival_N: Tensor, name: str) -> Tensor:
        """Gathers arrivals into scratch memory, where they last until the next ones of that name."""
        index = arrivals.place(arrival_N)
        taken = self.scratch(name, (len(index), *arrivals.rows.shape[1:]), arrivals.rows.dtype)
        return torch.index_select(arrivals.rows, 0, index, out=taken)

    def _new_rows(self, chunk: ChunkRows, arrivals: Arrivals) -> Tensor:
        """Returns [P, H] of a chunk, uninitialised but for rows that no slot has, which are zeros."""
        size = (chunk.num_rows, arrivals.rows.shape[1])
        rows_PH = self.scratch.memory.empty(size, self.h_PU.dtype, self.h_PU.device)
        rows_PH[sum(slot.padded for slot in chunk.slots) :] = 0
        return rows_PH

    def _multiply(self, projection: Projection, slots: Sequence[SlotRows], x_NA: Tensor, out_NB: Tensor) -> None:
        """Writes ``out = x @ weightᵀ + bias``."""
        for slot, x, out in _by_slot(slots, x_NA, out_NB):
            matmul_rows(x, self._weight(projection, slot), out, self.rule)
            if projection.bias is not None:
                out += projection.bias(slot.slot)
            if projection.low_rank is not None:
                inner = self._inner(projection, slot.slot, x)
                self._multiply_thin(inner, projection.low_rank[slot.slot].outward, out, add=True)

    def _inner(self, projection: Projection, slot: int, x_NA: Tensor) -> Tensor:
        """Returns rows [N, r] by the inward factor of a slot, in scratch memory."""
        assert projection.low_rank is not None
        inward = projection.low_rank[slot].inward
        out_NR = self.scratch("inner", (x_NA.shape[0], inward.shape[0]), x_NA.dtype)
        self._multiply_thin(x_NA, inward, out_NR)
        return out_NR

    def _multiply_thin(self, x_NA: Tensor, weight_BA: Tensor, out_NB: Tensor, *, add: bool = False) -> None:
        """Writes or adds ``x @ weightᵀ`` of a factor of LoRA, by rules of its own."""
        weight_BA, (num_rows, A) = weight_BA.to(x_NA.dtype), x_NA.shape
        rule = row_rule(A, weight_BA.shape[0], x_NA.dtype, weight_BA.stride(1) == 1, x_NA.device.type, add)
        if rule.tile_rows is None and num_rows < rule.min_rows:
            rule = RowRule(tile_rows=rule.min_rows)
        matmul_rows(x_NA, weight_BA, out_NB, rule, add=add)

    def _weight(self, projection: Projection, slot: SlotRows) -> Tensor:
        """Returns [out, in]; a cast one lasts until the next is cast."""
        weight = projection.weight(slot.slot)
        if weight.dtype != self.h_PU.dtype:
            weight = self.scratch.cast("weight", weight, self.h_PU.dtype)
        return weight.t() if projection.transposed else weight

    def _activations(self, h_NU: Tensor) -> Tensor:
        """Returns [N, I], uninitialised, in the place of the last ones."""
        return self.scratch("a", (len(h_NU), h_NU.shape[1] // self.activation.halves), h_NU.dtype)

    def _outputs(self, slots: Sequence[SlotRows], h_NU: Tensor, y_NH: Tensor) -> None:
        """Writes y, what goes into the norm, from pre-activations."""
        a_NI = self._activations(h_NU)
        self.activation.forward(h_NU, a_NI)
        self._multiply(self.down, slots, a_NI, y_NH)


class CpuForward(_Pass):
    """``ForwardPass``, slot by slot; writes pre-activations into ``h_PU``."""

    def __init__(
        self, experts: CpuExperts, up: Projection, down: Projection, scratch: Scratch, x: Arrivals, h_PU: Tensor
    ) -> None:
        super().__init__(experts, up, down, scratch, h_PU)
        self.x = x

    def experts(self, chunk: ChunkRows) -> Tensor:
        y_PH = self._new_rows(chunk, self.x)
        for slots, rows, here in chunk.groups():
            x_NH, h_NU, y_NH = self._take(self.x, chunk.gather_P[here], "x"), self.h_PU[rows], y_PH[here]
            self._multiply(self.up, slots, x_NH, h_NU)
            self._outputs(slots, h_NU, y_NH)
            if self.norm is not None:
                self.norm.forward(y_NH, y_NH)
        return y_PH

    def first_product(self, chunk: ChunkRows) -> None:
        for slots, rows, here in chunk.groups():
            self._multiply(self.up, slots, self._take(self.x, chunk.gather_P[here], "x"), self.h_PU[rows])

    def pre_activations(self) -> Tensor:
        return self.h_PU


class CpuBackward(_Pass):
    """``BackwardPass``, slot by slot. ``order``: ``Routes.order``, with one chunk too where layouts may not show; it is
    empty where an expert has a norm. ``later``: the slots whose gradients wait for ``weight_gradients``.
    """

    def __init__(
        self,
        experts: CpuExperts,
        up: Projection,
        down: Projection,
        scratch: Scratch,
        inputs: BackwardInputs,
        order: Sequence[tuple[int, Tensor | slice, Tensor]],
        later: frozenset[int],
        adapters: Adapters | None,
    ) -> None:
        super().__init__(experts, up, down, scratch, inputs.h_P2I)
        self.dy, self.x, self.weight_M, self.sums = inputs.dy, inputs.x, inputs.weight_M, inputs.sums
        self.order, self.later, self.adapters = order, later, adapters
        of_factors = [
            None if each.low_rank_gradient is None else [pair[part] for pair in each.low_rank_gradient]
            for each in (up, down)
            for part in range(2)
        ]
        wanted = (up.gradient, down.gradient, up.bias_gradient, down.bias_gradient, *of_factors)
        # Each kind has a gradient for each slot.
        self.gradients = {kind: of for kind, of in zip(KINDS, wanted, strict=True) if of is not None}
        self.used_slots: set[int] = set()
        # One chunk has all rows of an expert at once, so products that are no sums of blocks are not kept for later.
        kept_rows = len(self.h_PU) if later else 0
        self.dh_PU = scratch.memory.empty((kept_rows, self.h_PU.shape[1]), self.h_PU.dtype, self.h_PU.device)
        width = self.h_PU.shape[1] // self.activation.halves
        self.wa_PI = scratch.memory.empty((kept_rows, width), self.h_PU.dtype, self.h_PU.device)
        # These are rows dh and dy by the outward factors of LoRA on up and on down.
        self.up_PR, self.down_PR = (self.wa_PI.new_empty(kept_rows, each.rank) for each in (up, down))
        # The grids of each slot's gradients, where blocks are added on one.
        self.grids_S: list[dict[str, float]] = []
        # The largest dh and weighted activation of each row.
        self.sizes_2P = inputs.weight_M.new_zeros(2, 0 if self.sums is None else len(self.h_PU))

    def experts(self, chunk: ChunkRows) -> tuple[Tensor, Tensor]:
        scratch = self.scratch
        dx_PH, dweight_P = self._new_rows(chunk, self.dy), self.weight_M.new_zeros(chunk.num_rows)
        for slots, rows, here in chunk.groups():
            gather_N = chunk.gather_P[here]
            h_NU, dy_NH = self.h_PU[rows], self._take(self.dy, gather_N, "dy")
            weight_N = self._weights(slots, gather_N)
            if self.norm is not None:
                # The routing weight multiplies the output of the norm, so gradients are weighted from here on.
                y_NH = scratch("y", dy_NH.shape, h_NU.dtype)
                self._outputs(slots, h_NU, y_NH)
                dweight_P[here] = self.norm.backward(y_NH, dy_NH, weight_N, dy_NH, y_NH)
                weight_N = torch.ones_like(weight_N)
            da_NI = self._activations(h_NU)
            dh_NU = self.dh_PU[rows] if self.later else scratch("dh", h_NU.shape, h_NU.dtype)
            wa_NI = self.wa_PI[rows] if self.later else scratch("wa", da_NI.shape, da_NI.dtype)
            kept = [(self.up_PR, self.up, "up inner"), (self.down_PR, self.down, "down inner")]
            up_NR, down_NR = (
                of[rows] if self.later else scratch(name, (len(h_NU), each.rank), h_NU.dtype) for of, each, name in kept
            )
            self._multiply_back(self.down, slots, scratch.cast("cast dy", dy_NH, h_NU.dtype), da_NI, down_NR)
            dweight_N = self.activation.backward(h_NU, da_NI, weight_N, dh_NU, wa_NI)
            if self.norm is None:
                dweight_P[here] = dweight_N
                self._add_bias_to_dweight(slots, dy_NH, dweight_P[here])
            self._multiply_back(self.up, slots, dh_NU, dx_PH[here], up_NR)
            if self.sums is not None:
                self.sizes_2P[0, rows], self.sizes_2P[1, rows] = row_sizes(dh_NU), row_sizes(wa_NI)
            if self.gradients and not self.later.issuperset(slot.slot for slot in slots):
                operands = dh_NU, self._take(self.x, gather_N, "x"), dy_NH, wa_NI, weight_N, up_NR, down_NR
                for slot, *of_slot in _by_slot(slots, *operands):
                    if slot.slot not in self.later:
                        self._slot_gradients(slot.slot, *(tensor[: slot.valid] for tensor in of_slot))
        return dx_PH, dweight_P[chunk.return_M]

    def _multiply_back(
        self, projection: Projection, slots: Sequence[SlotRows], dy_NB: Tensor, out_NA: Tensor, inner_NR: Tensor
    ) -> None:
        """Writes ``out = dy @ weight``, and into ``inner`` dy by the outward factor of LoRA."""
        for slot, dy, out, inner in _by_slot(slots, dy_NB, out_NA, inner_NR):
            matmul_rows(dy, self._weight(projection, slot).t(), out, self.rule)
            if projection.low_rank is not None:
                inward, outward = projection.low_rank[slot.slot]
                self._multiply_thin(dy, outward.t(), inner)
                self._multiply_thin(inner, inward.t(), out, add=True)

    def weight_gradients(self) -> None:
        if self.sums is not None:
            bounds_E4 = None if self.adapters is None else self.adapters.bounds_E4()
            grids_SN = self.sums.agree(self._largest_of_slots(self.sums), bounds_E4).tolist()
            self.grids_S = [dict(zip(KINDS, grids_N, strict=False)) for grids_N in grids_SN]
        for slot, rows, places in self.order:
            if slot in self.later:
                x_NH, dy_NH = self._take(self.x, places, "x"), self._take(self.dy, places, "dy")
                dh_NU, wa_NI, of_lora = self.dh_PU[rows], self.wa_PI[rows], (self.up_PR[rows], self.down_PR[rows])
                self._slot_gradients(slot, dh_NU, x_NH, dy_NH, wa_NI, self.weight_M[places], *of_lora)
            if self.sums is not None:
                for kind, gradient in self.gradients.items():
                    if math.isnan(self.grids_S[slot][kind]):
                        gradient[slot].fill_(math.nan)
        for kind, gradient in self.gradients.items():
            # Factors' are zeros already, and a second slot of an expert has those of its first.
            for slot in set(range(len(gradient))) - self.used_slots if kind not in FACTORS else ():
                # Zeros of this sign change no sum.
                gradient[slot].fill_(-0.0)

    def _largest_of_slots(self, sums: BlockSums) -> Tensor:
        """Returns what ``BlockSums.agree`` wants."""
        x_M, dy_M, (dh_P, wa_P) = row_sizes(self.x.rows), row_sizes(self.dy.rows), self.sizes_2P
        largest_S5 = torch.zeros(len(sums.expert_S), 5, dtype=torch.float64)
        for slot, rows, places in self.order:
            largest_S5[slot] = torch.stack(
                [
                    x_M[self.x.place(places)].amax(),
                    dy_M[self.dy.place(places)].amax(),
                    dh_P[rows].amax(),
                    wa_P[rows].amax(),
                    largest_size(self.weight_M[places]),
                ]
            )
        return largest_S5

    def _weights(self, slots: Sequence[SlotRows], gather_N: Tensor) -> Tensor:
        """Returns the rows' routing weights; padding has none, and so no part in any sum."""
        weight_N = self.weight_M[gather_N]
        for slot, weight in _by_slot(slots, weight_N):
            if slot.valid < slot.padded:
                weight[slot.valid :] = 0
        return weight_N

    def _add_bias_to_dweight(self, slots: Sequence[SlotRows], dy_NH: Tensor, dweight_N: Tensor) -> None:
        """Adds the bias's part of what a routing weight multiplies."""
        if self.down.bias is not None:
            for slot, dy, dweight in _by_slot(slots, dy_NH, dweight_N):
                dweight += (dy.to(dweight.dtype) * self.down.bias(slot.slot)).sum(dim=1)

    def _slot_gradients(self, slot: int, *operands: Tensor) -> None:
        """Writes a slot's gradients, from its rows in expert order: dh, x, dy, weighted activations, weights, and dh
        and dy by the outward factors of LoRA.
        """
        self.used_slots.add(slot)
        for kind, gradient in self.gradients.items():
            if self.sums is None or self.sums.is_one_block(slot):
                self._write_gradient(kind, slot, gradient[slot], *operands)
            else:
                self._write_sum(kind, gradient[slot], operands, self.sums.blocks(len(operands[0])), slot)

    def _write_sum(
        self, kind: str, out: Tensor, operands: Sequence[Tensor], blocks: Sequence[slice], slot: int
    ) -> None:
        """Writes one gradient of a slot, which is added up block by block."""
        dh_NU, weight_N = operands[0], operands[4]
        # Products keep their own dtype, which saves a pass over them; sums of biases have the wide one.
        dtype = weight_N.dtype if kind.endswith("bias") else dh_NU.dtype
        part = self.scratch("part", tuple(out.shape), dtype)
        total = self.scratch("total", tuple(out.shape), torch.float64).zero_()
        for block in blocks:
            self._write_gradient(kind, slot, part, *(rows[block] for rows in operands))
            add_on_grid(total, part, self.grids_S[slot][kind])
        out.copy_(total)

    def _write_gradient(self, kind: str, slot: int, out: Tensor, *operands: Tensor) -> None:
        dh_NU, x_NH, dy_NH, wa_NI, weight_N, up_NR, down_NR = operands
        match kind:
            case "up":
                self._write_product(self.up.transposed, dh_NU, x_NH, out)
            case "down":
                self._write_product(self.down.transposed, self.scratch.cast("cast dy", dy_NH, wa_NI.dtype), wa_NI, out)
            case "up bias":
                out.copy_(dh_NU.to(weight_N.dtype).sum(dim=0))
            case "down bias":
                out.copy_((dy_NH.to(weight_N.dtype) * weight_N[:, None]).sum(dim=0))
            case "up inward":
                self._write_product(False, up_NR, x_NH, out)
            case "up outward":
                self._write_outward(self.up, slot, dh_NU, x_NH, out)
            case "down inward":
                self._write_product(False, down_NR, wa_NI, out)
            case "down outward":
                self._write_outward(self.down, slot, self.scratch.cast("cast dy", dy_NH, wa_NI.dtype), wa_NI, out)

    def _write_outward(self, projection: Projection, slot: int, dy_NB: Tensor, x_NA: Tensor, out_BR: Tensor) -> None:
        """Writes the gradient of an outward factor as r wide rows, which takes BLAS half as long as narrow ones."""
        self._write_product(True, dy_NB, self._inner(projection, slot, x_NA), out_BR.t())

    def _write_product(self, transposed: bool, dy_NB: Tensor, x_NA: Tensor, out: Tensor) -> None:
        """Writes ``dyᵀ @ x`` summed over rows in order, as the weight lies."""
        left, right = (aligned(rows) for rows in ((x_NA, dy_NB) if transposed else (dy_NB, x_NA)))
        if left.dtype == out.dtype and (min(out.shape) >= NARROW or is_aligned(out)):
            torch.mm(left.t(), right, out=out)
        elif left.is_cuda:
            out.copy_(torch.mm(left.t(), right, out_dtype=torch.float32))
        else:
            # torch's CPU GEMM accumulates in float32 but has no float32 output for 16-bit operands: one rounding more.
            # And the bits of a narrow output would depend on its address.
            rounded = self.scratch("gradient", tuple(out.shape), left.dtype)
            out.copy_(torch.mm(left.t(), right, out=rounded))


def _order_of_one(chunk: ChunkRows) -> list[tuple[int, slice, Tensor]]:
    """Returns ``Routes.order`` of one chunk, whose rows are in that order."""
    slots = [(slot.slot, slice(slot.start, slot.start + slot.valid)) for slot in chunk.slots]
    return [(slot, rows, chunk.gather_P[rows]) for slot, rows in slots]


def _by_slot(slots: Sequence[SlotRows], *rows: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields each slot with its part of all ``rows``."""
    sizes = [slot.padded for slot in slots]
    return zip(slots, *(tensor.split(sizes) for tensor in rows), strict=True)


def _projections(
    experts: Sequence[ExpertWeights], adapters: Adapters | None, gradients: ExpertGradients | None, transposed: bool
) -> tuple[Projection, Projection]:
    """Returns up and down of the layer's experts."""
    dup, ddown, dup_bias, ddown_bias = gradients or (None, None, None, None)

    def of(name: str) -> Callable[[int], Tensor]:
        return lambda slot: getattr(experts[slot], name)

    up_bias, down_bias = (experts[0].gate_up_bias, experts[0].down_bias) if len(experts) else (None, None)
    biases = None if up_bias is None else of("gate_up_bias"), None if down_bias is None else of("down_bias")
    of_low_rank = [None] * 4 if adapters is None else [adapters.by_slot(pair) for pair in adapters[1:]]
    return (
        Projection(of("gate_up"), biases[0], transposed, dup, dup_bias, *of_low_rank[::2]),
        Projection(of("down"), biases[1], transposed, ddown, ddown_bias, *of_low_rank[1::2]),
    )


@dataclass(frozen=True)
class ExpertFunction:
    """The function of an expert, apart from its weights.

    ``activation``: SwiGLU, or any other. ``transposed``: projections are [in, out]. ``biases``: any has one.
    """

    activation: RowFunction = SWIGLU
    transposed: bool = False
    biases: bool = False

    @property
    def has_kernels(self) -> bool:
        """True if Triton's kernels compute the function."""
        return self.activation is SWIGLU and not self.transposed and not self.biases


OURS = ExpertFunction()


def experts_on_device(
    shape: ModelShape, dtype: torch.dtype, device_type: str, function: ExpertFunction = OURS
) -> ExpertCompute:
    """Returns Triton's kernels on a GPU where they compute ``function``, and a GEMM a slot elsewhere."""
    if device_type == "cuda" and function.has_kernels:
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.experts_triton import TritonExperts

        return TritonExperts()
    H, I = shape.hidden_size, shape.intermediate_size
    up = projection_rule(H, function.activation.halves * I, dtype, device_type, function.transposed)
    down = projection_rule(I, H, dtype, device_type, function.transposed)
    return CpuExperts(RowRule.all_of([up, down]), function.activation, transposed=function.transposed)
