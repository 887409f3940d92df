"""The command ``hosts``: training steps in another trainer, with its own experts and with those of moesys.

The trainer is torchtitan's, and the model the one that its developers train to try things out. What moesys does inside
transformers is the command ``models``.

R ranks, E experts, K top-k, L layers, B sequences, T tokens of a rank.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from benchmarks.harness.contest import Case, Contestant, Near, Outcome, hold, of_all_ranks
from benchmarks.harness.model_steps import (
    LENGTH,
    ROUTINGS,
    TOLERANCE,
    ZIPF,
    max_over_mean_of,
    routing_of,
    strategies,
    whole,
)
from benchmarks.harness.options import Repeats, chosen
from benchmarks.shaped.processor_shares import join, lacks_shares, own_name, processor_shares
from moesys.config import Strategy
from moesys.lab.commands.options import flag, option, refusing
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.runs.environment import machine_line
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish

THEIRS, EP = "torchtitan", "ep"
NUM_EXPERTS = 64
# The slots that a rank has beyond those for its own experts, where experts are lent or sharded.
SPARE_SLOTS = 4
# glibc keeps all memory that is freed. By default it returns large pieces, and torchtitan's experts wait for new pages.
_KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 34)}
_TIMEOUTS = RankTimeouts(run_s=3600.0, collective_s=600.0)


@dataclass(frozen=True)
class Part:
    """The routing of the tokens, the sequences in a rank's batch, and the layers of the model."""

    routing: str
    sequences: int
    layers: int


@dataclass(frozen=True)
class Row:
    """The result of one kind of experts.

    samples_ms: the slowest rank's step by repetition; empty if a gradient was wrong. theirs_ms, ep_ms: the same of
    torchtitan's own experts, and of moesys' ``Ep()``. max_over_mean: tokens of the busiest rank over the mean.
    """

    routing: Annotated[str, Column("routing")]
    name: Annotated[str, Column("experts")]
    samples_ms: list[float]
    theirs_ms: list[float]
    ep_ms: list[float]
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")]
    wrong: Annotated[str, Column("wrong", wraps=True)]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ",.0f", after="name")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def speed(self) -> Annotated[Quantiles | None, Column(f"{THEIRS} / this", after="step_ms")]:
        return self._over(self.theirs_ms)

    @property
    def speed_over_ep(self) -> Annotated[Quantiles | None, Column(f"{EP} / this", after="speed")]:
        return self._over(self.ep_ms)

    def _over(self, other_ms: list[float]) -> Quantiles | None:
        return Quantiles.of_ratios(other_ms, self.samples_ms) if self.samples_ms and other_ms else None


def bench_hosts(
    routing: Annotated[str, option("NAME", "balanced, skewed or all.")] = "all",
    sequences: Annotated[int, option("N", "Sequences of 256 tokens per rank.", min=1)] = 8,
    layers: Annotated[int, option("N", "Layers of the model.", min=1, max=8)] = 2,
    ranks: Annotated[int, option("N", "Number of local ranks of one thread; a divisor of 64.", min=2)] = 2,
    share: Annotated[
        float | None, option("CPUS", "Processors of a rank (Linux, root); default: no limit.", min=0.05, max=1.0)
    ] = None,
    keep_memory: Annotated[bool, flag("Whether glibc keeps memory that ranks free.")] = True,
    repeats: Repeats = 9,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Trains torchtitan's model with its own experts and under strategies."""
    with refusing():
        parts = [Part(way, sequences, layers) for way in chosen("routing", routing, ROUTINGS)]
        _check_machine(ranks, share)
    rows = measure(parts, ranks, repeats, share, keep_memory, output.quiet)
    limit = "" if share is None else f", each with {share:g} processors"
    machine = f"{machine_line(1, ('torch', THEIRS))}; {ranks} ranks of one thread{limit}"
    notes = [
        machine,
        f"A step is train_step of torchtitan's trainer on {sequences} x {LENGTH} tokens per rank, in float32, of the "
        f"slowest rank; median of {repeats} interleaved repetitions.",
        f"The model is the first {layers} of 8 layers of torchtitan's qwen3 debug model: hidden size 256, "
        f"{NUM_EXPERTS} experts of width 768, top-8.",
        f"{THEIRS}: its own experts and all-to-all, with torch's grouped products in float32 instead of bfloat16.",
        f"glibc {'keeps' if keep_memory else 'returns'} large pieces of memory that are freed "
        f"({'--keep-memory' if keep_memory else '--no-keep-memory'}).",
        f"{THEIRS} / this, {EP} / this: above 1, this is faster; median [p20, p80], paired.",
        "Routing is replayed: 'balanced' gives each expert the same number of tokens; 'skewed' draws the n-th expert "
        f"with a probability proportional to 1 / n^{ZIPF}, in another order in each layer.",
        f"A speed is shown only if the loss and all gradients equal torchtitan's own within {TOLERANCE:g}.",
    ]
    title = "MEASURED: a training step in torchtitan, ms (median)"
    data = {"machine": machine, "num_ranks": ranks, "share": share, "rows": rows}
    report = Report("hosts", title, "measured", [Sheet(title, rows, notes, "routing")], data=data)
    publish(report, output)
    raise typer.Exit(int(any(row.wrong for row in rows)))


def _check_machine(num_ranks: int, share: float | None) -> None:
    if NUM_EXPERTS % num_ranks:
        raise ValueError(f"ranks={num_ranks} does not divide the {NUM_EXPERTS} experts of a layer; choose 2, 4, 8, ...")
    sys.path.append(str(Path(sys.prefix) / "hosts"))
    if importlib.util.find_spec(THEIRS) is None:
        raise ValueError(f"{THEIRS} is not installed; run `make hosts`, or install moesys[{THEIRS}]")
    if share is not None and (lacks := lacks_shares()):
        raise ValueError(f"share={share:g} needs control groups of Linux: {lacks}")


def measure(
    parts: Sequence[Part], num_ranks: int, repeats: int, share: float | None, keep_memory: bool, quiet: bool = False
) -> list[Row]:
    """Measures each part on local ranks, each with ``share`` processors if that is given."""
    rows = []
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        names = [own_name(f"rank{rank}") for rank in range(num_ranks)]
        groups = () if share is None else opened.enter_context(processor_shares(names, share))
        # Ranks end before their groups are removed.
        ranks = opened.enter_context(
            LocalRanks(num_ranks, timeouts=_TIMEOUTS, environment=_KEEPING_MEMORY if keep_memory else None)
        )
        ranks.run(prepare, groups)
        tell = opened.enter_context(steps_told("hosts", len(parts), quiet))
        for part in parts:
            tell(part.routing)
            outcomes = of_all_ranks(ranks.run(measure_on_rank, part, folder, repeats))
            times = {name: outcome.samples_ms.get("step", []) for name, outcome in outcomes.items()}
            for name, outcome in outcomes.items():
                max_over_mean = (outcome.metrics or [None])[0]
                samples_ms = times[name], times[THEIRS], times[EP]
                rows.append(Row(part.routing, name, *samples_ms, max_over_mean, outcome.wrong))
    return rows


# --- on a rank --------------------------------------------------------------------------------------------------------


def prepare(groups: Sequence[Path]) -> None:
    """Imports torchtitan, and then moves this rank into its group, if there are any."""
    importlib.import_module("benchmarks.harness.cpu_torchtitan")
    # torchtitan reports each of its steps, and torch warns that it knows CPU ranks less well.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", UserWarning)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    if groups:
        join(groups[dist.get_rank()])


def measure_on_rank(part: Part, folder: str, repeats: int) -> Mapping[str, Outcome]:
    """Measures all contestants of ``part``; all ranks call it at once."""
    from benchmarks.harness.cpu_torchtitan import experts_in_float32

    setups = {THEIRS: partial(_contestant, part, folder, None)}
    for strategy in strategies(dist.get_world_size(), NUM_EXPERTS // dist.get_world_size() + SPARE_SLOTS):
        if strategy.overlap.chunks == 1:
            setups[strategy.name] = partial(_contestant, part, folder, strategy)
    with experts_in_float32():
        return hold(Case(setups, Near(TOLERANCE, THEIRS), before=dist.barrier), repeats)


def _contestant(part: Part, folder: str, strategy: Strategy | None) -> Contestant:
    steps = TitanSteps(part, folder, strategy)
    return Contestant(steps.results, {"step": steps.step}, partial(max_over_mean_of, steps.model))


class TitanSteps:
    """Steps of torchtitan's trainer on this rank. ``strategy``: None for its own experts."""

    def __init__(self, part: Part, folder: str, strategy: Strategy | None) -> None:
        from torchtitan.models.common.moe import MoE
        from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

        from benchmarks.harness.cpu_torchtitan import draw, on_cpu

        config = qwen3_moe_debug()
        config.model_spec.model.layers = config.model_spec.model.layers[: part.layers]
        config.parallelism.expert_parallel_degree = dist.get_world_size()
        config.dump_folder = folder
        # As many as are ever timed, by which the learning rate is planned.
        config.training.steps = 10_000
        if strategy is not None:
            fields = {"strategy": strategy.model_dump(mode="json"), "dtype": "float32"}
            config.override.imports = [("moesys.torchtitan.experts", fields)]
        self.trainer = on_cpu(config, part.sequences, LENGTH).build()
        # As torchtitan draws most of its weights.
        draw(self.model, 0.02)
        layers = [each for each in self.model.modules() if isinstance(each, MoE)]
        router = layers[0].router
        sizes = part.sequences * LENGTH, router.num_experts, router.top_k
        for layer, expert_TK in zip(layers, routing_of(part.routing, len(layers), *sizes), strict=True):
            layer.router.register_forward_hook(partial(_replay, expert_TK.view(part.sequences, LENGTH, -1)))
        self._data = self.trainer.batch_generator(self.trainer.dataloader)

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.trainer.model_parts[0]
        return model

    def step(self) -> None:
        """Does what torchtitan's loop does in a step."""
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        self.trainer.train_step(self._data)

    def results(self) -> dict[str, Tensor]:
        """Returns the loss, and of each whole gradient the part that this rank compares, of the second of two passes;
        in the first one layouts settle.
        """
        num_ranks = dist.get_world_size()
        for _ in range(2):
            self.trainer.optimizers.zero_grad()
            inputs, labels = next(self._data)
            num_tokens = torch.tensor(labels.numel() * num_ranks)
            loss = self.trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=num_tokens)
        found = {"loss": loss.detach()}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            # Every n-th element, as long runs of elements may be those of tokens that are not in the data.
            found[name] = whole(parameter.grad).flatten()[dist.get_rank() :: num_ranks].clone()
        self.trainer.optimizers.zero_grad()
        return found


def _replay(expert_BLK: Tensor, router: Any, _: Any, output: Any) -> Any:
    from benchmarks.harness.cpu_torchtitan import forced_choices

    return forced_choices(router, output, expert_BLK)
