"""Copies by address, between memory that this rank can reach: its own, and arenas of peers (``heap``).

On NVIDIA's GPUs they are asynchronous copies of CuPy's runtime or the driver, which copy engines carry out beside the
multiprocessors.
Elsewhere programs move 16 bytes a thread at a time where both addresses allow it, else 4, else one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moesys.kernels.experts.numerics import INTERPRETED
from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.cuda_driver import copy_engines

# Words of 4 bytes that a program moves at a time: 16 bytes for each of 128 threads, eight times, all on their way
# before the first is stored; so many programs have half a megabyte on its way.
BLOCK_WORDS = 4096
PROGRAMS = 1 if INTERPRETED.value else 32
WARPS = 4


class Copy(NamedTuple):
    """``num_bytes`` from address ``source`` to address ``destination``; they do not overlap."""

    destination: int
    source: int
    num_bytes: int


def start_copies(copies: Sequence[Copy], device: torch.device, programs: int = PROGRAMS) -> None:
    """On the current stream of ``device``. ``programs``: how many move bytes where no copy engine does."""
    engine_copy = copy_engines(device)
    if engine_copy is not None:
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            for copy in copies:
                if copy.num_bytes:
                    engine_copy(*copy, stream)
    elif copies:
        copies_C3 = torch.tensor(copies, dtype=torch.int64, pin_memory=device.type == "cuda")
        _copy[(programs,)](copies_C3.to(device, non_blocking=True), len(copies), BLOCK=BLOCK_WORDS, num_warps=WARPS)


@kernel(do_not_specialize=["num_copies"])
def _copy(copies_ptr, num_copies, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for number in range(num_copies):
        destination = tl.load(copies_ptr + number * 3)
        source = tl.load(copies_ptr + number * 3 + 1)
        num_bytes = tl.load(copies_ptr + number * 3 + 2)
        apart = destination ^ source
        if apart % 16 == 0:
            _copy_words(destination, source, num_bytes, 16, BLOCK)
        elif apart % 4 == 0:
            _copy_words(destination, source, num_bytes, 4, BLOCK)
        else:
            _copy_bytes(destination, source, num_bytes, BLOCK)


@triton.jit
def _copy_words(destination, source, num_bytes, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Between addresses that are a multiple of ``width`` bytes apart."""
    head = tl.minimum((width - destination % width) % width, num_bytes)
    # Hints are for what is computed here: a compiler forgets those of arguments.
    words = tl.multiple_of((num_bytes - head) // width * (width // 4), width // 4)
    to = tl.multiple_of((destination + head).to(tl.pointer_type(tl.int32)), width)
    came = tl.multiple_of((source + head).to(tl.pointer_type(tl.int32)), width)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, words, tl.num_programs(0) * BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(to + word, tl.load(came + word, mask=word < words), mask=word < words)
    behind = head + words * 4
    _copy_bytes(destination, source, head, BLOCK)
    _copy_bytes(destination + behind, source + behind, num_bytes - behind, BLOCK)


@triton.jit
def _copy_bytes(destination, source, num_bytes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    to = destination.to(tl.pointer_type(tl.uint8))
    came = source.to(tl.pointer_type(tl.uint8))
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_bytes, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(to + place, tl.load(came + place, mask=place < num_bytes), mask=place < num_bytes)
