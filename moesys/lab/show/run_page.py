"""The page of a run, ``report.html`` in its folder, and the page that lists the runs of a folder, ``index.html``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np

from moesys.config.experiment import Experiment
from moesys.config.workload import Generated, ModelTraining, RealTraining, Replay
from moesys.display import counted
from moesys.files import read_bytes, write_whole
from moesys.lab.runs.comparison import Comparison, compare_records
from moesys.lab.runs.environment import load_environments
from moesys.lab.runs.records import (
    EXPERIMENT_FILE,
    INDEX_FILE,
    RECORDS_FILE,
    Record,
    RunFolder,
    other_kind,
    setting_fingerprint,
)
from moesys.lab.runs.watched_run import FloatArray, read_watched_run
from moesys.lab.show.comparisons import comparison_sheet, headline
from moesys.lab.show.figures import TimelinePanel, draw_speedups, shown_ranks, style
from moesys.lab.show.pages import (
    PAGE_STYLE,
    Bins,
    as_title,
    curves,
    facts,
    heat_map,
    inline_svg,
    page,
    section,
    sheet_section,
    table,
    timelines,
    token_map,
    watch_page,
)
from moesys.step_lines import step_files, step_journal

REPORT_FILE = "report.html"
_INDEX_TITLE = "Runs of moesys"
# A map of more ranks and experts is not drawn.
_MOST_CELLS = 20_000
_TIMELINE_NOTE = (
    "The first timed step of the first seed, on the rank that the step waits for most and on another. All strategies "
    "have one scale. Grey on the line of computation is idle time. The pointer shows what a bar is."
)


def subject(experiment: Experiment) -> str:
    """Returns the model and the cluster in a few words."""
    model, cluster, workload = experiment.model, experiment.cluster, experiment.workload
    name = f"{workload.model}, " if isinstance(workload, ModelTraining) else ""
    ranks = counted(cluster.num_ranks, "rank")
    where = f"{cluster.name} ({ranks})" if cluster.name else f"{ranks} of {counted(cluster.num_nodes, 'node')}"
    return f"{name}{counted(model.num_experts, 'expert')} with top-{model.top_k} on {where}"


def run_page(folder: RunFolder) -> str:
    """Returns the page of a run. Simulated steps are planned and simulated again to draw them.

    Raises ValueError for a folder that cannot be read.
    """
    experiment = folder.experiment()
    records = folder.records()
    comparison = compare_records(experiment, records)
    there = load_environments(folder.path)
    machines = [there[name] for name in comparison.environments if name in there]
    machine = machines[0].machine_line if machines else ""
    words = f"{comparison.source.upper()}: {experiment.name}, {subject(experiment)}"
    sheet = comparison_sheet(comparison, machine)
    parts = [f"<h1>{escape(words)}</h1>", f'<p class="headline">{escape(sheet.notes[0])}</p>']
    if experiment.description:
        parts.append(f"<p>{escape(experiment.description)}</p>")
    parts.append(sheet_section(replace(sheet, notes=sheet.notes[1:])))
    parts += _speedups(comparison)
    parts += _losses(comparison)
    if comparison.source == "simulated":
        parts += _simulated(comparison, words)
    else:
        parts += [*_tokens(comparison, records), _step_times(comparison)]
    parts.append(section("About this run", facts(_about(folder, comparison, machine))))
    return page(words, parts)


def _about(folder: RunFolder, comparison: Comparison, machine: str) -> dict[str, str]:
    experiment = comparison.experiment
    model, cluster, workload = experiment.model, experiment.cluster, experiment.workload
    started = sorted(record.started for record in folder.records())
    shape = f"{model.num_experts:,} experts of {model.hidden_size:,} x {model.intermediate_size:,}, top-{model.top_k}"
    return {
        "model": f"{shape}, {model.dtype}",
        "cluster": f"{cluster.name and f'{cluster.name}: '}{cluster.num_nodes:,} x {cluster.ranks_per_node} ranks",
        "workload": as_title(workload.kind) + (f" of {workload.model}" if isinstance(workload, ModelTraining) else ""),
        "seeds": ", ".join(map(str, experiment.seeds)),
        "trials (UTC)": f"{started[0][:16]} to {started[-1][:16]}".replace("T", " ") if started else "none",
        "planned and simulated on" if comparison.source == "simulated" else "measured on": machine,
        "fingerprint of model, cluster and workload": setting_fingerprint(experiment),
        "folder": folder.path.resolve().name,
    }


def _speedups(comparison: Comparison) -> list[str]:
    if all(row.speedup is None for row in comparison.rows):
        return []
    with style(PAGE_STYLE):
        figure = draw_speedups(comparison)
    baseline = comparison.baseline.name
    note = (
        "A dot is the mean over seeds, a line its 95 % interval, and small dots below it are single seeds. "
        f"A grey interval is not distinguishable from {baseline}, which is at 1."
    )
    return [section("Speed-up", inline_svg(figure), note)]


def _losses(comparison: Comparison) -> list[str]:
    rows = [row for row in comparison.rows if not row.repeat and any(row.losses.values())]
    if not rows:
        return []
    equal = [row.name for row in rows[1:] if row.agreement is not None and row.agreement.bit_equal]
    drawn = {row.name: _over_seeds(np.mean, row.losses) for row in rows if row.name not in equal}
    note = f"The losses of {', '.join(equal)} have the same bits as those of {rows[0].name}." if equal else ""
    return [section("Loss", _curves(drawn, "loss, nats per token"), note)]


def _step_times(comparison: Comparison) -> str:
    of_rows = {row.name: row.samples.get("step_ms", {}) for row in comparison.rows if not row.repeat}
    times = {name: _over_seeds(np.median, of) for name, of in of_rows.items() if any(of.values())}
    note = "Timed steps after the warm-up, the median over seeds."
    # Losses are those of all steps.
    first = workload.warmup if isinstance(workload := comparison.experiment.workload, RealTraining) else 0
    return section("Step time", _curves(times, "ms", first, capped=True), note) if times else ""


def _over_seeds(reduce: Callable[..., FloatArray], by_seed: Mapping[int, Sequence[float]]) -> FloatArray:
    """Reduces the steps that all seeds have that have any."""
    known = [values for values in by_seed.values() if values]
    return reduce([values[: min(map(len, known))] for values in known], axis=0)


def _curves(values_S: Mapping[str, FloatArray], unit: str, first: int = 0, *, capped: bool = False) -> str:
    steps = max(map(len, values_S.values()))
    padded = {name: np.pad(of, (0, steps - len(of)), constant_values=np.nan) for name, of in values_S.items()}
    return curves(Bins.of(np.arange(first, first + steps)), padded, unit, capped=capped)


def _tokens(comparison: Comparison, records: Sequence[Record]) -> list[str]:
    """Draws the tokens of experts by layer in the baseline's first trial that did not fail."""
    baseline = comparison.baseline.name
    tokens_LE = next((of.tokens_LE for of in records if of.strategy == baseline and of.tokens_LE), [])
    if not tokens_LE:
        return []
    note = f"What the router chose under {baseline} in one trial, over its timed steps; dark means many."
    return [section("Load of experts", token_map(dict(enumerate(map(np.array, tokens_LE)))), note)]


# --- simulated steps --------------------------------------------------------------------------------------------------


def _simulated(comparison: Comparison, words: str) -> list[str]:
    """Draws the first timed step of the first seed under each strategy that has a simulated trial."""
    # This import is here because pages of trainings need no simulator.
    from moesys.simulator.step_program import simulated_steps

    experiment, steps = comparison.experiment, {}
    workload = experiment.workload
    assert isinstance(workload, Generated | Replay)
    try:
        for row in comparison.rows:
            if row.samples and not row.repeat:
                of_seed = row.strategy, experiment.model, experiment.cluster, workload, min(row.losses)
                step = next(simulated_steps(*of_seed))
                steps[row.name] = step, step.simulation
    except (ValueError, OSError) as error:
        why = f'<p class="none">The steps cannot be simulated again: {escape(str(error))}</p>'
        return [section("Timelines", why)]
    if not steps:
        return []
    parts = []
    # Rows are in the order of their speed, behind the baseline.
    loads_ER = {name: step.plans[0].layers[0].tokens.computed_RE.T for name, (step, _) in list(steps.items())[:2]}
    E, R = next(iter(loads_ER.values())).shape
    if len(loads_ER) == 2 and E * R <= _MOST_CELLS:
        ranks = np.arange(R + 1) - 0.5, [f"rank {rank}" for rank in range(R)]
        experts, scale = [f"expert {expert}" for expert in range(E)], (0.0, float(max(map(np.max, loads_ER.values()))))
        drawn = [
            heat_map(load_ER.astype(float), experts, ranks, scale, (f"rank, under {name}", "tokens"))
            for name, load_ER in loads_ER.items()
        ]
        note = "Tokens of layer 0 that each rank computes for each expert; dark means many."
        parts.append(section("Load of ranks and experts", "".join(drawn), note))
    panels = [
        TimelinePanel(name, of.timeline, tuple(shown_ranks(of, 2)), of.critical_path) for name, (_, of) in steps.items()
    ]
    return [*parts, section("Timelines", timelines(panels, words), _TIMELINE_NOTE)]


# --- all runs of a folder ---------------------------------------------------------------------------------------------


def index_page(folder: Path) -> str:
    """Returns the page that lists what moesys has written to the folders in ``folder``, newest first. Folders that
    cannot be read are listed with the reason, others are named below.
    """
    children = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    ours = [path for path in children if kind_of(path)]
    rows = sorted(((path.name, *_listed(path)) for path in ours), key=lambda row: row[-1], reverse=True)
    links = [f"{quote(name)}/{REPORT_FILE * (folder / name / REPORT_FILE).is_file()}" for name, *_ in rows]
    drawn = table(("run", "result", "compared", "kind", "date (UTC)"), rows, range(5), links)
    title = f"{_INDEX_TITLE} in {folder.resolve().name}"
    others = "; ".join(
        f"{path.name}: {other_kind(path) or 'not written by moesys'}" for path in children if path not in ours
    )
    note = f'<p class="note">Not listed: {escape(others)}.</p>' if others else ""
    return page(title, [f"<h1>{escape(title)}</h1>", f'<section id="runs">{drawn}</section>', note])


def _listed(path: Path) -> tuple[str, str, str, str]:
    """Returns the result, what was compared, the kind and the date."""
    kind = kind_of(path)
    try:
        if kind == "experiment":
            records = RunFolder(path).records()
            comparison = compare_records(RunFolder(path).experiment(), records)
            names = ", ".join(strategy.name for strategy in comparison.experiment.strategies)
            date = max((record.started for record in records), default="")[:16].replace("T", " ")
            return headline(comparison), names, comparison.source, date
        if not (steps := list(step_journal(next(iter(step_files(path).values()))).read())):
            raise ValueError("no step has been written yet")
        newest = steps[-1]
        ended = datetime.fromtimestamp(newest.time_s, UTC)
        numbers = "".join(f", {name} {value:.4g}" for name, value in newest.numbers.items())
        words = f"step {newest.step:,}{numbers}"
        return words, counted(newest.num_ranks, "rank"), "watched training", f"{ended:%Y-%m-%d %H:%M}"
    except (ValueError, OSError) as error:
        return f"cannot be read: {error}", "", kind, ""


# --- writing ----------------------------------------------------------------------------------------------------------


def kind_of(folder: Path) -> str:
    """Returns what moesys wrote to a folder: "experiment", "watched", or "" for nothing."""
    if (folder / EXPERIMENT_FILE).is_file():
        return "experiment"
    return "watched" if step_files(folder) else ""


def write_page(folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a folder, and returns its path: of a run, of a watched training, or the list of the runs in
    it.

    Raises ValueError for a folder that is none of these, or cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one that moesys run or ms.Watch writes")
    match kind_of(folder):
        case "experiment":
            path, text = folder / REPORT_FILE, run_page(RunFolder(folder))
        case "watched":
            path, text = folder / REPORT_FILE, watch_page(read_watched_run(folder))
        case _:
            if not any(kind_of(child) for child in folder.iterdir() if child.is_dir()):
                what = f"is {kind}" if (kind := other_kind(folder)) else "has neither a run nor a watched training"
                raise ValueError(
                    f"{folder} {what}; give a run folder, a folder of ms.Watch, or a folder of several of these"
                )
            return write_index(folder, out)
    write_whole(out or path, text)
    return out or path


def write_index(folder: Path, out: Path | None = None) -> Path:
    """Writes the page that lists the runs in a folder, and returns its path.

    Raises ValueError where the page of somebody else has its name.
    """
    path = out or folder / INDEX_FILE
    if path.exists() and f"<title>{_INDEX_TITLE}" not in read_bytes(path).decode(errors="replace"):
        raise ValueError(f"{path} is of another program and is kept; write the list of runs elsewhere with --out")
    write_whole(path, index_page(folder))
    return path


def page_of_run(folder: Path) -> Path:
    """Returns the page of a run, which is written if it is older than what it shows."""
    path, sources = folder / REPORT_FILE, (folder / EXPERIMENT_FILE, folder / RECORDS_FILE)
    newest = max(source.stat().st_mtime_ns for source in sources if source.exists())
    return path if path.exists() and path.stat().st_mtime_ns > newest else write_page(folder)
