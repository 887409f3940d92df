"""Time and memory of work on a device: by a GPU's clock and allocator, or by the host's clock."""

from __future__ import annotations

import ctypes
import gc
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import NamedTuple

import torch
import triton

from benchmarks.harness.options import machine_line
from benchmarks.harness.stopwatch import wall_ms
from moesys.torch_private import hold_stream

# The bytes that are written before each run to flush the L2 cache, in multiples of its size.
CACHES_FLUSHED = 4
# How long a stream is held while the host launches what is timed.
HELD_S = 0.02
# The products by which a GPU's sustained pace is measured: of square matrices, how long, and how many at a time.
SQUARE, SUSTAINED_S, PRODUCTS = 8192, 5.0, 20
# NVML_CLOCK_SM.
CLOCK_OF_MULTIPROCESSORS = 1


class Bytes(NamedTuple):
    """kept: memory from forward to backward, without inputs and output. peak: the peak of both, without inputs."""

    kept: int
    peak: int


class GpuState(NamedTuple):
    """The clock of the multiprocessors, and the power that the GPU draws."""

    mhz: float
    watts: float

    def __str__(self) -> str:
        return f"{self.mhz:.0f} / {self.watts:.0f}"


def middle(states: list[GpuState]) -> GpuState | None:
    """Returns the medians; None if no state was read."""
    return GpuState(*map(median, zip(*states, strict=True))) if states else None


def state_reader(device: torch.device) -> Callable[[], GpuState | None]:
    """Returns a function that asks the driver's management library, which takes microseconds and waits for no kernel;
    it returns None where there is no such library, or it does not tell.
    """
    uuid, handle = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode(), ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return lambda: None
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return lambda: None

    def read() -> GpuState | None:
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        failed = library.nvmlDeviceGetClockInfo(handle, CLOCK_OF_MULTIPROCESSORS, ctypes.byref(mhz))
        failed = failed or library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
        return None if failed else GpuState(mhz.value, milliwatts.value / 1000)

    return read


class GpuMeter:
    """Measures with events on the current stream. ``states``: where the state of the GPU during each time is noted."""

    source = "measured"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: list[GpuState] = []
        self._read_state = state_reader(device)
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
        # While the device is still busy, if its work takes longer than to launch it.
        if state := self._read_state():
            self.states.append(state)
        end.synchronize()
        return float(start.elapsed_time(end))

    def hold(self) -> None:
        """Holds the stream, so that the host is ahead of what is timed next, as in a training."""
        hold_stream(HELD_S)

    def sustained_tflops(self, dtype: torch.dtype) -> float:
        """Returns the pace of torch's product of large random matrices, after some seconds of it: what a GPU can do
        that is limited by power. It is warm then.
        """
        a, b = (torch.randn(SQUARE, SQUARE, dtype=dtype, device=self.device) for _ in range(2))
        out, found, end_s = torch.empty_like(a), [], time.monotonic() + SUSTAINED_S
        while time.monotonic() < end_s:
            found.append(self.ms(lambda: [torch.mm(a, b, out=out) for _ in range(PRODUCTS)]) / PRODUCTS)
        return 2 * SQUARE**3 / median(found[len(found) // 2 :]) / 1e9

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

    def __init__(self) -> None:
        self.states: list[GpuState] = []

    @property
    def machine(self) -> str:
        return machine_line(torch.get_num_threads(), ("torch", "triton"))

    def ms(self, work: Callable[[], object]) -> float:
        return wall_ms(work)

    def hold(self) -> None:
        """Has no stream to hold."""

    def sustained_tflops(self, dtype: torch.dtype) -> None:
        """Returns nothing: the pace of an interpreter is no ceiling."""

    def bytes_of(
        self, forward: Callable[[], torch.Tensor], backward_of: Callable[[torch.Tensor], object]
    ) -> Bytes | None:
        return None

    def free(self) -> None:
        gc.collect()


Meter = GpuMeter | CpuMeter
