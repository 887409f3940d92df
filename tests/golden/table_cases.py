"""Golden tables: recorded experiments in both forms of ``moesys compare``.

``simulated`` is run here, through the runner. ``measured`` has its records beside this file; their times nobody's clock
has made. One trial failed, and one strategy's losses differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app

RECORDED = Path(__file__).with_name("measured.jsonl")
FORMS: dict[str, list[str]] = {"table": [], "json": ["--json"]}
# more than 12 digits
LONG_FRACTION = re.compile(r"(?=[\d.]{14})\d+\.\d+(?:e[-+]?\d+)?")


def simulated_experiment() -> ms.Experiment:
    """All predictors, and layouts that change now and then."""
    fsep = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4), balance=ms.Greedy(), split=ms.FlowSplit())
    window = {"predictor": ms.WindowMean(steps=2), "replan_every": 2, "overlap": ms.Pipelined(chunks=2)}
    return ms.Experiment(
        name="golden",
        model=ms.ModelShape(hidden_size=256, intermediate_size=256, num_experts=12, top_k=2),
        cluster=ms.ClusterSpec(num_nodes=2, ranks_per_node=3, inter_node_gb_per_s=20.0),
        strategies=(
            ms.Strategy(name="ep"),
            fsep,
            fsep.replace(name="window", **window),
            fsep.replace(name="ema", predictor=ms.Ema(), lag=2, split=ms.Proportional()),
            fsep.replace(name="adaptive", predictor=ms.Adaptive(), balance=ms.FlexMoe()),
            fsep.replace(name="oracle", predictor=ms.Oracle(), balance=ms.Eplb()),
        ),
        workload=ms.Generated(warmup=3, steps=2, tokens_per_rank=512, micro_batches=2, other_ms=0.05, skew=1.2),
        seeds=tuple(range(6)),
        repeat_baseline=True,
    )


def measured_experiment() -> ms.Experiment:
    """What the records beside this file are of."""
    ep = ms.Strategy(name="ep")
    fsep = ep.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Greedy(), split=ms.FlowSplit())
    return ms.Experiment(
        name="recorded",
        model=ms.ModelShape(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2),
        cluster=ms.ClusterSpec(ranks_per_node=2),
        strategies=(
            ep,
            ep.replace(name="ep+pipelined", overlap=ms.Pipelined(chunks=2)),
            fsep,
            fsep.replace(name="fsep_[even]", split=ms.EvenSplit()),
            fsep.replace(name="broken", balance=ms.Laer()),
        ),
        workload=ms.Training(num_layers=1, batch=1, context=16, warmup=1, steps=2),
        seeds=tuple(range(6)),
        repeat_baseline=True,
    )


def table_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and texts: the identities of all trials, and the tables. ``folder`` gets the run folders."""
    of_model, by_clock = simulated_experiment(), measured_experiment()
    trials = [*of_model.trials(), *by_clock.trials()]
    yield "identities.txt", "".join(f"{trial.strategy.name}: {trial.identity}\n" for trial in trials)
    for name, run in ("simulated", _simulated_run(of_model, folder)), ("measured", _measured_run(by_clock, folder)):
        for form, options in FORMS.items():
            printed = CliRunner().invoke(app, ["compare", str(run), *options], catch_exceptions=False)
            # rich fills lines of tables with blanks
            lines = [line.rstrip() for line in printed.stdout.splitlines()]
            yield f"{name}.{form}.txt", LONG_FRACTION.sub(_in_12_digits, "\n".join(lines) + "\n")


def _simulated_run(experiment: ms.Experiment, folder: Path) -> Path:
    """A folder whose records name no environment, as that is of the machine."""
    path = ms.run(experiment, folder).path
    lines = (path / "records.jsonl").read_text().splitlines()
    _write_records(path, [json.loads(line) | {"environment": ""} for line in lines])
    return path


def _measured_run(experiment: ms.Experiment, folder: Path) -> Path:
    path = folder / experiment.name
    path.mkdir()
    (path / "experiment.json").write_text(experiment.to_json())
    identities = {(trial.strategy.name, trial.seed, trial.repeat): trial.identity for trial in experiment.trials()}
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    _write_records(path, [of | {"identity": identities[of["strategy"], of["seed"], of["repeat"]]} for of in records])
    return path


def _write_records(path: Path, records: list[dict[str, object]]) -> None:
    (path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _in_12_digits(fraction: re.Match[str]) -> str:
    return f"{float(fraction[0]):.12g}"
