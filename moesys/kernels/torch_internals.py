"""The parts of torch that kernels use and that are not public, each with what it needs and what happens without it.

The rest of moesys has a file of its own, ``moesys/torch_private.py``: kernels import nothing of moesys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

HAS_ONEDNN = torch.backends.mkldnn.is_available()


def onednn_product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Returns ``x @ weightᵀ``, float32 [M, N], of CPU tensors, by oneDNN; only where ``HAS_ONEDNN``.

    Needs the operator ``mkldnn::_linear_pointwise``, which ``torch.compile`` uses for layers on the CPU. Without it
    products with large weights raise AttributeError; with ``HAS_ONEDNN = False`` they go to ``torch.mm``, 5 to 15 %
    slower beside MKL.
    """
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, None, "none", [], "")


def refuse_function_transforms(*tensors: Tensor | None) -> None:
    """Raises RuntimeError inside a transform of ``torch.func``, for batched gradients and for tensors of forward-mode
    differentiation: kernels would fail to read their memory, or lose their tangents.

    Needs ``torch._C._functorch``: ``peek_interpreter_stack``, which gives None outside of transforms, and
    ``is_legacy_batchedtensor``, for what ``is_grads_batched`` makes. Without them the first forward of experts, or
    their first backward, raises AttributeError.
    """
    functorch = torch._C._functorch
    given = [t for t in tensors if t is not None]
    transformed = functorch.peek_interpreter_stack() is not None
    if transformed or any(functorch.is_legacy_batchedtensor(t) or unpack_dual(t).tangent is not None for t in given):
        raise RuntimeError(
            "experts of moesys run inside a transform of torch.func (grad, vjp, jvp, vmap, ...), in forward-mode "
            "differentiation or with batched gradients (is_grads_batched=True, vectorize=True), and support none of "
            "them; call backward() or torch.autograd.grad outside of transforms, once for each gradient"
        )


def symmetric_arena(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """Maps as many bytes of every rank's GPU into all ranks of ``group``. Collective.

    Returns this rank's bytes as uint8, cleared, then the address at which every rank's begin as seen from here, and a
    handle that keeps the mapping alive. Raises RuntimeError where torch cannot map a peer's memory, or where its handle
    says of this rank's another place than they have.

    Needs ``torch.distributed._symmetric_memory`` (``empty``, ``rendezvous``, ``buffer_ptrs``, ``rank`` and, where torch
    has it, ``offset`` of the handle: several tensors may lie in one mapped buffer). Without it MegaKernels between GPUs
    raise ImportError; nothing else uses it.
    """
    # Here, as builds of torch without CUDA may lack it.
    import torch.distributed._symmetric_memory as symmetric_memory

    arena = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    arena.zero_()
    handle = symmetric_memory.rendezvous(arena, group)
    # Before torch 2.9 a buffer had one tensor.
    bases = [address + getattr(handle, "offset", 0) for address in handle.buffer_ptrs]
    if bases[handle.rank] != arena.data_ptr():
        raise RuntimeError(
            f"torch's symmetric memory says that this rank's arena begins at {bases[handle.rank]:#x}, but it does at "
            f"{arena.data_ptr():#x}: this torch numbers its buffers in another way; use Sequential() or Pipelined()"
        )
    return arena, bases, handle
