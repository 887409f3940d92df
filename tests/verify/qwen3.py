"""Trainings of transformers' Qwen3-MoE: right, or with the arithmetic of a fault that a public report has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed import expert_parallel as ep
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

import moesys as ms
from moesys import verify
from moesys.verify.setup import clean_name, local, whole

VOCABULARY, E, COEFFICIENT = 64, 8, 0.1
WAYS: dict[str, dict[str, Any]] = {
    "all_to_all": {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
    "tp+ep all_to_all": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
    "tp+ep all_reduce": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    "tp": {"tp_size": 2},
}
PLANNED: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
STRATEGIES: dict[str, dict[str, Any]] = {
    "moesys ep": {},
    "moesys lent": {"sharding": ms.Ep(slots_per_rank=5), **PLANNED},
    "moesys fsep": {"sharding": ms.Fsep(slots_per_rank=5), **PLANNED},
}
HOSTS = ("ddp", "fsdp", *WAYS, *STRATEGIES)


def new_model(dtype: torch.dtype) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=E,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        router_aux_loss_coef=COEFFICIENT,
        max_position_embeddings=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager")
    verify.draw(model)
    return model.train()


def distributed(world: verify.World, host: str, fault: str) -> Any:
    """Returns the model of several ranks."""
    if host in WAYS:
        config = DistributedConfig(**WAYS[host])
        options: dict[str, Any] = {"attn_implementation": "eager", "dtype": world.dtype}
        model = AutoModelForCausalLM.from_pretrained(world.folder / "start", distributed_config=config, **options)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor") and "gate_up_proj" in module._parameters:
                # FSDP2 divides twice on a mesh of one rank, except in float32 and bfloat16.
                if world.dtype == torch.float64 and fault != "expert gradients divided twice":
                    module.set_gradient_divide_factor(world.size**0.5)
                if fault == "expert gradients x ep":
                    module.set_gradient_divide_factor(1.0)
        return model.train()
    model = new_model(world.dtype)
    if host == "ddp":
        if fault == "router not reduced":
            ignored = [name for name, _ in model.named_parameters() if "mlp.gate" in name]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return DistributedDataParallel(model)
    if host == "fsdp":
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world.size,)))
        return model
    ms.parallelize(model, ms.Strategy(name=host.split()[1], **STRATEGIES[host]))
    return model


def build(world: verify.World, host: str = "ddp", fault: str = "") -> verify.Setup:
    """Builds the plain model in one process, and the parallel one, with the fault, on several ranks."""
    situation, planted = world.situation, fault if world.size > 1 else ""
    part, parts = (0, 1) if host in WAYS and host != "all_to_all" else (world.rank, world.size)
    if world.size == 1:
        model: Any = new_model(world.dtype)
        if host in WAYS and not (world.folder / "start").exists():
            model.save_pretrained(world.folder / "start")
    else:
        model = distributed(world, host, planted)
    if planted == "experts swapped":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    local(parameter).copy_(local(parameter).flip(0))
    if situation.recomputation:
        getattr(model, "module", model).gradient_checkpointing_enable({"use_reentrant": False})
    switch, scale = [COEFFICIENT], parts * (parts if planted == "gradients summed" else 1)

    def step(batches: list[verify.Batch]) -> dict[str, Tensor]:
        """A trainer's step: global token mean plus the mean of the micro-batches' auxiliary losses."""
        tokens = torch.tensor(float(sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)))
        if parts > 1 and planted != "means of ranks":
            dist.all_reduce(tokens)
        tokens = tokens * (parts if planted == "means of ranks" else 1)
        logged, micro_batches = torch.zeros(2), len(batches)
        for index, batch in enumerate(batches):
            if planted == "tokens lost" and world.rank == 1 and index == 0:
                batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
            if planted == "last micro-batch":
                model.zero_grad()
            if planted == "same data on both ranks":
                dist.broadcast(batch["input_ids"], 0)
                dist.broadcast(batch["labels"], 0)
            labels = batch["labels"].roll(1, 1) if planted == "labels shifted" else batch["labels"]
            mask = batch["attention_mask"]
            out = model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False, output_router_logits=True)
            counted = None if planted == "padding counted" else mask
            auxiliary = qwen.load_balancing_loss_func(out.router_logits, E, 2, counted)
            nll = cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / tokens
            term = switch[0] * auxiliary / (micro_batches * parts)
            logged += torch.stack([(nll + term).detach(), auxiliary.detach() / (micro_batches * parts)])
            term = term.detach() if planted == "auxiliary loss detached" else term
            factors = {
                "auxiliary loss averaged twice": 1 / parts,
                "auxiliary loss not divided": micro_batches,
                "auxiliary loss by tokens": float(tokens),
            }
            loss = (nll + term * factors.get(planted, 1)) * scale
            if planted == "accumulated buffer scaled" and index:
                for parameter in model.parameters():
                    parameter.grad.div_(2)
            loss.backward()
        for name, parameter in model.named_parameters():
            if planted == "no gradient on a rank" and world.rank == 1 and name.endswith("layers.1.mlp.gate.weight"):
                parameter.grad = None
            if planted == "one expert doubled" and world.rank == 0 and "layers.1.mlp.experts.gate_up" in name:
                local(parameter.grad)[1].mul_(2)
            if planted == "gate and up exchanged" and "layers.0.mlp.experts.gate_up" in name:
                parameter.grad.copy_(parameter.grad.roll(parameter.shape[1] // 2, 1))
            if planted == "experts halved" and ".experts." in name:
                local(parameter.grad).mul_(0.5)
            if planted == "embedding drifts" and "embed_tokens" in name:
                parameter.grad.mul_(1.5 if world.rank else 0.5)
        if parts > 1 and planted != "logged by each rank":
            dist.all_reduce(logged)
        return {"loss": logged[0] * (2 if planted == "logged twice" else 1), "auxiliary loss": logged[1]}

    def clip() -> Tensor:
        is_local: Callable[[str], bool] = {
            "norm of shards": lambda name: True,
            "norm misses experts": lambda name: ".experts." in name,
            "mean of norms": lambda name: True,
        }.get(planted, lambda name: False)
        gradients = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        norms = [(local if is_local(name) else whole)(p.grad).double().norm() for name, p in gradients]
        norm = torch.stack(norms).norm()
        if planted == "mean of norms":
            dist.all_reduce(norm)
            norm /= world.size
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for _, parameter in gradients if planted != "clipping without effect" else ():
            local(parameter.grad).mul_(factor)
        return norm

    decay = 0.0 if planted == "no weight decay" else 0.01
    head = [p for name, p in model.named_parameters() if "lm_head" in name]
    rest = [p for name, p in model.named_parameters() if "lm_head" not in name]
    groups = [{"params": rest}, {"params": head, "lr": 2e-2 if planted == "rate of the head" else 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=decay, foreach=False)

    class Forgetful:
        def step(self) -> None:
            optimizer.step()
            for state in optimizer.state.values():
                state["exp_avg"].zero_()

        def zero_grad(self) -> None:
            optimizer.zero_grad()

    def save(folder: Any) -> None:
        state = {clean_name(name): whole(p) for name, p in model.named_parameters()}
        names = {p: clean_name(name) for name, p in model.named_parameters()}
        for p, each in optimizer.state.items():
            state |= {f"{names[p]}/{key}": whole(value) for key, value in each.items()}
        if planted == "head dropped on save":
            state = {name: value for name, value in state.items() if "lm_head" not in name}
        if planted == "saved in rank order":
            state = {n: t.roll(E // 2, 0) if ".experts." in n and t.dim() else t for n, t in state.items()}
        if planted == "moments dropped on save":
            state = {name: value for name, value in state.items() if "exp_avg" not in name}
        if world.rank == 0:
            folder.mkdir(exist_ok=True)
            torch.save(state, folder / "state.pt")
        dist.barrier()

    def load(folder: Any) -> None:
        state = torch.load(folder / "state.pt")

        def put(tensor: Tensor, value: Tensor) -> None:
            from torch.distributed.tensor import DTensor, distribute_tensor

            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            local(tensor).copy_(local(value))

        with torch.no_grad():
            for name, p in model.named_parameters():
                name = clean_name(name)
                if name in state:
                    put(p, state[name])
                moments = {key: state.get(f"{name}/{key}") for key in ("exp_avg", "exp_avg_sq")}
                if f"{name}/step" in state:
                    optimizer.state[p] = {"step": state[f"{name}/step"].clone()}
                    for key, value in moments.items():
                        optimizer.state[p][key] = torch.zeros_like(p)
                        if value is not None:
                            put(optimizer.state[p][key], value)

    def stepped(batches: list[verify.Batch]) -> dict[str, Tensor]:
        with patch.object(*PATCHES[planted]) if planted in PATCHES else nullcontext():
            return step(batches)

    setup = verify.Setup(model, stepped, optimizer, clip, part if world.size > 1 else 0, parts if world.size > 1 else 1)
    setup.terms = {"auxiliary loss": lambda on: switch.__setitem__(0, COEFFICIENT * on)}
    setup.save, setup.load = save, load
    if planted == "moments reset":
        setup.optimizer = Forgetful()
    if world.size == 1:
        parts = 1
    return setup


build.check_options = verify.setup.CheckOptions(supports=("recomputation",))  # type: ignore[attr-defined]


# --- faults inside of a host ------------------------------------------------------------------------------------------

DISPATCH, COMBINE = ep.AllToAllEP._dispatch_tokens, ep.AllToAllEP._combine_tokens
ROUTE = qwen.Qwen3MoeTopKRouter.forward


def _unnormalised(self: Any, x: Any) -> Any:
    with patch.object(self, "norm_topk_prob", False):
        return ROUTE(self, x)


def _noisy(self: Any, x: Any) -> Any:
    return ROUTE(self, x * (1 + (torch._C._current_graph_task_id() != -1) * 0.5 * torch.rand_like(x)))


def _dropping(self: Any, y: Any, state: Any) -> Any:
    return COMBINE(self, y.index_fill(0, torch.arange(3), 0.0) if dist.get_rank() == 1 else y, state)


def _biased(self: Any, x: Any) -> Any:
    logits, scores, indices = ROUTE(self, x)
    return logits, scores, (indices + 1) % E


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "router detached": (ep.AllToAllEP, "_dispatch_tokens", lambda self, x, i, w: DISPATCH(self, x, i, w.detach())),
    "weights twice": (
        ep.AllToAllEP,
        "_combine_tokens",
        lambda self, y, s: COMBINE(self, y, s._replace(top_k_weights=s.top_k_weights**2)),
    ),
    "tokens dropped": (ep.AllToAllEP, "_combine_tokens", _dropping),
    "no sum in backward": (ep, "_AllReduceBackward", SimpleNamespace(apply=lambda x, group: x)),
    "top-k not normalised": (qwen.Qwen3MoeTopKRouter, "forward", _unnormalised),
    "other experts": (qwen.Qwen3MoeTopKRouter, "forward", _biased),
    "recomputation draws again": (qwen.Qwen3MoeTopKRouter, "forward", _noisy),
}
