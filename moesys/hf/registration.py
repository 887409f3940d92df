"""What transformers calls for ``experts_implementation="moesys"``, and how it comes to know it.

The registered function has a layer's experts module, its tokens and their routing, and gives the weighted sum back.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor, nn

from moesys.config import Strategy
from moesys.hf.experts_module import ExpertsModule, compute_dtype
from moesys.hf.routed_experts import RoutedExperts
from moesys.kernels.cpu.page_pool import PagePool
from moesys.kernels.experts.experts import moe_experts
from moesys.kernels.torch_internals import refuse_function_transforms
from moesys.torch_private import unseen_by_selective_checkpoints

NAME = "moesys"
OLDEST_TRANSFORMERS = (5, 23)


def register(strategy: Strategy | None = None) -> str:
    """Makes the name "moesys" known to transformers in this process, and returns it.

    As ``experts_implementation="moesys"`` it computes the experts of one rank. Models choose it when they are made (an
    argument of ``from_pretrained`` and ``from_config``), or later by ``model.set_experts_implementation("moesys")``.

    With a ``strategy``, ``DistributedConfig(ep_implementation="moesys", ...)`` runs models under it: those that are
    made from now on, until another strategy is registered.

    Raises ImportError without transformers or with one that is too old, ValueError where transformers' models cannot
    run the strategy.
    """
    check_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ExpertsInterface.register(NAME, partial(experts_forward, PagePool()))
    if strategy is not None:
        # Here, as one rank needs none of it.
        from transformers.distributed.expert_parallel import EPImplementationInterface

        from moesys.hf.expert_parallel import implementation_of

        EPImplementationInterface.register(NAME, implementation_of(strategy))
    return NAME


def check_transformers() -> None:
    """Raises ImportError without transformers or with one that is too old."""
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
    """Output [T, H] of transformers' experts ``module`` for tokens [T, H] and the experts and weights [T, K] that they
    chose. An expert that the module does not have is another rank's: its choice counts for nothing.

    On a GPU by the kernels, where they compute the same; else row by row, with ``memory`` for large intermediate
    results.
    """
    experts = ExpertsModule.of(module)
    forward = _by_kernels if hidden_states.is_cuda and experts.has_kernels else _by_rows
    return forward(experts, memory, module, hidden_states, top_k_index, top_k_weights)


def _by_kernels(
    experts: ExpertsModule,
    _: PagePool,
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    gate_up_EUH, down_EHI = (getattr(module, name) for name in experts.names)
    dtype = compute_dtype(gate_up_EUH)
    y_TH = moe_experts(
        hidden_states.to(dtype), top_k_index, top_k_weights, gate_up_EUH.to(dtype), down_EHI.to(dtype), "swiglu"
    )
    return y_TH.to(hidden_states.dtype)


# A loop over the experts that have tokens is nothing that a compiled graph could hold.
@torch.compiler.disable
@unseen_by_selective_checkpoints
def _by_rows(
    experts: ExpertsModule,
    memory: PagePool,
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    refuse_function_transforms(hidden_states, top_k_weights)
    projections = [getattr(module, name) for name in experts.names]
    dtype = compute_dtype(projections[0])
    y_TH: Tensor = RoutedExperts.apply(
        experts, dtype, memory, hidden_states, top_k_weights, top_k_index, *projections, *experts.parameters
    )
    return y_TH
