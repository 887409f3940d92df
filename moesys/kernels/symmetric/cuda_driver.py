"""Calls of NVIDIA's driver that torch does not offer; libcuda comes with every NVIDIA GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch

# Copies from an address to another, of the current device or of what it maps, on a stream of it: destination, source,
# bytes, stream.
EngineCopy = Callable[[int, int, int, int], None]

# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED.
P2P_NATIVE_ATOMICS = 3


@cache
def cuda_driver() -> ctypes.CDLL | None:
    """Returns libcuda, or None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def copy_engines(device: torch.device) -> EngineCopy | None:
    """Returns the function that has copy engines of ``device`` move bytes: of CuPy's runtime if it is installed, else
    of the driver; None if there is neither.
    """
    if device.type != "cuda":
        return None
    try:
        from cupy.cuda import runtime  # type: ignore[import-not-found]
    except ImportError:
        driver = cuda_driver()
        return None if driver is None else partial(_copy_by_driver, driver)
    return lambda destination, source, num_bytes, stream: runtime.memcpyAsync(
        destination, source, num_bytes, runtime.memcpyDefault, stream
    )


def _copy_by_driver(driver: ctypes.CDLL, destination: int, source: int, num_bytes: int, stream: int) -> None:
    error = driver.cuMemcpyAsync(
        ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)
    )
    if error:
        raise RuntimeError(
            f"CUDA's driver does not copy {num_bytes} bytes from {source:#x} to {destination:#x}: error {error} of "
            "cuMemcpyAsync; the memory is mapped on no GPU here, or a kernel failed before"
        )


def gpu_address(device: torch.device) -> str:
    """Returns the name that all processes of a host have for a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def atomics_reach(source: str, target: str) -> bool | None:
    """Returns whether atomics of the GPU at ``source`` (``gpu_address``) reach the memory of the one at ``target``;
    None if the driver does not say, as for GPUs that ``CUDA_VISIBLE_DEVICES`` hides.
    """
    driver, found = cuda_driver(), ctypes.c_int()
    places = {gpu_address(torch.device("cuda", place)): place for place in range(torch.cuda.device_count())}
    if driver is None or not {source, target} <= places.keys():
        return None
    error = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), P2P_NATIVE_ATOMICS, places[source], places[target])
    return None if error else bool(found.value)
