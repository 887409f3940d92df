"""``moesys simulate``: a step of each strategy on a cluster that need not be there, under several draws of its routing,
and what sets its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from moesys.balance.plan import StepPlan, why_not
from moesys.config import ClusterSpec, Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import Generated, RealTraining, Replay, Workload
from moesys.lab.commands import refused
from moesys.lab.commands.declarations import cluster_of, strategy_in
from moesys.lab.runs.experiment_files import in_words, load_experiment
from moesys.lab.runs.trials import drawn_like, rest_of, timed_steps
from moesys.lab.show.chrome_trace import write_chrome_trace
from moesys.lab.show.figures import timeline_chart
from moesys.lab.show.simulated_steps import StepDraws, StepFigures, step_sheet
from moesys.lab.show.tables import print_sheet
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.simulation import Simulation
from moesys.simulator.step_program import simulation

MOST_TRACED_RANKS = 64
MOST_DRAWN_RANKS = 8
DRAWS = 8


@dataclass(frozen=True)
class FirstDraw:
    """What files are written of."""

    name: str
    simulation: Simulation


def simulate_command(
    file: Path,
    *,
    strategies: Sequence[str] = (),
    layers: int | None = None,
    cluster: str | None = None,
    step: int = 0,
    draws: int = DRAWS,
    model_layers: int | None = None,
    out: Path | None = None,
) -> int:
    """Simulates, prints and writes. Returns the exit code, 2 if the arguments cannot be met."""
    try:
        if out is not None:
            # Before all is simulated.
            out.mkdir(parents=True, exist_ok=True)
        name, todo, words = _todo(file, strategies, layers, cluster, step, draws)
        firsts, found, shape = [], [], ""
        with Console(stderr=True).status("") as status:
            for of_strategy, of_draws, rest in todo:
                figures: list[StepFigures] = []
                for plans in of_draws:
                    status.update(f"{of_strategy}: planning and simulating, draw {1 + len(figures)}")
                    simulated = simulation(plans, rest)
                    if not figures:
                        firsts.append(FirstDraw(of_strategy, simulated))
                    against = why_not(plans, num_layers=model_layers, recompute=rest.recompute != "none")
                    figures.append(StepFigures.of(simulated, plans, against))
                    shape = shape or _shape_words(plans[0])
                found.append(StepDraws(of_strategy, tuple(figures)))
            # Before the table is printed, whose reader may stop before its end.
            files = [] if out is None else [_write(of, out / stem, name) for stem, of in _by_stem(firsts).items()]
        print_sheet(step_sheet(f"SIMULATED: {name}, {shape}", found, words))
        for paths in files:
            print("written to " + ", ".join(map(str, paths)))
    except (ValueError, OSError) as error:
        return refused(error)
    return 0


# --- what is asked for ----------------------------------------------------------------------------------------------

Plans = tuple[StepPlan, ...]
Todo = tuple[str, Iterator[Plans], RestOfStep]


def _todo(
    file: Path, strategies: Sequence[str], layers: int | None, cluster: str | None, step: int, draws: int
) -> tuple[str, list[Todo], str]:
    """Returns the name of the simulation; the name of each strategy with the plans of a step of each draw and the rest
    of the step; and what a draw is, in words.
    """
    plan = _step_plan(file)
    if plan is None:
        experiment = _changed(load_experiment(file), layers, cluster)
        chosen = [strategy_in(experiment, name) for name in strategies] or list(experiment.strategies)
        by_seed = _has_seeds(experiment.workload)
        of_draws = _seeds if by_seed else _steps_of_a_trace
        words = (
            "routing of other seeds" if by_seed else f"steps of the trace from {step} on, which resemble one another"
        )
        return (
            experiment.name,
            [
                (strategy.name, of_draws(strategy, experiment, layers, step, draws), rest_of(experiment.workload))
                for strategy in chosen
            ],
            words,
        )
    given = {"--strategy": bool(strategies), "--cluster": cluster is not None, "--step": step != 0}
    if unused := [option for option, there in given.items() if there]:
        raise ValueError(f"{unused[0]} is for experiments, and {file} is the plan of one step; leave it out")
    return file.stem, [(plan.strategy.name, iter([(_first_layers(plan, layers),)]), RestOfStep())], ""


def _step_plan(file: Path) -> StepPlan | None:
    """Returns None if the file is no StepPlan: then it has to be an experiment."""
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
    """Returns the experiment on another cluster, with this number of layers."""
    workload = experiment.workload
    if isinstance(workload, RealTraining):
        workload = drawn_like(workload)
    if layers is not None and isinstance(workload, Generated):
        workload = workload.replace(num_layers=layers)
    return experiment.replace(workload=workload, cluster=_cluster(cluster, experiment.cluster))


def _cluster(text: str | None, declared: ClusterSpec) -> ClusterSpec:
    """Reads a cluster; ``4x8`` keeps the speeds of the declared one."""
    if text is None:
        return declared
    if re.fullmatch(r"(\d+)x(\d+)", text):
        shape = cluster_of(text)
        return declared.replace(
            num_nodes=shape.num_nodes, ranks_per_node=shape.ranks_per_node, ranks_per_domain=None, name=""
        )
    return cluster_of(text)


def _has_seeds(workload: Workload) -> bool:
    return isinstance(workload, Generated) or (isinstance(workload, Replay) and "{seed}" in workload.trace)


def _seeds(strategy: Strategy, experiment: Experiment, layers: int | None, step: int, draws: int) -> Iterator[Plans]:
    """Yields the same step under the seeds of the experiment, and if routing is drawn, under other seeds after them."""
    seeds = list(experiment.seeds)
    if isinstance(experiment.workload, Generated):
        seeds += islice((seed for seed in count() if seed not in experiment.seeds), max(0, draws - len(seeds)))
    for seed in seeds[:draws]:
        yield next(_steps(strategy, experiment, layers, step, seed))


def _steps_of_a_trace(
    strategy: Strategy, experiment: Experiment, layers: int | None, step: int, draws: int
) -> Iterator[Plans]:
    """Yields the step and those after it, as many as there are."""
    return islice(_steps(strategy, experiment, layers, step, experiment.seeds[0]), draws)


def _steps(strategy: Strategy, experiment: Experiment, layers: int | None, step: int, seed: int) -> Iterator[Plans]:
    """Yields the plans of the timed steps of a seed from ``step`` on."""
    workload = experiment.workload
    assert isinstance(workload, Replay | Generated)
    if isinstance(workload, Generated) and step >= workload.steps:
        raise ValueError(
            f"step={step} is none of the workload's {workload.steps} timed steps; use 0 to {workload.steps - 1}"
        )
    timed = islice(timed_steps(strategy, experiment.model, experiment.cluster, workload, seed), step, None)
    if (first := next(timed, None)) is None:
        raise ValueError(f"step={step} is behind the trace's last timed step; use a smaller one, or 0 for the first")
    for plans in chain([first], timed):
        yield tuple(_first_layers(plan, layers) for plan in plans)


def _first_layers(plan: StepPlan, layers: int | None) -> StepPlan:
    if layers is None:
        return plan
    if layers > len(plan.layers):
        raise ValueError(f"layers={layers} is more than the {len(plan.layers)} that there are; use at most so many")
    previous = None if plan.previous is None else plan.previous[:layers]
    return StepPlan(plan.strategy, plan.model, plan.cluster, plan.layers[:layers], previous)


# --- what is shown --------------------------------------------------------------------------------------------------


def _shape_words(plan: StepPlan) -> str:
    cluster = plan.cluster
    return f"one step of {len(plan.layers)} layers on {cluster.num_ranks} ranks of {cluster.num_nodes} nodes"


def _by_stem(steps: Sequence[FirstDraw]) -> dict[str, FirstDraw]:
    """Returns draws by file name: that of the strategy, with a number if another strategy would have the same."""
    found: dict[str, FirstDraw] = {}
    for step in steps:
        stem = re.sub(r"[^\w.+-]", "_", step.name)
        numbered = (f"{stem}-{number}" for number in count(2))
        found[next(name for name in chain([stem], numbered) if name not in found)] = step
    return found


def _write(step: FirstDraw, stem: Path, name: str) -> list[Path]:
    """Writes a trace for Perfetto, and a chart if there is something to draw."""
    of = step.simulation
    num_ranks = of.cluster.num_ranks
    traced = of.timeline.only(_some_ranks(of, MOST_TRACED_RANKS))
    drawn = of.timeline.only(_some_ranks(of, MOST_DRAWN_RANKS))
    trace = write_chrome_trace(traced, stem.with_name(f"{stem.name}.trace.json"), of.critical_path)
    words = f"{name}, {step.name}" + f" on {num_ranks} ranks" * (num_ranks > MOST_DRAWN_RANKS)
    return [trace, *(timeline_chart(drawn, stem, name=words) if drawn.spans else [])]


def _some_ranks(of: Simulation, most: int) -> list[int]:
    """Returns the ranks that delay the step most, and others at even distances."""
    num_ranks = of.cluster.num_ranks
    if num_ranks <= most:
        return list(range(num_ranks))
    on_path = [part.rank for part in sorted(of.critical_path, key=lambda part: -part.seconds) if part.is_of_rank]
    evenly = np.linspace(0, num_ranks - 1, most).astype(int).tolist()
    return sorted(list(dict.fromkeys([*list(dict.fromkeys(on_path))[: most // 2], *evenly]))[:most])
