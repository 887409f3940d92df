"""Checks of torchtitan's own trainer on its debug models, with two layers, and CPU attention."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "torchtitan")]

# Before any other module of torchtitan, as it patches what they copy.
import benchmarks.harness.cpu_torchtitan as cpu  # isort: skip  # noqa: E402

from moesys import verify  # noqa: E402


def titan(world: verify.World, model: str = "qwen3", ep: int = 2, tp: int = 1) -> verify.Setup:
    logging.disable(logging.WARNING)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    config = getattr(registry, {"qwen3": "qwen3_moe_debug"}.get(model, f"{model}_debugmodel"))()
    if model == "qwen3":
        from cpu_trainer import _small_qwen3

        config.model_spec.model = _small_qwen3({})
    else:
        config.model_spec.model.layers = config.model_spec.model.layers[:2]
    cpu.on_cpu(config, world.situation.rows, world.situation.length)
    if world.size > 1:
        config.parallelism.expert_parallel_degree = ep
        config.parallelism.tensor_parallel_degree = tp
    config.dump_folder = tempfile.mkdtemp(dir=world.folder)
    config.training.steps, config.checkpoint.enable = 1000, False
    if world.situation.recomputation:
        from torchtitan.distributed.activation_checkpoint import FullAC

        config.activation_checkpoint = FullAC.Config()
    torch.set_default_dtype(torch.float32)
    trainer = config.build()
    torch.set_default_dtype(world.dtype)
    return verify.torchtitan_setup(world, trainer)


@verify.check(ranks=2, supports=("recomputation",))
def titan_qwen3(world: verify.World) -> verify.Setup:
    return titan(world)


@verify.check(ranks=2)
def titan_qwen3_tp(world: verify.World) -> verify.Setup:
    return titan(world, tp=2)


@verify.check(ranks=2)
def titan_deepseek_v3(world: verify.World) -> verify.Setup:
    return titan(world, model="deepseek_v3")
