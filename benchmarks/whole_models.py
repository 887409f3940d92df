"""The command ``models``: training steps of transformers' own models on local ranks, under strategies and under
transformers' own expert parallelism.

E experts.
"""

from __future__ import annotations

import logging
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist

from benchmarks.harness.contest import Case, Contestant, Near, Outcome, hold, of_all_ranks
from benchmarks.harness.model_steps import (
    HIDDEN,
    LENGTH,
    MODELS,
    ROUTINGS,
    TOLERANCE,
    ZIPF,
    E,
    ModelSteps,
    new_model,
    strategies,
    tokens_of,
)
from benchmarks.harness.names import chosen
from benchmarks.shaped.processor_shares import join, lacks_shares, own_name, processor_shares
from moesys.balance.warm_up import warm_up
from moesys.config import Ep, Fsep, Strategy
from moesys.hf.registration import register
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.ranks.torchrun_ranks import Ranks, joins, start_ranks
from moesys.lab.runs.stopwatch import Spread, machine_line
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told

THEIRS = "all_to_all"
# Until the peak of memory stays where it is.
MEMORY_STEPS = 6
_RANKS_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Part:
    """A model of some hidden size, how its tokens are routed, and of how many sequences a rank's batch is."""

    model: str
    routing: str
    sequences: int
    hidden_size: int = HIDDEN


@dataclass(frozen=True)
class Row:
    """One way to run a model.

    samples_ms: the slowest rank's step, forward, backward and optimizer, by repetition; empty where it was wrong.
    theirs_ms: of transformers' own. max_over_mean: of the busiest rank's tokens, the mean over layers. peak_mib: the
    most memory that a rank's process had at once, where that was asked for; slots_mib: of experts in the slots that the
    strategy declares beyond a rank's own.
    """

    part: Annotated[str, Column("model")]
    routing: Annotated[str, Column("routing")]
    name: Annotated[str, Column("experts")]
    samples_ms: list[float]
    theirs_ms: list[float]
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")]
    peak_mib: Annotated[float | None, Column("peak MiB", ",.0f")]
    slots_mib: Annotated[float | None, Column("slots MiB", ",.0f")]
    wrong: Annotated[str, Column("wrong")]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ".0f", after="name")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def speed(self) -> Annotated[Spread | None, Column(f"{THEIRS} / this", after="step_ms")]:
        return Spread.of_ratios(self.theirs_ms, self.samples_ms) if self.samples_ms and self.theirs_ms else None


@dataclass(frozen=True)
class Setting:
    """Where parts are measured.

    share: of a processor, that each rank has, whether others compute or wait; None: what the system gives it, so that
    where ranks are more than processors, one computes faster while another waits.
    memory: whether peaks of memory are measured too, each contestant's on ranks of its own.
    """

    num_ranks: int = 2
    repeats: int = 9
    share: float | None = None
    memory: bool = False

    def __post_init__(self) -> None:
        if self.share is None:
            return
        if not 0.05 <= self.share <= 1:
            raise ValueError(f"share={self.share:g} of a processor a rank must be between 0.05 and 1, or left out")
        if joins():
            raise ValueError(f"share={self.share:g} is of local ranks; leave it out under torchrun")
        if reason := lacks_shares():
            raise ValueError(f"ranks cannot be given share={self.share:g} of a processor: {reason}")

    @property
    def line(self) -> str:
        """Says it, for notes."""
        share = "" if self.share is None else f", each with {self.share:g} of a processor"
        return f"{self.num_ranks} ranks of one thread{share}"


def select(model: str = "all", routing: str = "all", sequences: int = 8, hidden_size: int = HIDDEN) -> list[Part]:
    """Returns the parts of these names. Raises ValueError for a name that is not there."""
    models, ways = chosen("model", model, MODELS), chosen("routing", routing, ROUTINGS)
    return [Part(of, way, sequences, hidden_size) for of in models for way in ways]


def main(parts: Sequence[Part], setting: Setting, json_path: Path | None = None) -> int:
    """Measures, writes, prints; the exit code: 1 if a loss or a gradient was wrong."""
    rows = bench_models(parts, setting)
    machine = f"{machine_line(1, ('torch', 'transformers'))}; {setting.line}"
    notes = [
        machine,
        f"A step is forward, backward and AdamW on {parts[0].sequences} x {LENGTH} tokens a rank, in float32, of the "
        f"slowest rank; median of {setting.repeats} repetitions, in turns. {THEIRS}: transformers' own, with "
        "grouped_mm.",
        f"{THEIRS} / this: above 1 it is faster than transformers' own; median [p20, p80], paired.",
        f"Routing is replayed: balanced gives every expert as many tokens; skewed draws experts by 1 / n^{ZIPF}, the "
        "order of experts by layer.",
        f"A speed is shown where the loss and all gradients are transformers' own in the same run, to {TOLERANCE:g}.",
    ]
    if setting.memory:
        notes.append(
            f"peak MiB: resident memory of the largest rank over {MEMORY_STEPS} steps, in processes that train nothing "
            "else; moesys and its planners' machine code are loaded in all of them. slots MiB: of the slots that the "
            "strategy declares beyond the rank's own part of the experts."
        )
    title = "MEASURED: a training step of transformers' models, ms (median)"
    data = {"machine": machine, "num_ranks": setting.num_ranks, "share": setting.share, "rows": rows}
    without = () if setting.memory else ("peak_mib", "slots_mib")
    sheet = Sheet(title, rows, notes, "part", without=without)
    publish(Report("models", title, "measured", [sheet], data=data), json_path=json_path)
    return int(any(row.wrong for row in rows))


def bench_models(parts: Sequence[Part], setting: Setting) -> list[Row]:
    """Measures every part on local ranks."""
    rows = []
    with ExitStack() as opened, steps_told("models", len(parts)) as tell:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        ranks = _ranks(setting, opened)
        for part in parts:
            tell(f"{part.model}, {part.routing}")
            path = folder / part.model
            if not path.exists():
                new_model(part.model, part.hidden_size).save_pretrained(path)
            outcomes = of_all_ranks(ranks.run(measure, part, path, setting.repeats, timeout_s=_RANKS_TIMEOUT_S))
            theirs_ms = outcomes[THEIRS].samples_ms.get("step", [])
            peaks_mib = _peaks_mib(part, path, setting.num_ranks) if setting.memory else {}
            contestants = _contestants(setting.num_ranks)
            slots_mib = {name: _slots_mib(part, each, setting.num_ranks) for name, each in contestants.items()}
            for name, outcome in outcomes.items():
                samples_ms, metrics = outcome.samples_ms.get("step", []), (outcome.metrics or [None])[0]
                numbers = (samples_ms, theirs_ms, metrics, peaks_mib.get(name), slots_mib[name])
                rows.append(Row(part.model, part.routing, name, *numbers, outcome.wrong))
    return rows


def _ranks(setting: Setting, opened: ExitStack) -> Ranks:
    """Returns ranks that end with ``opened``, each in its share of the processor."""
    groups: tuple[Path, ...] = ()
    if setting.share is not None:
        names = [own_name(f"rank{rank}") for rank in range(setting.num_ranks)]
        groups = opened.enter_context(processor_shares(names, setting.share))
    ranks, _ = start_ranks(setting.num_ranks)
    opened.enter_context(closing(ranks))
    if groups:
        ranks.run(_join_its_share, groups)
    return ranks


def _peaks_mib(part: Part, folder: Path, num_ranks: int) -> dict[str, float]:
    """Returns the peak of the largest rank by contestant, each in processes that nothing else has run in."""
    peaks_mib = {}
    for name, strategy in _contestants(num_ranks).items():
        with LocalRanks(num_ranks) as ranks:
            peaks_mib[name] = max(ranks.run(peak_mib, part, folder, strategy, timeout_s=_RANKS_TIMEOUT_S))
    return peaks_mib


def _slots_mib(part: Part, strategy: Strategy | None, num_ranks: int) -> float | None:
    """Returns what experts take in the slots beyond a rank's own: lent ones stay in all layers until backward, those
    that are put together of slices are there layer by layer.
    """
    if strategy is None:
        return None
    options, of_a_layer = MODELS[part.model][1], 3 * 2 * part.hidden_size**2 * 4 / 2**20
    match strategy.sharding:
        case Ep(slots_per_rank=None):
            return 0.0
        case Ep(slots_per_rank=int(slots)):
            layers = options["num_hidden_layers"] - options.get("first_k_dense_replace", 0)
            return (slots - E // num_ranks) * layers * of_a_layer
        case Fsep(slots_per_rank=int(slots)):
            return slots * of_a_layer
    raise AssertionError(strategy)


def _contestants(num_ranks: int) -> dict[str, Strategy | None]:
    return {THEIRS: None, **{each.name: each for each in strategies(num_ranks)}}


# --- on a rank --------------------------------------------------------------------------------------------------------


def _join_its_share(groups: Sequence[Path]) -> None:
    join(groups[dist.get_rank()])


def measure(part: Part, folder: Path, repeats: int) -> Mapping[str, Outcome]:
    """All contestants of ``part``, called on all ranks at once."""
    # Gradients are gathered once, to be compared, however many messages that takes.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    contestants = _contestants(dist.get_world_size())
    setups = {name: partial(_contestant, part, folder, strategy) for name, strategy in contestants.items()}
    return hold(Case(setups, Near(TOLERANCE, THEIRS), before=dist.barrier), repeats)


def peak_mib(part: Part, folder: Path, strategy: Strategy | None) -> float:
    """Most memory that this process has had, in MiB, after a few steps of one contestant; called on all ranks. Planners
    are loaded by all contestants, as their machine code takes the same for models of any size.
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
