"""What the kernels use of torch that is not public, each with what it needs of torch and what happens without it.

The rest of moesys has a file of its own, ``moesys/torch_private.py``: kernels import nothing of moesys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available()


def onednn_product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Returns ``x @ weightᵀ``, float32 [M, N], of CPU tensors, by oneDNN; only where ``HAS_ONEDNN``.

    Needs the operator ``mkldnn::_linear_pointwise``, which ``torch.compile`` uses for layers on the CPU. Without it
    products with large weights raise AttributeError; with ``HAS_ONEDNN = False`` they go to ``torch.mm``, 5 to 15 %
    slower beside MKL.
    """
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, None, "none", [], "")


def symmetric_arena(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """Maps as many bytes of every rank's GPU into all ranks of ``group``. Collective.

    Returns this rank's bytes as uint8, cleared, then every rank's base address as seen from here, and a handle that
    keeps the mapping alive. Raises RuntimeError where torch cannot map a peer's memory.

    Needs ``torch.distributed._symmetric_memory`` (``empty``, ``rendezvous``, ``buffer_ptrs`` of the handle). Without it
    MegaKernels between GPUs raise ImportError; nothing else uses it.
    """
    # Here, as builds of torch without CUDA may lack it.
    import torch.distributed._symmetric_memory as symmetric_memory

    arena = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    arena.zero_()
    handle = symmetric_memory.rendezvous(arena, group)
    return arena, handle.buffer_ptrs, handle
