"""``moesys bench calibrate``: measures, shows what was found and how well it fits, and writes the ``ClusterSpec``."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from moesys.bench.calibrate.check import StepCheck, check_steps
from moesys.bench.calibrate.measurement import GRIDS, PARTS, Calibration, Figure, Link, calibrate
from moesys.bench.calibrate.rank import Effort
from moesys.bench.harness.bench_ranks import TorchrunRanks, joins
from moesys.bench.harness.steps import steps_told
from moesys.bench.harness.stopwatch import machine_line
from moesys.config import ClusterSpec
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.records import replace_file
from moesys.lab.show.console import print_full

MOST_LOCAL_RANKS = 8


def main(
    num_ranks: int | None = None,
    device_type: str = "cpu",
    *,
    threads: int = 1,
    repeats: int = 7,
    out: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measure, write, print. Under torchrun all ranks call it, and the first writes and prints.

    ``json_path`` gets all samples so far after each part, so that what was measured outlives a crash.
    """
    disturbed = other_work()
    ranks, cluster, writes = _start(num_ranks, device_type, threads)
    try:
        grid = GRIDS[device_type]
        with steps_told("calibrate", len(PARTS) + bool(grid.layers)) if writes else _untold() as tell:
            found = calibrate(
                ranks,
                cluster,
                device_type=device_type,
                grid=grid,
                effort=Effort(repeats=repeats),
                tell=tell,
                keep=lambda samples: _keep(samples, json_path if writes else None),
            )
            if grid.layers:
                tell("steps of a layer")
            checks = check_steps(ranks, found.cluster, grid.layers, repeats)
    finally:
        ranks.close()
    if writes:
        # First, as whoever reads what is printed may stop before its end.
        if out is not None:
            replace_file(out, spec_text(found, out.suffix, disturbed))
        if json_path is not None:
            replace_file(json_path, json.dumps(to_json(found, checks, threads), indent=1) + "\n")
        print_full(products_table(found))
        if found.links:
            print_full(links_table(found))
        if checks:
            print_full(steps_table(checks))
        print_full(figures_table(found), [*legend(found, threads), *disturbed])
    return 0


def check(num_ranks: int | None, device_type: str) -> None:
    """Raises ValueError where such ranks cannot be had."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU here; use --device cpu")
    if joins():
        started = int(os.environ["WORLD_SIZE"])
        if num_ranks not in (None, started):
            raise ValueError(f"ranks={num_ranks}, but torchrun started {started}; leave --ranks out")
    elif device_type == "cuda":
        raise ValueError(
            "device='cuda' takes the ranks that torchrun starts, one a GPU; run torchrun --nproc-per-node 8 -m moesys "
            "bench calibrate --device cuda, with one GPU too"
        )


def other_work() -> list[str]:
    """A warning where more work waits for the machine than it has cores, before anything is measured."""
    cores, load = available_cores(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores:
        return []
    return [f"The machine had other work (load {load:.1f} on {cores} cores): measure again when it has none."]


def spec_text(found: Calibration, suffix: str, warnings: Sequence[str] = ()) -> str:
    """The ``ClusterSpec`` for a file; TOML says above it what was not measured."""
    if suffix == ".json":
        return found.cluster.to_json() + "\n"
    notes = [f"{figure.field}: {figure.how}" for figure in found.figures if not figure.measured]
    head = ["Measured by moesys bench calibrate.", *warnings, *notes]
    return "".join(f"# {line}\n" for line in head) + "\n" + found.cluster.to_toml()


def figures_table(found: Calibration) -> Table:
    table = Table(title=f"MEASURED: {found.cluster.name}", title_justify="left")
    table.add_column("field", no_wrap=True)
    for column in ("figure", "p20 to p80", "n", "fit: median, worst error"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("from")
    for figure in found.figures:
        spread = figure.spread
        table.add_row(
            figure.field,
            _number(figure.value) if figure.measured else "n/a",
            f"{_number(spread.p20)} to {_number(spread.p80)}" if spread else "",
            str(spread.n) if spread else "",
            _errors(figure),
            figure.how,
        )
    return table


def products_table(found: Calibration) -> Table:
    table = Table(title="MEASURED: forward products of a rank's experts, all ranks at once", title_justify="left")
    for column in ("H", "I", "experts × rows", "ms", "p20 to p80", "TFLOP/s", "predicted, ms", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for case, seconds, predicted in zip(found.cases, found.product_seconds, found.predicted_seconds, strict=True):
        table.add_row(
            str(case.hidden_size),
            str(case.intermediate_size),
            f"{len(case.rows)} × {case.rows[0]}",
            _number(seconds.median * 1e3),
            f"{_number(seconds.p20 * 1e3)} to {_number(seconds.p80 * 1e3)}",
            _number(case.flops / seconds.median / 1e12),
            _number(predicted * 1e3),
            f"{predicted / seconds.median - 1:+.0%}",
        )
    return table


def links_table(found: Calibration) -> Table:
    table = Table(title="MEASURED: links", title_justify="left")
    table.add_column("link", no_wrap=True)
    for column in ("bytes", "us", "p20 to p80", "n", "fit, us", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for link in found.links:
        for num_bytes, seconds in link.seconds.items():
            error = link.line.errors[num_bytes]
            table.add_row(
                link.name,
                f"{num_bytes:,}",
                _number(seconds.median * 1e6),
                f"{_number(seconds.p20 * 1e6)} to {_number(seconds.p80 * 1e6)}",
                str(seconds.n),
                _number(seconds.median * (1 + error) * 1e6),
                f"{error:+.0%}",
            )
        table.add_section()
    return table


def steps_table(checks: Sequence[StepCheck]) -> Table:
    """What the figures are for: a step as measured, and as simulated with them."""
    title = "MEASURED and SIMULATED: steps of one MoE layer, forward + backward"
    table = Table(title=title, title_justify="left")
    for column in ("H", "I", "E", "K", "tokens a rank"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for column in ("measured, ms", "p20 to p80", "n", "simulated, ms", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for check in checks:
        shape, measured = check.case.shape, check.measured_ms
        table.add_row(
            *map(str, (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k)),
            str(check.case.num_tokens),
            check.strategy,
            _number(measured.median),
            f"{_number(measured.p20)} to {_number(measured.p80)}",
            str(measured.n),
            _number(check.simulated_ms),
            f"{check.error:+.0%}",
        )
    return table


def legend(found: Calibration, threads: int) -> list[str]:
    lines = [
        f"{machine_line(threads)}; {found.cluster.num_ranks} ranks, all measured at once.",
        "n: windows of several calls. Predicted: by the cost model with these figures. Error: predicted over measured.",
    ]
    if found.links:
        lines.append("An all-to-all counts the bytes of its busiest link, and is over when it is on the slowest rank.")
    lines += [_line_of(link) for link in found.links]
    return lines


def to_json(found: Calibration, checks: Sequence[StepCheck], threads: int) -> dict[str, Any]:
    """Everything that was measured, with all samples."""
    return {
        "benchmark": "calibrate",
        "source": "measured",
        "machine": machine_line(threads),
        "date": datetime.date.today().isoformat(),
        "cluster": found.cluster.model_dump(mode="json"),
        "device": found.device_type,
        "dtype": found.dtype,
        "figures": [asdict(figure) for figure in found.figures],
        "products": [
            {**asdict(case), "seconds": asdict(seconds), "predicted_seconds": predicted}
            for case, seconds, predicted in zip(
                found.cases, found.product_seconds, found.predicted_seconds, strict=True
            )
        ],
        "links": [asdict(link) for link in found.links],
        "steps": [plain_step(check) for check in checks],
        "samples_s": plain(found.samples),
    }


def plain_step(check: StepCheck) -> dict[str, Any]:
    return {
        "model": check.case.shape.model_dump(mode="json"),
        "num_tokens": check.case.num_tokens,
        "strategy": check.strategy,
        "measured_ms": asdict(check.measured_ms),
        "simulated_ms": check.simulated_ms,
    }


def plain(value: Any) -> Any:
    """As JSON has it: dataclasses as their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _keep(samples: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        unfinished = {"benchmark": "calibrate", "source": "measured", "finished": False, "samples_s": plain(samples)}
        replace_file(path, json.dumps(unfinished, indent=1) + "\n")


def _start(
    num_ranks: int | None, device_type: str, threads: int
) -> tuple[LocalRanks | TorchrunRanks, ClusterSpec, bool]:
    """The ranks, which of them share a node, and whether this process is the one that prints and writes."""
    if joins():
        ranks = TorchrunRanks(device_type, threads)
        return ranks, ranks.cluster, ranks.writes
    count = num_ranks or min(MOST_LOCAL_RANKS, available_cores())
    return LocalRanks(count, threads=threads), ClusterSpec(ranks_per_node=count), True


@contextmanager
def _untold() -> Iterator[Callable[[str], None]]:
    yield lambda _: None


def _number(value: float) -> str:
    """Four digits."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _errors(figure: Figure) -> str:
    if not figure.errors:
        return ""
    sizes = np.abs(figure.errors)
    return f"{np.median(sizes):.0%}, {sizes.max():.0%}"


def _line_of(link: Link) -> str:
    line = link.line
    return f"{link.name}: {_number(line.latency_us)} us + bytes / {_number(line.gb_per_s)} GB/s."
