"""The command ``hosts``: training steps in another trainer, with its own experts and with those of moesys.

The trainer is torchtitan's, and the model the one that its developers train to try things out; or a loop of
Megatron-Core's own parts, and a GPT model of the same sizes. What moesys does inside transformers is the command
``models``.

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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from benchmarks.harness.contest import Case, Contestant, Near, Outcome, hold, of_all_ranks
from benchmarks.harness.model_steps import (
    LENGTH,
    ROUTINGS,
    TOLERANCE,
    VOCABULARY,
    ZIPF,
    max_over_mean_of,
    routing_of,
    strategies,
    tokens_of,
    whole,
)
from benchmarks.harness.options import Repeats, chosen, machine_line
from benchmarks.shaped.processor_shares import join, lacks_shares, own_name, processor_shares
from moesys.config import Strategy
from moesys.lab.commands.options import flag, option, refusing
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish

EP = "ep"
HOSTS = ("torchtitan", "megatron")
# The sizes of torchtitan's model, which Megatron's has too.
HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 256, 768, 64, 8
# The slots that a rank has beyond those for its own experts, where experts are lent or sharded.
SPARE_SLOTS = 4
# glibc keeps all memory that is freed. By default it returns large pieces, and torchtitan's experts wait for new pages.
_KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 34)}
# A table explains its trainer by these notes.
ABOUT = {
    "torchtitan": (
        "The trainer is torchtitan's, and a step its train_step. The model is the first {layers} of 8 layers of its "
        f"qwen3 debug model: hidden size {HIDDEN}, {NUM_EXPERTS} experts of width {WIDTH}, top-{TOP_K}.",
        "torchtitan: its own experts and all-to-all, with torch's grouped products in float32 instead of bfloat16.",
    ),
    "megatron": (
        "A step is Megatron-Core's forward_backward_func, finalize_model_grads and optimizer (Adam). The model is its "
        f"GPTModel, of layers: {{layers}}, hidden size {HIDDEN}, {NUM_EXPERTS} experts of width {WIDTH}, top-{TOP_K}.",
        "megatron: its own SequentialMLP and alltoall dispatcher; its grouped products need Transformer Engine.",
    ),
}
# These packages install the trainers.
DISTRIBUTIONS = {"torchtitan": "torchtitan", "megatron": "megatron-core"}
_TIMEOUTS = RankTimeouts(run_s=3600.0, collective_s=600.0)


@dataclass(frozen=True)
class Part:
    """The trainer, the routing of the tokens, the sequences in a rank's batch, and the layers of the model."""

    host: str
    routing: str
    sequences: int
    layers: int


@dataclass(frozen=True)
class Row:
    """The result of one kind of experts.

    samples_ms: the slowest rank's step by repetition; empty if a gradient was wrong. theirs_ms, ep_ms: the same of
    the trainer's own experts, and of moesys' ``Ep()``. max_over_mean: tokens of the busiest rank over the mean.
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
    def speed(self) -> Annotated[Quantiles | None, Column("its own / this", after="step_ms")]:
        return self._over(self.theirs_ms)

    @property
    def speed_over_ep(self) -> Annotated[Quantiles | None, Column(f"{EP} / this", after="speed")]:
        return self._over(self.ep_ms)

    def _over(self, other_ms: list[float]) -> Quantiles | None:
        return Quantiles.of_ratios(other_ms, self.samples_ms) if self.samples_ms and other_ms else None


def bench_hosts(
    host: Annotated[str, option("NAME", "The trainer: torchtitan or megatron.")] = "torchtitan",
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
    """Trains a model in another trainer, with its own experts and under strategies."""
    with refusing():
        if host not in HOSTS:
            raise ValueError(f"host={host!r} is not known; use {' or '.join(HOSTS)}")
        parts = [Part(host, way, sequences, layers) for way in chosen("routing", routing, ROUTINGS)]
        _check_machine(host, ranks, share)
    rows = measure(parts, ranks, repeats, share, keep_memory, output.quiet)
    limit = "" if share is None else f", each with {share:g} processors"
    machine = f"{machine_line(1, ('torch', DISTRIBUTIONS[host]))}; {ranks} ranks of one thread{limit}"
    notes = [
        machine,
        *(each.format(host=host, layers=layers) for each in ABOUT[host]),
        f"A step is on {sequences} x {LENGTH} tokens per rank, in float32, of the slowest rank; median of {repeats} "
        "interleaved repetitions.",
        f"glibc {'keeps' if keep_memory else 'returns'} large pieces of memory that are freed "
        f"({'--keep-memory' if keep_memory else '--no-keep-memory'}).",
        f"its own / this, {EP} / this: above 1, this is faster; median [p20, p80], paired.",
        "Routing is replayed: 'balanced' gives each expert the same number of tokens; 'skewed' draws the n-th expert "
        f"with a probability proportional to 1 / n^{ZIPF}, in another order in each layer.",
        f"A speed is shown only if the loss and all gradients are those of {host}'s own experts within {TOLERANCE:g}.",
    ]
    title = f"MEASURED: a training step in {host}, ms (median)"
    data = {"machine": machine, "num_ranks": ranks, "share": share, "rows": rows}
    report = Report("hosts", title, "measured", [Sheet(title, rows, notes, "routing")], data=data)
    publish(report, output)
    raise typer.Exit(int(any(row.wrong for row in rows)))


def _check_machine(host: str, num_ranks: int, share: float | None) -> None:
    if NUM_EXPERTS % num_ranks:
        raise ValueError(f"ranks={num_ranks} does not divide the {NUM_EXPERTS} experts of a layer; choose 2, 4, 8, ...")
    sys.path.append(str(Path(sys.prefix) / "hosts"))
    if importlib.util.find_spec(host) is None:
        raise ValueError(f"{host} is not installed; run `make hosts`, or install moesys[{host}]")
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
        ranks.run(prepare, parts[0].host, groups)
        tell = opened.enter_context(steps_told("hosts", len(parts), quiet))
        for part in parts:
            tell(part.routing)
            outcomes = of_all_ranks(ranks.run(measure_on_rank, part, folder, repeats))
            times = {name: outcome.samples_ms.get("step", []) for name, outcome in outcomes.items()}
            for name, outcome in outcomes.items():
                max_over_mean = (outcome.metrics or [None])[0]
                samples_ms = times[name], times[part.host], times[EP]
                rows.append(Row(part.routing, name, *samples_ms, max_over_mean, outcome.wrong))
    return rows


# --- on a rank --------------------------------------------------------------------------------------------------------


def prepare(host: str, groups: Sequence[Path]) -> None:
    """Imports the trainer, and then moves this rank into its group, if there are any."""
    importlib.import_module(f"benchmarks.harness.cpu_{host}")
    # torchtitan reports each of its steps, and torch warns that it knows CPU ranks less well.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", UserWarning)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    if groups:
        join(groups[dist.get_rank()])


def measure_on_rank(part: Part, folder: str, repeats: int) -> Mapping[str, Outcome]:
    """Measures all contestants of ``part``; all ranks call it at once."""
    setups = {part.host: partial(_contestant, part, folder, None)}
    for strategy in strategies(dist.get_world_size(), NUM_EXPERTS // dist.get_world_size() + SPARE_SLOTS):
        if strategy.overlap.chunks == 1:
            setups[strategy.name] = partial(_contestant, part, folder, strategy)
    with _surroundings(part.host):
        return hold(Case(setups, Near(TOLERANCE, part.host), before=dist.barrier), repeats)


def _surroundings(host: str) -> AbstractContextManager[object]:
    """Returns what lasts as long as a trainer's models are used."""
    if host == "torchtitan":
        from benchmarks.harness.cpu_torchtitan import experts_in_float32

        return experts_in_float32()
    from benchmarks.harness.cpu_megatron import parallel

    return parallel(expert_model_parallel_size=dist.get_world_size())


class Steps(Protocol):
    """Steps of a trainer on this rank."""

    @property
    def model(self) -> nn.Module: ...

    def step(self) -> None:
        """Does what the trainer does in a step."""

    def results(self) -> dict[str, Tensor]:
        """Returns the loss, and of each whole gradient the part that this rank compares, of the second of two passes;
        in the first one layouts settle.
        """


def _contestant(part: Part, folder: str, strategy: Strategy | None) -> Contestant:
    """Returns steps with the trainer's own experts, or under a strategy."""
    steps: Steps = TitanSteps(part, folder, strategy) if part.host == "torchtitan" else MegatronSteps(part, strategy)
    return Contestant(steps.results, {"step": steps.step}, partial(max_over_mean_of, steps.model))


class TitanSteps:
    """Steps of torchtitan's trainer."""

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
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        self.trainer.train_step(self._data)

    def results(self) -> dict[str, Tensor]:
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


class MegatronSteps:
    """Steps of a GPT model by Megatron-Core's own schedule, reduction of gradients, and optimizer."""

    def __init__(self, part: Part, strategy: Strategy | None) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        from benchmarks.harness.cpu_megatron import config_of, model_of

        config = config_of(
            **{"num_layers": part.layers, "hidden_size": HIDDEN, "num_moe_experts": NUM_EXPERTS},
            **{"moe_ffn_hidden_size": WIDTH, "moe_router_topk": TOP_K, "moe_enable_routing_replay": True},
            expert_model_parallel_size=dist.get_world_size(),
        )
        self.model: nn.Module = model_of(config, strategy, VOCABULARY, LENGTH)
        self._wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), self.model)
        self._optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4), [self._wrapped])
        config.finalize_model_grads_func = finalize_model_grads
        routing_LTK = routing_of(part.routing, part.layers, part.sequences * LENGTH, NUM_EXPERTS, TOP_K)
        for layer, expert_TK in zip(self.model.decoder.layers, routing_LTK, strict=True):
            replay = layer.mlp.router.router_replay
            replay.set_target_indices(expert_TK)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self._ids_BC = tokens_of(part.sequences)

    def step(self) -> None:
        self._backward()
        self._optimizer.step()

    def _backward(self) -> Tensor:
        """Runs forward, backward and the reduction of gradients; returns the loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        (found,) = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter([self._ids_BC]),
            model=[self._wrapped],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=len(self._ids_BC),
            forward_only=False,
        )
        loss: Tensor = found["loss"]
        return loss

    def results(self) -> dict[str, Tensor]:
        from benchmarks.harness.cpu_megatron import whole as whole_experts

        self._backward()
        found = {"loss": self._backward()}
        part = slice(dist.get_rank(), None, dist.get_world_size())
        for name, grad in whole_experts([self.model], lambda parameter: parameter.main_grad).items():
            found[name] = grad.flatten()[part].clone()
        return found


def _forward_step(data: Any, model: nn.Module) -> Any:
    ids_BC = next(data)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses_BC = model(ids_BC, torch.arange(LENGTH).expand(len(ids_BC), -1), mask, labels=ids_BC.roll(-1, 1))

    def loss_of(losses_BC: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses_BC.mean(), {"loss": losses_BC.detach().mean()}

    return losses_BC, loss_of
