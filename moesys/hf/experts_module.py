"""The description of an experts module of transformers: what it computes, and with which parameters; and LoRA of PEFT
on these, of which each rank computes that of the experts that it has.

PEFT wraps an experts module once for each adapted parameter (``target_parameters``), wrapper around wrapper. Its own
forward puts the sum W + s·B·A for all experts in the parameter's place. Here that is left out: experts multiply by the
factors of their matrices, and read the sums of their biases. The gradients of B and A are zero for experts that a rank
does not compute, so FSDP's mean over the ranks is what it is for other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from moesys.moe.outside import mean_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ExpertsModule:
    """The computation of an experts module, in the terms of transformers' ``use_experts_implementation``.

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
        """Returns whether ``kernels.experts`` computes the same: SwiGLU, with nothing besides, in 32 or 16 bits."""
        plain = self.swiglu and not self.transposed and self.norm is None and len(self.names) == 2
        return plain and self.dtype != torch.float64

    @staticmethod
    def of(module: Any) -> ExpertsModule:
        names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        if module.has_bias:
            names += [f"{name}_bias" for name in names]
        # older versions do not have it
        has_norm = getattr(module, "has_post_expert_norm", False)
        return ExpertsModule(
            names=tuple(names),
            transposed=module.is_transposed,
            swiglu=_is_swiglu(module),
            dtype=module.down_proj.dtype,
            activation=module._apply_gate if module.has_gate else module.act_fn,
            norm=module.post_expert_norm if has_norm else None,
            parameters=tuple(p for name, p in module.named_parameters() if name not in names),
        )


def is_experts(module: nn.Module) -> bool:
    """Returns whether transformers has made this module one of experts."""
    # The class is checked, because PEFT's wrappers forward attributes of the module inside.
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def _is_swiglu(module: Any) -> bool:
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    if not module.has_gate or type(module)._apply_gate is not moe._default_apply_gate:
        return False
    return module.act_fn is nn.functional.silu or isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def compute_dtype(weight: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype of the products: autocast's, or else ``dtype``, by default that of the weights."""
    if weight.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f'experts have dtype {weight.dtype}; experts_implementation="moesys" takes {names}')
    device_type = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype or weight.dtype


def is_adapter(module: nn.Module) -> bool:
    """Returns whether a module is PEFT's LoRA on one parameter of the module inside."""
    return (type(module).__module__, type(module).__name__) == ("peft.tuners.lora.layer", "ParamWrapper")


def adapters_of(model: nn.Module) -> dict[nn.Module, list[Any]]:
    """Returns the LoRA around each experts module of ``model`` that has some, one for each parameter.

    Raises ValueError for experts inside of an adapter of another kind.
    """
    found: dict[nn.Module, list[Any]] = {}
    for module in model.modules():
        inner = module
        while (base := inner._modules.get("base_layer")) is not None:
            inner = base
        if inner is module or not is_experts(inner):
            continue
        if not is_adapter(module):
            raise ValueError(
                f"{type(inner).__name__} has an adapter of type {type(module).__name__}, and moesys runs experts over "
                "ranks with no other adapters than LoRA of PEFT on their parameters; use "
                "LoraConfig(target_parameters=...), or leave experts out of what is adapted"
            )
        found.setdefault(inner, []).append(module)
    return found


def bypass(adapters: Sequence[Any]) -> None:
    """Makes wrappers leave what they would add to the experts inside, and refuse what needs whole parameters. Declares
    their matrices, those of each expert, for ``Muon``.
    """
    for adapter in adapters:
        adapter.forward = partial(_forward, adapter)
        for factors in (adapter.lora_A, adapter.lora_B):
            views = partial(_matrices, adapter.num_experts, factors is adapter.lora_A)
            for factor in factors.values():
                factor.__dict__["moesys_matrices"] = {"weight": views}
        for name in ("merge", "unmerge", "unload_and_optionally_merge_module"):
            setattr(adapter, name, partial(_refuse, adapter))


def _matrices(num_experts: int, of_rows: bool, factor: Tensor) -> dict[str, Tensor]:
    """Returns the matrices of experts in a factor: rows of A [1, E·r, in], or each E-th column of B [1, out, r·E]."""
    if of_rows:
        return {"": factor.flatten(0, 1).unflatten(0, (len(factor) * num_experts, factor.shape[1] // num_experts))}
    return {"": factor.unflatten(2, (-1, num_experts)).permute(0, 3, 1, 2).flatten(0, 1)}


def _forward(adapter: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    adapter._check_forward_args(x, *args, **kwargs)
    if adapter.disable_adapters and adapter.merged:
        adapter.unmerge()
    y: Tensor = adapter.base_layer(x, *args, **kwargs)
    return y


def _refuse(adapter: Any, *_args: object, **_kwargs: object) -> NoReturn:
    raise ValueError(
        f"{adapter.parameter_name} of experts is sharded over ranks, and its adapter cannot be merged, unmerged or "
        "unloaded here; save the adapter, load it in one process (PeftModel.from_pretrained), and do it there"
    )


def factors_of(adapter: Any | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns the factors [E, r, in] and [E, out, r] of what the active LoRA of ``adapter`` adds to a parameter of all
    experts, with zeros up to the next multiple of 16 for r; None where that is nothing.
    """
    if adapter is None or adapter.disable_adapters or adapter.merged:
        return None, None
    active = [each for each in adapter.active_adapters if each in adapter.lora_A]
    if not active:
        return None, None
    E = adapter.num_experts
    inward = [adapter.lora_A[each].weight.unflatten(0, (E, -1)) for each in active]
    outward = [adapter.lora_B[each].weight.unflatten(1, (-1, E)).permute(2, 0, 1) for each in active]
    return _joined(inward, [each * adapter.scaling[name] for name, each in zip(active, outward, strict=True)])


def with_factors(module: Any, name: str, transposed: bool) -> tuple[Tensor, tuple[Tensor, Tensor] | tuple[None, None]]:
    """Returns the parameter ``name`` and the factors of LoRA on it, as ``factors_of`` does, where PEFT's own forward
    runs around the module: then it has put a single adapter in the parameter's place as a pair of factors. Without
    these, or in other releases of PEFT, the parameter is what PEFT computes.
    """
    proxies: Any = module.parametrizations[name] if is_parametrized(module, name) else []
    if len(proxies) != 1 or not all(hasattr(proxies[0], each) for each in ("lhs", "rhs", "scaling")):
        return getattr(module, name), (None, None)
    left, right = proxies[0].lhs, proxies[0].rhs
    if transposed:
        left, right = right.mT, left.mT
    return proxies.original, _joined([right], [left * proxies[0].scaling])


def _joined(inward: Sequence[Tensor], outward: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the factors of several adapters as one pair, with zeros up to the next multiple of 16 for r. In memory,
    outward ones are [E, r, out].
    """
    E, more = len(inward[0]), -sum(each.shape[1] for each in inward) % 16
    inward = [each.contiguous() for each in inward]
    turned = [each.permute(2, 0, 1).flatten(0, 1).contiguous() for each in outward]
    if more:
        inward.append(inward[0].new_zeros(E, more, inward[0].shape[2]))
        turned.append(turned[0].new_zeros(more * E, turned[0].shape[1]))
    # Copies of one pair would take as long as to turn it.
    inward_ERI, turned_RO = (torch.cat(of, dim) if len(of) > 1 else of[0] for of, dim in ((inward, 1), (turned, 0)))
    return inward_ERI, turned_RO.unflatten(0, (-1, E)).transpose(0, 1).contiguous().mT


def with_lora(module: Any, name: str, adapter: Any | None, mean_over: int | None) -> Tensor:
    """Returns the parameter ``name`` of an experts module, biases with what ``adapter`` adds to this rank's part of
    them. ``mean_over``: as of ``OutsideExperts``.

    While FSDP has the adapter sharded, this is an empty tensor, whose shape says that the part is not at hand.
    """
    parameter = module._parameters[name]
    # Before it is sharded, its form alone is read.
    if adapter is None or adapter.disable_adapters or adapter.merged or not isinstance(parameter, DTensor):
        return parameter
    biases_EN = parameter.to_local()
    if biases_EN.requires_grad and mean_over is not None:
        biases_EN.register_hook(partial(mean_of, mean_over))
    active = [each for each in adapter.active_adapters if each in adapter.lora_A]
    if any(isinstance(adapter.lora_A[each].weight, DTensor) for each in active):
        return biases_EN.new_empty(0)
    chunk = parameter.__create_chunk_list__()[0]
    rows, columns = (slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
    # As PEFT does, also under autocast. It takes biases for one matrix.
    with torch.autocast(biases_EN.device.type, enabled=False):
        for each in active:
            left, right = adapter.lora_B[each].weight[rows], adapter.lora_A[each].weight[:, columns]
            factors = left.to(biases_EN.dtype), right.to(biases_EN.dtype)
            biases_EN = torch.addmm(biases_EN, *factors, alpha=adapter.scaling[each])
    return biases_EN
