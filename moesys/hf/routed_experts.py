"""The experts' computation on any device, in plain torch, forward and backward.

Rows are in order of (expert, token, choice), products treat a row the same in any company (``row_invariant_gemm``),
combine sums choices in order in float32 and rounds once, a weight gradient sums all rows of its expert in one product:
a token's output does not depend on other tokens, and equal inputs give equal bits.

T tokens, H hidden, I expert width, J rows of the up projection (2I with a gate), K top-k, E experts, P rows of experts
with their padding, N such rows of a few experts; A and B any widths. *Wide* is the dtype that activations and sums are
computed in: float32, or float64 where products are float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesys.hf.expert_rows import ExpertRows
from moesys.hf.experts_module import ExpertsModule
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.kernels.cpu.row_invariant_gemm import RowRule, aligned, matmul_rows, row_rule
from moesys.kernels.cpu.row_invariant_ops import ParameterGradients, by_rows, by_rows_backward, row_blocks
from moesys.kernels.experts.swiglu import swiglu, swiglu_backward
from moesys.overlap.routes import SlotRows, groups_of

# Combine works on blocks of so many elements, which stay in a core's cache.
COMBINE_ELEMENTS = 1 << 18


class _Linear(NamedTuple):
    """One projection of all experts: weight [E, out, in], or [E, in, out] where transposed; bias [E, out]."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """(in, out)."""
        second, last = self.weight.shape[1:]
        return (second, last) if self.transposed else (last, second)

    def row_rules(self, dtype: torch.dtype) -> list[RowRule]:
        """Of the products of forward and of backward."""
        (inward, outward), device_type = self.sizes, self.weight.device.type
        return [
            row_rule(inward, outward, dtype, not self.transposed, device_type),
            row_rule(outward, inward, dtype, self.transposed, device_type),
        ]

    def expert(self, index: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """One expert's weight as [out, in]; a cast one lasts until the next is cast."""
        weight = scratch.cast("weight", self.weight[index], dtype)
        return weight.t() if self.transposed else weight


class _Parts(NamedTuple):
    """Parameters of an experts module, or their gradients; ``others`` are those of activation and norm."""

    up: Any
    down: Any
    up_bias: Any
    down_bias: Any
    others: tuple[Any, ...]

    @staticmethod
    def of(experts: ExpertsModule, tensors: Sequence[Tensor | None]) -> _Parts:
        named = len(experts.names)
        up_bias, down_bias = tensors[2:4] if named == 4 else (None, None)
        return _Parts(tensors[0], tensors[1], up_bias, down_bias, tuple(tensors[named:]))


class RoutedExperts(torch.autograd.Function):
    """y [T, H] from x [T, H], routing weights and experts [T, K], and all parameters of the experts.

    Saves x, pre-activations and the routing. What else backward needs it computes again: a routing weight's gradient is
    the product of what comes back through the down projection with the activation (SonicMoE's dataflow).
    """

    @staticmethod
    def forward(
        ctx: Any,
        experts: ExpertsModule,
        dtype: torch.dtype,
        memory: PagePool,
        x_TH: Tensor,
        weight_TK: Tensor,
        index_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        with torch.autocast(x_TH.device.type, enabled=False):
            call = _Call(experts, parameters, dtype, memory)
            rows = ExpertRows.of(index_TK, len(parameters[0]), call.rule.min_rows)
            y_TH, h_PJ = call.forward(rows, x_TH, weight_TK)
        ctx.description = experts, dtype, memory, rows.experts
        ctx.save_for_backward(x_TH, weight_TK, h_PJ, rows.entry_P, rows.row_TK, *parameters)
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        experts, dtype, memory, with_rows = ctx.description
        x_TH, weight_TK, h_PJ, entry_P, row_TK, *parameters = ctx.saved_tensors
        needs_x, needs_weight, _, *needs_parameters = ctx.needs_input_grad[3:]
        gradients = [
            torch.zeros_like(parameter) if needed else None
            for parameter, needed in zip(parameters, needs_parameters, strict=True)
        ]
        with torch.autocast(x_TH.device.type, enabled=False):
            call = _Call(experts, parameters, dtype, memory)
            rows = ExpertRows(entry_P, row_TK, with_rows)
            dx_TH, dweight_TK = call.backward(
                rows, grad_outputs[0], x_TH, weight_TK, h_PJ, needs_x, _Parts.of(experts, gradients)
            )
        return None, None, None, dx_TH, dweight_TK if needs_weight else None, None, *gradients


class _Call:
    """What forward and backward of one call do: gathers, products, activations, sums."""

    def __init__(
        self, experts: ExpertsModule, parameters: Sequence[Tensor], dtype: torch.dtype, memory: PagePool
    ) -> None:
        parts = _Parts.of(experts, parameters)
        self.experts, self.dtype, self.memory = experts, dtype, memory
        self.up = _Linear(parts.up, parts.up_bias, experts.transposed)
        self.down = _Linear(parts.down, parts.down_bias, experts.transposed)
        self.rule = RowRule.all_of(self.up.row_rules(dtype) + self.down.row_rules(dtype))
        self.wide = torch.promote_types(dtype, torch.float32)
        self.device = parts.up.device
        self.scratch = Scratch(memory, self.device)

    def forward(self, rows: ExpertRows, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        """(y [T, H] in x's dtype, pre-activations [P, J])."""
        P, (H, J) = len(rows.entry_P), self.up.sizes
        h_PJ = self.memory.empty((P, J), self.dtype, self.device)
        y_P1H = self._rows_and_none(P, H)
        for experts, here in groups_of(rows.experts):
            h_NJ, y_NH = h_PJ[here], y_P1H[here]
            x_NH = self._take(x_TH, rows.entry_P[here] // weight_TK.shape[1], "x")
            self._multiply(self.up, experts, self.scratch.cast("cast x", x_NH, self.dtype), h_NJ)
            self._multiply(self.down, experts, self._activation(h_NJ), y_NH)
            if self.experts.norm is not None:
                by_rows(self.experts.norm, y_NH, y_NH)
        return self._sum_of_choices(y_P1H, rows.row_TK, weight_TK, x_TH), h_PJ

    def backward(
        self,
        rows: ExpertRows,
        dy_TH: Tensor,
        x_TH: Tensor,
        weight_TK: Tensor,
        h_PJ: Tensor,
        needs_x: bool,
        gradients: _Parts,
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of x, where it needs one, and of the routing weights; those of parameters go into ``gradients``,
        which are zeros.
        """
        P, (H, _), norm = len(rows.entry_P), self.up.sizes, self.experts.norm
        # Padding has no weight, and so no part in any gradient.
        weight_P1 = torch.zeros(P + 1, dtype=self.wide, device=self.device)
        weight_P1[rows.row_TK.reshape(-1)] = weight_TK.reshape(-1).to(self.wide)
        dweight_P1 = torch.zeros_like(weight_P1)
        dx_P1H = self._rows_and_none(P, H) if needs_x else None
        others = ParameterGradients(self.experts.parameters, gradients.others)
        for experts, here in groups_of(rows.experts):
            token_N = rows.entry_P[here] // weight_TK.shape[1]
            h_NJ, weight_N, dy_NH = h_PJ[here], weight_P1[here], self._take(dy_TH, token_N, "dy")
            if norm is not None:
                # The weight comes behind the norm: what goes on from here is weighted.
                y_NH = self.scratch("y", dy_NH.shape, self.dtype)
                self._multiply(self.down, experts, self._activation(h_NJ), y_NH)
                dweight_P1[here] = by_rows_backward(norm, y_NH, dy_NH, weight_N, dy_NH, y_NH, others)
                weight_N = torch.ones_like(weight_N)
            cast_NH = self.scratch.cast("cast dy", dy_NH, self.dtype)
            da_NI = self.scratch("da", (len(h_NJ), self.down.sizes[0]), self.dtype)
            wa_NI = self.scratch("a", da_NI.shape, self.dtype)
            dh_NJ = self.scratch("dh", h_NJ.shape, self.dtype)
            self._multiply_back(self.down, experts, cast_NH, da_NI)
            dweight_N = self._activation_backward(h_NJ, da_NI, weight_N, dh_NJ, wa_NI, others)
            if norm is None:
                dweight_P1[here] = dweight_N
                self._add_bias_to_dweight(experts, dy_NH, dweight_P1[here])
            if dx_P1H is not None:
                self._multiply_back(self.up, experts, dh_NJ, dx_P1H[here])
            if gradients.up is not None:
                x_NH = self.scratch.cast("cast x", self._take(x_TH, token_N, "x"), self.dtype)
                self._sum_products(experts, dh_NJ, x_NH, gradients.up)
            if gradients.down is not None:
                self._sum_products(experts, cast_NH, wa_NI, gradients.down)
            if gradients.up_bias is not None:
                self._sum_rows(experts, dh_NJ, None, gradients.up_bias)
            if gradients.down_bias is not None:
                self._sum_rows(experts, dy_NH, weight_N, gradients.down_bias)
        others.write()
        dx_TH = None if dx_P1H is None else self._sum_of_choices(dx_P1H, rows.row_TK, None, x_TH)
        return dx_TH, dweight_P1[rows.row_TK].to(weight_TK.dtype)

    def _rows_and_none(self, num_rows: int, width: int) -> Tensor:
        """Uninitialised rows, and behind them the row of zeros of choices that have none."""
        rows = self.memory.empty((num_rows + 1, width), self.dtype, self.device)
        rows[num_rows:] = 0
        return rows

    def _take(self, source_TA: Tensor, token_N: Tensor, name: str) -> Tensor:
        """Copies of these tokens' rows, which last until the next of that name."""
        taken = self.scratch(name, (len(token_N), source_TA.shape[1]), source_TA.dtype)
        return torch.index_select(source_TA, 0, token_N, out=taken)

    def _multiply(self, linear: _Linear, experts: Sequence[SlotRows], left_NA: Tensor, out_NB: Tensor) -> None:
        """``out = left @ weightᵀ + bias``, each expert's rows by its own."""
        for expert, left, out in _by_expert(experts, left_NA, out_NB):
            matmul_rows(left, linear.expert(expert.slot, self.dtype, self.scratch), out, self.rule)
            if linear.bias is not None:
                out += linear.bias[expert.slot]

    def _multiply_back(self, linear: _Linear, experts: Sequence[SlotRows], left_NB: Tensor, out_NA: Tensor) -> None:
        """``out = left @ weight``."""
        for expert, left, out in _by_expert(experts, left_NB, out_NA):
            matmul_rows(left, linear.expert(expert.slot, self.dtype, self.scratch).t(), out, self.rule)

    def _activation(self, h_NJ: Tensor) -> Tensor:
        a_NI = self.scratch("a", (len(h_NJ), self.down.sizes[0]), self.dtype)
        if self.experts.swiglu and self.wide == torch.float32:
            swiglu(h_NJ, a_NI)
        else:
            by_rows(self.experts.activation, h_NJ, a_NI)
        return a_NI

    def _activation_backward(
        self, h_NJ: Tensor, da_NI: Tensor, weight_N: Tensor, dh_NJ: Tensor, wa_NI: Tensor, others: ParameterGradients
    ) -> Tensor:
        """As ``swiglu_backward``."""
        if self.experts.swiglu and self.wide == torch.float32:
            return swiglu_backward(h_NJ, da_NI, weight_N, dh_NJ, wa_NI)
        return by_rows_backward(self.experts.activation, h_NJ, da_NI, weight_N, dh_NJ, wa_NI, others)

    def _add_bias_to_dweight(self, experts: Sequence[SlotRows], dy_NH: Tensor, dweight_N: Tensor) -> None:
        """The bias's part of what a routing weight multiplies."""
        if self.down.bias is not None:
            for expert, dy, dweight in _by_expert(experts, dy_NH, dweight_N):
                dweight += (dy.to(self.wide) * self.down.bias[expert.slot]).sum(dim=1)

    def _sum_products(
        self, experts: Sequence[SlotRows], outward_NB: Tensor, inward_NA: Tensor, gradient_E: Tensor
    ) -> None:
        """A projection's gradient, the sum over each expert's rows of ``outward ⊗ inward``."""
        left, right = (inward_NA, outward_NB) if self.experts.transposed else (outward_NB, inward_NA)
        for expert, *operands in _by_expert(experts, left, right):
            one, other = (aligned(operand[: expert.valid]) for operand in operands)
            gradient = gradient_E[expert.slot]
            if gradient.dtype == self.dtype:
                torch.mm(one.t(), other, out=gradient)
            else:
                gradient.copy_(one.t() @ other)

    def _sum_rows(
        self, experts: Sequence[SlotRows], rows_NB: Tensor, weight_N: Tensor | None, gradient_EB: Tensor
    ) -> None:
        """A bias's gradient."""
        for expert, rows in _by_expert(experts, rows_NB):
            wide = rows[: expert.valid].to(self.wide)
            if weight_N is not None:
                first = expert.start - experts[0].start
                wide = wide * weight_N[first : first + expert.valid, None]
            gradient_EB[expert.slot] = wide.sum(dim=0)

    def _sum_of_choices(self, rows_P1H: Tensor, row_TK: Tensor, weight_TK: Tensor | None, like_TH: Tensor) -> Tensor:
        """The sum over k = 0..K-1, in that order, of each token's rows times its weights: wide, and rounded once."""
        none = len(rows_P1H) - 1

        def part(tokens: slice, k: int) -> Tensor:
            row_T = row_TK[tokens, k]
            rows_TH = rows_P1H.index_select(0, row_T).to(self.wide)
            if weight_TK is None:
                return rows_TH
            # The weight of a choice that has no row may be anything.
            weight_T = torch.where(row_T < none, weight_TK[tokens, k].to(self.wide), 0)
            return rows_TH.mul_(weight_T[:, None])

        out_TH = like_TH.new_empty(like_TH.shape)
        for tokens in row_blocks(len(row_TK), COMBINE_ELEMENTS // rows_P1H.shape[1]):
            total_TH = part(tokens, 0)
            for k in range(1, row_TK.shape[1]):
                total_TH += part(tokens, k)
            out_TH[tokens] = total_TH
        return out_TH


def _by_expert(experts: Sequence[SlotRows], *rows: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each expert with its part of all ``rows``."""
    sizes = [expert.padded for expert in experts]
    return zip(experts, *(tensor.split(sizes) for tensor in rows), strict=True)
