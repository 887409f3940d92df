"""torchtitan's own ``Trainer`` on CPU ranks over gloo: what of torchtitan is patched for that, and data for it.

The patches touch what a CPU lacks, and nothing that computes but attention, which needs a GPU, and torchtitan's own
experts, which can be made float32. Importing this file patches torchtitan, for the rest of the process.

B sequences, L their length, N heads, H their width.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

# `make hosts` installs torchtitan into a folder of the environment.
HOSTS = str(Path(sys.prefix) / "hosts")
if HOSTS not in sys.path:
    sys.path.append(HOSTS)

import torchtitan.tools.utils as utils  # noqa: E402

# Before any other module of torchtitan copies them.
utils.device_type, utils.device_module = "cpu", torch.cpu

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.fsdp as fsdp  # noqa: E402
import torchtitan.distributed.utils as distributed  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import override  # noqa: E402
from torchtitan.config.override import derive  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

# Token ids of the data.
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
        q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
        transform = options.get("out_transform")
        if transform is None:
            y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return y.transpose(1, 2)
        groups = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return transform((scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2))


@override(target=FlexAttention.Config)
def flex(config: Any) -> Any:
    return derive(config, CpuAttention.Config)


@override(target=VarlenAttention.Config)
def varlen(config: Any) -> Any:
    return derive(config, CpuAttention.Config)


def experts_in_float32() -> AbstractContextManager[object]:
    """Makes torchtitan's experts compute in float32: they turn all that they multiply into bfloat16 by one method."""
    return patch.object(Tensor, "bfloat16", Tensor.float)


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


def on_cpu(config: Any, sequences: int, length: int) -> Any:
    """Returns a configuration of torchtitan, changed so that it trains on CPU ranks with ``Sequences`` in float32."""
    config.tokenizer, config.dataloader = Bytes.Config(), Sequences.Config()
    training = config.training
    training.local_batch_size, training.seq_len = sequences, length
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    # The default backend needs a newer FSDP than that of torch 2.13.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.debug.seed = 0
    attention = [f"{__name__}.{each}" for each in ("flex", "varlen")]
    config.override.imports = [*attention, *config.override.imports]
    return config


def forced_choices(router: Any, output: Any, choices_BLK: Tensor) -> Any:
    """Returns what ``router`` would return if it chose ``choices_BLK``, with the weights that it has for them, instead
    of ``output``.
    """
    scores_BLE = output[2]
    weights_BLK = scores_BLE.gather(-1, choices_BLK)
    if router.route_norm:
        weights_BLK = weights_BLK / (weights_BLK.sum(-1, keepdim=True) + 1e-20)
    return weights_BLK * router.route_scale, choices_BLK, scores_BLE


def named(trainer: Any) -> list[tuple[str, Any]]:
    """Returns the parameters of a trainer's model, whether or not its layers are checkpointed."""
    return [
        (name.replace("_checkpoint_wrapped_module.", ""), each)
        for name, each in trainer.model_parts[0].named_parameters()
    ]


@torch.no_grad()
def draw(model: nn.Module, deviation: float = 0.1) -> None:
    """Draws all parameters anew, alike for every sharding: torch's generators for shards are for GPUs only."""
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(parameter.shape, generator=generator) * (deviation if parameter.dim() > 1 else 0.01)
        whole += parameter.dim() == 1
        if isinstance(parameter, DTensor):
            sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(sharded.to_local())
        else:
            parameter.copy_(whole)
