"""The kernels of one device beside their contestants: checked first, then timed, on the same layers and choices.

Whatever a contestant raises becomes a line of the report, which is written anew after every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from moesys.bench.harness.meters import CpuMeter, GpuMeter, Meter
from moesys.bench.harness.steps import steps_told
from moesys.bench.kernels.aot import SIZES, Size
from moesys.bench.kernels.case import Measured, found_of, measure_case
from moesys.bench.kernels.checks import Finding, compiled_whole, far_offsets, graph_replayed, in_a_line, recomputed
from moesys.bench.kernels.contestants import OURS, contestants
from moesys.bench.kernels.drawn_layer import Contestant, Layer, draw_layer
from moesys.bench.kernels.report import Report, print_report, write_report
from moesys.bench.kernels.routing import ROUTINGS
from moesys.kernels.experts.numerics import INTERPRETED

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
class Plan:
    """What is asked for: names are checked, contestants not yet made."""

    sizes: tuple[Size, ...]
    routings: tuple[str, ...]
    contestants: Mapping[str, Callable[[], Contestant]]
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


def plan(
    sizes: str = "all",
    routings: str = "all",
    names: str = "all",
    *,
    peers: Sequence[str] = (),
    dtype: str = "bfloat16",
    repeats: int = 15,
    extras: bool = True,
    device: str = "cuda",
) -> Plan:
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
    chosen = contestants([] if names == "all" else names.split(","), _folders(peers))
    return Plan(
        tuple(by_name[name] for name in _chosen("size", sizes, tuple(by_name))),
        _chosen("routing", routings, ROUTINGS),
        chosen,
        DTYPES[dtype],
        repeats,
        extras,
        scale,
        torch.device(device),
    )


def _chosen(what: str, words: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(known) if words == "all" else tuple(words.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"{what}={name!r} is not known; use all or some of {', '.join(known)}")
    return names


def _folders(peers: Sequence[str]) -> dict[str, Path]:
    folders = {}
    for peer in peers:
        name, equals, folder = peer.partition("=")
        if not equals:
            raise ValueError(f"peer={peer!r} names no folder; use NAME=DIR")
        folders[name] = Path(folder)
    return folders


def main(plan: Plan, out: Path | None = None) -> int:
    """Checks, times, prints; 1 if a check of ours fails. ``out``: a folder for all numbers and a page of tables."""
    meter: Meter = GpuMeter(plan.device) if plan.device.type == "cuda" else CpuMeter()
    report = Report(meter.source, meter.machine, str(plan.dtype).removeprefix("torch."), plan.repeats)
    here = {}
    for name, make in plan.contestants.items():
        try:
            here[name] = make()
        except Exception as error:
            report.absent[name] = in_a_line(error)
    extras = plan.extras and OURS in here
    steps = len(plan.sizes) * len(plan.routings) * (len(here) + 1 + (OURS in here)) + 2 * extras
    if out is not None:
        # A folder that cannot be written to is known before anything is measured.
        write_report(report, out)
    with steps_told("kernels", steps) as tell:

        def add(measured: list[Measured], findings: list[Finding]) -> None:
            report.measured += measured
            report.findings += findings
            meter.free()
            if out is not None:
                write_report(report, out)

        if extras:
            tell(f"{plan.scale.small.name}: inside torch")
            add([], _inside_torch(plan))
        for size in plan.sizes:
            # What was compiled for other sizes counts towards how often torch compiles a function.
            torch.compiler.reset()
            for routing in plan.routings:
                add(*_case(size, routing, here, meter, plan, tell))
        # Last, as an illegal access would end all that comes after it.
        if extras:
            tell(f"{plan.scale.far.name}: offsets")
            check = partial(far_offsets, plan.scale.far, plan.dtype, plan.device)
            add([], [found_of(plan.scale.far.name, "offsets", check)])
    print_report(report)
    return int(not report.holds)


def _case(
    size: Size,
    routing: str,
    here: Mapping[str, Contestant],
    meter: Meter,
    plan: Plan,
    tell: Callable[[str], None],
) -> tuple[list[Measured], list[Finding]]:
    """Of a layer that cannot even be drawn, every contestant is wrong."""
    try:
        return measure_case(size, routing, here, meter, plan.dtype, plan.repeats, plan.scale.bit_runs, tell)
    except Exception as error:
        return [Measured(size, routing, name, wrong=in_a_line(error)) for name in here], []


def _inside_torch(plan: Plan) -> list[Finding]:
    small = plan.scale.small

    def layer(seed: int = 0) -> Layer:
        return draw_layer(small, "uniform", plan.dtype, plan.device, seed)

    # Drawn by each check, so that one after which nothing can be drawn any more does not end the rest.
    checks = {
        "torch.compile(fullgraph=True)": lambda: compiled_whole(layer()),
        "activation checkpointing": lambda: recomputed(layer()),
    }
    if plan.device.type == "cuda":
        checks["CUDA graph"] = lambda: graph_replayed(layer(), layer(1))
    return [found_of(f"{small.name}, uniform", what, check) for what, check in checks.items()]
