"""Does torch find the GPU; and what the machine is, for whoever reads the page."""

from __future__ import annotations

import subprocess

import torch

from benchmarks.doctor.place import Place, require

# Of what the driver tells: GPUs, and which links are between them.
TOLD = (("nvidia-smi",), ("nvidia-smi", "topo", "-m"))
TELL_S = 10.0
SIDE, MIB = 1024, 2**20


def sees_gpu(place: Place) -> str:
    """Multiplies small integers, whose sums are exact in every order."""
    place.require_gpu("all others are rehearsed on the CPU, on toys")
    device = place.device
    gpu = torch.cuda.get_device_properties(device)
    left, right = (torch.randint(-4, 5, (SIDE, SIDE)) for _ in range(2))
    found = left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)
    wrong = int((found.float().cpu() != (left.float() @ right.float()).bfloat16().float()).sum())
    require(not wrong, f"{wrong} of {SIDE**2} numbers of a product of integers are wrong")
    free, total = torch.cuda.mem_get_info(device)
    block = torch.zeros(free // 2, dtype=torch.uint8, device=device)
    block.fill_(1)
    require(int(block[-1]) == 1, f"the last of {len(block)} bytes was written and is not there")
    if place.rank == 0:
        (place.folder / "machine.md").write_text(_told())
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{gpu.name}, sm_{major}{minor}, {gpu.multi_processor_count} multiprocessors, "
        f"{free // MIB} of {total // MIB} MiB free; torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def _told() -> str:
    parts = ["# Machine"]
    for command in TOLD:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TELL_S)
            parts.append(f"```\n{done.stdout.rstrip()}\n```")
        except (OSError, subprocess.TimeoutExpired) as error:
            parts.append(f"{' '.join(command)}: {error}")
    return "\n\n".join(parts) + "\n"
