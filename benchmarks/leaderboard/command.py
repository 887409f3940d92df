"""The leaderboard: all planners on the same routing, models and clusters, by the simulated seconds of a layer.

A layout is planned on micro-batches before the one that it is scored on, except in the group that plans on the current
counts, where the measured time of planning is added. ``ranking`` has the rules of ranking, ``planners`` who takes part,
``workloads`` the settings.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.options import machine_line
from benchmarks.leaderboard.planners import GROUPS, PlannerGroup, named_planner
from benchmarks.leaderboard.ranking import HTML_PAGE, PAGE, RATIO_NOTE, write_pages
from benchmarks.leaderboard.scores import FILE, PlannerResult, results
from benchmarks.leaderboard.workloads import SCORED, TOKENS_PER_RANK, WARM_UP, recorded_in, settings
from moesys.config import Balance, ModelShape, ModelSpec, Split
from moesys.config.model import MoeMlp
from moesys.display import counted
from moesys.lab.commands.options import (
    CLUSTER_HELP,
    AsJson,
    Jobs,
    Quiet,
    Wide,
    flag,
    option,
    refusing,
)
from moesys.lab.runs.declarations import cluster_of, predictor_of
from moesys.lab.show.sheets import CommandOutput, publish

# The options that the page shows, in this order.
_SHOWN = (
    "seeds",
    "quick",
    "planner",
    "workload",
    "trace",
    "traces_only",
    "model",
    "cluster",
    "slots",
    "lag",
    "predictor",
)


@refusing()
def bench_leaderboard(
    ctx: typer.Context,
    out: Annotated[
        Path, option("DIR", "Folder of pages and results; it is created, or a stopped run resumed.", *("--out", "-o"))
    ] = Path("leaderboard"),
    as_json: AsJson = False,
    quiet: Quiet = False,
    wide: Wide = False,
    planner: Annotated[
        list[str] | None,
        option(
            "PLANNER", "Planner of yours, such as my_planners:Heaviest, or a kind with fields as JSON; may be repeated."
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        option("NAME", "Workload of the table in docs/planners.md (default: all of them); may be repeated."),
    ] = None,
    trace: Annotated[list[Path] | None, option("FILE", "Recorded trace to add as a workload; may be repeated.")] = None,
    traces_only: Annotated[bool, flag("Use no workloads except --trace.", "--traces-only")] = False,
    model: Annotated[
        str | None,
        option(
            "MODEL",
            "Name of a packaged model, or a config.json or its folder (default: by workload).",
        ),
    ] = None,
    cluster: Annotated[str | None, option("CLUSTER", f"{CLUSTER_HELP[:-1]} (default: by workload).")] = None,
    slots: Annotated[
        int | None, option("N", "Slots per rank (default: a rule for each group of planners).", min=1)
    ] = None,
    lag: Annotated[
        int, option("N", "Micro-batches from the newest load that a layout is planned on to its use.", min=1)
    ] = 1,
    predictor: Annotated[
        str, option("KIND", "Predictor of the load that layouts are planned on, as a kind or JSON.")
    ] = "last",
    seeds: Annotated[
        int, option("N", "Draws of each workload, and parts of each recording (at most 4 if packaged).", min=1)
    ] = 3,
    quick: Annotated[
        bool,
        flag(
            "Check that planners run, in two settings (Mixtral-8x7B on 2 x 8 H100 by default). It is no ranking.",
            "--quick",
        ),
    ] = False,
    jobs: Jobs = None,
) -> int:
    """Scores the planners of which ``out`` has no results, writes the pages there and prints the rankings.

    The exit code is 1 if a planner of --planner cannot plan in any setting.
    """
    added = [named_planner(text) for text in planner or ()]
    groups = [replace(group.with_planners(added), slots_per_rank=slots) for group in GROUPS]
    loads = predictor_of(predictor)
    groups = [replace(group, lag=lag, predictor=loads) if group.lag else group for group in groups]
    # The layout of the first scored micro-batch is planned on ``WARM_UP`` loads.
    warm_up = WARM_UP + lag - 1
    scored_in = settings(
        [recorded_in(path) for path in trace or ()],
        models=_models(model) if model else {},
        clusters={cluster: cluster_of(cluster)} if cluster else {},
        workloads=workload or (),
        quick=quick,
        traces_only=traces_only,
        warm_up=warm_up,
    )
    out.mkdir(parents=True, exist_ok=True)
    found = results(scored_in, groups, seeds, out, jobs=jobs, quiet=quiet)
    report = write_pages(out, scored_in, groups, found, _introduction(_command(ctx), seeds, lag, warm_up), added)
    if quick and not traces_only:
        where = "; ".join(one.name for one in scored_in)
        note = f"--quick checks that planners run and is no ranking: it has few settings ({where})."
        report = replace(report, notes=[note, *report.notes])
    output = CommandOutput(None, as_json, quiet, wide)
    publish(report, output)
    pages = f"{PAGE} with tables by workload and setting", HTML_PAGE, f"{FILE} with every sample"
    replace(output, folder=out).print_written(pages)
    return int(any(_fails_everywhere(member, groups, found) for member in added))


def _fails_everywhere(member: Balance | Split, groups: Sequence[PlannerGroup], found: Sequence[PlannerResult]) -> bool:
    names = {pair.name for group in groups for pair in group.pairs if member in (pair.balance, pair.split)}
    return all(result.scores.cannot for result in found if result.planner in names)


def _models(name: str) -> dict[str, ModelShape]:
    spec = ModelSpec.from_config(name)
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoeMlp)
    return {spec.name: mlp.shape}


def _command(ctx: typer.Context) -> str:
    """Returns the command with all options except for its folder, as one would type it."""
    words = ["python -m benchmarks leaderboard"]
    for name in _SHOWN:
        value = ctx.params[name]
        for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if one:
                words.append(f"--{name.replace('_', '-')}" + ("" if one is True else f" {shlex.quote(str(one))}"))
    return " ".join(words)


def _introduction(command: str, seeds: int, lag: int, warm_up: int) -> list[str]:
    return [
        f"`{command}`; `docs/planners.md` has the rules.",
        f"Forward and backward of a layer without overlap (`Sequential`), {TOKENS_PER_RANK:,} tokens per rank, "
        f"simulated; {counted(seeds, 'seed')}. Planners see {warm_up} micro-batches and are scored on up to {SCORED} "
        "after them. All planners of a group have the same slots, lag, predictor and sharding. Layouts from history "
        f"are planned on micro-batches up to the one that is {lag} before the scored one.",
        f"{RATIO_NOTE[0].upper()}{RATIO_NOTE[1:]}",
        "Ratios are geometric means over the settings of a workload, then over workloads. The 95 % interval is "
        "Student's over seeds, which are draws, or layers and parts of a recording. A planner that cannot handle some "
        "setting has no place; its other columns are means over the settings that it can handle.",
        "Crossing: routed tokens that leave their NVLink domain. Copies: replicas that a plan brings to ranks that did "
        "not hold them; on current counts, experts that are lent. Restored: experts that are sent in a forward, all "
        "ranks. Memory: an upper bound for a layer's experts and rows on the rank that holds most. Planning: measured, "
        "the median after a first plan; of a layout, beside the scoring of others; on current counts of layout and "
        "split, when no other pair is scored. Planning % divides it by the simulated time of the layer.",
        "Regret: the time of a pair divided by that of the fastest pair of the workload among those that can plan in "
        "all its settings, minus 1; in the ranking, that of the workload in which it is largest. Forced balance: the "
        "time of plain `Ep` if every expert got as many tokens of every rank, divided by that of the pair, without "
        "settings in which plain `Ep` leaves ranks without experts. It can be above 100 %, because copies of experts "
        "inside a node save traffic that plain `Ep` has.",
        f"Planning was measured on {machine_line(1, ('numpy', 'numba', 'ortools'))}.",
    ]
