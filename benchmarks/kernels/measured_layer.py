"""One layer of the kernels' bench: every implementation checked, then those that passed timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch

from benchmarks.harness.contest import Case, Contestant, hold
from benchmarks.harness.meters import Bytes, Meter
from benchmarks.kernels.aot import Size
from benchmarks.kernels.checks import Finding, found_of, same_bits, same_bits_in_other_blocks, wrong_errors
from benchmarks.kernels.contestants import GROUPED, OURS
from benchmarks.kernels.drawn_layer import Implementation, Layer, Results, Run, draw_layer
from benchmarks.kernels.reference import relative_errors
from moesys.lab.runs.stopwatch import Spread
from moesys.lab.show.sheets import Column

WHOLE = "forward + backward"
# Multiplications and additions of a gated expert, of which H·I times so many for each row.
FLOPS = {"forward": 6, "backward": 12, WHOLE: 18}


@dataclass(frozen=True)
class Measured:
    """One implementation on one layer.

    wrong: why it was not timed, "" where it was. errors: ``relative_errors``, empty where it raised. samples_ms: of
    each direction, by repetition. to_ours: its forward and backward over ours. bytes: None where nobody counts them.
    """

    size: Annotated[Size, Column("size", lambda size: size.name)]
    routing: Annotated[str, Column("routing")]
    contestant: Annotated[str, Column("contestant")]
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    to_ours: Annotated[Spread | None, Column(f"/ {OURS}")] = None
    bytes: Annotated[
        Bytes | None,
        Column("kept, MB", lambda of: f"{of.kept / 1e6:.0f}"),
        Column("peak, MB", lambda of: f"{of.peak / 1e6:.0f}"),
    ] = None
    errors: Annotated[dict[str, float], Column("{}", ".1e")] = field(default_factory=dict)
    wrong: Annotated[str, Column("wrong")] = ""

    @property
    def ms(self) -> Annotated[dict[str, Spread], Column("{}, ms", after="samples_ms")]:
        return {direction: Spread.of(of_ms) for direction, of_ms in self.samples_ms.items()}

    @property
    def tflops(self) -> Annotated[dict[str, float], Column("{}, TFLOP/s", ".1f", after="ms")]:
        """10¹² operations a second at the median; those on padding are not counted, nor the router's."""
        _, T, H, I, _, K = self.size
        return {name: FLOPS[name] * T * K * I * H / spread.median / 1e9 for name, spread in self.ms.items()}


def measure_layer(
    size: Size,
    routing: str,
    implementations: Mapping[str, Implementation],
    meter: Meter,
    dtype: torch.dtype,
    repeats: int,
    bit_runs: int,
    tell: Callable[[str], None],
) -> tuple[list[Measured], list[Finding]]:
    """In the order of ``implementations``, and what was found of ours. Raises nothing that one of them raises.

    repeats: timed repetitions, none to check alone. bit_runs: how often bits are compared.
    """
    where = f"{size.name}, {routing}"
    layer = draw_layer(size, routing, dtype, meter.device)
    errors: dict[str, dict[str, float]] = {}
    findings: list[Finding] = []

    def wrong(name: str, results: Results) -> str:
        errors[name] = relative_errors(layer, results)
        del results
        if name != OURS:
            return wrong_errors(errors[name], dtype)
        grouped = [errors[of] for of in GROUPED if of in errors and not wrong_errors(errors[of], dtype)]
        tell(f"{where}: bits of {OURS}")
        findings.append(found_of(where, "equal bits", partial(same_bits, layer, bit_runs)))
        findings.append(found_of(where, "equal bits in other tiles", partial(same_bits_in_other_blocks, layer)))
        falls_short = [finding.says for finding in findings if not finding.holds]
        return "; ".join(filter(None, [wrong_errors(errors[name], dtype, grouped), *falls_short]))

    case = Case(
        {name: partial(_contestant, of, layer, meter) for name, of in implementations.items()},
        wrong,
        after_check=meter.free,
        stopwatch=lambda prepare: meter.ms(prepare()),  # type: ignore[arg-type]
    )
    found = hold(case, repeats, lambda step: tell(f"{where}: {step}"))
    ours_ms = found[OURS].samples_ms if OURS in found else {}
    rows = []
    for name, of in found.items():
        compared = name != OURS and of.samples_ms and ours_ms
        to_ours = Spread.of_ratios(of.samples_ms[WHOLE], ours_ms[WHOLE]) if compared else None
        bytes_ = of.metrics if of.samples_ms else None
        rows.append(Measured(size, routing, name, of.samples_ms, to_ours, bytes_, errors.get(name, {}), of.wrong))
    return rows, findings


def _contestant(implementation: Implementation, layer: Layer, meter: Meter) -> Contestant:
    """Its works, once called, give what is to be timed, of which the forward of a backward is no part."""
    run = Run(implementation, layer)
    works = {
        "forward": lambda: run.forward,
        "backward": lambda: partial(run.backward_of, run.forward()),
        WHOLE: lambda: run.forward_backward,
    }
    return Contestant(run.results, works, partial(meter.bytes_of, run.forward, run.backward_of))
