"""Copies of numbers between host and device that are waited for only when the numbers are needed.

A copy from or to memory that is not pinned makes the host wait for all that the device was given before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | npt.NDArray[np.int64], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns the host's ``values`` on ``device``, contiguous, behind what the current stream has to do; the host goes
    on.
    """
    # Arrays of numpy may have any strides, and kernels read numbers that are contiguous.
    device, host = torch.device(device), torch.as_tensor(np.ascontiguousarray(values, dtype=np.int64)).to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class HostCopy:
    """A device's ``values`` on their way to the host, behind what the current stream has to do until then."""

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def ready(self) -> bool:
        """Returns whether the values have arrived on the host, without waiting."""
        return self._copied is None or self._copied.query()

    def read(self) -> npt.NDArray[np.int64]:
        """Waits until the values are on the host, and returns them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.numpy()
