"""The command ``calibrate``: measures, shows the results and how well they fit, and writes the ``ClusterSpec``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibrate.calibrated_rows import Link, four_digits
from benchmarks.calibrate.grids import GRIDS
from benchmarks.calibrate.measurement import PARTS, Calibration, calibrate
from benchmarks.calibrate.model_check import ModelCheck, check_models
from benchmarks.calibrate.other_work import OtherWork
from benchmarks.calibrate.step_check import StepCheck, check_steps
from benchmarks.calibrate.windows import Effort
from moesys.lab.ranks.torchrun_ranks import joins, start_ranks, writes
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.reports import Report, publish, write
from moesys.lab.show.sheets import Sheet
from moesys.lab.show.steps import steps_told
from moesys.whole_file import write_whole

MOST_LOCAL_RANKS = 8


def main(
    num_ranks: int | None = None,
    device_type: str = "cpu",
    *,
    threads: int = 1,
    repeats: int = 7,
    out: Path | None = None,
    page: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measure, write, print. Under torchrun all ranks call it, and the first writes and prints.

    ``json_path`` gets all samples so far after each part, so that what was measured outlives a crash.
    """
    grid = GRIDS[device_type]

    def keep(samples: dict[str, Any]) -> None:
        if json_path is not None and writes():
            so_far = {"machine": machine_line(threads), "finished": False, "samples_s": samples}
            write(Report("calibrate", "", "measured", (), data=so_far), json_path=json_path)

    count = num_ranks or min(MOST_LOCAL_RANKS, available_cores())
    ranks, cluster = start_ranks(count, device_type, threads=threads)
    num_steps = len(PARTS) + bool(grid.layers) + bool(grid.models)
    with closing(ranks), steps_told("calibrate", num_steps) if writes() else nullcontext(lambda _: None) as tell:
        effort, others = Effort(repeats=repeats), OtherWork(ranks, cluster)
        found = calibrate(ranks, cluster, device_type=device_type, grid=grid, effort=effort, tell=tell, keep=keep)
        if grid.layers:
            tell("steps of a layer")
        checks = check_steps(ranks, found.cluster, grid.layers, repeats)
        if grid.models:
            tell("steps of models")
        model_checks = check_models(ranks, found.cluster, grid.models, repeats)
        disturbed = others.warnings()
    if writes():
        # First, as whoever reads what is printed may stop before its end.
        if out is not None:
            write_whole(out, spec_text(found, out.suffix, disturbed))
        publish(report(found, checks, model_checks, threads, disturbed), page=page, json_path=json_path)
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


def spec_text(found: Calibration, suffix: str, warnings: Sequence[str] = ()) -> str:
    """The ``ClusterSpec`` for a file; TOML says above it what was not measured."""
    if suffix == ".json":
        return found.cluster.to_json() + "\n"
    notes = [f"{figure.field}: {figure.how}" for figure in found.figures if not figure.measured]
    head = ["Measured by python -m benchmarks calibrate.", *warnings, *notes]
    return "".join(f"# {line}\n" for line in head) + "\n" + found.cluster.to_toml()


def report(
    found: Calibration,
    checks: Sequence[StepCheck],
    model_checks: Sequence[ModelCheck],
    threads: int,
    warnings: Sequence[str],
) -> Report:
    notes = [*legend(found, threads), *warnings]
    messages = [message for link in found.links for message in link.messages]
    sheets = [
        Sheet("MEASURED: a rank's experts, all ranks at once", found.products),
        Sheet("MEASURED: attention and what is no product, all ranks at once", found.works, group_by="work"),
        Sheet("MEASURED: links", messages, group_by="link"),
        Sheet("MEASURED and SIMULATED: steps of one MoE layer, forward + backward", checks),
        Sheet("MEASURED and SIMULATED: steps of whole models, forward + backward + AdamW", model_checks),
        Sheet(f"MEASURED: {found.cluster.name}", found.figures, notes),
    ]
    data = {"machine": machine_line(threads), **vars(found), "steps": checks, "models": model_checks}
    title = f"python -m benchmarks calibrate, measured: {found.cluster.name.rpartition(',')[0]}"
    return Report("calibrate", title, "measured", sheets, data=data)


def legend(found: Calibration, threads: int) -> list[str]:
    lines = [
        f"{machine_line(threads)}; {found.cluster.num_ranks} ranks, all measured at once.",
        "n: windows of several calls. Predicted: by the cost model with these figures. Error: predicted over measured; "
        "nothing is fitted to what is held out, nor to steps.",
    ]
    if found.links:
        lines.append("An all-to-all counts the bytes of its busiest link, and is over when it is on the slowest rank.")
    lines += [_line_of(link) for link in found.links]
    return lines


def _line_of(link: Link) -> str:
    line = link.line
    return f"{link.name}: {four_digits(line.latency_us)} us + bytes / {four_digits(line.gb_per_s)} GB/s."
