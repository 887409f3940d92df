"""``moesys calibrate``: measures this machine or cluster, and writes it as a ``ClusterSpec``."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from moesys.files import number_set, write_whole
from moesys.lab.calibrate.measurement import PARTS, Calibration, calibrate, four_digits
from moesys.lab.calibrate.timings import GRIDS, Effort
from moesys.lab.commands.options import ResultFile, Wide, in_a_folder, refusing
from moesys.lab.ranks.process_start import joins, writes
from moesys.lab.ranks.torchrun_ranks import start_ranks
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.progress import steps_told
from moesys.lab.show.tables import Report, Sheet, publish, write

MOST_LOCAL_RANKS = 8


def spec_file(path: Path | None) -> Path | None:
    """Raises typer.BadParameter for a ClusterSpec's file of another kind, or one that could not be written."""
    if path is not None and path.suffix not in (".toml", ".json"):
        raise typer.BadParameter(f"{path} is neither .toml nor .json; name a file of one of these kinds")
    return in_a_folder(path)


@refusing()
def calibrate_command(
    ranks: Annotated[int | None, typer.Option(min=1, help="Local ranks; one per core by default, at most 8.")] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="cuda measures the ranks that torchrun started, one per GPU.")
    ] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads per rank.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed windows of everything.")] = 7,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the ClusterSpec to this .toml or .json file.", callback=spec_file),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of Markdown to this file.", callback=in_a_folder)
    ] = None,
    json: ResultFile = None,
    wide: Wide = False,
) -> None:
    """Measures, writes and prints. Under torchrun all ranks call it, and the first one writes and prints.

    ``json`` gets all samples so far after each timing, so that a crash does not lose them.
    """
    check_ranks(ranks, device)

    def keep(samples: dict[str, Any]) -> None:
        if json is not None and writes():
            so_far = {"machine": machine_line(threads), "finished": False, "samples_s": samples}
            write(Report("calibrate", "", "measured", (), data=so_far), json_path=json)

    started, cluster = start_ranks(ranks or min(MOST_LOCAL_RANKS, available_cores()), device, threads=threads)
    with closing(started), steps_told("calibrate", len(PARTS)) if writes() else nullcontext(lambda _: None) as tell:
        grid, effort = GRIDS[device], Effort(repeats=repeats)
        found = calibrate(started, cluster, device_type=device, grid=grid, effort=effort, tell=tell, keep=keep)
    if writes():
        # First, as the reader of the printed tables may close the pipe.
        if out is not None:
            write_whole(out, spec_text(found, out.suffix))
        publish(report(found, threads), page=page, json_path=json, wide=wide)


def check_ranks(num_ranks: int | None, device_type: str) -> None:
    """Raises ValueError if such ranks are not available."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU here; use --device cpu")
    if joins():
        started = number_set("WORLD_SIZE", 1)
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
