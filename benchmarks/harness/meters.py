"""Time and memory of work on a device: a GPU's own clock and allocator, or what a CPU has of them."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
import triton

from moesys.lab.runs.stopwatch import machine_line, wall_ms

# So many times the L2 cache is written over before every run, which finds nothing of its own there.
CACHES_FLUSHED = 4


class Bytes(NamedTuple):
    """kept: by a forward for its backward, besides its inputs and output. peak: of both, besides inputs."""

    kept: int
    peak: int


class GpuMeter:
    """By events on the current stream."""

    source = "measured"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(CACHES_FLUSHED * size, dtype=torch.uint8, device=device)

    @property
    def machine(self) -> str:
        gpu = torch.cuda.get_device_properties(self.device)
        return (
            f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB, "
            f"CUDA {torch.version.cuda}, Python {platform.python_version()}, torch {torch.__version__}, "
            f"triton {triton.__version__}"
        )

    def ms(self, work: Callable[[], object]) -> float:
        """With a cold L2 cache. What the host does before its first launch counts where the flush does not hide it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def bytes_of(
        self, forward: Callable[[], torch.Tensor], backward_of: Callable[[torch.Tensor], object]
    ) -> Bytes | None:
        self.free()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        y = forward()
        kept = torch.cuda.memory_allocated(self.device) - before - y.nbytes
        gradients = backward_of(y)
        torch.cuda.synchronize(self.device)
        del y, gradients
        return Bytes(kept, torch.cuda.max_memory_allocated(self.device) - before)

    def free(self) -> None:
        """Gives back what nobody holds."""
        gc.collect()
        # After an illegal access nothing works any more; whoever made it has been told.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


class CpuMeter:
    """The host's clock, for a rehearsal without a GPU; nobody counts bytes there."""

    device = torch.device("cpu")
    source = "rehearsed"

    @property
    def machine(self) -> str:
        return machine_line(torch.get_num_threads(), ("torch", "triton"))

    def ms(self, work: Callable[[], object]) -> float:
        return wall_ms(work)

    def bytes_of(
        self, forward: Callable[[], torch.Tensor], backward_of: Callable[[torch.Tensor], object]
    ) -> Bytes | None:
        return None

    def free(self) -> None:
        gc.collect()


Meter = GpuMeter | CpuMeter
