"""The kernels of one device beside their contestants: checked first, then timed, on the same layers and choices.

Whatever a contestant raises becomes a line of the report, which is written anew after every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.contest import in_a_line
from benchmarks.harness.meters import CpuMeter, GpuMeter, Meter
from benchmarks.harness.names import chosen
from benchmarks.kernels.aot import SIZES, Size
from benchmarks.kernels.checks import (
    MOST_OF_GROUPED,
    Finding,
    compiled_whole,
    far_offsets,
    found_of,
    graph_replayed,
    recomputed,
)
from benchmarks.kernels.contestants import OURS, contestants
from benchmarks.kernels.drawn_layer import ROUTINGS, Implementation, Layer, draw_layer
from benchmarks.kernels.measured_layer import Measured, measure_layer
from moesys.kernels.experts.numerics import INTERPRETED
from moesys.lab.show.reports import Report, publish, write
from moesys.lab.show.sheets import Sheet, plain
from moesys.lab.show.steps import steps_told

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Scale:
    """What a device can carry. small: the layer inside torch's graphs and checkpoints. far: one whose tensors have more
    than 2³¹ elements. bit_runs: how often bits are compared.
    """

    sizes: tuple[Size, ...]
    small: Size
    far: Size
    bit_runs: int


# far: all but a and the tokens' gradients of weights go beyond 2³¹ elements, 60 GB in 16 bits.
ON_GPU = Scale(SIZES, Size("small", 4096, 1024, 512, 32, 4), Size("far", 263168, 8192, 4096, 66, 1), bit_runs=20)
TOY = Size("toy", 40, 64, 32, 6, 2)
IN_INTERPRETER = Scale((TOY,), TOY, Size("far toy", 24, 32, 16, 6, 1), bit_runs=2)


@dataclass(frozen=True)
class KernelsContest:
    """What is asked for: names are checked, contestants not yet made."""

    sizes: tuple[Size, ...]
    routings: tuple[str, ...]
    contestants: Mapping[str, Callable[[], Implementation]]
    dtype: torch.dtype
    repeats: int
    extras: bool
    scale: Scale
    device: torch.device


def require_device(device: str, dtype: str, *, without_gpu: str) -> None:
    """Raises ValueError where the kernels cannot be run as asked; ``without_gpu`` says what else there is."""
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r} is not known; use cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(without_gpu)
    if device == "cuda" and INTERPRETED.value:
        raise ValueError("Triton's interpreter would run the kernels on the host; unset TRITON_INTERPRET")
    if device == "cpu" and not INTERPRETED.value:
        raise ValueError("device='cpu' rehearses in Triton's interpreter; set TRITON_INTERPRET=1")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")


def asked_for(
    sizes: str = "all",
    routings: str = "all",
    names: str = "all",
    *,
    peers: Sequence[str] = (),
    dtype: str = "bfloat16",
    repeats: int = 15,
    extras: bool = True,
    device: str = "cuda",
) -> KernelsContest:
    """From the words of a command line, several with commas between them. Raises ValueError for one that is not known,
    and where the device is not there.
    """
    require_device(
        device,
        dtype,
        without_gpu=(
            "kernels are timed on a GPU, and torch finds none here; --aot compiles and reads them without one, "
            "and --device cpu with TRITON_INTERPRET=1 rehearses this command on a toy"
        ),
    )
    scale = ON_GPU if device == "cuda" else IN_INTERPRETER
    by_name = {size.name: size for size in scale.sizes}
    return KernelsContest(
        tuple(by_name[name] for name in chosen("size", sizes, by_name)),
        tuple(chosen("routing", routings, ROUTINGS)),
        contestants([] if names == "all" else names.split(","), _folders(peers)),
        DTYPES[dtype],
        repeats,
        extras,
        scale,
        torch.device(device),
    )


def _folders(peers: Sequence[str]) -> dict[str, Path]:
    folders = {}
    for peer in peers:
        name, equals, folder = peer.partition("=")
        if not equals:
            raise ValueError(f"peer={peer!r} names no folder; use NAME=DIR")
        folders[name] = Path(folder)
    return folders


@dataclass
class Found:
    """All that was found so far. absent: contestants that could not be made, and why.

    source: "measured" on a GPU; "rehearsed" elsewhere, where times mean nothing.
    """

    source: str
    machine: str
    dtype: str
    repeats: int
    absent: dict[str, str] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every check of ours does."""
        wrong = any(row.wrong for row in self.measured if row.contestant == OURS)
        return OURS not in self.absent and not wrong and all(finding.holds for finding in self.findings)

    def report(self) -> Report:
        """Times, errors, checks of ours."""
        source = self.source.upper()
        timed = [row for row in self.measured if row.samples_ms]
        sheets = [
            Sheet(f"{source}: times", timed, without=("errors", "wrong")),
            Sheet(f"{source}: errors", self.measured, without=("ms", "tflops", "to_ours", "bytes")),
            Sheet(f"CHECKED: {OURS}", self.findings),
        ]
        notes = [
            f"{self.machine}; {self.dtype}",
            f"ms: median [p20, p80] of {self.repeats} repetitions, contestants taking turns, the L2 cache of a GPU "
            f"flushed before each. / {OURS}: forward + backward over ours of the same repetition; above 1 we are "
            "faster.",
            "TFLOP/s: 6, 12 and 18 times T·K·H·I for forward, backward and both, padding not counted, nor the router "
            "under the routing 'router', whose time is in all three.",
            "kept: from forward to backward besides inputs and output. peak: of both, besides inputs.",
            f"error: ‖found - right‖ / ‖right‖ from float32, the worst of output and gradients. {OURS}'s are at most "
            f"{MOST_OF_GROUPED} times the least of torch's grouped GEMM. What is wrong is not timed.",
            *(f"absent: {name}, {why}" for name, why in self.absent.items()),
        ]
        return Report("kernels", "Kernels of one device", self.source, sheets, notes, data=plain(self))


def main(asked: KernelsContest, out: Path | None = None) -> int:
    """Checks, times, prints; 1 if a check of ours fails. ``out``: a folder for all numbers and a page of tables."""
    meter: Meter = GpuMeter(asked.device) if asked.device.type == "cuda" else CpuMeter()
    found = Found(meter.source, meter.machine, str(asked.dtype).removeprefix("torch."), asked.repeats)
    here = {}
    for name, make in asked.contestants.items():
        try:
            here[name] = make()
        except Exception as error:
            found.absent[name] = in_a_line(error)
    extras = asked.extras and OURS in here
    steps = len(asked.sizes) * len(asked.routings) * (len(here) + 1 + (OURS in here)) + 2 * extras
    page = json_path = None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        page, json_path = out / "kernels.md", out / "kernels.json"
    # Files that cannot be written are known before anything is measured.
    write(found.report(), page=page, json_path=json_path)
    with steps_told("kernels", steps) as tell:

        def add(measured: list[Measured], findings: list[Finding]) -> None:
            found.measured += measured
            found.findings += findings
            meter.free()
            write(found.report(), page=page, json_path=json_path)

        if extras:
            tell(f"{asked.scale.small.name}: inside torch")
            add([], _inside_torch(asked))
        for size in asked.sizes:
            # What was compiled for other sizes counts towards how often torch compiles a function.
            torch.compiler.reset()
            for routing in asked.routings:
                add(*_layer(size, routing, here, meter, asked, tell))
        # Last, as an illegal access would end all that comes after it.
        if extras:
            tell(f"{asked.scale.far.name}: offsets")
            check = partial(far_offsets, asked.scale.far, asked.dtype, asked.device)
            add([], [found_of(asked.scale.far.name, "offsets", check)])
    publish(found.report())
    return int(not found.holds)


def _layer(
    size: Size,
    routing: str,
    here: Mapping[str, Implementation],
    meter: Meter,
    asked: KernelsContest,
    tell: Callable[[str], None],
) -> tuple[list[Measured], list[Finding]]:
    """Of a layer that cannot even be drawn, every contestant is wrong."""
    try:
        return measure_layer(size, routing, here, meter, asked.dtype, asked.repeats, asked.scale.bit_runs, tell)
    except Exception as error:
        return [Measured(size, routing, name, wrong=in_a_line(error)) for name in here], []


def _inside_torch(asked: KernelsContest) -> list[Finding]:
    small = asked.scale.small

    def layer(seed: int = 0) -> Layer:
        return draw_layer(small, "uniform", asked.dtype, asked.device, seed)

    # Drawn by each check, so that one after which nothing can be drawn any more does not end the rest.
    checks = {
        "torch.compile(fullgraph=True)": lambda: compiled_whole(layer()),
        "activation checkpointing": lambda: recomputed(layer()),
    }
    if asked.device.type == "cuda":
        checks["CUDA graph"] = lambda: graph_replayed(layer(), layer(1))
    return [found_of(f"{small.name}, uniform", what, check) for what, check in checks.items()]
