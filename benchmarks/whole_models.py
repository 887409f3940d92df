"""The command ``models``: training steps of transformers' models on local ranks, under strategies of moesys and under
transformers' own expert parallelism.
"""

from __future__ import annotations

import logging
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.harness.contest import Case, Contestant, Near, Outcome, hold, of_all_ranks
from benchmarks.harness.model_steps import (
    HIDDEN,
    LENGTH,
    MODELS,
    ROUTINGS,
    TOLERANCE,
    ZIPF,
    ModelSteps,
    new_model,
    strategies,
    tokens_of,
)
from benchmarks.harness.options import Repeats, chosen
from moesys.balance.planners import warm_up
from moesys.config import Strategy
from moesys.hf.registration import register
from moesys.lab.commands.options import AsJson, OutFolder, Quiet, Wide, refusing
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.ranks.torchrun_ranks import start_ranks
from moesys.lab.runs.stopwatch import Quantiles, machine_line
from moesys.lab.show.progress import steps_told
from moesys.lab.show.tables import Column, CommandOutput, Report, Sheet, publish

THEIRS = "all_to_all"
# After this many steps the peak of memory no longer grows.
MEMORY_STEPS = 6
_RANKS_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Part:
    """A model, the routing of its tokens, and the number of sequences in a rank's batch."""

    model: str
    routing: str
    sequences: int
    hidden_size: int = HIDDEN


@dataclass(frozen=True)
class Row:
    """The result of one model under one strategy.

    samples_ms: the slowest rank's step (forward, backward and optimizer) by repetition; empty if a gradient was wrong.
    theirs_ms: the same of transformers' own expert parallelism. max_over_mean: tokens of the busiest rank over the
    mean, averaged over layers. peak_mib: the largest resident memory of a rank's process, if it was measured.
    """

    part: Annotated[str, Column("model")]
    routing: Annotated[str, Column("routing")]
    name: Annotated[str, Column("experts")]
    samples_ms: list[float]
    theirs_ms: list[float]
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")]
    peak_mib: Annotated[float | None, Column("peak MiB", ",.0f")]
    wrong: Annotated[str, Column("wrong", wraps=True)]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ".0f", after="name")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def speed(self) -> Annotated[Quantiles | None, Column(f"{THEIRS} / this", after="step_ms")]:
        return Quantiles.of_ratios(self.theirs_ms, self.samples_ms) if self.samples_ms and self.theirs_ms else None


def bench_models(
    model: Annotated[
        str, typer.Option(metavar="NAMES", help="olmoe, qwen3-moe, deepseek-v3, separated by commas, or all.")
    ] = "all",
    routing: Annotated[str, typer.Option(metavar="NAME", help="balanced, skewed or all.")] = "all",
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences of 256 tokens per rank.")] = 8,
    hidden: Annotated[int, typer.Option(min=64, metavar="N", help="Hidden size; experts are twice as wide.")] = HIDDEN,
    ranks: Annotated[
        int, typer.Option(min=2, metavar="N", help="Number of local ranks of one thread; a divisor of 8.")
    ] = 2,
    repeats: Repeats = 9,
    memory: Annotated[bool, typer.Option("--memory", help="Also measure the peak memory of a rank.")] = False,
    out: OutFolder = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    wide: Wide = False,
) -> None:
    """Trains transformers' models under strategies and under its own all_to_all."""
    with refusing():
        models, ways = chosen("model", model, MODELS), chosen("routing", routing, ROUTINGS)
    rows = measure([Part(of, way, sequences, hidden) for of in models for way in ways], ranks, repeats, memory, quiet)
    machine = f"{machine_line(1, ('torch', 'transformers'))}; {ranks} ranks of one thread"
    notes = [
        machine,
        f"A step is forward, backward and AdamW on {sequences} x {LENGTH} tokens per rank, in float32, of the slowest "
        f"rank; median of {repeats} interleaved repetitions. {THEIRS}: transformers' own, with grouped_mm.",
        f"{THEIRS} / this: above 1, this is faster than transformers' own; median [p20, p80], paired.",
        "Routing is replayed: 'balanced' gives each expert the same number of tokens; 'skewed' draws the n-th expert "
        f"with a probability proportional to 1 / n^{ZIPF}, in another order in each layer.",
        f"A speed is shown only if the loss and all gradients equal transformers' own within {TOLERANCE:g}.",
    ]
    if memory:
        notes.append(
            f"peak MiB: resident memory of the largest rank over {MEMORY_STEPS} steps, in processes that train nothing "
            "else. moesys and the machine code of its planners are loaded in all of them."
        )
    title = "MEASURED: a training step of transformers' models, ms (median)"
    data = {"machine": machine, "num_ranks": ranks, "rows": rows}
    sheet = Sheet(title, rows, notes, "part")
    publish(Report("models", title, "measured", [sheet], data=data), CommandOutput(out, as_json, quiet, wide))
    raise typer.Exit(int(any(row.wrong for row in rows)))


def measure(parts: Sequence[Part], num_ranks: int, repeats: int, memory: bool, quiet: bool = False) -> list[Row]:
    """Measures each part on local ranks, or on those that torchrun started."""
    rows = []
    ranks, _ = start_ranks(num_ranks)
    with tempfile.TemporaryDirectory() as folder, closing(ranks), steps_told("models", len(parts), quiet) as tell:
        for part in parts:
            tell(f"{part.model}, {part.routing}")
            path = Path(folder, part.model)
            if not path.exists():
                new_model(part.model, part.hidden_size).save_pretrained(path)
            outcomes = of_all_ranks(ranks.run(measure_on_rank, part, path, repeats, timeout_s=_RANKS_TIMEOUT_S))
            theirs_ms = outcomes[THEIRS].samples_ms.get("step", [])
            peaks_mib = _peaks_mib(part, path, num_ranks) if memory else {}
            for name, outcome in outcomes.items():
                samples_ms, max_over_mean = outcome.samples_ms.get("step", []), (outcome.metrics or [None])[0]
                numbers = (samples_ms, theirs_ms, max_over_mean, peaks_mib.get(name))
                rows.append(Row(part.model, part.routing, name, *numbers, outcome.wrong))
    return rows


def _peaks_mib(part: Part, folder: Path, num_ranks: int) -> dict[str, float]:
    """Returns the peak of the largest rank by contestant; each runs in processes of its own."""
    peaks_mib = {}
    for name, strategy in _contestants(num_ranks).items():
        with LocalRanks(num_ranks) as ranks:
            peaks_mib[name] = max(ranks.run(peak_mib, part, folder, strategy, timeout_s=_RANKS_TIMEOUT_S))
    return peaks_mib


def _contestants(num_ranks: int) -> dict[str, Strategy | None]:
    return {THEIRS: None, **{each.name: each for each in strategies(num_ranks)}}


# --- on a rank --------------------------------------------------------------------------------------------------------


def measure_on_rank(part: Part, folder: Path, repeats: int) -> Mapping[str, Outcome]:
    """Measures all contestants of ``part``; all ranks call it at once."""
    # Gradients are gathered once, to be compared, and the number of messages does not matter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    contestants = _contestants(dist.get_world_size())
    setups = {name: partial(_contestant, part, folder, strategy) for name, strategy in contestants.items()}
    return hold(Case(setups, Near(TOLERANCE, THEIRS), before=dist.barrier), repeats)


def peak_mib(part: Part, folder: Path, strategy: Strategy | None) -> float:
    """Returns the peak memory of this process in MiB after a few steps of one contestant; all ranks call it at once.

    Planners are loaded for all contestants, because their machine code takes the same memory for models of any size.
    """
    warm_up()
    step = _contestant(part, folder, strategy).works["step"]
    for _ in range(MEMORY_STEPS):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _contestant(part: Part, folder: Path, strategy: Strategy | None) -> Contestant:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    num_ranks = dist.get_world_size()
    name = THEIRS if strategy is None else register(strategy)
    sizes = DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=sizes, experts_implementation="grouped_mm", dtype=torch.float32
    )
    steps = ModelSteps(model, tokens_of(part.sequences), part.routing)
    return Contestant(steps.results, {"step": steps.step}, steps.max_over_mean)
