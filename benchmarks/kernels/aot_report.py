"""``python -m benchmarks kernels --aot``: what was compiled, and what a model says that it will take on an H100."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.kernels.aot import NUM_OPS, Compiled, Size, compile_size
from benchmarks.kernels.aot_mega import NUM_MEGA_OPS, NUM_RANKS, compile_mega
from benchmarks.kernels.expected_time import Expected, expected, resident_programs
from benchmarks.kernels.measured_layer import FLOPS
from benchmarks.kernels.op_work import DIRECTIONS, mega_of, product_of, work_of
from benchmarks.kernels.published_peers import BEST, Published
from moesys.kernels.experts.ahead_of_time import HOPPER
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told

# Of MegaKernels the point that the model knows, and what it calls the ops that pull.
MODELLED_POINT, PULLING = "fused", ("up", "activation_gradient")
NOTES = (
    "A MODEL of an H100 (bench/kernels/expected_time.py), never measured: waves of tiles, products at 0.7 of cuBLAS or "
    "operands through the L2 cache, Little's law for bytes in flight, resident programs by registers, threads and "
    "shared memory. Experts are equally popular.",
    "roofline: by the data sheet alone, 989 TFLOP/s, 3.35 TB/s, and 450 GB/s of links, the largest of the three.",
)


@dataclass(frozen=True)
class Modelled:
    """One kernel; ``flight_kb``: bytes that a multiprocessor's programs ask for before they store."""

    size: Annotated[str, Column("size")]
    op: Annotated[str, Column("op")]
    resident: Annotated[int, Column("programs a multiprocessor")]
    flight_kb: Annotated[float, Column("in flight, KB", ".0f")]
    time: Annotated[
        Expected,
        Column("roofline, us", lambda of: f"{of.roofline_us:.0f}"),
        Column("expected, us", lambda of: f"{of.us:.0f}"),
        Column("of roofline, %", lambda of: f"{100 * of.fraction:.0f}"),
    ]


@dataclass(frozen=True)
class ModelledLayer:
    """A direction of a layer on one device, beside the best that a peer has published of it."""

    size: Annotated[Size, Column("size", lambda size: size.name)]
    direction: Annotated[str, Column("direction")]
    time: Annotated[
        Expected,
        Column("expected, us", lambda of: f"{of.us:.0f}"),
        Column("of roofline, %", lambda of: f"{100 * of.fraction:.0f}"),
    ]
    peer: Annotated[Published | None, Column("peer", lambda peer: peer.of)]

    @property
    def tflops(self) -> Annotated[float, Column("expected, TFLOP/s", ".0f", after="time")]:
        _, T, H, I, _, K = self.size
        return FLOPS[self.direction] * T * K * H * I / self.time.us / 1e6

    @property
    def peer_tflops(self) -> Annotated[float | None, Column("best peer, TFLOP/s", ".0f", after="tflops")]:
        return None if self.peer is None else getattr(self.peer, self.direction)


def main(sizes: Sequence[Size], json_path: Path | None, mega: bool, arch: str = "sm_90") -> int:
    """Compiles, writes, prints, MegaKernels too with ``mega``; 1 if a kernel falls short."""
    rows: list[Compiled] = []
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    num_ops = NUM_OPS + NUM_MEGA_OPS if mega else NUM_OPS
    with warnings.catch_warnings(), steps_told("compiling", num_ops * len(sizes)) as tell:
        warnings.simplefilter("ignore", UserWarning)
        for size in sizes:
            rows += compile_size(size, torch.bfloat16, tell, target=target)
            if mega:
                rows += compile_mega(size, torch.bfloat16, tell, target=target)
    short = sum(bool(row.wrong) for row in rows)
    title = f"COMPILED: kernels for {arch}, not run"
    notes = [f"bfloat16, triton {triton.__version__}; {len(rows)} kernels, {short} of them fall short"]
    sheets = [Sheet(title, rows, notes, group_by="size")]
    # The model is of an H100.
    kernels = list(modelled(rows, sizes)) if target == HOPPER else []
    layers = list(modelled_layers(kernels, sizes))
    sheets += [
        Sheet("MODEL: kernels on an H100", kernels, NOTES, group_by="size"),
        Sheet("MODEL: layers on an H100, beside what peers published", layers, group_by="size"),
    ]
    data = {"rows": rows, "modelled": kernels, "layers": layers}
    publish(Report("kernels aot", title, "compiled", sheets, data=data), json_path=json_path)
    return int(short > 0)


def modelled(rows: Sequence[Compiled], sizes: Sequence[Size]) -> Iterator[Modelled]:
    """The kernels that do an op's work; those that only prepare it are launches."""
    by_name = {size.name: size for size in sizes}
    for row in rows:
        size, code = by_name[row.size], row.code
        point, _, op = row.op.rpartition(" ")
        if not point and (work := work_of(op, size)) is not None:
            product = product_of(op, size)
            if product is not None and row.block is None:
                continue
            time = expected(work, code, [product] if product else [], row.block)
        elif point == MODELLED_POINT and (found := mega_of(op, size, NUM_RANKS)) is not None:
            time = expected(found[0], code, found[1], row.block, pulls=op in PULLING)
        else:
            continue
        resident = resident_programs(code)
        yield Modelled(row.size, row.op, resident, resident * code.threads * code.flight_bytes / 1e3, time)


def modelled_layers(kernels: Sequence[Modelled], sizes: Sequence[Size]) -> Iterator[ModelledLayer]:
    """Of sizes all of whose ops were compiled."""
    time_of = {(row.size, row.op): row.time for row in kernels}
    for size in sizes:
        for direction, ops in DIRECTIONS.items():
            times = [time_of[size.name, op] for op in ops if (size.name, op) in time_of]
            if len(times) == len(ops):
                total = Expected(sum(of.us for of in times), sum(of.roofline_us for of in times))
                yield ModelledLayer(size, direction, total, BEST.get(size.name))
