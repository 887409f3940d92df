"""``moesys explain``: one step's plan as a tree for the terminal, or as JSON."""

from __future__ import annotations

from pathlib import Path

from moesys.config import Strategy
from moesys.config.experiment import Experiment
from moesys.lab.commands import refused
from moesys.lab.commands.declarations import strategy_in, strategy_of
from moesys.lab.explanation.explanation import explain
from moesys.lab.explanation.step_explanation import explanation_tree
from moesys.lab.runs.experiment_files import load_experiment
from moesys.lab.show.tables import print_full


def explain_command(
    file: Path,
    strategy: str | None = None,
    layer: int | None = None,
    micro_batch: int | None = None,
    as_json: bool = False,
    model_layers: int | None = None,
) -> int:
    """Explain a strategy of the experiment in ``file``, by default the last one, or one in a file of its own; 2 where
    what was asked for is not.
    """
    try:
        experiment = load_experiment(file)
        chosen = _chosen(strategy, experiment)
        explanation = explain(chosen, experiment, micro_batch=micro_batch, model_layers=model_layers)
        tree = explanation_tree(explanation, layer)
        if as_json:
            print(explanation.to_json())
        else:
            print_full(tree)
    except (ValueError, OSError) as error:
        return refused(error)
    return 0


def _chosen(name: str | None, experiment: Experiment) -> Strategy:
    if name is None:
        return experiment.strategies[-1]
    if Path(name).suffix in (".json", ".toml") and all(strategy.name != name for strategy in experiment.strategies):
        return strategy_of(Path(name))
    return strategy_in(experiment, name, ", or a .toml or .json file")
