"""``moesys calibrate``: measures this machine or cluster, and writes it as a ``ClusterSpec``."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from moesys.files import write_whole
from moesys.lab.calibrate.cases import GRIDS
from moesys.lab.calibrate.measurement import PARTS, Calibration, calibrate, four_digits
from moesys.lab.calibrate.timings import Effort
from moesys.lab.commands.options import refusing
from moesys.lab.ranks.process_start import joins, writes
from moesys.lab.ranks.torchrun_ranks import start_ranks
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.steps import steps_told
from moesys.lab.show.tables import Report, Sheet, publish, write

MOST_LOCAL_RANKS = 8


def calibrate_command(
    num_ranks: int | None = None,
    device_type: str = "cpu",
    *,
    threads: int = 1,
    repeats: int = 7,
    out: Path | None = None,
    page: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measures, writes and prints. Under torchrun all ranks call it, and the first one writes and prints.

    ``json_path`` gets all samples so far after each timing, so that a crash does not lose them.
    """
    with refusing():
        check_ranks(num_ranks, device_type)

    def keep(samples: dict[str, Any]) -> None:
        if json_path is not None and writes():
            so_far = {"machine": machine_line(threads), "finished": False, "samples_s": samples}
            write(Report("calibrate", "", "measured", (), data=so_far), json_path=json_path)

    count = num_ranks or min(MOST_LOCAL_RANKS, available_cores())
    ranks, cluster = start_ranks(count, device_type, threads=threads)
    with closing(ranks), steps_told("calibrate", len(PARTS)) if writes() else nullcontext(lambda _: None) as tell:
        grid, effort = GRIDS[device_type], Effort(repeats=repeats)
        found = calibrate(ranks, cluster, device_type=device_type, grid=grid, effort=effort, tell=tell, keep=keep)
    if writes():
        # First, as the reader of the printed tables may close the pipe.
        if out is not None:
            write_whole(out, spec_text(found, out.suffix))
        publish(report(found, threads), page=page, json_path=json_path)
    return 0


def check_ranks(num_ranks: int | None, device_type: str) -> None:
    """Raises ValueError if such ranks are not available."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU here; use --device cpu")
    if joins():
        started = int(os.environ["WORLD_SIZE"])
        if num_ranks not in (None, started):
            raise ValueError(f"ranks={num_ranks}, but torchrun started {started}; leave --ranks out")
    elif device_type == "cuda":
        raise ValueError(
            "device='cuda' takes the ranks that torchrun starts, one a GPU; run torchrun --nproc-per-node 8 -m moesys "
            "calibrate --device cuda, with one GPU too"
        )


def spec_text(found: Calibration, suffix: str) -> str:
    """Returns the ``ClusterSpec`` as JSON or TOML; comments in TOML name the fields that were not measured."""
    if suffix == ".json":
        return found.cluster.to_json() + "\n"
    notes = [f"{figure.field}: {figure.how}" for figure in found.figures if not figure.measured]
    head = ["Measured by moesys calibrate.", *notes]
    return "".join(f"# {line}\n" for line in head) + "\n" + found.cluster.to_toml()


def report(found: Calibration, threads: int) -> Report:
    machine = machine_line(threads)
    notes = [
        f"{machine}; {found.cluster.num_ranks} ranks, all measured at the same time.",
        "n: windows of several calls. Predicted: by the cost model with these fields. Error: predicted divided by "
        "measured, less 1. Nothing is fitted to cases that are held out.",
        "An all-to-all counts the bytes of its busiest link, and ends when it has ended on the slowest rank.",
    ]
    for link in found.links:
        notes.append(f"{link.name}: {four_digits(link.latency_us)} us + bytes / {four_digits(link.gb_per_s)} GB/s.")
    messages = [message for link in found.links for message in link.messages]
    sheets = [
        Sheet("MEASURED: computation, all ranks at the same time", found.passes, group_by="work"),
        Sheet("MEASURED: links", messages, group_by="work"),
        Sheet(f"MEASURED: {found.cluster.name}", found.figures, notes),
    ]
    names = ("cluster", "device_type", "figures", "passes", "links", "samples_s")
    data = {"machine": machine, "dtype": found.grid.dtype, **{name: getattr(found, name) for name in names}}
    title = f"moesys calibrate, measured: {found.cluster.name.rpartition(',')[0]}"
    return Report("calibrate", title, "measured", sheets, data=data)
