"""transformers' experts on one rank (``experts_implementation="moesys"``), and the registration with transformers.

Rows are in order of (expert, token, choice) and computed as ``overlap.experts_cpu`` computes them: a token's output
does not depend on other tokens, and equal inputs give equal bits. On a GPU the kernels of ``kernels.experts`` compute
modules that they support.

T tokens, H hidden, I expert width, U rows of the up projection (2I with a gate), K top-k, M = T·K choices, E experts,
P rows of experts with their padding. *Wide* is float32, or float64 where products are float64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesys.config import Strategy
from moesys.hf.experts_module import ExpertsModule, compute_dtype
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.kernels.cpu.row_invariant_gemm import RowRule, projection_rule
from moesys.kernels.cpu.row_invariant_ops import ParameterGradients, row_function
from moesys.kernels.experts.experts import moe_experts
from moesys.kernels.first_derivatives import InputGradients, first_derivatives_only
from moesys.kernels.routing import route_reference
from moesys.kernels.torch_internals import refuse_function_transforms
from moesys.overlap.executor import Arrivals, BackwardInputs
from moesys.overlap.experts_cpu import SWIGLU, CpuBackward, CpuExperts, CpuForward, Projection
from moesys.overlap.routes import ChunkRows, SlotRows
from moesys.torch_private import unseen_by_selective_checkpoints

NAME = "moesys"
OLDEST_TRANSFORMERS = (5, 23)


def register(strategy: Strategy | None = None) -> str:
    """Makes the name "moesys" known to transformers in this process, and returns it.

    As ``experts_implementation="moesys"`` it computes the experts of one rank. Models choose it when they are made (an
    argument of ``from_pretrained`` and ``from_config``), or later by ``model.set_experts_implementation("moesys")``.

    With a ``strategy``, ``DistributedConfig(ep_implementation="moesys", ...)`` runs models under it: those that are
    made from now on, until another strategy is registered.

    Raises ImportError if transformers is missing or too old, and ValueError if transformers' models cannot run the
    strategy.
    """
    check_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ExpertsInterface.register(NAME, partial(experts_forward, PagePool()))
    if strategy is not None:
        # Imported here, because one rank needs none of it.
        from transformers.distributed.expert_parallel import EPImplementationInterface

        from moesys.hf.expert_parallel import implementation_of

        EPImplementationInterface.register(NAME, implementation_of(strategy))
    return NAME


def check_transformers() -> None:
    """Raises ImportError if transformers is missing or too old."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"moesys.hf needs transformers: {_advice()}") from error
    version = transformers.__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TRANSFORMERS:
        raise ImportError(f"transformers {version} is too old for moesys.hf: {_advice()}")


def _advice() -> str:
    return f"pip install 'transformers>={'.'.join(map(str, OLDEST_TRANSFORMERS))}'"


def experts_forward(
    memory: PagePool, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns the output [T, H] of transformers' experts ``module`` for tokens [T, H], and the experts and weights
    [T, K] that their router chose. A choice of an expert that the module does not have belongs to another rank and adds
    nothing.

    Uses the kernels on a GPU if they support the module; computes row by row otherwise, with ``memory`` for large
    intermediate results.
    """
    experts = ExpertsModule.of(module)
    forward = _by_kernels if hidden_states.is_cuda and experts.has_kernels else _by_rows
    return forward(experts, memory, module, hidden_states, top_k_index, top_k_weights)


def _by_kernels(
    experts: ExpertsModule, _: PagePool, module: nn.Module, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    gate_up_EUH, down_EHI = (getattr(module, name) for name in experts.names)
    dtype = compute_dtype(gate_up_EUH)
    y_TH = moe_experts(x_TH.to(dtype), index_TK, weight_TK, gate_up_EUH.to(dtype), down_EHI.to(dtype), "swiglu")
    return y_TH.to(x_TH.dtype)


# A compiled graph cannot hold a loop over the experts that have tokens.
@torch.compiler.disable
@unseen_by_selective_checkpoints
def _by_rows(
    experts: ExpertsModule, memory: PagePool, module: nn.Module, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    refuse_function_transforms(x_TH, weight_TK)
    parameters = *(getattr(module, name) for name in experts.names), *experts.parameters
    dtype = compute_dtype(parameters[0])
    y_TH: Tensor = ModuleFunction.apply(experts, dtype, memory, x_TH, weight_TK, index_TK, *parameters)
    return y_TH


class ModuleFunction(torch.autograd.Function):
    """The autograd function of an experts module: y [T, H] from x [T, H], routing weights and experts [T, K], and all
    parameters of the module.

    It saves x, the pre-activations and the routing, and recomputes what else backward needs: the gradient of a routing
    weight is the product of the activation and the gradient behind the down projection (SonicMoE's dataflow).
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
            call = _Call(experts, dtype, memory, parameters, [None] * len(parameters))
            rows = expert_rows(index_TK, len(parameters[0]), call.compute.min_rows)
            y_TH, h_PU = call.forward(rows, x_TH, weight_TK)
        ctx.description = experts, dtype, memory, rows.rows, rows.slots
        ctx.save_for_backward(x_TH, weight_TK, h_PU, rows.gather_P, rows.return_M, *parameters)
        return y_TH

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[InputGradients, Sequence[Tensor]]:
        experts, dtype, memory, first_and_last, slots = ctx.description
        x_TH, weight_TK, h_PU, gather_P, return_M, *parameters = ctx.saved_tensors
        needs_x, needs_weight, _, *needs_parameters = ctx.needs_input_grad[3:]
        gradients = [
            torch.empty_like(parameter) if needed else None
            for parameter, needed in zip(parameters, needs_parameters, strict=True)
        ]
        with torch.autocast(x_TH.device.type, enabled=False):
            call = _Call(experts, dtype, memory, parameters, gradients)
            rows = ChunkRows(first_and_last, slots, gather_P, return_M)
            dx_TH, dweight_TK = call.backward(rows, grad_outputs[0], x_TH, weight_TK, h_PU)
        of_tokens = dx_TH if needs_x else None, dweight_TK if needs_weight else None
        return (None, None, None, *of_tokens, None, *gradients), (x_TH, weight_TK, *parameters)


class _Call:
    """One forward or backward pass of an experts module by ``CpuExperts``.

    ``parameters``: up and down, their biases if there are any, and those of activation and norm. ``gradients``: the
    tensors that their gradients are written to; None for a gradient that is not needed.
    """

    def __init__(
        self,
        experts: ExpertsModule,
        dtype: torch.dtype,
        memory: PagePool,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        self.dtype, self.wide = dtype, torch.promote_types(dtype, torch.float32)
        named = len(experts.names)
        self.others = ParameterGradients(parameters[named:], gradients[named:])
        up, down = parameters[:2]
        up_bias, down_bias = parameters[2:4] if named == 4 else (None, None)
        dup_bias, ddown_bias = gradients[2:4] if named == 4 else (None, None)
        up_bias_of, down_bias_of = (None if bias is None else bias.__getitem__ for bias in (up_bias, down_bias))
        self.up = Projection(up.__getitem__, up_bias_of, experts.transposed, gradients[0], dup_bias)
        self.down = Projection(down.__getitem__, down_bias_of, experts.transposed, gradients[1], ddown_bias)
        transposed, device = experts.transposed, up.device
        # [U, H] and [H, I], whichever way they lie.
        (self.up_width, H), (_, I) = (tuple(p.mT.shape[1:] if transposed else p.shape[1:]) for p in (up, down))
        up_rule = projection_rule(H, self.up_width, dtype, device.type, transposed)
        down_rule = projection_rule(I, H, dtype, device.type, transposed)
        as_kernel = experts.swiglu and self.wide == torch.float32
        self.compute = CpuExperts(
            RowRule.all_of([up_rule, down_rule]),
            SWIGLU if as_kernel else row_function(experts.activation, self.others, self.up_width // I),
            None if experts.norm is None else row_function(experts.norm, self.others),
        )
        self.scratch = Scratch(memory, device)

    def forward(self, rows: ChunkRows, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y [T, H] in x's dtype, and pre-activations [P, U]."""
        h_PU = self.scratch.memory.empty((len(rows.gather_P), self.up_width), self.dtype, x_TH.device)
        x = Arrivals(x_TH.to(self.dtype), _token_of_choice(weight_TK))
        y_PH = CpuForward(self.compute, self.up, self.down, self.scratch, x, h_PU).experts(rows)
        weight_TK = self._weights(rows, weight_TK)
        y_TH = x_TH.new_empty(x_TH.shape)
        self.compute.combine(y_PH, rows.return_M.view_as(weight_TK), weight_TK, y_TH, self.scratch)
        return y_TH, h_PU

    def backward(
        self, rows: ChunkRows, dy_TH: Tensor, x_TH: Tensor, weight_TK: Tensor, h_PU: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x and of the routing weights, and writes those of parameters."""
        token_M = _token_of_choice(weight_TK)
        dy, x = Arrivals(dy_TH, token_M), Arrivals(x_TH.to(self.dtype), token_M)
        inputs = BackwardInputs(dy, x, h_PU, self._weights(rows, weight_TK).view(-1), None)
        backward_pass = CpuBackward(self.compute, self.up, self.down, self.scratch, inputs, order=())
        dx_PH, dweight_M = backward_pass.experts(rows)
        backward_pass.weight_gradients()
        self.others.write()
        dx_TH = x_TH.new_empty(x_TH.shape)
        self.compute.combine(dx_PH, rows.return_M.view_as(weight_TK), None, dx_TH, self.scratch)
        return dx_TH, dweight_M.view_as(weight_TK).to(weight_TK.dtype)

    def _weights(self, rows: ChunkRows, weight_TK: Tensor) -> Tensor:
        """Returns wide routing weights [T, K]. The weight of a choice without a row may be anything, and
        becomes zero.
        """
        has_row_TK = (rows.return_M < rows.num_rows - 1).view_as(weight_TK)
        return torch.where(has_row_TK, weight_TK.to(self.wide), 0)


def _token_of_choice(weight_TK: Tensor) -> Tensor:
    """Returns the token of each choice, int64 [M]."""
    return torch.arange(weight_TK.numel(), device=weight_TK.device) // weight_TK.shape[1]


def expert_rows(index_TK: Tensor, num_experts: int, min_rows: int) -> ChunkRows:
    """Returns the rows of all experts, each expert's padded to the least number that a ``RowRule`` allows.

    A choice t·K + k is an arrival. Behind the rows of experts lies one row without an expert, for choices of experts
    that the module does not have.
    """
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
    return ChunkRows(
        rows=(0, len(expert_P) + 1),
        slots=tuple(SlotRows(e, starts[e], valids[e], paddeds[e]) for e in range(num_experts) if valids[e]),
        gather_P=routing.entry_P[first_E[expert_P] + offset_P],
        return_M=torch.where(kept_TK, routing.row_TK + shift_TK, len(expert_P)).int().view(-1),
    )
