"""One layer of the kernels' bench: every contestant checked, then those that passed timed side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from moesys.bench.harness.meters import Bytes, Meter
from moesys.bench.harness.stopwatch import interleave
from moesys.bench.kernels.aot import Size
from moesys.bench.kernels.checks import Finding, in_a_line, same_bits, same_bits_in_other_blocks, wrong_errors
from moesys.bench.kernels.contestants import GROUPED, OURS
from moesys.bench.kernels.drawn_layer import Contestant, Layer, Run, draw_layer
from moesys.bench.kernels.reference import relative_errors

# Multiplications and additions of a gated expert, of which H·I times so many for each row.
FLOPS = {"forward": 6, "backward": 12, "forward + backward": 18}


@dataclass
class Measured:
    """One contestant on one layer.

    wrong: why it was not timed, "" where it was. errors: ``relative_errors``, empty where it raised. samples_ms: of
    each direction, by repetition. bytes: None where nobody counts them.
    """

    size: Size
    routing: str
    contestant: str
    wrong: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    bytes: Bytes | None = None

    def median_ms(self, direction: str) -> float:
        return float(torch.tensor(self.samples_ms[direction], dtype=torch.float64).quantile(0.5))

    def tflops(self, direction: str) -> float:
        """10¹² operations a second at the median; those on padding are not counted, nor the router's."""
        _, T, H, I, _, K = self.size
        return FLOPS[direction] * T * K * I * H / self.median_ms(direction) / 1e9


def measure_case(
    size: Size,
    routing: str,
    contestants: Mapping[str, Contestant],
    meter: Meter,
    dtype: torch.dtype,
    repeats: int,
    bit_runs: int,
    tell: Callable[[str], None],
) -> tuple[list[Measured], list[Finding]]:
    """In the order of ``contestants``, and what was found of ours. Raises nothing that a contestant raises."""
    layer = draw_layer(size, routing, dtype, meter.device)
    measured = {name: Measured(size, routing, name) for name in contestants}
    for name, contestant in contestants.items():
        tell(f"{size.name}, {routing}: check {name}")
        _check(measured[name], contestant, layer)
        meter.free()
    grouped = [measured[name].errors for name in GROUPED if name in measured and not measured[name].wrong]
    findings: list[Finding] = []
    if OURS in measured and measured[OURS].errors:
        ours = measured[OURS]
        ours.wrong = wrong_errors(ours.errors, dtype, grouped)
        tell(f"{size.name}, {routing}: bits of {OURS}")
        findings = [
            found_of(f"{size.name}, {routing}", "equal bits", partial(same_bits, layer, bit_runs)),
            found_of(f"{size.name}, {routing}", "equal bits in other tiles", partial(same_bits_in_other_blocks, layer)),
        ]
        ours.wrong = "; ".join([ours.wrong, *(finding.says for finding in findings if not finding.holds)]).strip("; ")
        meter.free()
    tell(f"{size.name}, {routing}: time")
    if repeats:
        _time({name: found for name, found in measured.items() if not found.wrong}, contestants, layer, meter, repeats)
    return list(measured.values()), findings


def found_of(where: str, what: str, check: Callable[[], Finding]) -> Finding:
    """What ``check`` finds; one that raises does not hold."""
    try:
        return check()
    except Exception as error:
        return Finding(where, what, False, in_a_line(error))


def _check(measured: Measured, contestant: Contestant, layer: Layer) -> None:
    try:
        measured.errors = relative_errors(layer, Run(contestant, layer).results())
        measured.wrong = wrong_errors(measured.errors, layer.x_TH.dtype)
    except Exception as error:
        measured.wrong = in_a_line(error)


def _time(
    measured: Mapping[str, Measured],
    contestants: Mapping[str, Contestant],
    layer: Layer,
    meter: Meter,
    repeats: int,
) -> None:
    """Fills in times and bytes. A contestant that raises here is wrong from then on."""
    runs: dict[str, Run] = {}
    for name, found in measured.items():
        try:
            runs[name] = Run(contestants[name], layer)
            found.bytes = meter.bytes_of(runs[name].forward, runs[name].backward_of)
        except Exception as error:
            found.wrong = in_a_line(error)
    for direction in FLOPS:
        ready = {name: _Ready(run, direction, measured[name]) for name, run in runs.items()}
        samples_ms = interleave(ready, repeats, stopwatch=partial(_watch, meter))
        for name, found in measured.items():
            if not found.wrong:
                found.samples_ms[direction] = samples_ms[name]
    for found in measured.values():
        if found.wrong:
            found.samples_ms.clear()


@dataclass(frozen=True)
class _Ready:
    """Called, it gives the work to be timed, of which the forward of a backward is no part."""

    run: Run
    direction: str
    measured: Measured

    def __call__(self) -> Callable[[], object]:
        if self.direction == "backward":
            return partial(self.run.backward_of, self.run.forward())
        return self.run.forward if self.direction == "forward" else self.run.forward_backward


def _watch(meter: Meter, ready: Callable[[], object]) -> float:
    assert isinstance(ready, _Ready)
    if ready.measured.wrong:
        return math.nan
    try:
        return meter.ms(ready())
    except Exception as error:
        ready.measured.wrong = in_a_line(error)
        return math.nan
