"""Time and memory of work on a device: by a GPU's clock and allocator, or by the host's clock."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
import triton

from benchmarks.harness.stopwatch import wall_ms
from moesys.lab.runs.environment import machine_line

# The bytes that are written before each run to flush the L2 cache, in multiples of its size.
CACHES_FLUSHED = 4


class Bytes(NamedTuple):
    """kept: memory from forward to backward, without inputs and output. peak: the peak of both, without inputs."""

    kept: int
    peak: int


class GpuMeter:
    """Measures with events on the current stream."""

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
        """Times ``work`` with a cold L2 cache. The flush hides host work before the first launch, if it is short."""
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
        """Frees memory that is no longer used."""
        gc.collect()
        # After an illegal access this raises too, and the access itself was reported already.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


class CpuMeter:
    """Measures with the host's clock, for a rehearsal without a GPU; bytes are not counted."""

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
