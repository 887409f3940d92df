"""A script, for a process in which Triton does not interpret: of small kernels between ranks, as JSON, their assembly
and the bytes that a thread has in flight.
"""

from __future__ import annotations

import json

import torch

from benchmarks.kernels import ahead_of_time
from moesys.kernels.mega.arguments import publish
from moesys.kernels.mega.exchange import regions
from moesys.kernels.symmetric.counts import count_regions, receive_counts
from moesys.kernels.symmetric.heap import Heap
from moesys.kernels.symmetric.pulls import Copy, start_copies

# More than a warp has threads.
RANKS, EXPERTS = 64, 256


def main() -> None:
    read = ahead_of_time.read_machine_code
    ahead_of_time.read_machine_code = lambda compiled: (read(compiled), compiled.asm["ptx"])
    shared = {**regions(1, 1, 1, torch.bfloat16, RANKS, 1), **count_regions(RANKS, EXPERTS)}
    heap = Heap.virtual(shared, RANKS, "meta")[0]
    number = torch.empty(1, dtype=torch.int32, device="meta")
    with ahead_of_time.compiling() as found:
        publish(heap, number, {})
        receive_counts(heap, number, number.expand(RANKS), EXPERTS)
        start_copies([Copy(0, 0, 0)], torch.device("meta"))
    print(json.dumps({code.name: (ptx, code.flight_bytes) for code, ptx in found}))


if __name__ == "__main__":
    main()
