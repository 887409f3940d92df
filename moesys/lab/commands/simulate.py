"""``moesys simulate``: a step of each strategy on a cluster that need not be there, under several draws of its routing,
and what sets its length.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from moesys.balance.plan import StepPlan
from moesys.config import Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import Generated, Replay
from moesys.display import counted
from moesys.lab.commands.host_config import read_host
from moesys.lab.commands.options import (
    CLUSTER_HELP,
    MODEL_LAYERS_HELP,
    Imports,
    argument,
    flag,
    option,
    refusing,
)
from moesys.lab.commands.whole_model import parallelism_of, run_of, simulate_whole_model
from moesys.lab.runs.declarations import cluster_of, import_modules_of_user, load_experiment, strategy_in
from moesys.lab.runs.records import numbered
from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.runs.trials import has_seeds, simulated_cluster, simulated_workload
from moesys.lab.show.comparisons import ratio_words, unclear_rows
from moesys.lab.show.figures import shown_ranks, write_chrome_trace
from moesys.lab.show.progress import status_line
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, figure, publish
from moesys.simulator.simulation import Simulation, by_place, exposed_ms
from moesys.simulator.step_program import SimulatedStep, simulated_steps

MOST_TRACED_RANKS = 64
_FILE_PANEL, _MODEL_PANEL = "Options with FILE, an experiment", "Options with --model, a whole model"
_file_option = partial(option, rich_help_panel=_FILE_PANEL)
_model_option = partial(option, rich_help_panel=_MODEL_PANEL)
# Options that ``--from`` reads in the command of its host.
DECLARED = ("parallel", "tokens", "micro_batch", "global_batch", "fp8", "optimizer")
TOKENS, EXPERTS = ("counts", "dispatch", "combine"), ("restore", "reshard")
LEGEND = (
    "Means over ranks, but for the step. exposed = tokens + restore + waiting: a rank computes nothing meanwhile.",
    "tokens: until rows have come; restore: until experts have, or gradients; waiting: for slower ranks.",
    "critical path: what the step waited for, from its start to its end, as shares of it; most first.",
)


@refusing()
def simulate_command(
    ctx: typer.Context,
    file: Annotated[Path | None, argument("FILE", "An experiment: .py, .json or .toml.")] = None,
    strategy: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Strategy to simulate, may be repeated: a name in FILE (default: all); with --model ep, fsep:SLOTS, "
            "laer:SLOTS or a file (default: ep).",
        ),
    ] = None,
    cluster: Annotated[
        str | None, option("CLUSTER", f"{CLUSTER_HELP} With FILE, 4x8 keeps the speeds of its cluster.")
    ] = None,
    draws: Annotated[int, option("N", "Number of draws: seeds, or further steps of a single trace.", min=1)] = 8,
    output: CommandOutput = AS_TABLES,
    model_layers: Annotated[int | None, _file_option("N", MODEL_LAYERS_HELP, min=1)] = None,
    imports: Imports = None,
    model: Annotated[
        str | None,
        _model_option("MODEL", "Name of a packaged model, or a config.json or its folder, instead of FILE."),
    ] = None,
    source: Annotated[
        str | None,
        _model_option(
            "COMMAND",
            "Command or YAML of Megatron, torchtitan or transformers, instead of --model and sizes.",
            "--from",
        ),
    ] = None,
    parallel: Annotated[
        str, _model_option("SIZES", "Sizes of groups and more: tp=2,pp=8,vp=4,ep=32, recompute=selective.")
    ] = "",
    tokens: Annotated[int, _model_option("N", "Tokens per sequence.", min=1)] = 4096,
    micro_batch: Annotated[int, _model_option("N", "Sequences per micro-batch.", min=1)] = 1,
    global_batch: Annotated[int | None, _model_option("N", "Sequences per step.", min=1)] = None,
    skew: Annotated[float, _model_option("X", "Skew of the drawn routing; 0 is balanced.", min=0)] = 0.0,
    fp8: Annotated[bool, flag("Multiply by weights in float8.", "--fp8", rich_help_panel=_MODEL_PANEL)] = False,
    optimizer: Annotated[str, _model_option("NAME", "adam, adam_bf16, sgd or muon.")] = "adam",
) -> None:
    """Simulates a step of an experiment or of a whole model, prints the tables and writes the files."""
    if [file, model, source].count(None) != 2:
        raise typer.BadParameter("simulate FILE, --model or --from; give one of them")
    panel, of = (_FILE_PANEL, "FILE") if file is None else (_MODEL_PANEL, "--model")
    for each in ctx.command.params:
        given = ctx.get_parameter_source(each.name or "")
        read = source is not None and each.name in DECLARED
        if (read or getattr(each, "rich_help_panel", "") == panel) and given and given.name == "COMMANDLINE":
            words = "--model, and --from reads it" if read else of
            raise typer.BadParameter(f"{each.opts[0]} is for {words}; leave it out")
    import_modules_of_user(imports or ())
    if output.folder is not None:
        # The folder is made first, so that an error comes before the simulation.
        output.folder.mkdir(parents=True, exist_ok=True)
    if file is not None:
        _simulate(*_todo(file, strategy or (), cluster, draws), model_layers, output)
        return
    host = None if source is None else read_host(source)
    run = partial(
        run_of,
        cluster,
        model=model,
        parallelism=parallelism_of(parallel),
        seq_len=tokens,
        micro_batch=micro_batch,
        global_batch=global_batch,
        fp8=fp8,
        optimizer=optimizer,
    )
    simulate_whole_model(
        run if host is None else partial(host.run_on, cluster),
        strategies=strategy or ("ep",),
        skew=skew,
        draws=draws,
        output=output,
        read=None if host is None else host.sheet(),
    )


def _simulate(name: str, todo: Sequence[Todo], words: str, model_layers: int | None, output: CommandOutput) -> None:
    found, shape = [], ""
    with status_line(output.quiet) as show:
        for of_strategy, steps in todo:
            found.append(draws := StepDraws(of_strategy))
            for step in steps:
                show(f"{of_strategy}: planning and simulating, draw {1 + len(draws.paths)}")
                draws.add(step, model_layers)
                shape = shape or _shape_words(step.plans[0])
        # Files are written first, because the reader of the printed table may close the pipe.
        out = output.folder
        files = [] if out is None else _write(found, out)
    sheet = step_sheet(f"SIMULATED: {name}, {shape}", found, words)
    publish(Report("simulate", "", "simulated", [sheet]), replace(output, folder=None))
    if files:
        output.print_written(path.name for path in files)


# --- what is asked for ----------------------------------------------------------------------------------------------

Todo = tuple[str, Iterator[SimulatedStep]]


def _todo(file: Path, strategies: Sequence[str], cluster: str | None, draws: int) -> tuple[str, list[Todo], str]:
    """Returns the name of the simulation; the name of each strategy with a step of each draw; and what a draw is, in
    words.
    """
    experiment = _changed(load_experiment(file), cluster)
    chosen = [strategy_in(experiment, name) for name in strategies] or list(experiment.strategies)
    words = "routing of other seeds"
    if not has_seeds(experiment.workload):
        words = "steps of the trace, which resemble one another"
    return experiment.name, [(each.name, _drawn(each, experiment, draws)) for each in chosen], words


def _changed(experiment: Experiment, cluster: str | None) -> Experiment:
    """Returns what is simulated of the experiment, on another cluster."""
    declared = simulated_cluster(experiment)
    return experiment.replace(
        workload=simulated_workload(experiment.workload),
        cluster=cluster_of(cluster, declared) if cluster else declared,
    )


def _drawn(strategy: Strategy, experiment: Experiment, draws: int) -> Iterator[SimulatedStep]:
    """Yields the first step under the seeds of the experiment, and if routing is drawn, under other seeds after them;
    of a single trace its first steps, as many as there are.
    """
    workload, seeds = experiment.workload, list(experiment.seeds)
    assert isinstance(workload, Replay | Generated)
    steps = partial(simulated_steps, strategy, experiment.model, experiment.cluster, workload)
    if not has_seeds(workload):
        yield from islice(steps(seeds[0]), draws)
        return
    if isinstance(workload, Generated):
        seeds += islice((seed for seed in count() if seed not in experiment.seeds), max(0, draws - len(seeds)))
    for seed in seeds[:draws]:
        yield next(steps(seed))


# --- what is shown --------------------------------------------------------------------------------------------------


def _shape_words(plan: StepPlan) -> str:
    cluster = plan.cluster
    layers, ranks = counted(len(plan.layers), "layer"), counted(cluster.num_ranks, "rank")
    where = f" ({cluster.hardware})" if cluster.hardware else ""
    return f"one step of {layers} on {ranks} of {counted(cluster.num_nodes, 'node')}{where}"


def _write(found: Sequence[StepDraws], out: Path) -> list[Path]:
    """Writes a trace of the first draw of each strategy for Perfetto. It is named after the strategy, with a number if
    another one would have the same name.
    """
    paths: list[Path] = []
    for draws in found:
        names = numbered(re.sub(r"[^\w.+-]", "_", draws.name))
        path = next(each for name in names if (each := out / f"{name}.trace.json") not in paths)
        traced = draws.first.timeline.only(shown_ranks(draws.first, MOST_TRACED_RANKS))
        paths.append(write_chrome_trace(traced, path, draws.first.critical_path))
    return paths


class StepDraws:
    """Steps of one strategy, one per draw: milliseconds, means over ranks except for the step's own.

    figures: by name, one per draw. paths: shares of the critical path by place, one per draw. would_not_run: the
    reasons of the first draw that has any. first: the first draw, of which files are written.
    """

    first: Simulation

    def __init__(self, name: str) -> None:
        self.name = name
        self.figures: dict[str, list[float]] = defaultdict(list)
        self.paths: list[dict[str, float]] = []
        self.would_not_run: tuple[str, ...] = ()

    def add(self, step: SimulatedStep, model_layers: int | None) -> None:
        """Adds a draw. ``model_layers``: the number of layers of the whole model, whose memory counts."""
        simulated = step.simulation
        if not self.paths:
            self.first = simulated
        self.would_not_run = self.would_not_run or step.why_not(model_layers)
        self.paths.append({where: share for where, _, share in by_place(simulated.critical_path)})
        computed_ms = {kind: 1e3 * float(seconds_R.mean()) for kind, seconds_R in simulated.computed_R.items()}
        waited_ms = {kind: 1e3 * float(seconds_R.mean()) for kind, seconds_R in simulated.waited_R.items()}
        experts_ms = sum(computed_ms.get(kind, 0.0) for kind in ("experts", "weight_gradients"))
        tokens_ms, restore_ms = (sum(waited_ms.get(kind, 0.0) for kind in kinds) for kinds in (TOKENS, EXPERTS))
        all_exposed_ms = exposed_ms(simulated.timeline)
        for name, value in {
            "step_ms": 1e3 * simulated.length_seconds,
            "max_over_mean": float(np.mean([of.tokens.max_over_mean for plan in step.plans for of in plan.layers])),
            "experts_ms": experts_ms,
            "other_ms": sum(computed_ms.values()) - experts_ms,
            "exposed_ms": all_exposed_ms,
            "tokens_ms": tokens_ms,
            "restore_ms": restore_ms,
            "waiting_ms": max(round(all_exposed_ms - tokens_ms - restore_ms, 9), 0.0),
        }.items():
            self.figures[name].append(value)


@dataclass(frozen=True)
class SimulatedStrategy:
    """A row of the table. Columns without an interval are means over draws."""

    strategy: Annotated[str, Column("strategy", align="left", wraps=True)]
    step_ms: Annotated[str, Column("step\nms", kept=True)]
    speedup: Annotated[str, Column("speed-up", align="right", kept=True)]
    critical_path: Annotated[str, Column("critical path", align="left", wraps=True)]
    max_over_mean: Annotated[float, Column("load\nmax/mean", ".2f")]
    experts_ms: Annotated[float, Column("experts\nms", figure)]
    other_ms: Annotated[float, Column("other\nms", figure)]
    exposed_ms: Annotated[float, Column("exposed\nms", figure)]
    tokens_ms: Annotated[float, Column("tokens\nms", figure)]
    restore_ms: Annotated[float, Column("restore\nms", figure)]
    waiting_ms: Annotated[float, Column("waiting\nms", figure)]


def step_sheet(title: str, of_strategies: Sequence[StepDraws], draws: str) -> Sheet:
    """Returns the table and its legend. ``draws`` describes what a draw is."""
    # The first strategy that would run, or the first one if none would.
    baseline = min(of_strategies, key=lambda of: bool(of.would_not_run))
    rows = [
        SimulatedStrategy(
            strategy=of.name,
            step_ms=_spread(of.figures["step_ms"]),
            speedup=_speedup(of, baseline),
            critical_path=_path_words(of),
            **{name: float(np.mean(values)) for name, values in of.figures.items() if name != "step_ms"},
        )
        for of in of_strategies
    ]
    against = [f"{of.name} would not run: {reason}." for of in of_strategies for reason in of.would_not_run]
    notes = [*LEGEND]
    if any(len(of.paths) > 1 for of in of_strategies):
        notes.append(
            f"Draws: {draws}. step ms: their median [p10, p90]; speed-up: paired, draw by draw, with its 95 % interval "
            "(Student's t on logarithms; ~: it contains 1, ?: too few draws); other columns: means."
        )
    notes += against
    return Sheet(title, rows, notes, unclear=unclear_rows([row.speedup for row in rows]))


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return figure(values[0])
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{figure(float(middle))} [{figure(float(low))}, {figure(float(high))}]"


def _speedup(of: StepDraws, baseline: StepDraws) -> str:
    """Compares the draws that both have."""
    if of.would_not_run:
        return "would not run"
    if of is baseline:
        return "1.00"
    own_ms, baseline_ms = ({place: [ms] for place, ms in enumerate(one.figures["step_ms"])} for one in (of, baseline))
    ratio = paired_ratio(baseline_ms, own_ms)
    return "" if ratio is None else f"{ratio.estimate:.2f}" if ratio.n == 1 else ratio_words(ratio)


def _path_words(of: StepDraws) -> str:
    """Describes the three places with the largest mean shares of the critical path."""
    shares = {where: 0.0 for path in of.paths for where in path}
    for path in of.paths:
        for where, share in path.items():
            shares[where] += share / len(of.paths)
    most = sorted(shares.items(), key=lambda place: -place[1])[:3]
    return ", ".join(f"{where} {100 * share:.0f} %" for where, share in most)
