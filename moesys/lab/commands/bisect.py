"""``moesys bisect``: two trials of a run folder trained again, up to the first tensor whose bits differ."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from moesys.config import Strategy
from moesys.config.experiment import Experiment
from moesys.config.workload import RealTraining
from moesys.display import listed, printable
from moesys.lab.commands.options import AsJson, Imports, argument, option, refusing
from moesys.lab.ranks.process_start import writes
from moesys.lab.runs.declarations import import_modules_of_user, strategy_in
from moesys.lab.runs.environment import load_environments
from moesys.lab.runs.places import RankTrials, TrialError
from moesys.lab.runs.records import RunFolder
from moesys.lab.show.sheets import plain, print_full

if TYPE_CHECKING:
    from moesys.lab.train.first_difference import FirstDifference


@refusing()
def bisect_command(
    run: Annotated[Path, argument("RUN", "Run folder of a training, such as runs/demo-1234abcd.")],
    a: Annotated[str, argument("A", "Name of a strategy.")],
    b: Annotated[str, argument("B", "Name of another strategy, or the same name again.")],
    seed: Annotated[int | None, option("N", "Seed (default: the one whose losses differ first).")] = None,
    as_json: AsJson = False,
    imports: Imports = None,
) -> int:
    """Prints the first difference of strategies ``a`` and ``b``, under ``seed`` or the seed whose recorded losses
    differ first. Returns the exit code: 1 if a bit differs. Under torchrun only rank 0 prints.
    """
    import_modules_of_user(imports or ())
    folder = RunFolder(run)
    experiment = folder.experiment()
    # A record may name planners that are not imported, and these strategies are trained.
    first, second = (Strategy.from_json(strategy_in(experiment, name).to_json()) for name in (a, b))
    if not isinstance(experiment.workload, RealTraining):
        raise ValueError(f"{run} was simulated, and bisect compares what is computed; give the folder of a training")
    seed = _seed(seed, experiment, folder, first, second)
    workload, pair = experiment.workload, (first, second)
    arguments = (pair, experiment.model, experiment.cluster, workload, seed)
    # This import is here because it imports torch, and a wrong path is refused before.
    from moesys.lab.train.first_difference import find_first_difference

    try:
        with closing(RankTrials(experiment, _threads(folder))) as ranks:
            difference = ranks.call(pair, find_first_difference, *arguments)
    except TrialError as error:
        raise ValueError(error.trace) from None
    if writes() and as_json:
        print(json.dumps({"strategies": [first.name, second.name], "seed": seed, "difference": plain(difference)}))
    elif writes():
        names = f"{first.name} and {second.name}, seed {seed}"
        steps = workload.warmup + workload.steps
        found = f"no bit differs in {steps} steps" if difference is None else _words(difference)
        print_full(Text(printable(f"{names}: {found}")))
    return int(difference is not None)


def _words(found: FirstDifference) -> str:
    """Returns ``the first difference is in step 3, output of blocks.0.moe, on rank 1 of 4: 12 of 64 numbers, by 2e-8 at
    most``.
    """
    ranks = f"{listed('rank', found.ranks)} of {found.num_ranks}"
    ranks = "all ranks" if len(found.ranks) == found.num_ranks else ranks
    experts = f", {listed('expert', found.experts)}" if found.experts else ""
    return (
        f"the first difference is in step {found.step}, {found.tensor}{experts}, on {ranks}: "
        f"{found.num_different:,} of {found.num_elements:,} numbers, by {found.largest:.2g} at most"
    )


def _seed(seed: int | None, experiment: Experiment, folder: RunFolder, first: Strategy, second: Strategy) -> int:
    """Returns ``seed``; by default the seed whose recorded losses differ first, or the first one if none does."""
    if seed is None:
        # This import is here because it imports scipy.
        from moesys.lab.runs.comparison import compare_records

        pair = experiment.replace(strategies=tuple(dict.fromkeys((first, second))), repeat_baseline=False)
        found = [row.agreement.seed for row in compare_records(pair, folder.records()).rows if row.agreement]
        return next((each for each in found if each is not None), experiment.seeds[0])
    if seed not in experiment.seeds:
        raise ValueError(
            f"seed={seed} is not in {experiment.name}; choose one of {', '.join(map(str, experiment.seeds))}"
        )
    return seed


def _threads(folder: RunFolder) -> int:
    """Returns the threads of a rank when the newest record was made, because bits depend on them."""
    environments, records = load_environments(folder.path), folder.records()
    known = [environments[record.environment] for record in records if record.environment in environments]
    return known[-1].torch_threads if known else 1
