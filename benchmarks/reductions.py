"""What ``LayoutInvariant`` costs one rank of ``MoELayer``: forward and backward over those of ``Ordered``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from benchmarks.harness.contest import Case, Contestant, Near, hold
from benchmarks.harness.layer_steps import LayerSteps, rank_generator
from benchmarks.one_layer import TOLERANCE, ScaledLayer
from moesys.config import LayoutInvariant, Ordered, Strategy
from moesys.lab.runs.stopwatch import Spread, machine_line, processor_ms, wall_ms
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
from moesys.moe.expert_parameters import DTYPES
from moesys.moe.layer import MoELayer

REDUCTIONS = (Ordered(), LayoutInvariant())


@dataclass(frozen=True)
class Row:
    """What was measured for one case. ``samples_ms``: of each reduction, by repetition; empty where a result was
    wrong.
    """

    shape: Annotated[str, Column("shape")]
    num_tokens: Annotated[int, Column("T")]
    dtype: Annotated[str, Column("dtype")]
    samples_ms: dict[str, list[float]]
    wrong: Annotated[str, Column("wrong")]

    @property
    def median_ms(self) -> Annotated[dict[str, float], Column("{}, ms", ".1f", after="samples_ms")]:
        return {name: statistics.median(of) for name, of in self.samples_ms.items()}

    @property
    def over_ordered(self) -> Annotated[Spread | None, Column("over ordered", after="median_ms")]:
        ordered, invariant = (self.samples_ms.get(reduction.kind) for reduction in REDUCTIONS)
        return Spread.of_ratios(invariant, ordered) if invariant and ordered else None


def bench_reductions(cases: Sequence[ScaledLayer], *, repeats: int, threads: int | None = None) -> list[Row]:
    """Measures each case; ``threads`` is torch's own number by default, and with one it is processor time. Reductions
    take turns in an order that is drawn, and none is timed whose results are not those of ``Ordered``.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    rows = []
    try:
        with steps_told("reductions", len(cases)) as tell:
            for case in cases:
                tell(f"{case.name}, {case.shape.dtype}")
                rows.append(_measured(case, repeats))
    finally:
        torch.set_num_threads(threads_before)
    return rows


def main(
    cases: Sequence[ScaledLayer], *, repeats: int, threads: int | None = None, json_path: Path | None = None
) -> int:
    """Measures, writes, prints; the exit code: 1 if a result was wrong."""
    rows = bench_reductions(cases, repeats=repeats, threads=threads)
    machine = machine_line(threads or torch.get_num_threads())
    notes = [
        machine,
        "over ordered: the time of forward + backward with LayoutInvariant() over that with Ordered(), above 1 it "
        f"costs; median [p20, p80] of {repeats} repetitions, paired. One rank: nothing travels.",
        "Processor time of one thread, to which other work on the machine does not count."
        if threads == 1
        else "Wall time.",
    ]
    title = "MEASURED: what a reduction costs one rank of MoELayer"
    report = Report(
        "reductions", title, "measured", [Sheet(title, rows, notes)], data={"machine": machine, "rows": rows}
    )
    publish(report, json_path=json_path)
    return int(any(row.wrong for row in rows))


def _measured(case: ScaledLayer, repeats: int) -> Row:
    strategies: dict[str, Strategy] = {of.kind: Strategy(name=of.kind, reduction=of) for of in REDUCTIONS}
    x, dy = (
        torch.randn(case.num_tokens, case.shape.hidden_size, generator=rank_generator()).to(DTYPES[case.shape.dtype])
        for _ in range(2)
    )
    steps = {name: LayerSteps(MoELayer(case.shape, strategy), x.clone(), dy) for name, strategy in strategies.items()}
    setups = {name: partial(Contestant, of.results, {"step": of.step}) for name, of in steps.items()}

    def prepare() -> None:
        for of in steps.values():
            of.prepare()

    wrong = Near(TOLERANCE[case.shape.dtype], "ordered")
    # One thread that waits for nobody: so other work on the machine need not count.
    stopwatch = processor_ms if torch.get_num_threads() == 1 else wall_ms
    found = hold(Case(setups, wrong, before=prepare, stopwatch=stopwatch, all_or_none=True), repeats)
    for of in steps.values():
        of.close()
    samples_ms = {name: outcome.samples_ms["step"] for name, outcome in found.items() if outcome.samples_ms}
    why = "; ".join(outcome.wrong for outcome in found.values() if outcome.wrong)
    return Row(case.name, case.num_tokens, case.shape.dtype, samples_ms, why)
