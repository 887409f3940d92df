"""A script, for a process in which Triton does not interpret: what the kernels of a layer would be compiled for.

Prints, as JSON, how many signatures each kernel has after the first layer, and which kernels have new ones after
others. Nothing is compiled, and tensors are on the meta device: whoever asked one for a number would raise.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels import ahead_of_time
from moesys.kernels.experts.experts import ExpertMatrices, experts_backward, experts_forward
from moesys.kernels.experts.tile_config import TileConfig, TileConfigs
from moesys.kernels.routing import route

H, I, K = 128, 64, 2
FIRST = (256, 8)
# Tokens and experts: multiples of 16 and not, one and none.
OTHERS = ((255, 8), (1, 8), (0, 8), (4096, 8), (48, 7), (33, 1), (1 << 17, 256))


def compute_layer(T: int, E: int) -> None:
    """Forward and backward."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x_TH, weight_TK = meta(T, H), meta(T, K, dtype=torch.float32)
    matrices = ExpertMatrices(meta(E, 2 * I, H), meta(E, H, I), meta(E, dtype=torch.int32), "swiglu")
    blocks = TileConfigs.all_of(TileConfig())
    routing = route(meta(T, K, dtype=torch.int64), E)
    y_TH, state = experts_forward(x_TH, routing, weight_TK, matrices, blocks)
    out = meta(E, 2 * I, H, dtype=torch.float32), meta(E, H, I, dtype=torch.float32)
    experts_backward(y_TH, x_TH, weight_TK, matrices, state, blocks, out)


def main() -> None:
    signatures: dict[str, set[str]] = defaultdict(set)

    def count(*, fn: Any, key: Any, **_: Any) -> bool:
        signatures[f"{fn.module}.{fn.name}"].add(str(key))
        # Instead of compiling.
        return True

    triton.knobs.runtime.jit_cache_hook = count
    ahead_of_time.read_machine_code = lambda compiled: compiled
    with ahead_of_time.compiling():
        compute_layer(*FIRST)
        first = {name: len(keys) for name, keys in signatures.items()}
        again = {}
        for T, E in OTHERS:
            compute_layer(T, E)
            new = {name for name, keys in signatures.items() if len(keys) > first.get(name, 0)}
            again[f"{T} tokens, {E} experts"] = sorted(new)
    print(json.dumps({"first": first, "again": again}))


if __name__ == "__main__":
    main()
