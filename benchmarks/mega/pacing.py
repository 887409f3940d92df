"""Links of a declared bandwidth, for ranks that share a device, where copies between them cost next to nothing.

Each rank has one link, which sends its messages one after another: a task that moves rows between ranks ends, and
raises its flags, no sooner than a link of this bandwidth would have sent its bytes. So communication takes a chosen
part of the time, and its overlap can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.signals import FREE_AT, NS_PER_MS, arrive, set_off


def paced_link(gb_per_s: float, device: torch.device) -> Tensor:
    """Returns int64 [2]: when the link will be free, in ns of the device's clock; and 10^6 times ``gb_per_s``."""
    return torch.tensor([0, round(gb_per_s * NS_PER_MS.value)], dtype=torch.int64, device=device)


@contextmanager
def paced_copies(link: Tensor | None, num_bytes: int) -> Iterator[None]:
    """Paces copies on one stream that no kernel of ours makes: what follows begins no sooner than they would have
    passed the link.
    """
    if link is not None:
        _set_off[(1,)](link, num_bytes)
    yield
    if link is not None:
        _arrive[(1,)](link)


@kernel(do_not_specialize=["num_bytes"])
def _set_off(link_ptr, num_bytes):  # type: ignore[no-untyped-def]
    set_off(link_ptr, tl.full([1], 1, tl.int32), tl.cast(num_bytes, tl.int64))


@kernel
def _arrive(link_ptr):  # type: ignore[no-untyped-def]
    arrive(link_ptr, tl.load(link_ptr + FREE_AT))
