"""transformers' experts on one rank (``experts_implementation="moesys"``), and the registration with transformers.

Rows are in order of (expert, token, choice) and computed as ``overlap.experts_cpu`` computes them: a token's output
does not depend on other tokens, and equal inputs give equal bits. On a GPU the kernels of ``kernels.experts`` compute
modules that they support.

T tokens, H hidden, I expert width, U rows of the up projection (2I with a gate), K top-k, M = T·K choices, E experts,
P rows of experts with their padding. *Wide* is float32, or float64 where products are float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesys.config import Strategy
from moesys.hf.experts_module import ExpertsModule, compute_dtype, with_factors
from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.kernels.cpu.row_invariant_gemm import RowRule, projection_rule
from moesys.kernels.cpu.row_invariant_ops import ParameterGradients, row_function
from moesys.kernels.experts.experts import moe_experts
from moesys.kernels.first_derivatives import InputGradients, first_derivatives_only
from moesys.kernels.torch_internals import refuse_function_transforms
from moesys.moe.masters import ExpertForm, Part
from moesys.moe.store import RestoredExperts
from moesys.overlap.executor import (
    NUM_FACTORS,
    Adapters,
    Arrivals,
    BackwardInputs,
    ExpertGradients,
    ExpertWeights,
    zeros_like_factors,
)
from moesys.overlap.experts_cpu import SWIGLU, CpuExperts
from moesys.overlap.routes import SortedRoutes, sort_rows
from moesys.torch_private import unseen_by_selective_checkpoints

NAME = "moesys"
OLDEST_TRANSFORMERS = (5, 23)


def register(strategy: Strategy | None = None) -> str:
    """Makes the name "moesys" known to transformers in this process, and returns it.

    As ``experts_implementation="moesys"`` it computes the experts of one rank. Models choose it when they are made (an
    argument of ``from_pretrained`` and ``from_config``), or later by ``model.set_experts_implementation("moesys")``.
    Padding is known to models that were made after the first call.

    With a ``strategy``, ``DistributedConfig(ep_implementation="moesys", ...)`` runs models under it: those that are
    made from now on, until another strategy is registered.

    Raises ImportError if transformers is missing or too old, and ValueError if transformers' models cannot run the
    strategy.
    """
    check_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    # Follows the padding of models that are made from now on.
    from moesys.hf.padding import real_tokens

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ExpertsInterface.register(NAME, partial(experts_forward, PagePool(), real_tokens))
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
    memory: PagePool,
    real_tokens: Callable[[Tensor], Tensor | None],
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Returns the output [T, H] of transformers' experts ``module`` for tokens [T, H], and the experts and weights
    [T, K] that their router chose. A choice of an expert that the module does not have belongs to another rank and adds
    nothing, as do those of padding.

    Uses the kernels on a GPU if they support the module; computes row by row otherwise, with ``memory`` for large
    intermediate results.
    """
    experts = ExpertsModule.of(module)
    if (mask_T := real_tokens(hidden_states)) is not None:
        top_k_index = top_k_index.masked_fill(~mask_T[:, None], -1)
    forward = _by_kernels if hidden_states.is_cuda and experts.has_kernels else _by_rows
    return forward(experts, memory, module, hidden_states, top_k_index, top_k_weights)


def _by_kernels(
    experts: ExpertsModule, _: PagePool, module: nn.Module, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    read = [with_factors(module, name, experts.transposed) for name in experts.names]
    dtype = compute_dtype(read[0][0])
    factors = [None if factor is None else factor.to(dtype) for _, of_matrix in read for factor in of_matrix]
    gate_up_EUH, down_EHI = (matrix.to(dtype) for matrix, _ in read)
    y_TH = moe_experts(x_TH.to(dtype), index_TK, weight_TK, gate_up_EUH, down_EHI, factors=factors)
    return y_TH.to(x_TH.dtype)


# A compiled graph cannot hold a loop over the experts that have tokens.
@torch.compiler.disable
@unseen_by_selective_checkpoints
def _by_rows(
    experts: ExpertsModule, memory: PagePool, module: nn.Module, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    refuse_function_transforms(x_TH, weight_TK)
    read = [with_factors(module, name, experts.transposed) for name in experts.names]
    parameters = *(parameter for parameter, _ in read), *experts.parameters
    factors = [factor for _, of_parameter in read[:2] for factor in of_parameter]
    dtype = compute_dtype(parameters[0])
    y_TH: Tensor = ModuleFunction.apply(experts, dtype, memory, x_TH, weight_TK, index_TK, *parameters, *factors)
    return y_TH


class ModuleFunction(torch.autograd.Function):
    """The autograd function of an experts module: y [T, H] from x [T, H], routing weights and experts [T, K], all
    parameters of the module, and the factors of LoRA on its projections.

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
        *learnt: Any,
    ) -> Tensor:
        parameters, factors = learnt[:-NUM_FACTORS], learnt[-NUM_FACTORS:]
        with torch.autocast(x_TH.device.type, enabled=False):
            compute = compute_of(experts, dtype, parameters, ParameterGradients((), ()))
            routes = routes_of(index_TK, len(parameters[0]), compute.min_rows)
            scratch, held = Scratch(memory, x_TH.device), _held(experts, dtype, memory, parameters)
            held.adapters = Adapters.of(range(len(held)), factors)
            x = Arrivals(x_TH.to(dtype), _token_of_choice(weight_TK))
            forward_pass = compute.forward(routes, x, held, scratch)
            y_PH, wide_TK = forward_pass.experts(routes.chunk), _wide_weights(routes, weight_TK, dtype)
            y_TH = x_TH.new_empty(x_TH.shape)
            compute.combine(y_PH, routes.chunk.return_M.view_as(wide_TK), wide_TK, y_TH, scratch)
        ctx.description = experts, dtype, memory, routes
        ctx.save_for_backward(x_TH, weight_TK, forward_pass.pre_activations(), *learnt)
        return y_TH

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[InputGradients, Sequence[Tensor]]:
        experts, dtype, memory, routes = ctx.description
        x_TH, weight_TK, h_PU, *learnt = ctx.saved_tensors
        parameters, factors = learnt[:-NUM_FACTORS], learnt[-NUM_FACTORS:]
        needs_x, needs_weight, _, *needs_parameters = ctx.needs_input_grad[3:-NUM_FACTORS]
        dfactors = zeros_like_factors(factors)
        gradients = [
            torch.empty_like(parameter) if needed else None
            for parameter, needed in zip(parameters, needs_parameters, strict=True)
        ]
        named = len(experts.names)
        others = ParameterGradients(parameters[named:], gradients[named:])
        with torch.autocast(x_TH.device.type, enabled=False):
            compute, held = compute_of(experts, dtype, parameters, others), _held(experts, dtype, memory, parameters)
            held.adapters = Adapters.of(range(len(held)), factors, dfactors)
            scratch, token_M = Scratch(memory, x_TH.device), _token_of_choice(weight_TK)
            dy, x = Arrivals(grad_outputs[0], token_M), Arrivals(x_TH.to(dtype), token_M)
            weight_M = _wide_weights(routes, weight_TK, dtype).view(-1)
            # The gradients of frozen parameters are None.
            inputs = BackwardInputs(dy, x, h_PU, weight_M, ExpertGradients(*gradients[:named]))  # type: ignore[arg-type]
            backward_pass = compute.backward(routes, inputs, held, scratch)
            dx_PH, dweight_M = backward_pass.experts(routes.chunk)
            backward_pass.weight_gradients()
            others.write()
            dx_TH = x_TH.new_empty(x_TH.shape)
            compute.combine(dx_PH, routes.chunk.return_M.view_as(weight_TK), None, dx_TH, scratch)
            dweight_TK = dweight_M.view_as(weight_TK).to(weight_TK.dtype)
        of_tokens = dx_TH if needs_x else None, dweight_TK if needs_weight else None
        return (None, None, None, *of_tokens, None, *gradients, *dfactors), (x_TH, weight_TK, *learnt)


def compute_of(
    experts: ExpertsModule, dtype: torch.dtype, parameters: Sequence[Tensor], others: ParameterGradients
) -> CpuExperts:
    """Returns what computes a module in ``dtype``. ``parameters``: up and down, their biases if there are any, and
    those of activation and norm; the gradients of the latter are added to ``others``.
    """
    up, down = parameters[:2]
    transposed, device_type = experts.transposed, up.device.type
    # [U, H] and [H, I], whichever way they lie.
    (U, H), (_, I) = (tuple(each.mT.shape[1:] if transposed else each.shape[1:]) for each in (up, down))
    rules = [projection_rule(*sizes, dtype, device_type, transposed) for sizes in ((H, U), (I, H))]
    as_kernel = experts.swiglu and dtype != torch.float64
    activation = SWIGLU if as_kernel else row_function(experts.activation, others, U // I)
    norm = None if experts.norm is None else row_function(experts.norm, others)
    return CpuExperts(RowRule.all_of(rules), activation, norm, transposed)


def routes_of(index_TK: Tensor, num_experts: int, min_rows: int) -> SortedRoutes:
    """Returns the rows of all experts. A choice of an expert that the module does not have gets a row without a slot,
    behind all others.
    """
    kept_TK = (index_TK >= 0) & (index_TK < num_experts)
    routes = sort_rows(torch.where(kept_TK, index_TK, num_experts), num_experts + 1, min_rows)
    slots = tuple(slot for slot in routes.chunk.slots if slot.slot < num_experts)
    return replace(routes, chunk=replace(routes.chunk, slots=slots))


def _held(
    experts: ExpertsModule, dtype: torch.dtype, memory: PagePool, parameters: Sequence[Tensor]
) -> RestoredExperts:
    """Returns the experts of a module as one rank holds them."""
    projections = parameters[: len(experts.names)]
    named = zip(ExpertWeights._fields, projections, strict=False)
    form = ExpertForm(tuple(Part(name, tuple(each.shape[1:])) for name, each in named))
    return RestoredExperts(form, dtype, memory, projections[0].device, ExpertWeights(*projections))


def _wide_weights(routes: SortedRoutes, weight_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns wide routing weights [T, K]. The weight of a choice without a slot may be anything, and becomes zero."""
    has_slot_TK = (routes.chunk.return_M < sum(slot.padded for slot in routes.chunk.slots)).view_as(weight_TK)
    return torch.where(has_slot_TK, weight_TK.to(torch.promote_types(dtype, torch.float32)), 0)


def _token_of_choice(weight_TK: Tensor) -> Tensor:
    """Returns the token of each choice, int64 [M]."""
    return torch.arange(weight_TK.numel(), device=weight_TK.device) // weight_TK.shape[1]
