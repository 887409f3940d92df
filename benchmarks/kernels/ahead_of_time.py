"""What a launch would compile, for a GPU that is not here; and what the machine code says about it.

Inside ``compiling()`` a kernel that is launched is compiled for that GPU, with the hints that Triton takes from real
arguments (which integers and addresses are multiples of 16), and not run. Tensors may be on the meta device, so shapes
of any size cost no memory. It needs a process in which Triton does not interpret.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
# The shape of a Hopper warpgroup's product; a Blackwell one's instruction, whose shape stands elsewhere.
PRODUCTS = r"\b(?:HGMMA\.(?=\d+x)|(?=UTC\w*MMA))([\dx]+|\w+)"
# What one block may have of a Hopper multiprocessor's shared memory.
MOST_SHARED_BYTES = 232_448


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel.

    ``registers`` of a thread; ``stack_bytes`` of a thread; ``spills``: instructions that move registers to local memory
    or back; ``shared_bytes`` of a block; ``mma``: the shapes of its products of tensor cores, such as "64x128x16" on
    Hopper, or their instruction, as "UTCHMMA" on Blackwell; none where it has no such product; ``copy_bytes``: the
    widths of its asynchronous copies from pointers; ``load_bytes``, ``store_bytes``: of its loads from and stores to
    global memory; ``flight_bytes``: the most that a thread asks of global memory, by loads of 16 bytes, before it
    stores again; ``tma_loads``: how many loads by descriptor it has;
    ``threads`` of a block; ``specialised``: whether its warps have different work.
    """

    name: str
    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    mma: tuple[str, ...]
    copy_bytes: tuple[int, ...]
    load_bytes: tuple[int, ...]
    store_bytes: tuple[int, ...]
    flight_bytes: int
    tma_loads: int
    threads: int
    specialised: bool


@contextmanager
def compiling(target: GPUTarget = HOPPER) -> Iterator[list[MachineCode]]:
    """Has launches compile and not run; gives the list to which each appends its ``MachineCode``.

    Raises RuntimeError in a process where Triton interprets.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 compiles nothing; unset it, before kernels are imported")
    found: list[MachineCode] = []

    def launch(kernel: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> Any:
            compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            found.append(read_machine_code(compiled))
            return compiled

        return compile_only

    before, driver_before = JITFunction.__getitem__, vars(driver).get("_active")
    driver.set_active(_AbsentDriver(target))
    JITFunction.__getitem__ = launch
    try:
        yield found
    finally:
        JITFunction.__getitem__ = before
        driver.set_active(driver_before)


class _AbsentDriver:
    """As much of a driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def read_machine_code(compiled: Any) -> MachineCode:
    """Reads what ``triton.compile`` returned, by the disassembler that comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        listing = _run_tool("-sass", str(binary))
        usage = _run_tool("--dump-resource-usage", str(binary))
    registers, stack = (_number(rf"{what}:(\d+)", usage) for what in ("REG", "STACK"))
    return MachineCode(
        name=compiled.metadata.name,
        registers=registers,
        stack_bytes=stack,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", listing)),
        shared_bytes=int(compiled.metadata.shared),
        mma=tuple(sorted(set(re.findall(PRODUCTS, listing)))),
        copy_bytes=_widths("LDGSTS", listing),
        load_bytes=_widths("LDG", listing),
        store_bytes=_widths("STG", listing),
        flight_bytes=max(16 * len(re.findall(r"\bLDG\.\S*128", run)) for run in re.split(r"\bSTG\.", listing)),
        tma_loads=len(re.findall(r"\bUTMALDG\b", listing)),
        threads=32 * int(compiled.metadata.num_warps),
        specialised="ttg.warp_specialize" in compiled.asm["ttgir"],
    )


def _widths(instruction: str, listing: str) -> tuple[int, ...]:
    """Returns the bytes that these instructions move, each number once: 4 unless an instruction names its bits."""
    bits = {re.search(r"\.[US]?(8|16|64|128)\b", of) for of in re.findall(rf"\b{instruction}(\.\S*)", listing)}
    return tuple(sorted({int(found.group(1)) // 8 if found else 4 for found in bits}))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say {pattern}: {text[:400]}")
    return int(found.group(1))


def _run_tool(*arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout
