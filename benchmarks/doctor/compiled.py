"""Do kernels compile for this GPU, and into what; without one, for Hopper.

In a process of its own, as it needs one in which Triton does not interpret: ``python -m benchmarks.doctor.compiled``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from benchmarks.doctor.place import Place, require

HOPPER = 90
# Two without a GPU, where a minute must do.
SOME: tuple[str, ...] = ("up", "combine")
POINT = "fused"


def compiles(place: Place) -> str:
    capability, only = HOPPER, SOME
    if not place.rehearsed:
        major, minor = torch.cuda.get_device_capability(place.device)
        capability, only = 10 * major + minor, ()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, str(capability), *only],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    require(done.returncode == 0, f"compiling ended with code {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    require(found["kernels"] > 0, "nothing was compiled")
    require(not found["wrong"], "; ".join(found["wrong"]))
    return f"{found['kernels']} kernels for sm_{capability} by Triton {found['triton']}, none falls short"


def main(capability: int, only: tuple[str, ...]) -> None:
    """Prints what was compiled; all ops and a MegaKernel's without ``only``."""
    import triton
    from triton.backends.compiler import GPUTarget

    from benchmarks.kernels.aot import compile_mega, compile_size
    from benchmarks.kernels.drawn_layer import SIZES

    target = GPUTarget("cuda", capability, 32)
    rows = compile_size(SIZES[0], torch.bfloat16, _quiet, only or None, target=target)
    if not only:
        rows += compile_mega(SIZES[0], torch.bfloat16, _quiet, [POINT], target=target)
    wrong = [f"{row.op}: {row.wrong}" for row in rows if row.wrong]
    print(json.dumps({"kernels": len(rows), "triton": triton.__version__, "wrong": wrong}))


def _quiet(_: str) -> None:
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(sys.argv[2:]))
