"""A script that compiles kernels for a GPU's capability and prints how many there are and which fall short, as JSON.

It runs in a process in which Triton does not interpret: ``compile_kernels.py CAPABILITY [OP ...]``. Without ops it
compiles all ops and a MegaKernel.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.kernels.aot import compile_mega, compile_size
from benchmarks.kernels.drawn_layer import SIZES

MEGA_POINT = "fused"


def main(capability: int, only: tuple[str, ...]) -> None:
    target = GPUTarget("cuda", capability, 32)
    rows = compile_size(SIZES[0], torch.bfloat16, _say_nothing, only or None, target=target)
    if not only:
        rows += compile_mega(SIZES[0], torch.bfloat16, _say_nothing, [MEGA_POINT], target=target)
    wrong = [f"{row.op}: {row.wrong}" for row in rows if row.wrong]
    print(json.dumps({"kernels": len(rows), "triton": triton.__version__, "wrong": wrong}))


def _say_nothing(_: str) -> None:
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(sys.argv[2:]))
