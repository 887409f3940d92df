"""A script, for a process in which Triton does not interpret: compiles every kernel that hosts launch, for Hopper.

Prints the version of Triton, which ops' kernels fall short, and which kernels were not compiled, as JSON.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from compile_before import launches

import moesys
from benchmarks.kernels import ahead_of_time
from benchmarks.kernels.aot import POINTS, compile_candidates, compile_mega, compile_size, tables_of_64_ranks
from benchmarks.kernels.drawn_layer import SIZES
from benchmarks.mega.pacing import paced_copies
from moesys.kernels.experts.token_rows import gather_rows
from moesys.kernels.mega import tasks
from moesys.kernels.mega.arguments import publish
from moesys.kernels.split.tables import keep_within
from moesys.kernels.symmetric import pulls, signals
from moesys.kernels.symmetric.heap import Heap, Region
from moesys.kernels.symmetric.pulls import ordered_sum
from moesys.lab.calibrate import gpu_timings

KERNEL = re.compile(r"^@kernel.*\ndef (\w+)\(", re.MULTILINE)
DEVICE = torch.device("meta")
meta = partial(torch.empty, device="meta")


def main() -> None:
    seen: set[str] = set()

    def note(*, fn: Any, **_: Any) -> bool:
        seen.add(fn.name.rpartition(".")[2])
        return False

    with mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note):
        rows = compile_size(SIZES[0], torch.bfloat16, print)
        rows += compile_mega(SIZES[0], torch.bfloat16, print, POINTS)
        read = mock.patch.object(ahead_of_time, "read_machine_code", lambda compiled: compiled)
        with read, ahead_of_time.compiling():
            for launch in others():
                launch()
    seen |= {name for of_point in launches(compiles=True) for name, *_ in of_point}
    folder = Path(moesys.__file__).parent
    known = {name for path in folder.rglob("*.py") for name in KERNEL.findall(path.read_text())}
    wrong = [f"{row.op}: {row.wrong}" for row in rows if row.wrong]
    *_, failed = compile_candidates(SIZES[0], torch.bfloat16, print)
    wrong += failed
    print(json.dumps({"triton": triton.__version__, "wrong": wrong, "known": len(known), "not": sorted(known - seen)}))


def others() -> list[Callable[[], object]]:
    """Returns launches of kernels that neither an op of ``kernels --aot`` nor a MegaKernel has."""
    heap = Heap.virtual({"flag": Region((1,), torch.int32), **pulls.pull_regions(64, 2)}, 2, "meta")[0]
    words, number, tables = meta(9, dtype=torch.int64), meta(1, dtype=torch.int32), tables_of_64_ranks(128)
    x_TH, first_G1 = meta(64, 128, dtype=torch.bfloat16), meta(9, dtype=torch.int32)
    tokens_RP = meta(64, len(tables.rank_P), dtype=torch.int64)
    return [
        lambda: gather_rows(x_TH, meta(128, dtype=torch.int32), first_G1, 2),
        lambda: ordered_sum(meta(3, 128), meta(3, dtype=torch.int64), 2),
        lambda: keep_within(tokens_RP, tables, 99, 64, meta(64, 2, dtype=torch.int64), 1, words),
        lambda: publish(heap, number, {}),
        lambda: pulls.start_copies([pulls.Copy(0, 0, 0)], DEVICE),
        lambda: pulls._await_all[(1,)](heap.world, 0, 1, 2, stage=signals.PUBLISH, RANKS=2, num_warps=1),
        lambda: pulls._tell_all[(1,)](heap.world, 0, 1, 2, RANKS=2, num_warps=1),
        lambda: signals._read_report[(1,)](heap.world, 0, number, signals.REPORT_WORDS),
        lambda: signals.spoil_if_given_up(heap, [x_TH, words]),
        lambda: tasks._read_clock[(1,)](words),
        lambda: paced_copies(words, 64)(lambda: None)(),
        lambda: gpu_timings._ping_pong[(1,)](heap.world, 0, 1, 1, 1, 9, num_warps=1),
    ]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
