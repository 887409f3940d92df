"""The command ``models``: training steps of transformers' models on local ranks, under strategies of moesys and under
transformers' own expert parallelism.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
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

from benchmarks.harness import memory_steps
from benchmarks.harness.contest import Case, Contestant, Near, Outcome, hold, of_all_ranks
from benchmarks.harness.live_tensors import live_at_peak
from benchmarks.harness.memory_steps import RankMemory
from benchmarks.harness.model_steps import (
    HIDDEN,
    LENGTH,
    MODELS,
    ROUTINGS,
    TOLERANCE,
    ZIPF,
    ModelSteps,
    max_over_mean_of,
    new_model,
    strategies,
    tokens_of,
)
from benchmarks.harness.options import Repeats, chosen, machine_line
from moesys.config import Strategy
from moesys.hf.parallelize import parallelize
from moesys.hf.registration import register
from moesys.lab.commands.options import flag, option, refusing
from moesys.lab.ranks.torchrun_ranks import start_ranks
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish

THEIRS = "all_to_all"
FULL, PEFT, LORA = "full", "peft", "lora"
# The number of experts, and the hidden size, which is half of their width.
LORA_SIZES = ((8, 512), (16, 256))
# After this many steps the peak of memory no longer grows.
MEMORY_STEPS = 6
# The peaks of processes that do the same differ by some per cent, so the median of this many is taken.
MEMORY_PROCESSES = 5
_MIB = 2**20
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
    mean, averaged over layers. live_mib: the bytes of tensors that live at the same time on the rank with most, and
    peak_mib: the largest resident memory of a rank's process, if they were measured.
    """

    part: Annotated[str, Column("model")]
    routing: Annotated[str, Column("routing")]
    name: Annotated[str, Column("experts")]
    samples_ms: list[float]
    theirs_ms: list[float]
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")]
    live_mib: Annotated[float | None, Column("live MiB", ",.1f")]
    peak_mib: Annotated[float | None, Column("peak MiB", ",.0f")]
    wrong: Annotated[str, Column("wrong", wraps=True)]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ".0f", after="name")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def speed(self) -> Annotated[Quantiles | None, Column(f"{THEIRS} / this", after="step_ms")]:
        return Quantiles.of_ratios(self.theirs_ms, self.samples_ms) if self.samples_ms and self.theirs_ms else None


@dataclass(frozen=True)
class MemoryRow:
    """The peak memory of a rank by part, in MiB, and the slowest rank's step in its processes. kept: what is resident
    beside libraries and live tensors.
    """

    part: Annotated[str, Column("model")]
    routing: Annotated[str, Column("routing")]
    name: Annotated[str, Column("experts")]
    step_ms: Annotated[float, Column("step ms", ".0f")]
    live: Mapping[str, float]
    live_mib: Annotated[float, Column("live", ",.1f")]
    libraries_mib: Annotated[float, Column("libraries", ",.0f")]
    peak_mib: Annotated[float, Column("peak", ",.0f")]

    @property
    def kept_mib(self) -> Annotated[float, Column("allocators", ",.0f", after="libraries_mib")]:
        return self.peak_mib - self.libraries_mib - self.live_mib

    @property
    def parts(self) -> Annotated[str, Column("live tensors by part", after="name", wraps=True)]:
        return ", ".join(f"{part} {mib:,.1f}" for part, mib in self.live.items() if mib >= 0.05)


@dataclass(frozen=True)
class LoraRow:
    """A model's step in one process: of all parameters, or of LoRA on experts. live_mib: see ``Row``."""

    part: Annotated[str, Column("experts")]
    name: Annotated[str, Column("trained")]
    samples_ms: list[float]
    full_ms: list[float]
    live_mib: Annotated[float | None, Column("live MiB", ",.0f")]
    wrong: Annotated[str, Column("wrong", wraps=True)]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ".0f", after="name")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def share(self) -> Annotated[Quantiles | None, Column(f"this / {FULL}", after="step_ms")]:
        return Quantiles.of_ratios(self.samples_ms, self.full_ms) if self.samples_ms and self.full_ms else None


def bench_models(
    model: Annotated[str, option("NAMES", "olmoe, qwen3-moe, deepseek-v3, separated by commas, or all.")] = "all",
    routing: Annotated[str, option("NAME", "balanced, skewed or all.")] = "all",
    sequences: Annotated[int, option("N", "Sequences of 256 tokens per rank.", min=1)] = 8,
    hidden: Annotated[int, option("N", "Hidden size; experts are twice as wide.", min=64)] = HIDDEN,
    ranks: Annotated[int, option("N", "Number of local ranks of one thread; a divisor of 8.", min=2)] = 2,
    repeats: Repeats = 9,
    memory: Annotated[bool, flag("Also measure memory; takes minutes.", "--memory")] = False,
    lora: Annotated[int, option("R", "Instead, LoRA of this rank on experts, in one process.", min=0)] = 0,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Trains transformers' models under strategies and under its own all_to_all."""
    if lora:
        _bench_lora(lora, sequences, repeats, output)
        return
    with refusing():
        models, ways = chosen("model", model, MODELS), chosen("routing", routing, ROUTINGS)
    rows, memory_rows = measure(
        [Part(of, way, sequences, hidden) for of in models for way in ways], ranks, repeats, memory, output.quiet
    )
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
    title = "MEASURED: a training step of transformers' models, ms (median)"
    data = {"machine": machine, "num_ranks": ranks, "rows": rows, "memory": memory_rows}
    sheets = [
        Sheet(title, rows, notes, "part", without=() if memory else ("live_mib", "peak_mib")),
        Sheet("MEASURED: the peak memory of a rank by part, MiB", memory_rows, _MEMORY_NOTES, "part"),
    ]
    publish(Report("models", title, "measured", sheets, data=data), output)
    raise typer.Exit(int(any(row.wrong for row in rows)))


_MEMORY_NOTES = (
    f"peak: resident memory over {MEMORY_STEPS} steps of the rank with most, median of {MEMORY_PROCESSES} groups of "
    f"processes that train nothing else. Those of {THEIRS} do not import moesys. step: the slowest rank's, likewise.",
    "live: tensors that live at the same time in a step, on the rank with most of them. slots: experts that are "
    "brought to a rank, and gradients of experts; exchange: rows between ranks; fsdp: gathered parameters, and "
    "gradients on their way; backward: what autograd's own functions make, also those of transformers' own experts.",
    "libraries: resident before there is a model, with the machine code of planners where a strategy uses them. "
    "allocators: the rest, freed memory that malloc and pools of pages keep among it.",
)


def measure(
    parts: Sequence[Part], num_ranks: int, repeats: int, memory: bool, quiet: bool = False
) -> tuple[list[Row], list[MemoryRow]]:
    """Measures each part on local ranks, or on those that torchrun started."""
    rows: list[Row] = []
    memory_rows: list[MemoryRow] = []
    ranks, _ = start_ranks(num_ranks)
    with tempfile.TemporaryDirectory() as folder, closing(ranks), steps_told("models", len(parts), quiet) as tell:
        for part in parts:
            tell(f"{part.model}, {part.routing}")
            path = Path(folder, part.model)
            if not path.exists():
                new_model(part.model, part.hidden_size).save_pretrained(path)
            outcomes = of_all_ranks(ranks.run(measure_on_rank, part, path, repeats, timeout_s=_RANKS_TIMEOUT_S))
            theirs_ms = outcomes[THEIRS].samples_ms.get("step", [])
            of_part = {row.name: row for row in _memory(part, path, num_ranks)} if memory else {}
            memory_rows.extend(of_part.values())
            for name, outcome in outcomes.items():
                samples_ms, max_over_mean = outcome.samples_ms.get("step", []), (outcome.metrics or [None])[0]
                found = of_part.get(name)
                live_mib, peak_mib = (None, None) if found is None else (found.live_mib, found.peak_mib)
                numbers = (samples_ms, theirs_ms, max_over_mean, live_mib, peak_mib)
                rows.append(Row(part.model, part.routing, name, *numbers, outcome.wrong))
    return rows, memory_rows


def _memory(part: Part, folder: Path, num_ranks: int) -> list[MemoryRow]:
    """Returns the memory of each contestant."""
    rows = []
    for name, strategy in _contestants(num_ranks).items():
        groups = [_run_apart(part, folder, strategy, num_ranks, number == 0) for number in range(MEMORY_PROCESSES)]
        with_most = max(groups[0], key=lambda rank: rank.live_mib)
        live = {of: num_bytes / _MIB for of, num_bytes in sorted(with_most.live.items())}
        step_ms, libraries_mib, peak_mib = (
            statistics.median(max(getattr(rank, field) for rank in group) for group in groups)
            for field in ("step_ms", "libraries_mib", "peak_mib")
        )
        numbers = (with_most.live_mib, libraries_mib, peak_mib)
        rows.append(MemoryRow(part.model, part.routing, name, step_ms, live, *numbers))
    return rows


def _run_apart(part: Part, folder: Path, strategy: Strategy | None, num_ranks: int, follows: bool) -> list[RankMemory]:
    """Returns the memory of ranks that are programs of their own; forked ones share pages with others."""
    declared = None if strategy is None else strategy.model_dump(mode="json")
    common = {"folder": str(folder), "steps": MEMORY_STEPS, "follows": follows, "strategy": declared}
    with tempfile.TemporaryDirectory() as store:
        processes = []
        for rank in range(num_ranks):
            of_rank = {"inputs": str(_inputs_file(part, folder, rank)), "store": str(Path(store, "ranks"))}
            command = [sys.executable, "-m", memory_steps.__name__, json.dumps(common | of_rank)]
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=_RANKS_TIMEOUT_S)[0] for process in processes]
    return [RankMemory(**json.loads(output)) for output in outputs]


def _inputs_file(part: Part, folder: Path, rank: int) -> Path:
    """Returns the file with a rank's tokens and routing, which programs of their own read."""
    return folder.with_name(f"{folder.name}-{part.routing}-{rank}.pt")


def _contestants(num_ranks: int) -> dict[str, Strategy | None]:
    return {THEIRS: None, **{each.name: each for each in strategies(num_ranks)}}


def _bench_lora(rank: int, sequences: int, repeats: int, output: CommandOutput) -> None:
    ranks, _ = start_ranks(1)
    with closing(ranks), steps_told("models", len(LORA_SIZES), output.quiet) as tell:
        rows = []
        for size in LORA_SIZES:
            tell(f"{size[0]} experts of {size[1]} x {2 * size[1]}")
            rows += ranks.run(_lora_rows, size, rank, sequences, repeats, timeout_s=_RANKS_TIMEOUT_S)[0]
    machine = machine_line(1, ("torch", "transformers", "peft"))
    notes = [
        machine,
        f"A step is forward, backward and AdamW of qwen3-moe, two layers, on {sequences} x {LENGTH} tokens in float32, "
        f"in one process of one thread; median of {repeats} interleaved repetitions. {FULL}: all parameters, under "
        f"ms.parallelize. {PEFT}: LoRA of rank {rank} on experts, with grouped_mm. {LORA}: the same under "
        "ms.parallelize.",
        f"this / {FULL}: median [p20, p80], paired. live: tensors that live at the same time in a step.",
        f"A time is shown only if loss and gradients of LoRA equal those of {PEFT!r} within {TOLERANCE:g}.",
    ]
    title = "MEASURED: a training step with LoRA on experts, ms (median)"
    data = {"machine": machine, "rows": rows}
    publish(Report("models", title, "measured", [Sheet(title, rows, notes, "part")], data=data), output)
    raise typer.Exit(int(any(row.wrong for row in rows)))


# --- on a rank --------------------------------------------------------------------------------------------------------


def measure_on_rank(part: Part, folder: Path, repeats: int) -> Mapping[str, Outcome]:
    """Measures all contestants of ``part``; all ranks call it at once."""
    # Gradients are gathered once, to be compared, and the number of messages does not matter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    contestants = _contestants(dist.get_world_size())
    setups = {name: partial(_contestant, part, folder, strategy) for name, strategy in contestants.items()}
    return hold(Case(setups, Near(TOLERANCE, THEIRS), before=dist.barrier), repeats)


def _contestant(part: Part, folder: Path, strategy: Strategy | None) -> Contestant:
    steps = _steps(part, folder, strategy)
    torch.save((steps.tokens_BC, steps.expert_LTK), _inputs_file(part, folder, dist.get_rank()))
    return Contestant(steps.results, {"step": steps.step}, partial(max_over_mean_of, steps.model))


def _steps(part: Part, folder: Path, strategy: Strategy | None) -> ModelSteps:
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
    return ModelSteps(model, tokens_of(part.sequences), part.routing)


def _lora_rows(size: tuple[int, int], rank: int, sequences: int, repeats: int) -> list[LoraRow]:
    """Measures a model. ``size``: its number of experts, and its hidden size."""
    near = Near(TOLERANCE, PEFT)
    setups = {name: partial(_lora_contestant, name, size, rank, sequences) for name in (FULL, PEFT, LORA)}
    outcomes = hold(Case(setups, lambda name, results: "" if name == FULL else near(name, results)), repeats)
    full_ms, part = outcomes[FULL].samples_ms.get("step", []), f"{size[0]} of {size[1]} x {2 * size[1]}"
    return [
        LoraRow(part, name, each.samples_ms.get("step", []), full_ms, each.metrics, each.wrong)
        for name, each in outcomes.items()
    ]


def _lora_contestant(name: str, size: tuple[int, int], rank: int, sequences: int) -> Contestant:
    from peft import LoraConfig, get_peft_model

    model = new_model("qwen3-moe", size[1], num_experts=size[0], num_hidden_layers=2)
    if name != FULL:
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(r=rank, init_lora_weights=False, target_modules=[], target_parameters=parameters)
        model = get_peft_model(model, config)
    if name == PEFT:
        model.base_model.model.set_experts_implementation("grouped_mm")
    else:
        parallelize(model, Strategy(name="ep"))
    steps = ModelSteps(model, tokens_of(sequences), "balanced")
    live = lambda: sum(live_at_peak(model, steps.optimizer, steps.step).values()) / _MIB  # noqa: E731
    return Contestant(steps.results, {"step": steps.step}, live)
