"""GPU checks of the driver, torch and the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_ranks import GpuRank

# What the driver says about GPUs and the links between them, for the readers of the report.
DRIVER_COMMANDS = (("nvidia-smi",), ("nvidia-smi", "topo", "-m"))
DRIVER_S = 10.0
SIDE, MIB = 1024, 2**20
HOPPER = 90
# The kernels that a rehearsal compiles, which has to end within a minute.
REHEARSED_KERNELS = ("up", "combine")


@pytest.mark.gpu(layer="driver and torch", limit_s=30)
def test_device(gpu: GpuRank) -> str:
    """Torch finds the GPU, allocates memory on it, and multiplies correctly."""
    gpu.require_gpu("all other checks are rehearsed on the CPU, on small inputs")
    device = gpu.device
    properties = torch.cuda.get_device_properties(device)
    # Sums of small integers are exact in every order.
    left, right = (torch.randint(-4, 5, (SIDE, SIDE)) for _ in range(2))
    found = left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)
    wrong = int((found.float().cpu() != (left.float() @ right.float()).bfloat16().float()).sum())
    assert not wrong, f"{wrong} of {SIDE**2} numbers of a product of integers are wrong"
    free, total = torch.cuda.mem_get_info(device)
    block = torch.zeros(free // 2, dtype=torch.uint8, device=device)
    block.fill_(1)
    assert int(block[-1]) == 1, f"the last of {len(block)} bytes was written and reads as another value"
    if gpu.rank == 0:
        (gpu.folder / "machine.md").write_text(_driver_output())
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{properties.name}, sm_{major}{minor}, {properties.multi_processor_count} multiprocessors, "
        f"{free // MIB} of {total // MIB} MiB free; torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


@pytest.mark.gpu(layer="compiler", limit_s=90, ranks="first")
def test_compile(gpu: GpuRank) -> str:
    """Kernels compile for this GPU without spills, with tensor cores; without a GPU, for Hopper."""
    capability, only = HOPPER, REHEARSED_KERNELS
    if not gpu.rehearsed:
        major, minor = torch.cuda.get_device_capability(gpu.device)
        capability, only = 10 * major + minor, ()
    # A process in which Triton does not interpret.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_kernels.py")), str(capability), *only],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"compiling ended with code {done.returncode}: {done.stderr[-2000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] > 0, "no kernel was compiled"
    assert not found["wrong"], "; ".join(found["wrong"])
    return f"{found['kernels']} kernels for sm_{capability} by Triton {found['triton']}, none falls short"


def _driver_output() -> str:
    parts = ["# Machine"]
    for command in DRIVER_COMMANDS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DRIVER_S)
            parts.append(f"```\n{done.stdout.rstrip()}\n```")
        except (OSError, subprocess.TimeoutExpired) as error:
            parts.append(f"{' '.join(command)}: {error}")
    return "\n\n".join(parts) + "\n"
