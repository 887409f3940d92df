"""The kernels of one device compared with other implementations: all are checked first, then timed, on the same layers.

An exception that a contestant raises becomes a line of the report, which is written again after each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from benchmarks.harness.contest import Case, Contestant, hold, in_a_line
from benchmarks.harness.meters import Bytes, CpuMeter, GpuMeter, GpuState, Meter, middle
from benchmarks.harness.options import chosen
from benchmarks.harness.stopwatch import interleave
from benchmarks.kernels.checks import (
    MOST_OF_GROUPED,
    Finding,
    far_offsets,
    found_of,
    inside_torch,
    same_bits,
    same_bits_in_other_blocks,
    wrong_errors,
)
from benchmarks.kernels.command import tile_words
from benchmarks.kernels.contestants import GROUPED, OURS, contestants
from benchmarks.kernels.drawn_layer import (
    ROUTINGS,
    SIZES,
    Implementation,
    Layer,
    Results,
    Run,
    Size,
    draw_layer,
    relative_errors,
)
from benchmarks.kernels.gemm_timer import Operands
from moesys.kernels.experts.products import INTERPRETED
from moesys.kernels.experts.tile_config import ShapeClass
from moesys.kernels.experts.tile_tuner import OPS, blocks_of
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, plain, publish, write

WHOLE, HELD = "forward + backward", "forward, host ahead"
# Multiplications and additions of a gated expert per row, in multiples of H·I; and of each kernel.
FLOPS = {"forward": 6, HELD: 6, "backward": 12, WHOLE: 18}
FLOPS_OF_OP = dict(zip(OPS, (4, 2, 2, 4, 6), strict=True))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Scale:
    """The layers that suit a device.

    small: the layer of the checks inside torch. far: a layer whose tensors have more than 2³¹ elements. bit_runs: the
    number of runs whose bits are compared.
    """

    sizes: tuple[Size, ...]
    small: Size
    far: Size
    bit_runs: int


# In the far layer all tensors except a and dweight have more than 2³¹ elements: 60 GB in 16 bits.
ON_GPU = Scale(SIZES, Size("small", 4096, 1024, 512, 32, 4), Size("far", 263168, 8192, 4096, 66, 1), bit_runs=20)
TOY = Size("toy", 40, 64, 32, 6, 2)
IN_INTERPRETER = Scale((TOY,), TOY, Size("far toy", 24, 32, 16, 6, 1), bit_runs=2)


@dataclass(frozen=True)
class KernelsContest:
    """The arguments of the benchmark, with known names; contestants are not constructed yet."""

    sizes: tuple[Size, ...]
    routings: tuple[str, ...]
    contestants: Mapping[str, Callable[[], Implementation]]
    dtype: torch.dtype
    repeats: int
    extras: bool
    scale: Scale
    device: torch.device


def require_device(device: str, dtype: str, *, without_gpu: str) -> None:
    """Raises ValueError if the kernels cannot run on ``device``; ``without_gpu`` is the message if there is no GPU."""
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
    """Returns the arguments from the words of a command line.

    Raises ValueError for an unknown name, and if the device is missing.
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


@dataclass(frozen=True)
class LayerResult:
    """The result of one implementation on one layer.

    wrong: why it was not timed, or "". errors: ``relative_errors``, empty if it raised. samples_ms: of each direction,
    by repetition. to_ours: its forward and backward divided by that of moesys. bytes: None if they are not counted.
    states: the GPU's while each direction was timed. ceiling: the TFLOP/s of sustained products in this run.
    """

    size: Annotated[Size, Column("size", lambda size: size.name)]
    routing: Annotated[str, Column("routing")]
    contestant: Annotated[str, Column("contestant")]
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    to_ours: Annotated[Quantiles | None, Column(f"/ {OURS}")] = None
    bytes: Annotated[
        Bytes | None,
        Column("kept, MB", lambda of: f"{of.kept / 1e6:.0f}"),
        Column("peak, MB", lambda of: f"{of.peak / 1e6:.0f}"),
    ] = None
    states: Annotated[dict[str, GpuState], Column("{}, MHz / W", str)] = field(default_factory=dict)
    ceiling: float | None = None
    errors: Annotated[dict[str, float], Column("{}", ".1e")] = field(default_factory=dict)
    wrong: Annotated[str, Column("wrong", wraps=True)] = ""

    @property
    def ms(self) -> Annotated[dict[str, Quantiles], Column("{}, ms", after="samples_ms")]:
        return {direction: Quantiles.of(of_ms) for direction, of_ms in self.samples_ms.items()}

    @property
    def tflops(self) -> Annotated[dict[str, float], Column("{}, TFLOP/s", ".1f", after="ms")]:
        """10¹² operations per second at the median, without those on padding and those of the router."""
        _, T, H, I, _, K = self.size
        return {name: FLOPS[name] * T * K * I * H / spread.median / 1e9 for name, spread in self.ms.items()}

    @property
    def share(self) -> Annotated[dict[str, float], Column("{}, of ceiling", ".2f", after="tflops")]:
        return {name: tflops / self.ceiling for name, tflops in self.tflops.items()} if self.ceiling else {}


@dataclass(frozen=True)
class KernelResult:
    """One kernel of moesys alone, with the host ahead of it. ceiling: as in ``LayerResult``."""

    size: Annotated[Size, Column("size", lambda size: size.name)]
    op: Annotated[str, Column("kernel")]
    tile: Annotated[str, Column("tile")]
    ms: Annotated[Quantiles, Column("ms")]
    tflops: Annotated[float, Column("TFLOP/s", ".1f")]
    ceiling: float | None
    state: Annotated[GpuState | None, Column("MHz / W", str)]

    @property
    def share(self) -> Annotated[float | None, Column("of ceiling", ".2f", after="tflops")]:
        return self.tflops / self.ceiling if self.ceiling else None


@dataclass
class ContestResults:
    """All results so far. absent: contestants that could not be constructed, with the reason.

    source: "measured" on a GPU; "rehearsed" elsewhere, where times mean nothing.
    """

    source: str
    machine: str
    dtype: str
    repeats: int
    absent: dict[str, str] = field(default_factory=dict)
    measured: list[LayerResult] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if every check of moesys holds."""
        wrong = any(row.wrong for row in self.measured if row.contestant == OURS)
        return OURS not in self.absent and not wrong and all(finding.holds for finding in self.findings)

    @property
    def worst(self) -> str:
        """Returns in words where moesys is slowest."""
        compared = [(row.to_ours.median, row) for row in self.measured if row.to_ours]
        if not compared:
            return f"Nothing is compared with {OURS}."
        ratio, row = min(compared, key=lambda each: each[0])
        says = f"Worst: {row.contestant} takes {ratio:.2f} of the time of {OURS} for {row.size.name}, {row.routing}"
        if shares := [(kernel.share, kernel.op, kernel.size.name) for kernel in self.kernels if kernel.share]:
            share, op, size = min(shares)
            says += f"; {op} of {size} has the least share of the ceiling, {share:.2f}"
        return f"{says}."

    def report(self) -> Report:
        """Returns the tables of times, errors and checks."""
        source = self.source.upper()
        timed = [row for row in self.measured if row.samples_ms]
        sheets = [
            Sheet(f"{source}: times", timed, without=("errors", "wrong")),
            Sheet(f"{source}: kernels of {OURS}", self.kernels),
            Sheet(f"{source}: errors", self.measured, without=("ms", "tflops", "share", "to_ours", "bytes", "states")),
            Sheet(f"CHECKED: {OURS}", self.findings),
        ]
        notes = [
            f"{self.machine}; {self.dtype}",
            f"ms: median [p20, p80] of {self.repeats} interleaved repetitions; the L2 cache of a GPU is flushed before "
            f"each. / {OURS}: forward + backward divided by that of {OURS} in the same repetition; above 1, {OURS} is "
            "faster.",
            "TFLOP/s: 6, 12 and 18 times T·K·H·I for forward, backward and both, without padding and without the "
            "router. With the routing 'router', all times include the router.",
            f"{HELD}: the stream is held while the host launches, as it is where a training has launched more before. "
            "of ceiling: divided by the pace of torch's product of large matrices, sustained for seconds before this "
            "layer was timed. MHz / W: median clock and power while a work ran.",
            "kept: memory from forward to backward, without inputs and output. peak: the peak of both, without inputs.",
            f"error: ‖found - right‖ / ‖right‖ from float32, of output and gradients. Those of {OURS} are at most "
            f"{MOST_OF_GROUPED} times the smallest of torch's grouped GEMM. What is wrong is not timed.",
            *(f"absent: {name}, {why}" for name, why in self.absent.items()),
        ]
        return Report("kernels", "Kernels of one device", self.source, sheets, notes, [self.worst], plain(self))


def main(asked: KernelsContest, output: CommandOutput = AS_TABLES) -> int:
    """Checks, times and prints; returns 1 if a check of moesys fails."""
    meter: Meter = GpuMeter(asked.device) if asked.device.type == "cuda" else CpuMeter()
    found = ContestResults(meter.source, meter.machine, str(asked.dtype).removeprefix("torch."), asked.repeats)
    here = {}
    for name, make in asked.contestants.items():
        try:
            here[name] = make()
        except Exception as error:
            found.absent[name] = in_a_line(error)
    extras = asked.extras and OURS in here
    steps = len(asked.sizes) * (len(asked.routings) * (len(here) + 1 + (OURS in here)) + 1) + 2 * extras
    files = output.files(found.report())
    # A file that cannot be written fails before anything is measured.
    write(found.report(), **files)
    with steps_told("kernels", steps, output.quiet) as tell:

        def add(measured: list[LayerResult], findings: list[Finding], kernels: Sequence[KernelResult] = ()) -> None:
            found.measured += measured
            found.findings += findings
            found.kernels += kernels
            meter.free()
            write(found.report(), **files)

        if extras:
            tell(f"{asked.scale.small.name}: inside torch")
            add([], inside_torch(asked.scale.small, asked.dtype, asked.device))
        for size in asked.sizes:
            # torch limits how often it compiles a function, over all sizes.
            torch.compiler.reset()
            for routing in asked.routings:
                add(*measure_layer(asked, size, routing, here, meter, tell))
            if any(row.samples_ms for row in found.measured if (row.size, row.contestant) == (size, OURS)):
                tell(f"{size.name}: kernels")
                add([], [], measure_kernels(asked, size, meter, found.measured[-1].ceiling))
        # The last check, because nothing works after an illegal access.
        if extras:
            tell(f"{asked.scale.far.name}: offsets")
            check = partial(far_offsets, asked.scale.far, asked.dtype, asked.device)
            add([], [found_of(asked.scale.far.name, "offsets", check)])
    publish(found.report(), output)
    return int(not found.holds)


# --- one layer --------------------------------------------------------------------------------------------------------


def measure_layer(
    asked: KernelsContest,
    size: Size,
    routing: str,
    implementations: Mapping[str, Implementation],
    meter: Meter,
    tell: Callable[[str], None],
) -> tuple[list[LayerResult], list[Finding]]:
    """Checks and times all implementations, and returns their results in order and the checks of moesys.

    An exception that an implementation raises is part of its result. If the layer cannot be drawn, all of them are
    wrong.
    """
    where, dtype = f"{size.name}, {routing}", asked.dtype
    try:
        layer = draw_layer(size, routing, dtype, meter.device)
    except Exception as error:
        return [LayerResult(size, routing, name, wrong=in_a_line(error)) for name in implementations], []
    errors: dict[str, dict[str, float]] = {}
    findings: list[Finding] = []

    def wrong(name: str, results: Results) -> str:
        errors[name] = relative_errors(layer, results)
        del results
        if name != OURS:
            return wrong_errors(errors[name], dtype)
        grouped = [errors[of] for of in GROUPED if of in errors and not wrong_errors(errors[of], dtype)]
        tell(f"{where}: bits of {OURS}")
        findings.append(found_of(where, "equal bits", partial(same_bits, layer, asked.scale.bit_runs)))
        findings.append(found_of(where, "equal bits in other tiles", partial(same_bits_in_other_blocks, layer)))
        falls_short = [finding.says for finding in findings if not finding.holds]
        return "; ".join(filter(None, [wrong_errors(errors[name], dtype, grouped), *falls_short]))

    ceiling: float | None = None

    def warm_up() -> None:
        nonlocal ceiling
        ceiling = meter.sustained_tflops(dtype)

    case = Case(
        {name: partial(_contestant, of, layer, meter) for name, of in implementations.items()},
        wrong,
        after_check=meter.free,
        warm_up=warm_up,
        stopwatch=lambda prepare: meter.ms(prepare()),  # type: ignore[arg-type]
    )
    found = hold(case, asked.repeats, lambda step: tell(f"{where}: {step}"))
    ours_ms = found[OURS].samples_ms if OURS in found else {}
    rows = []
    for name, of in found.items():
        compared = name != OURS and of.samples_ms and ours_ms
        to_ours = Quantiles.of_ratios(of.samples_ms[WHOLE], ours_ms[WHOLE]) if compared else None
        bytes_, states = of.metrics if of.samples_ms else (None, {})
        wrongs = errors.get(name, {}), of.wrong
        rows.append(LayerResult(size, routing, name, of.samples_ms, to_ours, bytes_, states, ceiling, *wrongs))
    return rows, findings


def measure_kernels(asked: KernelsContest, size: Size, meter: Meter, ceiling: float | None) -> list[KernelResult]:
    """Times each kernel of moesys by itself, with an even routing and the tiles that a layer of this size uses."""
    _, T, H, I, E, K = size
    x_TH, down_EHI = (torch.empty(shape, dtype=asked.dtype, device="meta") for shape in ((T, H), (E, H, I)))
    shape = ShapeClass.of(x_TH, down_EHI, T * K, "swiglu")
    operands, blocks = Operands(shape, meter.device), blocks_of(shape, meter.device)
    states: dict[str, list[GpuState]] = {op: [] for op in OPS}

    def ms(op: str) -> float:
        meter.states, block = states[op], getattr(blocks, op)
        tiles = operands.tiles(block)
        meter.hold()
        return meter.ms(partial(operands.launch, op, block, tiles))

    samples_ms = interleave({op: partial(ms, op) for op in OPS}, asked.repeats)
    rows = []
    for op, of_ms in samples_ms.items():
        tflops = FLOPS_OF_OP[op] * operands.num_rows * H * I / Quantiles.of(of_ms).median / 1e9
        tile = tile_words(getattr(blocks, op))
        rows.append(KernelResult(size, op, tile, Quantiles.of(of_ms), tflops, ceiling, middle(states[op])))
    return rows


def _contestant(implementation: Implementation, layer: Layer, meter: Meter) -> Contestant:
    """Returns a contestant whose works return what is timed, so that a backward is timed without its forward."""
    run = Run(implementation, layer)
    works: dict[str, Callable[[], Callable[[], object]]] = {
        "forward": lambda: run.forward,
        HELD: lambda: run.forward,
        "backward": lambda: partial(run.backward_of, run.forward()),
        WHOLE: lambda: run.forward_backward,
    }
    states: dict[str, list[GpuState]] = {name: [] for name in works}

    def prepare(name: str) -> Callable[[], object]:
        work, meter.states = works[name](), states[name]
        if name == HELD:
            meter.hold()
        return work

    def metrics() -> tuple[Bytes | None, dict[str, GpuState]]:
        found = {name: state for name, each in states.items() if (state := middle(each))}
        return meter.bytes_of(run.forward, run.backward_of), found

    return Contestant(run.results, {name: partial(prepare, name) for name in works}, metrics)
