"""Setups of other people's trainings: models of transformers and of Megatron-Core, and torchtitan's trainer.

These packages are imported by the checks that use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moesys.verify.setup import Batch, Setup, World, check, clean_name, count_labels, draw, local, whole

# Smaller sizes for the fields that a configuration has; L layers are two, unless a model needs more kinds of them.
_SMALL = {
    **{"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48, "vocab_size": 64, "head_dim": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2},
    **{"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"shared_expert_intermediate_size": 48, "first_k_dense_replace": 1, "max_position_embeddings": 64},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "attention_dropout": 0.0},
}


def transformers_setup(
    world: World, model: Any, *, part: int | None = None, parts: int | None = None, group: Any = None
) -> Setup:
    """Returns the training of a causal language model as transformers' ``Trainer`` computes it: the model's own loss
    with ``num_items_in_batch``, the labels of all parts, times the parts; AdamW, and clipping by the whole norm.

    Args:
        world: the world.
        model: the model of transformers, parallel or not, also inside of DDP or FSDP.
        part: which data this rank reads; by default its rank.
        parts: number of parts; by default the size of the world.
        group: the process group of the ranks that differ in their part; by default all ranks.
    """
    inner, parts = getattr(model, "module", model), world.size if parts is None else parts
    coefficient = getattr(inner, "router_aux_loss_coef", 0.0)
    options = {"use_cache": False} | ({"output_router_logits": True} if coefficient else {})
    if world.situation.recomputation:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)

    def backward(batch: Batch, tokens: Tensor) -> Tensor:
        loss: Tensor = model(**batch, num_items_in_batch=tokens, **options).loss
        (loss * parts).backward()
        return loss.detach()

    def clip() -> Tensor:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([whole(gradient).double().norm() for gradient in gradients]).norm()
        for gradient in gradients:
            local(gradient).mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def switch(on: bool) -> None:
        inner.router_aux_loss_coef = coefficient * on

    terms = {"auxiliary loss": switch} if coefficient else {}
    return Setup(model, _step(world, backward, parts, group), optimizer, clip, part, parts, terms)


def torchtitan_setup(world: World, trainer: Any) -> Setup:
    """Returns the training of a built ``Trainer`` of torchtitan, whose parameters are drawn by ``verify.draw``, and
    whose gradients are clipped by torchtitan's ``clip_grad_norm_``.

    Args:
        world: the world.
        trainer: the trainer, with one part of a model, without a pipeline.
    """
    import torchtitan.distributed.utils as utils

    model, dims = trainer.model_parts[0].to(world.dtype), trainer.parallel_dims
    draw(model, deviation=0.05)
    mesh = dims.get_mesh("batch") if dims.dp_enabled else None
    part, parts, group = (mesh.get_local_rank(), mesh.size(), mesh.get_group()) if mesh is not None else (0, 1, None)

    def backward(batch: Batch, tokens: Tensor) -> Tensor:
        ids = batch["input_ids"]
        labels = torch.cat([batch["labels"][:, 1:], torch.full_like(ids[:, :1], -100)], 1)
        inputs = {"input": ids, "positions": torch.arange(ids.shape[1]).expand(ids.shape).contiguous()}
        return whole(trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens))

    def clip() -> Tensor:
        options = {"foreach": True, "pp_mesh": None, "ep_enabled": dims.ep_enabled}
        return whole(utils.clip_grad_norm_(list(model.parameters()), trainer.config.training.max_norm, **options))

    return Setup(model, _step(world, backward, parts, group), trainer.optimizers, clip, part, parts)


# Experts of this rank, by the names of ``SequentialMLP`` and of ``TEGroupedMLP``.
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")


def megatron_setup(
    world: World, model: Any, optimizer: Any, forward_step: Callable[[Iterator[Batch], Any], Any]
) -> Setup:
    """Returns the training of a model of Megatron-Core by its own schedule, reduction of gradients, and clipping.

    Args:
        world: the world, on whose ranks Megatron's process groups are.
        model: the model inside of Megatron's ``DistributedDataParallel``, without a pipeline.
        optimizer: that of ``get_megatron_optimizer``, without ``use_distributed_optimizer``.
        forward_step: Megatron-LM's function of that name: it takes an iterator of micro-batches and the model, and
            returns the output and the function of its loss. The first number that this function logs is the loss.
    """
    from megatron.core import parallel_state as groups
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    part, parts = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()

    def step(batches: list[Batch]) -> dict[str, Tensor]:
        model.zero_grad_buffer()
        rows, length = batches[0]["input_ids"].shape
        options = {"forward_step_func": forward_step, "data_iterator": iter(batches), "model": [model]}
        options |= {"num_microbatches": len(batches), "micro_batch_size": rows, "seq_length": length}
        logged = get_forward_backward_func()(**options, forward_only=False)
        numbers = {}
        for name in logged[0]:
            # Each is a mean, or a sum and a count.
            value = torch.stack([each[name].detach().flatten() for each in logged]).sum(0)
            dist.all_reduce(value, group=groups.get_data_parallel_group())
            numbers[name] = value[0] / (value[1] if len(value) > 1 else len(batches) * parts)
        return {"loss": next(iter(numbers.values()))} | numbers

    def clip() -> Any:
        # The optimizer clips in its step, whose last part comes later.
        optimizer.step_with_ready_grads = lambda: True
        norm = optimizer.step()[1]
        del optimizer.step_with_ready_grads
        return norm

    def gathered(tensor: Tensor, group: Any) -> list[Tensor]:
        pieces = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        return pieces

    def full(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        tensors, expert = groups.get_tensor_model_parallel_group(), _EXPERT.fullmatch(name)
        tensors = groups.get_expert_tensor_parallel_group() if expert else tensors
        if tensors.size() > 1 and getattr(parameters.get(name), "tensor_model_parallel", False):
            # Each rank has its part of the gate and of the projection beside it.
            halves = 2 if "linear_fc1" in name and model.config.gated_linear_unit else 1
            dim = parameters[name].partition_dim
            parts_of_ranks = [each.chunk(halves, dim) for each in gathered(tensor, tensors)]
            tensor = torch.cat([each[half] for half in range(halves) for each in parts_of_ranks], dim)
        if expert is None:
            return {name: tensor.clone()}
        pieces = gathered(tensor, groups.get_expert_model_parallel_group())
        local = model.config.num_moe_experts // len(pieces)
        return {f"{expert[1]}{local * r + int(expert[2])}{expert[3]}": piece for r, piece in enumerate(pieces)}

    moves = SimpleNamespace(step=optimizer.step_with_ready_grads, zero_grad=optimizer.zero_grad)
    return Setup(model, step, moves, clip, part, parts, full=full)


def _step(world: World, backward: Callable[[Batch, Tensor], Tensor], parts: int, group: Any) -> Any:
    """Returns a step whose losses are divided by the labels of all parts, and that logs their sum."""

    def summed(value: Tensor) -> Tensor:
        if parts > 1:
            dist.all_reduce(value, group=group)
        return value

    def step(batches: list[Batch]) -> dict[str, Tensor]:
        tokens, loss = summed(torch.tensor(sum(map(count_labels, batches)))), torch.zeros((), dtype=world.dtype)
        for batch in batches:
            loss += backward(batch, tokens)
        return {"loss": summed(loss)}

    return step


@check(supports=("recomputation",))
def transformers_check(
    world: World, *, model: str, fsdp: int = 1, tp: int = 1, ep: int = 1, implementation: str, parallelize: Any = None
) -> Setup:
    """Builds a small causal language model of transformers, and its training on ``fsdp`` · ``tp`` ranks.

    Args:
        world: the world.
        model: a model type, such as ``qwen3_moe``.
        fsdp: ranks with data of their own.
        tp: ranks that share a batch.
        ep: ranks of an expert group.
        implementation: ``ddp``, ``fsdp``, ``tp``, or that of transformers' expert parallelism.
        parallelize: makes the plain model parallel instead.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    # Ranks end without a word of the locks of progress bars.
    logging.disable_progress_bar()
    options = {"attn_implementation": "eager", "dtype": world.dtype}
    is_ddp = world.size > 1 and not parallelize and implementation == "ddp"
    if world.size == 1 or parallelize or implementation in ("ddp", "fsdp"):
        config = AutoConfig.for_model(model)
        small = {name: value for name, value in _SMALL.items() if hasattr(config, name)}
        # Multi-head latent attention has keys of every head, and rotates qk_rope_head_dim numbers of each.
        small |= {"num_key_value_heads": 4, "head_dim": 8} if hasattr(config, "kv_lora_rank") else {}
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(model, **small), **options).train()
        draw(plain)
        # transformers keeps some parameters in float32, which holds what was drawn in float32.
        plain.to(world.dtype)
        if world.size == 1 and not (world.folder / "start").exists():
            plain.save_pretrained(world.folder / "start")
        if world.size > 1 and parallelize:
            parallelize(plain)
        elif world.size > 1 and implementation == "fsdp":
            for module in [*plain.model.layers, plain]:
                fully_shard(module, mesh=init_device_mesh("cpu", (world.size,)))
        return transformers_setup(world, DistributedDataParallel(plain) if is_ddp else plain)
    from transformers.distributed import DistributedConfig

    sizes: dict[str, Any] = {name: size for name, size in (("fsdp_size", fsdp), ("tp_size", tp)) if size > 1}
    sizes |= {"ep_size": ep, "ep_implementation": implementation} if ep > 1 else {}
    start, mesh = world.folder / "start", DistributedConfig(**sizes)
    parallel: Any = AutoModelForCausalLM.from_pretrained(start, distributed_config=mesh, **options)
    for module in parallel.modules() if ep == fsdp * tp and fsdp > 1 and world.dtype == torch.float64 else ():
        if any(p.dim() == 3 for p in module.parameters(recurse=False)) and isinstance(module, FSDPModule):
            # FSDP2 divides twice on the mesh of one rank that experts have, except in float32 and bfloat16.
            module.set_gradient_divide_factor(fsdp**0.5)
    group = parallel._mesh_manager.get_mesh("fsdp").get_group() if tp > 1 and fsdp > 1 else None
    return transformers_setup(world, parallel.train().to(world.dtype), part=world.rank // tp, parts=fsdp, group=group)
