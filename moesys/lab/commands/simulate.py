"""``moesys simulate``: one step of each strategy on a cluster that need not be there, and what sets its length."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moesys.config import ClusterSpec, Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import Generated, Measured, Replay
from moesys.lab.commands import refused
from moesys.lab.commands.declarations import cluster_of
from moesys.lab.runs.experiment_files import in_words, load_experiment
from moesys.lab.runs.trials import drawn_like, rest_of, routing_of
from moesys.lab.show.chrome_trace import write_chrome_trace
from moesys.lab.show.console import print_full
from moesys.lab.show.figures import timeline_chart
from moesys.lab.show.tables import figure
from moesys.replay import replay_steps
from moesys.runnable import why_not
from moesys.simulator.critical_path import by_place
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.simulation import Simulation, exposed_ms
from moesys.step import StepPlan, simulation

MOST_TRACED_RANKS = 64
MOST_DRAWN_RANKS = 8
LEGEND = (
    "Means over ranks, but for the step. exposed = tokens + restore + waiting: a rank computes nothing meanwhile.",
    "tokens: until rows have come; restore: until experts have, or gradients; waiting: for slower ranks.",
    "critical path: what the step waited for, from its start to its end, as shares of it; most first.",
)
TOKENS, EXPERTS = ("counts", "dispatch", "combine"), ("restore", "reshard")


@dataclass(frozen=True)
class SimulatedStep:
    """A step of one strategy. ``micro_batches``: its plans. ``would_not_run``: what stands against it, if anything."""

    micro_batches: tuple[StepPlan, ...]
    simulation: Simulation
    would_not_run: tuple[str, ...]

    @property
    def strategy(self) -> Strategy:
        return self.micro_batches[0].strategy

    @property
    def max_over_mean(self) -> float:
        return float(np.mean([plan.tokens.max_over_mean for step in self.micro_batches for plan in step.layers]))


def simulate_command(
    file: Path,
    *,
    strategies: Sequence[str] = (),
    layers: int | None = None,
    cluster: str | None = None,
    step: int = 0,
    model_layers: int | None = None,
    out: Path | None = None,
) -> int:
    """Simulate, print, write; the exit code, 2 where what was asked for cannot be."""
    try:
        if out is not None:
            # Before all is simulated.
            out.mkdir(parents=True, exist_ok=True)
        name, todo = _todo(file, strategies, layers, cluster, step)
        steps = []
        with Console(stderr=True).status("") as status:
            for of_strategy, micro_batches, rest in todo:
                status.update(f"{of_strategy}: planning and simulating")
                plans = tuple(micro_batches)
                against = why_not(plans, num_layers=model_layers, recompute=rest.recompute != "none")
                steps.append(SimulatedStep(plans, simulation(plans, rest), against))
            # Before the table is printed, whose reader may stop before its end.
            files = [] if out is None else [_write(of, out / stem, name) for stem, of in _by_stem(steps).items()]
        print_full(step_table(name, steps), [*LEGEND, *_against(steps)])
        for paths in files:
            print("written to " + ", ".join(map(str, paths)))
    except (ValueError, OSError) as error:
        return refused(error)
    return 0


# --- what is asked for ----------------------------------------------------------------------------------------------

Todo = tuple[str, Iterator[StepPlan], RestOfStep]


def _todo(
    file: Path, strategies: Sequence[str], layers: int | None, cluster: str | None, step: int
) -> tuple[str, list[Todo]]:
    """The name of it all; and of each strategy its name, the plans of one step, and the rest of it."""
    plan = _step_plan(file)
    if plan is None:
        experiment = _changed(load_experiment(file), layers, cluster)
        chosen = _chosen(strategies, experiment)
        return experiment.name, [
            (strategy.name, _step(strategy, experiment, layers, step), rest_of(experiment.workload))
            for strategy in chosen
        ]
    given = {"--strategy": bool(strategies), "--cluster": cluster is not None, "--step": step != 0}
    if unused := [option for option, there in given.items() if there]:
        raise ValueError(f"{unused[0]} is for experiments, and {file} is the plan of one step; leave it out")
    return file.stem, [(plan.strategy.name, iter([_first_layers(plan, layers)]), RestOfStep())]


def _step_plan(file: Path) -> StepPlan | None:
    """None for what is no StepPlan: then it is to be an experiment."""
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        fields = json.loads(text)
        if not isinstance(fields, dict) or "layers" not in fields:
            return None
        return StepPlan.from_json(text)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no StepPlan: {error!r}; write one with StepPlan.to_json()") from None
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ValueError(f"{file} is no StepPlan and no experiment: {in_words(error)}") from None


def _changed(experiment: Experiment, layers: int | None, cluster: str | None) -> Experiment:
    """The experiment on another cluster, with as many layers."""
    workload = experiment.workload
    if isinstance(workload, Measured):
        workload = drawn_like(workload)
    if layers is not None and isinstance(workload, Generated):
        workload = workload.replace(num_layers=layers)
    return experiment.replace(workload=workload, cluster=_cluster(cluster, experiment.cluster))


def _cluster(text: str | None, declared: ClusterSpec) -> ClusterSpec:
    """``4x8`` keeps the speeds of the experiment's cluster."""
    if text is None:
        return declared
    if re.fullmatch(r"(\d+)x(\d+)", text):
        shape = cluster_of(text)
        return declared.replace(
            num_nodes=shape.num_nodes, ranks_per_node=shape.ranks_per_node, ranks_per_domain=None, name=""
        )
    return cluster_of(text)


def _chosen(names: Sequence[str], experiment: Experiment) -> list[Strategy]:
    by_name = {strategy.name: strategy for strategy in experiment.strategies}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"strategy={unknown[0]!r} is not in {experiment.name}; choose one of {', '.join(by_name)}")
    return [by_name[name] for name in names] or list(experiment.strategies)


def _step(strategy: Strategy, experiment: Experiment, layers: int | None, step: int) -> Iterator[StepPlan]:
    """The plans of one timed step of the first seed, whose layouts follow from the micro-batches before."""
    workload = experiment.workload
    assert isinstance(workload, Replay | Generated)
    if isinstance(workload, Generated) and step >= workload.steps:
        raise ValueError(
            f"step={step} is none of the workload's {workload.steps} timed steps; use 0 to {workload.steps - 1}"
        )
    first = workload.warmup + step * workload.micro_batches
    routing = routing_of(workload, experiment.model, experiment.cluster, experiment.seeds[0])
    every = replay_steps(strategy, experiment.model, experiment.cluster, routing.tokens_SLRE)
    plans = list(islice(every, first, first + workload.micro_batches))
    if len(plans) < workload.micro_batches:
        raise ValueError(f"step={step} is behind the trace's last timed step; use a smaller one, or 0 for the first")
    return (_first_layers(plan, layers) for plan in plans)


def _first_layers(plan: StepPlan, layers: int | None) -> StepPlan:
    if layers is None:
        return plan
    if layers > len(plan.layers):
        raise ValueError(f"layers={layers} is more than the {len(plan.layers)} that there are; use at most so many")
    previous = None if plan.previous is None else plan.previous[:layers]
    return StepPlan(plan.strategy, plan.model, plan.cluster, plan.layers[:layers], previous)


# --- what is shown --------------------------------------------------------------------------------------------------


def step_table(name: str, steps: Sequence[SimulatedStep]) -> Table:
    """A row a strategy; milliseconds are means over ranks, but for the step's own."""
    first = steps[0].micro_batches[0]
    title = (
        f"SIMULATED: {name}, one step of {len(first.layers)} layers on {first.cluster.num_ranks} ranks of "
        f"{first.cluster.num_nodes} nodes"
    )
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    figures = ("step ms", "speed-up", "load max/mean", "experts ms", "other ms", "exposed ms")
    table.add_column("strategy", no_wrap=True)
    for column in (*figures, "tokens ms", "restore ms", "waiting ms"):
        table.add_column(Text(column.replace(" ", "\n", 1)), justify="right", no_wrap=True)
    table.add_column("critical path")
    # Of what would run, where anything would.
    baseline = min(steps, key=lambda step: bool(step.would_not_run)).simulation.length_seconds
    for step in steps:
        table.add_row(*map(Text, _cells(step, baseline)))
    return table


def _against(steps: Sequence[SimulatedStep]) -> Iterator[str]:
    for step in steps:
        yield from (f"{step.strategy.name} would not run: {reason}." for reason in step.would_not_run)


def _cells(step: SimulatedStep, baseline_seconds: float) -> Iterator[str]:
    of = step.simulation
    computed_ms = {kind: 1e3 * float(seconds_R.mean()) for kind, seconds_R in of.computed_R.items()}
    waited_ms = {kind: 1e3 * float(seconds_R.mean()) for kind, seconds_R in of.waited_R.items()}
    experts_ms = sum(computed_ms.get(kind, 0.0) for kind in ("experts", "weight_gradients"))
    tokens_ms, restore_ms = (sum(waited_ms.get(kind, 0.0) for kind in kinds) for kinds in (TOKENS, EXPERTS))
    exposed = exposed_ms(of.timeline)
    yield step.strategy.name
    yield figure(1e3 * of.length_seconds)
    if step.would_not_run:
        yield "would not run"
    else:
        yield f"{baseline_seconds / of.length_seconds:.2f}" if of.length_seconds else ""
    yield f"{step.max_over_mean:.2f}"
    yield figure(experts_ms)
    yield figure(sum(computed_ms.values()) - experts_ms)
    yield figure(exposed)
    yield figure(tokens_ms)
    yield figure(restore_ms)
    yield figure(max(exposed - tokens_ms - restore_ms, 0.0))
    yield ", ".join(f"{where} {100 * share:.0f} %" for where, _, share in by_place(of.critical_path)[:3])


def _by_stem(steps: Sequence[SimulatedStep]) -> dict[str, SimulatedStep]:
    """By the strategy's name as files may have it; a number behind it where another strategy's looks the same."""
    found: dict[str, SimulatedStep] = {}
    for step in steps:
        stem = re.sub(r"[^\w.+-]", "_", step.strategy.name)
        numbered = (f"{stem}-{number}" for number in count(2))
        found[next(name for name in chain([stem], numbered) if name not in found)] = step
    return found


def _write(step: SimulatedStep, stem: Path, name: str) -> list[Path]:
    """A trace for Perfetto, and a chart where there is something to draw."""
    of = step.simulation
    num_ranks = of.cluster.num_ranks
    traced = of.timeline.only(_some_ranks(of, MOST_TRACED_RANKS))
    drawn = of.timeline.only(_some_ranks(of, MOST_DRAWN_RANKS))
    trace = write_chrome_trace(traced, stem.with_name(f"{stem.name}.trace.json"), of.critical_path)
    words = f"{name}, {step.strategy.name}" + f" on {num_ranks} ranks" * (num_ranks > MOST_DRAWN_RANKS)
    return [trace, *(timeline_chart(drawn, stem, name=words) if drawn.spans else [])]


def _some_ranks(of: Simulation, most: int) -> list[int]:
    """Those that hold up the step first, and others evenly."""
    num_ranks = of.cluster.num_ranks
    if num_ranks <= most:
        return list(range(num_ranks))
    on_path = [part.rank for part in sorted(of.critical_path, key=lambda part: -part.seconds) if part.is_of_rank]
    evenly = np.linspace(0, num_ranks - 1, most).astype(int).tolist()
    return sorted(list(dict.fromkeys([*list(dict.fromkeys(on_path))[: most // 2], *evenly]))[:most])
