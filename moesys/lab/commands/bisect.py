"""``moesys bisect``: two trials of a run folder trained again, side by side, up to the first tensor that differs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from moesys.config import Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import RealTraining
from moesys.lab.commands import refused
from moesys.lab.commands.declarations import strategy_in
from moesys.lab.ranks.process_start import writes
from moesys.lab.runs.bisect import FirstDifference, find_first_difference
from moesys.lab.runs.comparison import compare_records
from moesys.lab.runs.environment import load_environments
from moesys.lab.runs.places import RankTrials, TrialError, no_tick
from moesys.lab.runs.records import RunFolder


def bisect_command(run: Path, a: str, b: str, seed: int | None = None) -> int:
    """Prints the first difference of strategies ``a`` and ``b``, under ``seed`` or the seed whose recorded losses
    differ first. Returns the exit code: 1 if a bit differs. Under torchrun only rank 0 prints.
    """
    speaks = writes()
    try:
        folder = RunFolder(run)
        experiment = folder.experiment()
        first, second = (strategy_in(experiment, name) for name in (a, b))
        if not isinstance(experiment.workload, RealTraining):
            raise ValueError(
                f"{run} was simulated, and bisect compares what is computed; give the folder of a training"
            )
        seed = _seed(seed, experiment, folder, first, second)
        workload, pair = experiment.workload, (first, second)
        arguments = (pair, experiment.model, experiment.cluster, workload, seed)
        with closing(RankTrials(experiment, _threads(folder))) as ranks:
            difference = ranks.call(pair, find_first_difference, *arguments, no_tick)
    except TrialError as error:
        return refused(ValueError(error.trace)) if speaks else 2
    except (ValueError, OSError) as error:
        return refused(error) if speaks else 2
    if speaks:
        names = f"{first.name} and {second.name}, seed {seed}"
        steps = workload.warmup + workload.steps
        print(f"{names}: no bit differs in {steps} steps" if difference is None else f"{names}: {_words(difference)}")
    return int(difference is not None)


def _words(found: FirstDifference) -> str:
    """Returns ``the first difference is in step 3, output of blocks.0.moe, on rank 1 of 4: 12 of 64 numbers, by 2e-8 at
    most``.
    """
    ranks = f"{_numbered('rank', found.ranks)} of {found.num_ranks}"
    ranks = "all ranks" if len(found.ranks) == found.num_ranks else ranks
    experts = f", {_numbered('expert', found.experts)}" if found.experts else ""
    return (
        f"the first difference is in step {found.step}, {found.tensor}{experts}, on {ranks}: "
        f"{found.num_different} of {found.num_elements} numbers, by {found.largest:.2g} at most"
    )


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _seed(seed: int | None, experiment: Experiment, folder: RunFolder, first: Strategy, second: Strategy) -> int:
    """Returns one whose losses part first, by the records; the first one where none does."""
    if seed is None:
        pair = experiment.replace(strategies=tuple(dict.fromkeys((first, second))), repeat_baseline=False)
        found = [row.agreement.seed for row in compare_records(pair, folder.records()).rows if row.agreement]
        return next((each for each in found if each is not None), experiment.seeds[0])
    if seed not in experiment.seeds:
        raise ValueError(
            f"seed={seed} is not in {experiment.name}; choose one of {', '.join(map(str, experiment.seeds))}"
        )
    return seed


def _threads(folder: RunFolder) -> int:
    """Returns those of a rank when the newest record was made: bits depend on them."""
    environments, records = load_environments(folder.path), folder.records()
    known = [environments[record.environment] for record in records if record.environment in environments]
    return known[-1].torch_threads if known else 1
