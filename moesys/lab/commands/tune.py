"""``moesys tune``: from an experiment file to its fastest strategy and the reasons for it."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moesys.files import write_whole
from moesys.lab.commands.host_config import read_host
from moesys.lab.commands.options import (
    CLUSTER_HELP,
    Imports,
    Jobs,
    ModelLayers,
    RunFolders,
    Settings,
    Threads,
    argument,
    file_to_write,
    flag,
    option,
    refusing,
)
from moesys.lab.ranks.process_start import writes
from moesys.lab.runs.declarations import declared_in, import_modules_of_user, load_experiment
from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.runs.tuning import decision, tune
from moesys.lab.show.comparisons import ratio_words, unclear_rows
from moesys.lab.show.progress import TuneProgress
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, figure, print_sheet, publish
from moesys.tuner.pick import Draws, TunePick
from moesys.tuner.space import SearchBounds, Space

MOST_SHOWN = 8


@refusing()
def tune_command(
    file: Annotated[
        Path | None, argument("FILE", "An experiment: .py with a function that returns it, .json or .toml.")
    ] = None,
    source: Annotated[
        str | None,
        option("COMMAND", "Command or YAML of Megatron, torchtitan or transformers, or a file with it.", "--from"),
    ] = None,
    cluster: Annotated[str | None, option("CLUSTER", f"With --from. {CLUSTER_HELP}")] = None,
    skew: Annotated[float, option("X", "With --from: skew of the drawn routing.", min=0)] = 1.0,
    write: Annotated[
        Path | None,
        option("FILE", "With --from: write the lines by which its host runs the result.", callback=file_to_write),
    ] = None,
    space: Annotated[Path | None, option("FILE", "Space to search (default: all that may be faster).")] = None,
    out: RunFolders = Path("runs"),
    output: CommandOutput = AS_TABLES,
    budget: Annotated[int, option("N", "Number of strategies to simulate, before their neighbours.", min=1)] = 256,
    timed: Annotated[int | None, option("N", "Timed trials (default: 30 for a training).", min=0, max=30)] = None,
    seeds: Annotated[int, option("N", "Number of the experiment's seeds to simulate.", min=1)] = 2,
    memory_gb: Annotated[float | None, option("GB", "Memory of a rank (default: that of the cluster).", min=0)] = None,
    model_layers: ModelLayers = None,
    seed: Annotated[int, option("N", "Seed of the search.", min=0)] = 0,
    threads: Threads = 1,
    jobs: Jobs = None,
    fresh: Annotated[bool, flag("Start again, and keep the old journal beside.", "--fresh")] = False,
    settings: Settings = None,
    imports: Imports = None,
) -> None:
    """Tunes the experiment in ``file``, prints the result and writes it to a folder. Only rank 0 of torchrun prints."""
    import_modules_of_user(imports or ())
    if (file is None) == (source is None) or (file is not None and (cluster or write)):
        raise typer.BadParameter("tune FILE, or --from with --cluster and --write; give one of them")
    declared = None if space is None else declared_in(space, Space)
    host = None if source is None else read_host(source)
    if file is not None:
        experiment = load_experiment(file, settings or ())
    else:
        assert host is not None
        experiment, offered, layers = host.experiment(cluster, skew)
        declared, model_layers = declared or offered, model_layers or layers
    bounds = SearchBounds(budget, seeds, memory_gb, model_layers, seed, jobs)
    console = Console(file=sys.stderr if output.as_json else sys.stdout, quiet=output.quiet)
    with closing(TuneProgress(console)) as progress:
        told = progress if writes() else None
        result = tune(experiment, declared, bounds, out=out, timed=timed, threads=threads, fresh=fresh, told=told)
    if writes():
        tuned = result.tuned
        report = Report("tune", "", tuned.decided_by, tune_sheets(tuned, experiment.name))
        publish(report, output)
        if host is not None and not output.as_json:
            print_sheet(host.sheet(), wide=output.wide)
        if host is not None and write is not None:
            write_whole(write, host.lines(result.path / "tuned.toml"))
        print(
            f"{decision(tuned)}\n"
            f"The strategy and its reasons: {result.path / 'tuned.toml'}\n"
            f"With it as the last strategy, for moesys run and explain: {result.path / 'experiment.toml'}",
            file=console.file,
        )


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TunedStrategy:
    """A row: a strategy, its step time and its speed-up, over several draws or timed trials if it has such."""

    strategy: Annotated[str, Column("strategy", align="left", wraps=True)]
    ms: Annotated[float, Column("step ms", figure, kept=True)]
    speedup: Annotated[str | None, Column("speed-up", align="right", kept=True)] = None
    paired: Annotated[str | None, Column("speed-up [95 %]", align="right", kept=True)] = None
    num_draws: Annotated[int | None, Column("n")] = None


@dataclass(frozen=True)
class ChosenField:
    """A row: a field of the chosen strategy."""

    field: Annotated[str, Column("field", align="left")]
    value: Annotated[str, Column("value", align="left", wraps=True, kept=True)]
    why: Annotated[str, Column("why", align="left", wraps=True, kept=True)]


def tune_sheets(tuned: TunePick, name: str) -> list[Sheet]:
    """Returns the tables of a tuning of the experiment ``name``."""
    sheets = [_simulated(tuned, name)]
    if tuned.draws:
        seeds = (
            "seeds" if tuned.search.baseline and len(tuned.search.of.seeds) > 1 else "seeds, or steps of the only one"
        )
        note = f"n: {seeds}, paired with {tuned.baseline.name}'s; Student's t on logarithms."
        sheets.append(_paired(f"SIMULATED: {name}, the fastest on further draws", tuned.draws, tuned, [note]))
    if tuned.timing is not None:
        notes = [
            f"{tuned.timing.num_trials} timed trials in all. A trial's time is the median of its steps, a step's "
            f"that of its slowest rank. Speed-up: over {tuned.baseline.name} on the same n seeds, geometric mean."
        ]
        notes += [f"Failed: {strategy.name}: {reason}" for strategy, reason in tuned.timing.failed]
        sheets.append(_paired(f"MEASURED: {name}, tuning", tuned.compared, tuned, notes))
    chosen = [ChosenField(choice.field, choice.value, str(choice)) for choice in tuned.choices if choice.next_best]
    alone = [f"{choice.field} = {choice.value}" for choice in tuned.choices if not choice.next_best]
    notes = [f"No other value was simulated of {', '.join(alone)}."] if alone else []
    return [*sheets, Sheet("The pick, field by field", chosen, notes)]


def _simulated(tuned: TunePick, name: str) -> Sheet:
    """Shows the fastest points of the cost model and the baseline, over the whole workload."""
    baseline = tuned.search.baseline
    shown = list(tuned.search.ranking[:MOST_SHOWN])
    # The baseline is shown even if it is slow or too large.
    shown += [baseline] if baseline is not None and baseline not in shown else []
    rows = []
    for one in shown:
        ratio = "" if baseline is None else f"{baseline.ms / one.ms:.3f}"
        rows.append(TunedStrategy(one.strategy.name, one.ms, "baseline" if one == baseline else ratio))
    notes = [
        f"{tuned.search.num_points:,} of {tuned.space.num_combinations:,} combinations were looked at in the cost "
        f"model; speed-up is over {tuned.baseline.name}."
    ]
    baseline_reasons = [reason for strategy, reason in tuned.search.refused if strategy == tuned.baseline]
    notes += [f"The baseline would not run: {reason}." for reason in baseline_reasons]
    if tuned.search.refused:
        strategy, reason = tuned.search.refused[0]
        notes.append(
            f"{len(tuned.search.refused):,} points would not run, or cannot be simulated, such as {strategy.name}: "
            f"{reason}"
        )
    return Sheet(f"SIMULATED: {name}, tuning", rows, notes)


def _paired(title: str, compared: Sequence[Draws], tuned: TunePick, notes: Sequence[str]) -> Sheet:
    """Compares strategies with the baseline, draw by draw."""
    rows = []
    for draws in compared:
        ratio = paired_ratio(draws.baseline_ms, draws.own_ms)
        if ratio is None:
            raise ValueError(f"{draws.strategy.name} and the baseline share no draw")
        words = "baseline" if draws.strategy == tuned.baseline else ratio_words(ratio)
        ms = statistics.median(map(statistics.fmean, draws.own_ms.values()))
        rows.append(TunedStrategy(draws.strategy.name, ms, paired=words, num_draws=ratio.n))
    return Sheet(title, rows, notes, unclear=unclear_rows([row.paired for row in rows]))
