"""torchtitan's own ``Trainer`` on CPU ranks over gloo: what of torchtitan is patched for that, small models and data.

The patches touch what a CPU lacks, and nothing that computes but attention, which needs a GPU, and torchtitan's own
experts, which are made float32 unless mixed precision asks for bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from titan_runs import Run, Trained
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

# Before any other module of torchtitan copies them.
utils.device_type, utils.device_module = "cpu", torch.cpu

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.fsdp as fsdp  # noqa: E402
import torchtitan.distributed.utils as distributed  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager, override  # noqa: E402
from torchtitan.config.override import OverrideConfig, derive, parse_cli_imports  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

from moesys.moe.experts import experts_of  # noqa: E402

VOCABULARY = 64


class _Monitor:
    """The memory of a device, which ``torch.cpu`` has no words for."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = _Monitor
# gloo's barrier takes no ids of devices.
distributed.set_pg_timeouts = lambda timeout, parallel_dims: None
_without_division = fsdp.disable_fsdp_gradient_division


def _sums_without_division(model: nn.Module) -> None:
    """Sums gradients by SUM: a factor of 1.0 is PREMUL_SUM, which gloo does not have."""
    _without_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = _sums_without_division


class CpuAttention(Module):
    """Causal attention in plain torch instead of compiled kernels, with the names of arguments that shardings use."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, scale: Any = None, **options: Any) -> Any:
        groups = q_BLNH.shape[2] // k_BLNH.shape[2]
        q, k, v = q_BLNH, *(each.repeat_interleave(groups, dim=2) for each in (k_BLNH, v_BLNH))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2)
        transform = options.get("out_transform")
        return y if transform is None else transform(y, scores.logsumexp(-1).transpose(1, 2))


@override(target=FlexAttention.Config)
def flex(config: Any) -> Any:
    return derive(config, CpuAttention.Config)


@override(target=VarlenAttention.Config)
def varlen(config: Any) -> Any:
    return derive(config, CpuAttention.Config)


def _grouped_mm(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Multiplies the rows of each expert in their dtype: the operator of torch takes bfloat16 only."""
    ends = offs.tolist()
    rows = [A[start:end] @ B for start, end, B in zip([0, *ends], ends, B_t, strict=False)]
    return torch.cat([*rows, A.new_zeros(len(A) - ends[-1], B_t.shape[-1])])


@contextlib.contextmanager
def _experts_in_float32() -> Iterator[None]:
    """Makes torchtitan's experts compute in float32: they turn all that they multiply into bfloat16 by one method."""
    kept = GroupedExperts._grouped_mm, Tensor.bfloat16
    GroupedExperts._grouped_mm, Tensor.bfloat16 = _grouped_mm, Tensor.float
    try:
        yield
    finally:
        GroupedExperts._grouped_mm, Tensor.bfloat16 = kept


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, *, tokenizer_path: str | None = None) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Sequences(BaseDataLoader):
    """Sequences that a model can learn: the same ones in each step, on however many ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Any, *, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **others: Any
    ) -> None:
        self._first, self._stride, self._next = dp_rank * local_batch_size, dp_world_size * local_batch_size, 0
        self._size, self._length = local_batch_size, seq_len

    def __iter__(self) -> Any:
        while True:
            first = self._next * self._stride + self._first
            self._next += 1
            rows = torch.arange(first, first + self._size)[:, None]
            ids = (7 * rows + (1 + rows % 5) * torch.arange(self._length + 1)) % VOCABULARY
            positions = torch.arange(self._length).expand(self._size, -1).contiguous()
            yield {"input": ids[:, :-1].contiguous(), "positions": positions}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


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
    config.tokenizer, config.dataloader = Bytes.Config(), Sequences.Config()
    config.optimizer = default_adamw(lr=3e-3, eps=run.eps)
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = run.sequences, 16, run.steps
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    training.global_batch_size = run.accumulate * training.local_batch_size * dist.get_world_size()
    # The default backend needs a newer FSDP than that of torch 2.13.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.checkpoint.interval = 3
    config.dump_folder = run.folder or "."
    config.metrics.log_freq = 1
    config.debug.seed = 0
    for path, value in run.settings.items():
        *outer, name = path.split(".")
        setattr(functools.reduce(getattr, outer, config), name, value)
    if isinstance(config.activation_checkpoint, str):
        config.activation_checkpoint = {"selective": SelectiveAC, "full": FullAC}[config.activation_checkpoint].Config()
    config.override.imports = ["cpu_trainer.flex", "cpu_trainer.varlen", *config.override.imports]
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
    half = trainer.config.training.mixed_precision_param == "bfloat16"
    try:
        with contextlib.nullcontext() if half else _experts_in_float32():
            trainer.train()
    finally:
        torchtitan.trainer.dist_utils.clip_grad_norm_ = clip
        trainer.close()
    trained.parameters = {name: _whole(each) for name, each in named(trainer)}
    return trained


def _force(run: Run, trained: Trained, index: int, router: Any, _: Any, output: Any) -> Any:
    """Gives a layer the choices of ``run.forced``, with the weights that its router has for them."""
    if run.forced is None:
        return output
    scores_BLE = output[2]
    choices_BLK = run.forced[dist.get_rank()].choices[len(trained.norms)][index].view(*scores_BLE.shape[:-1], -1)
    weights_BLK = scores_BLE.gather(-1, choices_BLK)
    if router.route_norm:
        weights_BLK = weights_BLK / (weights_BLK.sum(-1, keepdim=True) + 1e-20)
    return weights_BLK * router.route_scale, choices_BLK, scores_BLE


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


def message_for_packed_experts() -> str:
    from moesys.torchtitan import experts

    config = _small_qwen3({}).layers[0].moe.routed_experts
    config.inner_experts = derive(config.inner_experts, PackedExperts.Config)
    try:
        experts(config, strategy={"name": "ep"})
    except ValueError as error:
        return str(error)
    return "no error"


def named(trainer: Any) -> list[tuple[str, Any]]:
    return [
        (name.replace("_checkpoint_wrapped_module.", ""), each)
        for name, each in trainer.model_parts[0].named_parameters()
    ]


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Draws all parameters anew, alike for every sharding: torch's generators for shards are for GPUs only."""
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.dim() > 1 else 0.01)
        whole += parameter.dim() == 1
        if isinstance(parameter, DTensor):
            sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(sharded.to_local())
        else:
            parameter.copy_(whole)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
