"""The bytes of tensors that live at the same time in a training step, by the part of the program that made them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The part of a tensor is that of the innermost function on the stack whose module is one of these or below one of
# these. None: the function is a helper of all parts. Paths would depend on where a checkout lies and what it is called.
_PART_OF_MODULE: tuple[tuple[str, str | None], ...] = (
    ("moesys.kernels.cpu.page_pool", None),
    ("moesys.moe.store", "slots"),
    ("moesys.moe.whole_experts", "slots"),
    ("moesys.moe.sharded_experts", "slots"),
    ("moesys.overlap.chunked", "exchange"),
    ("moesys.overlap.comm", "exchange"),
    ("moesys", "experts"),
    ("transformers.integrations.moe", "experts"),
    ("transformers.distributed.expert_parallel", "exchange"),
    ("transformers", "rest"),
    ("torch.distributed.fsdp", "fsdp"),
    ("torch.distributed", "exchange"),
)


def live_at_peak(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Mapping[str, int]:
    """Returns the bytes of the CPU tensors that live when most bytes do during ``step``, by part.

    The parts are ``parameters`` and ``optimizer`` (its state), ``fsdp`` (gathered parameters, and gradients of
    parameters), ``slots`` (experts that are brought to a rank, and gradients of experts), ``exchange`` (rows on their
    way between ranks), ``experts`` and ``rest`` (other activations of experts and of the rest of the model),
    ``backward`` (tensors that autograd's own functions make) and ``other``.
    """
    live = _LiveStorages()
    for parameter in model.parameters():
        live.add(parameter, "parameters")
    for state in optimizer.state.values():
        for each in state.values():
            live.add(each, "optimizer")
    # Dead tensors that Python has not collected yet would count.
    gc.collect()
    with live:
        step()
    return live.peak


class _LiveStorages(TorchDispatchMode):
    """Follows storages from the first operation that takes or returns them until they are freed. Memory that an
    operation frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref[Any], str]] = {}
        self.peak: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # DTensor then calls operations of local tensors, which come here.
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            self.add(each)
        found: Counter[str] = Counter()
        for key, (reference, part) in list(self._storages.items()):
            if (storage := reference()) is None:
                del self._storages[key]
            else:
                # FSDP resizes its storages.
                found[part] += storage.nbytes()
        if found.total() > self.peak.total():
            self.peak = found
        return result

    def add(self, value: object, part: str = "") -> None:
        """Follows the storage of ``value`` if it is a tensor on the CPU, as a storage of ``part``."""
        tensor = value.to_local() if isinstance(value, DTensor) else value
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        # The address of a storage that was freed may be another one's.
        if known is None or known[0]() is None:
            self._storages[storage._cdata] = weakref.ref(storage), part or _part()


def _part() -> str:
    """Returns the part of the program that runs."""
    frame = sys._getframe(1)
    while frame is not None:
        name = f"{frame.f_globals.get('__name__')}."
        found = next((part for module, part in _PART_OF_MODULE if name.startswith(f"{module}.")), None)
        if found is not None:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return "other" if torch._C._current_autograd_node() is None else "backward"
