"""A script, for a process in which Triton does not interpret: what tests ask of the compiler for Hopper, in one start.

Writes JSON into a folder: `usual.json`, rows of ``kernels --aot``; `pinned.json`, rows of the products at
blocks whose warps have different work, with "sweep" alone; `mega.json`, rows of MegaKernels. With "sweep" at all sizes
and points.
`signatures.json`: how many signatures each kernel has, after the first layer or split and after others.
`launches.json`: what a first micro-batch of MegaKernels compiles before it publishes anything, and launches then.
`listings.json`: assembly of small kernels between ranks, and the bytes that a thread has in flight.
With "all" only `all.json`: whether every kernel that hosts launch compiles.

Tensors may be on the meta device: an op that asked one for a number would raise.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from compile_before import launches
from torch import Tensor
from typer.testing import CliRunner

import moesys
from benchmarks.__main__ import app
from benchmarks.kernels import ahead_of_time
from benchmarks.kernels.aot import (
    POINTS,
    CompiledKernel,
    compile_candidates,
    compile_mega,
    compile_size,
    tables_of_64_ranks,
)
from benchmarks.kernels.drawn_layer import SIZES
from benchmarks.mega.pacing import paced_copies
from moesys.kernels.experts.experts import ExpertMatrices, experts_backward, experts_forward
from moesys.kernels.experts.tile_config import TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import PINNED
from moesys.kernels.experts.token_rows import gather_rows
from moesys.kernels.mega import tasks
from moesys.kernels.mega.arguments import publish
from moesys.kernels.mega.exchange import regions
from moesys.kernels.routing import route
from moesys.kernels.split import flow
from moesys.kernels.split.tables import SplitTables, keep_within
from moesys.kernels.symmetric import pulls, signals
from moesys.kernels.symmetric.counts import count_regions, receive_counts
from moesys.kernels.symmetric.heap import Heap, Region
from moesys.kernels.symmetric.pulls import Copy, ordered_sum, start_copies
from moesys.lab.calibrate import gpu_timings
from moesys.lab.show.sheets import plain

# 3.6 cannot specialise epilogues that split a tile.
SPECIALISES = not triton.__version__.startswith("3.6.")
PRODUCTS = ("up", "down", "activation_gradient", "input_gradient")
# One op of each kernel, of which `down` and `input_gradient` share one; `make aot` compiles all of them.
QUICK = ("up", "down", "activation_gradient", "dW1", "route", "tiles", "combine", "counts", "split", "chunks")
# One op of each MegaKernel.
MEGA_QUICK = ("activation_gradient", "down")


# Tokens and experts of layers: multiples of 16 and not, one and none.
FIRST = (256, 8)
OTHERS = ((255, 8), (1, 8), (0, 8), (4096, 8), (48, 7), (33, 1), (1 << 17, 256))
# Ranks, experts and places of splits.
SPLITS = ((1, 1, 1), (16, 16, 32), (31, 7, 29))
KERNEL = re.compile(r"^@kernel.*\ndef (\w+)\(", re.MULTILINE)
# Ranks and experts of what travels between ranks, more than a warp has threads.
RANKS, EXPERTS = 64, 256


def main(folder: Path, sweep: bool, whole: bool) -> None:
    if whole:
        write(folder / "all.json", everything())
        return
    # Signatures first: what has been compiled is compiled no more.
    for name, found in (("signatures", signatures()), ("launches", launches()), ("listings", listings())):
        write(folder / f"{name}.json", found)
    if sweep:
        command = ["kernels", "--aot", "--no-mega", "--size", "all", "--out", str(folder)]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        (folder / "kernels_aot.json").rename(folder / "usual.json")
    else:
        write_rows(folder / "usual.json", compile_size(SIZES[0], torch.bfloat16, print, QUICK))
    if SPECIALISES and sweep:
        write_rows(folder / "pinned.json", compile_pinned(folder / "blocks.json"))
    sizes, points, only = (SIZES, tuple(POINTS), None) if sweep else (SIZES[:1], ("fused",), MEGA_QUICK)
    rows = [row for size in sizes for row in compile_mega(size, torch.bfloat16, print, points, only)]
    write_rows(folder / "mega.json", rows)


def everything() -> dict[str, Any]:
    """Compiles every kernel that hosts launch, at one size. Returns the version of Triton, how many kernels there are,
    which of them were not compiled, and which fall short.
    """
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
    *_, failed = compile_candidates(SIZES[0], torch.bfloat16, print)
    wrong = [f"{row.op}: {row.wrong}" for row in rows if row.wrong] + failed
    return {"triton": triton.__version__, "wrong": wrong, "known": len(known), "not": sorted(known - seen)}


def others() -> list[Callable[[], object]]:
    """Returns launches of kernels that neither an op of ``kernels --aot`` nor a MegaKernel has."""
    heap = Heap.virtual({"flag": Region((1,), torch.int32), **pulls.pull_regions(64, 2)}, 2, "meta")[0]
    device = torch.device("meta")
    words, number, tables = meta(9, dtype=torch.int64), meta(1, dtype=torch.int32), tables_of_64_ranks(128)
    x_TH, first_G1 = meta(64, 128, dtype=torch.bfloat16), meta(9, dtype=torch.int32)
    tokens_RP = meta(64, len(tables.rank_P), dtype=torch.int64)
    return [
        lambda: gather_rows(x_TH, meta(128, dtype=torch.int32), first_G1, 2),
        lambda: ordered_sum(meta(3, 128, dtype=torch.float32), meta(3, dtype=torch.int64), 2),
        lambda: keep_within(tokens_RP, tables, 99, 64, meta(64, 2, dtype=torch.int64), 1, words),
        lambda: publish(heap, number, {}),
        lambda: start_copies([Copy(0, 0, 0)], device),
        lambda: pulls._await_all[(1,)](heap.world, 0, 1, 2, stage=signals.PUBLISH, RANKS=2, num_warps=1),
        lambda: pulls._tell_all[(1,)](heap.world, 0, 1, 2, RANKS=2, num_warps=1),
        lambda: signals._read_report[(1,)](heap.world, 0, number, signals.REPORT_WORDS),
        lambda: signals.spoil_if_given_up(heap, [x_TH, words]),
        lambda: tasks._read_clock[(1,)](words),
        lambda: paced_copies(words, 64)(lambda: None)(),
        lambda: gpu_timings._ping_pong[(1,)](heap.world, 0, 1, 1, 1, 9, num_warps=1),
    ]


@contextmanager
def counting() -> Iterator[dict[str, set[str]]]:
    """Gives the signatures of each kernel that is launched, and compiles nothing."""
    seen: dict[str, set[str]] = defaultdict(set)

    def count(*, fn: Any, key: Any, **_: Any) -> bool:
        seen[fn.name.rpartition(".")[2]].add(str(key))
        # Instead of compiling.
        return True

    with (
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", count),
        mock.patch.object(ahead_of_time, "read_machine_code", lambda compiled: compiled),
        ahead_of_time.compiling(),
    ):
        yield seen


def signatures() -> dict[str, Any]:
    """Returns the numbers of signatures of a first layer, what has new ones after others, and those of all splits."""
    with counting() as seen:
        compute_layer(*FIRST)
        first = {name: len(keys) for name, keys in seen.items()}
        again = {}
        for T, E in OTHERS:
            compute_layer(T, E)
            again[f"{T} tokens, {E} experts"] = [name for name, keys in seen.items() if len(keys) > first.get(name, 0)]
    with counting() as seen:
        for R, E, P in SPLITS:
            shapes = ((P,), (P,), (E, R), (E + 1,), (P,), (P,), (P,), (R + 1,), (R,), (R,), (3, R), (3, R))
            tables = SplitTables(*(meta(*shape, dtype=torch.int32) for shape in shapes))
            flow.split(meta(R, E, dtype=torch.int64), tables, turn=R, phases=R)
    return {"first": first, "again": again, "splits": {name: len(keys) for name, keys in seen.items()}}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compute_layer(T: int, E: int, H: int = 128, I: int = 64, K: int = 2) -> None:
    """Forward and backward."""
    x_TH, weight_TK = meta(T, H), meta(T, K, dtype=torch.float32)
    matrices = ExpertMatrices(meta(E, 2 * I, H), meta(E, H, I), "swiglu")
    blocks = TileConfigs.all_of(TileConfig())
    routing = route(meta(T, K, dtype=torch.int64), E)
    y_TH, state = experts_forward(x_TH, routing, weight_TK, matrices, blocks)
    out = meta(E, 2 * I, H, dtype=torch.float32), meta(E, H, I, dtype=torch.float32)
    experts_backward(y_TH, x_TH, weight_TK, matrices, state, blocks, out)


def listings() -> dict[str, tuple[str, int]]:
    """Returns PTX, and bytes in flight, by the kernel's name."""
    read = ahead_of_time.read_machine_code
    shared = {**regions(1, 1, 1, torch.bfloat16, RANKS, 1), **count_regions(RANKS, EXPERTS)}
    heap = Heap.virtual(shared, RANKS, "meta")[0]
    number = meta(1, dtype=torch.int32)
    with (
        mock.patch.object(ahead_of_time, "read_machine_code", lambda of: (read(of), of.asm["ptx"])),
        ahead_of_time.compiling() as found,
    ):
        publish(heap, number, {})
        receive_counts(heap, number, number.expand(RANKS), EXPERTS)
        start_copies([Copy(0, 0, 0)], torch.device("meta"))
    return {code.name: (ptx, code.flight_bytes) for code, ptx in found}


def compile_pinned(path: Path) -> list[CompiledKernel]:
    wide, square = (
        TileConfig(128, columns, 64, warps=4, stages=stages, operands="specialised")
        for columns, stages in ((256, 4), (128, 4))
    )
    path.write_text(TileConfigs(square, wide, square, wide, TileConfig(128, 256, 64, stages=4)).to_json())
    os.environ[PINNED] = str(path)
    try:
        return compile_size(SIZES[0], torch.bfloat16, print, PRODUCTS)
    finally:
        del os.environ[PINNED]


def write_rows(path: Path, rows: Sequence[CompiledKernel]) -> None:
    write(path, {"rows": plain(rows)})


def write(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), "sweep" in sys.argv, "all" in sys.argv)
