"""Tables of comparisons, for terminals and as JSON: what is measured, what is simulated, and what is significant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import pydantic_core

from moesys.config import Strategy
from moesys.config.workload import ModelTraining, RealTraining, Replay, Training
from moesys.display import counted
from moesys.lab.runs.comparison import JUDGED_STEPS, SPEED, Comparison, Row, agreement
from moesys.lab.runs.records import setting_fingerprint
from moesys.lab.runs.statistics import MIN_SEEDS, PairedRatio
from moesys.lab.runs.watched_run import WatchedRun
from moesys.lab.show.sheets import Column, Sheet, figure

COMPARISON_SCHEMA = 1
# Ranks that have a core each keep it busy; above this many processes per core, others take a part of it.
BUSY = 1.5


@dataclass(frozen=True)
class ComparedStrategy:
    """A row of the table of a comparison. Metrics are medians over seeds of each seed's median."""

    strategy: Annotated[str, Column("strategy", align="left", wraps=True)]
    step_ms: Annotated[float | None, Column("step\nms", figure, kept=True)]
    speedup: Annotated[str, Column("speed-up\n[95 %]", align="right", kept=True)]
    exposed_ms: Annotated[float | None, Column("exposed\nms", figure)]
    load_max_over_mean: Annotated[float | None, Column("load\nmax/mean", ".2f")]
    restored_mib: Annotated[float | None, Column("restored\nMiB", figure)]
    plan_ms: Annotated[float | None, Column("plan\nms", figure)]
    inter_node_share: Annotated[float | None, Column("between\nnodes %", ".1f", 100)]
    final_loss: Annotated[float | None, Column("loss\nat end", ".4f")]
    asked: Annotated[Mapping[str, float | None], Column("{}", figure, kept=True)]
    would_run: Annotated[str, Column("would\nrun", align="right")]
    n: Annotated[str, Column("n", kept=True)]
    agreement: Annotated[str, Column("agreement", align="right", kept=True)]


_METRICS = ("step_ms", "exposed_ms", "load_max_over_mean", "restored_mib", "plan_ms", "inter_node_share")


def comparison_sheet(comparison: Comparison, machine: str = "", metrics: Sequence[str] = ()) -> Sheet:
    """Returns the table and its legend; ``machine`` describes in one line what the numbers were measured on.
    ``metrics``: those that get a column besides the usual ones.
    """
    some_would_not = any(row.would_not_run for row in comparison.rows)
    rows = [
        _compared(
            row,
            metrics,
            speedup=_speedup_cell(row, comparison),
            n=_n_cell(row),
            agreement=_agreement_cell(row, comparison),
            would_run=("no" if row.would_not_run else "yes") * some_would_not,
        )
        for row in comparison.rows
    ]
    best = [place for place, row in enumerate(comparison.rows) if row.name in comparison.best]
    title = f"{comparison.source.upper()}: {comparison.experiment.name}"
    unclear = unclear_rows([row.speedup for row in rows])
    return Sheet(title, rows, _legend(comparison, machine), best=best, unclear=unclear)


def _compared(row: Row, metrics: Sequence[str] = (), **texts: str) -> ComparedStrategy:
    values: dict[str, Any] = {metric: row.median(metric) for metric in _METRICS} | {"would_run": ""} | texts
    asked = {metric: row.median(metric) for metric in metrics}
    return ComparedStrategy(strategy=row.name, final_loss=row.final_loss, asked=asked, **values)


# --- cells and legend -------------------------------------------------------------------------------------------------


def _n_cell(row: Row) -> str:
    """Returns the number of seeds that did not fail; fewer may be paired with those of the baseline."""
    notes = [f"{row.speedup.n} paired"] if row.speedup is not None and row.speedup.n != row.n else []
    notes += [f"{len(row.failed)} failed"] if row.failed else []
    return f"{row.n}" + (f" ({', '.join(notes)})" if notes else "")


def _speedup_cell(row: Row, comparison: Comparison) -> str:
    if row is comparison.baseline:
        return "baseline"
    if row.agreement is not None and not row.agreement.holds:
        return "differs"
    return "" if row.speedup is None else ratio_words(row.speedup)


def ratio_words(ratio: PairedRatio) -> str:
    """Returns ``1.23 [1.10, 1.38]``, after ``~`` if the interval contains 1, else after ``?`` if seeds are too few."""
    mark = "~ " if ratio.low is not None and ratio.holds_one else "? " if ratio.n < MIN_SEEDS else ""
    return f"{mark}{ratio:.2f}"


def unclear_rows(speedups: Sequence[str | None]) -> list[int]:
    """Returns the indices of the speed-ups that ``ratio_words`` marks, because they may be due to chance."""
    return [place for place, words in enumerate(speedups) if words and words.startswith(("~ ", "? "))]


def headline(comparison: Comparison) -> str:
    """Returns one sentence: which strategy is fastest and by how much, or that the run does not tell."""
    baseline, rivals = comparison.baseline, comparison.rivals
    if not rivals:
        return f"No strategy can be compared with {baseline.name}."
    first, ratio = rivals[0], rivals[0].speedup
    assert ratio is not None
    n = f"n = {counted(ratio.n, 'seed')}"
    interval = "" if ratio.low is None else f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}, "
    by = f"{ratio.estimate:.2f} times as fast as {baseline.name} ({interval}{n})"
    if baseline.name in comparison.best:
        return f"{baseline.name}, the baseline, is the fastest. The next one, {first.name}, is {by}."
    if comparison.best:
        return f"{first.name} is the fastest: {by}."
    if ratio.n < MIN_SEEDS:
        return f"Inconclusive: {n}, and {MIN_SEEDS} are needed. So far {first.name} is {by}."
    if ratio.verdict == "faster":
        alike = ", ".join(row.name for row in rivals[1:] if not first.is_faster_than(row))
        return f"{first.name} is {by}, but it is not distinguishable from {alike}."
    return f"Inconclusive: no strategy is clearly faster than {baseline.name}. {first.name} is {by}."


def _agreement_cell(row: Row, comparison: Comparison) -> str:
    if comparison.source == "simulated":
        return ""
    if row is comparison.baseline:
        return "reference"
    if row.agreement is None:
        return "unknown"
    agreement = row.agreement
    if agreement.exact:
        return "bit-equal" if agreement.holds else f"DIVERGES at step {agreement.steps_within}"
    if agreement.holds and agreement.steps_within < agreement.num_steps:
        return f"for {agreement.steps_within} of {agreement.num_steps} steps"
    return "bit-equal" if agreement.bit_equal else f"{agreement.difference:.1e}"


def _legend(comparison: Comparison, machine: str) -> list[str]:
    experiment, baseline, rows = comparison.experiment, comparison.baseline.name, comparison.rows
    cells = [_speedup_cell(row, comparison) for row in rows]
    marks = "~: the interval contains 1. " * any(cell.startswith("~ ") for cell in cells)
    marks += f"?: fewer than {MIN_SEEDS} seeds. " * any(cell.startswith("? ") for cell in cells)
    lines = [
        headline(comparison),
        f"Speed-up: the step time of {baseline} divided by that of the strategy (above 1 is faster): geometric mean "
        f"over seeds, paired by seed, with its 95 % interval (Student's t on logarithms). {marks}".rstrip(),
    ]
    if oracles := [row.name for row in rows if row.is_oracle]:
        lines.append(f"{', '.join(oracles)}: a bound that no run can reach, as its planner knows the load in advance.")
    if any(row.repeat for row in rows):
        lines.append(
            f"{baseline} (again): the same strategy run a second time; its distance from 1 shows noise and drift."
        )
    per_core = [busy for row in rows if (busy := row.median("processes_per_core")) is not None]
    if per_core and median(per_core) > BUSY:
        lines.append(
            f"The machine was busy: {median(per_core):.1f} runnable processes per core, so steps take longer and vary "
            "more than on an idle one."
        )
    of = experiment.workload
    trains_text = isinstance(of, ModelTraining) and not (of.data and all(path.endswith(".bin") for path in of.data))
    known = of.config_fields.get("vocab_size", 0) if isinstance(of, ModelTraining) and of.tokenizer == "bytes" else 0
    if trains_text and known > 256:
        lines.append(f"Tokens are bytes, 256 of the model's {known:,}, as no tokenizer is given.")
    unit = "steps" if isinstance(of, RealTraining) else "micro-batches"
    each = "" if isinstance(of, Replay) else f", {of.steps} {unit} each"
    lines.append(
        f"Other columns: median over the steps of a seed, then over n seeds ({len(experiment.seeds)} requested{each})."
    )
    agreements = [row.agreement for row in rows if row.agreement is not None]
    if any(agreement.exact for agreement in agreements):
        lines.append(
            f"Agreement: with the LayoutInvariant reduction, each loss must be bit-equal to the loss of {baseline} for "
            "the same seed and step. Any other is an error, and no speed is shown."
        )
    if tolerance := max((agreement.tolerance for agreement in agreements), default=0.0):
        lines.append(
            f"Agreement: largest relative difference between a loss and that of {baseline} for the same seed and step: "
            f"at most {tolerance:g} ({experiment.model.dtype}) within the first {JUDGED_STEPS} steps, else no speed is "
            "shown. Later, rounding may send a token to another expert."
        )
    lines += [f"Would not run: {row.name}: {row.would_not_run}." for row in rows if row.would_not_run]
    lines += [f"Failed: {row.name}, seed {seed}: {error}" for row in rows for seed, error in row.failed.items()]
    return [*lines, _source_words(comparison, machine)]


def _source_words(comparison: Comparison, machine: str) -> str:
    experiment = comparison.experiment
    cluster = experiment.cluster
    ranks = f"{counted(cluster.num_ranks, 'rank')} on {counted(cluster.num_nodes, 'node')}"
    if comparison.source == "measured":
        how = f"Measured on {ranks}{f': {machine}' if machine else ''}."
        if isinstance(experiment.workload, Training) and experiment.workload.interpret:
            how += " Kernels ran in Triton's interpreter, so times say nothing about a GPU; only the agreement counts."
    else:
        named = f" ({cluster.hardware})" if cluster.hardware else ""
        how = f"Simulated by the cost model for {ranks}{named}; nothing was measured."
    return f"{how} Fingerprint {setting_fingerprint(experiment)} of model, cluster and workload."


# --- watched trainings ------------------------------------------------------------------------------------------------


def watched_sheet(trainings: Mapping[str, Mapping[str, WatchedRun]]) -> Sheet:
    """Compares watched trainings with the first one, over the steps that all have. A training has one run, whose steps
    are then compared block by block, or a run for each seed by its name.
    """
    num_steps = min(len(run.steps_S) for runs in trainings.values() for run in runs.values())
    seeds = sorted({seed for runs in trainings.values() for seed in runs})
    # Ten parts of a single run take the place of seeds.
    blocks = min(10, num_steps) if all(len(runs) == 1 for runs in trainings.values()) else 0
    baseline, *others = [
        _watched_row(name, {seeds.index(seed) * (not blocks): run for seed, run in runs.items()}, num_steps, blocks)
        for name, runs in trainings.items()
    ]
    shown = [_compared(baseline, speedup="baseline", n=str(len(baseline.samples[SPEED])), agreement="reference")]
    for row in others:
        ratio, agrees = row.speedup_over(baseline), agreement(baseline.losses, row.losses, 0.0)
        known = "unknown" if agrees is None else "bit-equal" if agrees.bit_equal else f"{agrees.difference:.1e}"
        words, n = (ratio_words(ratio), ratio.n) if ratio else ("", 0)
        shown.append(_compared(row, speedup=words, n=str(n), agreement=known))
    by = f"blocks of {num_steps // blocks} steps or fewer" if blocks else "seeds, the subfolders of one name"
    notes = [
        f"Speed-up: the step time of {baseline.name} divided by that of the training: geometric mean over n {by}, with "
        "its 95 % interval (Student's t on logarithms). ~: the interval contains 1. ?: n is below 6, so undecided.",
        f"Agreement: largest relative difference of a loss from that of {baseline.name}, over {num_steps:,} steps, the "
        "shortest training. The first tenth is not timed.",
        "This assumes one model, data, batch and machine, on which nothing else ran"
        + ("; drift between trainings that ran one after another is not in the interval." if blocks else "."),
    ]
    return Sheet("MEASURED: watched trainings", shown, notes, unclear=unclear_rows([row.speedup for row in shown]))


def _watched_row(name: str, runs: Mapping[int, WatchedRun], num_steps: int, blocks: int) -> Row:
    """Returns a training; ``blocks``: the number of parts of its only run that take the place of seeds, or 0."""
    samples: dict[str, dict[int, list[float]]] = {}
    for seed, run in runs.items():
        for metric, values_S in run.samples().items():
            timed_S = values_S[num_steps // 10 : num_steps]
            parts = dict(enumerate(np.array_split(timed_S, blocks))) if blocks else {seed: timed_S}
            samples.setdefault(metric, {}).update({part: values.tolist() for part, values in parts.items()})
    losses = {seed: run.numbers.get("loss", run.steps_S[:0] * 1.0)[:num_steps] for seed, run in runs.items()}
    finite = {seed: of[np.isfinite(of)].tolist() for seed, of in losses.items()}
    return Row(name, Strategy(name="watched"), 0, samples, {}, finite, {})


# --- data -------------------------------------------------------------------------------------------------------------


def comparison_json(comparison: Comparison, machine: str = "") -> str:
    """Returns everything: the experiment with all defaults, and the statistics, samples and losses of each row.

    A number that JSON cannot hold is the string "NaN", "Infinity" or "-Infinity".
    """
    fields = {
        "schema": COMPARISON_SCHEMA,
        "source": comparison.source,
        "fingerprint": setting_fingerprint(comparison.experiment),
        "machine": machine,
        "environments": comparison.environments,
        "baseline": comparison.baseline.name,
        "best": sorted(comparison.best),
        "rows": [_json_fields(row) for row in comparison.rows],
        "experiment": comparison.experiment.model_dump(mode="json"),
    }
    return pydantic_core.to_json(fields, indent=1, inf_nan_mode="strings").decode() + "\n"


def _json_fields(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "strategy": row.strategy.model_dump(mode="json"),
        "n": row.n,
        "failed": row.failed,
        "speedup": row.speedup and {**asdict(row.speedup), "verdict": row.speedup.verdict},
        "agreement": row.agreement and {**asdict(row.agreement), "bit_equal": row.agreement.bit_equal},
        "samples": {
            metric: {"unit": row.units[metric], "values_by_seed": by_seed} for metric, by_seed in row.samples.items()
        },
        "losses_by_seed": row.losses,
    }
