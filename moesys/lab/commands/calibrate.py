"""``moesys calibrate``: measures this machine or cluster, and writes it as a ``ClusterSpec``."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Literal

from moesys.files import number_set, write_whole
from moesys.lab.commands.options import Threads, option, refusing
from moesys.lab.ranks.process_start import joins, writes
from moesys.lab.runs.environment import available_cores, collect_environment
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, CommandOutput, Report, Sheet, publish

if TYPE_CHECKING:
    # These modules import torch, which takes seconds.
    from moesys.lab.calibrate.measurement import Calibration

MOST_LOCAL_RANKS = 8
CLUSTER_FILE = "cluster.toml"


@refusing()
def calibrate_command(
    ranks: Annotated[int | None, option("N", "Local ranks (default: one per core, at most 8).", min=1)] = None,
    device: Annotated[
        Literal["cpu", "cuda"], option("DEVICE", "cpu, or cuda for the ranks that torchrun started, one per GPU.")
    ] = "cpu",
    threads: Threads = 1,
    repeats: Annotated[int, option("N", "Number of timed windows of each case.", min=1)] = 7,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Measures, writes and prints. Under torchrun all ranks call it, and the first one writes and prints."""
    check_ranks(ranks, device)
    # These imports are here because they import torch, and wrong options are refused before.
    from moesys.lab.calibrate.measurement import PARTS, calibrate
    from moesys.lab.calibrate.timings import GRIDS, Effort
    from moesys.lab.ranks.torchrun_ranks import start_ranks

    started, cluster = start_ranks(ranks or min(MOST_LOCAL_RANKS, available_cores()), device, threads=threads)
    with closing(started), steps_told("calibrate", len(PARTS), output.quiet or not writes()) as tell:
        grid, effort = GRIDS[device], Effort(repeats=repeats)
        found = calibrate(started, cluster, device_type=device, grid=grid, effort=effort, tell=tell)
    if writes():
        # Files are written first, because the reader of the printed tables may close the pipe.
        if (out := output.folder) is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_whole(out / CLUSTER_FILE, spec_text(found))
        publish(report(found, threads), output)
        if out is not None:
            output.print_written([f"{CLUSTER_FILE}, for moesys simulate --cluster {out / CLUSTER_FILE}"])


def check_ranks(num_ranks: int | None, device_type: str) -> None:
    """Raises ValueError if such ranks are not available."""
    if device_type == "cuda":
        import torch

        if not torch.cuda.is_available():
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


def spec_text(found: Calibration) -> str:
    """Returns the ``ClusterSpec`` as TOML, with comments that name the fields that were not measured."""
    notes = [f"{figure.field}: {figure.how}" for figure in found.figures if not figure.measured]
    head = ["Measured by moesys calibrate.", *notes]
    return "".join(f"# {line}\n" for line in head) + "\n" + found.cluster.to_toml()


def report(found: Calibration, threads: int) -> Report:
    from moesys.lab.calibrate.measurement import four_digits

    machine = collect_environment(threads).machine_line
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
