"""Checks of a small GPT model in Megatron-Core's own loop on CPU ranks, with its own experts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]
sys.path.append(str(Path(sys.prefix, "hosts")))

# Before anything else of Megatron, which it patches.
import benchmarks.harness.cpu_megatron as cpu  # isort: skip  # noqa: E402

import torch  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from torch import Tensor  # noqa: E402

from moesys import verify  # noqa: E402

# Megatron's activations would be compiled for half a minute, in each process.
torch.compiler.set_stance("force_eager")
# The process groups of the training that this process built last.
GROUPS = ExitStack()


def forward_step(batches: Iterator[verify.Batch], model: Any) -> Any:
    """Returns what Megatron-LM's function of that name does: the mean loss of a micro-batch."""
    batch = next(batches)
    ids = batch["input_ids"]
    rows, length = ids.shape
    labels = torch.cat([batch["labels"][:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    options = {} if batch["attention_mask"].all() else {"padding_mask": batch["attention_mask"] == 0}
    output = model(ids, torch.arange(length).expand(rows, -1), causal, labels=labels.clamp(min=0), **options)

    def loss_of(losses: Tensor) -> Any:
        mean = losses[labels != -100].mean()
        # A copy, as the schedule divides the mean in place by the number of micro-batches.
        return mean, {"lm loss": mean.detach().clone()}

    return output, loss_of


def gpt(world: verify.World, tp: int = 1, ep: int = 2, **options: Any) -> verify.Setup:
    GROUPS.close()
    sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep} if world.size > 1 else {}
    GROUPS.enter_context(cpu.parallel(**sizes))
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    options |= recompute if world.situation.recomputation else {}
    config = cpu.config_of(**sizes, sequence_parallel=tp > 1 and world.size > 1, **options)
    model = cpu.model_of(config, None, 64, 64)
    start = world.folder / "start"
    if tp > 1:
        # Megatron cuts the tensors that the reference drew.
        if world.size == 1 and not start.exists():
            start.mkdir()
            dist_checkpointing.save(model.sharded_state_dict(), str(start))
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(start)))
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0), [wrapped])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    return verify.megatron_setup(world, wrapped, optimizer, forward_step)


@verify.check(ranks=2, dtype=torch.float32, supports=("recomputation",))
def megatron_ep(world: verify.World) -> verify.Setup:
    return gpt(world)


@verify.check(ranks=2, dtype=torch.float32, supports=("recomputation",))
def megatron_grouped(world: verify.World) -> verify.Setup:
    return gpt(world, moe_grouped_gemm=True)


@verify.check(ranks=2, dtype=torch.float32, supports=("recomputation",))
def megatron_tp(world: verify.World) -> verify.Setup:
    return gpt(world, tp=2, moe_shared_expert_intermediate_size=24)


@verify.check(ranks=4, dtype=torch.float32)
def megatron_four(world: verify.World) -> verify.Setup:
    return gpt(world, tp=2, moe_shared_expert_intermediate_size=24)


@verify.check(ranks=2, dtype=torch.float32)
def megatron_summed(world: verify.World) -> verify.Setup:
    """Planted: gradients of experts that are not divided by the ranks of the experts' group."""
    setup = gpt(world)

    def step(batches: list[verify.Batch]) -> Any:
        logged = setup.step(batches)
        for name, parameter in setup.model.named_parameters():
            if ".experts." in name and world.size > 1:
                parameter.main_grad.mul_(2)
        return logged

    return replace(setup, step=step)
