"""Tables of comparisons, for terminals and as Markdown, CSV and JSON: what is measured, what is simulated, and
what is significant.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Annotated, Any, Literal

import pydantic_core

from moesys.config.workload import ModelTraining, RealTraining, Training
from moesys.display import counted
from moesys.lab.runs.comparison import JUDGED_STEPS, Comparison, Row
from moesys.lab.runs.records import setting_fingerprint
from moesys.lab.runs.statistics import MIN_SEEDS, PairedRatio
from moesys.lab.show.sheets import Column, ColumnNote, Sheet, escaped, figure, markdown_table

Format = Literal["markdown", "csv", "json"]
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
    would_run: Annotated[str, Column("would\nrun", align="right")]
    n: Annotated[str, Column("n", kept=True)]
    agreement: Annotated[str, Column("agreement", align="right")]


_METRICS = ("step_ms", "exposed_ms", "load_max_over_mean", "restored_mib", "plan_ms", "inter_node_share")


def comparison_sheet(comparison: Comparison, machine: str = "") -> Sheet:
    """Returns the table and its legend; ``machine`` describes in one line what the numbers were measured on."""
    rows = [
        ComparedStrategy(
            strategy=row.name,
            speedup=_speedup_cell(row, comparison),
            final_loss=row.final_loss,
            would_run=_runs_cell(row, comparison),
            n=_n_cell(row),
            agreement=_agreement_cell(row, comparison),
            **{metric: row.median(metric) for metric in _METRICS},
        )
        for row in comparison.rows
    ]
    best = [place for place, row in enumerate(comparison.rows) if row.name in comparison.best]
    title = f"{comparison.source.upper()}: {comparison.experiment.name}"
    unclear = unclear_rows([row.speedup for row in rows])
    return Sheet(title, rows, _legend(comparison, machine), best=best, unclear=unclear)


def format_comparison(comparison: Comparison, form: Format, machine: str = "") -> str:
    """Returns the whole text, with a newline at the end; ``machine`` as in ``comparison_sheet``."""
    sheet = comparison_sheet(comparison, machine)
    match form:
        case "markdown":
            notes = [f"- {escaped(note)}" for note in sheet.notes]
            return "\n".join([f"### {escaped(sheet.title)}", "", markdown_table(sheet), "", *notes]) + "\n"
        case "csv":
            units = {metric: unit for row in comparison.rows for metric, unit in row.units.items()}
            return _csv([_csv_fields(row, comparison, units) for row in comparison.rows])
        case "json":
            return _json(comparison, machine)


# --- cells and legend -------------------------------------------------------------------------------------------------


def _n_cell(row: Row) -> str:
    """Returns the number of seeds that did not fail; fewer may be paired with those of the baseline."""
    notes = [f"{row.speedup.n} paired"] if row.speedup is not None and row.speedup.n != row.n else []
    notes += [f"{len(row.failed)} failed"] if row.failed else []
    return f"{row.n}" + (f" ({', '.join(notes)})" if notes else "")


def _runs_cell(row: Row, comparison: Comparison) -> str:
    """Returns "" if all strategies would run."""
    if not any(of.would_not_run for of in comparison.rows):
        return ""
    return "no" if row.would_not_run else "yes"


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
        return "n/a"
    if row is comparison.baseline:
        return "reference"
    if row.agreement is None:
        return "unknown"
    agreement = row.agreement
    if agreement.exact:
        return "bit-equal" if agreement.holds else f"DIVERGES at step {agreement.steps_within}"
    if agreement.holds and agreement.steps_left:
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
    lines.append(f"Other columns: median over the steps of a seed, then over n seeds ({_sample_words(comparison)}).")
    agreements = [row.agreement for row in rows if row.agreement is not None]
    if any(agreement.exact for agreement in agreements):
        words = (
            f"Agreement: with the LayoutInvariant reduction, each loss must be bit-equal to the loss of {baseline} for "
            "the same seed and step. Any other is an error, and no speed is shown."
        )
        lines.append(ColumnNote(words, "agreement"))
    if tolerance := max((agreement.tolerance for agreement in agreements), default=0.0):
        words = (
            f"Agreement: largest relative difference between a loss and that of {baseline} for the same seed and step: "
            f"at most {tolerance:g} ({experiment.model.dtype}) within the first {JUDGED_STEPS} steps, else no speed is "
            "shown. Later, rounding may send a token to another expert."
        )
        lines.append(ColumnNote(words, "agreement"))
    starved = {row.name: max(chain(*row.samples.get("starved_experts", {}).values()), default=0.0) for row in rows}
    if any(starved.values()):
        assert isinstance(experiment.workload, Training | ModelTraining)
        pairs = experiment.workload.num_layers * experiment.model.num_experts
        lines.append(
            f"Experts without a token in a step, at most, of {pairs:,} in all layers: "
            f"{', '.join(f'{name} {most:g}' for name, most in starved.items() if most)}. This is usual while a router "
            "is new; if starved_experts rises and router_entropy falls over a longer training, it is collapsing."
        )
    lines += [f"Would not run: {row.name}: {row.would_not_run}." for row in rows if row.would_not_run]
    lines += [f"Failed: {row.name}, seed {seed}: {error}" for row in rows for seed, error in row.failed.items()]
    return [*lines, _source_words(comparison, machine)]


def _sample_words(comparison: Comparison) -> str:
    experiment, seeds = comparison.experiment, comparison.experiment.seeds
    steps = getattr(experiment.workload, "steps", None)
    unit = "steps" if isinstance(experiment.workload, RealTraining) else "micro-batches"
    asked = f"{len(seeds)} requested"
    return f"{asked}, {steps} {unit} each" if steps else asked


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


# --- data -------------------------------------------------------------------------------------------------------------


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json(comparison: Comparison, machine: str) -> str:
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


def _csv_fields(row: Row, comparison: Comparison, units: dict[str, str]) -> dict[str, Any]:
    """Returns the line of a row, with unrounded numbers: the median of each metric, and all fields of the speed-up."""
    ratio, agreement = row.speedup, row.agreement
    return {
        "strategy": row.name,
        "source": comparison.source,
        "n seeds": row.n,
        "failed seeds": len(row.failed),
        "speedup": ratio and ratio.estimate,
        "speedup low 95 %": ratio and ratio.low,
        "speedup high 95 %": ratio and ratio.high,
        "speedup p": ratio and ratio.p,
        "verdict": ratio and ratio.verdict,
        "loss at end (nats a token)": row.final_loss,
        "largest relative difference of a loss": agreement and agreement.difference,
        "numbers agree": agreement and agreement.holds,
        **{f"median {metric}{f' ({unit})' if unit else ''}": row.median(metric) for metric, unit in units.items()},
    }


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
