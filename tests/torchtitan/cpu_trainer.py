"""torchtitan's own ``Trainer`` on CPU ranks (``benchmarks.harness.cpu_torchtitan``): small models of tests, and what
they keep of a training.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from titan_runs import Run, Trained
from torch import Tensor
from torch.distributed.tensor import DTensor

# Before any other module of torchtitan, as it patches what they copy.
from benchmarks.harness.cpu_torchtitan import (
    VOCABULARY,
    draw,
    experts_in_float32,
    forced_choices,
    named,
    on_cpu,
)

import torchtitan.distributed.utils as distributed  # isort: skip
import torchtitan.trainer  # isort: skip
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.config.override import OverrideConfig, derive, parse_cli_imports
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, MoE

from moesys.moe.experts import experts_of


@contextlib.contextmanager
def experts_in_float64() -> Iterator[None]:
    """Makes torchtitan's experts compute in float64, which torch's grouped product does not take."""

    def grouped_mm(_: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        rows = A[: offs[-1]].tensor_split(offs[:-1].cpu().long())
        return torch.cat([*map(torch.matmul, rows, B_t), A[offs[-1] :].new_zeros(len(A) - offs[-1], B_t.shape[-1])])

    with patch.object(Tensor, "bfloat16", Tensor.double), patch.object(GroupedExperts, "_grouped_mm", grouped_mm):
        yield


# What torchtitan's experts, which turn all that they multiply into bfloat16, compute in, by the dtype of a run.
EXPERTS_IN = {"bfloat16": contextlib.nullcontext, "float32": experts_in_float32, "float64": experts_in_float64}


def config_of(run: Run) -> Any:
    """Returns a debug configuration of torchtitan, for CPUs and with one or two layers."""
    logging.disable(logging.WARNING)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    if run.command:
        config = ConfigManager().parse_args(list(run.command))
    else:
        registry = importlib.import_module(f"torchtitan.models.{run.model}.config_registry")
        names = {"qwen3": "qwen3_moe_debug"}
        config = getattr(registry, names.get(run.model, f"{run.model}_debugmodel"))()
        config.parallelism.expert_parallel_degree = 2
        config.checkpoint.enable = run.folder is not None
        config.override = OverrideConfig(imports=parse_cli_imports(list(run.overrides)))
    if run.model == "qwen3" and not run.command:
        config.model_spec.model = _small_qwen3(dict(run.sizes))
    else:
        layers = config.model_spec.model.layers
        config.model_spec.model.layers = layers[: 1 if run.command else 2]
    # What a command says is what its reader has.
    backend = config.parallelism.spmd_backend
    on_cpu(config, run.sequences, 16)
    if run.command:
        config.parallelism.spmd_backend = backend
    config.optimizer = default_adamw(lr=3e-3, eps=run.eps)
    training = config.training
    training.steps, training.mixed_precision_param = run.steps, run.dtype
    if run.dtype == "float64":
        # torchtitan has no name for it.
        TORCH_DTYPE_MAP["float64"] = torch.float64
        training.mixed_precision_reduce = "float64"
    training.global_batch_size = run.accumulate * training.local_batch_size * dist.get_world_size()
    config.checkpoint.interval = 3
    config.dump_folder = run.folder or "."
    config.metrics.log_freq = 1
    for path, value in run.settings.items():
        *outer, name = path.split(".")
        setattr(functools.reduce(getattr, outer, config), name, value)
    if isinstance(config.activation_checkpoint, str):
        config.activation_checkpoint = {"selective": SelectiveAC, "full": FullAC}[config.activation_checkpoint].Config()
    return config


def _small_qwen3(others: dict[str, Any]) -> Any:
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear

    sizes: dict[str, Any] = {"n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    sizes |= {"moe_hidden_dim": 16, "num_experts": 8, "top_k": 2, "moe_comm_backend": "standard"} | others
    rope = CosSinRoPE.Config(dim=sizes["head_dim"], max_seq_len=64, theta=1e4)
    layers = qwen3._build_qwen3_moe_layers(**sizes, attn_backend="flex", rope=rope)
    dim = sizes["dim"]
    return qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )


def train(run: Run) -> Trained:
    """Trains on all ranks in torchtitan's own loop."""
    trainer = config_of(run).build()
    draw(trainer.model_parts[0])
    trained = Trained()
    layers = [each for each in trainer.model_parts[0].modules() if isinstance(each, MoE)]
    newest: list[Tensor] = []
    for index, layer in enumerate(layers):
        layer.router.register_forward_hook(functools.partial(_force, run, trained, index))
        layer.routed_experts.register_forward_pre_hook(functools.partial(_keep_choices, newest))
    clip, log = distributed.clip_grad_norm_, trainer.metrics_processor.log

    def clip_and_keep(parameters: Any, *args: Any, **options: Any) -> Any:
        if not trained.norms:
            trained.gradients = {name: _whole(each.grad) for name, each in named(trainer) if each.grad is not None}
        norm = clip(parameters, *args, **options)
        trained.norms.append(float(norm))
        trained.choices.append(newest.copy())
        plans = [each.last_plan for each in experts_of(trainer.model_parts[0])]
        trained.held.append([plan.layout.expert_RS.copy() for plan in plans if plan is not None])
        newest.clear()
        return norm

    def log_and_keep(step: int, loss: float, *args: Any, **options: Any) -> None:
        trained.losses.append(loss)
        log(step, loss, *args, **options)

    torchtitan.trainer.dist_utils.clip_grad_norm_, trainer.metrics_processor.log = clip_and_keep, log_and_keep
    # Rank 0 would wait 2 s for the others.
    torchtitan.trainer.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    try:
        with EXPERTS_IN[run.dtype]():
            trainer.train()
    finally:
        torchtitan.trainer.dist_utils.clip_grad_norm_ = clip
        trainer.close()
    trained.parameters = {name: _whole(each) for name, each in named(trainer)}
    return trained


def errors_under_muon(run: Run) -> dict[str, float]:
    """Trains with ``moesys.torchtitan.muon``, and returns how far each parameter is from torch's own optimizers."""
    from muon_oracle import Oracle

    trainer = config_of(run).build()
    model = trainer.model_parts[0]
    draw(model)
    (optimizer,) = trainer.optimizers.optimizers
    oracle = Oracle(model, _matrices_of, {"eps": 1e-3}, torch.float32)
    step = optimizer.step

    def both(*args: Any, **options: Any) -> Any:
        # torchtitan's schedule begins with a warm-up.
        for of, group in ((oracle.muon, optimizer.param_groups[0]), (oracle.adamw, optimizer.param_groups[-1])):
            of.param_groups[0]["lr"] = group["lr"]
        oracle.step()
        return step(*args, **options)

    optimizer.step = both
    try:
        with EXPERTS_IN[run.dtype]():
            trainer.train()
    finally:
        trainer.close()
    return oracle.errors()


def _matrices_of(name: str, tensor: Tensor) -> list[Tensor] | None:
    if tensor.ndim == 3:
        return [*tensor]
    hidden = name.startswith("layers.") and name.endswith(".weight") and "router" not in name
    return [tensor] if hidden and tensor.ndim == 2 else None


def _force(run: Run, trained: Trained, index: int, router: Any, _: Any, output: Any) -> Any:
    """Gives a layer the choices of ``run.forced``, with the weights that its router has for them."""
    if run.forced is None:
        return output
    chosen_TK = run.forced[dist.get_rank()].choices[len(trained.norms)][index]
    return forced_choices(router, output, chosen_TK.view(*output[2].shape[:-1], -1))


def _keep_choices(newest: list[Tensor], _: Any, inputs: Any) -> None:
    # A recomputation is in a backward.
    if torch._C._current_graph_task_id() < 0:
        newest.append(_local(inputs[2]).flatten(0, -2).clone())


def same_outputs_of_flat_tokens() -> bool:
    """Returns whether one rank's experts make the same of tokens [T, D], as torchtitan has them since 0.3, as of
    [B, L, D].
    """
    from moesys.torchtitan import experts

    layer = experts(_small_qwen3({}).layers[0].moe.routed_experts, strategy={"name": "ep"}).build()
    layer.init_states()
    draw(layer)
    x_BLD, weights_BLK = torch.randn(2, 3, 32), torch.rand(2, 3, 2)
    choices_BLK = torch.rand(2, 3, 8).topk(2).indices
    batched = x_BLD, weights_BLK, choices_BLK
    y_BLD, y_TD = (layer(*each, None) for each in (batched, [tensor.flatten(0, 1) for tensor in batched]))
    return y_TD.shape == (6, 32) and torch.equal(y_BLD.flatten(0, 1), y_TD)


class PackedExperts(GroupedExperts):
    """Experts as somebody else keeps them."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass


def messages_of_models() -> list[str]:
    """Returns the errors for experts of another class, and for a balancer of routers."""
    import moesys as ms
    from moesys.torchtitan import experts

    config = _small_qwen3({}).layers[0].moe
    router = config.build()
    config.routed_experts.inner_experts = derive(config.routed_experts.inner_experts, PackedExperts.Config)
    found = []
    for refused in (
        lambda: experts(config.routed_experts, strategy={"name": "ep"}),
        lambda: ms.QuantileBalancer(router),
    ):
        try:
            refused()
        except ValueError as error:
            found.append(str(error))
    return found


def train_in(folder: str, run: Run) -> Trained:
    """Trains in ``folder``, of which Python imports modules too."""
    sys.path.insert(0, folder)
    with contextlib.chdir(folder):
        return train(run)


def messages(runs: list[Run]) -> list[str]:
    """Returns the error of each run on this rank, when its trainer is made or trains."""
    found = []
    for run in runs:
        try:
            config_of(run).build().train()
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
