"""transformers' MoE models on the experts of this package: ``experts_implementation="moesys"``.

    ms.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moesys")

transformers calls the registered function with a layer's experts module, its tokens and their routing, and wants the
weighted sum back. Rows are in order of (expert, token, choice), products treat a row the same in any company
(``kernels.rows``), combine sums choices in order in float32 and rounds once, a weight gradient sums all rows of its
expert in one product: a token's output does not depend on other tokens, and equal inputs give equal bits.

T tokens, H hidden, I expert width, J rows of the up projection (2I with a gate), K top-k, E experts, P rows of experts
with their padding, N such rows of a few experts; A and B any widths. *Wide* is the dtype that activations and sums are
computed in: float32, or float64 where products are float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moesys.kernels.experts import moe_experts
from moesys.kernels.memory import Memory, Scratch
from moesys.kernels.routing import route_reference
from moesys.kernels.rows import RowRule, matmul_rows, row_rule
from moesys.kernels.swiglu import swiglu, swiglu_backward
from moesys.overlap.routes import SlotRows

NAME = "moesys"
OLDEST_TRANSFORMERS = (5, 17)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Experts with few rows share gathers and activations, up to so many rows: calls cost more than such rows do.
GROUP_ROWS = 2048
ALIGNMENT_BYTES = 64
# Combine works on blocks of so many elements, which stay in a core's cache.
COMBINE_ELEMENTS = 1 << 18
# On a CPU torch computes the last elements of an array, fewer than these, by another path than the rest ...
TAIL_ELEMENTS = 64
# ... and from so many elements on it cuts an array between threads, which gives it more ends.
THREADED_ELEMENTS = 1 << 15


def register() -> str:
    """Make ``experts_implementation="moesys"`` known to transformers in this process; returns that name.

    Once is enough, and more often does no harm. Models choose an implementation when they are made (an argument of
    ``from_pretrained`` and ``from_config``), or later by ``model.set_experts_implementation("moesys")``.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"moesys.hf needs transformers: {_advice()}") from error
    version = transformers.__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TRANSFORMERS:
        raise ImportError(f"transformers {version} is too old for moesys.hf: {_advice()}")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ExpertsInterface.register(NAME, partial(experts_forward, Memory()))
    return NAME


def _advice() -> str:
    return f"pip install 'transformers>={'.'.join(map(str, OLDEST_TRANSFORMERS))}'"


def experts_forward(
    memory: Memory, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Output [T, H] of transformers' experts ``module`` for tokens [T, H] and the experts and weights [T, K] that they
    chose. An expert that the module does not have is another rank's: its choice counts for nothing.

    On a GPU by the kernels, where they compute the same; else row by row, with ``memory`` for large intermediate
    results.
    """
    experts = _Experts.of(module)
    forward = _by_kernels if hidden_states.is_cuda and experts.has_kernels else _by_rows
    return forward(experts, memory, module, hidden_states, top_k_index, top_k_weights)


def _by_kernels(
    experts: _Experts, _: Memory, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    gate_up_EUH, down_EHI = (getattr(module, name) for name in experts.names)
    dtype = _compute_dtype(gate_up_EUH)
    y_TH = moe_experts(
        hidden_states.to(dtype), top_k_index, top_k_weights, gate_up_EUH.to(dtype), down_EHI.to(dtype), "swiglu"
    )
    return y_TH.to(hidden_states.dtype)


# A loop over the experts that have tokens is nothing that a compiled graph could hold.
@torch.compiler.disable
def _by_rows(
    experts: _Experts,
    memory: Memory,
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    projections = [getattr(module, name) for name in experts.names]
    dtype = _compute_dtype(projections[0])
    y_TH: Tensor = RoutedExperts.apply(
        experts, dtype, memory, hidden_states, top_k_weights, top_k_index, *projections, *experts.parameters
    )
    return y_TH


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Of the products: autocast's, or else the weights'."""
    if weight.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f'experts have dtype {weight.dtype}; experts_implementation="{NAME}" takes {names}')
    device_type = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


@dataclass(frozen=True)
class _Experts:
    """What an experts module computes, in the terms of transformers' ``use_experts_implementation``.

    names: of the up and down projection, then of their biases if there are any.
    transposed: projections are [E, in, out], not [E, out, in].
    swiglu: the activation is SwiGLU of ``[gate | up]``, so that its kernel may take its place.
    dtype: of the projections.
    norm: of an expert's output, before the routing weight.
    parameters: all others of the module, which activation and norm may use.
    """

    names: tuple[str, ...]
    transposed: bool
    swiglu: bool
    dtype: torch.dtype
    activation: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor] | None
    parameters: tuple[nn.Parameter, ...]

    @property
    def has_kernels(self) -> bool:
        """Whether ``kernels.experts`` computes the same: SwiGLU, with nothing besides, in 32 or 16 bits."""
        plain = self.swiglu and not self.transposed and self.norm is None and len(self.names) == 2
        return plain and self.dtype != torch.float64

    @staticmethod
    def of(module: Any) -> _Experts:
        names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        if module.has_bias:
            names += [f"{name}_bias" for name in names]
        # older versions do not have it
        has_norm = getattr(module, "has_post_expert_norm", False)
        return _Experts(
            names=tuple(names),
            transposed=module.is_transposed,
            swiglu=_is_swiglu(module),
            dtype=module.down_proj.dtype,
            activation=module._apply_gate if module.has_gate else module.act_fn,
            norm=module.post_expert_norm if has_norm else None,
            parameters=tuple(p for name, p in module.named_parameters() if name not in names),
        )


def _is_swiglu(module: Any) -> bool:
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    if not module.has_gate or type(module)._apply_gate is not moe._default_apply_gate:
        return False
    return module.act_fn is nn.functional.silu or isinstance(module.act_fn, nn.SiLU | SiLUActivation)


@dataclass(frozen=True)
class _Rows:
    """The rows of all experts, each expert's padded to the least number that ``kernels.rows`` allows.

    entry_P: the choice t·K + k that a row is of; padding repeats its expert's first row.
    row_TK: the row of each choice, P for those that have none.
    """

    entry_P: Tensor
    row_TK: Tensor
    experts: tuple[SlotRows, ...]

    @staticmethod
    def of(index_TK: Tensor, num_experts: int, min_rows: int) -> _Rows:
        routing = route_reference(index_TK, num_experts)
        first_E, valid_E = routing.first_G1[:-1].long(), routing.first_G1.diff().long()
        padded_E = torch.where(valid_E > 0, valid_E.clamp(min=min_rows), 0)
        start_E = padded_E.cumsum(0) - padded_E
        expert_P = torch.repeat_interleave(padded_E)
        offset_P = torch.arange(len(expert_P), device=expert_P.device) - start_E[expert_P]
        offset_P = torch.where(offset_P < valid_E[expert_P], offset_P, 0)
        kept_TK = routing.row_TK >= 0
        shift_TK = (start_E - first_E)[torch.where(kept_TK, index_TK, 0).long()]
        starts, valids, paddeds = torch.stack([start_E, valid_E, padded_E]).tolist()
        return _Rows(
            entry_P=routing.entry_P[first_E[expert_P] + offset_P],
            row_TK=torch.where(kept_TK, routing.row_TK + shift_TK, len(expert_P)).int(),
            experts=tuple(SlotRows(e, starts[e], valids[e], paddeds[e]) for e in range(num_experts) if valids[e]),
        )

    def groups(self) -> Iterator[tuple[tuple[SlotRows, ...], slice]]:
        """Neighbouring experts, and the rows they have together."""
        first = 0
        for last, expert in enumerate(self.experts, start=1):
            start, stop = self.experts[first].start, expert.start + expert.padded
            if stop - start >= GROUP_ROWS or last == len(self.experts):
                yield self.experts[first:last], slice(start, stop)
                first = last


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
        weight = self.weight[index]
        if weight.dtype != dtype:
            weight = scratch("weight", tuple(weight.shape), dtype).copy_(weight)
        return weight.t() if self.transposed else weight


class _Parts(NamedTuple):
    """Parameters of an experts module, or their gradients; ``others`` are those of activation and norm."""

    up: Any
    down: Any
    up_bias: Any
    down_bias: Any
    others: tuple[Any, ...]

    @staticmethod
    def of(experts: _Experts, tensors: Sequence[Tensor | None]) -> _Parts:
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
        experts: _Experts,
        dtype: torch.dtype,
        memory: Memory,
        x_TH: Tensor,
        weight_TK: Tensor,
        index_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        with torch.autocast(x_TH.device.type, enabled=False):
            call = _Call(experts, parameters, dtype, memory)
            rows = _Rows.of(index_TK, len(parameters[0]), call.rule.min_rows)
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
            rows = _Rows(entry_P, row_TK, with_rows)
            dx_TH, dweight_TK = call.backward(
                rows, grad_outputs[0], x_TH, weight_TK, h_PJ, needs_x, _Parts.of(experts, gradients)
            )
        return None, None, None, dx_TH, dweight_TK if needs_weight else None, None, *gradients


class _Call:
    """What forward and backward of one call do: gathers, products, activations, sums."""

    def __init__(self, experts: _Experts, parameters: Sequence[Tensor], dtype: torch.dtype, memory: Memory) -> None:
        parts = _Parts.of(experts, parameters)
        self.experts, self.dtype, self.memory = experts, dtype, memory
        self.up = _Linear(parts.up, parts.up_bias, experts.transposed)
        self.down = _Linear(parts.down, parts.down_bias, experts.transposed)
        self.rule = RowRule.all_of(self.up.row_rules(dtype) + self.down.row_rules(dtype))
        self.wide = torch.promote_types(dtype, torch.float32)
        self.device = parts.up.device
        self.scratch = Scratch(memory, self.device)

    def forward(self, rows: _Rows, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        """(y [T, H] in x's dtype, pre-activations [P, J])."""
        P, (H, J) = len(rows.entry_P), self.up.sizes
        h_PJ = self.memory.empty((P, J), self.dtype, self.device)
        y_P1H = self._rows_and_none(P, H)
        for experts, here in rows.groups():
            h_NJ, y_NH = h_PJ[here], y_P1H[here]
            x_NH = self._take(x_TH, rows.entry_P[here] // weight_TK.shape[1], "x")
            self._multiply(self.up, experts, self._cast(x_NH, "cast x"), h_NJ)
            self._multiply(self.down, experts, self._activation(h_NJ), y_NH)
            if self.experts.norm is not None:
                by_rows(self.experts.norm, y_NH, y_NH)
        return self._sum_of_choices(y_P1H, rows.row_TK, weight_TK, x_TH), h_PJ

    def backward(
        self,
        rows: _Rows,
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
        others = _Others(self.experts.parameters, gradients.others)
        for experts, here in rows.groups():
            token_N = rows.entry_P[here] // weight_TK.shape[1]
            h_NJ, weight_N, dy_NH = h_PJ[here], weight_P1[here], self._take(dy_TH, token_N, "dy")
            if norm is not None:
                # The weight comes behind the norm: what goes on from here is weighted.
                y_NH = self.scratch("y", dy_NH.shape, self.dtype)
                self._multiply(self.down, experts, self._activation(h_NJ), y_NH)
                dweight_P1[here] = by_rows_backward(norm, y_NH, dy_NH, weight_N, dy_NH, y_NH, others)
                weight_N = torch.ones_like(weight_N)
            cast_NH = self._cast(dy_NH, "cast dy")
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
                x_NH = self._cast(self._take(x_TH, token_N, "x"), "cast x")
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

    def _cast(self, rows_NA: Tensor, name: str) -> Tensor:
        """The rows as products take them."""
        return rows_NA if rows_NA.dtype == self.dtype else self.scratch(name, rows_NA.shape, self.dtype).copy_(rows_NA)

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
        self, h_NJ: Tensor, da_NI: Tensor, weight_N: Tensor, dh_NJ: Tensor, wa_NI: Tensor, others: _Others
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
            one, other = (_aligned(operand[: expert.valid]) for operand in operands)
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
        for tokens in _blocks(len(row_TK), COMBINE_ELEMENTS // rows_P1H.shape[1]):
            total_TH = part(tokens, 0)
            for k in range(1, row_TK.shape[1]):
                total_TH += part(tokens, k)
            out_TH[tokens] = total_TH
        return out_TH


class _Others:
    """Gradients of the parameters of activation and norm, summed wide, block of rows after block of rows."""

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        needed = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        self.parameters = [parameter for parameter, _ in needed]
        self._gradients = [gradient for _, gradient in needed]
        self._sums = [torch.zeros_like(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in self._gradients]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """None is for parameters that were not used."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total += gradient

    def write(self) -> None:
        for gradient, total in zip(self._gradients, self._sums, strict=True):
            gradient.copy_(total)


def by_rows(function: Callable[[Tensor], Tensor], x_NA: Tensor, out_NB: Tensor) -> None:
    """``out = function(x)``, computed wide by any torch code that works on each row by itself.

    A row's bits depend on no other row: rows go through in blocks with padding, so that a block's end, which torch
    computes in another way, holds no row that counts.
    """
    for block, padding in _padded_blocks(x_NA, out_NB.shape[1]):
        out_NB[block] = function(_wide(x_NA[block], padding))[: len(out_NB[block])]


def by_rows_backward(
    function: Callable[[Tensor], Tensor],
    x_NA: Tensor,
    dy_NB: Tensor,
    weight_N: Tensor,
    dx_NA: Tensor,
    wy_NB: Tensor,
    others: _Others,
) -> Tensor:
    """Gradients of ``weight * function(x)`` by autograd, as ``swiglu_backward`` gives those of SwiGLU.

    Writes ``dx`` [N, A] and ``wy = weight * function(x)`` [N, B], which may lie on the inputs, adds to ``others``, and
    returns dL/dweight [N], wide.
    """
    dweight_N = torch.empty_like(weight_N)
    for block, padding in _padded_blocks(x_NA, dy_NB.shape[1]):
        num_rows = len(dy_NB[block])
        x, dy, weight = (_wide(rows[block], padding) for rows in (x_NA, dy_NB, weight_N[:, None]))
        # What fills up is not there.
        weight[num_rows:] = 0
        with torch.enable_grad():
            y = function(x.requires_grad_())
            dx, *dothers = torch.autograd.grad(y, (x, *others.parameters), (dy * weight).to(y.dtype), allow_unused=True)
        y = y.detach()
        others.add(dothers)
        dweight_N[block] = (dy * y).sum(dim=1)[:num_rows]
        dx_NA[block] = dx[:num_rows]
        wy_NB[block] = (y * weight)[:num_rows]
    return dweight_N


def _padded_blocks(x_NA: Tensor, out_width: int) -> Iterator[tuple[slice, int]]:
    """Blocks of rows, and how many rows are to be put behind each so that its end is none of its own."""
    width, narrow = max(x_NA.shape[1], out_width), min(x_NA.shape[1], out_width)
    if x_NA.device.type != "cpu":
        return ((block, 0) for block in _blocks(len(x_NA), len(x_NA)))
    padding = -(-TAIL_ELEMENTS // narrow)
    return ((block, padding) for block in _blocks(len(x_NA), (THREADED_ELEMENTS - 1) // width - padding))


def _wide(rows_NA: Tensor, padding: int) -> Tensor:
    """A wide copy with so many copies of the first row behind it."""
    wide = rows_NA.new_empty(
        (len(rows_NA) + padding, rows_NA.shape[1]), dtype=torch.promote_types(rows_NA.dtype, torch.float32)
    )
    wide[: len(rows_NA)] = rows_NA
    wide[len(rows_NA) :] = rows_NA[:1]
    return wide


def _blocks(num_rows: int, rows_per_block: int) -> Iterator[slice]:
    """Where there are rows, at least one each."""
    step = max(1, rows_per_block)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def _by_expert(experts: Sequence[SlotRows], *rows: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each expert with its part of all ``rows``."""
    sizes = [expert.padded for expert in experts]
    return zip(experts, *(tensor.split(sizes) for tensor in rows), strict=True)


def _aligned(rows: Tensor) -> Tensor:
    """The rows, at an address as allocations have it: BLAS sums narrow matrices in an order that depends on that."""
    return rows if rows.data_ptr() % ALIGNMENT_BYTES == 0 else rows.clone()
