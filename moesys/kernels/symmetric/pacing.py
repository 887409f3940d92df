"""A link of a declared bandwidth, for ranks that share a device, where copies between them cost next to nothing.

Each rank has one link, which sends its messages one after another: a task that moves rows between ranks ends, and
raises its flags, no sooner than a link of this bandwidth would have sent its bytes. So communication takes a chosen
part of the time, and its overlap can be measured. Without a link, kernels contain none of this code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.experts.numerics import INTERPRETED
from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.signals import nap, now_ns

# Places in a link.
FREE_AT, BYTES_PER_MS = tl.constexpr(0), tl.constexpr(1)
NS_PER_MS = tl.constexpr(1_000_000)


def paced_link(gb_per_s: float, device: torch.device) -> Tensor:
    """Returns int64 [2]: when the link will be free, in ns of the device's clock; and 10^6 times ``gb_per_s``."""
    return torch.tensor([0, round(gb_per_s * NS_PER_MS.value)], dtype=torch.int64, device=device)


@triton.jit
def set_off(link_ptr, away, row_bytes):  # type: ignore[no-untyped-def]
    """Returns when the rows that are ``away``, of ``row_bytes`` each, will have passed the link if they set off now."""
    if link_ptr is None:
        return 0
    else:
        num_bytes = tl.sum(away.to(tl.int64), 0) * row_bytes
        took_ns = num_bytes * NS_PER_MS // tl.load(link_ptr + BYTES_PER_MS)
        start_ns = now_ns()
        found = tl.atomic_add(link_ptr + FREE_AT, 0, sem="relaxed", scope="gpu")
        free_at, through = found - 1, found
        while found != free_at:
            free_at = found
            through = tl.maximum(free_at, start_ns) + took_ns
            found = tl.atomic_cas(link_ptr + FREE_AT, free_at, through, sem="relaxed", scope="gpu")
        return through


@triton.jit
def arrive(link_ptr, through):  # type: ignore[no-untyped-def]
    """Waits until the time ``through``."""
    if link_ptr is not None:
        at_ns = now_ns()
        while at_ns < through:
            if INTERPRETED:
                nap()
            at_ns = now_ns()


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
